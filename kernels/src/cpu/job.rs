//! What kernels are given.

use crate::Finish;

/// One checked call: at least one input and one output.
pub(super) struct Job<'a> {
    pub ins: &'a [*const u8],
    pub outs: &'a [*mut u8],
    /// The first element to compute.
    pub start: usize,
    /// Elements in each buffer, with those before `start`.
    pub len: usize,
    /// What to divide the folded value by, of more than one rank.
    pub divisor: Option<Finish>,
}
