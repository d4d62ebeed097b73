//! The core of the receiving end of a link over RDMA: its lanes, its area, and what has come.

use std::sync::Arc;

use allstream_sys::verbs::{IbvWc, VerbsError, WcStatus};

use super::broken::{BATCH, received, report};
use super::card::{Card, ReceiveArea, requests};
use super::check_other;
use super::credits::{Arrival, Came, Note, Receiver};
use super::hello::{Area, GREETING, Greeting, Hello};
use super::lane::{Lanes, ReceiveLane};
use super::layout::{PIECE_BYTES, cut, offset};
use super::offers::{Offer, Taking};
use super::pieces::Assembly;
use super::queue_pair::RECEIVED;
use crate::error::Error;
use crate::link::{Break, Frame, HEADER_BYTES, Header, INLINE, SLOT};
use crate::types::Rank;

/// The id of all notes, which their completions carry. The id of a READ is [`READ`] plus the number of its frame.
const NOTE: u64 = 0;
pub(super) const READ: u64 = 1;

/// An open receiving end. What [`writes_until`](crate::link::LinkRx::writes_until) returns shares it, to ask whether the device still writes.
pub(super) struct Receiving {
    pub(super) peer: Rank,
    pub(super) lanes: Lanes<ReceiveLane>,
    pub(super) area: ReceiveArea,
    pub(super) credits: Receiver,
    /// On a narrow link, the large frame that comes in pieces. `None`: frames come whole.
    large: Option<Assembly>,
    /// The offers that were taken.
    pub(super) taking: Taking,
    /// Bytes of the largest message that each of the link's ports takes, at both ends.
    max_message: u32,
    /// Notes that the device has not sent yet.
    notes: u32,
    /// How many of these, the oldest first, must complete until the sender has every note that releases an offered frame: the sender's operations
    /// wait for those.
    awaited: u32,
    pub(super) is_broken: bool,
    /// A call of the library failed, so some READs that are counted as posted may never complete.
    pub(super) is_lost: bool,
    broke: Option<Break>,
}

/// Returns how many slots the link can have, which the sender has asked for and whose requests fit its queue, and bytes of the largest message that
/// each port takes. The second ports count if `second` names them.
fn slots_for(card: &Card, first: &Hello, second: Option<(&Arc<Card>, Hello)>) -> Result<(u32, u32), Error> {
    let hellos = || [*first].into_iter().chain(second.map(|(_, hello)| hello));
    let own = second.map_or(card.max_message(), |(second, _)| card.max_message().min(second.max_message()));
    let max_message = hellos().map(|hello| hello.max_message).fold(own, u32::min);
    let room = hellos().map(|hello| hello.requests).fold(u32::MAX, u32::min);
    let slots = (0..=first.slots).rev().find(|slots| requests(*slots, max_message) <= room);
    let slots = slots.filter(|slots| *slots > 0 || first.slots == 0).ok_or_else(|| {
        let problem = format!("a large frame, in messages of {max_message} bytes at most, is too many requests for the queue of the sender's port");
        Error::system(format!("receive by RDMA on {}", card.place()), problem)
    })?;
    Ok((slots, max_message))
}

impl Receiving {
    /// Opens this end, after the sender has described its own by `bytes`, a greeting.
    pub(super) fn new(peer: Rank, card: &Arc<Card>, bytes: &[u8; GREETING]) -> Result<Receiving, Error> {
        let other = Greeting::decode(bytes).map_err(|problem| Error::protocol(peer, problem))?;
        check_other(card, &other.first, peer)?;
        if other.first.area.is_some() {
            return Err(Error::protocol(peer, "it sends by RDMA, and names an area to receive in"));
        }
        let mut first = ReceiveLane::new(card)?;
        let is_reached = |hello: &Hello| card.second().is_some_and(|second| second.reaches(&hello.gid));
        let second = card.second().zip(other.second.filter(is_reached));
        let (wanted, _) = slots_for(card, &other.first, second)?;
        let mut area = card.area(wanted, second.is_some())?;
        // Without slots, or without its own registration of the area, the second port cannot be used.
        let second = second.filter(|_| area.of_lane(1).is_some());
        let (_, max_message) = slots_for(card, &other.first, second)?;
        // No offers on a narrow link, which has no slots for what cannot be READ to its place; nor where a payload may be larger than one message,
        // as a READ is one message.
        let can_read = area.slots > 0 && max_message as usize >= SLOT;
        first.connect(&other.first, can_read)?;
        let second = second.and_then(|(card, hello)| {
            let alone = |error: &Error| {
                tracing::debug!(peer, %error, "a link over RDMA goes by the first port alone");
            };
            let mut lane = ReceiveLane::second(card).inspect_err(alone).ok()?;
            let given_up = |error: &Error| card.give_up(&hello, error.to_string());
            lane.connect(&hello, can_read).inspect_err(given_up).ok()?;
            Some(lane)
        });
        if second.is_none() {
            area.end_second();
        }
        let lanes = Lanes { first, second };
        Ok(Receiving {
            peer,
            credits: Receiver::new(area.slots.max(1), lanes.len()),
            lanes,
            large: (area.slots == 0).then(Assembly::default),
            taking: Taking::new(),
            area,
            max_message,
            notes: 0,
            awaited: 0,
            is_broken: false,
            is_lost: false,
            broke: None,
        })
    }

