//! A CUDA device's own clock.

use std::ffi::c_int;

use allstream::cuda::DeviceStream;
use allstream::{Error, Members};
use allstream_sys::cuda::{CuContext, CuDevice, CuEvent, CuStream, Cuda, CudaError};

/// Two events in a stream, by which the driver tells how long the device took for the work between them. The engine's own events
/// record no times, which costs the device less.
#[derive(Debug)]
pub(crate) struct Clock {
    stream: DeviceStream,
    cuda: &'static Cuda,
    device: CuDevice,
    /// The device's primary context, which is retained as long as this lives.
    context: CuContext,
    /// The events that mark the start and the stop.
    events: [CuEvent; 2],
}

impl Clock {
    /// `CU_EVENT_DEFAULT`: events that take the time.
    const TIMING: u32 = 0;

    pub(crate) fn new(stream: &DeviceStream) -> Result<Clock, Error> {
        let doing = "make events that take the time";
        let ordinal = stream.device().ordinal();
        let cuda = Cuda::get().map_err(|missing| Error::Unavailable {
            what: "the CUDA driver".into(),
            problem: missing.to_string(),
        })?;
        // SAFETY: the driver checks the number.
        let device = unsafe { cuda.device_get(c_int::try_from(ordinal).unwrap_or(c_int::MAX)) };
        let device = device.map_err(|error| told(ordinal, doing, error))?;
        // SAFETY: a device that the driver has just named; released in `drop`, or below.
        let context = unsafe { cuda.device_primary_ctx_retain(device) };
        let context = context.map_err(|error| told(ordinal, doing, error))?;
        let mut clock = Clock { stream: stream.clone(), cuda, device, context, events: [CuEvent::NULL; 2] };
        for which in 0..2 {
            // SAFETY: `within` makes the context current; `drop` destroys the event.
            let event = clock.within(doing, || unsafe { cuda.event_create(Clock::TIMING) })?;
            clock.events[which] = event;
        }
        Ok(clock)
    }

    /// Marks the start: the time counts from when the device has done all that is on the stream now.
    pub(crate) fn start(&self) -> Result<(), Error> {
        self.record(self.events[0])
    }

    /// Marks the stop: the time counts until the device has done all that is on the stream now.
    pub(crate) fn stop(&self) -> Result<(), Error> {
        self.record(self.events[1])
    }

    fn record(&self, event: CuEvent) -> Result<(), Error> {
        self.within("mark a point in time", || {
            let stream = CuStream(self.stream.as_raw());
            // SAFETY: the event was made in `new`, and `self.stream` keeps the stream, which is of the same context.
            unsafe { self.cuda.event_record(event, stream) }
        })
    }

    /// Waits for the stream, and returns the seconds from start to stop. `None`: this driver cannot tell them.
    pub(crate) fn seconds(&self) -> Result<Option<f64>, Error> {
        self.stream.synchronize()?;
        if !self.cuda.has_event_elapsed_time() {
            return Ok(None);
        }
        let [start, stop] = self.events;
        // SAFETY: both were made in `new`, to take the time.
        let ms = self.within("ask for the time between events", || unsafe {
            self.cuda.event_elapsed_time(start, stop)
        })?;
        Ok(Some(f64::from(ms) / 1e3))
    }

    /// Calls the driver with the context current in this thread.
    fn within<T>(&self, doing: &str, call: impl FnOnce() -> Result<T, CudaError>) -> Result<T, Error> {
        let entered = || {
            // SAFETY: the context is retained until `self` is dropped.
            unsafe { self.cuda.ctx_push_current(self.context) }?;
            let result = call();
            // SAFETY: pops the context that was pushed above.
            unsafe { self.cuda.ctx_pop_current() }?;
            result
        };
        entered().map_err(|error| told(self.stream.device().ordinal(), doing, error))
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        for event in self.events.into_iter().filter(|event| *event != CuEvent::NULL) {
            // SAFETY: made in `new`, and destroyed once; the driver keeps it until the stream has come past it.
            let destroyed = self.within("destroy an event", || unsafe { self.cuda.event_destroy(event) });
            if let Err(error) = destroyed {
                tracing::warn!("{error}");
            }
        }
        // SAFETY: retained in `new`, and released once.
        if let Err(error) = unsafe { self.cuda.device_primary_ctx_release(self.device) } {
            tracing::warn!("release a context: {error}");
        }
    }
}

fn told(device: usize, doing: &str, error: CudaError) -> Error {
    let CudaError { call, code, name, text } = error;
    let (doing, call, members) = (doing.into(), call.into(), Members::default());
    Error::Cuda { doing, device, call, code: code.0, name, problem: text, members }
}
