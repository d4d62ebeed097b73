//! The sending end of a link over RDMA.

use std::os::fd::AsFd;
use std::sync::Arc;

use allstream_sys::verbs::{Access, IbvSge, IbvWc, VerbsError, WcStatus};
use parking_lot::Mutex;

use super::broken::{BATCH, problem_of, received, report};
use super::card::Card;
use super::credits::{COUNT, Note, PART, Place, Sender};
use super::domain::Registered;
use super::hello::{Area, Hello, Talk};
use super::layout::{CELL, CELLS_BYTES, LARGEST, PIECE_BYTES, PIECES, cut, offset, place_of_piece};
use super::offers::{Offering, Reads};
use super::pieces::PiecesSent;
use super::queue_pair::{QueuePair, RECEIVED, Room, Write};
use super::{check_other, first_packet, on_rank};
use crate::error::Error;
use crate::link::dialled::Dialled;
use crate::link::exit::Lease;
use crate::link::{Break, HEADER_BYTES, Header, INLINE, Interest, LinkTx, Posted, Reactor, SLOT, Site};
use crate::types::Rank;

enum State {
    Dialled(Dialled),
    /// Both ends tell each other of their queue pairs.
    Greeting(Talk, Box<Sending>),
    Open(Arc<Mutex<Sending>>),
    /// The link was given up before it was open, or the connection on which the ends greet each other broke.
    Dead,
}

/// The sending end. `room` says `false` until the link is open.
pub(super) struct VerbsTx {
    /// World ranks of the sender and of the receiver.
    ends: (Rank, Rank),
    peer: Rank,
    card: Arc<Card>,
    reactor: Arc<dyn Reactor>,
    state: State,
    broke: Option<Break>,
}

impl VerbsTx {
    pub(super) fn open(site: &dyn Site) -> Result<VerbsTx, Error> {
        Ok(VerbsTx {
            ends: site.name().ends,
            peer: site.peer(),
            card: site.card()?,
            reactor: site.reactor(),
            state: State::Dialled(Dialled::new(site.dial())),
            broke: None,
        })
    }

    /// Goes on with opening the link, as far as it can without blocking.
    fn go_on(&mut self) -> Result<(), Error> {
        if let State::Dialled(dialled) = &mut self.state
            && let Some(socket) = dialled.poll(&self.reactor)?
        {
            self.reactor.watch(socket.as_fd(), Interest::Readable)?;
            let sending = Sending::new(self.peer, &self.card)?;
            let mut talk = Talk::new(socket);
            talk.say(&sending.hello());
            self.state = State::Greeting(talk, Box::new(sending));
        }
        let State::Greeting(talk, _) = &mut self.state else { return Ok(()) };
        match talk.has_said().and_then(|_| talk.heard()) {
            Ok(None) => {}
            Ok(Some(bytes)) => {
                let State::Greeting(_, mut sending) = std::mem::replace(&mut self.state, State::Dead) else {
                    return Ok(());
                };
                sending.connect(&bytes)?;
                self.reactor.watch(sending.pair.descriptor(), Interest::Readable)?;
                self.card.events().listen(&*self.reactor)?;
                self.state = State::Open(Arc::new(Mutex::new(*sending)));
            }
            Err(error) => {
                let (at, peer_at) = (self.card.place(), "an unknown address");
                self.broke = Some(report(&at, peer_at, format!("while the link was being opened: {error}")));
                self.state = State::Dead;
            }
        }
        Ok(())
    }

    fn sending<R>(&self, otherwise: R, ask: impl FnOnce(&mut Sending) -> R) -> R {
        match &self.state {
            State::Open(sending) => ask(&mut sending.lock()),
            _ => otherwise,
        }
    }
}

impl LinkTx for VerbsTx {
    fn room(&mut self) -> Result<bool, Error> {
        self.go_on().map_err(|error| on_rank(self.ends.0, error))?;
        self.sending(Ok(false), |sending| {
            sending.look()?;
            Ok(sending.credits.has_room() && sending.large.is_none() && !sending.is_over())
        })
    }

