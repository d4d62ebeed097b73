//! A device's context, and what its streams, events and memory share.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Once;
use std::time::Duration;

use allstream_sys::Unavailable;
use allstream_sys::cuda::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE,
    CU_STREAM_NON_BLOCKING, CuContext, CuDevice, CuEvent, CuResult, CuStream, Cuda, CudaError,
    LIBRARY_VARIABLE,
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use super::capture::{Relaxed, relaxed};
use super::chores::{end_before_libraries, give_back};
use super::launch::{Modules, max_ctas};
use super::pool::Pool;
use super::queues::Ways;
use super::staging::{Pinned, unpin};
use super::stream::Way;
use crate::error::Error;

/// How long pinned memory that is on its way back to the driver is waited for, where some is missing.
const SETTLE: Duration = Duration::from_secs(1);

/// The driver, or what is missing and what to do about it.
pub(super) fn cuda() -> Result<&'static Cuda, Error> {
    Cuda::get().map_err(|missing| {
        let advice = match missing {
            Unavailable::Init { .. } => {
                "check that nvidia-smi lists a GPU, and that CUDA_VISIBLE_DEVICES does not hide it".to_owned()
            }
            _ => format!(
                "install the NVIDIA driver, which brings libcuda.so.1, or set {LIBRARY_VARIABLE} to its path"
            ),
        };
        Error::Unavailable { what: "the CUDA driver".into(), problem: format!("{missing}; {advice}") }
    })
}

/// What the driver said, for a person.
pub(super) fn told(device: usize, doing: &str, error: CudaError) -> Error {
    let advice = match error.code {
        CuResult::OUT_OF_MEMORY if error.call == "cuMemHostAlloc" => {
            "; the system pins no more host memory: use smaller buffers, or raise its limit of locked memory"
        }
        CuResult::OUT_OF_MEMORY => {
            "; drop device buffers, or give memory back with Device::trim, here or in other processes"
        }
        CuResult::INVALID_DEVICE | CuResult::NO_DEVICE => {
            "; check nvidia-smi, and that CUDA_VISIBLE_DEVICES does not hide the device"
        }
        CuResult::SYSTEM_DRIVER_MISMATCH => "; reboot, or reload the kernel module of the driver installed",
        code if code.is_sticky() => {
            "; a kernel has failed, and nothing more runs on this device in this process: run it under \
             compute-sanitizer to find which"
        }
        _ => "",
    };
    Error::Cuda {
        doing: doing.to_owned(),
        device,
        call: error.call.to_owned(),
        code: error.code.0,
        name: error.name,
        problem: error.text + advice,
    }
}

/// Says what the driver has refused where there is no caller to be told. Nothing, where the driver is gone because the process
/// ends: what was to be given back goes with the process.
pub(super) fn warn(device: usize, doing: &str, error: &CudaError) {
    if error.code != CuResult::DEINITIALIZED {
        tracing::warn!(device, "{doing}: {error}");
    }
}

/// Whether something failed because the process ends, and the driver is gone.
pub(super) fn is_of_the_end(error: &Error) -> bool {
    matches!(error, Error::Cuda { code, .. } if *code == CuResult::DEINITIALIZED.0)
}

/// The identity of a device that the driver gave.
pub(super) fn uuid(cuda: &Cuda, device: CuDevice) -> Result<[u8; 16], CudaError> {
    // A part of a divided device (MIG) has an identity of its own, which only the newer function gives.
    let uuid = if cuda.has_device_get_uuid_v2() {
        // SAFETY: the driver gave the device.
        unsafe { cuda.device_get_uuid_v2(device) }
    } else {
        // SAFETY: as above.
        unsafe { cuda.device_get_uuid(device) }
    };
    uuid.map(|uuid| uuid.0)
}

/// Blocks until an event is reached that does not wake the host: asks now and then, asleep in between.
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

/// Of an event that was asked for: it is not reached, or cannot be asked while somebody captures a stream.
pub(super) fn is_not_yet(code: CuResult) -> bool {
    code == CuResult::NOT_READY || code.is_of_a_capture()
}

/// So many streams wait for events on the host's behalf at a time; further events are asked now and then instead.
const NOTIFIERS: usize = 16;
/// So many of a device that collectives run on, all made when the first is bound.
const AHEAD: usize = 4;

#[derive(Default)]
struct Notifiers {
    idle: Vec<CuStream>,
    made: usize,
}

/// A device: its primary context, held as long as anything on the device is.
pub(super) struct Context {
    pub(super) cuda: &'static Cuda,
    pub(super) ordinal: usize,
    pub(super) device: CuDevice,
    context: CuContext,
    pub(super) name: String,
    pub(super) uuid: [u8; 16],
    pub(super) pool: Mutex<Pool>,
    /// Of who asks the driver for memory of the pool, or gives it some back.
    pub(super) growing: Mutex<()>,
    /// Events that nobody waits for, to be recorded again.
    events: Mutex<Vec<CuEvent>>,
    /// The same, of those that wake the host.
    bells: Mutex<Vec<CuEvent>>,
    notifiers: Mutex<Notifiers>,
    copies: Mutex<Option<Way>>,
    /// The streams that collectives run on, and what may hold them up.
    pub(super) ways: Mutex<Ways>,
    /// Pinned memory of the host's that nobody uses.
    pub(super) pinned: Mutex<Pinned>,
    pub(super) modules: Mutex<Modules>,
    /// Of who loads a module.
    pub(super) loading: Mutex<()>,
    /// Blocks of a launch at most.
    pub(super) max_ctas: u32,
    /// The first number of the device's compute capability: which machine code it runs.
    pub(super) major: u32,
}

