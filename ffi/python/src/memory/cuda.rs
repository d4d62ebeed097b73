//! Streams of CUDA devices: those that this module makes, in whose order a call takes the arrays of other libraries, and those that other
//! libraries have made.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use allstream::Error;
use allstream::cuda::{Device, DeviceStream};
use allstream::dlpack::Tensor as DlTensor;
use parking_lot::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors;
use crate::keeper;

/// Streams that this module has made and that no call has now, each with the number of its device.
static FREE: Mutex<Vec<(usize, DeviceStream)>> = Mutex::new(Vec::new());

/// A stream that this module has made, while the arrays of one call are in its order. No two calls in flight have the same stream. Sharing
/// one could deadlock: one operation would wait on the device for the end of the other, and ranks may call the two, on two communicators, in
/// different orders.
pub(super) struct CallStream {
    ordinal: usize,
    /// `None` only while this is being dropped.
    stream: Option<DeviceStream>,
    /// Whether all work on the stream is over, so that the next call may have the stream. Else the stream is destroyed when this is dropped.
    is_over: AtomicBool,
}

impl CallStream {
    fn new(ordinal: usize) -> Result<CallStream, Error> {
        let free = {
            let mut free = FREE.lock();
            let at = free.iter().rposition(|(device, _)| *device == ordinal);
            at.map(|at| free.swap_remove(at).1)
        };
        let stream = match free {
            Some(stream) => stream,
            None => DeviceStream::new(&Device::new(ordinal)?)?,
        };
        Ok(CallStream { ordinal, stream: Some(stream), is_over: AtomicBool::new(false) })
    }

    pub(super) fn stream(&self) -> &DeviceStream {
        // Only `drop` takes it.
        self.stream.as_ref().unwrap_or_else(|| unreachable!("a stream is there until it is dropped"))
    }

    /// Notes that the call has succeeded and is over on the device: another call may have the stream.
    pub(super) fn is_done_with(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        if keeper::is_forked() {
            std::mem::forget(self.stream.take());
        } else if self.is_over.load(Ordering::Relaxed) {
            self.stream.take().into_iter().for_each(|stream| FREE.lock().push((self.ordinal, stream)));
        }
    }
}

/// The streams of one call: one for each device that its arrays are on. Those of several calls that were [added](Self::add) may be more.
#[derive(Default)]
pub(crate) struct CallStreams(Vec<Arc<CallStream>>);

impl CallStreams {
    /// Whether none of the call's arrays is on a device.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits, without the GIL, until all work that was put on these streams is over: from then on any stream may use the call's arrays.
    ///
    /// # Errors
    /// Work on a device has failed.
    pub(crate) fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let all = || self.0.iter().try_for_each(|stream| stream.stream().synchronize());
        if self.is_empty() { Ok(()) } else { py.detach(all).map_err(|error| errors::of(py, &error)) }
    }

    /// Adds the streams of another call. Those that are here already stay as they are.
    pub(crate) fn add(&mut self, others: CallStreams) {
        let is_new = |other: &Arc<CallStream>| !self.0.iter().any(|ours| Arc::ptr_eq(ours, other));
        let new: Vec<_> = others.0.into_iter().filter(is_new).collect();
        self.0.extend(new);
    }

    /// Takes out all but one stream of each device. To be called when all work on them is over.
    pub(crate) fn surplus(&mut self) -> CallStreams {
        let mut kept: Vec<Arc<CallStream>> = Vec::with_capacity(self.0.len());
        let mut surplus = Vec::new();
        for stream in self.0.drain(..) {
            let is_known = kept.iter().any(|known| known.ordinal == stream.ordinal);
            if is_known { surplus.push(stream) } else { kept.push(stream) }
        }
        self.0 = kept;
        CallStreams(surplus)
    }

    /// The call's stream on this device. Where the call has none there yet, it gets one.
    ///
    /// # Errors
    /// There is no such device, or no driver.
    pub(super) fn of(&mut self, ordinal: usize) -> Result<Arc<CallStream>, Error> {
        if let Some(known) = self.0.iter().find(|stream| stream.ordinal == ordinal) {
            return Ok(known.clone());
        }
        let made = Arc::new(CallStream::new(ordinal)?);
        self.0.push(made.clone());
        Ok(made)
    }
}

/// A tensor of another library's as the owner of memory on a device. The engine drops owners on the thread that watches for the end of work on
/// devices, which must not wait. The tensor's deleter may wait for the GIL, so the thread of [`keeper`] deletes the tensor instead.
pub(super) struct OwnerOfMemory(pub(super) Option<Box<DlTensor>>);

impl Drop for OwnerOfMemory {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|tensor| keeper::delete(tensor));
    }
}

/// A Python object as the owner of a stream. The stream's last handle may be dropped on any thread, so the thread of [`keeper`] gives the
/// object back.
struct OwnerOfStream(Option<Py<PyAny>>);

impl Drop for OwnerOfStream {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(keeper::give_back);
    }
}

/// A stream of torch's, cupy's or another library's.
///
/// # Errors
/// The object is no CUDA stream, does not say of which device it is, or is a default stream that differs from device to device or from
/// thread to thread; or the device cannot be opened. `call` is the name of the Python call, for the error's text.
pub(crate) fn stream_of_others(object: &Bound<'_, PyAny>, call: &str) -> PyResult<DeviceStream> {
    let py = object.py();
    let number = |name: &Bound<'_, pyo3::types::PyString>| -> PyResult<Option<i64>> {
        object.getattr_opt(name)?.map(|value| value.extract()).transpose()
    };
    // torch's attribute, cupy's, and the method of a protocol that newer libraries have.
    let mut raw = number(intern!(py, "cuda_stream"))?;
    if raw.is_none() {
        raw = number(intern!(py, "ptr"))?;
    }
    if let (None, Some(tell)) = (raw, object.getattr_opt(intern!(py, "__cuda_stream__"))?) {
        raw = Some(tell.call0()?.extract::<(i64, i64)>()?.1);
    }
    let Some(raw) = raw else {
        let class = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "{call}: expected an allstream.HostStream or a CUDA stream of torch's or cupy's, found an object of type {class}"
        )));
    };
    let mut ordinal = number(intern!(py, "device_index"))?;
    if ordinal.is_none() {
        ordinal = number(intern!(py, "device_id"))?;
    }
    let Some(ordinal) = ordinal else {
        return Err(errors::invalid(
            py,
            call,
            "the stream has neither device_index nor device_id, so its device is not known",
        ));
    };
    // cupy's default stream has -1 here: it is the default stream of whichever device is current.
    let Ok(ordinal) = usize::try_from(ordinal) else {
        let problem = "the stream is the default one of whichever device is current: make a stream of its own, cupy.cuda.Stream()";
        return Err(errors::invalid(py, call, problem));
    };
    let device = Device::new(ordinal).map_err(|error| errors::of(py, &error))?;
    let owner = OwnerOfStream(Some(object.clone().unbind()));
    // SAFETY: the object has said that this is its stream, of this device's primary context, which all libraries for Python use; the stream
    // exists as long as the object, which the owner keeps.
    let stream = unsafe { DeviceStream::from_raw_of(&device, raw as usize as *mut c_void, owner) };
    stream.map_err(|error| match error {
        Error::Invalid { .. } => errors::invalid(
            py,
            call,
            "the per-thread default stream is another one on every thread: make a stream",
        ),
        error => errors::of(py, &error),
    })
}
