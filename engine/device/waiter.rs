//! A thread of the process that finds out when work on devices has ended: for futures, and for memory that is held until then.
//!
//! For each event that is waited for, one of the engine's own idle streams, a *notifier*, waits for the event and then calls [`ring`] on the
//! host (`cuLaunchHostFunc`). Such a function may not call the driver, and holds its stream up; so it only wakes the thread, which asks the
//! driver about the event and does the rest. No stream of the user's, nor of another library's, ever waits for host code.
//!
//! For some events no notifier can be had ([`Context::notifier`]), and the driver calls no host function once work in the context has failed.
//! So the thread also asks about every event now and then.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use allstream_sys::cuda::{CuResult, CuStream};
use parking_lot::{Condvar, Mutex};

use super::capture::relaxed;
use super::chores::Busy;
use super::context::Context;
use super::driver::cuda;
use super::handle::is_not_yet;
use super::stream::{DeviceEvent, DeviceStream};
use crate::commands::never_block_here;
use crate::error::Error;
use crate::mem::Event;

/// How the wait for an event ended.
pub(super) enum Outcome {
    Reached,
    /// The driver has reported a failure, but also that all work before the event is over.
    Over(Error),
    /// The driver has reported a failure, or the wait was given up: nobody can tell whether work before the event still runs.
    Unknown(Error),
}

pub(super) type Then = Box<dyn FnOnce(Outcome) + Send>;

/// What is called, at most once and on any thread, when work on a device has ended (`Ok`) or failed.
pub(crate) type Finish = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// How far an operation's work on a stream has come. `Over`: the stream has done all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not all of it is on the stream yet: even if the stream has done all that it holds, more is to come.
    Coming,
    /// All of it is on the stream.
    There,
    Over,
}

enum What {
    Event(DeviceEvent),
    /// Waits until the stream fails, or has done all that it holds while `stage` says [`Stage::There`]. Once `stage` says
    /// [`Stage::Over`], the wait ends, too.
    Stream {
        stream: DeviceStream,
        stage: Box<dyn Fn() -> Stage + Send>,
    },
}

impl What {
    fn context(&self) -> &Arc<Context> {
        match self {
            What::Event(event) => &event.0.context,
            What::Stream { stream, .. } => &stream.0.context,
        }
    }
}

struct Entry {
    what: What,
    /// The notifier that was taken for the event, and is given back at the end. `None`: none could be had, or a stream is watched.
    notifier: Option<CuStream>,
    /// The driver will not call for this event, so the thread asks every [`ASK`].
    asked: bool,
    /// When the wait is given up.
    until: Option<Instant>,
    then: Then,
    /// Dropped last: until then [`settle`](super::chores::settle) waits.
    _busy: Busy,
}

#[derive(Default)]
struct State {
    entries: BTreeMap<u64, Entry>,
    /// The numbers of the entries for which the driver has called.
    rung: Vec<u64>,
    next: u64,
    /// The thread sleeps until it is woken: it does not look by itself.
    asleep: bool,
}

struct Waiter {
    state: Mutex<State>,
    bell: Condvar,
}

static WAITER: Waiter = Waiter {
    state: Mutex::new(State { entries: BTreeMap::new(), rung: Vec::new(), next: 0, asleep: false }),
    bell: Condvar::new(),
};

/// How often the thread asks about everything that is waited for, in case the driver does not call.
const SWEEP: Duration = Duration::from_millis(20);
/// The same while an event is waited for about which the driver will not call ([`Entry::asked`]).
const ASK: Duration = Duration::from_millis(1);
/// The same while a stream is watched ([`What::Stream`]).
const ERRORS: Duration = Duration::from_millis(5);

/// When nothing is waited for any more, the thread goes on looking every [`SWEEP`] for this long before it sleeps: whoever waits for one event after
/// another need not wake it each time.
const LINGER: Duration = Duration::from_millis(200);

/// What the driver calls on a thread of its own. `token` is an entry's number, not an address.
unsafe extern "C" fn ring(token: *mut c_void) {
    WAITER.state.lock().rung.push(token.addr() as u64);
    WAITER.bell.notify_one();
}

/// Calls `then`, on the waiter's thread if there is one, once `event` is reached or the driver has reported a failure.
pub(super) fn watch(event: DeviceEvent, then: Then) {
    watch_until(event, None, then);
}

