//! What a machine works on, for the length of a pass.

use allstream_kernels as kernels;

use super::{Machine, NodeRun, Part, Reduction, Setting};
use crate::exec::operation::Operation;
use crate::plan::Step;
use crate::types::Signature;

/// What a machine works on.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) setting: &'a Setting,
    pub(super) op: &'a Operation,
    pub(super) part: &'a Part,
    pub(super) earlier: &'a [Box<Machine>],
}

impl Context<'_> {
    /// Whether a step divides its sum by the ranks.
    pub(super) fn divides(&self, step: &Step) -> bool {
        step.finish && self.averages()
    }

    pub(super) fn averages(&self) -> bool {
        matches!(self.op.reduction, Reduction::Op(kernels::ReduceOp::Avg))
    }

    /// The signature in the frames of a step.
    pub(super) fn signature(&self, node: &NodeRun) -> Signature {
        let mut signature = self.op.signature;
        if self.part.pairwise {
            signature.count = if node.unit == 0 { 0 } else { node.len as u64 };
        }
        signature
    }
}