    pub(super) fn greeting(&self) -> Greeting {
        let hello = |at: usize| {
            let memory = self.area.of_lane(at);
            let area = memory
                .map(|memory| Area { at: memory.at(0).expose_provenance() as u64, key: memory.remote_key() });
            let lane = &self.lanes[at];
            lane.lane.hello(self.area.slots, lane.reads, area)
        };
        Greeting { first: hello(0), second: self.lanes.second.is_some().then(|| hello(1)) }
    }

    /// Takes all completions that have come, and sends the notes that are due. If the progress thread is about to sleep, asks the devices to wake it.
    pub(super) fn look(&mut self) -> Result<(), Error> {
        for at in 0..self.lanes.len() {
            self.look_at(at)?;
        }
        if !self.is_lost {
            self.tell();
        }
        Ok(())
    }

    fn look_at(&mut self, at: usize) -> Result<(), Error> {
        let mut told = [IbvWc::default(); BATCH];
        loop {
            let lane = &mut self.lanes[at].lane;
            match lane.pair.completions(|| super::is_wanted(&lane.card), &mut told) {
                Ok(Some(count)) => {
                    let told = &told[..count];
                    // As in `Sending::look_at`: what is wrong with one completion keeps no other from being taken.
                    told.iter().map(|completion| self.take(at, completion)).fold(Ok(()), Result::and)?;
                    if let Err(error) = self.lanes[at].lane.pair.post_receives(received(told)) {
                        self.lose(at, &error);
                        return Ok(());
                    }
                }
                Ok(None) => return Ok(()),
                Err(error) => {
                    self.lose(at, &error);
                    return Ok(());
                }
            }
        }
    }

