//! What the streams, events and memory of a device share, in this process.

mod lines;
mod synchronized;

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Weak;
use std::time::Duration;

use allstream_sys::cuda::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_STREAM_NON_BLOCKING, CuStream, CudaError,
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

pub(super) use self::lines::{Joined, Line, Owner, Point, Standing, Way, Ways};
use self::synchronized::Synchronized;
use super::allocations::Allocations;
use super::blocks::Pool;
use super::chores::{drop_later, give_back};
use super::driver::warn;
use super::handle::{Entered, Handle};
use super::modules::{Kernels, Modules};
use super::pinned_cache::{PinnedCache, unpin};
use crate::commands::must_not_block_here;
use crate::error::Error;

/// When the driver has no more memory to pin: how long to wait for pinned memory that is on its way back to the driver.
const SETTLE: Duration = Duration::from_secs(1);

/// At most so many streams of a device wait for events on the host's behalf at a time; about further events the host asks the driver now and then.
const NOTIFIERS: usize = 16;
/// So many of these streams are made when the first communicator is bound to the device; from then on no more are made.
const AHEAD: usize = 4;

#[derive(Default)]
struct Notifiers {
    idle: Vec<CuStream>,
    made: usize,
}

/// Streams that no caller and no rank has.
#[derive(Default)]
struct HelperStreams {
    /// They wait for events on the host's behalf.
    notifiers: Mutex<Notifiers>,
    /// For copies that wait for nothing. Made when first asked for.
    copies: Mutex<Option<Way>>,
}

