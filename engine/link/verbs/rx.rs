//! The receiving end of a link over RDMA.

use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::broken::report;
use super::card::Card;
use super::hello::Talk;
use super::on_rank;
use super::receiving::Receiving;
use crate::error::Error;
use crate::link::exit::IsOver;
use crate::link::tcp::Accept;
use crate::link::{Break, Frame, Interest, LinkRx, Reactor, Site};
use crate::types::Rank;

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
                    for lane in receiving.lanes.iter() {
                        self.reactor.watch(lane.lane.pair.descriptor(), Interest::Readable)?;
                        lane.lane.card.events().listen(&*self.reactor)?;
                    }
                    talk.say(&receiving.greeting());
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
        // Finds an offer that has just come. If this returned `false` for it, the caller's next `peek` would have it READ to a slot.
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
        let State::Open(receiving) = &self.state else { return self.broke.is_none() };
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
