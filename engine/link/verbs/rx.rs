//! The receiving end of a link over RDMA.

use std::os::fd::AsFd;
use std::sync::Arc;

use allstream_sys::verbs::{Access, IbvWc, VerbsError, WcStatus};
use parking_lot::Mutex;

use super::broken::{BATCH, problem_of, received, report};
use super::card::{Card, ReceiveArea};
use super::credits::{Came, Note, Receiver};
use super::hello::{Area, BYTES, Hello, Talk};
use super::layout::{PIECE_BYTES, cut, offset};
use super::offers::{Offer, Reads, Taking};
use super::pieces::Assembly;
use super::queue_pair::{QueuePair, RECEIVED, Room};
use super::{check_other, first_packet, on_rank};
use crate::error::Error;
use crate::link::exit::IsOver;
use crate::link::tcp::Accept;
use crate::link::{Break, Frame, HEADER_BYTES, Header, INLINE, Interest, LinkRx, Reactor, SLOT, Site};
use crate::types::Rank;

/// The id of a READ, which its completion carries. Notes have id 0.
pub(super) const READ: u64 = 1;

enum State {
    /// The sender's connection has not come yet.
    Awaited(Accept),
    Greeting(Talk),
    /// The answer to the sender is on its way.
    Answering(Talk, Box<Receiving>),
    Open(Arc<Mutex<Receiving>>),
    Dead,
}

/// The receiving end.
pub(super) struct VerbsRx {
    /// World ranks of the sender and of the receiver.
    ends: (Rank, Rank),
    peer: Rank,
    card: Arc<Card>,
    reactor: Arc<dyn Reactor>,
    state: State,
    /// The oldest frame that was not released, once `peek` has returned it. `None` while the oldest frame is an offered one.
    head: Option<Frame>,
    /// A frame was offered: the sender uses buffers from `Comm::alloc`.
    has_offers: bool,
    /// An error that the next `peek` is to return.
    failed: Option<Error>,
    hung_up: bool,
    broke: Option<Break>,
}

// SAFETY: `head.data` points into the link's own receive area, or into the frame that the link puts together: both live as long as the link is open,
// and neither is tied to a thread. All other fields are `Send`.
unsafe impl Send for VerbsRx {}

impl VerbsRx {
    pub(super) fn open(site: &dyn Site) -> Result<VerbsRx, Error> {
        Ok(VerbsRx {
            ends: site.name().ends,
            peer: site.peer(),
            card: site.card()?,
            reactor: site.reactor(),
            state: State::Awaited(site.accept()),
            head: None,
            has_offers: false,
            failed: None,
            hung_up: false,
            broke: None,
        })
    }

    /// Goes on with opening the link, as far as it can without blocking.
    fn go_on(&mut self) -> Result<(), Error> {
        if let State::Awaited(accept) = &mut self.state
            && let Some(socket) = accept()
        {
            self.reactor.watch(socket.as_fd(), Interest::Readable)?;
            self.state = State::Greeting(Talk::new(socket));
        }
        if let State::Greeting(talk) = &mut self.state {
            match talk.heard() {
                Ok(None) => return Ok(()),
                Ok(Some(bytes)) => {
                    let State::Greeting(mut talk) = std::mem::replace(&mut self.state, State::Dead) else {
                        return Ok(());
                    };
                    let receiving = Receiving::new(self.peer, &self.card, &bytes)?;
                    self.reactor.watch(receiving.pair.descriptor(), Interest::Readable)?;
                    self.card.events().listen(&*self.reactor)?;
                    talk.say(&receiving.hello());
                    self.state = State::Answering(talk, Box::new(receiving));
                }
                Err(error) => self.break_off(error.to_string()),
            }
        }
        if let State::Answering(talk, _) = &mut self.state {
            match talk.has_said() {
                Ok(false) => {}
                Ok(true) => {
                    if let State::Answering(_, open) = std::mem::replace(&mut self.state, State::Dead) {
                        self.state = State::Open(Arc::new(Mutex::new(*open)));
                    }
                }
                Err(error) => self.break_off(error.to_string()),
            }
        }
        Ok(())
    }