/// The same, but given up at `until`, if that is a time: `then` is called with [`Outcome::Unknown`] if the event is not reached by then.
pub(super) fn watch_until(event: DeviceEvent, until: Option<Instant>, then: Then) {
    if !is_started() {
        // The system has no thread to give: this thread has to wait itself, whatever `until` is.
        let outcome = settle(&event, event.wait().err());
        return then(outcome);
    }
    let context = event.0.context.clone();
    let entered = context.enter();
    let notifier = entered.as_ref().ok().and_then(|entered| context.notifier(entered));
    let raw = event.0.raw;
    let asked = notifier.is_none();
    let what = What::Event(event.clone());
    let token = enter(Entry { what, notifier, asked, until, then, _busy: Busy::new() });
    let launched = notifier.is_some_and(|notifier| {
        // SAFETY: both are of the entered context, which destroys notifiers only when it is dropped; `event` keeps the context and the event.
        let waits = unsafe { context.cuda.stream_wait_event(notifier, raw, 0) };
        let token = std::ptr::without_provenance_mut(token as usize);
        // SAFETY: to `ring` the token is only a number; `ring` makes no call of the driver, and does not unwind.
        waits.and_then(|()| unsafe { context.cuda.launch_host_func(notifier, ring, token) }).is_ok()
    });
    if !launched {
        if let Some(entry) = WAITER.state.lock().entries.get_mut(&token) {
            entry.asked = true;
        }
        WAITER.bell.notify_one();
    }
}

/// Starts the thread, if it has not been started. Returns whether there is one.
fn is_started() -> bool {
    static STARTED: OnceLock<bool> = OnceLock::new();
    *STARTED.get_or_init(|| {
        let thread = std::thread::Builder::new().name("allstream-cuda".into());
        thread.spawn(|| WAITER.run()).is_ok()
    })
}

/// Gives the thread this entry. Returns the entry's number.
fn enter(entry: Entry) -> u64 {
    let mut state = WAITER.state.lock();
    let token = state.next;
    state.next += 1;
    state.entries.insert(token, entry);
    // The driver may never call, so from now on the thread must look by itself.
    if state.asleep {
        WAITER.bell.notify_one();
    }
    token
}

/// Makes a function that calls `finish` with how the wait ended. An error also says what was being done (`doing`).
fn finishing(doing: &'static str, finish: Finish) -> Then {
    Box::new(move |outcome| match outcome {
        Outcome::Reached => finish(Ok(())),
        Outcome::Over(error) | Outcome::Unknown(error) => finish(Err(error.doing(doing))),
    })
}

/// Makes the thread ask the driver about a stream now and then. `finish` is called with an error if work on the stream has failed, or with `Ok`
/// if the stream has done all that it holds while `stage` says [`Stage::There`]. Once `stage` says [`Stage::Over`], the thread asks no more, and
/// does not call `finish`. This function itself makes no call of the driver.
pub(crate) fn watch_stream(
    stream: &DeviceStream,
    doing: &'static str,
    stage: Box<dyn Fn() -> Stage + Send>,
    finish: Finish,
) {
    if !is_started() {
        return; // the system has no thread to give: then only what the streams themselves write to memory tells that the work is over
    }
    let what = What::Stream { stream: stream.clone(), stage };
    enter(Entry {
        what,
        notifier: None,
        asked: false,
        until: None,
        then: finishing(doing, finish),
        _busy: Busy::new(),
    });
}

/// The outcome of the wait for `event`. `error`: what the driver has reported about the event; `None`: the event is reached. May block.
fn settle(event: &DeviceEvent, error: Option<Error>) -> Outcome {
    match error {
        None => Outcome::Reached,
        // Other work may have caused the error. Whoever holds memory needs to know whether the work before the event is over.
        Some(error) if event.wait().is_ok() => Outcome::Over(error),
        Some(error) => Outcome::Unknown(error),
    }
}

impl Entry {
    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Whether nobody need be told any more, as the operation's work on the stream is over.
    fn is_past(&self) -> bool {
        matches!(&self.what, What::Stream { stage, .. } if stage() == Stage::Over)
    }

