//! Several sends and receives at once.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Work;
use super::work::Part;
use crate::error::Failed;
use crate::exec::Direction;
use crate::types::Rank;

/// The direction of a message, and what it is matched by: peer and tag.
#[derive(Clone, Copy)]
pub(super) struct Envelope {
    pub(super) direction: Direction,
    pub(super) peer: Rank,
    pub(super) tag: u32,
}

/// One message of a batch.
#[derive(Debug)]
pub enum Message<B> {
    /// Send `buf` to a rank.
    Send {
        /// The data to send. The buffer comes back when it may be changed again.
        buf: B,
        /// The rank that receives.
        to: Rank,
        /// A send matches a receive if each names the other's rank, and both have the same tag. Of several that match, the first send goes to
        /// the first receive called, and so on.
        tag: u32,
    },
    /// Receive into `buf` from a rank.
    Recv {
        /// The buffer to receive into. Its length and type must be those of the sender's buffer.
        buf: B,
        /// The rank that sends.
        from: Rank,
        /// A send matches a receive if each names the other's rank, and both have the same tag. Of several that match, the first send goes to
        /// the first receive called, and so on.
        tag: u32,
    },
}

impl<B> Message<B> {
    /// Splits the message into what it is matched by, and the buffer.
    pub(super) fn parts(self) -> (Envelope, B) {
        match self {
            Message::Send { buf, to, tag } => (Envelope { direction: Direction::Send, peer: to, tag }, buf),
            Message::Recv { buf, from, tag } => {
                (Envelope { direction: Direction::Recv, peer: from, tag }, buf)
            }
        }
    }
}

/// Messages that are in flight together: a future that gives back all buffers, in the order of the messages.
#[must_use = "the buffers come back through it"]
pub struct Batch<B>(Vec<Part<B>>);

impl<B> fmt::Debug for Batch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.0.iter().filter(|part| matches!(part, Part::Running(_))).count();
        write!(f, "Batch({in_flight} in flight)")
    }
}

impl<B> Unpin for Batch<B> {}

impl<B> Batch<B> {
    pub(super) fn new(works: impl Iterator<Item = Work<B>>) -> Batch<B> {
        Batch(works.map(Part::Running).collect())
    }

    /// Blocks until all messages are finished.
    ///
    /// # Errors
    /// The error of the first message, in the order given, that failed; with a buffer or `None` for each message. `None`: it does not come back.
    pub fn wait(self) -> Result<Vec<B>, Failed<Vec<Option<B>>>> {
        let mut error = None;
        let buf = |part: Part<B>| match part.outcome() {
            Ok(buf) => Some(buf),
            Err(failed) => {
                error.get_or_insert(failed.error);
                failed.buf
            }
        };
        let bufs: Vec<_> = self.0.into_iter().map(buf).collect();
        match error {
            Some(error) => Err(Failed { buf: Some(bufs), error }),
            None => Ok(bufs.into_iter().flatten().collect()),
        }
    }
}

impl<B> Future for Batch<B> {
    type Output = Result<Vec<B>, Failed<Vec<Option<B>>>>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.0.iter_mut().fold(true, |done, part| part.poll(cx) & done) {
            return Poll::Ready(Batch(std::mem::take(&mut self.0)).wait());
        }
        Poll::Pending
    }
}