    /// Gives the link up: the connection on which the two ends greet each other broke.
    fn break_off(&mut self, problem: String) {
        let problem = format!("while the link was being opened: {problem}");
        self.broke = Some(report(&self.card.place(), "an unknown address", problem));
        self.state = State::Dead;
    }
}

impl LinkRx for VerbsRx {
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error> {
        if self.hung_up {
            return Ok(None);
        }
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.head.is_some() {
            return Ok(self.head);
        }
        if !matches!(self.state, State::Open(_)) {
            self.go_on().map_err(|error| on_rank(self.ends.1, error))?;
        }
        let State::Open(receiving) = &self.state else { return Ok(None) };
        let receiving = &mut *receiving.lock();
        receiving.look()?;
        let Some(taken) = receiving.oldest_offer()? else {
            self.head = receiving.head()?;
            return Ok(self.head);
        };
        self.has_offers = true;
        if useful > 0 {
            receiving.read_to_slots()?;
        }
        let frame = receiving.frame_of(&taken);
        Ok((frame.ready >= useful.min(taken.left())).then_some(frame))
    }

    fn release(&mut self, bytes: usize) {
        let State::Open(receiving) = &self.state else { return };
        match &mut self.head {
            Some(frame) => {
                if frame.advance(bytes) {
                    self.head = None;
                    receiving.lock().release();
                }
            }
            None => receiving.lock().release_offered(bytes),
        }
    }

    fn is_byte_stream(&mut self) -> bool {
        if !self.has_offers || self.head.is_some() {
            return false;
        }
        // An offer that has just come is to be found here: otherwise `peek` would have it READ to a slot.
        if let Err(error) = self.peek(0) {
            self.failed = Some(error);
        }
        let State::Open(receiving) = &self.state else { return false };
        self.failed.is_none() && receiving.lock().oldest_is_offered()
    }

    unsafe fn receive_into(&mut self, dst: *mut u8, max: usize, unit: usize) -> Result<usize, Error> {
        let State::Open(receiving) = &self.state else { return Ok(0) };
        // SAFETY: the caller's promise.
        unsafe { receiving.lock().receive_into(dst, max, unit) }
    }

    fn is_flushed(&mut self) -> bool {
        let State::Open(receiving) = &self.state else { return true };
        let flushed = receiving.lock().is_flushed();
        flushed.unwrap_or_else(|error| {
            self.failed = Some(error);
            true
        })
    }

    fn revoke(&mut self) -> bool {
        match &self.state {
            State::Open(receiving) => receiving.lock().revoke(),
            _ => true,
        }
    }

    fn writes_until(&self) -> Option<IsOver> {
        let State::Open(receiving) = &self.state else { return Some(Box::new(|| true)) };
        let receiving = receiving.clone();
        Some(Box::new(move || receiving.lock().revoke()))
    }

    fn hang_up(&mut self) {
        (self.head, self.hung_up) = (None, true);
    }

    fn take_break(&mut self) -> Option<Break> {
        self.broke.take().or_else(|| match &self.state {
            State::Open(receiving) => receiving.lock().take_break(),
            _ => None,
        })
    }
}

/// An open receiving end. What [`LinkRx::writes_until`] gives shares it, to ask whether the device still writes.
pub(super) struct Receiving {
    pub(super) peer: Rank,
    pub(super) pair: QueuePair,
    pub(super) area: ReceiveArea,
    pub(super) card: Arc<Card>,
    pub(super) credits: Receiver,
    /// On a narrow link, the large frame that comes in pieces. `None`: frames come whole.
    large: Option<Assembly>,
    /// The offers that were taken, and how many READs may be under way at once; 0: the sender may offer nothing.
    pub(super) taking: Taking,
    pub(super) reads: u8,
    first_packet: u32,
    /// Bytes of the largest message that both ports take.
    max_message: u32,
    /// Notes that the device has not sent yet.
    notes: u32,
    /// How many of these there are up to the last one that tells of an offered frame, which the sender's operation waits for.
    awaited: u32,
    peer_at: String,
    pub(super) is_broken: bool,
    /// A call of the library failed, so some READs that are counted as posted may never complete.
    pub(super) is_lost: bool,
    broke: Option<Break>,
}

