//! Sharded buckets: which elements of the parameters each rank owns, and how the weights are gathered after the optimizer's step.

use std::ops::Range;

use super::gradients::Back;
use super::{Buckets, MOST_IN_FLIGHT};
use crate::error::{Error, Failed};
use crate::mem::Buf;

const CALL: &str = "gather";

impl<B: Buf> Buckets<B> {
    /// Which elements of parameter `i` this rank owns, if buckets are [sharded](super::super::Options::sharded): `finish` gives the mean of
    /// these, and unspecified contents elsewhere. Every element has one owner; in each bucket the ranks' numbers of elements differ by one at
    /// most. The range is the same in every step. If buckets are not sharded, it is all elements.
    ///
    /// # Panics
    /// If the layout has no such parameter.
    pub fn owned(&self, i: usize) -> Range<usize> {
        let param = &self.layout[i];
        if self.options.sharded {
            self.set.buckets[self.set.places[i]].owned(i, param, self.comm.rank())
        } else {
            0..param.len()
        }
    }

    /// Gathers weights of which each rank has updated the elements that it [owns](Self::owned): all ranks get all elements, in place. The
    /// weights are in the order of the layout, and have its types and lengths. Collective, between two steps.
    ///
    /// Cancel safe: where the future is dropped, call it again with an empty vector to get the weights.
    ///
    /// # Errors
    /// [`Error::Invalid`] if buckets are not sharded, a step has begun, or the weights do not fit the layout: they come back, and nothing
    /// has happened. Else the cause for which the communicator of these buckets is dead, and all weights that can be had.
    pub async fn gather(&mut self, weights: Vec<B>) -> Result<Vec<B>, Failed<Back<B>>> {
        let back =
            |weights: Vec<B>, error| Failed { buf: Some(weights.into_iter().map(Some).collect()), error };
        if self.progress.gathered.is_none() {
            let mut weights = weights;
            if let Err(error) = self.check_weights(&mut weights) {
                return Err(back(weights, error));
            }
            self.grads.bufs.iter_mut().zip(weights).for_each(|(place, weight)| *place = Some(weight));
            (self.progress.gathered, self.progress.launched) = (Some(0), 0);
        } else if !weights.is_empty() {
            let problem =
                "the last gather has not ended: call it again with an empty vector, to get its weights";
            return Err(back(weights, Error::invalid(CALL, problem)));
        }
        match self.gather_all().await {
            Ok(()) => {
                self.begin();
                Ok(self.grads.bufs.iter_mut().filter_map(Option::take).collect())
            }
            Err(error) => Err(self.failed(error).await),
        }
    }

    async fn gather_all(&mut self) -> Result<(), Error> {
        let (buckets, progress) = (&mut self.set.buckets, &mut self.progress);
        while let Some(next) = progress.gathered.filter(|next| *next < buckets.len()) {
            while progress.launched < buckets.len() && progress.launched - next < MOST_IN_FLIGHT {
                progress.launched += 1;
                buckets[progress.launched - 1].gather(&mut self.comm, &mut self.grads.bufs)?;
            }
            buckets[next].land(&mut self.grads.bufs).await?;
            progress.gathered = Some(next + 1);
        }
        Ok(())
    }

    fn check_weights(&self, weights: &mut [B]) -> Result<(), Error> {
        let invalid = |problem: String| Err(Error::invalid(CALL, problem));
        if !self.options.sharded {
            return invalid("these buckets are not sharded, so that every rank has all gradients: ask for Options::sharded".into());
        }
        if let Some(i) = self.grads.first_begun() {
            return invalid(format!(
                "parameter {i} has a gradient in this step already: finish the step first"
            ));
        }
        if weights.len() != self.layout.len() {
            return invalid(format!(
                "{} weights were given, and the layout has {} parameters",
                weights.len(),
                self.layout.len()
            ));
        }
        let mut ours = self.device.clone();
        weights
            .iter_mut()
            .enumerate()
            .try_for_each(|(i, weight)| self.check_fits(CALL, ("weight", i), weight, &mut ours))
    }
}
