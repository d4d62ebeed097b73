//! Whether a stream that waits holds up another, and how a collective gets out of its way.
//!
//! The streams of a context share its hardware queues: 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` says. Work of streams
//! that share one is put in one line, a "false dependency" (CUDA programming guide, environment variables), and no
//! driver says which streams share one. For work that waits for what is on a stream already this costs time and nothing else.
//! But a stream that waits for a word which is only to be written behind a collective ([`DeviceSignal`]) may hold up the
//! very collective.
//!
//! So the device is asked first: the one stream is made to wait for a word of the host's, and that which collectives run on is
//! to write a word. If that comes while the first still waits, it is not held up. If nothing comes, because they share a
//! queue or because it has other work to do, the collectives go on with another stream of the driver's
//! ([`Line::go_on_with`](super::stream::Line::go_on_with)) that is held up by none of those that wait. A few are there for
//! it from the moment that the first rank is bound.
//!
//! What is behind a stream that waits so waits as well. None of our own streams is made to wait for such a thing on the host's
//! behalf (`waiter.rs`), as it would hold up those of the user's that share its queue, and another rank's call may be behind
//! those.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use allstream_sys::cuda::{Cuda, CudaError};

use super::context::Context;
use super::signal::DeviceSignal;
use super::stream::{DeviceEvent, DeviceStream, Line, Way};
use crate::error::Error;

/// How long the answer may take. A stream that has work of its own to do gives none in time.
const LOOK: Duration = Duration::from_millis(2);
/// So long without giving the processor away. A device that has nothing to do needs about as long.
const SPIN: Duration = Duration::from_micros(50);
/// Streams of a device that collectives may go on with. They are made one after another, and so likely in as many queues.
const SPARE: usize = 4;
/// So many answers of a stream are kept before those of streams that are gone are looked for.
const ANSWERS: usize = 64;

/// All streams share the one queue that this process was given.
fn is_one() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|text| text.trim() == "1"))
}

/// What is known of a stream as one that waits.
#[derive(Default)]
pub(super) struct Standing {
    /// Streams of the driver's, by their numbers, which go on while this one waits.
    apart: Vec<u64>,
    /// The stream of copies, by its number, where no other was to be had for them.
    beside: Option<u64>,
    /// So many times it is about to be made to wait for what is not on a stream yet.
    soon: usize,
    /// Behind the last such wait.
    until: Option<DeviceEvent>,
    /// The communicator whose collectives run here.
    comm: Option<u64>,
}

impl Standing {
    fn is_waiting(&mut self) -> bool {
        if self.until.as_ref().is_some_and(|until| until.is_complete().unwrap_or(true)) {
            self.until = None;
        }
        self.soon > 0 || self.until.is_some()
    }
}

/// The streams of a device that must not be held up, and those that may hold them up.
#[derive(Default)]
pub(super) struct Ways {
    /// Whether all that is made ahead has been made.
    made: bool,
    /// What collectives run on.
    lines: Vec<Weak<Line>>,
    /// What waits, or waited, for what was not on a stream then.
    waiting: Vec<Weak<Line>>,
    /// What collectives may go on with.
    spare: Vec<Way>,
}

fn enter(list: &mut Vec<Weak<Line>>, stream: &DeviceStream) {
    list.retain(|other| other.strong_count() > 0);
    if !list.iter().any(|other| other.as_ptr() == Arc::as_ptr(&stream.0)) {
        list.push(Arc::downgrade(&stream.0));
    }
}

fn alive(list: &[Weak<Line>]) -> Vec<DeviceStream> {
    list.iter().filter_map(Weak::upgrade).map(DeviceStream).collect()
}

/// Whether a stream that waits must not hold up this one. What runs a collective waits only where one before it is on the
/// streams of all ranks that it needs, so those of one communicator do not hold each other up for good.
fn concerns(waiting: &DeviceStream, line: &DeviceStream) -> bool {
    let of = |stream: &DeviceStream| stream.0.standing.lock().comm.filter(|_| stream.0.may_move());
    waiting != line && (of(line).is_none() || of(line) != of(waiting))
}

