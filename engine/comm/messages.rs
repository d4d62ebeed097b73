//! Messages between two ranks.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use super::Work;
use super::batch::{Batch, Envelope, Message};
use super::call::{Call, no_room, submitted};
use super::calls::calls;
use super::restore::one;
use super::work::{Part, Submitted, taken};
use crate::error::{Error, Failed};
use crate::exec::{self, Direction};
use crate::mem::{Buf, ErasedBufs, Event, Parts, RawBuf, Where};
use crate::types::{DType, KIND_P2P, NO_OP, Rank, Signature, WHOLE};

/// A message that was checked, and is not submitted yet.
struct Letter {
    message: exec::Message,
    after: Option<Event>,
    held: ErasedBufs,
}

impl Letter {
    /// Marks this as one half of a message of this rank to itself. The other half gets the same number.
    fn half_of(mut self, number: u64) -> Self {
        self.message.half = Some(number);
        self
    }

    /// What both halves must have in common.
    fn size(&self) -> (u64, Option<DType>) {
        (self.message.signature.count, DType::from_u8(self.message.signature.dtype))
    }
}

/// A message, or why it cannot be carried out, with its buffer.
type Prepared = Result<Letter, (Error, ErasedBufs)>;

/// Makes one message of two halves: a send of this rank to itself, and the receive of it. Both halves are carried out, or neither is.
fn pair(send: Prepared, recv: Prepared) -> (Prepared, Prepared) {
    // Each pair gets a number that no other pair has, so a half is never matched with another call's half.
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let (send, recv) = match both_or_none(send, recv) {
        (Ok(send), Ok(recv)) => (send, recv),
        refused => return refused,
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
        return (Err((error.clone(), send.held)), Err((error, recv.held)));
    }
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    (Ok(send.half_of(number)), Ok(recv.half_of(number)))
}

/// If one of two messages cannot be carried out, refuses the other for the same reason: else whoever waits for both would wait until the deadline.
fn both_or_none(send: Prepared, recv: Prepared) -> (Prepared, Prepared) {
    match (send, recv) {
        (Ok(send), Err((error, buf))) => (Err((error.clone(), send.held)), Err((error, buf))),
        (Err((error, buf)), Ok(recv)) => (Err((error.clone(), buf)), Err((error, recv.held))),
        both => both,
    }
}

/// A message's buffer without its type, and where its elements lie.
struct Content {
    raw: RawBuf,
    held: ErasedBufs,
}

impl Content {
    fn of<B: Buf>(mut buf: B) -> Content {
        Content { raw: RawBuf::of(&mut buf), held: ErasedBufs::new(Parts { input: (), output: buf }) }
    }
}

