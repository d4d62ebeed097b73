//! Shards: what one rank owns of each variable, where the optimizer's state is divided among the ranks (ZeRO stage 1).

use std::ops::Range;

use candle_core::{Result, Tensor, Var};

use crate::params::Param;
use crate::storage::fingerprint;

/// The elements of a variable that this rank's optimizer updates, in a variable of their own with one dimension.
pub(crate) struct Shard {
    pub(crate) var: Var,
    owned: Range<usize>,
}

impl Shard {
    /// A copy of the elements in this range; `None` if the range is empty.
    pub(crate) fn new(whole: &Var, owned: Range<usize>) -> Result<Option<Shard>> {
        if owned.is_empty() {
            return Ok(None);
        }
        let var = Var::from_tensor(&part(whole, &owned)?)?;
        Ok(Some(Shard { var, owned }))
    }

    /// The owned elements of the gradient of the whole variable. Nothing is copied.
    pub(crate) fn of(&self, grad: &Tensor) -> Result<Tensor> {
        part(grad, &self.owned)
    }

    /// Writes the elements to their place in the whole variable.
    pub(crate) fn write_to(&self, whole: &Var) -> Result<()> {
        whole.as_detached_tensor().flatten_all()?.slice_set(self.var.as_tensor(), 0, self.owned.start)
    }

    /// Whether the whole variable has the same bits in this shard's elements.
    pub(crate) fn is_in(&self, Param { name, var, .. }: &Param) -> Result<bool> {
        Ok(fingerprint(name, &self.var)? == fingerprint(name, &part(var.as_tensor(), &self.owned)?)?)
    }
}

/// The elements in this range of a contiguous tensor, as a view of its memory.
fn part(whole: &Tensor, owned: &Range<usize>) -> Result<Tensor> {
    whole.detach().flatten_all()?.narrow(0, owned.start, owned.len())
}
