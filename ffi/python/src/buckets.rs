//! [`Buckets`]: gradients reduced in buckets while the backward pass still computes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use allstream::train::{self, Options, Param};
use allstream::{Buf, DType, Error, Failed};
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;

use crate::comm::Comm;
use crate::errors;
use crate::in_flight::{Claim, Use};
use crate::memory::{CallStreams, Memory};
use crate::wait::block_on;

/// Gradients of one model, reduced over all ranks in buckets while the backward pass still computes.
///
///     buckets = allstream.Buckets(comm, parameters)
///     for i, grad in backward(batch):      # in any order; the first step teaches it
///         buckets.push(i, grad)            # a full bucket is on its way at once
///     grads = buckets.finish()             # the same arrays, with the mean over all ranks
///
/// `parameters` are arrays as the gradients will be: their types and lengths count, the same on all ranks. A bucket is full when it has
/// `bucket_mb` megabytes, by default an eighth of all gradients, at least 1 and at most 25. `op` is "avg" or "sum"; `compress`,
/// "bf16" or "f16", halves the bytes of float32 (what rounding takes is added in the next step). `sharded` gives each rank the mean of those
/// elements alone that it owns (ZeRO stage 1): see `owned` and `gather`. All ranks make one, together.
#[pyclass(frozen, module = "allstream")]
pub(crate) struct Buckets(Arc<Mutex<Held>>);

struct Held {
    /// None once they were closed.
    buckets: Option<train::Buckets<Memory>>,
    /// The parameters that these were made for.
    likes: Vec<Py<PyAny>>,
    /// The arrays that were pushed in this step.
    arrays: Vec<Option<Py<PyAny>>>,
    /// In whose order gradients on devices are.
    streams: CallStreams,
    /// Whether the user has interrupted `gather`.
    is_gathering: bool,
    is_closed: bool,
}

fn options(
    py: Python<'_>,
    sizes: (Option<f64>, f64),
    op: &str,
    compress: Option<&str>,
    sharded: bool,
) -> PyResult<Options> {
    let refuse = |problem: String| errors::invalid(py, "Buckets", &problem);
    let bytes = |name: &str, megabytes: f64| {
        let fits = megabytes > 0.0 && megabytes < 1e6;
        let wrong = || refuse(format!("{name} is {megabytes}, expected a number of megabytes above 0"));
        if fits { Ok((megabytes * f64::from(1 << 20)) as usize) } else { Err(wrong()) }
    };
    let mut options = Options::default().first_bucket_bytes(bytes("first_bucket_mb", sizes.1)?);
    if let Some(megabytes) = sizes.0 {
        options = options.bucket_bytes(bytes("bucket_mb", megabytes)?);
    }
    if sharded {
        options = options.sharded();
    }
    options = match op {
        "avg" => options,
        "sum" => options.sum(),
        _ => return Err(refuse(format!("op is {op:?}, expected \"avg\" or \"sum\""))),
    };
    Ok(match compress {
        None => options,
        Some("bf16") => options.compress(DType::BF16),
        Some("f16") => options.compress(DType::F16),
        Some(other) => return Err(refuse(format!("compress is {other:?}, expected \"bf16\" or \"f16\""))),
    })
}

fn gone() -> Error {
    let problem = "these buckets were closed on this rank, or another thread waits in `finish`";
    Error::Invalid { call: "Buckets".into(), problem: problem.into() }
}

/// The array of a call that was refused.
fn refused(failed: Failed<Memory>) -> (Option<Memory>, Error) {
    (failed.buf, failed.error)
}

