//! What the streams, events and memory of a device share, in this process.

mod lines;

use std::ffi::c_void;
use std::ops::Deref;
use std::sync::Weak;
use std::time::Duration;

use allstream_sys::cuda::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_STREAM_NON_BLOCKING, CuStream, CudaError,
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

pub(super) use self::lines::{Line, Owner, Point, Standing, Way, Ways};
use super::allocations::Allocations;
use super::blocks::Pool;
use super::chores::give_back;
use super::driver::warn;
use super::handle::{Entered, Handle};
use super::modules::Kernels;
use super::pinned_cache::{PinnedCache, unpin};
use crate::error::Error;

/// How long pinned memory that is on its way back to the driver is waited for, where some is missing.
const SETTLE: Duration = Duration::from_secs(1);

/// So many streams wait for events on the host's behalf at a time; further events are asked now and then instead.
const NOTIFIERS: usize = 16;
/// So many of a device that collectives run on, all made when the first is bound.
const AHEAD: usize = 4;

#[derive(Default)]
struct Notifiers {
    idle: Vec<CuStream>,
    made: usize,
}

/// A device's handle, and what is kept for all that is on the device. Each of these is a type that knows no context; what is done with
/// them is in the files above (`pool.rs`, `launch.rs`, `queues.rs`).
pub(super) struct Context {
    handle: Handle,
    pub(super) pool: Mutex<Pool>,
    /// Other libraries' memory that other processes read where it lies.
    pub(super) allocations: Mutex<Allocations>,
    /// Of who asks the driver for memory of the pool, or gives it some back.
    pub(super) growing: Mutex<()>,
    notifiers: Mutex<Notifiers>,
    copies: Mutex<Option<Way>>,
    /// The streams that collectives run on, and what may hold them up.
    pub(super) ways: Mutex<Ways>,
    /// The streams that callers have made, or named.
    pub(super) callers: Mutex<Vec<Weak<Line>>>,
    /// Pinned memory of the host's that nobody uses.
    pub(super) pinned: Mutex<PinnedCache>,
    pub(super) kernels: Kernels,
}