    fn needs_slot(&self, payload: *const u8, len: usize) -> bool {
        // The region's staging slots are registered with the device, and so are buffers from `Comm::alloc`, as far as the device takes them.
        let (at, bytes) = self.card.region().all_slots();
        let offset = (payload as usize).wrapping_sub(at.as_ptr() as usize);
        let in_slots = offset < bytes && len <= bytes - offset;
        !in_slots && self.card.block(payload, len).is_none()
    }

    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let State::Open(sending) = &self.state else { return Err(no_room()) };
        // SAFETY: the caller's promise.
        unsafe { sending.lock().post(header, payload) }
    }

    unsafe fn post_to_copy(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let State::Open(sending) = &self.state else { return Err(no_room()) };
        // SAFETY: the caller's promise.
        unsafe { sending.lock().post_to_copy(header, payload) }
    }

    fn touches(&self, at: *const u8, len: usize) -> bool {
        self.card.region().is_page(at, len)
    }

    fn arrives_unread(&self) -> bool {
        self.sending(true, |sending| sending.large.is_none())
    }

    fn released(&mut self) -> Result<u64, Error> {
        self.sending(Ok(0), |sending| {
            sending.look()?;
            Ok(sending.released())
        })
    }

    fn revoke(&mut self) -> bool {
        match &self.state {
            State::Open(sending) => sending.lock().revoke(),
            _ => self.state = State::Dead,
        }
        // Of operations' memory the device reads only buffers from `Comm::alloc`, of which `touches` tells. They, and slots, come back one by one as
        // the device is done with them.
        true
    }

    fn lease(&self) -> Option<Lease> {
        let State::Open(sending) = &self.state else { return None };
        let sending = sending.clone();
        Some(Lease::written(self.card.region(), Box::new(move || sending.lock().is_quiet())))
    }

    fn take_break(&mut self) -> Option<Break> {
        self.broke.take().or_else(|| self.sending(None, Sending::take_break))
    }

    fn is_flushed(&mut self) -> bool {
        self.sending(self.broke.is_none(), |sending| {
            let _ = sending.look();
            sending.broke.is_none()
                && (sending.is_over() || sending.credits.gone() == sending.credits.posted())
        })
    }
}

fn no_room() -> Error {
    Error::system("send by RDMA", "there is no room (a bug)")
}

/// The state of a sending end from the greeting on. A [lease](LinkTx::lease) shares it, to ask whether the device is done with staging slots.
pub(super) struct Sending {
    pub(super) peer: Rank,
    pub(super) pair: QueuePair,
    /// The cells that the device reads headers and small payloads from. `None` only while this is being dropped, as `slots` is.
    pub(super) cells: Option<Registered>,
    slots: Option<Arc<Registered>>,
    pub(super) card: Arc<Card>,
    pub(super) credits: Sender,
    pub(super) to: Area,
    first_packet: u32,
    max_message: u32,
    /// How many slots this end asks the receiver for: the queue of `pair` has room for so many large frames at once.
    most_slots: u32,
    /// The count of the pieces that large frames are sent in. `None`: the link is not narrow (`pieces.rs`), and they go whole.
    pieces: Option<PiecesSent>,
    /// What is offered to the receiver. `None`: it takes no offers.
    pub(super) offering: Option<Offering>,
    /// The large frame of which pieces are still to be posted.
    large: Option<Large>,
    /// Pieces of `large` that the device is not done with; the last one is not counted.
    under_way: u32,
    peer_at: String,
    /// Set when the link breaks: how many frames the device was done with then. The later ones count as not arrived.
    broken_at: Option<u64>,
    is_revoked: bool,
    broke: Option<Break>,
}

/// A large frame that goes over a narrow link, piece by piece.
struct Large {
    /// Header and payload.
    from: [IbvSge; 2],
    bytes: usize,
    /// Bytes of the pieces that were posted.
    posted: usize,
    /// The frame's number, which goes with its last piece.
    number: u32,
}

impl Sending {
    fn new(peer: Rank, card: &Arc<Card>) -> Result<Sending, Error> {
        let (max_message, most_slots) = (card.max_message(), card.slots_to_send(card.max_message()));
        let room = Room {
            send: card.requests_to_send(most_slots, max_message),
            receive: super::RECEIVES as u32,
            other_may: Access::REMOTE_READ,
        };
        let mut pair = QueuePair::new(card, room)?;
        super::fill(&mut pair, card)?;
        Ok(Sending {
            peer,
            pair,
            cells: Some(card.cells(CELLS_BYTES)?),
            slots: Some(card.slots()?),
            card: card.clone(),
            credits: Sender::new(most_slots),
            to: Area { at: 0, key: 0 },
            first_packet: first_packet()?,
            max_message,
            most_slots,
            pieces: None,
            offering: None,
            large: None,
            under_way: 0,
            peer_at: String::new(),
            broken_at: None,
            is_revoked: false,
            broke: None,
        })
    }

    fn hello(&self) -> Hello {
        let reads = self.card.reads().answered;
        Hello { reads, ..self.card.hello(self.pair.number(), self.first_packet, self.most_slots, None) }
    }

