//! A lane of a link: its connection between one port of each end, with a queue pair at each. A link has a first lane; it can have a second one only if
//! both ranks have a second port (`Card::second`), and the receiver grants slots.
//!
//! The first lane carries all small frames and all notes. A large frame goes by the lane with fewer large frames under way; by the first if both have
//! as many, or if only the first lane's device has the payload registered. The receiver has one set of cells and slots for both lanes: its area is
//! registered with both its devices. An offered payload is READ by the lane by which the offer came, through a window of that lane's device.
//!
//! Nobody knows beforehand whether the second ports reach each other: they may be connected to different networks. So once both ends have greeted each
//! other, the sender tries it: it writes as many bytes as a full packet has to the end of the area, by the second lane. It uses the lane only once that
//! write has succeeded; if the write fails, the link has one lane. Once the second lane carries frames, the failure of either lane breaks the link.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use allstream_sys::verbs::{IbvSge, IbvWc, VerbsError, WcStatus};

use super::broken::problem_of;
use super::card::Card;
use super::domain::Registered;
use super::first_packet;
use super::hello::{Area, Hello};
use super::layout::{CELLS_BYTES, place_of_trial};
use super::offers::{Offering, Reads};
use super::queue_pair::{PIECE, QueuePair, Room, Tells, Write};
use crate::error::{Error, limits::leaves_descriptors};

/// The id of the request by which a second lane is tried.
pub(super) const TRIAL: u64 = PIECE | 1;

/// The lanes of a link, at one of its ends. Index 0 is the first lane; any other is the second lane, or the first if there is no second.
pub(super) struct Lanes<L> {
    pub(super) first: L,
    pub(super) second: Option<L>,
}

