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

/// How [`DataParallel`] reduces. All ranks must give the same options.
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
    /// Sets the options of the gradient buckets: their sizes, a sum in place of the mean, and compression to 16 bits.
    pub fn buckets(mut self, options: train::Options) -> Options {
        self.buckets = options;
        self
    }

    /// Divides the optimizer's state among the ranks (ZeRO stage 1). Each rank makes its optimizer from the variables that
    /// [`DataParallel::owned`] gives. [`reduce`](DataParallel::reduce) and [`Segments::backward`] give gradients of these in place of those of the
    /// whole variables, and [`DataParallel::gather`] brings the weights together after the optimizer's step. As many bytes are sent as
    /// without this option. Sharded buckets cannot be compressed.
    pub fn sharded(mut self, is_sharded: bool) -> Options {
        self.is_sharded = is_sharded;
        self
    }

    /// Names variables that are buffers, such as those of torch's `register_buffer`: they have no gradient, and forward passes may change them.
    /// Give a variable's whole name, or the part of its name after the last dot. The running statistics of candle_nn's `BatchNorm`
    /// (`running_mean` and `running_var`) and all variables of integers are buffers even if they are not named here.
    pub fn buffer_names(mut self, names: &'static [&'static str]) -> Options {
        self.buffer_names = names;
        self
    }

    /// Whether all ranks get rank 0's buffers at the end of each step (the default). With `false` each rank keeps its own, and
    /// [`VarMap::save`] saves those of the rank that calls it.
    pub fn broadcast_buffers(mut self, are_broadcast: bool) -> Options {
        self.buffers = if are_broadcast { BufferSync::Broadcast } else { BufferSync::Off };
        self
    }

    /// Gives all ranks the mean of their buffers at the end of each step, in place of rank 0's. Buffers of integers still get rank 0's values.
    pub fn average_buffers(mut self) -> Options {
        self.buffers = BufferSync::Average;
        self
    }

    /// Allows that variables have no gradient on some ranks or on all. If any rank has a gradient of a variable, the ranks without one count
    /// as zeros in its mean. Costs one small collective a step. Without this option such a step is an error, which names the variables.
    pub fn unused_variables(mut self, are_allowed: bool) -> Options {
        self.is_partial = are_allowed;
        self
    }

    /// Compares the weights of all ranks, by a hash of each variable, when the first and every `steps`-th step after it is reduced (0, the
    /// default: never).
    pub fn compare_every(mut self, steps: u64) -> Options {
        self.compare_every = steps;
        self
    }
}

/// Data parallel training: every rank has the whole model and a part of the batch, and the gradients are averaged.
///
/// candle's `backward` returns all gradients at its end, so [`reduce`](Self::reduce) cannot begin before that. To reduce gradients
/// during the backward pass, cut the model into [`segments`](Self::segments).
///
/// It has a communicator of its own, a [`dup`](SharedComm::dup) of `comm`, and each call waits for what it sends. If a step fails, even if
/// on one rank only (a missing gradient), that communicator is dead on all ranks, so that no rank waits for another; `comm` itself can
/// still be used. [`cause`](crate::cause) finds the engine's error in candle's.
///
/// Buffers, such as the running statistics of a `BatchNorm`, have no gradient: see [`Options::buffer_names`] and
/// [`Options::broadcast_buffers`].
///
/// On the CPU each gradient is copied once, into the buffer that is reduced and then becomes the reduced gradient. Gradients of less than
/// 64 KB, and compressed ones, are copied twice more: into a buffer that all of a bucket share, and back.
pub struct DataParallel {
    comm: SharedComm,
    /// All variables, by name.
    params: Vec<Param>,
    /// The indices in `params` of the variables that have gradients. The others are buffers.
    trained: Vec<usize>,
    /// If the optimizer's state is divided: for each variable in `trained`, the part that this rank owns. Else empty.
    shards: Vec<Option<Shard>>,
    /// Whether a step has ended after which the weights were not gathered yet.
    is_ungathered: bool,
    /// None after a step that failed.
    buckets: Option<Buckets<AnyBuf>>,
    options: Options,
    steps: u64,
    /// For each variable on a device: the sum of the gradients that this step's segments have given so far, while more are to come.
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
    /// On all ranks alike, if options, names, types or shapes differ, or the map is empty. Else the errors of a collective.
    pub fn new(comm: &SharedComm, vars: &VarMap) -> Result<DataParallel> {
        DataParallel::with(comm, vars, Options::default())
    }