    /// Connects the queue pair to the receiver's, by the hello that the receiver has answered with.
    fn connect(&mut self, bytes: &[u8; super::hello::BYTES]) -> Result<(), Error> {
        let wrong = |problem| Error::protocol(self.peer, problem);
        let other = Hello::decode(bytes).map_err(wrong)?;
        check_other(&self.card, &other, self.peer)?;
        self.to = other.area.ok_or_else(|| wrong("it receives by RDMA, and names no area".into()))?;
        if other.slots > self.most_slots {
            return Err(wrong(format!(
                "it grants {} slots, and {} were asked for",
                other.slots, self.most_slots
            )));
        }
        if other.reads > self.card.reads().answered {
            return Err(wrong(format!(
                "it asks for {} READs at once, and {} were said to be answered",
                other.reads,
                self.card.reads().answered
            )));
        }
        self.max_message = self.max_message.min(other.max_message);
        self.peer_at = super::place_of(&other);
        if other.slots == 0 {
            // The link is narrow: one large frame goes at a time, in pieces, for which the queue always has room.
            (self.credits, self.pieces) = (Sender::new(1), Some(PiecesSent::default()));
            return self.pair.connect(&self.card, self.first_packet, &other, Reads::NONE);
        }
        self.offering = (other.reads > 0).then(Offering::default);
        // The queue was made for messages as large as this rank's port takes. If the peer's port takes only smaller ones, a frame is more
        // requests, and the queue has room for fewer slots.
        let room = self.card.requests_to_send(self.most_slots, self.card.max_message());
        let fits = |slots: &u32| self.card.requests_to_send(*slots, self.max_message) <= room;
        let slots = (1..=other.slots).rev().find(fits).ok_or_else(|| {
            let problem = format!("messages of {} bytes at most, which its port takes, are too many requests for this rank's queue", self.max_message);
            Error::system(format!("send to rank {} by RDMA", self.peer), problem)
        })?;
        self.credits = Sender::new(other.slots.min(slots));
        let reads = Reads { answered: other.reads, ..Reads::NONE };
        self.pair.connect(&self.card, self.first_packet, &other, reads)
    }

