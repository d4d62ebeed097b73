//! The core of the sending end of a link over RDMA: its lanes, credits and requests.

use std::sync::Arc;

use allstream_sys::verbs::{Access, IbvSge, IbvWc, VerbsError, WcStatus};

use super::broken::{BATCH, received, report};
use super::card::{Card, requests};
use super::check_other;
use super::credits::{COUNT, Note, PART, Place, Sender};
use super::hello::{GREETING, Greeting};
use super::lane::{Lanes, SendLane, TRIAL};
use super::layout::{CELL, LARGEST, PIECE_BYTES, PIECES, cut, offset, place_of_piece};
use super::pieces::PiecesSent;
use super::queue_pair::{PIECE, RECEIVED, Room, Tells, Write};
use crate::error::Error;
use crate::link::{Break, HEADER_BYTES, Header, INLINE, Posted, SLOT};
use crate::types::Rank;

/// The state of a sending end from the greeting on. A [lease](crate::link::LinkTx::lease) shares it, to ask whether the devices are done with all
/// that was posted.
pub(super) struct Sending {
    pub(super) peer: Rank,
    pub(super) lanes: Lanes<SendLane>,
    pub(super) credits: Sender,
    max_message: u32,
    /// How many slots this end asks the receiver for: each lane's queue has room for so many large frames, cut into messages that this end's ports take.
    most_slots: u32,
    /// On a narrow link (`pieces.rs`): the count of the pieces in which large frames are sent. `None`: large frames are written to slots.
    pieces: Option<PiecesSent>,
    /// The large frame of which pieces are still to be posted.
    pub(super) large: Option<Large>,
    /// Posted pieces that the device is not done with. A frame's last piece is not counted here: its completion is the frame's.
    under_way: u32,
    /// Set when the link breaks: how many frames the device was done with then. The later ones count as not arrived.
    broken_at: Option<u64>,
    is_revoked: bool,
    broke: Option<Break>,
}

/// A large frame that goes over a narrow link, piece by piece.
pub(super) struct Large {
    /// Header and payload.
    from: [IbvSge; 2],
    bytes: usize,
    /// Bytes of the pieces that were posted.
    posted: usize,
    /// The frame's number, which goes with its last piece.
    number: u32,
}

/// Bytes of the largest message that all of these ports take.
fn common_message<'a>(cards: impl Iterator<Item = &'a Arc<Card>>) -> u32 {
    cards.map(|card| card.max_message()).fold(u32::MAX, u32::min)
}

impl Sending {
    pub(super) fn new(peer: Rank, card: &Arc<Card>) -> Result<Sending, Error> {
        let cards = || [card].into_iter().chain(card.second());
        let max_message = common_message(cards());
        let most_slots = cards().map(|card| card.slots_to_send(max_message)).fold(u32::MAX, u32::min);
        let room = Room {
            send: requests(most_slots, max_message),
            receive: super::RECEIVES as u32,
            other_may: Access::REMOTE_READ,
        };
        let mut first = SendLane::new(card, room)?;
        super::fill(&mut first.lane.pair, card)?;
        let alone = |error: &Error| {
            tracing::debug!(peer, %error, "a link over RDMA goes by the first port alone");
        };
        let second = card.second().and_then(|second| SendLane::second(second, room).inspect_err(alone).ok());
        Ok(Sending {
            peer,
            lanes: Lanes { first, second },
            credits: Sender::new(most_slots),
            max_message,
            most_slots,
            pieces: None,
            large: None,
            under_way: 0,
            broken_at: None,
            is_revoked: false,
            broke: None,
        })
    }

    pub(super) fn greeting(&self) -> Greeting {
        let hello = |lane: &SendLane| lane.hello(self.most_slots);
        Greeting { first: hello(&self.lanes.first), second: self.lanes.second.as_ref().map(hello) }
    }