    /// As [`new`](Self::new), with options.
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
        params::agree(&own, format!("{options:?}"), &params)?;
        params::broadcast(&own, &params)?;
        let trained: Vec<usize> = (0..params.len()).filter(|i| !params[*i].is_buffer).collect();
        let mut layout = Vec::new();
        for param in trained.iter().map(|i| &params[*i]) {
            let dtype = storage::dtype(&param.name, param.var.dtype())?;
            let shape = train::Param::new(dtype, param.var.elem_count());
            layout.push(if param.var.device().is_cuda() { shape.on_device() } else { shape });
        }
        // If gradients are on a device, the buckets get the caller's communicator, and use the device to which it is bound: `own` is bound to none.
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

    /// Replaces the gradient of every variable by its mean over all ranks, and makes the buffers of all ranks equal. Call it between
    /// `loss.backward()?` and the optimizer's step.
    ///
    /// # Errors
    /// If a variable has no gradient (the error names all such variables), a gradient does not fit its variable, weights differ between
    /// ranks ([`Options::compare_every`]), weights were not [gathered](Self::gather), or the communication fails. No further step is
    /// possible then. The store has this rank's own gradients again.
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

    /// The variables from which to make this rank's optimizer, in the order of their names: all that have gradients. If the optimizer's state
    /// is divided ([`Options::sharded`]), each is replaced by a new variable of one dimension, with a copy of the elements that this rank
    /// owns, or left out if this rank owns none of its elements.
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
    /// The copies are made when `DataParallel` is made. [`VarMap::load`] changes the whole variables only: after it, make `DataParallel` and
    /// the optimizer anew.
    pub fn owned(&self) -> Vec<Var> {
        (0..self.trained()).filter_map(|i| self.optimized(i)).cloned().collect()
    }

    /// Gives all ranks all updated weights, in the variables of the `VarMap`. Before, each element is updated only on the rank that owns it
    /// ([`Options::sharded`]). Collective, after the optimizer's step. Does nothing if the optimizer's state is not divided.
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

