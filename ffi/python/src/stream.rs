//! [`HostStream`]: Python functions in order on a thread beside the caller's.

use std::sync::Arc;

use allstream::Call;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::keeper;
use crate::wait::block_on;

/// Python functions that run in order, one after another, on a thread beside the caller's: to a CPU what a CUDA stream is to a GPU.
#[pyclass(frozen, module = "allstream")]
pub(crate) struct HostStream {
    /// None while it is dropped.
    stream: Option<allstream::HostStream>,
    /// The first exception that a function raised.
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl HostStream {
    fn stream(&self) -> &allstream::HostStream {
        // Only `drop` takes it.
        self.stream.as_ref().unwrap_or_else(|| unreachable!("a stream is there until it is dropped"))
    }

    /// The call starts after what the stream holds now.
    pub(crate) fn before<'a>(&self, call: Call<'a>) -> Call<'a> {
        call.on(self.stream())
    }

    /// What is put on the stream from here on starts after `job`, which waits without the GIL.
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

    /// Runs `function(*args)` after all that was put on the stream before. What it raises, `synchronize` raises.
    #[pyo3(signature = (function, *args))]
    fn launch(&self, function: Py<PyAny>, args: Py<PyTuple>) {
        let raised = self.raised.clone();
        self.stream().launch(move || {
            let mut run = Some((function, args));
            if let Some(_inside) = keeper::inside() {
                Python::try_attach(|py| {
                    let Some((function, args)) = run.take() else { return };
                    if let Err(error) = function.call1(py, args.into_bound(py)) {
                        raised.lock().get_or_insert(error);
                    }
                });
            }
            // There is no interpreter any more.
            std::mem::forget(run);
        });
    }

    /// Waits until all that was put on the stream is done; raises the first exception of a function that ran there.
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
        // It waits for its thread, whose functions want the GIL.
        let mut stream = self.stream.take();
        Python::try_attach(|py| py.detach(|| drop(stream.take())));
        // There is no interpreter any more, for which its thread may wait for ever: the process ends.
        std::mem::forget(stream);
    }
}
