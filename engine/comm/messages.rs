//! Messages between two ranks. What the calls mean is documented on [`Comm`](super::Comm).

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use super::Work;
use super::batch::{Batch, Message};
use super::call::{Call, given_back, hand_over};
use super::restore::one;
use super::work::taken;
use crate::error::{Error, Failed};
use crate::exec::{Direction, Submission, When};
use crate::mem::{Buf, Held, Parts, Where};
use crate::types::{DType, Element, Rank};

/// A message that was looked at and found good, and is not submitted yet.
struct Letter<B> {
    submission: Submission,
    when: When,
    held: Held,
    of: PhantomData<fn() -> B>,
}

impl<B: Buf> Letter<B> {
    /// One half of a message of this rank to itself: the other has the same number.
    fn half_of(mut self, number: u64) -> Self {
        if let Submission::Message { half, .. } = &mut self.submission {
            *half = Some(number);
        }
        self
    }

    /// What both halves must have in common.
    fn size(&self) -> (usize, Option<DType>) {
        match &self.submission {
            Submission::Message { count, dtype, .. } => (*count, Some(*dtype)),
            Submission::Collective(_) => (0, None),
        }
    }

    fn give_back(self, error: Error) -> Failed<B> {
        given_back(error, self.held, one::<B>)
    }
}

type Prepared<B> = Result<Letter<B>, Failed<B>>;

/// Makes one message of the two halves that this rank sends to itself: both are carried out, or neither is.
fn pair<S: Buf, R: Buf>(send: Prepared<S>, recv: Prepared<R>) -> (Prepared<S>, Prepared<R>) {
    // A number of their own, so that no other call's half is taken for one of these.
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let (send, recv) = match (send, recv) {
        (Ok(send), Ok(recv)) => (send, recv),
        (Ok(send), Err(recv)) => return (Err(send.give_back(recv.error.clone())), Err(recv)),
        (Err(send), Ok(recv)) => {
            let error = send.error.clone();
            return (Err(send), Err(recv.give_back(error)));
        }
        both => return both,
    };
    let ((sent, sends), (received, receives)) = (send.size(), recv.size());
    if (sent, sends) != (received, receives) {
        let shown = |dtype: Option<DType>| dtype.map_or("?", DType::name);
        let problem = format!(
            "this rank sends itself {sent} x {} and receives {received} x {} from itself: both must be the same",
            shown(sends),
            shown(receives)
        );
        let error = Error::invalid("send_recv", problem);
        return (Err(send.give_back(error.clone())), Err(recv.give_back(error)));
    }
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    (Ok(send.half_of(number)), Ok(recv.half_of(number)))
}

