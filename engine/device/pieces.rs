//! Cutting device buffers and joining them, as [`split`](crate::split) does on the host.

use super::buf::DeviceBuf;
use crate::error::{Error, Failed};
use crate::mem::split::{beyond, gaps, misfit};
use crate::types::Element;
use std::sync::Arc;

impl<T: Element> DeviceBuf<T> {
    /// Cuts the buffer into consecutive ones of these lengths, which may be 0 and add up to its own.
    ///
    /// Nothing is copied. Each is a buffer by itself: it can be moved to another stream, be in flight, and be dropped
    /// alone. The memory goes back when the last one is gone and all their streams have come to that point.
    ///
    /// # Errors
    /// [`Failed`] with the buffer (always `Some`) and [`Error::Invalid`]: there are no lengths, or they do not add up.
    pub fn split(self, lens: &[usize]) -> Result<Vec<DeviceBuf<T>>, Failed<DeviceBuf<T>>> {
        if let Some(problem) = misfit(lens, self.len()) {
            return Err(Failed { buf: Some(self), error: Error::invalid("split", problem) });
        }
        let mut at = self.range.start;
        let pieces = lens.iter().map(|len| {
            at += len;
            self.sibling(at - len..at)
        });
        let pieces = pieces.collect();
        self.replaced();
        Ok(pieces)
    }

    /// Cuts the buffer in two: the elements `0..mid`, and the others. Either may have none.
    ///
    /// # Errors
    /// [`Failed`] with the buffer (always `Some`) and [`Error::Invalid`]: `mid` lies beyond the end.
    pub fn split_at(self, mid: usize) -> Result<[DeviceBuf<T>; 2], Failed<DeviceBuf<T>>> {
        if let Some(problem) = beyond(mid, self.len()) {
            return Err(Failed { buf: Some(self), error: Error::invalid("split_at", problem) });
        }
        let at = self.range.start + mid;
        let two = [self.sibling(self.range.start..at), self.sibling(at..self.range.end)];
        self.replaced();
        Ok(two)
    }

    /// Where this buffer starts in the one that was cut first, in elements.
    pub fn offset(&self) -> usize {
        self.range.start
    }

    /// Puts the parts of a buffer together again, given in any order. Nothing is copied. The result is on the stream of
    /// the part given first; that stream waits for what the other parts' streams hold now, and the host does not wait.
    ///
    /// # Errors
    /// [`Failed`] with the parts, in the order of their offsets: [`Error::Invalid`], they are not all of one buffer or
    /// not all of it; [`Error::Cuda`].
    pub fn join(
        parts: impl IntoIterator<Item = DeviceBuf<T>>,
    ) -> Result<DeviceBuf<T>, Failed<Vec<DeviceBuf<T>>>> {
        let mut parts: Vec<_> = parts.into_iter().collect();
        let stream = parts.first().map(|part| part.stream().clone());
        parts.sort_by_key(|part| (part.range.start, part.range.end));
        let problem = unfit(&parts).map(|problem| Error::invalid("join", problem));
        let follow = |stream| parts.iter().try_for_each(|part| part.follow(stream));
        match (problem, stream) {
            (None, Some(stream)) => match follow(&stream).map(|()| parts[0].whole(&stream)) {
                Ok(whole) => {
                    whole.depend_like(&parts);
                    parts.into_iter().for_each(DeviceBuf::replaced);
                    Ok(whole)
                }
                Err(error) => Err(Failed { buf: Some(parts), error }),
            },
            (problem, _) => {
                let error = problem.unwrap_or_else(|| Error::invalid("join", "no parts were given"));
                Err(Failed { buf: Some(parts), error })
            }
        }
    }

    fn whole(&self, stream: &super::DeviceStream) -> DeviceBuf<T> {
        let mut whole = self.sibling(0..self.memory.len);
        whole.set_stream(stream);
        whole
    }
}

/// Why these parts, in order, are not one whole buffer.
fn unfit<T: Element>(parts: &[DeviceBuf<T>]) -> Option<String> {
    let first = parts.first()?;
    if let Some(other) = parts.iter().position(|part| !Arc::ptr_eq(&part.memory, &first.memory)) {
        return Some(format!("part {other}, by offset, is of another buffer than part 0"));
    }
    let len = first.memory.len;
    let missing = gaps(parts.iter().map(|part| part.range.clone()), len)?;
    Some(format!("of the buffer's {len} elements {missing} are in no part that was given"))
}
