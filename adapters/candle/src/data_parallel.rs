//! [`DataParallel`]: the gradients of a `VarMap`, averaged over all ranks.

mod segments;

use std::fmt;

use allstream::train::{self, Buckets};
use allstream::{AnyBuf, SharedComm};
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var, bail};
use candle_nn::VarMap;
use pollster::block_on;

use crate::buffers::{self, BufferSync};
use crate::error::failed;
use crate::params::{self, Param};
use crate::shards::Shard;
use crate::storage;

pub use segments::Segments;

/// How [`DataParallel`] reduces. The same on all ranks.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing before they are given to DataParallel::with"]
pub struct Options {
    buckets: train::Options,
    is_sharded: bool,
    is_partial: bool,
    compare_every: u64,
    buffer_names: &'static [&'static str],
    buffers: BufferSync,
}

impl Options {
    /// The sizes of buckets, a sum in place of the mean, and compression to 16 bits.
    pub fn buckets(mut self, options: train::Options) -> Options {
        self.buckets = options;
        self
    }

    /// The optimizer's state is divided among the ranks (ZeRO stage 1): each rank's optimizer has the variables that
    /// [`DataParallel::owned`] gives, [`reduce`](DataParallel::reduce) and [`Segments::backward`] give gradients of those in place of the
    /// whole ones, and [`DataParallel::gather`] brings the weights together after the optimizer's step. As much is sent as without. Buckets
    /// cannot be compressed then.
    pub fn sharded(mut self, is_sharded: bool) -> Options {
        self.is_sharded = is_sharded;
        self
    }

