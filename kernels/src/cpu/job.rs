//! [`Job`]: the arguments of a kernel.

use crate::Finish;

/// One checked call: at least one input and one output.
pub(super) struct Job<'a> {
    pub ins: &'a [*const u8],
    pub outs: &'a [*mut u8],
    /// The first element to compute.
    pub start: usize,
    /// Elements in each buffer, with those before `start`.
    pub len: usize,
    /// How to divide the folded value, for an average over more than one rank; otherwise `None`.
    pub divisor: Option<Finish>,
}
