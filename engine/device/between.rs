//! Copies from device memory to device memory: on one device, and from one to another.

use std::sync::Arc;

use allstream_sys::cuda::{Cuda, CudaError};

use super::buf::{DeviceBuf, settle_from};
use super::stream::DeviceStream;
use super::transfer::{Transfer, refused_in_capture};
use crate::error::{Error, Failed};
use crate::types::Element;

const DOING: &str = "copy between device buffers";

/// The source of a copy, and its target.
type Pair<T> = (DeviceBuf<T>, DeviceBuf<T>);

impl<T: Element> DeviceBuf<T> {
    /// Copies another buffer of the same length into this one. It may be on another device.
    ///
    /// The copy is put on this buffer's stream, which first waits for what the other's stream holds now. Both buffers come
    /// back once the copy is done: first the source, then this one. The devices need not reach each other's memory: if they
    /// do not, the driver copies through the host's memory.
    ///
    /// ```
    /// use allstream::cuda::{Device, DeviceBuf, DeviceStream};
    /// # async fn copy() -> Result<(), allstream::Error> {
    /// let here = DeviceStream::new(&Device::new(0)?)?;
    /// let there = DeviceStream::new(&Device::new(1)?)?;
    /// let weights = DeviceBuf::<f32>::zeroed(&here, 1000)?;
    /// let (weights, copied) = DeviceBuf::zeroed(&there, 1000)?.copy_from(weights).await?;
    /// # drop((weights, copied)); Ok(()) }
    /// # let _ = copy;
    /// ```
    ///
    /// # Errors
    /// [`Failed`], which has both buffers if the device cannot touch them any more. [`Error::Invalid`]: the lengths differ, or one
    /// of the streams is being captured. [`Error::Cuda`]. The error of the failed collective, if the source's contents come from one.
    pub fn copy_from(self, from: DeviceBuf<T>) -> Transfer<(DeviceBuf<T>, DeviceBuf<T>)> {
        if from.len() != self.len() {
            let problem = format!("the source has {} elements, the target {}", from.len(), self.len());
            let error = Error::invalid("copy_from", problem);
            return Transfer::ended(Err(Failed { buf: Some((from, self)), error }));
        }
        let stream = self.stream().clone();
        match from.check().and_then(|()| line_up(&from, &stream)) {
            Ok(()) => Transfer::start(&stream, (from, self), DOING, put, |result, held| {
                settle_from(result, held).map(|(from, mut to)| {
                    to.overwritten();
                    (from, to)
                })
            }),
            Err(error) => Transfer::ended(Err(Failed { buf: Some((from, self)), error })),
        }
    }

    /// Copies this buffer into a new one, on a stream of this device or of another one. Gives back this buffer, then the copy.
    ///
    /// As [`copy_from`](Self::copy_from), but into new memory.
    ///
    /// # Errors
    /// [`Failed`], which has this buffer if the device cannot touch it any more. [`Error::Invalid`]: one of the streams is being captured.
    /// [`Error::Cuda`], also if there is no memory for the copy. The error of the failed collective, if this buffer's contents come from one.
    pub fn copy_to(self, stream: &DeviceStream) -> Transfer<(DeviceBuf<T>, DeviceBuf<T>), DeviceBuf<T>> {
        let fit = self.check().and_then(|()| refused_in_capture(stream, DOING));
        let made = fit.and_then(|()| DeviceBuf::raw(stream, self.len()));
        match made.and_then(|to| line_up(&self, stream).map(|()| to)) {
            Ok(to) => Transfer::start(stream, (self, to), DOING, put, |result, held| {
                let from = |failed: Failed<Pair<T>>| failed.buf.map(|(from, _)| from);
                settle_from(result, held).map_err(|failed| {
                    let error = failed.error.clone();
                    Failed { buf: from(failed), error }
                })
            }),
            Err(error) => Transfer::ended(Err(Failed { buf: Some(self), error })),
        }
    }
}

/// Makes `stream` wait for what the stream of `from` holds now.
fn line_up<T: Element>(from: &DeviceBuf<T>, stream: &DeviceStream) -> Result<(), Error> {
    if from.stream() == stream || from.is_empty() {
        return Ok(());
    }
    // An event of a stream that is being captured belongs to the graph: a stream that waits for it is captured from then on, too.
    refused_in_capture(from.stream(), DOING)?;
    refused_in_capture(stream, DOING)?;
    stream.wait_for_stream(from.stream())
}

/// Puts the copy on the target's stream, which has been made to wait for the source's. The lengths are equal.
fn put<T: Element>(cuda: &Cuda, (from, to): &mut Pair<T>) -> Result<(), CudaError> {
    let (target, source, bytes) = (to.as_ptr(), from.as_ptr(), to.bytes());
    let raw = to.stream().0.raw();
    if bytes == 0 {
        return Ok(());
    }
    if Arc::ptr_eq(&to.memory.context, &from.memory.context) {
        // SAFETY: both buffers have `bytes` bytes, in this one context. Nobody else has them, and this stream comes after
        // what their streams held. `Transfer` holds both until the copy is done.
        return unsafe { cuda.memcpy_dtod_async(target, source, bytes, *raw) };
    }
    let contexts = (to.memory.context.raw(), from.memory.context.raw());
    // SAFETY: as above, but in two contexts: each address is of the context beside it, which its buffer keeps.
    unsafe { cuda.memcpy_peer_async(target, contexts.0, source, contexts.1, bytes, *raw) }
}