    /// Connects the lanes to the receiver's, by the greeting with which the receiver has answered.
    pub(super) fn connect(&mut self, bytes: &[u8; GREETING]) -> Result<(), Error> {
        let wrong = |problem| Error::protocol(self.peer, problem);
        let other = Greeting::decode(bytes).map_err(wrong)?;
        check_other(&self.lanes.first.lane.card, &other.first, self.peer)?;
        let granted = other.first.slots;
        if granted > self.most_slots {
            return Err(wrong(format!("it grants {granted} slots, and {} were asked for", self.most_slots)));
        }
        if other.second.is_some() && (self.lanes.second.is_none() || granted == 0) {
            return Err(wrong("it names a second port, and was offered none or grants no slots".into()));
        }
        if other.second.is_none() {
            self.lanes.second = None;
        }
        let cards = self.lanes.iter().map(|lane| &lane.lane.card);
        let own_max = common_message(cards);
        self.max_message = [&other.first]
            .into_iter()
            .chain(&other.second)
            .map(|hello| hello.max_message)
            .fold(own_max, u32::min);
        self.lanes.first.agree(&other.first).map_err(wrong)?;
        if granted == 0 {
            // The link is narrow: one large frame goes at a time, in pieces, for which the queue always has room.
            (self.credits, self.pieces) = (Sender::new(1), Some(PiecesSent::default()));
            return self.lanes.first.connect(&other.first);
        }
        if requests(granted, self.max_message) > requests(self.most_slots, own_max) {
            return Err(wrong(format!(
                "it grants {granted} slots, too many for this port's queue if messages have {} bytes at most",
                self.max_message
            )));
        }
        self.credits = Sender::new(granted);
        self.lanes.first.connect(&other.first)?;
        let Some((lane, hello)) = self.lanes.second.as_mut().zip(other.second) else { return Ok(()) };
        lane.agree(&hello).map_err(wrong)?;
        let card = lane.lane.card.clone();
        let given_up = |error: &Error| card.give_up(&hello, error.to_string());
        let is_connected = card.reaches(&hello.gid) && lane.connect(&hello).inspect_err(given_up).is_ok();
        if !is_connected || lane.start_trial(granted).is_err() {
            self.lanes.second = None;
        }
        Ok(())
    }

    /// Takes all completions that have come. If the progress thread is about to sleep, asks the devices to wake it at the next one.
    pub(super) fn look(&mut self) -> Result<(), Error> {
        for at in 0..self.lanes.len() {
            self.look_at(at)?;
        }
        self.go_on_with_large();
        Ok(())
    }

