//! [`Comm`]: a rank's handle on a group. Its collectives are in [`crate::calls`].

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DevicePath};
use allstream::{Call, HostStream, SharedComm};
use parking_lot::{Mutex, RwLock};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::block::Block;
use crate::callbacks::{Callbacks, Place};
use crate::errors;
use crate::in_flight::Claim;
use crate::keeper;
use crate::options::seconds;
use crate::wait::{block_on, poll_until};

/// The result of `agree`, and a part of the result of `shrink`: the same on all survivors.
#[pyclass(frozen, get_all, module = "allstream")]
pub(crate) struct Verdict {
    /// Whether every survivor's flag was true.
    flag: bool,
    /// The ranks that are alive, in ascending order.
    survivors: Vec<usize>,
    /// The ranks that are lost, in ascending order.
    lost: Vec<usize>,
}

#[pymethods]
impl Verdict {
    fn __repr__(&self) -> String {
        format!(
            "Verdict(flag={}, survivors={:?}, lost={:?})",
            if self.flag { "True" } else { "False" },
            self.survivors,
            self.lost
        )
    }
}

impl From<allstream::Verdict> for Verdict {
    fn from(verdict: allstream::Verdict) -> Verdict {
        Verdict { flag: verdict.flag, survivors: verdict.survivors, lost: verdict.lost }
    }
}

/// A rank's handle on a group. Every rank makes the same calls in the same order; a call submits at once and returns a `Work`.
#[pyclass(frozen, weakref, module = "allstream")]
pub(crate) struct Comm {
    rank: usize,
    size: usize,
    name: String,
    /// None once this communicator was closed or shrunk, or this rank has left it.
    handles: RwLock<Option<Handles>>,
    /// A number of this communicator that no other in this process has, from 1 on.
    number: u64,
    /// The callbacks of its operations, which are called when these are over.
    callbacks: Arc<Callbacks>,
    /// What holds back a call until earlier operations have given back memory that the call uses, too. Made when first needed.
    behind: Mutex<Option<Behind>>,
}

/// The stream whose thread waits until earlier operations give their memory back, and the communicator of these operations. Each wait has a handle
/// of the communicator, too: so the communicator does not end when all other handles are dropped.
struct Behind {
    stream: HostStream,
    comm: SharedComm,
}

/// How long a rank that leaves waits until none of its calls is held back any more. The engine waits equally long until submitted data is sent.
const FLUSH: Duration = Duration::from_secs(1);

impl Behind {
    /// Ends the stream's thread; called without the GIL. If the thread still waits after [`FLUSH`], for an operation that may never end, the
    /// communicator is aborted: its operations then fail and give their memory back.
    fn end(self) {
        let Behind { stream, comm } = self;
        let mut all = stream.record();
        let ended = poll_until(Instant::now() + FLUSH, |cx| Pin::new(&mut all).poll(cx));
        if ended.is_none() && comm.check().is_ok() {
            comm.abort(
                "this rank leaves, while a call of it waits for memory that an unfinished operation has",
            );
        }
        drop(stream);
    }
}

static NUMBERS: AtomicU64 = AtomicU64::new(1);

struct Handles {
    shared: SharedComm,
    /// The owning handle, which `close` and `shrink` consume.
    own: allstream::Comm,
}

impl Comm {
    pub(crate) fn new(comm: allstream::Comm) -> Comm {
        Comm {
            rank: comm.rank(),
            size: comm.size(),
            name: comm.name().to_owned(),
            handles: RwLock::new(Some(Handles { shared: comm.share(), own: comm })),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            callbacks: Arc::default(),
            behind: Mutex::new(None),
        }
    }

    /// A new claim, for the memory of one call on this communicator.
    pub(crate) fn claim(&self) -> Claim {
        Claim::of(self.number)
    }

    /// The place, in this communicator's order of callbacks, of an operation that this thread is calling.
    pub(crate) fn place(&self, is_message: bool) -> Place {
        self.callbacks.place(is_message)
    }

