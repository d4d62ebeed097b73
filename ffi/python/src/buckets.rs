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
///     for i, grad in backward(batch):      # in any order; the buckets learn it in the first step
///         buckets.push(i, grad)            # a full bucket is on its way at once
///     grads = buckets.finish()             # the same arrays, with the mean over all ranks
///
/// `parameters` are arrays of the types and lengths of the gradients, which must be the same on all ranks. A bucket is full when it has
/// `bucket_mb` megabytes (by default an eighth of all gradients, at least 1 and at most 25); the first bucket has `first_bucket_mb`. `op` is
/// "avg" or "sum". `compress`, "bf16" or "f16", halves the bytes of float32; the rounding error is added to the gradient of the next step. With
/// `sharded` each rank gets the mean of only the elements that it owns (ZeRO stage 1): see `owned` and `gather`. All ranks call this together.
#[pyclass(frozen, module = "allstream")]
pub(crate) struct Buckets(Arc<Mutex<Held>>);

struct Held {
    /// None while a call that waits has them (`take`), and after `close`.
    buckets: Option<train::Buckets<Memory>>,
    /// The parameter arrays that these buckets were made for.
    likes: Vec<Py<PyAny>>,
    /// For each parameter: the array that holds its gradient in this step, once one was handed in.
    arrays: Vec<Option<Py<PyAny>>>,
    /// The streams of this module in whose order the engine uses gradients on devices.
    streams: CallStreams,
    /// Whether Ctrl-C has interrupted the last `gather`: the next call of `gather` then goes on with the weights that the engine still has.
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

/// The array (unless the engine keeps it) and the error of a call that failed.
fn refused(failed: Failed<Memory>) -> (Option<Memory>, Error) {
    (failed.buf, failed.error)
}

impl Buckets {
    /// Locks the state, for a thread that has the GIL. It releases the GIL between tries: the lock's holder may be in the engine, which may
    /// wait for a thread that needs the GIL.
    fn held(&self, py: Python<'_>) -> MutexGuard<'_, Held> {
        loop {
            if let Some(held) = self.0.try_lock() {
                return held;
            }
            py.detach(|| std::thread::sleep(Duration::from_micros(20)));
        }
    }

    /// Takes the engine's buckets out, for a call that waits. A call of another thread meanwhile gets an error that says so.
    fn take(&self, py: Python<'_>) -> PyResult<train::Buckets<Memory>> {
        // The lock is released before the exception is made, as that runs Python code.
        let taken = self.held(py).buckets.take();
        taken.ok_or_else(|| errors::of(py, &gone()))
    }

    fn put_back(&self, py: Python<'_>, buckets: train::Buckets<Memory>) {
        self.held(py).buckets = Some(buckets);
    }

    /// Releases the arrays of a failed step. `back` is what the engine gave back; `None`: the step goes on and keeps its arrays.
    fn give_back(&self, py: Python<'_>, back: Option<Vec<Option<Memory>>>) {
        let Some(back) = back else { return };
        back.into_iter().flatten().for_each(|memory| memory.release(py));
        let kept: Vec<_> = self.held(py).arrays.iter_mut().map(Option::take).collect();
        drop(kept);
    }

    /// Keeps the array of parameter `i`. The array kept before is dropped after the lock is released, as dropping it may run Python code.
    fn keep(&self, py: Python<'_>, i: usize, array: Py<PyAny>) {
        let before = match self.held(py).arrays.get_mut(i) {
            Some(place) => place.replace(array),
            None => Some(array),
        };
        drop(before);
    }

    /// If a call has ended, waits until devices have written the arrays that it gave back: the engine gives them back in the order of this
    /// module's streams, and Python code may use them on any other stream.
    fn synchronize(&self, py: Python<'_>, has_ended: bool) -> PyResult<()> {
        if !has_ended {
            return Ok(());
        }
        // Not under the lock, as this waits.
        let mut streams = std::mem::take(&mut self.held(py).streams);
        let over = streams.synchronize(py);
        let surplus = if over.is_ok() { streams.surplus() } else { CallStreams::default() };
        self.give_streams_back(py, streams);
        drop(surplus);
        over
    }

    /// Takes the memory of an array, which the operation may write. The lock is not held meanwhile, as the array's library may run Python code.
    fn memory(&self, array: &Bound<'_, PyAny>, call: &str) -> PyResult<Memory> {
        let py = array.py();
        let mut streams = std::mem::take(&mut self.held(py).streams);
        let memory = Memory::of(array, Use::Write, call, &mut streams, &mut Claim::default());
        self.give_streams_back(py, streams);
        memory
    }

    /// Puts back the streams that a call has taken out of the state. Other threads may have added some meanwhile, which stay.
    fn give_streams_back(&self, py: Python<'_>, streams: CallStreams) {
        self.held(py).streams.add(streams);
    }

    /// Hands in one array: `submit` is the engine's call, made without the GIL because it may copy the array.
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
            // The buffer that comes back and is free again: after `push` the one that held the sum so far, after `accumulate` this array itself.
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
            // A torch parameter requires a gradient, and such tensors are refused: detach it. Only its length, type and place are used here.
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

    /// Hands in the gradient of parameter `i`: the only one of this step, or that of the last micro-batch. Do not touch the array before `finish`.
    fn push(&self, i: usize, grad: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hand_in("push", i, grad, |buckets, memory| buckets.push(i, memory))
    }

    /// Adds a gradient of parameter `i` to those of earlier micro-batches of this step. The first array holds the sum and is kept until `finish`
    /// or `push`; the others are added to it at once, and are free when this returns.
    fn accumulate(&self, i: usize, grad: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = grad.py();
        let first = self.held(py).arrays.get(i).map(|array| array.as_ref().map(|array| array.clone_ref(py)));
        self.hand_in("accumulate", i, grad, |buckets, memory| buckets.accumulate(i, memory))?;
        // The first array holds the sum, so keep that one, not `grad`.
        if let Some(Some(first)) = first {
            self.keep(py, i, first);
        }
        Ok(())
    }

    /// Makes this step's result the mean over the samples of all ranks; this rank has `samples` of them. All ranks call it, before the first push
    /// of a step.
    fn weigh(&self, py: Python<'_>, samples: f64) -> PyResult<()> {
        let mut buckets = self.take(py)?;
        let weighed = block_on(py, buckets.weigh(samples));
        self.put_back(py, buckets);
        weighed?.map_err(|error| errors::of(py, &error))
    }

    /// Waits until all buckets are reduced; returns the arrays that were handed in, in the order of the parameters. Ctrl-C ends the wait, but not
    /// the step: call `finish` again.
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

    /// As `finish`, for steps in which ranks may lack gradients. If another rank has a gradient of a parameter that this rank lacks, this rank adds
    /// zeros and gets the result in a new array; if no rank has one, the result is None. All ranks call it, also those that lack none. For a
    /// parameter on a device push zeros instead.
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
            // The engine asks for memory only for parameters without a gradient; it was made above.
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

    /// The range of elements of parameter `i`, in row-major order, that this rank owns if the buckets are sharded: `finish` gives the mean of these
    /// elements, and unspecified numbers in all others. If the buckets are not sharded, the range of all elements.
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

    /// Gathers, in place, weights of which each rank has updated the elements that it owns: then all ranks have all updated elements. `weights`
    /// are in the order of the parameters. All ranks call it, between two steps of sharded buckets. Ctrl-C ends only the wait: call it again.
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

    /// How the time of the last finished step was spent, in microseconds: computing, communicating, and how much of the communication was hidden
    /// behind computing or exposed; for the step and for each bucket. None before the end of the first step.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let report = self.held(py).buckets.as_ref().and_then(train::Buckets::report);
        let Some(report) = report else { return Ok(None) };
        let text = serde_json::to_string(&report)
            .map_err(|error| errors::invalid(py, "report", &error.to_string()))?;
        Ok(Some(py.import("json")?.call_method1("loads", (text,))?))
    }

    /// Closes these buckets, between two steps. All ranks call it. Later calls of `close` do nothing.
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
            // Telling the other ranks that this one leaves may take a second: release the GIL, so that other Python threads run.
            Python::try_attach(|py| py.detach(|| drop(buckets)));
        }
    }
}
