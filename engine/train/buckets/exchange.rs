//! What ranks tell each other at the end of a step: the order in which rank 0 has pushed, and which parameters have a gradient on any rank.

use crate::comm::{Comm, Work};
use crate::error::Error;
use crate::types::ReduceOp;

/// The order in which rank 0 pushes, by which buckets are formed.
#[derive(Default)]
pub(super) struct PushOrder {
    /// Whether there is nothing to learn: rank 0's order is known or on its way, or buckets are sharded.
    pub(super) is_learnt: bool,
    /// In which order this rank has pushed in this step.
    pub(super) pushed: Vec<u64>,
    /// The broadcast of rank 0's order.
    pub(super) learning: Option<Work<Vec<u64>>>,
    /// The broadcast of the order of a joined step, which comes while the next step goes on.
    pub(super) of_joined: Option<Work<Vec<u64>>>,
}

impl PushOrder {
    /// Waits for the order in which rank 0 has pushed in this step.
    pub(super) async fn learn(&mut self, comm: &mut Comm) -> Result<Vec<u64>, Error> {
        let work = self.learning.get_or_insert_with(|| comm.broadcast(std::mem::take(&mut self.pushed), 0));
        let order = work.await;
        self.learning = None;
        Ok(order?)
    }

    /// For a step that is joined: starts the broadcast of its order, if that is still to be learnt, and does not wait for it.
    pub(super) fn learn_later(&mut self, comm: &mut Comm) {
        if !self.is_learnt {
            let pushed = std::mem::take(&mut self.pushed);
            self.of_joined = self.learning.take().or_else(|| Some(comm.broadcast(pushed, 0)));
            self.is_learnt = true;
        }
    }
}

/// Which parameters have a gradient on any rank in this step.
#[derive(Default)]
pub(super) struct UsedParams {
    /// By parameter: 0 if no rank has one.
    pub(super) used: Vec<u8>,
    pub(super) uniting: Option<Work<Vec<u8>>>,
    /// Whether `used` is that of this step: a `finish_some` that is called again does not ask again.
    pub(super) is_united: bool,
}

impl UsedParams {
    /// Fills `used`, once in a step. `is_lent`: the parameters of which this rank has no gradient.
    pub(super) async fn unite(&mut self, comm: &mut Comm, is_lent: &[bool]) -> Result<(), Error> {
        if !self.is_united {
            let work = self.uniting.get_or_insert_with(|| {
                self.used.clear();
                self.used.extend(is_lent.iter().map(|is_lent| u8::from(!is_lent)));
                comm.op(ReduceOp::Max).all_reduce(std::mem::take(&mut self.used))
            });
            let used = work.await;
            self.uniting = None;
            self.used = used?;
            self.is_united = true;
        }
        Ok(())
    }
}