    /// Variables that are buffers, as torch calls what its `register_buffer` takes: they have no gradient, and forward passes may change them.
    /// Each of these is a whole name, or the part of one behind its last dot. Buffers without being named here are the running statistics of
    /// candle_nn's `BatchNorm` (`running_mean` and `running_var`) and all variables of integers.
    pub fn buffer_names(mut self, names: &'static [&'static str]) -> Options {
        self.buffer_names = names;
        self
    }

    /// Whether all ranks get rank 0's buffers at the end of each step (the default), or each rank keeps its own, of which rank 0's are then
    /// saved.
    pub fn broadcast_buffers(mut self, are_broadcast: bool) -> Options {
        self.buffers = if are_broadcast { BufferSync::Broadcast } else { BufferSync::Off };
        self
    }

    /// All ranks get the mean of their buffers at the end of each step, in place of rank 0's; of integers still rank 0's.
    pub fn average_buffers(mut self) -> Options {
        self.buffers = BufferSync::Average;
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
/// What has no gradient by its kind, as the running statistics of a `BatchNorm`, is a buffer: see [`Options::broadcast_buffers`].
///
/// Copies of a gradient on the CPU: one into the buffer that is reduced, which then becomes the reduced gradient. Those of less than 64 KB
/// are copied twice more, to and from one buffer for all of a bucket.
pub struct DataParallel {
    comm: SharedComm,
    /// All variables, by name.
    params: Vec<Param>,
    /// The places in `params` of those that have gradients: the others are buffers.
    trained: Vec<usize>,
    /// Where the optimizer's state is divided: for each of those what this rank owns. Else empty.
    shards: Vec<Option<Shard>>,
    /// Whether a step has ended after which the weights were not gathered yet.
    is_ungathered: bool,
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
        let mut of_buckets = options.buckets;
        if options.is_sharded {
            of_buckets = of_buckets.sharded();
        }
        let own = block_on(comm.dup()).map_err(|e| failed("make a communicator for DataParallel", e))?;
        let own = own.share();
        let params = params::sorted(vars, options.buffer_names)?;
        params::agree(&own, &params)?;
        params::broadcast(&own, &params)?;
        let trained: Vec<usize> = (0..params.len()).filter(|i| !params[*i].is_buffer).collect();
        let mut layout = Vec::new();
        for param in trained.iter().map(|i| &params[*i]) {
            let dtype = storage::dtype(&param.name, param.var.dtype())?;
            let shape = train::Param::new(dtype, param.var.elem_count());
            layout.push(if param.var.device().is_cuda() { shape.on_device() } else { shape });
        }
        // On a device of the caller's communicator, so that the buckets are bound to the device that it is bound to.
        let of = if layout.iter().any(train::Param::is_on_device) { comm } else { &own };
        let buckets = block_on(Buckets::<AnyBuf>::with(of, &layout, of_buckets))
            .map_err(|e| failed("make buckets for the gradients", e))?;
        let mut shards = Vec::new();
        if of_buckets.is_sharded() {
            for (i, param) in trained.iter().enumerate() {
                shards.push(Shard::new(&params[*param].var, buckets.owned(i))?);
            }
        }
        Ok(DataParallel {
            comm: own,
            sums: vec![None; trained.len()],
            params,
            trained,
            shards,
            is_ungathered: false,
            buckets: Some(buckets),
            options,
            steps: 0,
        })
    }

    /// Replaces the gradient of every variable by its mean over all ranks, and makes buffers alike. Between `loss.backward()?` and the
    /// optimizer's step.
    ///
    /// # Errors
    /// Where a variable has no gradient (it names them), a gradient does not fit its variable, weights differ between ranks
    /// ([`Options::compare_every`]), weights were not [gathered](Self::gather), or the communication fails. No further step is possible then. The gradients in the store are this
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

    /// The variables that this rank's optimizer is made of, in the order of their names: all that have gradients; where the optimizer's state
    /// is divided ([`Options::sharded`]), of each the elements that this rank owns, as a variable of one dimension with values of its own. Those
    /// of which it owns nothing are left out.
    ///
    /// ```
    /// # use allstream::Comm;
    /// # use allstream_candle::{DataParallel, Options};
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
    /// # let comm = Comm::local(1)?.remove(0).share();
    /// # let vars = VarMap::new();
    /// # let model = linear(3, 1, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    /// # let x = Tensor::ones((8, 3), DType::F32, &Device::Cpu)?;
    /// let mut parallel = DataParallel::with(&comm, &vars, Options::default().sharded(true))?;
    /// let mut optimizer = AdamW::new(parallel.owned(), ParamsAdamW::default())?; // its moments: one n-th on each of n ranks
    /// for _ in 0..10 {
    ///     let mut grads = model.forward(&x)?.sqr()?.mean_all()?.backward()?;
    ///     parallel.reduce(&mut grads)?; // of what this rank owns
    ///     parallel.clip_norm(&mut grads, 1.0)?; // by the norm of the whole model
    ///     optimizer.step(&grads)?;
    ///     parallel.gather()?; // all weights, on every rank
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The values are those at the time when `DataParallel` was made: after [`VarMap::load`], which changes the whole variables only, make
    /// `DataParallel` and the optimizer anew.
    pub fn owned(&self) -> Vec<Var> {
        (0..self.trained()).filter_map(|i| self.optimized(i)).cloned().collect()
    }

    /// Brings the weights together, each of which one rank's optimizer has updated ([`Options::sharded`]): all ranks get all of them, in the
    /// variables of the `VarMap`. Collective, after the optimizer's step. Does nothing where the optimizer's state is not divided.
    ///
    /// # Errors
    /// Where the communication fails; no further step is possible then.
    pub fn gather(&mut self) -> Result<()> {
        if self.shards.is_empty() {
            return Ok(());
        }
        match self.try_gather() {
            Ok(()) => {
                self.is_ungathered = false;
                Ok(())
            }
            Err(error) => Err(self.end(error)),
        }
    }

    fn try_gather(&mut self) -> Result<()> {
        let mut weights = Vec::new();
        for (i, shard) in self.shards.iter().enumerate() {
            let Param { name, var, .. } = self.param(i);
            if let Some(shard) = shard {
                shard.write_to(var)?;
            }
            weights.push(storage::to_buf(name, var.as_tensor())?);
        }
        let Some(buckets) = &mut self.buckets else { return Err(ended()) };
        let weights = block_on(buckets.gather(weights)).map_err(|e| failed("gather weights", e.error))?;
        for (i, buf) in weights.into_iter().enumerate() {
            let Param { name, var, .. } = self.param(i);
            var.set(&storage::from_buf(name, buf, var.as_tensor())?)?;
        }
        Ok(())
    }

    /// Scales all gradients by one factor where the norm of the whole model's gradients is more than `most`, so that it is `most` then. Gives
    /// the norm that they had. Between [`reduce`](Self::reduce), or [`Segments::backward`], and the optimizer's step.
    ///
    /// The norm and the factor have the same bits on all ranks: squares are added up in `f64`, in the order of the variables' names. A sum
    /// over `VarMap::all_vars` has not: that is in the order of a `HashMap`, another one in each process, and ranks whose factors differ in
    /// the last bit drift apart. Variables without a gradient count as zeros.
    ///
    /// For whole gradients on the CPU nothing is sent. Where they are divided among the ranks ([`Options::sharded`]) or on a device it is
    /// collective: one number for each variable.
    ///
    /// # Errors
    /// On all ranks alike, and nothing is changed: a gradient with a NaN or an infinity, whose variable is named (leave the optimizer's step
    /// out then); a limit that is not positive and finite; gradients that were not reduced. Where the communication fails, no further step
    /// is possible.
    pub fn clip_norm(&mut self, grads: &mut GradStore, most: f64) -> Result<f64> {
        if !(most.is_finite() && most > 0.0) {
            bail!("clip_norm: the most that the norm may be is {most}, expected a number above 0");
        }
        let mut squares = vec![0.0; self.trained()];
        for (i, squares) in squares.iter_mut().enumerate() {
            let Param { name, var, .. } = self.param(i);
            if !self.shards.is_empty() && grads.get(var.as_tensor()).is_some() {
                bail!(
                    "clip_norm: there is a gradient of all of {name}, expected one of what this rank owns: reduce the gradients first"
                );
            }
            if let Some(grad) = self.optimized(i).and_then(|var| grads.get(var.as_tensor())) {
                *squares = storage::squares(name, grad)?;
            }
        }
        let squares = match self.agreed(squares) {
            Ok(squares) => squares,
            Err(error) => return Err(self.end(failed("clip gradients by their norm", error))),
        };
        if let Some(i) = squares.iter().position(|squares| !squares.is_finite()) {
            bail!(
                "clip_norm: the squares of the gradient of {} add up to {}: it has elements that are no finite numbers, or too large ones; \
                 leave this step out",
                self.param(i).name,
                squares[i]
            );
        }
        let norm = squares.iter().sum::<f64>().sqrt();
        if norm > most {
            for var in (0..self.trained()).filter_map(|i| self.optimized(i)) {
                if let Some(grad) = grads.get(var.as_tensor()) {
                    let clipped = (grad.detach() * (most / norm))?;
                    grads.insert(var.as_tensor(), clipped);
                }
            }
        }
        Ok(norm)
    }

    /// The sums of squares of the whole variables, the same bits on all ranks.
    fn agreed(&self, squares: Vec<f64>) -> std::result::Result<Vec<f64>, allstream::Error> {
        if !self.shards.is_empty() {
            return Ok(self.comm.all_reduce(squares).wait()?);
        }
        if self.trained.iter().any(|i| !self.params[*i].var.device().is_cpu()) {
            return Ok(self.comm.broadcast(squares, 0).wait()?);
        }
        Ok(squares)
    }

    /// Compares the weights between all ranks, by a hash of each variable, and the buffers, unless each rank keeps its own. Collective.
    /// Between the end of a step and the next forward pass in training, which changes buffers.
    ///
    /// # Errors
    /// On all ranks alike where weights or buffers differ: it names variables and the ranks, and says which of the two they are. Else as a
    /// collective.
    pub fn compare(&self) -> Result<()> {
        self.compare_those(|param| !param.is_buffer || self.options.buffers != BufferSync::Off)
    }

    fn compare_those(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        let these: Vec<&Param> = self.params.iter().filter(|param| which(param)).collect();
        params::compare(&self.comm, &these, &format!("after {} steps", self.steps))
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
    fn trained(&self) -> usize {
        self.trained.len()
    }

    /// The i-th of those.
    fn param(&self, i: usize) -> &Param {
        &self.params[self.trained[i]]
    }

    /// What the optimizer has of the i-th: all of it, or what this rank owns, if that is anything.
    fn optimized(&self, i: usize) -> Option<&Var> {
        match self.shards.get(i) {
            None => Some(&self.param(i).var),
            Some(shard) => shard.as_ref().map(|shard| &shard.var),
        }
    }

    /// Before the first gradient of a step.
    fn begin(&mut self) -> Result<()> {
        if self.buckets.is_none() {
            return Err(ended());
        }
        self.try_begin().map_err(|error| self.end(error))
    }

    fn try_begin(&self) -> Result<()> {
        if self.is_ungathered {
            self.check_gathered()?;
        }
        let every = self.options.compare_every;
        // Not the buffers: the forward pass of this step has changed them.
        if every > 0 && self.steps.is_multiple_of(every) {
            self.compare_those(|param| !param.is_buffer)
        } else {
            Ok(())
        }
    }

    /// Weights that an optimizer has changed and nobody has gathered are an error: training would go on from the old ones.
    fn check_gathered(&self) -> Result<()> {
        for (i, shard) in self.shards.iter().enumerate() {
            let param = self.param(i);
            if shard.as_ref().map_or(Ok(true), |shard| shard.is_in(param))? {
                continue;
            }
            bail!(
                "DataParallel: what this rank owns of {} is not what the variable has, expected the same: call `gather` after each step of \
                 the optimizer, on all ranks; after loading weights, make DataParallel anew",
                param.name
            );
        }
        Ok(())
    }

    /// Hands in a gradient; more of the same variable follow in this step, or not.
    fn push(&mut self, i: usize, grad: &Tensor, more: bool) -> Result<()> {
        match self.try_push(i, grad, more) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.end(error)),
        }
    }

    fn try_push(&mut self, i: usize, grad: &Tensor, more: bool) -> Result<()> {
        let Param { name, var, .. } = &self.params[self.trained[i]];
        if grad.shape() != var.shape() || grad.dtype() != var.dtype() {
            bail!(
                "the gradient of {name} is {} {:?}, expected the type and the shape of the variable, {} {:?}",
                grad.dtype().as_str(),
                grad.dims(),
                var.dtype().as_str(),
                var.dims()
            );
        }
        // Without the graph that it was computed by, which would be kept until the last segment's gradient is here.
        let mut grad = grad.detach();
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
    fn finish(&mut self, grads: &mut GradStore) -> Result<()> {
        match self.try_finish(grads) {
            Ok(()) => {
                self.steps += 1;
                self.is_ungathered = !self.shards.is_empty();
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
                let Param { name, var, .. } = &self.params[self.trained[i]];
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
            let Param { name, var, .. } = self.param(i);
            let Some(buf) = buf else { continue };
            let grad = storage::from_buf(name, buf, var.as_tensor())?;
            match self.shards.get(i) {
                None => drop(grads.insert(var.as_tensor(), grad)),
                Some(None) => {}
                Some(Some(shard)) => drop(grads.insert(shard.var.as_tensor(), shard.of(&grad)?)),
            }
        }
        let buffers: Vec<&Param> = self.params.iter().filter(|param| param.is_buffer).collect();
        for buffer in &buffers {
            // Where a loss depends on one: no optimizer is to change it.
            grads.remove(buffer.var.as_tensor());
        }
        buffers::synchronise(&self.comm, &buffers, self.options.buffers)
    }

    /// Which variables have no gradient, of those that have come: an error where all must have one.
    fn check_all_have(&mut self, has: impl Fn(usize) -> bool) -> Result<()> {
        if self.options.is_partial || (0..self.trained()).all(&has) {
            return Ok(());
        }
        let missing = (0..self.trained()).filter(|i| !has(*i)).map(|i| self.param(i).name.as_str());
        let error = candle_core::Error::Msg(format!(
            "DataParallel: no gradient in this step for {}, expected one for every variable: leave variables that are not trained out \
             of the VarMap, name them by Options::buffer_names if they are buffers, or allow it by Options::unused_variables, on all ranks",
            params::list(missing, ", ")
        ));
        Err(self.end(error))
    }

    /// Ends the communicator on all ranks, so that none waits for what this rank does not do any more.
    fn end(&mut self, error: candle_core::Error) -> candle_core::Error {
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
