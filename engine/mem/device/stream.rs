//! Streams of a device, and events: points in them.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as Task, Poll};
use std::time::Duration;

use allstream_sys::cuda::{
    CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_NON_BLOCKING, CU_STREAM_PER_THREAD, CuEvent, CuResult, CuStream,
    CudaError,
};

use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};

use super::context::{Context, Entered, is_not_yet, sleep_until};
use super::handle::Device;
use super::queues::Standing;
use super::staging::Finish;
use super::transfer::Transfer;
use super::waiter::{self, Outcome};
use crate::error::{Error, Failed};
use crate::mem::Event;

const MARK: &str = "mark a point in a stream";

/// An in-order queue of work on a device. What [`HostStream`](crate::HostStream) is to a CPU.
///
/// Cheap to clone: all clones are one stream, which is destroyed with the last, after what is on it.
#[derive(Clone)]
pub struct DeviceStream(pub(super) Arc<Line>);

/// A stream, and what keeps it.
pub(super) struct Line {
    pub(super) context: Arc<Context>,
    /// What the driver has for it.
    way: RwLock<Way>,
    /// A number that no other stream of this process ever has: handles of the driver come again.
    pub(super) id: u64,
    owner: Owner,
    /// As one that waits (`queues.rs`).
    pub(super) standing: Mutex<Standing>,
}

/// A stream of the driver's, and its number, as that of a [`Line`].
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) raw: CuStream,
    pub(super) id: u64,
}

impl Way {
    /// Whoever has it destroys it. `priority`: of the least urgent one there is, and the most urgent one.
    pub(super) fn make(
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
    fn new(context: Arc<Context>, raw: CuStream, owner: Owner) -> Line {
        Line::of(context, Way { raw, id: number() }, owner)
    }

    fn of(context: Arc<Context>, way: Way, owner: Owner) -> Line {
        Line { context, way: RwLock::new(way), id: number(), owner, standing: Mutex::default() }
    }

    /// The driver's stream, to put something there: as long as this is held no other takes its place.
    pub(super) fn raw(&self) -> MappedRwLockReadGuard<'_, CuStream> {
        RwLockReadGuard::map(self.way.read(), |way| &way.raw)
    }

    /// What the driver has for it now.
    pub(super) fn way(&self) -> Way {
        *self.way.read()
    }

    /// Whether another stream of the driver's may take its place: nobody else knows this one.
    pub(super) fn may_move(&self) -> bool {
        matches!(self.owner, Owner::Alone)
    }

    /// Goes on with another stream of the driver's, whatever is put here behind all that is here now. The one that was left,
    /// which is the caller's, as this one was; work that is on it stays there.
    pub(super) fn go_on_with(&self, entered: &Entered<'_>, next: Way) -> Result<Way, CudaError> {
        let mut way = self.way.write();
        self.context.follow(entered, way.raw, next.raw)?;
        // What was learnt of it as one that waits was learnt of the stream that it leaves.
        self.standing.lock().forget();
        Ok(std::mem::replace(&mut *way, next))
    }

    /// The same where nothing has been put here yet, so that there is nothing to wait for.
    pub(super) fn start_with(&self, next: Way) -> Way {
        std::mem::replace(&mut *self.way.write(), next)
    }
}

/// Who sees to it that a stream exists, and destroys it.
enum Owner {
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

impl fmt::Debug for DeviceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceStream({} of device {})", self.0.id, self.0.context.ordinal)
    }
}

impl PartialEq for DeviceStream {
    fn eq(&self, other: &DeviceStream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for DeviceStream {}

impl DeviceStream {
    /// A stream of usual priority, for computing. It does not wait for the default stream, nor that for it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::make(device, Owner::Ours, |_, _| 0)
    }

    /// A stream of the highest priority that the device has, for communicating: its work goes first where both could
    /// run.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn high_priority(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::make(device, Owner::Ours, |_least, greatest| greatest)
    }

    /// The same for a rank's part of collectives, which nobody else puts anything on.
    pub(crate) fn of_a_rank(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::make(device, Owner::Alone, |_least, greatest| greatest)
    }

    fn make(
        device: &Device,
        owner: Owner,
        priority: impl FnOnce(c_int, c_int) -> c_int,
    ) -> Result<DeviceStream, Error> {
        let context = &device.0;
        let way = context.within("make a stream", |entered| Way::make(context, entered, priority))?;
        // It is destroyed with the last handle.
        Ok(DeviceStream(Arc::new(Line::of(context.clone(), way, owner))))
    }

    /// A stream of someone else's: of an array library, say. It is not destroyed here.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of the primary context of `device`;
    /// - it exists until every clone of the result, every buffer on it and every event recorded on it is gone, and every
    ///   [`Transfer`] on it has ended.
    ///
    /// The legacy default stream (null, or `CU_STREAM_LEGACY`) is one.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the per-thread default stream, which is another one on each thread, while buffers move
    /// between threads. Give the library a stream of its own.
    pub unsafe fn from_raw(device: &Device, raw: *mut c_void) -> Result<DeviceStream, Error> {
        DeviceStream::of_others(device, raw, Owner::Promised)
    }