/// Proof that a context is this thread's current one, and that what the thread calls breaks no capture. What was before it
/// is again when this goes.
pub(super) struct Entered<'a> {
    context: &'a Context,
    _relaxed: Relaxed,
    /// The thread's.
    _here: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // SAFETY: pops what `enter` pushed on this thread (`Entered` cannot leave it, and nobody else pops ours).
        if let Err(error) = unsafe { self.context.cuda.ctx_pop_current() } {
            warn(self.context.ordinal, "leave a device, which stays current on this thread", &error);
        }
    }
}

impl Context {
    /// Retains the primary context of a device.
    pub(super) fn new(ordinal: usize) -> Result<Context, Error> {
        let cuda = cuda()?;
        let tell = |error| told(ordinal, "open it", error);
        // SAFETY: asks for a number.
        let count = unsafe { cuda.device_get_count() }.map_err(tell)?;
        let index = i32::try_from(ordinal).ok().filter(|index| *index < count).ok_or_else(|| {
            let problem =
                format!("there is no device {ordinal}, this process sees {count} (CUDA_VISIBLE_DEVICES)");
            Error::invalid("Device::new", problem)
        })?;
        // SAFETY: the index is of a device.
        let device = unsafe { cuda.device_get(index) }.map_err(tell)?;
        let name = cuda.device_name(device).map_err(tell)?;
        let uuid = uuid(cuda, device).map_err(tell)?;
        // SAFETY: as above.
        let multiprocessors =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) };
        let max_ctas = max_ctas(multiprocessors.map_err(tell)?.unsigned_abs())?;
        // SAFETY: as above.
        let major =
            unsafe { cuda.device_get_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) };
        let major = major.map_err(tell)?.unsigned_abs();
        let _relaxed = relaxed(cuda);
        // SAFETY: as above; released in `drop`.
        let context = unsafe { cuda.device_primary_ctx_retain(device) }.map_err(tell)?;
        static ONCE: Once = Once::new();
        ONCE.call_once(end_before_libraries);
        Ok(Context {
            cuda,
            ordinal,
            device,
            context,
            name,
            uuid,
            pool: Mutex::default(),
            growing: Mutex::default(),
            events: Mutex::default(),
            bells: Mutex::default(),
            notifiers: Mutex::default(),
            copies: Mutex::default(),
            ways: Mutex::default(),
            pinned: Mutex::default(),
            modules: Mutex::default(),
            loading: Mutex::default(),
            max_ctas,
            major,
        })
    }

    /// Lets this device touch another's memory. `false`: it cannot.
    pub(super) fn reach(&self, other: &Context) -> Result<bool, Error> {
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
        // SAFETY: both contexts are retained, as long as `self` and `other` are.
        let enabled =
            self.enter().and_then(|_entered| unsafe { self.cuda.ctx_enable_peer_access(other.context, 0) });
        match enabled {
            // Before, by us or somebody else in this process.
            Err(error) if error.code == CuResult::PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            enabled => enabled.map(|()| true).map_err(|error| self.tell(&doing, error)),
        }
    }

    /// Makes the context this thread's current one.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { self.cuda.ctx_push_current(self.context) }?;
        Ok(Entered { context: self, _relaxed: relaxed(self.cuda), _here: PhantomData })
    }

    /// The driver's handle, which lives as long as this.
    pub(super) fn raw(&self) -> CuContext {
        self.context
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

    /// Does something in this context.
    pub(super) fn within<T>(
        &self,
        doing: &str,
        work: impl FnOnce(&Entered<'_>) -> Result<T, CudaError>,
    ) -> Result<T, Error> {
        self.enter().and_then(|entered| work(&entered)).map_err(|error| self.tell(doing, error))
    }

    /// Gives something back to the driver. Tried also where the context cannot be entered: the driver knows whose it is.
    pub(super) fn close(&self, doing: &str, close: impl FnOnce(&Cuda) -> Result<(), CudaError>) {
        let _entered = self.enter();
        if let Err(error) = close(self.cuda) {
            warn(self.ordinal, doing, &error);
        }
    }

    /// An event recorded on a stream of this context: for streams to wait for, and to be asked.
    pub(super) fn mark(&self, entered: &Entered<'_>, stream: CuStream) -> Result<CuEvent, CudaError> {
        self.marked(entered, stream, &self.events, CU_EVENT_DISABLE_TIMING)
    }

    /// The same, for a thread of the host's that is to sleep until it is reached: the device wakes it, by an interrupt.
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
            // SAFETY: in this context (`Entered`); destroyed in `drop`.
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

    /// Takes an event of `mark` back. Streams that were told to wait for it wait for what it was recorded at then.
    pub(super) fn recycle(&self, event: CuEvent) {
        self.events.lock().push(event);
    }

    /// The same, of `mark_for_host`.
    pub(super) fn recycle_for_host(&self, event: CuEvent) {
        self.bells.lock().push(event);
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

    /// Makes `next` wait for what is on `before`.
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
                self.modules.lock().close(self.cuda, &report);
                for event in self.events.lock().drain(..).chain(self.bells.lock().drain(..)) {
                    // SAFETY: made by `marked`; an event may be destroyed before it is reached.
                    unsafe { self.cuda.event_destroy(event) }.unwrap_or_else(report);
                }
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
        let _relaxed = relaxed(self.cuda);
        // SAFETY: retained in `new`; what was made in the context is gone, or is lost with it.
        unsafe { self.cuda.device_primary_ctx_release(self.device) }.unwrap_or_else(report);
    }
}
