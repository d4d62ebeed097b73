//! [`Handle`] retains a device's primary context, makes it a thread's current one, and calls the driver in it. It knows the driver's own
//! handles only, and none of the types that are built on them.

use std::marker::PhantomData;
use std::sync::{Arc, Once};
use std::time::Duration;

use allstream_sys::cuda::{
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CuContext,
    CuDevice, CuEvent, CuResult, CuStream, Cuda, CudaError,
};
use parking_lot::Mutex;

use super::capture::{Relaxed, relaxed};
use super::chores::end_before_libraries;
use super::current::{Held, Retained};
use super::driver::{cuda, told, uuid, warn};
use crate::error::Error;

/// Blocks until an event is reached, for events that do not wake the host: asks the driver again and again, and sleeps in between.
///
/// # Safety
/// The event exists, and is of the context that was entered.
pub(super) unsafe fn sleep_until(cuda: &Cuda, _: &Entered<'_>, event: CuEvent) -> Result<(), CudaError> {
    const PAUSE: Duration = Duration::from_micros(50);
    loop {
        // SAFETY: the caller's promise.
        match unsafe { cuda.event_query(event) } {
            Err(error) if is_not_yet(error.code) => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Whether the driver's answer about an event means that it is not reached yet, or that nobody may ask while a stream is being captured. An event
/// that was itself recorded into a graph (`CAPTURED_EVENT`) is never reached.
pub(super) fn is_not_yet(code: CuResult) -> bool {
    code == CuResult::NOT_READY || code.is_of_a_capture() && code != CuResult::CAPTURED_EVENT
}

/// A device's primary context, retained, and what the driver says of the device.
pub(super) struct Handle {
    pub(super) cuda: &'static Cuda,
    pub(super) ordinal: usize,
    pub(super) device: CuDevice,
    retained: Arc<Retained>,
    pub(super) name: String,
    pub(super) uuid: [u8; 16],
    /// Events of [`mark`](Self::mark) that were given back, to be recorded again.
    events: Mutex<Vec<CuEvent>>,
    /// The same for [`mark_for_host`](Self::mark_for_host).
    bells: Mutex<Vec<CuEvent>>,
    /// The most blocks with which a kernel is launched.
    pub(super) max_ctas: u32,
    /// The first number of the device's compute capability: which machine code it runs.
    pub(super) major: u32,
    /// Whether a stream's wait for a word can also flush: what another device wrote before the word is then visible to the work behind the
    /// wait.
    pub(super) flushes: bool,
}

/// Proof that a context is this thread's current one. When this is dropped, the thread's former context is its current one again, unless
/// the thread [keeps](super::current::keep) this one.
pub(super) struct Entered<'a> {
    /// As long as this is there, no call of this thread breaks a capture. `None`: the thread makes only calls that break none anyway.
    _relaxed: Option<Relaxed>,
    _held: Held<'a>,
    /// It borrows the handle, and stays on this thread.
    _here: PhantomData<(&'a Handle, *const ())>,
}

impl Handle {
    /// Retains the primary context of a device.
    pub(super) fn new(ordinal: usize) -> Result<Handle, Error> {
        let cuda = cuda()?;
        let tell = |error| told(ordinal, "open it", error);
        // SAFETY: asks for a number; `cuda()` has initialised the driver.
        let count = unsafe { cuda.device_get_count() }.map_err(tell)?;
        let index = i32::try_from(ordinal).ok().filter(|index| *index < count).ok_or_else(|| {
            let problem =
                format!("there is no device {ordinal}, this process sees {count} (CUDA_VISIBLE_DEVICES)");
            Error::invalid("Device::new", problem)
        })?;
        // SAFETY: the index was checked against the number of devices.
        let device = unsafe { cuda.device_get(index) }.map_err(tell)?;
        let name = cuda.device_name(device).map_err(tell)?;
        let uuid = uuid(cuda, device).map_err(tell)?;
        // SAFETY: the driver gave the device.
        let multiprocessors =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) };
        let max_ctas = max_ctas(multiprocessors.map_err(tell)?.unsigned_abs())?;
        // SAFETY: as above.
        let major =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) };
        let major = major.map_err(tell)?.unsigned_abs();
        // SAFETY: as above. A driver that does not know the attribute cannot flush.
        let flushes =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, device) };
        let flushes = flushes.is_ok_and(|can| can != 0);
        // SAFETY: as above.
        let retained = Arc::new(unsafe { Retained::new(cuda, device, ordinal) }.map_err(tell)?);
        static ONCE: Once = Once::new();
        ONCE.call_once(end_before_libraries);
        Ok(Handle {
            cuda,
            ordinal,
            device,
            retained,
            name,
            uuid,
            events: Mutex::default(),
            bells: Mutex::default(),
            max_ctas,
            major,
            flushes,
        })
    }

    /// Lets this device touch another's memory. `false`: it cannot.
    pub(super) fn reach(&self, other: &Handle) -> Result<bool, Error> {
        if std::ptr::eq(self, other) {
            return Ok(true);
        }
        let doing = format!("reach the memory of device {}", other.ordinal);
        if !self.cuda.has_device_can_access_peer() || !self.cuda.has_ctx_enable_peer_access() {
            return Ok(false);
        }
        // SAFETY: two devices that the driver gave.
        let can = unsafe { self.cuda.device_can_access_peer(self.device, other.device) };
        if can.map_err(|error| self.tell(&doing, error))? == 0 {
            return Ok(false);
        }
        // SAFETY: `self` and `other` keep their contexts retained.
        let enabled =
            self.enter().and_then(|_entered| unsafe { self.cuda.ctx_enable_peer_access(other.raw(), 0) });
        match enabled {
            // We, or somebody else in this process, have enabled it before.
            Err(error) if error.code == CuResult::PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            enabled => enabled.map(|()| true).map_err(|error| self.tell(&doing, error)),
        }
    }

    /// Makes the context this thread's current one, for any call.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        let _held = Held::new(&self.retained)?;
        Ok(Entered { _held, _relaxed: Some(relaxed(self.cuda)), _here: PhantomData })
    }

    /// The same, for calls that break no capture anyway: they put work on a stream, record an event or ask about a capture, or the thread is relaxed.
    pub(super) fn enter_plainly(&self) -> Result<Entered<'_>, CudaError> {
        let _held = Held::new(&self.retained)?;
        Ok(Entered { _held, _relaxed: None, _here: PhantomData })
    }

    /// The same as [`enter`](Self::enter), for calls of other libraries, which may make another context the thread's current one and leave it so.
    pub(super) fn enter_apart(&self) -> Result<Entered<'_>, CudaError> {
        let _held = Held::apart(&self.retained)?;
        Ok(Entered { _held, _relaxed: Some(relaxed(self.cuda)), _here: PhantomData })
    }

    /// The driver's handle, which lives as long as this.
    pub(super) fn raw(&self) -> CuContext {
        self.retained.context
    }

    pub(super) fn tell(&self, doing: &str, error: CudaError) -> Error {
        told(self.ordinal, doing, error)
    }

    /// Calls the driver in this context.
    pub(super) fn call<T>(
        &self,
        doing: &str,
        call: impl FnOnce(&'static Cuda) -> Result<T, CudaError>,
    ) -> Result<T, Error> {
        self.within(doing, |_entered| call(self.cuda))
    }

    /// The same, for calls that [`enter_plainly`](Self::enter_plainly) is enough for.
    pub(super) fn call_plainly<T>(
        &self,
        doing: &str,
        call: impl FnOnce(&'static Cuda) -> Result<T, CudaError>,
    ) -> Result<T, Error> {
        self.within_plainly(doing, |_entered| call(self.cuda))
    }

    /// Does work in this context that [`enter_plainly`](Self::enter_plainly) is enough for.
    pub(super) fn within_plainly<T>(
        &self,
        doing: &str,
        work: impl FnOnce(&Entered<'_>) -> Result<T, CudaError>,
    ) -> Result<T, Error> {
        self.enter_plainly().and_then(|entered| work(&entered)).map_err(|error| self.tell(doing, error))
    }

    /// Does work in this context.
    pub(super) fn within<T>(
        &self,
        doing: &str,
        work: impl FnOnce(&Entered<'_>) -> Result<T, CudaError>,
    ) -> Result<T, Error> {
        self.enter().and_then(|entered| work(&entered)).map_err(|error| self.tell(doing, error))
    }

    /// Calls `close`, which gives something back to the driver, and logs an error. `close` is called even if the context cannot be entered:
    /// the driver knows the context of what it gets back.
    pub(super) fn close(&self, doing: &str, close: impl FnOnce(&Cuda) -> Result<(), CudaError>) {
        let _entered = self.enter();
        if let Err(error) = close(self.cuda) {
            warn(self.ordinal, doing, &error);
        }
    }

    /// Records an event on a stream of this context. Streams can wait for the event, and the host can ask whether it is reached.
    pub(super) fn mark(&self, entered: &Entered<'_>, stream: CuStream) -> Result<CuEvent, CudaError> {
        self.marked(entered, stream, &self.events, CU_EVENT_DISABLE_TIMING)
    }

    /// The same with an event for which a thread of the host can sleep: when it is reached, the device wakes the thread by an interrupt.
    pub(super) fn mark_for_host(
        &self,
        entered: &Entered<'_>,
        stream: CuStream,
    ) -> Result<CuEvent, CudaError> {
        self.marked(entered, stream, &self.bells, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)
    }

    fn marked(
        &self,
        _: &Entered<'_>,
        stream: CuStream,
        kept: &Mutex<Vec<CuEvent>>,
        flags: u32,
    ) -> Result<CuEvent, CudaError> {
        let known = kept.lock().pop();
        let event = match known {
            Some(event) => event,
            // SAFETY: in this context (`Entered`); destroyed in `close_events`.
            None => unsafe { self.cuda.event_create(flags) }?,
        };
        // SAFETY: a stream and an event of this context; nobody else has the event.
        match unsafe { self.cuda.event_record(event, stream) } {
            Ok(()) => Ok(event),
            Err(error) => {
                kept.lock().push(event);
                Err(error)
            }
        }
    }

    /// Takes an event of `mark` back, to record it again. A stream that was told to wait for it still waits for the point at which it was
    /// recorded then.
    pub(super) fn recycle(&self, event: CuEvent) {
        self.events.lock().push(event);
    }

    /// The same, of `mark_for_host`.
    pub(super) fn recycle_for_host(&self, event: CuEvent) {
        self.bells.lock().push(event);
    }

    /// Makes `next` wait for what is on `before` now.
    pub(super) fn follow(
        &self,
        entered: &Entered<'_>,
        before: CuStream,
        next: CuStream,
    ) -> Result<(), CudaError> {
        let event = self.mark(entered, before)?;
        // SAFETY: two streams of this context, which the caller has, and an event that was just recorded.
        let waits = unsafe { self.cuda.stream_wait_event(next, event, 0) };
        self.recycle(event);
        waits
    }

    /// Destroys the events that are kept to be recorded again.
    pub(super) fn close_events(&self, report: &dyn Fn(CudaError)) {
        for event in self.events.lock().drain(..).chain(self.bells.lock().drain(..)) {
            // SAFETY: made by `marked`; an event may be destroyed before it is reached.
            unsafe { self.cuda.event_destroy(event) }.unwrap_or_else(report);
        }
    }
}

/// The most blocks of a kernel: what `ALLSTREAM_MAX_CTAS` says, else two for each multiprocessor. On an H200, which has 132 of
/// them, an all_reduce of 256 MB takes as long with 64 blocks as with 264, and longer with 32 (docs/bench/gpu.md).
fn max_ctas(multiprocessors: u32) -> Result<u32, Error> {
    match std::env::var("ALLSTREAM_MAX_CTAS").ok().filter(|text| !text.is_empty()) {
        None => Ok(2 * multiprocessors.max(1)),
        Some(text) => text.trim().parse().ok().filter(|ctas| *ctas > 0).ok_or_else(|| {
            let problem = format!("{text:?} is not a number of blocks of a kernel (1 or more)");
            Error::invalid("ALLSTREAM_MAX_CTAS", problem)
        }),
    }
}