    /// A stream of someone else's that exists as long as `owner` does: that is dropped with the last handle of the stream, on whatever
    /// thread this happens.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of the primary context of `device`;
    /// - it exists until `owner` is dropped.
    ///
    /// # Errors
    /// As [`from_raw`](Self::from_raw).
    pub unsafe fn from_raw_of(
        device: &Device,
        raw: *mut c_void,
        owner: impl Send + Sync + 'static,
    ) -> Result<DeviceStream, Error> {
        DeviceStream::of_others(device, raw, Owner::Kept { _owner: Box::new(owner) })
    }

    fn of_others(device: &Device, raw: *mut c_void, owner: Owner) -> Result<DeviceStream, Error> {
        let raw = CuStream(raw);
        if raw == CU_STREAM_PER_THREAD {
            let problem = "the per-thread default stream is another stream on every thread; use a stream of its own \
                           (in candle: Device::new_cuda_with_stream)";
            return Err(Error::invalid("DeviceStream::from_raw", problem));
        }
        Ok(DeviceStream(Arc::new(Line::new(device.0.clone(), raw, owner))))
    }

    /// A stream of the context's own, which is there as long as that.
    pub(super) fn of_context(context: &Arc<Context>, way: Way) -> DeviceStream {
        DeviceStream(Arc::new(Line::of(context.clone(), way, Owner::Promised)))
    }

    /// The device.
    pub fn device(&self) -> Device {
        Device(self.0.context.clone())
    }

    /// The `CUstream`, for other libraries. It exists as long as a handle of this stream does.
    pub fn as_raw(&self) -> *mut c_void {
        self.0.raw().0
    }

    /// Calls another library in the device's context, with the driver's stream. As long as that runs no other takes its place.
    pub(crate) fn with_raw<T>(&self, doing: &str, call: impl FnOnce(CuStream) -> T) -> Result<T, Error> {
        let context = &self.0.context;
        let raw = self.0.raw();
        let called = context.enter().map(|_entered| call(*raw));
        called.map_err(|error| context.tell(doing, error))
    }

    /// The point that the stream has now been filled to.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn record(&self) -> Result<DeviceEvent, Error> {
        let context = &self.0.context;
        let raw = context.within(MARK, |entered| context.mark_for_host(entered, *self.0.raw()))?;
        Ok(DeviceEvent(Arc::new(Point { context: context.clone(), raw, wakes: true })))
    }

    /// The same point, for streams to wait for, and for the host to ask for or to be told of.
    pub(crate) fn point(&self) -> Result<DeviceEvent, Error> {
        let context = &self.0.context;
        Ok(DeviceEvent::of(context, context.within(MARK, |entered| self.mark(entered))?))
    }

    /// An event recorded here.
    pub(super) fn mark(&self, entered: &Entered<'_>) -> Result<CuEvent, CudaError> {
        self.0.context.mark(entered, *self.0.raw())
    }

    /// The same with an event that nobody else has, which is made if it is not there yet. Streams that were told to wait
    /// for it wait for what it was then.
    pub(crate) fn record_in(&self, event: &mut Option<DeviceEvent>) -> Result<(), Error> {
        let Some(event) = event else {
            *event = Some(self.point()?);
            return Ok(());
        };
        self.0.context.call(MARK, |cuda| {
            // SAFETY: both exist: `self` and `event` keep them, and they are of one context.
            unsafe { cuda.event_record(event.0.raw, *self.0.raw()) }
        })
    }

    /// Sees to it that so many bytes of the pool can be had here without asking the driver, unless somebody else takes them
    /// first. May wait for what is on the device: to be called by who holds nothing.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<(), Error> {
        let context = &self.0.context;
        context
            .within("get memory for a collective", |entered| context.reserve(entered, &self.0, bytes as u64))
    }

    /// Lets this stream's device touch the memory of another's. `false`: it cannot.
    pub(crate) fn reach(&self, other: &DeviceStream) -> Result<bool, Error> {
        self.0.context.reach(&other.0.context)
    }

    /// Work put here after this call starts only once `event` is reached. The stream waits, the caller does not; the
    /// event may be of another device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn wait_event(&self, event: &DeviceEvent) -> Result<(), Error> {
        self.0.context.call("make a stream wait", |cuda| {
            // SAFETY: both exist: `self` and `event` keep them. The event was recorded when it was made.
            unsafe { cuda.stream_wait_event(*self.0.raw(), event.0.raw, 0) }
        })
    }

    /// Puts zeros here, into so many bytes from an address on.
    ///
    /// # Safety
    /// They are memory of this stream's device and in its order: nobody else touches them out of it, and they stay until the stream has come past
    /// this.
    pub(super) unsafe fn zero(&self, at: u64, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        let raw = self.0.raw();
        self.0.context.call("fill memory with zeros", |cuda| {
            // SAFETY: the caller's promise; `self` keeps the stream.
            unsafe { cuda.memset_d8_async(at, 0, bytes, *raw) }
        })
    }

    /// Blocks until all that was put here is done.
    ///
    /// # Errors
    /// [`Error::Cuda`]; a kernel that failed is told here too.
    pub fn synchronize(&self) -> Result<(), Error> {
        // What is put here later need not be waited for, should it go on elsewhere meanwhile.
        let raw = *self.0.raw();
        self.0.context.call("wait for a stream", |cuda| {
            // SAFETY: `self` keeps the stream, and its context those that it has left.
            unsafe { cuda.stream_synchronize(raw) }
        })
    }

    /// Refuses `call` for this problem where what is put here now goes into a graph instead of running.
    pub(crate) fn refuse_capture(&self, call: &str, problem: &str) -> Result<(), Error> {
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        self.0.context.call("ask whether a stream is being captured", |cuda| {
            // SAFETY: `self` keeps the stream; `status` is room for the answer.
            unsafe { cuda.stream_is_capturing(*self.0.raw(), &raw mut status) }
        })?;
        if status == CU_STREAM_CAPTURE_STATUS_NONE { Ok(()) } else { Err(Error::invalid(call, problem)) }
    }
}