impl Buckets {
    /// The lock, for a thread that has the GIL: whoever has the lock may be in the engine, which may wait for who wants the GIL.
    fn held(&self, py: Python<'_>) -> MutexGuard<'_, Held> {
        loop {
            if let Some(held) = self.0.try_lock() {
                return held;
            }
            py.detach(|| std::thread::sleep(Duration::from_micros(20)));
        }
    }

    /// The engine's buckets, for a call that waits. Another thread that calls meanwhile is told so.
    fn take(&self, py: Python<'_>) -> PyResult<train::Buckets<Memory>> {
        // Not under the lock: making the exception runs Python.
        let taken = self.held(py).buckets.take();
        taken.ok_or_else(|| errors::of(py, &gone()))
    }

    fn put_back(&self, py: Python<'_>, buckets: train::Buckets<Memory>) {
        self.held(py).buckets = Some(buckets);
    }

    /// Gives the arrays of a step back that has failed; `None`: it goes on, with its arrays.
    fn give_back(&self, py: Python<'_>, back: Option<Vec<Option<Memory>>>) {
        let Some(back) = back else { return };
        back.into_iter().flatten().for_each(|memory| memory.release(py));
        let kept: Vec<_> = self.held(py).arrays.iter_mut().map(Option::take).collect();
        drop(kept);
    }

    /// Keeps the array of a parameter. What was kept before is dropped after the lock is free: its end may run Python.
    fn keep(&self, py: Python<'_>, i: usize, array: Py<PyAny>) {
        let before = match self.held(py).arrays.get_mut(i) {
            Some(place) => place.replace(array),
            None => Some(array),
        };
        drop(before);
    }

    /// Waits until devices have written what a call has given back, where that call has ended: the engine gives it back in the order of streams of
    /// ours, and an array of Python's is used in the order of any.
    fn synchronize(&self, py: Python<'_>, has_ended: bool) -> PyResult<()> {
        if !has_ended {
            return Ok(());
        }
        // Not under the lock: it waits.
        let streams = std::mem::take(&mut self.held(py).streams);
        let over = streams.synchronize(py);
        self.held(py).streams = streams;
        over
    }

    /// The memory of an array. Not under the lock: the array's library may run Python.
    fn memory(&self, array: &Bound<'_, PyAny>, call: &str) -> PyResult<Memory> {
        let py = array.py();
        let mut streams = std::mem::take(&mut self.held(py).streams);
        let memory = Memory::of(array, Use::Write, call, &mut streams, &mut Claim::default());
        self.held(py).streams = streams;
        memory
    }

    /// Hands in one array by a call of the engine's, without the GIL, since it may copy.
    fn hand_in(
        &self,
        call: &str,
        i: usize,
        grad: &Bound<'_, PyAny>,
        submit: impl FnOnce(&mut train::Buckets<Memory>, Memory) -> Result<Option<Memory>, Failed<Memory>> + Send,
    ) -> PyResult<()> {
        let py = grad.py();
        let memory = self.memory(grad, call)?;
        let held = self.0.clone();
        let result = py.detach(|| match held.lock().buckets.as_mut() {
            Some(buckets) => submit(buckets, memory).map_err(refused),
            None => Err((Some(memory), gone())),
        });
        match result {
            // The one that held the sum so far, or, of what was accumulated, the array itself: it is free again.
            Ok(spare) => {
                spare.into_iter().for_each(|memory| memory.release(py));
                self.keep(py, i, grad.clone().unbind());
                Ok(())
            }
            Err((memory, error)) => {
                memory.into_iter().for_each(|memory| memory.release(py));
                Err(errors::of(py, &error))
            }
        }
    }
}

#[pymethods]
impl Buckets {
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the call in Python")]
    #[new]
    #[pyo3(signature = (comm, parameters, *, bucket_mb=None, first_bucket_mb=1.0, op="avg", compress=None, sharded=false))]
    fn new(
        py: Python<'_>,
        comm: &Bound<'_, Comm>,
        parameters: Vec<Bound<'_, PyAny>>,
        bucket_mb: Option<f64>,
        first_bucket_mb: f64,
        op: &str,
        compress: Option<&str>,
        sharded: bool,
    ) -> PyResult<Buckets> {
        let options = options(py, (bucket_mb, first_bucket_mb), op, compress, sharded)?;
        let mut likes = Vec::with_capacity(parameters.len());
        let (mut layout, mut streams) = (Vec::with_capacity(parameters.len()), CallStreams::default());
        for parameter in &parameters {
            // A parameter itself needs a gradient; its length and type are all that is looked at.
            let plain = match parameter.getattr_opt("detach")? {
                Some(detach) => detach.call0()?,
                None => parameter.clone(),
            };
            let memory = Memory::of(&plain, Use::Read, "Buckets", &mut streams, &mut Claim::default())?;
            let param = Param::new(memory.dtype(), memory.len());
            layout.push(if memory.is_on_device() { param.on_device() } else { param });
            memory.release(py);
            likes.push(plain.unbind());
        }
        let shared = comm.get().shared(py, "Buckets")?;
        let made = block_on(py, train::Buckets::<Memory>::with(&shared, &layout, options))?;
        let buckets = made.map_err(|error| errors::of(py, &error))?;
        let arrays = parameters.iter().map(|_| None).collect();
        Ok(Buckets(Arc::new(Mutex::new(Held {
            buckets: Some(buckets),
            likes,
            arrays,
            streams,
            is_gathering: false,
            is_closed: false,
        }))))
    }

