//! The types for the streams of a context, for points in them, and for what is known of streams that wait. The code that uses them is in
//! `stream.rs` and `queues.rs`, which import this file.
//!
//! A stream keeps its context alive, and the context has weak references to its streams: so each of the two types names the other.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use allstream_sys::cuda::{CU_STREAM_NON_BLOCKING, CuEvent, CuStream, Cuda, CudaError};
use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};

use super::Context;
use crate::commands::Commands;
use crate::device::handle::{Entered, is_not_yet};
use crate::error::Error;

/// A stream, and what keeps it alive.
pub(in crate::device) struct Line {
    pub(in crate::device) context: Arc<Context>,
    /// The stream of the driver that this line stands for now.
    way: RwLock<Way>,
    /// A number that no other stream of this process ever has. (The driver uses the handles of its streams again.)
    pub(in crate::device) id: u64,
    owner: Owner,
    /// Whether this stream waits, and which streams it then holds up, as far as is known (`queues.rs`).
    pub(in crate::device) standing: Mutex<Standing>,
}

/// A stream of the driver, and a number that no other [`Way`] or [`Line`] of this process ever has.
#[derive(Clone, Copy)]
pub(in crate::device) struct Way {
    pub(in crate::device) raw: CuStream,
    pub(in crate::device) id: u64,
}

impl Way {
    /// Makes a stream of the driver; whoever has the result destroys it. `priority` gets the least and the most urgent priority, and chooses one.
    pub(in crate::device) fn make(
        context: &Context,
        _: &Entered<'_>,
        priority: impl FnOnce(c_int, c_int) -> c_int,
    ) -> Result<Way, CudaError> {
        let (least, greatest) = context.cuda.stream_priorities()?;
        let priority = priority(least, greatest);
        // SAFETY: in the context (`Entered`).
        let raw = unsafe { context.cuda.stream_create_with_priority(CU_STREAM_NON_BLOCKING, priority) }?;
        Ok(Way { raw, id: number() })
    }
}

impl Line {
    pub(in crate::device) fn new(context: Arc<Context>, raw: CuStream, owner: Owner) -> Line {
        Line::of(context, Way { raw, id: number() }, owner)
    }

    pub(in crate::device) fn of(context: Arc<Context>, way: Way, owner: Owner) -> Line {
        Line { context, way: RwLock::new(way), id: number(), owner, standing: Mutex::default() }
    }

    /// The driver's stream, to put work there. As long as the result is held, no other stream takes its place.
    pub(in crate::device) fn raw(&self) -> MappedRwLockReadGuard<'_, CuStream> {
        RwLockReadGuard::map(self.way.read(), |way| &way.raw)
    }

    /// The stream of the driver that this line stands for now, and its number.
    pub(in crate::device) fn way(&self) -> Way {
        *self.way.read()
    }

    /// Whether this line may go on with another stream of the driver. It may if nobody but the engine knows the present one.
    pub(in crate::device) fn may_move(&self) -> bool {
        matches!(self.owner, Owner::Alone)
    }

    /// Goes on with `next`, a stream of the driver that the caller gives away: what is put here from now on comes behind all that is
    /// here now. Returns the driver's stream that was left, which is then the caller's; work that is on it stays there.
    pub(in crate::device) fn go_on_with(&self, entered: &Entered<'_>, next: Way) -> Result<Way, CudaError> {
        let mut way = self.way.write();
        self.context.follow(entered, way.raw, next.raw)?;
        // Which streams this one holds up was found out for the driver's stream that it leaves.
        self.standing.lock().forget();
        Ok(std::mem::replace(&mut *way, next))
    }

    /// The same for a line on which nothing has been put yet: `next` need not wait for anything.
    pub(in crate::device) fn start_with(&self, next: Way) -> Way {
        std::mem::replace(&mut *self.way.write(), next)
    }
}

/// Who sees to it that a stream exists, and destroys it.
pub(in crate::device) enum Owner {
    /// We do.
    Ours,
    /// We do, and nobody else puts work there: another stream of the driver may take its place.
    Alone,
    /// Someone else, for as long as was promised (`from_raw`, `of_context`).
    Promised,
    /// `_owner` does, as long as it is not dropped.
    Kept { _owner: Box<dyn Send + Sync> },
}

fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Drop for Line {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Ours | Owner::Alone) {
            return;
        }
        let raw = self.way.get_mut().raw;
        // SAFETY: made by `Way::make`, and only this line still had it, but for threads in `Context::synchronize`.
        unsafe { self.context.destroy(raw) };
    }
}

/// A recorded event.
pub(in crate::device) struct Point {
    pub(in crate::device) context: Arc<Context>,
    pub(in crate::device) raw: CuEvent,
    /// Whether a thread may sleep until the device wakes it (`mark_for_host`).
    pub(in crate::device) wakes: bool,
}