    /// Scales all gradients by one factor if the norm of the whole model's gradients is more than `most`, so that the norm becomes `most`.
    /// Returns the norm before that. Call it between [`reduce`](Self::reduce), or [`Segments::backward`], and the optimizer's step.
    ///
    /// The norm and the factor have the same bits on all ranks: squares are added up in `f64`, in the order of the variables' names. A loop
    /// over `VarMap::all_vars` has the order of a `HashMap`, which differs in each process: norms then differ in the last bits, and the
    /// weights of the ranks drift apart. Variables without a gradient count as zeros.
    ///
    /// For whole gradients on the CPU nothing is sent. If gradients are divided among the ranks ([`Options::sharded`]) or on a device, this
    /// is a collective of one number for each variable.
    ///
    /// # Errors
    /// Nothing is changed if a gradient has a NaN or an infinity (on all ranks alike; the error names its variable: skip the optimizer's
    /// step), if `most` is not positive and finite, or if gradients that are to be divided among the ranks were not reduced yet. If the
    /// communication fails, no further step is possible.
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
                "clip_norm: the squares of the gradient of {} add up to {}: it has a NaN, an infinity, or elements whose squares are too large for f64; \
                 leave this step out",
                self.param(i).name,
                squares[i]
            );
        }
        let norm = squares.iter().sum::<f64>().sqrt();
        if !norm.is_finite() {
            bail!(
                "clip_norm: the squares of all gradients together are too large for f64; leave this step out"
            );
        }
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

    /// Makes the sums of squares equal on all ranks, to the bit: if the gradients are divided among the ranks, by adding up all ranks' sums; if any
    /// is on a device, by taking rank 0's sums.
    fn agreed(&self, squares: Vec<f64>) -> std::result::Result<Vec<f64>, allstream::Error> {
        if !self.shards.is_empty() {
            return Ok(self.comm.all_reduce(squares).wait()?);
        }
        if self.trained.iter().any(|i| !self.params[*i].var.device().is_cpu()) {
            return Ok(self.comm.broadcast(squares, 0).wait()?);
        }
        Ok(squares)
    }

    /// Compares the weights of all ranks, by a hash of each variable, and also the buffers, unless each rank keeps its own. Collective.
    /// Call it between the end of a step and the next forward pass in training, which changes buffers.
    ///
    /// # Errors
    /// On all ranks alike, if weights or buffers differ: the error says which of the two, and names the variables and the ranks. Else the
    /// errors of a collective.
    pub fn compare(&self) -> Result<()> {
        self.compare_those(|param| !param.is_buffer || self.options.buffers != BufferSync::Off)
    }

    fn compare_those(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        let these: Vec<&Param> = self.params.iter().filter(|param| which(param)).collect();
        params::compare(&self.comm, &these, &format!("after {} steps", self.steps))
    }

    /// Ends `DataParallel` between two steps. All ranks call this. A failure that no call has reported yet is reported here.
    ///
    /// # Errors
    /// As [`Comm::close`](allstream::Comm::close).
    pub fn close(self) -> Result<()> {
        match self.buckets {
            Some(buckets) => block_on(buckets.close()).map_err(|e| failed("close DataParallel", e)),
            None => Err(ended()),
        }
    }

    /// The number of variables that have gradients.
    fn trained(&self) -> usize {
        self.trained.len()
    }

    /// The i-th variable that has a gradient.
    fn param(&self, i: usize) -> &Param {
        &self.params[self.trained[i]]
    }

    /// The variable that the optimizer has for the i-th trained one: that one itself, or the part that this rank owns; `None` if it owns no part.
    fn optimized(&self, i: usize) -> Option<&Var> {
        match self.shards.get(i) {
            None => Some(&self.param(i).var),
            Some(shard) => shard.as_ref().map(|shard| &shard.var),
        }
    }

    /// Checks what must hold before the first gradient of a step is handed in.
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

    /// An error if the optimizer has changed weights that were not gathered since: training would go on from the old ones.
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

    /// Hands in a gradient. `more`: further gradients of the same variable follow in this step, and are added to it.
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
        // Detached: else the graph that computed it would be kept until the last segment's gradient is here.
        let mut grad = grad.detach();
        if var.device().is_cuda() {
            // Buckets add up gradients on the host only, so gradients on a device are added up here.
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
            // One more segment was expected to give a gradient of this variable, and gave none.
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
            // A loss that depends on a buffer gives it a gradient, by which an optimizer would change it.
            grads.remove(buffer.var.as_tensor());
        }
        buffers::synchronise(&self.comm, &buffers, self.options.buffers)
    }

    /// If every variable must have a gradient, and some have none: ends the communicators, and returns an error that names these variables. `has`:
    /// whether the i-th variable has one.
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

    /// Ends the communicators on all ranks, so that no rank waits for what this one will not do. Gives the error back.
    fn end(&mut self, error: candle_core::Error) -> candle_core::Error {
        if let Some(buckets) = self.buckets.take() {
            drop(block_on(buckets.abandon(error.to_string())));
            self.comm.abort(error.to_string());
        }
        error
    }
}

/// The error of calls after a step that failed.
fn ended() -> candle_core::Error {
    candle_core::Error::Msg(
        "DataParallel: a step has failed before, expected none: make a new one, of the ranks that are left, from the weights that one of \
         them has"
            .into(),
    )
}
