//! [`DataParallel`]: the gradients of a `VarMap`, averaged over all ranks.

use std::fmt;

use allstream::train::{self, Buckets};
use allstream::{AnyBuf, SharedComm};
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, bail};
use candle_nn::VarMap;
use pollster::block_on;

use crate::Segments;
use crate::error::failed;
use crate::params::{self, Param};
use crate::storage;

/// How [`DataParallel`] reduces. The same on all ranks.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing before they are given to DataParallel::with"]
pub struct Options {
    buckets: train::Options,
    is_partial: bool,
    compare_every: u64,
}

impl Options {
    /// The sizes of buckets, a sum in place of the mean, and compression to 16 bits. Not sharded: candle's optimizers take whole gradients.
    pub fn buckets(mut self, options: train::Options) -> Options {
        self.buckets = options;
        self
    }

    /// Variables may be without a gradient on some ranks or on all: they count as zeros where another rank has one. Costs one small
    /// collective a step. Without it such a step is an error that names them.
    pub fn unused_variables(mut self, are_allowed: bool) -> Options {
        self.is_partial = are_allowed;
        self
    }

    /// The weights are compared between all ranks, by a hash of each variable, at the start of every `steps`-th step (0, the default:
    /// never).
    pub fn compare_every(mut self, steps: u64) -> Options {
        self.compare_every = steps;
        self
    }
}

/// Data parallel training: every rank has the whole model and a part of the batch, and the gradients are averaged.
///
/// candle's `backward` returns all gradients at its end, so [`reduce`](Self::reduce) overlaps with nothing;
/// [`segments`](Self::segments) does, for a model that is cut.
///
/// It has a communicator of its own ([`dup`](SharedComm::dup)), and every call waits for its end. After an error of a step, and after
/// one that only this rank has (a missing gradient), that communicator is dead on all ranks, so that none waits for another; `comm` itself
/// lives. [`cause`](crate::cause) finds the engine's error in candle's.
///
/// Copies of a gradient on the CPU: one into the buffer that is reduced, which then becomes the reduced gradient. Those of less than 64 KB
/// are copied twice more, to and from one buffer for all of a bucket.
pub struct DataParallel {
    comm: SharedComm,
    /// All variables, by name.
    params: Vec<Param>,
    /// The places in `params` of those that have gradients: the others are no floats.
    trained: Vec<usize>,
    /// None after a step that failed.
    buckets: Option<Buckets<AnyBuf>>,
    options: Options,
    steps: u64,
    /// On a device: what the segments of this step have given of a variable's gradient, where more is to come.
    sums: Vec<Option<Tensor>>,
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataParallel({} variables, step {}, {:?})", self.params.len(), self.steps, self.comm)
    }
}

