//! Several sends and receives at once.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Work;
use crate::error::{Error, Failed};
use crate::exec::Direction;
use crate::types::Rank;

/// One message of a batch.
#[derive(Debug)]
pub enum Message<B> {
    /// Send `buf` to a rank.
    Send {
        /// What to send; comes back when it may be changed again.
        buf: B,
        /// To whom.
        to: Rank,
        /// Messages are matched by peer, tag and order.
        tag: u32,
    },
    /// Receive into `buf` from a rank.
    Recv {
        /// Where to; its length and type must be the sender's.
        buf: B,
        /// From whom.
        from: Rank,
        /// Messages are matched by peer, tag and order.
        tag: u32,
    },
}

impl<B> Message<B> {
    /// Direction, peer, tag, buffer.
    pub(super) fn parts(self) -> (Direction, Rank, u32, B) {
        match self {
            Message::Send { buf, to, tag } => (Direction::Send, to, tag, buf),
            Message::Recv { buf, from, tag } => (Direction::Recv, from, tag, buf),
        }
    }
}

/// Messages in flight together: a future of all buffers, in the order given.
#[must_use = "the buffers come back through it"]
pub struct Batch<B> {
    works: Vec<Option<Work<B>>>,
    done: Vec<Option<B>>,
    error: Option<Error>,
}

impl<B> fmt::Debug for Batch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({} in flight)", self.works.iter().flatten().count())
    }
}

impl<B> Unpin for Batch<B> {}

impl<B> Batch<B> {
    pub(crate) fn new(works: Vec<Work<B>>) -> Batch<B> {
        let done = works.iter().map(|_| None).collect();
        Batch { works: works.into_iter().map(Some).collect(), done, error: None }
    }

    fn settle(&mut self, i: usize, result: Result<B, Failed<B>>) {
        self.works[i] = None;
        match result {
            Ok(buf) => self.done[i] = Some(buf),
            Err(failed) => {
                self.done[i] = failed.buf;
                self.error.get_or_insert(failed.error);
            }
        }
    }

    fn outcome(&mut self) -> Result<Vec<B>, Failed<Vec<Option<B>>>> {
        let done = std::mem::take(&mut self.done);
        match self.error.take() {
            Some(error) => Err(Failed { buf: Some(done), error }),
            None => Ok(done.into_iter().flatten().collect()),
        }
    }

    /// Blocks until all are finished.
    ///
    /// # Errors
    /// The first failure, with the buffers that may be had.
    pub fn wait(mut self) -> Result<Vec<B>, Failed<Vec<Option<B>>>> {
        for i in 0..self.works.len() {
            if let Some(work) = self.works[i].take() {
                let result = work.wait();
                self.settle(i, result);
            }
        }
        self.outcome()
    }
}

impl<B> Future for Batch<B> {
    type Output = Result<Vec<B>, Failed<Vec<Option<B>>>>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut pending = false;
        for i in 0..self.works.len() {
            let Some(work) = &mut self.works[i] else { continue };
            match Pin::new(work).poll(cx) {
                Poll::Ready(result) => self.settle(i, result),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(self.outcome()) }
    }
}
