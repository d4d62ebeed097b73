//! Messages between two ranks. What the calls mean is documented on [`Comm`](super::Comm).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Work;
use super::batch::{Batch, Message};
use super::call::{Call, given_back, hand_over};
use super::restore::one;
use super::work::taken;
use crate::error::{Error, Failed};
use crate::exec::{Direction, Submission};
use crate::mem::{Buf, Held, Parts, Where};
use crate::types::{Element, Rank};

impl Call<'_> {
    fn message<B: Buf>(&self, direction: Direction, peer: Rank, tag: u32, mut buf: B) -> Work<B> {
        let (endpoint, n) = (self.side.0, self.size());
        let problem = match peer {
            p if p >= n => Some(format!("rank {p} is not in this group of {n}; ranks are 0..={}", n - 1)),
            p if p == endpoint.config.rank => Some(format!("rank {p} is this rank: a message needs another")),
            _ => None,
        };
        if let Some(problem) = problem {
            let error = Error::invalid(direction.name(), problem);
            return Work::refused(Failed { buf: Some(buf), error }, one::<B>);
        }
        let (count, dtype) = (buf.len(), B::Elem::DTYPE);
        let place = buf.location();
        let (mut held, mut when) = (Held::new(Parts { input: (), output: buf }), self.when());
        let memory = match place.0 {
            Where::Host(at) => at,
            Where::Device(place) => {
                match self.stage_message(direction, place, count * dtype.size(), &mut when) {
                    Ok(staging) => {
                        held = held.with(staging.memory);
                        staging.at
                    }
                    Err(error) => return Work::refused(given_back(error, held, one::<B>), one::<B>),
                }
            }
        };
        let submission = Submission::Message { direction, peer, tag, memory, count, dtype };
        hand_over(endpoint, submission, when, held, one::<B>)
    }

    /// See [`Comm::send`](super::Comm::send).
    pub fn send<B: Buf>(&self, buf: B, to: Rank) -> Work<B> {
        self.message(Direction::Send, to, self.tag, buf)
    }

    /// See [`Comm::recv`](super::Comm::recv).
    pub fn recv<B: Buf>(&self, buf: B, from: Rank) -> Work<B> {
        self.message(Direction::Recv, from, self.tag, buf)
    }

    /// See [`Comm::send_recv`](super::Comm::send_recv).
    pub fn send_recv<S: Buf, R: Buf>(&self, send: S, to: Rank, recv: R, from: Rank) -> SendRecv<S, R> {
        // The receive first: what the peer sends at the same moment finds it posted.
        let recv = self.message(Direction::Recv, from, self.tag, recv);
        let send = self.message(Direction::Send, to, self.tag, send);
        SendRecv { send: Half::Work(send), recv: Half::Work(recv) }
    }

    /// See [`Comm::batch`](super::Comm::batch).
    pub fn batch<B: Buf>(&self, messages: impl IntoIterator<Item = Message<B>>) -> Batch<B> {
        let each = |message| match message {
            Message::Send { buf, to, tag } => self.message(Direction::Send, to, tag, buf),
            Message::Recv { buf, from, tag } => self.message(Direction::Recv, from, tag, buf),
        };
        Batch::new(messages.into_iter().map(each).collect())
    }
}

enum Half<B> {
    Work(Work<B>),
    Done(Result<B, Failed<B>>),
    Taken,
}

impl<B> Half<B> {
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        if let Half::Work(work) = self {
            match Pin::new(work).poll(cx) {
                Poll::Ready(result) => *self = Half::Done(result),
                Poll::Pending => return false,
            }
        }
        true
    }

    fn finish(self) -> Result<B, Failed<B>> {
        match self {
            Half::Work(work) => work.wait(),
            Half::Done(result) => result,
            Half::Taken => Err(taken()),
        }
    }
}

/// A send and a receive in flight together: a future of both buffers.
#[must_use = "the buffers come back through it"]
pub struct SendRecv<S, R> {
    send: Half<S>,
    recv: Half<R>,
}

impl<S, R> fmt::Debug for SendRecv<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendRecv")
    }
}

impl<S, R> Unpin for SendRecv<S, R> {}

type Both<S, R> = Result<(S, R), Failed<(Option<S>, Option<R>)>>;

fn join<S, R>(send: Result<S, Failed<S>>, recv: Result<R, Failed<R>>) -> Both<S, R> {
    let (error, send, recv) = match (send, recv) {
        (Ok(send), Ok(recv)) => return Ok((send, recv)),
        (Err(s), Err(r)) => (r.error, s.buf, r.buf),
        (Err(s), Ok(recv)) => (s.error, s.buf, Some(recv)),
        (Ok(send), Err(r)) => (r.error, Some(send), r.buf),
    };
    Err(Failed { buf: Some((send, recv)), error })
}

impl<S, R> SendRecv<S, R> {
    /// Blocks until both are finished.
    ///
    /// # Errors
    /// The first failure, with the buffers that may be had.
    pub fn wait(self) -> Both<S, R> {
        let recv = self.recv.finish();
        join(self.send.finish(), recv)
    }
}

impl<S, R> Future for SendRecv<S, R> {
    type Output = Both<S, R>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = &mut *self;
        if !(me.recv.poll(cx) & me.send.poll(cx)) {
            return Poll::Pending;
        }
        let take = std::mem::replace(&mut me.recv, Half::Taken);
        let send = std::mem::replace(&mut me.send, Half::Taken);
        Poll::Ready(join(send.finish(), take.finish()))
    }
}