    /// Asks the driver. Returns how the wait ended, if it has.
    fn ask(&self) -> Option<Outcome> {
        let context = self.what.context();
        // `stage` is asked before the driver: the driver's answer says nothing about work that is put on the stream later.
        let stage = match &self.what {
            What::Event(_) => Stage::There,
            What::Stream { stage, .. } => stage(),
        };
        let query = |_entered| match &self.what {
            // SAFETY: `event` keeps the driver's event, whose context is current (`_entered`).
            What::Event(event) => unsafe { context.cuda.event_query(event.0.raw) },
            // SAFETY: `stream` keeps the driver's stream, whose context is current (`_entered`).
            What::Stream { stream, .. } => unsafe { context.cuda.stream_query(*stream.0.raw()) },
        };
        match context.enter_plainly().and_then(query) {
            Ok(()) if stage != Stage::There => None,
            Ok(()) => Some(Outcome::Reached),
            // The process ends, and the driver is gone: there is nobody to ask again.
            Err(error) if error.code == CuResult::DEINITIALIZED => {
                Some(Outcome::Unknown(context.tell("wait for an event", error)))
            }
            Err(error) if is_not_yet(error.code) && self.is_late() => {
                Some(Outcome::Unknown(context.tell("wait for an event any longer", error)))
            }
            Err(error) if is_not_yet(error.code) => None,
            Err(error) => {
                let error = context.tell("wait for an event", error);
                Some(match &self.what {
                    What::Event(event) => settle(event, Some(error)),
                    What::Stream { .. } => Outcome::Unknown(error),
                })
            }
        }
    }

    /// Tells how the wait ended: calls `then` with this outcome. `None`: nobody need be told, so `then` is only dropped.
    fn end(self, outcome: Option<Outcome>) {
        let Entry { what, notifier, then, _busy, .. } = self;
        if let Some(notifier) = notifier {
            let is_free = !matches!(outcome, Some(Outcome::Unknown(_)));
            what.context().give_back(notifier, is_free);
        }
        let told = outcome.is_some();
        let tell = move || match outcome {
            Some(outcome) => then(outcome),
            None => drop(then),
        };
        // `then` may call the waker of a user's runtime. `then` and `what` may each drop the last handle of an object of the user's, such as the
        // owner of a stream. Everybody who waits for device work needs this thread: so a panic of the user's code (which stderr reports) ends here.
        let panicked = catch_unwind(AssertUnwindSafe(tell)).is_err();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(what)));
        if told && panicked {
            tracing::error!("a function that was to be called after work on a device panicked");
        }
    }
}

/// When the thread last asked about every event, and when there last was anything to wait for.
struct Clock {
    swept: Instant,
    busy: Instant,
}

impl Waiter {
    fn run(&self) {
        never_block_here();
        // The thread asks about events at any time, so its calls must not break captures of other threads.
        let _relaxed = cuda().map(relaxed);
        let mut clock = Clock { swept: Instant::now(), busy: Instant::now() };
        loop {
            for (token, entry) in self.due(&mut clock) {
                if entry.is_past() {
                    entry.end(None);
                    continue;
                }
                match entry.ask() {
                    Some(outcome) => entry.end(Some(outcome)),
                    None => {
                        self.state.lock().entries.insert(token, entry);
                    }
                }
            }
        }
    }

    /// Waits until entries are due to be asked about, and takes them out.
    fn due(&self, Clock { swept, busy }: &mut Clock) -> Vec<(u64, Entry)> {
        let mut state = self.state.lock();
        loop {
            let pauses = state.entries.values().map(|entry| match &entry.what {
                _ if entry.asked => ASK,
                What::Event(_) => SWEEP,
                What::Stream { .. } => ERRORS,
            });
            let pause = pauses.min().unwrap_or(SWEEP);
            let since = swept.elapsed();
            if state.entries.is_empty() {
                state.rung.clear();
                if busy.elapsed() < LINGER {
                    self.bell.wait_for(&mut state, SWEEP);
                } else {
                    state.asleep = true;
                    self.bell.wait(&mut state);
                    state.asleep = false;
                    *busy = Instant::now();
                }
                *swept = Instant::now();
                continue;
            }
            *busy = Instant::now();
            if since >= pause {
                *swept = Instant::now();
                state.rung.clear();
                return std::mem::take(&mut state.entries).into_iter().collect();
            } else if !state.rung.is_empty() {
                let rung = std::mem::take(&mut state.rung);
                return rung.into_iter().filter_map(|token| state.entries.remove_entry(&token)).collect();
            } else {
                self.bell.wait_for(&mut state, pause - since);
            }
        }
    }
}

impl DeviceEvent {
    /// Calls `finish` when the point is reached, or with an error if the driver reports a failure first.
    pub(crate) fn then(self, doing: &'static str, finish: Finish) {
        watch(self, finishing(doing, finish));
    }

    /// The same point as an event of the host's: complete when this point is reached, failed if the driver reports a failure first.
    pub fn on_host(&self) -> Event {
        let event = Event::pending();
        let fire = event.clone();
        let then = move |outcome: Outcome| match outcome {
            Outcome::Reached => fire.fire(true),
            Outcome::Over(error) | Outcome::Unknown(error) => fire.fail(error),
        };
        watch(self.clone(), Box::new(then));
        event
    }
}