    /// Hands in the gradient of parameter `i`, the last or only one of this step; it must not be touched before `finish`.
    fn push(&self, i: usize, grad: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hand_in("push", i, grad, |buckets, memory| buckets.push(i, memory))
    }

    /// Adds a gradient of parameter `i` to those of earlier micro-batches of this step. The first array is kept until `finish`; of the others
    /// the contents are taken at once.
    fn accumulate(&self, i: usize, grad: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = grad.py();
        let first = self.held(py).arrays.get(i).map(|array| array.as_ref().map(|array| array.clone_ref(py)));
        self.hand_in("accumulate", i, grad, |buckets, memory| buckets.accumulate(i, memory))?;
        // The first array holds the sum.
        if let Some(Some(first)) = first {
            self.keep(py, i, first);
        }
        Ok(())
    }

    /// The mean of this step is over samples, of which this rank has `samples`. All ranks call it, before the first push of a step.
    fn weigh(&self, py: Python<'_>, samples: f64) -> PyResult<()> {
        let mut buckets = self.take(py)?;
        let weighed = block_on(py, buckets.weigh(samples));
        self.put_back(py, buckets);
        weighed?.map_err(|error| errors::of(py, &error))
    }

    /// Waits until all buckets are reduced; the list of the arrays that were pushed, by parameter. Ctrl-C ends the wait, and not the step:
    /// call it again.
    fn finish(&self, py: Python<'_>) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let mut buckets = self.take(py)?;
        let ended = block_on(py, async { buckets.finish().await.map(Iterator::collect::<Vec<Memory>>) });
        self.put_back(py, buckets);
        let on_devices = self.synchronize(py, ended.is_ok());
        let result = match ended? {
            Ok(memory) => {
                memory.into_iter().for_each(|memory| memory.release(py));
                on_devices
            }
            Err(failed) => {
                self.give_back(py, failed.buf);
                Err(errors::of(py, &failed.error))
            }
        };
        result.map(|()| self.held(py).arrays.iter_mut().map(Option::take).collect())
    }

    /// As `finish`, where ranks may have no gradient for some parameters: for those of which any rank has one the others reduce zeros, and get the
    /// result in a new array; where no rank has any, the result is None. All ranks call it, also those that have all. For parameters on devices
    /// push zeros.
    fn finish_some(&self, py: Python<'_>) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let lacking: Vec<(usize, Py<PyAny>)> = {
            let held = self.held(py);
            let likes = held.likes.iter().zip(&held.arrays).enumerate();
            likes
                .filter(|(_, (_, array))| array.is_none())
                .map(|(i, (like, _))| (i, like.clone_ref(py)))
                .collect()
        };
        let arrays = py.import("allstream._arrays")?;
        let mut made = BTreeMap::new();
        for (i, like) in lacking {
            let array = arrays.call_method1("alike", (like, 0, "finish_some"))?;
            let memory = self.memory(&array, "finish_some")?;
            if memory.is_on_device() {
                let problem = format!(
                    "parameter {i} has no gradient and is on a device, where zeros are not made: push zeros"
                );
                return Err(errors::invalid(py, "finish_some", &problem));
            }
            made.insert(i, (memory, array.unbind()));
        }
        let mut buckets = self.take(py)?;
        let mut memory = BTreeMap::new();
        for (i, (of, array)) in made {
            memory.insert(i, of);
            self.keep(py, i, array);
        }
        let ended = block_on(py, async {
            // Only for those without a gradient, which have been made above.
            let lend = |i: usize, _: &Param| {
                memory.remove(&i).unwrap_or_else(|| unreachable!("parameter {i} has a gradient"))
            };
            buckets.finish_some(lend).await.map(Iterator::collect::<Vec<Option<Memory>>>)
        });
        self.put_back(py, buckets);
        let on_devices = self.synchronize(py, ended.is_ok());
        let used = match ended? {
            Ok(memory) => memory,
            Err(failed) => {
                self.give_back(py, failed.buf);
                return Err(errors::of(py, &failed.error));
            }
        };
        let arrays: Vec<_> = self.held(py).arrays.iter_mut().map(Option::take).collect();
        let one = |(memory, array): (Option<Memory>, Option<Py<PyAny>>)| {
            memory.and_then(|memory| {
                memory.release(py);
                array
            })
        };
        let used = used.into_iter().zip(arrays).map(one).collect();
        on_devices.map(|()| used)
    }