    fn look_at(&mut self, at: usize) -> Result<(), Error> {
        let mut told = [IbvWc::default(); BATCH];
        // Taking the trial's completion may remove the second lane: then this loop is over.
        while at < self.lanes.len() {
            let lane = &mut self.lanes[at].lane;
            match lane.pair.completions(|| super::is_wanted(&lane.card), &mut told) {
                // An error in one completion does not keep the others from being taken: each says that the device is done with something.
                Ok(Some(count)) => {
                    let told = &told[..count];
                    told.iter().map(|completion| self.take(at, completion)).fold(Ok(()), Result::and)?;
                    if let Err(error) = self.lanes[at].lane.pair.post_receives(received(told)) {
                        self.lose(at, error);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.lose(at, error);
                    break;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, at: usize, completion: &IbvWc) -> Result<(), Error> {
        if completion.wr_id == TRIAL {
            self.end_trial(completion);
            return Ok(());
        }
        let status = WcStatus(completion.status);
        if status != WcStatus::SUCCESS {
            self.break_off(at, self.lanes[at].lane.problem_of(completion));
            // The device is done with the failed request. But if the request was to invalidate the key of an offered frame, the peer may still READ
            // the payload, until the link is revoked or its queue pairs are destroyed: so that frame is not done.
            let frame = completion.wr_id.wrapping_sub(1);
            if !self.is_offered(frame) {
                self.is_done_with(at, completion.wr_id);
            }
            return Ok(());
        }
        if completion.wr_id != RECEIVED {
            self.is_done_with(at, completion.wr_id);
            return Ok(());
        }
        let told = match (Note::decode(u32::from_be(completion.imm_data)), &mut self.pieces) {
            (Note::Released(count), _) => self.credits.told(count),
            (Note::Copied(count), Some(pieces)) => pieces.told(count, COUNT).map(|()| 0..0),
            (Note::Copied(_), None) => {
                Err("it says that it copied pieces of frames, and none was sent".into())
            }
        };
        let released = told.map_err(|problem| Error::protocol(self.peer, problem))?;
        self.end_offers_of(released);
        Ok(())
    }

    /// The trial of the second lane is over.
    fn end_trial(&mut self, completion: &IbvWc) {
        let Some(lane) = &mut self.lanes.second else { return };
        if !lane.end_trial(completion) {
            if !self.is_revoked && self.broken_at.is_none() {
                lane.lane.has_failed_trial(completion);
            }
            self.lanes.second = None;
        }
    }

    /// The device is done with the request of this id.
    fn is_done_with(&mut self, at: usize, id: u64) {
        match id {
            RECEIVED => {}
            id if id & PIECE == 0 => {
                let frame = id.wrapping_sub(1);
                let lane = &mut self.lanes[at];
                if let Some(offering) = &mut lane.offering {
                    offering.is_over(frame);
                }
                lane.large = lane.large.saturating_sub(self.credits.is_large(frame).into());
                self.credits.is_done_with(frame);
            }
            _ => self.under_way = self.under_way.saturating_sub(1),
        }
    }

    /// Breaks the link off because a call of the library failed, or because a device has reported a failure. Nobody knows what the devices still read
    /// until the queue pairs are destroyed.
    pub(super) fn lose(&mut self, at: usize, problem: impl ToString) {
        let problem = problem.to_string();
        // A second lane that is still on trial carries nothing: the link goes on without it.
        if at > 0 && self.lanes.second.as_ref().is_some_and(|second| !second.is_proven) {
            tracing::debug!(peer = self.peer, problem, "a link over RDMA goes by the first port alone");
            self.lanes.second = None;
            return;
        }
        self.break_off(at, problem);
        if self.destroy() {
            self.large = None;
            for frame in self.credits.gone()..self.credits.posted() {
                if !self.is_offered(frame) {
                    self.credits.is_done_with(frame);
                }
            }
        }
    }

    /// Gives back the windows that are bound through the queue pairs, then destroys the pairs. `true`: all are destroyed, as
    /// [`QueuePair::destroy`](super::queue_pair::QueuePair::destroy) says.
    fn destroy(&mut self) -> bool {
        self.lanes.fail();
        self.end_offers();
        self.lanes.destroy()
    }

    fn break_off(&mut self, at: usize, problem: String) {
        if self.broken_at.is_none() {
            self.broken_at = Some(self.credits.gone());
            if !self.is_revoked {
                tracing::debug!(peer = self.peer, problem, "a link over RDMA broke while sending");
                let (at, peer_at) = self.lanes[at].lane.ends();
                self.broke = Some(report(&at, peer_at, problem));
            }
        }
    }

    /// Breaks the link off if a device has reported a failure, after which completions may never come.
    fn look_for_problems(&mut self) {
        for at in 0..self.lanes.len() {
            if let Some(problem) = self.lanes[at].lane.pair.problem() {
                return self.lose(at, problem);
            }
        }
    }

    /// Returns, once, that the link broke.
    pub(super) fn take_break(&mut self) -> Option<Break> {
        if !self.is_over() {
            self.look_for_problems();
        }
        self.broke.take()
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_revoked || self.broken_at.is_some()
    }

    /// Whether all that was posted has arrived, or the link is over and no break is left to be told.
    pub(super) fn is_flushed(&mut self) -> bool {
        let _ = self.look();
        self.broke.is_none() && (self.is_over() || self.credits.gone() == self.credits.posted())
    }

    pub(super) fn has_room(&self) -> bool {
        self.credits.has_room() && self.large.is_none() && !self.is_over()
    }

    /// How many frames count as released. On a link that broke and is not revoked: those that had arrived before, though more sources may be free.
    pub(super) fn released(&self) -> u64 {
        match self.broken_at {
            Some(arrived) if !self.is_revoked => arrived,
            _ => self.credits.gone(),
        }
    }

    pub(super) fn revoke(&mut self) {
        if !self.is_revoked {
            self.is_revoked = true;
            self.lanes.fail();
            self.end_offers();
        }
        let _ = self.look();
    }

    /// Whether the devices are done with all that was posted.
    pub(super) fn is_quiet(&mut self) -> bool {
        let _ = self.look();
        // A card that has failed completes nothing more. `look_for_problems` then destroys the queue pairs, after which no device reads the frames.
        if self.credits.gone() < self.credits.posted() {
            self.look_for_problems();
        }
        self.credits.gone() == self.credits.posted()
    }

    /// The lane with fewer large frames under way, by which the next one is to go; the first if both have as many.
    pub(super) fn lane_of_large(&self) -> usize {
        let is_better = |second: &&SendLane| second.is_proven && second.large < self.lanes.first.large;
        usize::from(self.lanes.second.as_ref().filter(is_better).is_some())
    }

    /// As [`LinkTx::post`](crate::link::LinkTx::post).
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let len = header.len as usize;
        let large = len > INLINE;
        // If the payload is not registered with the second lane's device, the frame goes by the first lane.
        let lanes = if large { [self.lane_of_large(), 0] } else { [0, 0] };
        let key = lanes.map(|at| (at, self.lanes[at].key(payload, len, large)));
        let (at, key) = if key[0].1.is_some() { key[0] } else { key[1] };
        if large && (len > SLOT || key.is_none()) {
            return Err(Error::system("send by RDMA", "the payload is in no registered memory (a bug)"));
        }
        let lane = &mut self.lanes[at];
        let Some(cells) = &lane.cells else {
            return Err(Error::system("send by RDMA", "the link is closed (a bug)"));
        };
        lane.large += u32::from(large);
        let (place, number) = self.credits.post(large);
        let cell = cells.at(place.cell as usize * CELL);
        // SAFETY: the cell is this lane's own memory, and the caller posts only if there is room (`has_room`): so the device is done with the
        // frame that was in this cell before. A small payload has room behind the header, and is valid for reads of `len` bytes (the caller's
        // promise). A payload of no bytes may be null, and is not read.
        unsafe {
            std::ptr::copy_nonoverlapping(header.encode().as_ptr(), cell, HEADER_BYTES);
            if !large && len > 0 {
                std::ptr::copy_nonoverlapping(payload, cell.add(HEADER_BYTES), len);
            }
        }
        let in_cell = HEADER_BYTES + if large { 0 } else { len };
        let first = piece(cell, in_cell, cells.local_key());
        let second = piece(payload, len, key.unwrap_or_default());
        let from = if large { &[first, second][..] } else { &[first][..] };
        let (frame, bytes) = (self.credits.posted(), HEADER_BYTES + len);
        if large && self.pieces.is_some() {
            self.large = Some(Large { from: [first, second], bytes, posted: 0, number });
            self.go_on_with_large();
            return Ok(Posted::Held);
        }
        // SAFETY: the cell is registered, and stays as it is until the device is done with the frame. So does the payload's memory, by the
        // caller's promise.
        if let Err(error) = unsafe { self.write(at, from, bytes, place, (frame, number)) } {
            self.lose(at, error);
        }
        Ok(if large { Posted::Held } else { Posted::Copied })
    }

    /// Posts as many pieces of the large frame as the window has room for. On a link that was revoked or has broken it posts none, and
    /// counts the frame as done with once the device is done with the pieces that were posted.
    fn go_on_with_large(&mut self) {
        while !self.is_over()
            && let (Some(large), Some(pieces)) = (&mut self.large, &mut self.pieces)
        {
            // The receiver's note that it has copied a piece may come before the piece's completion here. The queue has room for `PIECES`
            // uncompleted pieces beside all frames.
            if !pieces.has_room() || u64::from(self.under_way) >= PIECES {
                return;
            }
            let bytes = (large.bytes - large.posted).min(self.max_message.min(PIECE_BYTES) as usize);
            let mut parts = [IbvSge::default(); 2];
            let count = part_of(&large.from, large.posted, bytes, &mut parts);
            large.posted += bytes;
            let is_last = large.posted == large.bytes;
            let (id, number) =
                if is_last { (self.credits.posted() & !PIECE, large.number) } else { (PIECE, PART) };
            let lane = &mut self.lanes.first;
            let to = lane.to.at + place_of_piece(pieces.post()) as u64;
            if is_last {
                self.large = None;
            } else {
                self.under_way += 1;
            }
            let write = Write { id, from: &parts[..count], to, key: lane.to.key, tells: Tells::Both(number) };
            // SAFETY: the frame's cell and its payload's memory are registered, and stay as they are until the device is done with the frame,
            // which is after the completions of its pieces. For the payload the caller of `post` has promised it.
            if let Err(error) = unsafe { lane.lane.pair.post_write(write) } {
                return self.lose(0, error);
            }
        }
        // A large frame that is left here is on a link that is over. It is the newest frame, and the device completes requests in order: the
        // frame is done with once all earlier frames and its own posted pieces are.
        if self.large.is_some() && self.under_way == 0 && self.credits.gone() + 1 == self.credits.posted() {
            self.large = None;
            self.credits.is_done_with_next();
        }
    }

    /// Writes a frame to its place in the receiver's area, in as many messages as its size takes.
    ///
    /// # Safety
    /// As for [`QueuePair::post_write`].
    unsafe fn write(
        &mut self,
        at: usize,
        from: &[IbvSge],
        bytes: usize,
        place: Place,
        (frame, number): (u64, u32),
    ) -> Result<(), VerbsError> {
        debug_assert!(bytes <= LARGEST);
        let lane = &mut self.lanes[at];
        let (to, key) = (lane.to.at + offset(place) as u64, lane.to.key);
        let (pieces, _) = cut(bytes, self.max_message);
        let max = self.max_message as usize;
        for piece in 0..pieces {
            let (begin, is_last) = (piece * max, piece + 1 == pieces);
            let mut parts = [IbvSge::default(); 2];
            let count = part_of(from, begin, max.min(bytes - begin), &mut parts);
            let id = if is_last { frame & !PIECE } else { PIECE };
            let tells = if is_last { Tells::Both(number) } else { Tells::Nobody };
            let write = Write { id, from: &parts[..count], to: to + begin as u64, key, tells };
            // SAFETY: the caller's promise; the device completes the last piece after the others.
            unsafe { lane.lane.pair.post_write(write) }?;
        }
        Ok(())
    }
}

pub(super) fn piece(at: *const u8, bytes: usize, key: u32) -> IbvSge {
    IbvSge { addr: at.expose_provenance() as u64, length: bytes as u32, lkey: key }
}

/// Takes the pieces of memory `from` as one behind the other, and puts the part of `bytes` bytes that begins at byte `skip` into `into`.
/// Returns how many pieces that part has.
fn part_of(from: &[IbvSge], mut skip: usize, mut bytes: usize, into: &mut [IbvSge; 2]) -> usize {
    let mut count = 0;
    for piece in from {
        let here = (piece.length as usize).saturating_sub(skip).min(bytes);
        if here > 0 {
            into[count] = IbvSge { addr: piece.addr + skip as u64, length: here as u32, lkey: piece.lkey };
            (count, bytes) = (count + 1, bytes - here);
        }
        skip = skip.saturating_sub(piece.length as usize);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_cut_across_its_header_and_its_payload() {
        let from = [IbvSge { addr: 1000, length: 64, lkey: 1 }, IbvSge { addr: 9000, length: 100, lkey: 2 }];
        let cut = |begin, bytes| {
            let mut into = [IbvSge::default(); 2];
            let count = part_of(&from, begin, bytes, &mut into);
            into[..count].iter().map(|piece| (piece.addr, piece.length, piece.lkey)).collect::<Vec<_>>()
        };
        assert_eq!(cut(0, 164), [(1000, 64, 1), (9000, 100, 2)]);
        assert_eq!(cut(0, 50), [(1000, 50, 1)]);
        assert_eq!(cut(50, 50), [(1050, 14, 1), (9000, 36, 2)]);
        assert_eq!(cut(100, 64), [(9036, 64, 2)]);
        assert_eq!(cut(64, 1), [(9000, 1, 2)]);
    }
}
