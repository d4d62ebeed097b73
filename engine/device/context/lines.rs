//! The streams of a context, the points in them, and which of them wait: what they are. What is done with them is in the files above,
//! `stream.rs` and `queues.rs`.
//!
//! A stream keeps its context, and the context lists its streams, weakly: each of the two types names the other.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use allstream_sys::cuda::{CU_STREAM_NON_BLOCKING, CuEvent, CuStream, Cuda, CudaError};
use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};

use super::Context;
use crate::device::handle::{Entered, is_not_yet};
use crate::error::Error;

/// A stream, and what keeps it.
pub(in crate::device) struct Line {
    pub(in crate::device) context: Arc<Context>,
    /// What the driver has for it.
    way: RwLock<Way>,
    /// A number that no other stream of this process ever has: handles of the driver come again.
    pub(in crate::device) id: u64,
    owner: Owner,
    /// As one that waits (`queues.rs`).
    pub(in crate::device) standing: Mutex<Standing>,
}

/// A stream of the driver's, and its number, as that of a [`Line`].
#[derive(Clone, Copy)]
pub(in crate::device) struct Way {
    pub(in crate::device) raw: CuStream,
    pub(in crate::device) id: u64,
}

impl Way {
    /// Whoever has it destroys it. `priority`: of the least urgent one there is, and the most urgent one.
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

    /// The driver's stream, to put something there: as long as this is held no other takes its place.
    pub(in crate::device) fn raw(&self) -> MappedRwLockReadGuard<'_, CuStream> {
        RwLockReadGuard::map(self.way.read(), |way| &way.raw)
    }

    /// What the driver has for it now.
    pub(in crate::device) fn way(&self) -> Way {
        *self.way.read()
    }

    /// Whether another stream of the driver's may take its place: nobody else knows this one.
    pub(in crate::device) fn may_move(&self) -> bool {
        matches!(self.owner, Owner::Alone)
    }

    /// Goes on with another stream of the driver's, whatever is put here behind all that is here now. The one that was left,
    /// which is the caller's, as this one was; work that is on it stays there.
    pub(in crate::device) fn go_on_with(&self, entered: &Entered<'_>, next: Way) -> Result<Way, CudaError> {
        let mut way = self.way.write();
        self.context.follow(entered, way.raw, next.raw)?;
        // What was learnt of it as one that waits was learnt of the stream that it leaves.
        self.standing.lock().forget();
        Ok(std::mem::replace(&mut *way, next))
    }

    /// The same where nothing has been put here yet, so that there is nothing to wait for.
    pub(in crate::device) fn start_with(&self, next: Way) -> Way {
        std::mem::replace(&mut *self.way.write(), next)
    }
}

/// Who sees to it that a stream exists, and destroys it.
pub(in crate::device) enum Owner {
    /// We do.
    Ours,
    /// We do, and nobody else puts anything there: another may take its place.
    Alone,
    /// Someone else, for as long as was promised (`from_raw`).
    Promised,
    /// What is here, as long as it is here.
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
        // SAFETY: made by `Way::make`, and this was its last handle. The driver lets what is on it finish.
        self.context.close("destroy a stream", |cuda| unsafe { cuda.stream_destroy(raw) });
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
    /// Whether it has been reached. Never blocks.
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

/// What is known of a stream as one that waits.
#[derive(Default)]
pub(in crate::device) struct Standing {
    /// Streams of the driver's, by their numbers, which go on while this one waits.
    pub(in crate::device) apart: Vec<u64>,
    /// Of a caller's: other callers' streams, which do not.
    pub(in crate::device) together: Vec<u64>,
    /// The number of the copies' stream, where this one may hold that up and no spare one was found for copies.
    pub(in crate::device) beside: Option<u64>,
    /// So many times it is about to be made to wait for what is not on a stream yet.
    pub(in crate::device) soon: usize,
    /// Behind the last such wait.
    pub(in crate::device) until: Option<Arc<Point>>,
    /// The communicator whose collectives run here.
    pub(in crate::device) comm: Option<u64>,
}

impl Standing {
    /// Another stream of the driver's has taken its place.
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
    /// Whether all that is made ahead has been made.
    pub(in crate::device) made: bool,
    /// What collectives run on.
    pub(in crate::device) lines: Vec<Weak<Line>>,
    /// What waits, or waited, for what was not on a stream then.
    pub(in crate::device) waiting: Vec<Weak<Line>>,
    /// What collectives may go on with.
    pub(in crate::device) spare: Vec<Way>,
}

impl Ways {
    /// What waits now.
    pub(in crate::device) fn waiting(&mut self) -> Vec<Arc<Line>> {
        self.waiting.retain(|line| line.upgrade().is_some_and(|line| line.standing.lock().is_waiting()));
        self.waiting.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether nothing waits.
    pub(in crate::device) fn is_quiet(&mut self) -> bool {
        self.waiting().is_empty()
    }

    /// Destroys what nobody goes on with any more.
    pub(in crate::device) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) {
        for way in self.spare.drain(..) {
            // SAFETY: made by `make_ahead`, or left by a line that made it; the driver lets what is on it finish.
            unsafe { cuda.stream_destroy(way.raw) }.unwrap_or_else(report);
        }
    }
}
