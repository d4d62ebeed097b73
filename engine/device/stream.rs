//! Streams of a device, and events: points in them.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use allstream_sys::cuda::{
    CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_PER_THREAD, CuEvent, CuStream, CudaError,
};

use super::context::{Context, Line, Owner, Point, Way};
use super::devices::Device;
use super::handle::{Entered, is_not_yet, sleep_until};
use crate::error::Error;

const MARK: &str = "mark a point in a stream";

/// An in-order queue of work on a device. What [`HostStream`](crate::HostStream) is to a CPU.
///
/// Cheap to clone: all clones are one stream. When the last is dropped, a stream that was made by [`new`](Self::new) or
/// [`high_priority`](Self::high_priority) is destroyed; the driver lets the work on it finish.
#[derive(Clone)]
pub struct DeviceStream(pub(super) Arc<Line>);

impl fmt::Debug for DeviceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for DeviceStream {
    fn eq(&self, other: &DeviceStream) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for DeviceStream {}

impl DeviceStream {
    /// A stream of usual priority, for computing. This stream and the legacy default stream do not wait for each other.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::make(device, Owner::Ours, |_, _| 0).map(DeviceStream::made_a_callers)
    }

    /// A stream of the highest priority that the device has, for communicating: its work goes before that of other streams
    /// where both could run.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn high_priority(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::of_the_engine(device).map(DeviceStream::made_a_callers)
    }

    /// The same for the engine's own use: no rank makes its input there. Unlike a stream [of a rank](Self::of_a_rank) it keeps its `CUstream`,
    /// which a library may have.
    pub(crate) fn of_the_engine(device: &Device) -> Result<DeviceStream, Error> {
        DeviceStream::make(device, Owner::Ours, |_least, greatest| greatest)
    }

    /// The same for a rank's part of collectives: nobody else puts anything on this stream.
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
        // `Line` destroys it when the last handle is dropped.
        Ok(DeviceStream(Arc::new(Line::of(context.clone(), way, owner))))
    }

    /// A stream of someone else's: of an array library, say. It is not destroyed here.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of the primary context of `device`;
    /// - it exists until every clone of the result, every buffer on it and every event recorded on it is gone, and every
    ///   [`Transfer`](super::Transfer) on it has ended.
    ///
    /// The legacy default stream (null, or `CU_STREAM_LEGACY`) is such a stream.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `raw` is the per-thread default stream. That is another stream on each thread, while buffers
    /// move between threads. Let the other library use a stream that was made for it.
    pub unsafe fn from_raw(device: &Device, raw: *mut c_void) -> Result<DeviceStream, Error> {
        DeviceStream::of_others(device, raw, Owner::Promised)
    }

    /// A stream of someone else's that exists as long as `owner` does. `owner` is dropped with the last handle of the stream, on whatever
    /// thread this happens.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of the primary context of `device`;
    /// - it exists until `owner` is dropped.
    ///
    /// # Errors
    /// Those of [`from_raw`](Self::from_raw).
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
        Ok(DeviceStream(Arc::new(Line::new(device.0.clone(), raw, owner))).made_a_callers())
    }

    /// Wraps a stream of the driver that the context, or another handle, owns. The caller must keep that stream alive for as long as the result.
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

    /// Calls another library in the device's context, with the driver's stream. During the call this stream keeps its present `CUstream` (a
    /// rank's stream may otherwise move to another one, `Line::go_on_with`).
    pub(crate) fn with_raw<T>(&self, doing: &str, call: impl FnOnce(CuStream) -> T) -> Result<T, Error> {
        let context = &self.0.context;
        let raw = self.0.raw();
        let called = context.enter_apart().map(|_entered| call(*raw));
        called.map_err(|error| context.tell(doing, error))
    }

    /// Marks the point behind all that is on the stream now.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn record(&self) -> Result<DeviceEvent, Error> {
        let context = &self.0.context;
        let raw = context.within_plainly(MARK, |entered| context.mark_for_host(entered, *self.0.raw()))?;
        Ok(DeviceEvent(Arc::new(Point { context: context.clone(), raw, wakes: true })))
    }

    /// As `record`, but the event cannot wake a thread that sleeps in the driver. Streams can wait for it, and the host can ask about it or
    /// have `waiter.rs` watch it.
    pub(crate) fn point(&self) -> Result<DeviceEvent, Error> {
        let context = &self.0.context;
        Ok(DeviceEvent::of(context, context.within_plainly(MARK, |entered| self.mark(entered))?))
    }

    /// Records an event here.
    pub(super) fn mark(&self, entered: &Entered<'_>) -> Result<CuEvent, CudaError> {
        self.0.context.mark(entered, *self.0.raw())
    }

    /// Records `event` on this stream again, or makes it if it is `None`. Nobody else may hold a clone of it. Streams that were
    /// told to wait for it earlier still wait for the earlier point.
    pub(crate) fn record_in(&self, event: &mut Option<DeviceEvent>) -> Result<(), Error> {
        let Some(event) = event else {
            *event = Some(self.point()?);
            return Ok(());
        };
        self.0.context.call_plainly(MARK, |cuda| {
            // SAFETY: both exist: `self` and `event` keep them. They are of one context, as each such event is used on one stream only.
            unsafe { cuda.event_record(event.0.raw, *self.0.raw()) }
        })
    }

    /// Whether nobody but a rank puts anything here.
    pub(super) fn is_alone(&self) -> bool {
        self.0.may_move()
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
        self.0.context.call_plainly("make a stream wait", |cuda| {
            // SAFETY: both exist: `self` and `event` keep them. The event was recorded when it was made.
            unsafe { cuda.stream_wait_event(*self.0.raw(), event.0.raw, 0) }
        })
    }

    /// Makes this stream wait for what `other` holds now, and notes that it then waits for the operations for which `other` waits, too.
    pub(crate) fn wait_for_stream(&self, other: &DeviceStream) -> Result<(), Error> {
        other.make_wait([self])
    }

    /// Makes these streams wait for what this one holds now, by one event, as [`wait_for_stream`](Self::wait_for_stream) does for one.
    pub(super) fn make_wait<'a>(
        &self,
        others: impl IntoIterator<Item = &'a DeviceStream>,
    ) -> Result<(), Error> {
        let joined = self.0.standing.lock().joined().to_vec();
        let point = self.point()?;
        others.into_iter().try_for_each(|other| {
            other.wait_event(&point)?;
            other.0.standing.lock().joins(&joined);
            Ok(())
        })
    }

    /// Puts work here that writes zeros to `bytes` bytes from the address `at` on.
    ///
    /// # Safety
    /// The bytes are memory of this stream's device, which nobody touches out of the stream's order, and which exists until the stream has passed
    /// this work.
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
    /// [`Error::Cuda`]: also if a kernel that was put on a stream of the device has failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.0.context.synchronize("wait for a stream", self.0.raw())
    }

    /// Refuses `call`, for this problem, if the stream is being captured: what is put here then goes into a graph instead of running.
    pub(crate) fn refuse_capture(&self, call: &str, problem: &str) -> Result<(), Error> {
        if self.is_captured()? { Err(Error::invalid(call, problem)) } else { Ok(()) }
    }

    /// Whether what is put here now goes into a graph instead of running.
    pub(super) fn is_captured(&self) -> Result<bool, Error> {
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        self.0.context.call_plainly("ask whether a stream is being captured", |cuda| {
            // SAFETY: `self` keeps the stream; `status` is room for the answer.
            unsafe { cuda.stream_is_capturing(*self.0.raw(), &raw mut status) }
        })?;
        Ok(status != CU_STREAM_CAPTURE_STATUS_NONE)
    }
}