    /// Makes `call` start only after `wait` has returned. `wait` runs on the thread of `behind`. `comm`: a handle of this communicator.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn after<'a>(
        &self,
        comm: &SharedComm,
        call: Call<'a>,
        wait: impl FnOnce() + Send + 'static,
    ) -> Result<Call<'a>, allstream::Error> {
        let mut behind = self.behind.lock();
        let Behind { stream, .. } = match &mut *behind {
            Some(behind) => behind,
            none => none.insert(Behind { stream: HostStream::new("behind")?, comm: comm.clone() }),
        };
        stream.launch(wait);
        Ok(call.on(stream))
    }

    /// Leaves the communicator, within about two seconds. Called without the GIL: threads that need it may have to end first.
    fn leave(handles: Option<Handles>, behind: Option<Behind>) {
        if let Some(behind) = behind {
            behind.end();
        }
        drop(handles);
    }

    /// The communicator's shared handle.
    ///
    /// # Errors
    /// The communicator was closed on this rank, or this process is a forked child of one that used allstream.
    pub(crate) fn shared(&self, py: Python<'_>, call: &str) -> PyResult<SharedComm> {
        match &*self.handles.read() {
            // A forked child is refused here, before it takes a lock that a thread of its parent may have held during the fork.
            Some(handles) if keeper::is_forked() => {
                let refused = handles.shared.check().err();
                let error = refused.unwrap_or_else(|| allstream::Error::Unavailable {
                    what: "allstream in this process".into(),
                    problem:
                        "it was forked from one that used allstream; start processes with spawn, not fork"
                            .into(),
                });
                Err(errors::of(py, &error))
            }
            Some(handles) => Ok(handles.shared.clone()),
            None => Err(errors::invalid(py, call, "this communicator was closed on this rank")),
        }
    }

    /// Takes the owning handle out: from here on this communicator counts as closed on this rank.
    fn take(&self, py: Python<'_>, call: &str) -> PyResult<allstream::Comm> {
        match self.handles.write().take() {
            Some(Handles { shared, own }) => {
                drop(shared);
                Ok(own)
            }
            None => Err(errors::invalid(py, call, "this communicator was closed on this rank")),
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Telling the other ranks that this one leaves may take a second: release the GIL, so that other Python threads run.
        let mut left = Some((self.handles.get_mut().take(), self.behind.get_mut().take()));
        Python::try_attach(|py| {
            let Some((handles, behind)) = left.take() else { return };
            if handles.is_some() || behind.is_some() {
                py.detach(|| Comm::leave(handles, behind));
            }
        });
        // Still here only if the interpreter has ended. The thread of `behind` might then wait for ever, and the process ends anyway: leak both.
        std::mem::forget(left);
    }
}

/// The timeout, given in seconds, as a duration, if one is given.
fn deadline(py: Python<'_>, call: &str, timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout.map(|timeout| seconds(py, call, "timeout", timeout)).transpose()
}

fn cuda_device(py: Python<'_>, ordinal: usize) -> PyResult<Device> {
    Device::new(ordinal).map_err(|error| errors::of(py, &error))
}

/// Describes in words how collectives on device memory run.
fn described(path: &DevicePath) -> String {
    match path {
        DevicePath::Peer => "peer".into(),
        DevicePath::Staged { why } => format!("staged: {why}"),
        DevicePath::Nccl { library, staged: None } => library.clone(),
        DevicePath::Nccl { library, staged: Some(why) } => {
            format!("{library}; what it does not take is staged: {why}")
        }
        other => format!("{other:?}"),
    }
}