impl DataParallel {
    /// Compares the variables of all ranks, gives every rank rank 0's values, and averages gradients from then on. Collective: all ranks
    /// of `comm` call it, when the model is built.
    ///
    /// # Errors
    /// On all ranks alike where names, types or shapes differ, or the map is empty; else as a collective.
    pub fn new(comm: &SharedComm, vars: &VarMap) -> Result<DataParallel> {
        DataParallel::with(comm, vars, Options::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with(comm: &SharedComm, vars: &VarMap, options: Options) -> Result<DataParallel> {
        if options.buckets.is_sharded() {
            let problem = "its buckets are sharded, and candle's optimizers take whole gradients: use allstream::train::Buckets themselves";
            let error = allstream::Error::Invalid { call: "DataParallel".into(), problem: problem.into() };
            return Err(failed("make DataParallel", error));
        }
        let own = block_on(comm.dup()).map_err(|e| failed("make a communicator for DataParallel", e))?;
        let own = own.share();
        let params = params::sorted(vars)?;
        params::agree(&own, &params)?;
        params::broadcast(&own, &params)?;
        let trained: Vec<usize> = (0..params.len()).filter(|i| params[*i].var.dtype().is_float()).collect();
        let mut layout = Vec::new();
        for param in trained.iter().map(|i| &params[*i]) {
            let dtype = storage::dtype(&param.name, param.var.dtype())?;
            let shape = train::Param::new(dtype, param.var.elem_count());
            layout.push(if param.var.device().is_cuda() { shape.on_device() } else { shape });
        }
        // On a device of the caller's communicator, so that the buckets are bound to the device that it is bound to.
        let of = if layout.iter().any(train::Param::is_on_device) { comm } else { &own };
        let buckets = block_on(Buckets::with(of, &layout, options.buckets))
            .map_err(|e| failed("make buckets for the gradients", e))?;
        let sums = vec![None; trained.len()];
        Ok(DataParallel { comm: own, params, trained, buckets: Some(buckets), options, steps: 0, sums })
    }

    /// Replaces the gradient of every variable by its mean over all ranks. Between `loss.backward()?` and the optimizer's step.
    ///
    /// # Errors
    /// Where a variable has no gradient (it names them), a gradient does not fit its variable, weights differ between ranks
    /// ([`Options::compare_every`]), or the communication fails. No further step is possible then. The gradients in the store are this
    /// rank's own, as they were.
    pub fn reduce(&mut self, grads: &mut GradStore) -> Result<()> {
        self.begin()?;
        let own: Vec<Option<Tensor>> =
            (0..self.trained()).map(|i| grads.remove(self.param(i).var.as_tensor())).collect();
        let reduced = self.reduce_all(&own, grads);
        if reduced.is_err() {
            for (i, grad) in own.into_iter().enumerate() {
                if let Some(grad) = grad {
                    grads.insert(self.param(i).var.as_tensor(), grad);
                }
            }
        }
        reduced
    }

    fn reduce_all(&mut self, own: &[Option<Tensor>], grads: &mut GradStore) -> Result<()> {
        self.check_all_have(|i| own[i].is_some())?;
        for (i, grad) in own.iter().enumerate() {
            if let Some(grad) = grad {
                self.push(i, grad, false)?;
            }
        }
        self.finish(grads)
    }

    /// A forward pass in segments, whose backward pass reduces the gradients of one segment while the next one computes.
    pub fn segments(&mut self) -> Segments<'_> {
        Segments::new(self)
    }

    /// Where the time of the last step went: how long this rank computed, and how much of the communication it waited for.
    pub fn report(&self) -> Option<train::Report> {
        self.buckets.as_ref()?.report()
    }

    /// Compares the weights between all ranks, by a hash of each variable. Collective.
    ///
    /// # Errors
    /// On all ranks alike where weights differ: it names a variable and the ranks. Else as a collective.
    pub fn compare(&self) -> Result<()> {
        params::compare(&self.comm, &self.params, &format!("after {} steps", self.steps))
    }

    /// Ends it on all ranks, between two steps: what went wrong and was not heard of yet is an error here.
    ///
    /// # Errors
    /// As [`Comm::close`](allstream::Comm::close).
    pub fn close(self) -> Result<()> {
        match self.buckets {
            Some(buckets) => block_on(buckets.close()).map_err(|e| failed("close DataParallel", e)),
            None => Err(ended()),
        }
    }

    /// Variables that have gradients.
    pub(crate) fn trained(&self) -> usize {
        self.trained.len()
    }

    /// The i-th of those.
    pub(crate) fn param(&self, i: usize) -> &Param {
        &self.params[self.trained[i]]
    }

    /// Before the first gradient of a step.
    pub(crate) fn begin(&mut self) -> Result<()> {
        if self.buckets.is_none() {
            return Err(ended());
        }
        let every = self.options.compare_every;
        if every > 0
            && self.steps.is_multiple_of(every)
            && let Err(error) = self.compare()
        {
            return Err(self.end(error));
        }
        Ok(())
    }

    /// Hands in a gradient; more of the same variable follow in this step, or not.
    pub(crate) fn push(&mut self, i: usize, grad: &Tensor, more: bool) -> Result<()> {
        match self.try_push(i, grad, more) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.end(error)),
        }
    }

    fn try_push(&mut self, i: usize, grad: &Tensor, more: bool) -> Result<()> {
        let Param { name, var } = &self.params[self.trained[i]];
        if grad.shape() != var.shape() || grad.dtype() != var.dtype() {
            bail!(
                "the gradient of {name} is {} {:?}, expected the type and the shape of the variable, {} {:?}",
                grad.dtype().as_str(),
                grad.dims(),
                var.dtype().as_str(),
                var.dims()
            );
        }
        let mut grad = grad.clone();
        if var.device().is_cuda() {
            // Buckets add up what is on the host alone.
            if let Some(sum) = self.sums[i].take() {
                grad = (sum + grad)?;
            }
            if more {
                self.sums[i] = Some(grad);
                return Ok(());
            }
        }
        let buf = storage::to_buf(name, &grad.contiguous()?)?;
        let doing = format!("reduce the gradient of {name}");
        let Some(buckets) = &mut self.buckets else { return Err(ended()) };
        let pushed = if more { buckets.accumulate(i, buf) } else { buckets.push(i, buf) };
        pushed.map(drop).map_err(|e| failed(doing, e.error))
    }

    /// Waits for all gradients of the step, and puts them where the optimizer looks for them.
    pub(crate) fn finish(&mut self, grads: &mut GradStore) -> Result<()> {
        match self.try_finish(grads) {
            Ok(()) => {
                self.steps += 1;
                Ok(())
            }
            Err(error) => Err(self.end(error)),
        }
    }

    fn try_finish(&mut self, grads: &mut GradStore) -> Result<()> {
        for i in 0..self.sums.len() {
            // Of a variable of which a later segment had no gradient after all.
            if let Some(sum) = self.sums[i].take() {
                self.try_push(i, &sum, false)?;
            }
        }
        let Some(buckets) = &mut self.buckets else { return Err(ended()) };
        let done: Vec<Option<AnyBuf>> = if self.options.is_partial {
            let mut problem = Ok(());
            let zeros = |i: usize, _: &train::Param| {
                let Param { name, var } = &self.params[self.trained[i]];
                storage::zero_buf(name, var.as_tensor()).unwrap_or_else(|error| {
                    problem = Err(error);
                    AnyBuf::new(Vec::<f32>::new())
                })
            };
            let done = block_on(buckets.finish_some(zeros)).map(Iterator::collect);
            problem?;
            done.map_err(|e| failed("reduce gradients", e.error))?
        } else {
            let done = block_on(buckets.finish()).map_err(|e| failed("reduce gradients", e.error))?;
            done.map(Some).collect()
        };
        for (i, buf) in done.into_iter().enumerate() {
            let Param { name, var } = self.param(i);
            if let Some(buf) = buf {
                grads.insert(var.as_tensor(), storage::from_buf(name, buf, var.as_tensor())?);
            }
        }
        Ok(())
    }

    /// Which variables have no gradient, of those that have come: an error where all must have one.
    pub(crate) fn check_all_have(&mut self, has: impl Fn(usize) -> bool) -> Result<()> {
        if self.options.is_partial || (0..self.trained()).all(&has) {
            return Ok(());
        }
        let missing = (0..self.trained()).filter(|i| !has(*i)).map(|i| self.param(i).name.as_str());
        let error = candle_core::Error::Msg(format!(
            "DataParallel: no gradient in this step for {}, expected one for every variable: leave variables that are not trained out \
             of the VarMap, or allow it by Options::unused_variables on all ranks",
            params::list(missing)
        ));
        Err(self.end(error))
    }

    /// Ends the communicator on all ranks, so that none waits for what this rank does not do any more.
    pub(crate) fn end(&mut self, error: candle_core::Error) -> candle_core::Error {
        if let Some(buckets) = self.buckets.take() {
            drop(block_on(buckets.abandon(error.to_string())));
            self.comm.abort(error.to_string());
        }
        error
    }
}

/// For calls after a step that failed.
fn ended() -> candle_core::Error {
    candle_core::Error::Msg(
        "DataParallel: a step has failed before, expected none: make a new one, of the ranks that are left, from the weights that one of \
         them has"
            .into(),
    )
}
