//! A message on its way: what was called, and how far it has come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::Staged;
use crate::device::whole::{MessagePath, Turn};
use crate::error::MissingState;
use crate::exec::carrier::Carrier;
use crate::exec::inflight::Key;
use crate::link::Header;
use crate::mem::check_bools;
use crate::types::{DType, Map, Rank, Signature};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Send,
    Recv,
}

impl Direction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Direction::Send => "send",
            Direction::Recv => "recv",
        }
    }
    pub(crate) fn other(self) -> Direction {
        match self {
            Direction::Send => Direction::Recv,
            Direction::Recv => Direction::Send,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Type {
    Eager,
    Announce,
    Clear,
    Data,
    Credit,
    Agree,
}

impl Type {
    /// The type of a frame with this header. `None`: there is no such type, or its frames have no payload and this one has.
    pub(super) fn of(header: &Header) -> Option<Type> {
        let all = [Type::Eager, Type::Announce, Type::Clear, Type::Data, Type::Credit, Type::Agree];
        let what = all.get(header.message as usize).copied()?;
        (matches!(what, Type::Eager | Type::Data) || header.len == 0).then_some(what)
    }
}

/// A send or a receive: the call builds it, and it is moved from there to its end.
#[derive(Clone)]
pub(crate) struct Message {
    pub(crate) direction: Direction,
    pub(crate) peer: Rank,
    pub(crate) tag: u32,
    /// Which of the messages to (or from) this peer with this tag it is: the endpoint numbers them as they are submitted.
    pub(crate) number: u64,
    /// For a message of this rank to itself: the number that its two halves share.
    pub(crate) half: Option<u64>,
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
    /// Bytes of an element.
    pub(crate) unit: usize,
    pub(crate) signature: Signature,
    pub(crate) timeout: Duration,
    /// Its number in the flight recorder.
    pub(crate) record: u64,
    /// Copies the memory from a device or back to it, in several stripes, while the message moves.
    pub(crate) staged: Option<Arc<Staged>>,
    /// For memory of a device that goes through the host: copies back what is left to copy, once all data has moved.
    pub(crate) back: Option<Arc<dyn Carrier>>,
    /// The path by which a library moves the message from device to device, if one does. `memory` is the device's then.
    pub(crate) whole: Option<Arc<MessagePath>>,
}

// SAFETY: `memory` is in a buffer that the in-flight table owns (`Buf: Send`) until the message has finished.
unsafe impl Send for Message {}

impl Message {
    /// What is wrong with the values that were received, if anything: some byte of a message of `bool`s is no `bool`. Such bytes become `false`.
    pub(crate) fn wrong_value(&self) -> Option<String> {
        let is_elsewhere = self.direction == Direction::Send || self.whole.is_some();
        if is_elsewhere || self.signature.dtype != DType::Bool as u8 {
            return None;
        }
        // SAFETY: the table owns the receive's buffer, which has `bytes` bytes. Callers see to it that all data has come, or that the message has
        // failed and no peer touches the buffer: so nobody writes there any more.
        unsafe { check_bools(self.memory, self.bytes) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing was sent for it yet, and it was not matched with anything.
    New,
    /// Announced (send), or waiting for the message (receive).
    Waiting,
    /// Data may move, or has moved.
    Moving,
}

pub(super) struct Moving {
    pub(super) key: Key,
    pub(super) message: Message,
    pub(super) stage: Stage,
    pub(super) done: usize,
    pub(super) freed: usize,
    /// How many stripes of the memory have come from the device. `filled`: how many bytes may therefore be used; `usize::MAX`: all.
    pub(super) arrived: usize,
    pub(super) filled: usize,
    pub(super) since: Instant,
    /// Whether the rank that is to send it was told that this rank waits for it.
    pub(super) told: bool,
    /// Its turn to be launched on the device. There is one from when both ends were called until the library is given the message.
    pub(super) turn: Option<Turn>,
}

impl Moving {
    pub(super) fn new(key: Key, message: Message, since: Instant) -> Moving {
        let filled = if message.staged.is_some() { 0 } else { usize::MAX };
        let stage = Stage::New;
        Moving { key, message, stage, done: 0, freed: 0, arrived: 0, filled, since, told: false, turn: None }
    }

    /// Whether the library that moves the message was given it.
    pub(super) fn is_launched(&self) -> bool {
        self.message.whole.is_some() && self.stage == Stage::Moving && self.turn.is_none()
    }

    /// What a message that a library moves, and that both ranks have called, still waits for: the library, or what goes before it there.
    pub(super) fn held_up(&self) -> Option<MissingState> {
        let path = self.message.whole.as_ref().filter(|_| self.stage == Stage::Moving)?;
        Some(path.whole.not_ended(self.turn.as_ref()))
    }
}

/// A message that came before its receive was posted.
pub(super) struct Unclaimed {
    pub(super) tag: u32,
    pub(super) number: u64,
    pub(super) signature: Signature,
    /// A buffer of [`EAGER`](super::EAGER) bytes, and how many of them the message has. `None`: the message was announced.
    pub(super) data: Option<(Box<[u8]>, usize)>,
}

/// A short frame that is to be sent to the other end of a message.
pub(super) struct Answer {
    pub(super) kind: Type,
    pub(super) tag: u32,
    pub(super) number: u64,
    /// The launch time ([`Turn::time`]) of the message, if a library moves it; else 0.
    pub(super) time: u64,
}

/// Why a message is given up.
pub(crate) enum Overdue {
    /// Its peer has left.
    Left,
    /// Its own memory has not come from the device.
    LacksMemory,
    /// It is overdue, and waits for its peer.
    Unmatched,
    /// It is overdue, and this is what holds it up on this rank.
    HeldUp(MissingState),
}

#[derive(Default)]
pub(super) struct Peer {
    pub(super) sends: Vec<Moving>,
    pub(super) recvs: Vec<Moving>,
    /// Messages that have not begun, by direction and tag. No list here is empty.
    pub(super) waiting: Map<(Direction, u32), VecDeque<(Key, Message)>>,
    pub(super) unclaimed: Vec<Unclaimed>,
    /// Short answers that wait for room.
    pub(super) answers: VecDeque<Answer>,
    pub(super) credits: u32,
    pub(super) owed: u32,
    /// How many eager messages of the peer have come for which it has no credit back yet: at most [`CREDITS`](super::CREDITS), if it is correct.
    pub(super) taken: u32,
    pub(super) touched: bool,
}

impl Peer {
    /// A message in progress.
    pub(super) fn of(&mut self, key: Key) -> Option<&mut Moving> {
        self.sends.iter_mut().chain(&mut self.recvs).find(|m| m.key == key)
    }
}
