//! Clipping the gradients of a step, whose elements may be divided among the ranks.

use super::super::clip::{check_limit, invalid, norm, scale, squares};
use super::Buckets;
use crate::error::Error;
use crate::mem::Buf;

impl<B: Buf> Buckets<B> {
    /// Scales all gradients that [`finish`](Self::finish) has given back by one factor if the norm of the whole model's gradients is more
    /// than `most`, so that the norm becomes `most`. Returns the norm before that: the same bits on all ranks. Computed in `f64`.
    ///
    /// If buckets are [sharded](super::super::Options::sharded), one `all_reduce`, of a number for each parameter, adds up over all ranks the
    /// squares of the elements that each rank [owns](Self::owned), and each rank scales what it owns. Else nothing is sent, as in the function
    /// [`clip_norm`](super::super::clip_norm). All ranks call this, between `finish` and the optimizer's step, and await it to its end.
    ///
    /// # Errors
    /// [`Error::Invalid`], and nothing is changed. On all ranks alike: a gradient of any rank has a NaN or an infinity (the error gives its
    /// number in the layout), squares are too large for `f64`, or the layout has integers or gradients on devices. Only on the rank whose call is
    /// wrong: the limit is not positive and finite, the gradients are not those of the layout, or a step has begun; if buckets are sharded, the
    /// other ranks then wait for this one. Else as a collective.
    pub async fn clip_norm(&mut self, grads: &mut [B], most: f64) -> Result<f64, Error> {
        check_limit(most)?;
        self.check_clipped(grads)?;
        let mut sums = Vec::with_capacity(grads.len());
        for (i, grad) in grads.iter_mut().enumerate() {
            sums.push(squares(i, grad, self.owned(i))?);
        }
        if self.options.sharded {
            sums = self.comm.all_reduce(sums).await?;
        }
        let norm = norm(&sums)?;
        if norm > most {
            let owned: Vec<_> = (0..grads.len()).map(|i| self.owned(i)).collect();
            grads.iter_mut().zip(owned).for_each(|(grad, owned)| scale(grad, owned, most / norm));
        }
        Ok(norm)
    }

    fn check_clipped(&self, grads: &mut [B]) -> Result<(), Error> {
        if grads.len() != self.layout.len() {
            let (found, all) = (grads.len(), self.layout.len());
            return Err(invalid(format!(
                "{found} gradients were given, and the layout has {all} parameters"
            )));
        }
        self.progress.check_not_gathering("clip_norm")?;
        if let Some(i) = self.grads.first_begun() {
            return Err(invalid(format!(
                "parameter {i} has a gradient in the next step already: clip what finish gives back, before the first push"
            )));
        }
        let mut ours = self.device.clone();
        grads
            .iter_mut()
            .enumerate()
            .try_for_each(|(i, grad)| self.check_fits("clip_norm", ("gradient", i), grad, &mut ours))
    }
}