impl Receiving {
    /// Opens this end, after the sender has described its own by `bytes`, a hello.
    fn new(peer: Rank, card: &Arc<Card>, bytes: &[u8; BYTES]) -> Result<Receiving, Error> {
        let other = Hello::decode(bytes).map_err(|problem| Error::protocol(peer, problem))?;
        check_other(card, &other, peer)?;
        if other.area.is_some() {
            return Err(Error::protocol(peer, "it sends by RDMA, and names an area to receive in"));
        }
        let first_packet = first_packet()?;
        let room = Room {
            send: super::RECEIVER_REQUESTS,
            receive: super::RECEIVES as u32,
            other_may: Access::REMOTE_WRITE,
        };
        let mut pair = QueuePair::new(card, room)?;
        let area = card.area(other.slots)?;
        // A narrow link takes no offers, as what cannot be READ to its place is READ to a slot; nor does a link on which a READ is more than a message.
        let max_message = card.max_message().min(other.max_message);
        let can_read = area.slots > 0 && max_message as usize >= SLOT;
        let reads = if can_read { other.reads.min(card.reads().asked) } else { 0 };
        // Receive requests are posted before the sender knows of the queue pair, so that none of its messages comes too early.
        super::fill(&mut pair, card)?;
        pair.connect(card, first_packet, &other, Reads { asked: reads, ..Reads::NONE })?;
        Ok(Receiving {
            peer,
            pair,
            credits: Receiver::new(area.slots.max(1)),
            large: (area.slots == 0).then(Assembly::default),
            taking: Taking::new(),
            reads,
            area,
            card: card.clone(),
            first_packet,
            max_message,
            notes: 0,
            awaited: 0,
            peer_at: super::place_of(&other),
            is_broken: false,
            is_lost: false,
            broke: None,
        })
    }

    fn hello(&self) -> Hello {
        let area = self
            .area
            .memory()
            .map(|memory| Area { at: memory.at(0).expose_provenance() as u64, key: memory.remote_key() });
        let hello = self.card.hello(self.pair.number(), self.first_packet, self.area.slots, area);
        Hello { reads: self.reads, ..hello }
    }

