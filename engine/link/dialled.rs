//! A connection that the sender of a link dials when it first has something to send.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Reactor;
use crate::error::Error;

/// How long the control connection has to say why a peer cannot be dialled, before the dial's own error counts.
const GRACE: Duration = Duration::from_secs(1);

/// What a dial calls with its outcome, exactly once.
pub(crate) type Connected = Box<dyn FnOnce(Result<TcpStream, Error>) + Send>;
/// Dials the peer.
pub(crate) type Dial = Box<dyn FnOnce(Connected) + Send>;

/// The dial, until there is a connection.
pub(super) enum Dialled {
    Not(Option<Dial>),
    Begun(Arc<Mutex<Option<Result<TcpStream, Error>>>>),
    /// The dial's error, and when it came. If the peer has ended, the control connection is to say so first; if not, the network is at fault.
    Failed(Error, Instant),
}

impl Dialled {
    pub(super) fn new(dial: Dial) -> Dialled {
        Dialled::Not(Some(dial))
    }

    /// Dials at the first call, and kicks the reactor when the dial has answered. Returns the connection once; or the dial's error, after `GRACE`.
    pub(super) fn poll(&mut self, reactor: &Arc<dyn Reactor>) -> Result<Option<TcpStream>, Error> {
        match self {
            Dialled::Not(dial) => {
                let Some(dial) = dial.take() else { return Ok(None) };
                let answer = Arc::new(Mutex::new(None));
                let (slot, reactor) = (answer.clone(), reactor.clone());
                *self = Dialled::Begun(answer);
                dial(Box::new(move |result| {
                    *slot.lock() = Some(result);
                    reactor.kick();
                }));
            }
            Dialled::Begun(answer) => {
                let answered = answer.lock().take();
                match answered {
                    Some(Ok(socket)) => return Ok(Some(socket)),
                    Some(Err(error)) => *self = Dialled::Failed(error, Instant::now()),
                    None => {}
                }
            }
            Dialled::Failed(error, at) if at.elapsed() > GRACE => return Err(error.clone()),
            Dialled::Failed(..) => {}
        }
        Ok(None)
    }
}