    /// The range of the elements of parameter `i`, counted in row-major order, that this rank owns where buckets are sharded: `finish` gives the
    /// mean of those, and unspecified numbers beside them. All elements, where they are not.
    fn owned(&self, py: Python<'_>, i: usize) -> PyResult<Py<PyAny>> {
        let parameters = self.held(py).likes.len();
        if i >= parameters {
            let problem = format!("there is no parameter {i}: these buckets were made for {parameters}");
            return Err(errors::invalid(py, "owned", &problem));
        }
        let owned = self.held(py).buckets.as_ref().map(|buckets| buckets.owned(i));
        let owned = owned.ok_or_else(|| errors::of(py, &gone()))?;
        Ok(py.import("builtins")?.call_method1("range", (owned.start, owned.end))?.unbind())
    }

    /// Brings weights together of which each rank has updated the elements that it owns, in place: all get all of them. `weights` are in the order
    /// of the parameters. All ranks call it, between two steps of sharded buckets. Ctrl-C ends the wait alone: call it again.
    fn gather(&self, py: Python<'_>, weights: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let mut memory = Vec::with_capacity(weights.len());
        if !self.held(py).is_gathering {
            for weight in &weights {
                let plain = match weight.getattr_opt("detach")? {
                    Some(detach) => detach.call0()?,
                    None => weight.clone(),
                };
                memory.push(self.memory(&plain, "gather")?);
            }
        }
        let mut buckets = self.take(py)?;
        let ended = block_on(py, async { buckets.gather(memory).await });
        self.put_back(py, buckets);
        self.held(py).is_gathering = ended.is_err();
        let on_devices = self.synchronize(py, ended.is_ok());
        match ended? {
            Ok(memory) => {
                memory.into_iter().for_each(|memory| memory.release(py));
                on_devices
            }
            Err(failed) => {
                failed.buf.into_iter().flatten().flatten().for_each(|memory| memory.release(py));
                Err(errors::of(py, &failed.error))
            }
        }
    }

    /// Where the time of the last step went, in microseconds: compute, communication, and how much of that was hidden and exposed; by bucket,
    /// too. None before the first.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let report = self.held(py).buckets.as_ref().and_then(train::Buckets::report);
        let Some(report) = report else { return Ok(None) };
        let text = serde_json::to_string(&report)
            .map_err(|error| errors::invalid(py, "report", &error.to_string()))?;
        Ok(Some(py.import("json")?.call_method1("loads", (text,))?))
    }

    /// Ends them, between two steps. All ranks call it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.held(py).is_closed {
            return Ok(());
        }
        let buckets = self.take(py)?;
        self.held(py).is_closed = true;
        block_on(py, buckets.close())?.map_err(|error| errors::of(py, &error))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(buckets) = self.buckets.take() {
            // Saying goodbye may take a second, in which other Python threads run.
            Python::try_attach(|py| py.detach(|| drop(buckets)));
        }
    }
}
