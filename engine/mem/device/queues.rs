//! Whether a stream that waits holds up another.
//!
//! The streams of a context share its hardware queues: 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` says. Work of streams
//! that share one is put in one line, a "false dependency" (CUDA programming guide, environment variables), and no
//! driver says which streams share one. For work that waits for what is on a stream already this costs time and nothing else.
//! But a stream that waits for a word which is only to be written behind a collective ([`DeviceSignal`]) may hold up the
//! very collective. So the device is asked first: one stream is made to wait for a word of the host's, the other is to
//! write a word. If that comes while the first still waits, neither holds the other up.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::signal::DeviceSignal;
use super::stream::DeviceStream;
use crate::error::Error;

/// How long the answer may take. A stream that has work of its own to do gives none in time: it is asked again.
const LOOK: Duration = Duration::from_millis(2);
/// So long without giving the processor away. A device that has nothing to do needs about as long.
const SPIN: Duration = Duration::from_micros(50);

/// All streams share the one queue that this process was given.
fn is_one() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|text| text.trim() == "1"))
}

/// Two words, to ask a device with.
pub(crate) struct Probe {
    gate: DeviceSignal,
    bell: DeviceSignal,
    /// Of the last question.
    turn: u32,
}

impl Probe {
    pub(crate) fn new(stream: &DeviceStream) -> Result<Probe, Error> {
        Ok(Probe { gate: DeviceSignal::new(stream)?, bell: DeviceSignal::new(stream)?, turn: 0 })
    }

    /// Whether `waiting`, while it waits for what nobody has put on a stream yet, may hold up a stream of its device that
    /// collectives run on. Nothing may be on its way to `waiting` that is captured into a graph.
    pub(crate) fn may_hold_up(&mut self, waiting: &DeviceStream) -> bool {
        if is_one() {
            return true;
        }
        let known = waiting.0.apart.lock().clone();
        let others: Vec<_> = waiting.0.context.collectives.lock().iter().filter_map(Weak::upgrade).collect();
        let mut others = others.into_iter().map(DeviceStream).filter(|other| other != waiting);
        others.any(|other| !known.contains(&other.0.id) && !self.goes_on(&other, waiting).unwrap_or(false))
    }

    /// Keeps those of the streams that wait for events on the host's behalf which do not hold `ours` up: what they wait for
    /// may come behind a stream that waits for a collective. Without any, events are asked for now and then.
    pub(crate) fn choose_notifiers(&mut self, ours: &DeviceStream) {
        if is_one() {
            return; // no stream is made to wait for what is not on one
        }
        let context = &ours.0.context;
        for notifier in context.take_notifiers() {
            match self.goes_on(ours, &DeviceStream::of_context(context, notifier)) {
                Ok(true) => context.give_back(notifier),
                _ => context.put_away(notifier),
            }
        }
    }

    /// Whether `other` comes to new work while `waiting` waits.
    fn goes_on(&mut self, other: &DeviceStream, waiting: &DeviceStream) -> Result<bool, Error> {
        self.turn = self.turn.wrapping_add(1);
        let waits = waiting.wait_signal(&mut self.gate, self.turn);
        let asked = waits.and_then(|()| other.put_signal(&mut self.bell, self.turn));
        let start = Instant::now();
        let mut came = false;
        while asked.is_ok() && !came && start.elapsed() < LOOK {
            match start.elapsed() < SPIN {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(SPIN),
            }
            came = self.bell.shows(self.turn);
        }
        self.gate.set(self.turn);
        asked?;
        if came {
            waiting.0.apart.lock().push(other.0.id);
        }
        Ok(came)
    }
}

impl DeviceStream {
    /// From here on, as long as it lives, collectives run here: no stream that waits for one may hold this up. Makes the
    /// streams that they will need.
    pub(crate) fn runs_collectives(&self) {
        self.0.context.make_streams();
        let mut all = self.0.context.collectives.lock();
        all.retain(|other| other.strong_count() > 0);
        if !all.iter().any(|other| other.as_ptr() == Arc::as_ptr(&self.0)) {
            all.push(Arc::downgrade(&self.0));
        }
    }
}