impl Call<'_> {
    /// Checks a message. If its buffer is on a device and goes through host memory, prepares the copies; those of a send begin now. A message
    /// that a library moves from device to device needs no copies: it only waits for what the buffer's stream holds now.
    fn letter(&self, envelope: Envelope, content: Content) -> Prepared {
        let (n, Envelope { direction, peer, tag }) = (self.size(), envelope);
        let Content { raw, mut held } = content;
        if peer >= n {
            let problem = format!("rank {peer} is not in this group of {n}; ranks are 0..={}", n - 1);
            return Err((Error::invalid(direction.name(), problem), held));
        }
        let (bytes, unit) = (raw.bytes(), raw.dtype.size());
        let whole = match self.message_path(peer, &raw).transpose() {
            Ok(whole) => whole,
            Err(error) => return Err((error, held)),
        };
        let signature = Signature {
            kind: if whole.is_some() { KIND_P2P | WHOLE } else { KIND_P2P },
            dtype: raw.dtype as u8,
            op: NO_OP,
            algo: 0,
            root: tag,
            count: raw.len as u64,
            generation: self.side.0.config.generation,
            detail: 0,
        }
        .with_key(self.key);
        let (memory, after, staged) = match (raw.place.0, &whole) {
            (Where::Host(at), _) => (at, self.after_on_host(), None),
            (Where::Unfit(why), _) => return Err((Error::invalid(direction.name(), why), held)),
            (Where::Device(place), Some(path)) => match self.launched_message(direction, &place, path) {
                Ok(ready) => (std::ptr::without_provenance_mut(place.address as usize), Some(ready), None),
                Err(error) => return Err((error, held)),
            },
            (Where::Device(place), None) => match self.stage_message(direction, &place, bytes) {
                Ok((staged, back)) => {
                    held = held.with(staged.memory());
                    (staged.at(0), staged.ready(), Some((staged, back)))
                }
                Err(error) => return Err((error, held)),
            },
        };
        let (staged, back) = staged.unzip();
        let staged = staged.filter(|staged| staged.is_striped());
        let (number, half, timeout) = (0, None, self.deadline());
        let message = exec::Message {
            direction,
            peer,
            tag,
            number,
            half,
            record: 0,
            memory,
            bytes,
            unit,
            signature,
            timeout,
            staged,
            back,
            whole,
        };
        Ok(Letter { message, after, held })
    }

    fn post(&self, letter: Prepared) -> Submitted {
        match letter {
            Ok(Letter { message, after, held }) => {
                submitted(self.side.0, self.side.0.submit_message(message, after, held))
            }
            Err((error, held)) => self.refused(error, held),
        }
    }

    fn is_self(&self, peer: Rank) -> bool {
        peer == self.rank()
    }

    /// The error for a send to this rank itself, or a receive from it, whose other half is not in the same call.
    fn alone(&self, direction: Direction) -> Error {
        let (members, other) = (self.side.0.config.named(), direction.other().name());
        let rank = members.rank(self.rank());
        let problem = format!(
            "{rank} is this rank, and a {} alone would wait for ever: call send_recv, or a batch that has the \
             {other} of the same tag, too",
            direction.name()
        );
        Error::invalid(direction.name(), problem)
    }

    fn message(&self, direction: Direction, peer: Rank, content: Content) -> Submitted {
        let envelope = Envelope { direction, peer, tag: self.tag };
        if self.is_self(peer) {
            return Submitted::refused(self.alone(direction), content.held);
        }
        self.post(self.letter(envelope, content))
    }

    /// Submits a send and a receive, or neither if one of them is refused. (If another thread takes a place in the queue meanwhile, it can
    /// happen that only one of them is submitted.)
    fn exchange(&self, send: Content, to: Rank, recv: Content, from: Rank) -> (Submitted, Submitted) {
        let tag = self.tag;
        let refusal = match (self.is_self(to), self.is_self(from)) {
            (true, false) => Some(self.alone(Direction::Send)),
            (false, true) => Some(self.alone(Direction::Recv)),
            _ => no_room(self.side.0, "send_recv", 2),
        };
        let (send, recv) = match refusal {
            Some(error) => (Err((error.clone(), send.held)), Err((error, recv.held))),
            None => {
                let send = self.letter(Envelope { direction: Direction::Send, peer: to, tag }, send);
                let recv = self.letter(Envelope { direction: Direction::Recv, peer: from, tag }, recv);
                if self.is_self(to) { pair(send, recv) } else { both_or_none(send, recv) }
            }
        };
        // The receive is posted first, so that what the peer sends at the same moment finds it.
        let recv = self.post(recv);
        (self.post(send), recv)
    }

    /// Submits several messages, in order. A send to this rank itself, or a receive from it, is refused if its other half is missing; the others are
    /// carried out. If a message of this rank to itself has both halves, and the queue has no room for all messages, all are refused.
    fn several(&self, messages: Vec<(Envelope, Content)>) -> Vec<Submitted> {
        let pairs = self.pairs(&messages);
        let full = if pairs.is_empty() { None } else { no_room(self.side.0, "batch", messages.len()) };
        let mut paired = vec![false; messages.len()];
        pairs.iter().for_each(|(send, recv)| (paired[*send], paired[*recv]) = (true, true));
        let prepared = messages.into_iter().zip(paired).map(|((envelope, content), paired)| match &full {
            Some(error) => Err((error.clone(), content.held)),
            None if self.is_self(envelope.peer) && !paired => {
                Err((self.alone(envelope.direction), content.held))
            }
            None => self.letter(envelope, content),
        });
        let mut letters: Vec<Option<Prepared>> = prepared.map(Some).collect();
        for (send, recv) in pairs {
            if let (Some(sends), Some(receives)) = (letters[send].take(), letters[recv].take()) {
                let (sends, receives) = pair(sends, receives);
                (letters[send], letters[recv]) = (Some(sends), Some(receives));
            }
        }
        letters.into_iter().flatten().map(|letter| self.post(letter)).collect()
    }

    /// The indices of each send of this rank to itself and of the receive that belongs to it: of each tag the first send with the first
    /// receive, and so on.
    fn pairs(&self, messages: &[(Envelope, Content)]) -> Vec<(usize, usize)> {
        let own = |wanted: Direction| {
            let envelopes = messages.iter().map(|(envelope, _)| envelope).enumerate();
            let ours = move |m: &Envelope| m.direction == wanted && self.is_self(m.peer);
            envelopes.filter(move |(_, m)| ours(m)).map(|(i, m)| (i, m.tag))
        };
        let mut receives: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
        own(Direction::Recv).for_each(|(i, tag)| receives.entry(tag).or_default().push_back(i));
        let receive = |(send, tag): (usize, u32)| Some((send, receives.get_mut(&tag)?.pop_front()?));
        own(Direction::Send).filter_map(receive).collect()
    }
}

