//! The sending end of a link over RDMA.

use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::broken::report;
use super::card::Card;
use super::hello::Talk;
use super::on_rank;
use super::sending::Sending;
use crate::error::Error;
use crate::link::dialled::Dialled;
use crate::link::exit::Lease;
use crate::link::{Break, Header, Interest, LinkTx, Posted, Reactor, Site};
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
            talk.say(&sending.greeting());
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
                for lane in sending.lanes.iter() {
                    self.reactor.watch(lane.lane.pair.descriptor(), Interest::Readable)?;
                    lane.lane.card.events().listen(&*self.reactor)?;
                }
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
            Ok(sending.has_room())
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
        self.sending(self.broke.is_none(), Sending::is_flushed)
    }
}

fn no_room() -> Error {
    Error::system("send by RDMA", "there is no room (a bug)")
}
