//! [`HostStream`]: runs Python functions in order on a thread of its own.

use std::sync::Arc;

use allstream::Call;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::keeper;
use crate::wait::block_on;

/// Runs Python functions in order, one after another, on a thread of its own: it is to a CPU what a CUDA stream is to a GPU.
#[pyclass(frozen, module = "allstream")]
pub(crate) struct HostStream {
    /// None only while this is being dropped.
    stream: Option<allstream::HostStream>,
    /// The first exception that a function has raised since the last `synchronize`.
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl HostStream {
    fn stream(&self) -> &allstream::HostStream {
        // Only `drop` takes it.
        self.stream.as_ref().unwrap_or_else(|| unreachable!("a stream is there until it is dropped"))
    }

    /// Makes the call start only after all that was put on the stream before.
    pub(crate) fn before<'a>(&self, call: Call<'a>) -> Call<'a> {
        call.on(self.stream())
    }

    /// Makes all that is put on the stream later start only after `job` has returned. `job` runs on the stream's thread, without the GIL.
    pub(crate) fn after(&self, job: impl FnOnce() + Send + 'static) {
        self.stream().launch(job);
    }
}

#[pymethods]
impl HostStream {
    #[new]
    #[pyo3(signature = (name="python"))]
    fn new(py: Python<'_>, name: &str) -> PyResult<HostStream> {
        keeper::start()?;
        let stream = allstream::HostStream::new(name).map_err(|error| errors::of(py, &error))?;
        Ok(HostStream { stream: Some(stream), raised: Arc::default() })
    }

    /// Runs `function(*args)` after all that was put on the stream before. An exception that it raises is raised by `synchronize`.
    #[pyo3(signature = (function, *args))]
    fn launch(&self, function: Py<PyAny>, args: Py<PyTuple>) {
        let raised = self.raised.clone();
        self.stream().launch(move || {
            let mut run = Some((function, args));
            if let Some(_inside) = keeper::inside() {
                Python::try_attach(|py| {
                    let Some((function, args)) = run.take() else { return };
                    let Err(error) = function.call1(py, args.into_bound(py)) else { return };
                    // An exception that comes later than the first is dropped without the lock, as dropping it may run Python code.
                    let later = match &mut *raised.lock() {
                        Some(_) => Some(error),
                        none => none.replace(error),
                    };
                    drop(later);
                });
            }
            // Still here only if the interpreter has ended: then Python objects cannot be dropped.
            std::mem::forget(run);
        });
    }

    /// Waits until all that was put on the stream is done. If functions have raised exceptions since the last call, raises the first of them.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let event = self.stream().record();
        block_on(py, event)?.map_err(|error| errors::of(py, &error))?;
        match self.raised.lock().take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        // Dropping the stream waits for its thread, whose functions need the GIL: so release it.
        let mut stream = self.stream.take();
        Python::try_attach(|py| py.detach(|| drop(stream.take())));
        // Still here only if the interpreter has ended. The stream's thread may then wait for the GIL for ever, and the process ends anyway: leak it.
        std::mem::forget(stream);
    }
}