impl Ways {
    /// What waits now.
    fn waiting(&mut self) -> Vec<DeviceStream> {
        self.waiting.retain(|line| line.upgrade().is_some_and(|line| line.standing.lock().is_waiting()));
        alive(&self.waiting)
    }

    /// Whether nothing waits.
    pub(super) fn is_quiet(&mut self) -> bool {
        self.waiting().is_empty()
    }

    /// Forgets answers of streams that are gone.
    fn forget(&self, context: &Context, standing: &mut Standing) {
        if standing.apart.len() < ANSWERS {
            return;
        }
        let lines = alive(&self.lines).into_iter().map(|line| line.0.way());
        let all: Vec<u64> =
            lines.chain(self.spare.iter().copied()).chain(context.copies_way()).map(|way| way.id).collect();
        standing.apart.retain(|id| all.contains(id));
    }

    /// Destroys what nobody goes on with any more.
    pub(super) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) {
        for way in self.spare.drain(..) {
            // SAFETY: made by `make_ahead`, or left by a line that made it; the driver lets what is on it finish.
            unsafe { cuda.stream_destroy(way.raw) }.unwrap_or_else(report);
        }
    }
}

/// What may go on with another stream of the driver's.
enum Course {
    Line(DeviceStream),
    /// Copies that wait for nothing ([`Context::copies`]): another rank's call may wait for them.
    Copies,
}

impl Course {
    fn go_on_with(&self, context: &Context, next: Way) -> Result<Way, CudaError> {
        let entered = context.enter()?;
        match self {
            Course::Line(line) => line.0.go_on_with(&entered, next),
            Course::Copies => context.copies_go_on_with(&entered, next),
        }
    }
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

    /// From here on, as long as it lives, collectives of this communicator run on this stream: none that waits for one may
    /// hold it up.
    pub(crate) fn admit(&mut self, line: &DeviceStream, comm: u64) {
        let context = &line.0.context;
        line.0.standing.lock().comm = Some(comm);
        let mut ways = context.ways.lock();
        enter(&mut ways.lines, line);
        if is_one() {
            return; // no stream is made to wait for what is not on one
        }
        let way = line.0.way();
        let is_free =
            ways.waiting().iter().all(|waiting| !concerns(waiting, line) || self.goes_on(way, waiting));
        if !is_free && !self.move_over(&mut ways, context, &Course::Line(line.clone()), &[]) {
            tracing::debug!("a rank is bound while streams wait that may hold up its collectives");
        }
    }