    /// Takes all completions that have come. If the progress thread is about to sleep, asks the device to wake it at the next one.
    pub(super) fn look(&mut self) -> Result<(), Error> {
        let mut told = [IbvWc::default(); BATCH];
        loop {
            match self.pair.completions(|| super::is_wanted(&self.card), &mut told) {
                Ok(Some(count)) => {
                    let told = &told[..count];
                    // As in `Sending::look`: what is wrong with one completion keeps no other from being taken.
                    told.iter().map(|completion| self.take(completion)).fold(Ok(()), Result::and)?;
                    if let Err(error) = self.pair.post_receives(received(told)) {
                        self.lose(&error);
                        return Ok(());
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.lose(&error);
                    return Ok(());
                }
            }
        }
        self.tell();
        Ok(())
    }

    fn take(&mut self, completion: &IbvWc) -> Result<(), Error> {
        let is_good = WcStatus(completion.status) == WcStatus::SUCCESS;
        if completion.wr_id == READ {
            self.taking.has_read(is_good);
        }
        if !is_good {
            self.break_off(problem_of(&self.card, completion));
            return Ok(());
        }
        match completion.wr_id {
            RECEIVED => {}
            READ => return Ok(()),
            _ => {
                self.notes = self.notes.saturating_sub(1);
                self.awaited = self.awaited.saturating_sub(1);
                return Ok(());
            }
        }
        let came = self.came(u32::from_be(completion.imm_data), completion.byte_len);
        came.map_err(|problem| Error::protocol(self.peer, problem))
    }

    /// A message has come with this number and so many bytes.
    fn came(&mut self, number: u32, bytes: u32) -> Result<(), String> {
        let most = self.max_message.min(PIECE_BYTES);
        match (Came::of(number), &mut self.large, self.area.memory()) {
            // SAFETY: `large` exists only on a narrow link, so `area` is a narrow link's; it is mapped as long as it is registered.
            (Came::Part, Some(large), Some(area)) => unsafe { large.take(area.at(0), (bytes, most), false) },
            (Came::Part, ..) => Err("a piece of a large frame came on a link that takes frames whole".into()),
            (Came::Offer { .. }, ..) if self.reads == 0 || bytes != Offer::BYTES as u32 => {
                Err(format!("an offer of {bytes} bytes came, on a link with {} READs at once", self.reads))
            }
            (Came::Offer { number }, ..) => self.credits.came_offered(number, bytes),
            (Came::Frame { number, large: true }, Some(large), Some(area)) => {
                self.credits.came((number, true), bytes)?;
                // SAFETY: as above.
                unsafe { large.take(area.at(0), (bytes, most), true) }
            }
            (Came::Frame { number, large }, ..) => self.credits.came((number, large), bytes),
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
    fn head(&self) -> Result<Option<Frame>, Error> {
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
                "a frame that says to have {} bytes ended with a message of {bytes} bytes, expected {last}",
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
            return Err(format!("a frame that says to have {} bytes has {}", header.len, payload.len()));
        }
        Ok(Some(Frame { header, data: payload.as_ptr(), ready: payload.len(), done: 0 }))
    }

    /// Tells the sender how many pieces were copied and how many frames released, if it is due to be told, and the queue has room for a note.
    fn tell(&mut self) {
        while self.notes < super::NOTES && !self.is_broken {
            let copied = self.large.as_mut().and_then(Assembly::tell).map(Note::Copied);
            // While the card READs to an operation's memory, a note of offered frames waits: that operation polls until the READs are over, and the
            // sender's operation cannot end before.
            let is_awaited = self.credits.is_awaited();
            let is_due = self.credits.owes() || is_awaited && !self.taking.writes();
            let released = || is_due.then(|| Note::Released(self.credits.tell()));
            let Some(note) = copied.or_else(released) else { return };
            match self.pair.post_number(0, note.encode()) {
                Ok(()) => {
                    self.notes += 1;
                    self.awaited = if is_awaited { self.notes } else { self.awaited };
                }
                Err(error) => self.break_off(error.to_string()),
            }
        }
    }

    /// Whether the sender has got the notes that its operations wait for, those that release offered frames, and no break is left to be told. A link
    /// without offers looks at nothing: looking would make a narrow link take pieces that nobody reads.
    fn is_flushed(&mut self) -> Result<bool, Error> {
        let waits = |receiving: &Receiving| receiving.awaited > 0 || receiving.credits.is_awaited();
        if waits(self) {
            self.look()?;
        }
        Ok(self.broke.is_none() && (self.is_broken || !waits(self)))
    }

    /// Returns, once, that the link broke. Also asks whether the device has reported a failure, after which completions may never come.
    fn take_break(&mut self) -> Option<Break> {
        if let Some(problem) = self.pair.problem() {
            self.break_off(problem);
        }
        self.broke.take()
    }

    /// Breaks the link off, as a call of the library failed.
    pub(super) fn lose(&mut self, error: &VerbsError) {
        self.is_lost = true;
        self.break_off(error.to_string());
    }

    fn break_off(&mut self, problem: String) {
        if !self.is_broken {
            self.is_broken = true;
            tracing::debug!(peer = self.peer, problem, "a link over RDMA broke while receiving");
            self.broke = Some(report(&super::end_of(&self.card, &self.pair), &self.peer_at, problem));
        }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if crate::forked::is_forked() || !self.pair.destroy() {
            // The peer may go on writing to the area for ever.
            self.area.leave();
        }
    }
}