#[pymethods]
impl Comm {
    /// This rank's number in the group.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks the group has.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// The group's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// How many hosts the group's ranks are on.
    #[getter]
    fn hosts(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.shared(py, "hosts")?.hosts())
    }

    fn __repr__(&self) -> String {
        format!("<allstream.Comm {}, rank {} of {}>", self.name, self.rank, self.size)
    }

    /// Makes later collectives on arrays of CUDA devices run on the devices. Returns how they run: "peer" if the ranks' devices can access each
    /// other's memory, else "staged: " and the reason. All ranks call it, each with the number of its device.
    fn bind_device(&self, py: Python<'_>, device: usize) -> PyResult<String> {
        let (shared, device) = (self.shared(py, "bind_device")?, cuda_device(py, device)?);
        let path = block_on(py, shared.bind_device(&device))?;
        path.map(|path| described(&path)).map_err(|error| errors::of(py, &error))
    }

    /// As `bind_device`, but NCCL runs the collectives that it supports. Ranks may share a device only if `NCCL_MULTI_RANK_GPU_ENABLE=1` is set on
    /// all of them and NCCL is 2.30 or newer.
    fn bind_nccl(&self, py: Python<'_>, device: usize) -> PyResult<String> {
        let (shared, device) = (self.shared(py, "bind_nccl")?, cuda_device(py, device)?);
        let path = block_on(py, shared.bind_nccl(&device))?;
        path.map(|path| described(&path)).map_err(|error| errors::of(py, &error))
    }

    /// A communicator of the ranks that give the same `color`, ordered by `key`, then by rank; None on ranks whose `color` is None. All ranks
    /// call it.
    #[pyo3(signature = (color, key=0))]
    fn split(&self, py: Python<'_>, color: Option<u64>, key: i64) -> PyResult<Option<Comm>> {
        let shared = self.shared(py, "split")?;
        let made = block_on(py, shared.split_some(color, key))?;
        Ok(made.map_err(|error| errors::of(py, &error))?.map(Comm::new))
    }

    /// A communicator of these ranks, in the order given; None on the others. All ranks call it, with the same ranks.
    fn subset(&self, py: Python<'_>, ranks: Vec<usize>) -> PyResult<Option<Comm>> {
        let shared = self.shared(py, "subset")?;
        let made = block_on(py, shared.subset(&ranks))?.map_err(|error| errors::of(py, &error))?;
        Ok(made.map(Comm::new))
    }

    /// A second communicator of the same ranks, independent of this one. All ranks call it.
    fn dup(&self, py: Python<'_>) -> PyResult<Comm> {
        let shared = self.shared(py, "dup")?;
        Ok(Comm::new(block_on(py, shared.dup())?.map_err(|error| errors::of(py, &error))?))
    }

    /// Gives all survivors the same verdict: whether the flags of all of them are true, and which ranks they are.
    #[pyo3(signature = (flag, timeout=None))]
    fn agree(&self, py: Python<'_>, flag: bool, timeout: Option<f64>) -> PyResult<Verdict> {
        let shared = self.shared(py, "agree")?;
        let agree = match deadline(py, "agree", timeout)? {
            Some(timeout) => shared.agree_within(flag, timeout),
            None => shared.agree(flag),
        };
        let verdict = block_on(py, agree)?.map_err(|error| errors::of(py, &error))?;
        Ok(verdict.into())
    }

    /// A new communicator of the survivors, and the verdict that names them. This communicator is closed. All survivors call it.
    #[pyo3(signature = (timeout=None))]
    fn shrink(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(Comm, Verdict)> {
        let timeout = deadline(py, "shrink", timeout)?;
        let own = self.take(py, "shrink")?;
        let shrunk = match timeout {
            Some(timeout) => block_on(py, own.shrink_within(timeout))?,
            None => block_on(py, own.shrink())?,
        };
        let (comm, verdict) = shrunk.map_err(|error| errors::of(py, &error))?;
        Ok((Comm::new(comm), verdict.into()))
    }

    /// Ends this communicator on all ranks: operations in flight and later calls fail with `Aborted`.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        self.shared(py, "abort")?.abort(reason);
        Ok(())
    }

    /// If this communicator has failed, raises the error that was the cause.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.shared(py, "check")?.check().map_err(|error| errors::of(py, &error))
    }

    /// Waits until all submitted operations are done and their data is sent, then closes. Does nothing if this communicator is closed already.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(own) = self.take(py, "close") else { return Ok(()) };
        let closed = block_on(py, own.close());
        // Nothing is held back any more, unless the wait was interrupted.
        let behind = self.behind.lock().take();
        py.detach(|| Comm::leave(None, behind));
        closed?.map_err(|error| errors::of(py, &error))
    }

    /// Leaves without waiting for the other ranks, as dropping the `Comm` does. Called when the interpreter ends.
    fn _leave(&self, py: Python<'_>) {
        let (handles, behind) = (self.handles.write().take(), self.behind.lock().take());
        py.detach(|| Comm::leave(handles, behind));
    }

    /// How many `buffers`, of how many `bytes` in all, collectives had to copy because other ranks' devices could not read them in place, and `why`
    /// for the last one. None if there was none.
    fn device_copies<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(copies) = self.shared(py, "device_copies")?.device_copies() else { return Ok(None) };
        let all = PyDict::new(py);
        all.set_item("buffers", copies.buffers)?;
        all.set_item("bytes", copies.bytes)?;
        all.set_item("why", copies.why)?;
        Ok(Some(all))
    }

    /// The operations in flight and the memory that this rank holds for communication now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.shared(py, "stats")?.stats();
        let all = PyDict::new(py);
        all.set_item("in_flight", stats.in_flight)?;
        all.set_item("staging_bytes", stats.staging_bytes)?;
        all.set_item("staging_limit", stats.staging_limit)?;
        all.set_item("scratch_bytes", stats.scratch_bytes)?;
        all.set_item("pinned_bytes", stats.pinned_bytes)?;
        all.set_item("registered_bytes", stats.registered_bytes)?;
        all.set_item("quarantined", stats.quarantined)?;
        Ok(all)
    }

    /// Writes what this rank has done last (the flight recorder) to a file, which `allstream trace` reads; returns the file's name.
    fn record(&self, py: Python<'_>) -> PyResult<String> {
        let path = self.shared(py, "record")?.record().map_err(|error| errors::of(py, &error))?;
        Ok(path.display().to_string())
    }

    /// Sets whether later calls are deterministic. All ranks must set the same.
    fn set_deterministic(&self, py: Python<'_>, on: bool) -> PyResult<()> {
        self.shared(py, "set_deterministic")?.set_deterministic(on);
        Ok(())
    }

    /// An array of zeros in memory that the other ranks of this host read in place, so that a collective on it copies nothing.
    #[pyo3(signature = (shape, dtype=None))]
    fn empty<'py>(
        slf: &Bound<'py, Self>,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let arrays = slf.py().import("allstream._arrays")?;
        arrays.call_method1(intern!(slf.py(), "empty"), (slf, shape, dtype))
    }

    /// `bytes` bytes of the memory that `empty` uses.
    fn _block(&self, py: Python<'_>, bytes: usize) -> PyResult<Block> {
        let memory = self.shared(py, "empty")?.alloc::<u8>(bytes).map_err(|error| errors::of(py, &error))?;
        Ok(Block::new(memory))
    }
}