impl Call<'_> {
    /// Looks at a message, and starts the copies of its memory where that is on a device.
    fn letter<B: Buf>(&self, direction: Direction, peer: Rank, tag: u32, mut buf: B) -> Prepared<B> {
        let n = self.size();
        if peer >= n {
            let problem = format!("rank {peer} is not in this group of {n}; ranks are 0..={}", n - 1);
            return Err(Failed { buf: Some(buf), error: Error::invalid(direction.name(), problem) });
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
                    Err(error) => return Err(given_back(error, held, one::<B>)),
                }
            }
        };
        let submission = Submission::Message { direction, peer, tag, memory, count, dtype, half: None };
        Ok(Letter { submission, when, held, of: PhantomData })
    }

    fn post<B: Buf>(&self, letter: Prepared<B>) -> Work<B> {
        match letter {
            Ok(Letter { submission, when, held, .. }) => {
                hand_over(self.side.0, submission, when, held, one::<B>)
            }
            Err(failed) => Work::refused(failed, one::<B>),
        }
    }

    fn is_self(&self, peer: Rank) -> bool {
        peer == self.rank()
    }

    /// Half of a message of this rank to itself, whose other half is not in the same call.
    fn alone<B>(&self, direction: Direction, buf: B) -> Failed<B> {
        let (rank, other) = (self.rank(), direction.other().name());
        let problem = format!(
            "rank {rank} is this rank, and a {} alone would wait for ever: call send_recv, or a batch that has the \
             {other} of the same tag, too",
            direction.name()
        );
        Failed { buf: Some(buf), error: Error::invalid(direction.name(), problem) }
    }

    /// Why so many operations more have no room. Asked before halves of a message to itself are submitted, so that none
    /// is left without the other.
    fn no_room(&self, more: usize) -> Option<Error> {
        let endpoint = self.side.0;
        let limit = endpoint.config.queue_limit;
        (endpoint.in_flight().saturating_add(more) > limit)
            .then(|| Error::QueueFull { call: "send_recv".into(), limit })
    }

    fn message<B: Buf>(&self, direction: Direction, peer: Rank, buf: B) -> Work<B> {
        if self.is_self(peer) {
            return Work::refused(self.alone(direction, buf), one::<B>);
        }
        self.post(self.letter(direction, peer, self.tag, buf))
    }

    /// See [`Comm::send`](super::Comm::send).
    pub fn send<B: Buf>(&self, buf: B, to: Rank) -> Work<B> {
        self.message(Direction::Send, to, buf)
    }

    /// See [`Comm::recv`](super::Comm::recv).
    pub fn recv<B: Buf>(&self, buf: B, from: Rank) -> Work<B> {
        self.message(Direction::Recv, from, buf)
    }

    /// See [`Comm::send_recv`](super::Comm::send_recv).
    pub fn send_recv<S: Buf, R: Buf>(&self, send: S, to: Rank, recv: R, from: Rank) -> SendRecv<S, R> {
        let (send, recv) = match (self.is_self(to), self.is_self(from)) {
            (true, true) => match self.no_room(2) {
                Some(error) => {
                    let sends = Failed { buf: Some(send), error: error.clone() };
                    (Err(sends), Err(Failed { buf: Some(recv), error }))
                }
                None => pair(
                    self.letter(Direction::Send, to, self.tag, send),
                    self.letter(Direction::Recv, from, self.tag, recv),
                ),
            },
            // The half without another is refused, and with it the other: nothing is submitted.
            (true, false) => {
                let failed = self.alone(Direction::Send, send);
                let error = failed.error.clone();
                (Err(failed), Err(Failed { buf: Some(recv), error }))
            }
            (false, true) => {
                let failed = self.alone(Direction::Recv, recv);
                (Err(Failed { buf: Some(send), error: failed.error.clone() }), Err(failed))
            }
            (false, false) => {
                let send = self.letter(Direction::Send, to, self.tag, send);
                (send, self.letter(Direction::Recv, from, self.tag, recv))
            }
        };
        // The receive first: what the peer sends at the same moment finds it posted.
        let recv = self.post(recv);
        SendRecv { send: Half::Work(self.post(send)), recv: Half::Work(recv) }
    }

    /// See [`Comm::batch`](super::Comm::batch).
    pub fn batch<B: Buf>(&self, messages: impl IntoIterator<Item = Message<B>>) -> Batch<B> {
        let messages: Vec<_> = messages.into_iter().map(Message::parts).collect();
        let pairs = self.pairs(&messages);
        let full = if pairs.is_empty() { None } else { self.no_room(messages.len()) };
        let mut paired = vec![false; messages.len()];
        pairs.iter().for_each(|(send, recv)| (paired[*send], paired[*recv]) = (true, true));
        let prepared =
            messages.into_iter().zip(paired).map(|((direction, peer, tag, buf), paired)| match &full {
                Some(error) => Err(Failed { buf: Some(buf), error: error.clone() }),
                None if self.is_self(peer) && !paired => Err(self.alone(direction, buf)),
                None => self.letter(direction, peer, tag, buf),
            });
        let mut letters: Vec<Option<Prepared<B>>> = prepared.map(Some).collect();
        for (send, recv) in pairs {
            if let (Some(sends), Some(receives)) = (letters[send].take(), letters[recv].take()) {
                let (sends, receives) = pair(sends, receives);
                (letters[send], letters[recv]) = (Some(sends), Some(receives));
            }
        }
        Batch::new(letters.into_iter().flatten().map(|letter| self.post(letter)).collect())
    }

    /// Which of these are the two halves of one message of this rank to itself: of each tag, in the order given.
    fn pairs<B>(&self, messages: &[(Direction, Rank, u32, B)]) -> Vec<(usize, usize)> {
        let own = |wanted: Direction| {
            let ours = move |(direction, peer): (Direction, Rank)| direction == wanted && self.is_self(peer);
            messages.iter().enumerate().filter(move |(_, m)| ours((m.0, m.1))).map(|(i, m)| (i, m.2))
        };
        let mut receives: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
        own(Direction::Recv).for_each(|(i, tag)| receives.entry(tag).or_default().push_back(i));
        let receive = |(send, tag): (usize, u32)| Some((send, receives.get_mut(&tag)?.pop_front()?));
        own(Direction::Send).filter_map(receive).collect()
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