impl Deref for Context {
    type Target = Handle;
    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Context {
    /// Retains the primary context of a device.
    pub(super) fn new(ordinal: usize) -> Result<Context, Error> {
        Ok(Context {
            handle: Handle::new(ordinal)?,
            pool: Mutex::default(),
            allocations: Mutex::default(),
            growing: Mutex::default(),
            notifiers: Mutex::default(),
            copies: Mutex::default(),
            ways: Mutex::default(),
            callers: Mutex::default(),
            pinned: Mutex::default(),
            kernels: Kernels::default(),
        })
    }

    /// A stream on which nothing is but what nobody waits for any more, if there is one to be had: none while a stream waits
    /// for what may not be on a stream yet, as the event to wait for may be behind that (`queues.rs`).
    pub(super) fn notifier(&self, entered: &Entered<'_>) -> Option<CuStream> {
        // Whoever has them is about to make a stream wait.
        if !self.ways.try_lock().is_some_and(|mut ways| ways.is_quiet()) {
            return None;
        }
        let idle = self.notifiers.lock().idle.pop();
        idle.or_else(|| self.make_notifier(entered))
    }

    /// Makes the streams that are otherwise made when they are first needed: that may wait for what is on the device, and
    /// who needs one may hold what this waits for. What cannot be made is done without.
    pub(super) fn make_streams(&self, entered: &Entered<'_>) {
        let all: Vec<_> = std::iter::from_fn(|| self.make_notifier(entered)).take(AHEAD).collect();
        let mut notifiers = self.notifiers.lock();
        notifiers.idle.extend(all);
        // None is made later.
        notifiers.made = NOTIFIERS;
        drop(notifiers);
        let _ = self.copies(entered);
    }

    fn make_notifier(&self, _: &Entered<'_>) -> Option<CuStream> {
        {
            let mut notifiers = self.notifiers.lock();
            if notifiers.made == NOTIFIERS {
                return None;
            }
            notifiers.made += 1;
        }
        // SAFETY: in this context (`Entered`); destroyed in `drop`.
        let stream = unsafe { self.cuda.stream_create_with_priority(CU_STREAM_NON_BLOCKING, 0) };
        if stream.is_err() {
            self.notifiers.lock().made -= 1;
        }
        stream.ok()
    }

    /// The stream of copies that wait for nothing. As long as this is held no other takes its place.
    pub(super) fn copies(&self, entered: &Entered<'_>) -> Result<MappedMutexGuard<'_, CuStream>, CudaError> {
        let copies = self.copies.lock();
        let way = copies.map_or_else(|| Way::make(self, entered, |_, _| 0), Ok)?;
        Ok(MutexGuard::map(copies, |copies| &mut copies.get_or_insert(way).raw)) // destroyed in `drop`
    }

    pub(super) fn copies_way(&self) -> Option<Way> {
        *self.copies.lock()
    }

    /// Copies go on with another stream, behind all that is on this one. The one that was left, which is the caller's.
    pub(super) fn copies_go_on_with(&self, entered: &Entered<'_>, next: Way) -> Result<Way, CudaError> {
        let mut copies = self.copies.lock();
        let Some(way) = &mut *copies else { return Ok(next) };
        self.follow(entered, way.raw, next.raw)?;
        Ok(std::mem::replace(way, next))
    }

    /// Blocks until all that was put there is done.
    pub(super) fn synchronize_copies(&self) -> Result<(), Error> {
        let Some(Way { raw: stream, .. }) = self.copies_way() else { return Ok(()) };
        self.call("wait for copies", |cuda| {
            // SAFETY: it is destroyed with `self`.
            unsafe { cuda.stream_synchronize(stream) }
        })
    }

    /// Pins so much of the host's memory, for what is said.
    pub(super) fn pin(&self, bytes: usize, what: &str) -> Result<*mut c_void, Error> {
        let pin = || {
            self.call(&format!("pin {bytes} bytes of host memory{what}"), |cuda| {
                // For all devices, and with an address for them: streams write words there (`signal.rs`).
                let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
                // SAFETY: in a context; whoever gets it frees it.
                unsafe { cuda.mem_host_alloc(bytes, flags) }
            })
        };
        // What is kept for others, or on its way back, may be what is missing.
        pin().or_else(|error| if self.unpin_idle() { pin() } else { Err(error) })
    }

    /// Gives pinned memory that nobody uses back to the driver, and waits a while for what is on its way back; whether there was
    /// any.
    pub(super) fn unpin_idle(&self) -> bool {
        let idle = self.pinned.lock().take_all();
        let any = !idle.is_empty();
        self.unpin(idle);
        give_back(SETTLE) || any
    }

    /// Gives blocks of pinned memory back to the driver.
    pub(super) fn unpin(&self, blocks: impl IntoIterator<Item = (usize, usize)>) {
        let _entered = self.enter();
        let report = |error: CudaError| warn(self.ordinal, "unpin host memory", &error);
        blocks.into_iter().for_each(|block| unpin(self.cuda, block, &report));
    }

    pub(super) fn give_back(&self, notifier: CuStream) {
        self.notifiers.lock().idle.push(notifier);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let report = |error: CudaError| warn(self.ordinal, "close the device", &error);
        match self.enter() {
            Ok(entered) => {
                self.pool.lock().close(self.cuda, &entered, &report);
                let pinned = self.pinned.lock().take_all();
                pinned.into_iter().for_each(|block| unpin(self.cuda, block, &report));
                self.kernels.loaded.lock().close(self.cuda, &report);
                self.handle.close_events(&report);
                let copies = self.copies.lock().take().map(|way| way.raw);
                self.ways.lock().close(self.cuda, &report);
                let idle = std::mem::take(&mut self.notifiers.lock().idle);
                for stream in idle.into_iter().chain(copies) {
                    // SAFETY: made by `notifier` and `copies`; the driver lets what is on it finish.
                    unsafe { self.cuda.stream_destroy(stream) }.unwrap_or_else(report);
                }
            }
            Err(error) => report(error),
        }
    }
}