    fn take(&mut self, at: usize, completion: &IbvWc) -> Result<(), Error> {
        let is_good = WcStatus(completion.status) == WcStatus::SUCCESS;
        if completion.wr_id != RECEIVED && completion.wr_id >= READ {
            self.taking.has_read(completion.wr_id - READ, is_good);
        }
        if !is_good {
            self.break_off(at, self.lanes[at].lane.problem_of(completion));
            return Ok(());
        }
        match completion.wr_id {
            RECEIVED => {
                self.lanes[at].is_used = true;
                let came = self.came(at, u32::from_be(completion.imm_data), completion.byte_len);
                came.map_err(|problem| Error::protocol(self.peer, problem))
            }
            NOTE => {
                self.notes = self.notes.saturating_sub(1);
                self.awaited = self.awaited.saturating_sub(1);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A message has come by this lane with this number and so many bytes.
    fn came(&mut self, lane: usize, number: u32, bytes: u32) -> Result<(), String> {
        let most = self.max_message.min(PIECE_BYTES);
        let arrival = |number, large, offered| Arrival { number, large, offered, bytes, lane };
        match (Came::of(number), &mut self.large, self.area.memory()) {
            // SAFETY: `large` exists only on a narrow link, so `area` is a narrow link's; it is mapped as long as it is registered.
            (Came::Part, Some(large), Some(area)) => unsafe { large.take(area.at(0), (bytes, most), false) },
            (Came::Part, ..) => Err("a piece of a large frame came on a link that takes frames whole".into()),
            (Came::Offer { .. }, ..) if self.lanes[lane].reads == 0 || bytes != Offer::BYTES as u32 => {
                let reads = self.lanes[lane].reads;
                Err(format!("an offer of {bytes} bytes came, on a link with {reads} READs at once"))
            }
            (Came::Offer { number }, ..) => self.credits.came(arrival(number, true, true)),
            (Came::Frame { number, large: true }, Some(large), Some(area)) => {
                self.credits.came(arrival(number, true, false))?;
                // SAFETY: as above.
                unsafe { large.take(area.at(0), (bytes, most), true) }
            }
            (Came::Frame { number, large }, ..) => self.credits.came(arrival(number, large, false)),
        }
    }

    /// The oldest frame is released.
    pub(super) fn release(&mut self) {
        if let (Some(large), Some((place, _))) = (&mut self.large, self.credits.head())
            && place.slot.is_some()
        {
            large.release();
        }
        self.credits.release();
        self.tell();
    }

    /// The oldest frame that has come.
    pub(super) fn head(&self) -> Result<Option<Frame>, Error> {
        let (Some((place, bytes)), Some(memory)) = (self.credits.head(), self.area.memory()) else {
            return Ok(None);
        };
        let wrong = |problem| Error::protocol(self.peer, problem);
        if let (Some(large), Some(_)) = (&self.large, place.slot) {
            return self.head_of(large).map_err(wrong);
        }
        let at = memory.at(offset(place)).cast_const();
        // SAFETY: the header lies inside the area, and bytes need no alignment. A faulty peer may write there meanwhile, so the header is read once: the
        // bytes that are checked are those that are used.
        let header = unsafe { at.cast::<[u8; HEADER_BYTES]>().read_volatile() };
        let most = if place.slot.is_some() { SLOT } else { INLINE };
        let header = Header::decode(&header, most).map_err(wrong)?;
        let (_, last) = cut(HEADER_BYTES + header.len as usize, self.max_message);
        if bytes != last {
            return Err(wrong(format!(
                "a frame whose header says {} bytes ended with a message of {bytes} bytes, expected {last}",
                header.len
            )));
        }
        let data = at.wrapping_add(HEADER_BYTES);
        Ok(Some(Frame { header, data, ready: header.len as usize, done: 0 }))
    }

    /// The large frame that was put together.
    fn head_of(&self, large: &Assembly) -> Result<Option<Frame>, String> {
        let Some((header, payload)) = large.whole().and_then(|whole| whole.split_first_chunk()) else {
            return Err("a large frame came that has no header".into());
        };
        let header = Header::decode(header, SLOT)?;
        if header.len as usize != payload.len() {
            return Err(format!("a frame whose header says {} bytes has {}", header.len, payload.len()));
        }
        Ok(Some(Frame { header, data: payload.as_ptr(), ready: payload.len(), done: 0 }))
    }

    /// Tells the sender how many pieces were copied and how many frames released, if it is due to be told, and the queue has room for a note.
    fn tell(&mut self) {
        while self.notes < super::NOTES && !self.is_broken {
            let copied = self.large.as_mut().and_then(Assembly::tell).map(Note::Copied);
            // A note that is due only for offered frames waits while the card READs to an operation's memory. That delays nobody: the READs are of the
            // same message, so the sender's operation cannot end before them; and the receiver's operation polls this link until they are over.
            let is_awaited = self.credits.is_awaited();
            let is_due = self.credits.owes() || is_awaited && !self.taking.writes();
            let released = || is_due.then(|| Note::Released(self.credits.tell()));
            let Some(note) = copied.or_else(released) else { return };
            match self.lanes.first.lane.pair.post_number(NOTE, note.encode()) {
                Ok(()) => {
                    self.notes += 1;
                    self.awaited = if is_awaited { self.notes } else { self.awaited };
                }
                Err(error) => self.break_off(0, error.to_string()),
            }
        }
    }

    /// Whether no break is left to be returned, and the link is broken or the sender has got all notes that release offered frames, for which the
    /// sender's operations wait. Takes completions only while such notes are due or under way: else a narrow link would take pieces that nobody
    /// reads.
    pub(super) fn is_flushed(&mut self) -> Result<bool, Error> {
        let waits = |receiving: &Receiving| receiving.awaited > 0 || receiving.credits.is_awaited();
        if waits(self) {
            self.look()?;
        }
        Ok(self.broke.is_none() && (self.is_broken || !waits(self)))
    }

    /// Returns, once, that the link broke. Also asks whether a device has reported a failure, after which completions may never come.
    pub(super) fn take_break(&mut self) -> Option<Break> {
        for at in 0..self.lanes.len() {
            if !self.lanes[at].is_given_up
                && let Some(problem) = self.lanes[at].lane.pair.problem()
            {
                self.break_off(at, problem);
            }
        }
        self.broke.take()
    }

    /// A call of libibverbs failed for lane `at`: breaks the link off, unless that is a second lane that is not used.
    pub(super) fn lose(&mut self, at: usize, error: &VerbsError) {
        self.is_lost |= at == 0 || self.lanes[at].is_used;
        self.break_off(at, error.to_string());
    }

    fn break_off(&mut self, at: usize, problem: String) {
        if at > 0 && !self.lanes[at].is_used {
            let lane = &mut self.lanes[at];
            if !std::mem::replace(&mut lane.is_given_up, true) {
                tracing::debug!(
                    peer = self.peer,
                    problem,
                    "the second port of a link over RDMA failed before it was used"
                );
                // A sender that comes to use this lane all the same finds it failed, and says so.
                lane.lane.pair.fail();
            }
        } else if !self.is_broken {
            self.is_broken = true;
            tracing::debug!(peer = self.peer, problem, "a link over RDMA broke while receiving");
            let (at, peer_at) = self.lanes[at].lane.ends();
            self.broke = Some(report(&at, peer_at, problem));
        }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if crate::forked::is_forked() || !self.lanes.destroy() {
            // The peer may go on writing to the area for ever; in a forked child the registration is the parent's. So the area is leaked.
            self.area.leave();
        }
    }
}