impl Drop for Point {
    fn drop(&mut self) {
        if self.wakes {
            self.context.recycle_for_host(self.raw);
        } else {
            self.context.recycle(self.raw);
        }
    }
}

impl Point {
    /// Whether the point has been reached. Never blocks.
    pub(in crate::device) fn is_complete(&self) -> Result<bool, Error> {
        let context = &self.context;
        // SAFETY: `self` keeps the event, and its context is current.
        let answer = context.enter().and_then(|_entered| unsafe { context.cuda.event_query(self.raw) });
        match answer {
            Ok(()) => Ok(true),
            Err(error) if is_not_yet(error.code) => Ok(false),
            Err(error) => Err(context.tell("ask for an event", error)),
        }
    }
}

/// An operation that streams wait for.
pub(in crate::device) trait Joined: Send + Sync {
    /// Whether some of its work is on no stream yet, and is to come.
    fn is_to_come(&self) -> bool;

    /// Wakes whoever drives a rank, through its commands, when more of the operation's work is on a stream, or when no more will come.
    fn tell(&self, whom: &Arc<Commands>);
}

/// Whether a stream waits for work that may not be on a stream yet, and what is known of the streams that it holds up while it waits.
#[derive(Default)]
pub(in crate::device) struct Standing {
    /// The operations that it waits for, as far as some of their work was on no stream when it was made to wait.
    joined: Vec<Weak<dyn Joined>>,
    /// The numbers of the driver's streams that are known to go on while this one waits.
    pub(in crate::device) apart: Vec<u64>,
    /// For a caller's stream: the numbers of other callers' streams that were seen not to go on meanwhile.
    pub(in crate::device) together: Vec<u64>,
    /// The number of the stream for copies, if this stream may hold it up and no spare stream was found for the copies.
    pub(in crate::device) beside: Option<u64>,
    /// How many waits for work that may not be on a stream yet are about to be put on this stream.
    pub(in crate::device) soon: usize,
    /// The point behind the last such wait.
    pub(in crate::device) until: Option<Arc<Point>>,
    /// The communicator whose collectives run here.
    pub(in crate::device) comm: Option<u64>,
}

impl Standing {
    /// Notes that the stream waits for these operations.
    pub(in crate::device) fn joins(&mut self, operations: &[Weak<dyn Joined>]) {
        for operation in operations {
            if !self.joined.iter().any(|other| Weak::ptr_eq(other, operation)) {
                self.joined.push(operation.clone());
            }
        }
    }

    /// The operations that the stream waits for, and of which some work is to come.
    pub(in crate::device) fn joined(&mut self) -> &[Weak<dyn Joined>] {
        self.joined.retain(|operation| operation.upgrade().is_some_and(|operation| operation.is_to_come()));
        &self.joined
    }

    /// Forgets what holds only for the former stream of the driver: another one has taken its place.
    pub(in crate::device) fn forget(&mut self) {
        self.apart.clear();
        self.together.clear();
        self.beside = None;
    }

    pub(in crate::device) fn is_waiting(&mut self) -> bool {
        if self.until.as_ref().is_some_and(|until| until.is_complete().unwrap_or(true)) {
            self.until = None;
        }
        self.soon > 0 || self.until.is_some()
    }
}

/// The streams of a device that must not be held up, and those that may hold them up.
#[derive(Default)]
pub(in crate::device) struct Ways {
    /// Whether `make_ahead` has been called.
    pub(in crate::device) made: bool,
    /// The streams that collectives run on, and those for messages that a library moves.
    pub(in crate::device) lines: Vec<Weak<Line>>,
    /// The streams that wait, or have waited, for work that may not have been on a stream then.
    pub(in crate::device) waiting: Vec<Weak<Line>>,
    /// Streams of the driver that collectives, or copies, may go on with.
    pub(in crate::device) spare: Vec<Way>,
}

impl Ways {
    /// The streams that wait now.
    pub(in crate::device) fn waiting(&mut self) -> Vec<Arc<Line>> {
        self.waiting.retain(|line| line.upgrade().is_some_and(|line| line.standing.lock().is_waiting()));
        self.waiting.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether no stream waits.
    pub(in crate::device) fn is_quiet(&mut self) -> bool {
        self.waiting().is_empty()
    }

    /// Destroys the spare streams.
    pub(in crate::device) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) {
        for way in self.spare.drain(..) {
            // SAFETY: made by `Way::make`. If a line, or copies, used it, they have gone on with another stream, so nobody else has it. The
            // driver lets what is on it finish.
            unsafe { cuda.stream_destroy(way.raw) }.unwrap_or_else(report);
        }
    }
}
