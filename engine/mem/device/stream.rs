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
};

use super::capture::relaxed;
use super::context::{Context, Entered, is_not_yet, sleep_until};
use super::handle::Device;
use super::staging::Finish;
use super::transfer::Transfer;
use super::waiter::{self, Outcome};
use crate::error::{Error, Failed};
use crate::mem::Event;

/// An in-order queue of work on a device. What [`HostStream`](crate::HostStream) is to a CPU.
///
/// Cheap to clone: all clones are one stream, which is destroyed with the last, after what is on it.
#[derive(Clone)]
pub struct DeviceStream(pub(super) Arc<Line>);

/// A stream, and what keeps it.
pub(super) struct Line {
    pub(super) context: Arc<Context>,
    pub(super) raw: CuStream,
    /// A number that no other stream of this process ever has: handles of the driver come again.
    pub(super) id: u64,
    owner: Owner,
}

/// Who sees to it that a stream exists, and destroys it.
enum Owner {
    /// We do.
    Ours,
    /// Someone else, for as long as was promised (`from_raw`).
    Promised,
    /// What is here, as long as it is here.
    #[cfg(feature = "cudarc")]
    Kept { _owner: Box<dyn Send + Sync> },
}

fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Drop for Line {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Ours) {
            return;
        }
        // Tried also where the context cannot be entered: the driver knows whose stream it is.
        let _entered = self.context.enter();
        // SAFETY: made by `DeviceStream::make`, and this was its last handle. The driver lets what is on it finish.
        if let Err(error) = unsafe { self.context.cuda.stream_destroy(self.raw) } {
            tracing::warn!(device = self.context.ordinal, "destroy a stream: {error}");
        }
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
        DeviceStream::make(device, |_, _| 0)
    }

    /// A stream of the highest priority that the device has, for communicating: its work goes first where both could
    /// run.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn high_priority(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::make(device, |_least, greatest| greatest)
    }

    fn make(device: &Device, priority: impl FnOnce(c_int, c_int) -> c_int) -> Result<DeviceStream, Error> {
        let raw = device.0.call("make a stream", |cuda| {
            let (least, greatest) = cuda.stream_priorities()?;
            // SAFETY: in the device's context; destroyed with the last handle.
            unsafe { cuda.stream_create_with_priority(CU_STREAM_NON_BLOCKING, priority(least, greatest)) }
        })?;
        Ok(DeviceStream(Arc::new(Line { context: device.0.clone(), raw, id: number(), owner: Owner::Ours })))
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
        let raw = CuStream(raw);
        if raw == CU_STREAM_PER_THREAD {
            let problem = "the per-thread default stream is another stream on every thread; use a stream of its own \
                           (in candle: Device::new_cuda_with_stream)";
            return Err(Error::invalid("DeviceStream::from_raw", problem));
        }
        Ok(DeviceStream(Arc::new(Line {
            context: device.0.clone(),
            raw,
            id: number(),
            owner: Owner::Promised,
        })))
    }

    /// A stream of someone else's that exists as long as `owner` does.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of the primary context of `device`, and not the per-thread default stream;
    /// - it exists until `owner` is dropped.
    #[cfg(feature = "cudarc")]
    pub(super) unsafe fn kept(
        device: &Device,
        raw: *mut c_void,
        owner: impl Send + Sync + 'static,
    ) -> DeviceStream {
        let owner = Owner::Kept { _owner: Box::new(owner) };
        let context = device.0.clone();
        DeviceStream(Arc::new(Line { context, raw: CuStream(raw), id: number(), owner }))
    }

    /// The device.
    pub fn device(&self) -> Device {
        Device(self.0.context.clone())
    }

    /// The `CUstream`, for other libraries. It exists as long as a handle of this stream does.
    pub fn as_raw(&self) -> *mut c_void {
        self.0.raw.0
    }

    /// The point that the stream has now been filled to.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn record(&self) -> Result<DeviceEvent, Error> {
        let context = &self.0.context;
        let raw = context.enter().and_then(|entered| context.mark_for_host(&entered, self.0.raw));
        let raw = raw.map_err(|error| context.tell("mark a point in a stream", error))?;
        Ok(DeviceEvent(Arc::new(Point { context: context.clone(), raw, wakes: true })))
    }

    /// The same point, for streams to wait for, and for the host to ask for or to be told of.
    pub(crate) fn point(&self) -> Result<DeviceEvent, Error> {
        let context = &self.0.context;
        let raw = context.enter().and_then(|entered| self.mark(&entered));
        let raw = raw.map_err(|error| context.tell("mark a point in a stream", error))?;
        Ok(DeviceEvent::of(context, raw))
    }

    /// An event recorded here.
    pub(super) fn mark(&self, entered: &Entered<'_>) -> Result<CuEvent, allstream_sys::cuda::CudaError> {
        self.0.context.mark(entered, self.0.raw)
    }

    /// The same with an event that nobody else has, which is made if it is not there yet. Streams that were told to wait
    /// for it wait for what it was then.
    pub(crate) fn record_in(&self, event: &mut Option<DeviceEvent>) -> Result<(), Error> {
        let Some(event) = event else {
            *event = Some(self.point()?);
            return Ok(());
        };
        self.0.context.call("mark a point in a stream", |cuda| {
            // SAFETY: both exist: `self` and `event` keep them, and they are of one context.
            unsafe { cuda.event_record(event.0.raw, self.0.raw) }
        })
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
            unsafe { cuda.stream_wait_event(self.0.raw, event.0.raw, 0) }
        })
    }

    /// Blocks until all that was put here is done.
    ///
    /// # Errors
    /// [`Error::Cuda`]; a kernel that failed is told here too.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.0.context.call("wait for a stream", |cuda| {
            // SAFETY: `self` keeps the stream.
            unsafe { cuda.stream_synchronize(self.0.raw) }
        })
    }

    /// Refuses `call` for this problem where what is put here now goes into a graph instead of running.
    pub(crate) fn refuse_capture(&self, call: &str, problem: &str) -> Result<(), Error> {
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        self.0.context.call("ask whether a stream is being captured", |cuda| {
            // SAFETY: `self` keeps the stream; `status` is room for the answer.
            unsafe { cuda.stream_is_capturing(self.0.raw, &raw mut status) }
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
        let _relaxed = relaxed(context.cuda);
        // SAFETY: `self` keeps the event.
        match unsafe { context.cuda.event_query(self.0.raw) } {
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
            let _entered = context.enter()?;
            if self.0.wakes {
                // SAFETY: `self` keeps the event, and its context is current.
                unsafe { context.cuda.event_synchronize(self.0.raw) }
            } else {
                // SAFETY: as above.
                unsafe { sleep_until(context.cuda, self.0.raw) }
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