    /// Sees to it that these streams may wait for what nobody has put on a stream yet and hold up no stream of their device
    /// that collectives run on. `false`: they may not. Until they do wait, they count as if they did; then the caller says so
    /// ([`DeviceStream::waits_now`]). Nothing may be on its way to them that is captured into a graph.
    pub(crate) fn make_way<'a>(&mut self, streams: impl Iterator<Item = &'a DeviceStream>) -> bool {
        if is_one() {
            return false;
        }
        let mut rest: Vec<DeviceStream> = streams.cloned().collect();
        let mut done = Vec::new();
        while let Some(first) = rest.first() {
            let context = first.0.context.clone();
            let (here, elsewhere): (Vec<_>, _) =
                rest.into_iter().partition(|stream| Arc::ptr_eq(&stream.0.context, &context));
            rest = elsewhere;
            if !self.make_way_on(&context, &here) {
                done.iter().for_each(DeviceStream::waits_now);
                return false;
            }
            done.extend(here);
        }
        true
    }

    /// The same for streams of one device.
    fn make_way_on(&mut self, context: &Arc<Context>, all: &[DeviceStream]) -> bool {
        let mut ways = context.ways.lock();
        for line in alive(&ways.lines) {
            let way = line.0.way();
            let is_free = all.iter().all(|waiting| !concerns(waiting, &line) || self.goes_on(way, waiting));
            if !is_free && !self.move_over(&mut ways, context, &Course::Line(line), all) {
                return false;
            }
        }
        if let Some(way) = context.copies_way() {
            let mut goes_on = |waiting: &DeviceStream| {
                let beside = waiting.0.standing.lock().beside;
                beside == Some(way.id) || self.goes_on(way, waiting)
            };
            // Nothing of this rank's waits for copies: where there is no way for them, they wait.
            if !all.iter().all(&mut goes_on) && !self.move_over(&mut ways, context, &Course::Copies, all) {
                all.iter().for_each(|waiting| waiting.0.standing.lock().beside = Some(way.id));
            }
        }
        for waiting in all {
            enter(&mut ways.waiting, waiting);
            let mut standing = waiting.0.standing.lock();
            standing.soon += 1;
            ways.forget(context, &mut standing);
        }
        true
    }

    /// Lets what is held up, or may be, go on with a stream of the driver's that none of those that wait holds up, nor `more`.
    /// `false`: there is none.
    fn move_over(
        &mut self,
        ways: &mut Ways,
        context: &Arc<Context>,
        course: &Course,
        more: &[DeviceStream],
    ) -> bool {
        if let Course::Line(line) = course
            && !line.0.may_move()
        {
            return false;
        }
        let mut all = ways.waiting();
        all.extend_from_slice(more);
        if let Course::Line(line) = course {
            all.retain(|waiting| concerns(waiting, line));
        }
        let free = ways.spare.iter().position(|way| all.iter().all(|waiting| self.goes_on(*way, waiting)));
        let Some(next) = free.map(|index| ways.spare.remove(index)) else { return false };
        match course.go_on_with(context, next) {
            // Tried last, next time: something may be on it yet.
            Ok(left) => ways.spare.push(left),
            Err(error) => {
                tracing::warn!(device = context.ordinal, "collectives keep their stream: {error}");
                ways.spare.push(next);
                return false;
            }
        }
        true
    }

    /// Whether `way` comes to new work while `waiting` waits.
    fn goes_on(&mut self, way: Way, waiting: &DeviceStream) -> bool {
        if waiting.0.standing.lock().apart.contains(&way.id) {
            return true;
        }
        let came = self.ask(way, waiting).unwrap_or_else(|error| {
            tracing::debug!("a device does not say whether a stream holds up another: {error}");
            false
        });
        if came {
            waiting.0.standing.lock().apart.push(way.id);
        }
        came
    }

    fn ask(&mut self, way: Way, waiting: &DeviceStream) -> Result<bool, Error> {
        let other = DeviceStream::of_context(&waiting.0.context, way);
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
        asked.map(|()| came)
    }
}

impl DeviceStream {
    /// Makes what is otherwise made when it is first needed, or could not be made then: making streams may wait for what is
    /// on the device. To be called before anything waits for a collective. What cannot be made is done without.
    pub(crate) fn make_ahead(&self) {
        let context = &self.0.context;
        let mut ways = context.ways.lock();
        if std::mem::replace(&mut ways.made, true) {
            return;
        }
        let Ok(entered) = context.enter() else { return };
        context.make_streams(&entered);
        let spare = if is_one() { 0 } else { SPARE };
        let make = |_| Way::make(context, &entered, |_least, greatest| greatest).ok();
        ways.spare.extend((0..spare).map_while(make));
    }

    /// Of a stream that was made way for: it has been made to wait, or it will not be.
    pub(crate) fn waits_now(&self) {
        let until = self.point();
        let mut standing = self.0.standing.lock();
        if let Ok(until) = until {
            standing.soon = standing.soon.saturating_sub(1);
            standing.until = Some(until);
        }
    }

    /// Whether it waits for what may not be on a stream yet.
    pub(crate) fn is_waiting(&self) -> bool {
        self.0.standing.lock().is_waiting()
    }
}