/// A send and a receive in flight together: a future of both buffers.
#[must_use = "the buffers come back through it"]
pub struct SendRecv<S, R>(Option<(Part<S>, Part<R>)>);

impl<S, R> fmt::Debug for SendRecv<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendRecv")
    }
}

impl<S, R> Unpin for SendRecv<S, R> {}

type Both<S, R> = Result<(S, R), Failed<(Option<S>, Option<R>)>>;

impl<S, R> SendRecv<S, R> {
    /// Blocks until both are finished.
    ///
    /// # Errors
    /// The failure of the receive, or that of the send if the receive succeeded; with those buffers that can be given back.
    pub fn wait(self) -> Both<S, R> {
        let Some((send, recv)) = self.0 else { return Err(Failed { buf: None, error: taken() }) };
        let recv = recv.outcome();
        let (error, send, recv) = match (send.outcome(), recv) {
            (Ok(send), Ok(recv)) => return Ok((send, recv)),
            (Err(s), Err(r)) => (r.error, s.buf, r.buf),
            (Err(s), Ok(recv)) => (s.error, s.buf, Some(recv)),
            (Ok(send), Err(r)) => (r.error, Some(send), r.buf),
        };
        Err(Failed { buf: Some((send, recv)), error })
    }
}

impl<S, R> Future for SendRecv<S, R> {
    type Output = Both<S, R>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.0.as_mut().is_none_or(|(send, recv)| recv.poll(cx) & send.poll(cx)) {
            return Poll::Ready(SendRecv(self.0.take()).wait());
        }
        Poll::Pending
    }
}

calls! {
    /// Sends `buf` to a rank, which receives with the same length, type and tag. Messages of one (sender,
    /// receiver, tag) are matched in order; different tags are independent.
    ///
    /// A send of up to 4 KB usually finishes before the receiver has called `recv`, unless 32 such messages of this rank wait
    /// there already. A larger one moves only once the receiver has called `recv`. So two ranks that both *await* a large `send`
    /// before they call `recv` wait for each other until the deadline, whose error says so: submit the send and the receive
    /// before awaiting either, or use [`batch`](Self::batch). A send to this rank itself is refused, as is a receive from it:
    /// [`send_recv`](Self::send_recv) and [`batch`](Self::batch) do that, with both halves in one call.
    fn send [B: Buf] (buf: B, to: Rank) -> Work<B>
        = |call| Work::new(call.message(Direction::Send, to, Content::of(buf)), one::<B>);

    /// Receives into `buf` what a rank sends with the same length, type and tag.
    fn recv [B: Buf] (buf: B, from: Rank) -> Work<B>
        = |call| Work::new(call.message(Direction::Recv, from, Content::of(buf)), one::<B>);

    /// Sends to one rank and receives from another (or the same) at the same time, both with the same tag. All ranks may call it
    /// together, as the two do not wait for each other. If `to` and `from` are both this rank, as in a ring of one, it is a
    /// copy, and both buffers must have the same length and type.
    fn send_recv [S: Buf, R: Buf] (send: S, to: Rank, recv: R, from: Rank) -> SendRecv<S, R> = |call| {
        let (send, recv) = call.exchange(Content::of(send), to, Content::of(recv), from);
        let (send, recv) = (Work::new(send, one::<S>), Work::new(recv, one::<R>));
        SendRecv(Some((Part::Running(send), Part::Running(recv))))
    };

    /// Submits several messages, which are in flight together. A message of this rank to itself is copied: its send and its
    /// receive must be in the same batch, with the same tag, length and type.
    fn batch [B: Buf] (messages: impl IntoIterator<Item = Message<B>>) -> Batch<B> = |call| {
        let content = |message: Message<B>| {
            let (envelope, buf) = message.parts();
            (envelope, Content::of(buf))
        };
        let submitted = call.several(messages.into_iter().map(content).collect());
        Batch::new(submitted.into_iter().map(|submitted| Work::new(submitted, one::<B>)))
    };
}