/// A device's handle, and what all streams, events and memory of the device share. The fields' types do not know `Context`, except those of
/// `lines.rs`; the code that uses them is in files that import this one (`pool.rs`, `launch.rs`, `queues.rs`).
pub(super) struct Context {
    /// Taken out when this is dropped.
    handle: ManuallyDrop<Handle>,
    pub(super) pool: Mutex<Pool>,
    /// Other libraries' memory that other processes read where it lies.
    pub(super) allocations: Mutex<Allocations>,
    /// Held by the thread that gets memory for the pool from the driver, or gives some back.
    pub(super) growing: Mutex<()>,
    helpers: HelperStreams,
    /// The streams that collectives run on, and what may hold them up.
    pub(super) ways: Mutex<Ways>,
    /// The streams that callers have made, or have passed in.
    pub(super) callers: Mutex<Vec<Weak<Line>>>,
    /// Pinned memory of the host's that nobody uses.
    pub(super) pinned: Mutex<PinnedCache>,
    pub(super) kernels: Kernels,
    /// The streams that threads wait for.
    synchronized: Mutex<Synchronized>,
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
            handle: ManuallyDrop::new(Handle::new(ordinal)?),
            pool: Mutex::default(),
            allocations: Mutex::default(),
            growing: Mutex::default(),
            helpers: HelperStreams::default(),
            ways: Mutex::default(),
            callers: Mutex::default(),
            pinned: Mutex::default(),
            kernels: Kernels::default(),
            synchronized: Mutex::default(),
        })
    }

    /// A stream that is to wait for an event on the host's behalf, if one can be had. None is given while any stream waits for work that may not
    /// be on a stream yet: the event may be behind that wait, and a stream that waits for it could then hold up others (`queues.rs`).
    pub(super) fn notifier(&self, entered: &Entered<'_>) -> Option<CuStream> {
        // If the lock is taken, its holder may be about to make a stream wait.
        if !self.ways.try_lock().is_some_and(|mut ways| ways.is_quiet()) {
            return None;
        }
        let idle = self.helpers.notifiers.lock().idle.pop();
        idle.or_else(|| self.make_notifier(entered))
    }

    /// Makes now the streams that would otherwise be made when they are first needed. Making one may wait for all work on the device,
    /// and that work may wait for the thread that needs the stream. If some cannot be made, the engine does without them.
    pub(super) fn make_streams(&self, entered: &Entered<'_>) {
        let all: Vec<_> = std::iter::from_fn(|| self.make_notifier(entered)).take(AHEAD).collect();
        let mut notifiers = self.helpers.notifiers.lock();
        notifiers.idle.extend(all);
        // `make_notifier` then makes no more.
        notifiers.made = NOTIFIERS;
        drop(notifiers);
        let _ = self.copies(entered);
    }

    fn make_notifier(&self, _: &Entered<'_>) -> Option<CuStream> {
        {
            let mut notifiers = self.helpers.notifiers.lock();
            if notifiers.made == NOTIFIERS {
                return None;
            }
            notifiers.made += 1;
        }
        // SAFETY: in this context (`Entered`). Whoever gets the stream gives it back to `idle`, and `drop` destroys it.
        let stream = unsafe { self.cuda.stream_create_with_priority(CU_STREAM_NON_BLOCKING, 0) };
        if stream.is_err() {
            self.helpers.notifiers.lock().made -= 1;
        }
        stream.ok()
    }

    /// The stream for copies that wait for nothing, made when it is first asked for. As long as the result is held, no other stream takes its place.
    pub(super) fn copies(&self, entered: &Entered<'_>) -> Result<MappedMutexGuard<'_, CuStream>, CudaError> {
        let copies = self.helpers.copies.lock();
        let way = copies.map_or_else(|| Way::make(self, entered, |_, _| 0), Ok)?;
        Ok(MutexGuard::map(copies, |copies| &mut copies.get_or_insert(way).raw)) // destroyed in `drop`
    }

    pub(super) fn copies_way(&self) -> Option<Way> {
        *self.helpers.copies.lock()
    }

    /// Lets copies go on with the stream `next`, behind all that is on their present one. Returns the stream that they leave, which is then the
    /// caller's to keep or destroy. If copies have no stream yet, returns `next`.
    pub(super) fn copies_go_on_with(&self, entered: &Entered<'_>, next: Way) -> Result<Way, CudaError> {
        let mut copies = self.helpers.copies.lock();
        let Some(way) = &mut *copies else { return Ok(next) };
        self.follow(entered, way.raw, next.raw)?;
        Ok(std::mem::replace(way, next))
    }

    /// Blocks until all copies that were put on the stream for [copies](Self::copies) are done.
    pub(super) fn synchronize_copies(&self) -> Result<(), Error> {
        match MutexGuard::try_map(self.helpers.copies.lock(), |copies| {
            copies.as_mut().map(|way| &mut way.raw)
        }) {
            Ok(stream) => self.synchronize("wait for copies", stream),
            Err(_) => Ok(()),
        }
    }

    /// Blocks until all that was put on a stream of this context is done. `stream` is the caller's lock on it: as long as the lock is held, no other
    /// stream takes its place. The lock is released before this waits. If another stream takes its place during the wait, what is put on that one
    /// comes after this call began, and need not be waited for. Whoever gets the stream that was left, and has no use for it any more, destroys
    /// it by [`destroy`](Self::destroy), which lets this wait end first.
    pub(super) fn synchronize(
        &self,
        doing: &str,
        stream: impl Deref<Target = CuStream>,
    ) -> Result<(), Error> {
        let raw = *stream;
        self.synchronized.lock().begin(raw);
        drop(stream);
        // SAFETY: the stream existed while the caller's lock was held. Since then it counts as one that a thread waits for, so it exists until
        // `end` is called below.
        let waited = self.call(doing, |cuda| unsafe { cuda.stream_synchronize(raw) });
        if self.synchronized.lock().end(raw) {
            // SAFETY: `destroy` has left this stream to the last thread that waits for it.
            self.close("destroy a stream", |cuda| unsafe { cuda.stream_destroy(raw) });
        }
        waited
    }

    /// Destroys a stream; or, if threads wait for it, has the last of them destroy it. The driver lets what is on it finish.
    ///
    /// # Safety
    /// Made in this context by [`Way::make`], and only the caller still has it, but for threads in [`synchronize`](Self::synchronize).
    pub(super) unsafe fn destroy(&self, stream: CuStream) {
        if self.synchronized.lock().give_up(stream) {
            // SAFETY: the caller's promise, and no thread waits for it. None will, as nobody has it any more.
            self.close("destroy a stream", |cuda| unsafe { cuda.stream_destroy(stream) });
        }
    }

    /// Pins `bytes` bytes of host memory. `what` says, for the error, what they are for.
    pub(super) fn pin(&self, bytes: usize, what: &str) -> Result<*mut c_void, Error> {
        let pin = || {
            self.call(&format!("pin {bytes} bytes of host memory{what}"), |cuda| {
                // Pinned for all devices, and mapped so that they have an address for it: streams write words there (`signal.rs`).
                let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
                // SAFETY: this context is current (`call`); whoever gets the memory frees it.
                unsafe { cuda.mem_host_alloc(bytes, flags) }
            })
        };
        // If the memory that is kept for later, or is on its way back, goes to the driver, there may be enough.
        pin().or_else(|error| if self.unpin_idle() { pin() } else { Err(error) })
    }

    /// Gives pinned memory that nobody uses back to the driver, and waits for what is on its way back, at most [`SETTLE`]. Returns whether any
    /// was given back.
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

    /// Takes a notifier back. `is_free`: what it waited for is over. If that is not so, it is used again only when there is no other.
    pub(super) fn give_back(&self, notifier: CuStream, is_free: bool) {
        let idle = &mut self.helpers.notifiers.lock().idle;
        let last = if is_free { idle.len() } else { 0 };
        idle.insert(last, notifier);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: taken out once, here, and from here on nobody uses it by `self`.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        let idle = std::mem::take(&mut self.helpers.notifiers.get_mut().idle);
        let copies = self.helpers.copies.get_mut().take().map(|way| way.raw);
        let remains = Remains {
            handle,
            pool: std::mem::take(self.pool.get_mut()),
            pinned: self.pinned.get_mut().take_all(),
            kernels: std::mem::take(self.kernels.loaded.get_mut()),
            ways: std::mem::take(self.ways.get_mut()),
            streams: idle.into_iter().chain(copies).collect(),
        };
        // Whoever gives these back waits for what is on the device. Some threads must not wait: the waiter's, for one.
        if must_not_block_here() { drop_later(remains) } else { drop(remains) }
    }
}

/// What a context has of the driver, which gets it back when this is dropped.
struct Remains {
    handle: Handle,
    pool: Pool,
    pinned: Vec<(usize, usize)>,
    kernels: Modules,
    ways: Ways,
    streams: Vec<CuStream>,
}

impl Drop for Remains {
    fn drop(&mut self) {
        let cuda = self.handle.cuda;
        let report = |error: CudaError| warn(self.handle.ordinal, "close the device", &error);
        let entered = match self.handle.enter() {
            Ok(entered) => entered,
            Err(error) => return report(error),
        };
        self.pool.close(cuda, &entered, &report);
        self.pinned.drain(..).for_each(|block| unpin(cuda, block, &report));
        self.kernels.close(cuda, &report);
        self.handle.close_events(&report);
        self.ways.close(cuda, &report);
        for stream in self.streams.drain(..) {
            // SAFETY: made by `make_notifier` or `Way::make`, and nobody else has it; the driver lets what is on it finish.
            unsafe { cuda.stream_destroy(stream) }.unwrap_or_else(report);
        }
    }
}