/// A point in a stream of a device, reached once all that was on the stream before it is done.
///
/// Cheap to clone. `.await` gives way to other tasks until it is reached; no thread spins meanwhile.
/// [`on_host`](Self::on_host) makes an [`Event`] of it, which collectives can start after
/// ([`Call::after`](crate::Call::after)).
#[derive(Clone)]
pub struct DeviceEvent(pub(super) Arc<Point>);

/// A recorded event.
pub(super) struct Point {
    pub(super) context: Arc<Context>,
    pub(super) raw: CuEvent,
    /// Whether a thread may sleep until the device wakes it (`mark_for_host`).
    wakes: bool,
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

impl fmt::Debug for DeviceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.is_complete() {
            Ok(true) => "reached",
            Ok(false) => "pending",
            Err(_) => "failed",
        };
        write!(f, "DeviceEvent({state}, of device {})", self.0.context.ordinal)
    }
}

impl DeviceEvent {
    /// Of an event of `mark`'s.
    pub(super) fn of(context: &Arc<Context>, raw: CuEvent) -> DeviceEvent {
        DeviceEvent(Arc::new(Point { context: context.clone(), raw, wakes: false }))
    }

    /// Whether the point has been reached. Never blocks.
    ///
    /// # Errors
    /// [`Error::Cuda`]: work on the device has failed.
    pub fn is_complete(&self) -> Result<bool, Error> {
        let context = &self.0.context;
        // SAFETY: `self` keeps the event, and its context is current.
        let answer = context.enter().and_then(|_entered| unsafe { context.cuda.event_query(self.0.raw) });
        match answer {
            Ok(()) => Ok(true),
            Err(error) if is_not_yet(error.code) => Ok(false),
            Err(error) => Err(context.tell("ask for an event", error)),
        }
    }

    /// Blocks until the point is reached, asleep.
    ///
    /// # Errors
    /// [`Error::Cuda`]: work on the device has failed.
    pub fn wait(&self) -> Result<(), Error> {
        let context = &self.0.context;
        let wait = || {
            let entered = context.enter()?;
            if self.0.wakes {
                // SAFETY: `self` keeps the event, and its context is current.
                unsafe { context.cuda.event_synchronize(self.0.raw) }
            } else {
                // SAFETY: as above.
                unsafe { sleep_until(context.cuda, &entered, self.0.raw) }
            }
        };
        loop {
            match wait() {
                // A capture elsewhere forbids to wait, and will be over. What was recorded into a graph never comes.
                Err(error) if error.code.is_of_a_capture() && error.code != CuResult::CAPTURED_EVENT => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                reached => return reached.map_err(|error| context.tell("wait for an event", error)),
            }
        }
    }

    /// Calls `finish` when the point is reached, or will not be.
    pub(crate) fn then(self, doing: &'static str, finish: Finish) {
        let then = move |outcome: Outcome| match outcome {
            Outcome::Reached => finish(Ok(())),
            Outcome::Over(error) | Outcome::Unknown(error) => finish(Err(error.doing(doing))),
        };
        waiter::watch(self, Box::new(then));
    }

    /// The same point as an event of the host's: complete when this is reached, failed where work before it has failed.
    pub fn on_host(&self) -> Event {
        let event = Event::pending();
        let fire = event.clone();
        let then = move |outcome: Outcome| fire.fire(matches!(outcome, Outcome::Reached));
        waiter::watch(self.clone(), Box::new(then));
        event
    }
}

/// Waits for a [`DeviceEvent`]: what `.await` on one makes.
#[derive(Debug)]
pub struct Reached(Transfer<()>);

impl IntoFuture for DeviceEvent {
    type Output = Result<(), Error>;
    type IntoFuture = Reached;
    fn into_future(self) -> Reached {
        Reached(Transfer::after(self, (), "wait for an event", |result, _: Option<()>| {
            result.map_err(|error| Failed { buf: Some(()), error })
        }))
    }
}

impl Future for Reached {
    type Output = Result<(), Error>;
    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(task).map_err(|failed| failed.error)
    }
}