    /// Takes all completions that have come. If the progress thread is about to sleep, asks the device to wake it at the next one.
    fn look(&mut self) -> Result<(), Error> {
        let mut told = [IbvWc::default(); BATCH];
        loop {
            match self.pair.completions(|| super::is_wanted(&self.card), &mut told) {
                // An error in one completion does not keep the others from being taken: each says that the device is done with something.
                Ok(Some(count)) => {
                    let told = &told[..count];
                    told.iter().map(|completion| self.take(completion)).fold(Ok(()), Result::and)?;
                    if let Err(error) = self.pair.post_receives(received(told)) {
                        self.lose(error);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.lose(error);
                    return Ok(());
                }
            }
        }
        self.go_on_with_large();
        Ok(())
    }

    fn take(&mut self, completion: &IbvWc) -> Result<(), Error> {
        let status = WcStatus(completion.status);
        if status != WcStatus::SUCCESS {
            self.break_off(problem_of(&self.card, completion));
            // The request has failed, but the device is done with it. If the request was to end an offer, the peer may still read what is offered:
            // that ends when the link is revoked.
            let frame = completion.wr_id.wrapping_sub(1);
            if !self.is_offered(frame) {
                self.is_done_with(completion.wr_id);
            }
            return Ok(());
        }
        if completion.wr_id != RECEIVED {
            self.is_done_with(completion.wr_id);
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

    /// The device is done with the request of this id.
    fn is_done_with(&mut self, id: u64) {
        match id {
            RECEIVED => {}
            id if id & PIECE == 0 => {
                let frame = id.wrapping_sub(1);
                if let Some(offering) = &mut self.offering {
                    offering.is_over(frame);
                }
                self.credits.is_done_with(frame);
            }
            _ => self.under_way = self.under_way.saturating_sub(1),
        }
    }

    /// Breaks the link off because a call of the library failed, or because the device has reported a failure. Nobody knows what the device still reads
    /// until the queue pair is destroyed.
    pub(super) fn lose(&mut self, problem: impl ToString) {
        self.break_off(problem.to_string());
        if self.destroy() {
            self.large = None;
            for frame in self.credits.gone()..self.credits.posted() {
                if !self.is_offered(frame) {
                    self.credits.is_done_with(frame);
                }
            }
        }
    }

    /// Destroys the queue pair, after the windows that are bound through it. `true`: as for [`QueuePair::destroy`].
    fn destroy(&mut self) -> bool {
        self.pair.fail();
        self.end_offers();
        self.pair.destroy()
    }

    fn break_off(&mut self, problem: String) {
        if self.broken_at.is_none() {
            self.broken_at = Some(self.credits.gone());
            if !self.is_revoked {
                tracing::debug!(peer = self.peer, problem, "a link over RDMA broke while sending");
                self.broke = Some(report(&super::end_of(&self.card, &self.pair), &self.peer_at, problem));
            }
        }
    }

    /// Returns, once, that the link broke. Also asks whether the device has reported a failure, after which completions may never come.
    fn take_break(&mut self) -> Option<Break> {
        if !self.is_over()
            && let Some(problem) = self.pair.problem()
        {
            self.lose(problem);
        }
        self.broke.take()
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_revoked || self.broken_at.is_some()
    }

    /// How many frames count as released. After a break, frames that count as not arrived are left out, although their sources may be free.
    fn released(&self) -> u64 {
        match self.broken_at {
            Some(arrived) if !self.is_revoked => arrived,
            _ => self.credits.gone(),
        }
    }

    fn revoke(&mut self) {
        if !self.is_revoked {
            self.is_revoked = true;
            self.pair.fail();
            self.end_offers();
        }
        let _ = self.look();
    }

    /// Whether the device is done with all that was posted.
    fn is_quiet(&mut self) -> bool {
        let _ = self.look();
        // A card that has failed completes nothing more: so `lose` destroys the queue pair, after which the device reads no frame any more.
        if self.credits.gone() < self.credits.posted()
            && let Some(problem) = self.pair.problem()
        {
            self.lose(problem);
        }
        self.credits.gone() == self.credits.posted()
    }

    /// As [`LinkTx::post`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let len = header.len as usize;
        let (Some(cells), Some(slots)) = (&self.cells, &self.slots) else {
            return Err(Error::system("send by RDMA", "the link is closed (a bug)"));
        };
        let large = len > INLINE;
        let key = match slots.holds(payload, len) {
            true => Some(slots.local_key()),
            false if large => self.card.block(payload, len).map(|part| part.key),
            false => None,
        };
        if large && (len > SLOT || key.is_none()) {
            return Err(Error::system("send by RDMA", "the payload is in no registered memory (a bug)"));
        }
        let (place, number) = self.credits.post(large);
        let cell = cells.at(place.cell as usize * CELL);
        // SAFETY: the cell is the link's own memory, and `Sender` gives it out only when the device is done with the frame that was in it
        // before. A small payload has room behind the header, and is valid for `len` bytes (the caller's promise). A payload of no bytes may
        // be null, and is not read.
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
        if let Err(error) = unsafe { self.write(from, bytes, place, (frame, number)) } {
            self.lose(error);
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
            let to = self.to.at + place_of_piece(pieces.post()) as u64;
            if is_last {
                self.large = None;
            } else {
                self.under_way += 1;
            }
            let write = Write { id, from: &parts[..count], to, key: self.to.key, number: Some(number) };
            // SAFETY: the frame's cell and its slot are registered, and stay as they are until the frame is released, which is after the
            // completion of its last piece. For the slot the caller of `post` has promised it.
            if let Err(error) = unsafe { self.pair.post_write(write) } {
                return self.lose(error);
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
        from: &[IbvSge],
        bytes: usize,
        place: Place,
        (frame, number): (u64, u32),
    ) -> Result<(), VerbsError> {
        debug_assert!(bytes <= LARGEST);
        let (to, key) = (self.to.at + offset(place) as u64, self.to.key);
        let (pieces, _) = cut(bytes, self.max_message);
        let max = self.max_message as usize;
        for at in 0..pieces {
            let (begin, is_last) = (at * max, at + 1 == pieces);
            let mut parts = [IbvSge::default(); 2];
            let count = part_of(from, begin, max.min(bytes - begin), &mut parts);
            let id = if is_last { frame & !PIECE } else { PIECE };
            let number = is_last.then_some(number);
            let write = Write { id, from: &parts[..count], to: to + begin as u64, key, number };
            // SAFETY: the caller's promise; the device completes the last piece after the others.
            unsafe { self.pair.post_write(write) }?;
        }
        Ok(())
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if crate::forked::is_forked() {
            std::mem::forget((self.cells.take(), self.slots.take()));
            return;
        }
        if !self.destroy() {
            // The device may go on reading cells and slots for ever.
            std::mem::forget((self.cells.take(), self.slots.take()));
        }
    }
}

/// Set in the id of a piece that is not a frame's last, and in that of a receive request: their completions count for no frame.
pub(super) const PIECE: u64 = 1 << 63;

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