/// A point in a stream of a device, reached once all that was on the stream before it is done.
///
/// Cheap to clone. `.await` gives way to other tasks until it is reached; no thread spins meanwhile.
/// [`on_host`](Self::on_host) makes an [`Event`](crate::Event) of it, which collectives can start after
/// ([`Call::after`](crate::Call::after)).
#[derive(Clone)]
pub struct DeviceEvent(pub(super) Arc<Point>);

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
    /// The point at which [`mark`](DeviceStream::mark) has recorded this event.
    pub(super) fn of(context: &Arc<Context>, raw: CuEvent) -> DeviceEvent {
        DeviceEvent(Arc::new(Point { context: context.clone(), raw, wakes: false }))
    }

    /// Whether the point has been reached. Never blocks.
    ///
    /// # Errors
    /// [`Error::Cuda`]: work on the device has failed.
    pub fn is_complete(&self) -> Result<bool, Error> {
        self.0.is_complete()
    }

    /// Blocks until the point is reached; the thread sleeps meanwhile.
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
                // While a stream is captured elsewhere, the driver may refuse the wait; that capture will end. (To wait for
                // an event that was itself recorded into a graph is an error at once.)
                Err(error) if is_not_yet(error.code) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                reached => return reached.map_err(|error| context.tell("wait for an event", error)),
            }
        }
    }
}