impl<L> Lanes<L> {
    pub(super) fn len(&self) -> usize {
        1 + usize::from(self.second.is_some())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &L> {
        [&self.first].into_iter().chain(&self.second)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut L> {
        [&mut self.first].into_iter().chain(&mut self.second)
    }
}

impl<L: AsMut<Lane>> Lanes<L> {
    /// Ends all traffic. `false`: a device has refused to, as [`QueuePair::fail`] says.
    pub(super) fn fail(&mut self) -> bool {
        self.iter_mut().fold(true, |all, lane| lane.as_mut().pair.fail() & all)
    }

    /// Destroys the queue pairs. `true`: all are destroyed, as [`QueuePair::destroy`] says.
    pub(super) fn destroy(&mut self) -> bool {
        self.iter_mut().fold(true, |all, lane| lane.as_mut().pair.destroy() & all)
    }
}

impl<L> Index<usize> for Lanes<L> {
    type Output = L;

    fn index(&self, at: usize) -> &L {
        self.second.as_ref().filter(|_| at > 0).unwrap_or(&self.first)
    }
}

impl<L> IndexMut<usize> for Lanes<L> {
    fn index_mut(&mut self, at: usize) -> &mut L {
        self.second.as_mut().filter(|_| at > 0).unwrap_or(&mut self.first)
    }
}

/// What both ends of a lane have.
pub(super) struct Lane {
    pub(super) pair: QueuePair,
    pub(super) card: Arc<Card>,
    first_packet: u32,
    /// The port and the queue pair at the other end, once connected.
    other: Option<Hello>,
    peer_at: String,
}

impl Lane {
    pub(super) fn new(card: &Arc<Card>, room: Room) -> Result<Lane, Error> {
        Ok(Lane {
            pair: QueuePair::new(card, room)?,
            card: card.clone(),
            first_packet: first_packet()?,
            other: None,
            peer_at: String::new(),
        })
    }

    /// An error if this lane, a second one, takes one of the last descriptors that this process may have open: later links need theirs more.
    fn leaves_descriptors(&self) -> Result<(), Error> {
        match leaves_descriptors(self.pair.descriptor()) {
            true => Ok(()),
            false => Err(Error::system(
                "open a second queue pair for a link",
                "less than a quarter of the descriptors are free",
            )),
        }
    }

    pub(super) fn hello(&self, slots: u32, reads: u8, area: Option<Area>) -> Hello {
        Hello { reads, ..self.card.hello(self.pair.number(), self.first_packet, slots, area) }
    }

    pub(super) fn connect(&mut self, other: &Hello, reads: Reads) -> Result<(), Error> {
        (self.other, self.peer_at) = (Some(*other), super::place_of(other));
        self.pair.connect(&self.card, self.first_packet, other, reads)
    }

    /// This lane's two ends, for messages to people.
    pub(super) fn ends(&self) -> (String, &str) {
        (super::end_of(&self.card, &self.pair), &self.peer_at)
    }

    /// The trial of this lane, a second one, has failed by this completion. If packets were not acknowledged, notes for later links that the peer's
    /// port cannot be reached. Other failures (the peer has ended, for example) do not show that.
    pub(super) fn has_failed_trial(&self, completion: &IbvWc) {
        let problem = self.problem_of(completion);
        match &self.other {
            Some(other) if WcStatus(completion.status) == WcStatus::RETRY_EXC_ERR => {
                self.card.cannot_reach(other, problem);
            }
            _ => tracing::debug!(problem, "a link over RDMA goes by the first port alone"),
        }
    }

    /// What a completion that failed says, in words.
    pub(super) fn problem_of(&self, completion: &IbvWc) -> String {
        problem_of(&self.card, completion)
    }
}

/// The sending end of a lane.
pub(super) struct SendLane {
    pub(super) lane: Lane,
    /// The cells that the device reads headers and small payloads from. `None` only while this is being dropped, as `slots` is.
    pub(super) cells: Option<Registered>,
    pub(super) slots: Option<Arc<Registered>>,
    /// The receiver's area, as this lane's requests name it.
    pub(super) to: Area,
    /// What is offered to the receiver. `None`: it takes no offers.
    pub(super) offering: Option<Offering>,
    /// How many requests the pair's queue takes.
    requests: u32,
    /// Large frames with which the device is not done.
    pub(super) large: u32,
    /// Whether frames may go by this lane. A first lane is taken to work; a second one does once its trial has succeeded.
    pub(super) is_proven: bool,
}

impl SendLane {
    pub(super) fn new(card: &Arc<Card>, room: Room) -> Result<SendLane, Error> {
        Ok(SendLane {
            lane: Lane::new(card, room)?,
            cells: Some(card.cells(CELLS_BYTES)?),
            slots: Some(card.slots()?),
            to: Area { at: 0, key: 0 },
            offering: None,
            requests: room.send,
            large: 0,
            is_proven: true,
        })
    }

    /// The sending end of a second lane. An error if there is none to be had.
    pub(super) fn second(card: &Arc<Card>, room: Room) -> Result<SendLane, Error> {
        let new = SendLane::new(card, room)?;
        new.lane.leaves_descriptors().map(|()| new)
    }

    pub(super) fn hello(&self, slots: u32) -> Hello {
        let hello = self.lane.hello(slots, self.lane.card.reads().answered, None);
        Hello { requests: self.requests, ..hello }
    }

    /// Takes what the receiver says of its end. Returns what is wrong with that.
    pub(super) fn agree(&mut self, other: &Hello) -> Result<(), String> {
        let answered = self.lane.card.reads().answered;
        self.to = other.area.ok_or("it receives by RDMA, and names no area")?;
        if other.reads > answered {
            return Err(format!(
                "it asks for {} READs at once, and this end has offered to answer {answered}",
                other.reads
            ));
        }
        self.offering = (other.slots > 0 && other.reads > 0).then(Offering::default);
        Ok(())
    }

    pub(super) fn connect(&mut self, other: &Hello) -> Result<(), Error> {
        let answered = if self.offering.is_some() { other.reads } else { 0 };
        self.lane.connect(other, Reads { answered, ..Reads::NONE })
    }

    /// Begins to try whether messages get through by a second lane that is connected at both ends.
    pub(super) fn start_trial(&mut self, slots: u32) -> Result<(), VerbsError> {
        self.is_proven = false;
        let Some(cells) = &self.cells else { return Ok(()) };
        let mtu = self.lane.card.mtu().bytes().unwrap_or(0).min(CELLS_BYTES as u32);
        let from = [IbvSge { addr: cells.at(0) as u64, length: mtu, lkey: cells.local_key() }];
        let to = self.to.at + place_of_trial(slots) as u64;
        let write = Write { id: TRIAL, from: &from, to, key: self.to.key, tells: Tells::This };
        // SAFETY: the cells have `CELLS_BYTES` bytes and stay registered until the pair is destroyed (`drop`). Nobody writes to them before this
        // request's completion was seen: until then `is_proven` is false, and `Sending::lane_of_large` does not choose this lane.
        unsafe { self.lane.pair.post_write(write) }
    }

    /// The trial is over. Returns whether messages get through.
    pub(super) fn end_trial(&mut self, completion: &IbvWc) -> bool {
        self.is_proven = WcStatus(completion.status) == WcStatus::SUCCESS;
        if self.is_proven {
            let (at, peer_at) = self.lane.ends();
            tracing::debug!("a link over RDMA also goes from {at} to {peer_at}");
        }
        self.is_proven
    }

    /// The local key of a payload that lies in staging slots, or, if it is `large`, in a buffer from `Comm::alloc` that the card has registered or
    /// registers now.
    pub(super) fn key(&self, payload: *const u8, len: usize, large: bool) -> Option<u32> {
        let slots = self.slots.as_ref()?;
        match slots.holds(payload, len) {
            true => Some(slots.local_key()),
            false if large => self.lane.card.block(payload, len).map(|part| part.key),
            false => None,
        }
    }

    /// Whether the peer may read the payload of this frame by itself.
    pub(super) fn is_offered(&self, frame: u64) -> bool {
        self.offering.as_ref().is_some_and(|offering| offering.key(frame).is_some())
    }
}

impl AsMut<Lane> for SendLane {
    fn as_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }
}

impl Drop for SendLane {
    fn drop(&mut self) {
        if !crate::forked::is_forked() {
            self.lane.pair.fail();
            // The peer's right to read what is offered ends with the windows, which go before the pair does.
            drop(self.offering.take());
            if self.lane.pair.destroy() {
                return;
            }
        }
        // The device may go on reading cells and slots for ever; in a forked child the registrations are the parent's. So both are leaked.
        std::mem::forget((self.cells.take(), self.slots.take()));
    }
}

/// The receiving end of a lane.
pub(super) struct ReceiveLane {
    pub(super) lane: Lane,
    /// How many READs may be under way at once; 0: the sender may offer nothing.
    pub(super) reads: u8,
    /// A message has come by this lane. A second lane without any may have been given up by the sender: its failure does not break the link.
    pub(super) is_used: bool,
    /// A second lane failed before it was used.
    pub(super) is_given_up: bool,
}

impl AsMut<Lane> for ReceiveLane {
    fn as_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }
}

impl ReceiveLane {
    pub(super) fn new(card: &Arc<Card>) -> Result<ReceiveLane, Error> {
        let lane = Lane::new(card, super::room_to_receive())?;
        Ok(ReceiveLane { lane, reads: 0, is_used: false, is_given_up: false })
    }

    /// The receiving end of a second lane. An error if there is none to be had.
    pub(super) fn second(card: &Arc<Card>) -> Result<ReceiveLane, Error> {
        let new = ReceiveLane::new(card)?;
        new.lane.leaves_descriptors().map(|()| new)
    }

    /// Connects this end to the sender's. Receive requests are posted before the sender knows of the queue pair, so that none of its messages comes too
    /// early.
    pub(super) fn connect(&mut self, other: &Hello, can_read: bool) -> Result<(), Error> {
        self.reads = if can_read { other.reads.min(self.lane.card.reads().asked) } else { 0 };
        super::fill(&mut self.lane.pair, &self.lane.card)?;
        self.lane.connect(other, Reads { asked: self.reads, ..Reads::NONE })
    }
}
