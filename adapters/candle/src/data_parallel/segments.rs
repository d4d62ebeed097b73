//! [`Segments`]: a model that is cut, so that gradients are reduced while the backward pass goes on.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var, bail};

use super::DataParallel;

/// Where a model is cut: the last tensor of a segment, and the variable with the same values from which later segments compute.
struct Cut {
    before: Tensor,
    after: Var,
    /// The sum of the gradients of `after` so far. Detached: a gradient of candle's keeps the graph by which it was computed, with the variables
    /// of its segment. The next backward pass would go through that graph, too, and add to the gradients of these variables.
    grad: Option<Tensor>,
}

/// A forward and a backward pass in segments. candle's `backward` returns all gradients at its end. So the model is
/// [cut](Self::cut), and each segment makes a backward pass of its own, the last one first. The gradients of a segment are reduced while
/// the next one computes.
///
/// ```no_run
/// # use allstream_candle::DataParallel;
/// # use candle_core::{Module, Result, Tensor};
/// # use candle_nn::Optimizer;
/// # fn step(parallel: &mut DataParallel, blocks: &[candle_nn::Linear], mut x: Tensor, optimizer: &mut candle_nn::SGD) -> Result<()> {
/// let mut segments = parallel.segments();
/// for block in blocks {
///     x = segments.cut(&block.forward(&x)?)?;
/// }
/// let grads = segments.backward(&x.sqr()?.mean_all()?)?; // the mean over all ranks
/// optimizer.step(&grads)?;
/// # Ok(()) }
/// ```
///
/// Segments need not form a chain: a cut tensor may be used in several later segments, and a variable in any segments (tied weights). The
/// gradients of such a variable are added up, and reduced when the last one is there. A bucket is reduced as soon as it is full: the first
/// takes 1 MB, the others an eighth of all gradients (at least 1 MB, at most 25 MB), or what [`Options::buckets`](crate::Options::buckets)
/// says. A cut costs a copy of the tensor, and in the backward pass a product of the tensor and its gradient.
#[derive(Debug)]
pub struct Segments<'a> {
    parallel: &'a mut DataParallel,
    cuts: Vec<Cut>,
}

impl std::fmt::Debug for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cut({:?})", self.before.dims())
    }
}

impl<'a> Segments<'a> {
    pub(super) fn new(parallel: &'a mut DataParallel) -> Segments<'a> {
        Segments { parallel, cuts: Vec::new() }
    }

    /// Ends a segment at `y`. What is computed from the returned tensor belongs to later segments.
    ///
    /// # Errors
    /// If the tensor is of integers, which have no gradient. Else candle's, if the tensor cannot be copied.
    pub fn cut(&mut self, y: &Tensor) -> Result<Tensor> {
        if !y.dtype().is_float() {
            bail!(
                "Segments::cut: the tensor of shape {:?} is {}, expected floats, which have gradients: cut behind the embedding",
                y.dims(),
                y.dtype().as_str()
            );
        }
        let after = Var::from_tensor(&y.detach())?;
        let next = after.as_tensor().clone();
        self.cuts.push(Cut { before: y.clone(), after, grad: None });
        Ok(next)
    }

    /// Makes the backward pass from `loss` through all segments, and gives the gradients of the `VarMap`'s variables, reduced over all ranks.
    ///
    /// # Errors
    /// As [`DataParallel::reduce`].
    pub fn backward(mut self, loss: &Tensor) -> Result<GradStore> {
        self.parallel.begin()?;
        match self.run(loss) {
            Ok(mut grads) => {
                self.parallel.finish(&mut grads)?;
                Ok(grads)
            }
            Err(error) => Err(self.parallel.end(error)),
        }
    }

    fn run(&mut self, loss: &Tensor) -> Result<GradStore> {
        let mut left = self.uses(loss);
        let mut has = vec![false; left.len()];
        let mut grads = loss.backward()?;
        self.take(&mut grads, loss, &mut left, &mut has)?;
        while let Some(cut) = self.cuts.pop() {
            match cut.grad {
                Some(grad) => {
                    let mut part = (&cut.before * grad)?.sum_all()?.backward()?;
                    self.take(&mut part, &cut.before, &mut left, &mut has)?;
                }
                // The loss does not depend on this cut, so its segment gives no gradients.
                None => self.variables_of(&cut.before).into_iter().for_each(|i| left[i] -= 1),
            }
        }
        self.parallel.check_all_have(|i| has[i])?;
        Ok(grads)
    }

    /// How many segments use each variable.
    fn uses(&self, loss: &Tensor) -> Vec<usize> {
        let mut uses = vec![0; self.parallel.trained()];
        for root in self.cuts.iter().map(|cut| &cut.before).chain([loss]) {
            self.variables_of(root).into_iter().for_each(|i| uses[i] += 1);
        }
        uses
    }

    /// The variables that a segment uses: those in the graph that ends at its result, `root`.
    fn variables_of(&self, root: &Tensor) -> Vec<usize> {
        let nodes: HashSet<_> = root.sorted_nodes().into_iter().map(Tensor::id).collect();
        (0..self.parallel.trained())
            .filter(|i| nodes.contains(&self.parallel.param(*i).var.as_tensor().id()))
            .collect()
    }

    /// Hands in the gradients of the segment that ends at `root`, and keeps those of the cut tensors that it uses.
    fn take(
        &mut self,
        grads: &mut GradStore,
        root: &Tensor,
        left: &mut [usize],
        has: &mut [bool],
    ) -> Result<()> {
        for i in self.variables_of(root) {
            left[i] -= 1;
            if let Some(grad) = grads.remove(self.parallel.param(i).var.as_tensor()) {
                has[i] = true;
                self.parallel.push(i, &grad, left[i] > 0)?;
            }
        }
        for cut in &mut self.cuts {
            if let Some(grad) = grads.remove(cut.after.as_tensor()) {
                let grad = grad.detach();
                cut.grad = Some(match cut.grad.take() {
                    Some(sum) => (sum + grad)?,
                    None => grad,
                });
            }
        }
        Ok(())
    }
}
