//! The kernels that run on the CPU.

pub mod scalar;

pub(crate) mod convert;
mod job;
mod lane;
mod narrow;
mod simd;
#[cfg(target_arch = "x86_64")]
mod small;
mod stream;
#[cfg(test)]
mod tests;

use std::ptr;

use crate::{DType, Finish, ReduceOp};

pub use narrow::{compress, expand};
pub use stream::{copy_streaming, reduce_streaming};

/// Folds `ins` in the order given and writes the result to every one of `outs`.
///
/// `len` counts elements. `finish` is `Some` on the step that completes a reduction: an
/// average is then divided as the [`Finish`] says; other operators ignore it. The
/// [rules](crate#rules) say what exactly is computed.
///
/// # Safety
///
/// Every pointer of `ins` must be valid for reads, and every pointer of `outs` valid for
/// writes, of `len * dtype.size()` bytes; no alignment is needed. Nothing else may write
/// the inputs, or touch the outputs, during the call. An output may be equal to an input
/// or to another output, but must not overlap one in any other way.
pub unsafe fn reduce(
    dtype: DType,
    op: ReduceOp,
    ins: &[*const u8],
    outs: &[*mut u8],
    len: usize,
    finish: Option<Finish>,
) {
    // SAFETY: `level` names what this CPU has; the rest is as the caller vouches.
    unsafe { reduce_at(simd::level(), dtype, op, ins, outs, len, finish) }
}

/// [`reduce`] with a given level of instructions.
///
/// # Safety
///
/// As [`reduce`], and the CPU must have the level.
unsafe fn reduce_at(
    level: simd::Level,
    dtype: DType,
    op: ReduceOp,
    ins: &[*const u8],
    outs: &[*mut u8],
    len: usize,
    finish: Option<Finish>,
) {
    if !valid(dtype, op, ins, outs, finish) || len == 0 {
        return;
    }
    let divisor = op.divides(finish);
    if let ([src], None) = (ins, divisor) {
        // SAFETY: the caller vouches for these pointers over `len * size` bytes.
        return unsafe { copy(*src, outs, len * dtype.size()) };
    }
    let job = job::Job { ins, outs, start: 0, len, divisor };
    // SAFETY: `valid` saw that there are inputs, outputs and support for the operator; the
    // level and the pointers are as the caller vouches.
    unsafe { simd::run(level, dtype, op, job) }
}

/// Copies `bytes` bytes from `src` to every one of `outs`; with several, block by block, so
/// that the source comes from memory once. No outputs: nothing happens.
///
/// # Safety
///
/// `src` must be valid for reads, and every pointer of `outs` valid for writes, of `bytes`
/// bytes. Nothing else may write the source, or touch the outputs, during the call. An
/// output may be equal to `src` or to another output, but must not overlap one in any
/// other way.
pub unsafe fn copy(src: *const u8, outs: &[*mut u8], bytes: usize) {
    // So small that the block read and the block written stay in any L1 cache.
    const BLOCK: usize = 8 << 10;
    let step = if outs.len() == 1 { bytes } else { BLOCK };
    let mut at = 0;
    while at < bytes {
        let n = step.min(bytes - at);
        for &out in outs {
            if !ptr::eq(out, src) {
                // SAFETY: `at + n <= bytes`, so both ranges are in the caller's buffers, which
                // do not overlap as their addresses are not equal.
                unsafe { ptr::copy_nonoverlapping(src.add(at), out.add(at), n) };
            }
        }
        at += n;
    }
}

/// Multiplies every element by `factor`, in place.
///
/// `len` counts elements. Only floats can be scaled: the types for which [`DType::scales`]
/// is true. The [rules](crate#rules) say what exactly is computed.
///
/// # Safety
///
/// `memory` must be valid for reads and writes of `len * dtype.size()` bytes; no alignment
/// is needed. Nothing else may touch it during the call.
pub unsafe fn scale(dtype: DType, memory: *mut u8, len: usize, factor: f64) {
    // SAFETY: `level` names what this CPU has; the rest is as the caller vouches.
    unsafe { scale_at(simd::level(), dtype, memory, len, factor) }
}

/// [`scale`] with a given level of instructions.
///
/// # Safety
///
/// As [`scale`], and the CPU must have the level.
unsafe fn scale_at(level: simd::Level, dtype: DType, memory: *mut u8, len: usize, factor: f64) {
    if scalable(dtype) {
        // SAFETY: the caller vouches for the level and the memory.
        unsafe { simd::scale(level, dtype, memory, len, factor) }
    }
}

/// Whether elements of the type can be scaled. If not, the caller has made a mistake.
fn scalable(dtype: DType) -> bool {
    debug_assert!(dtype.scales(), "{dtype} can not be scaled");
    dtype.scales()
}

/// Whether the arguments are as [`reduce`] needs them. If not, the caller has made a mistake.
fn valid(dtype: DType, op: ReduceOp, ins: &[*const u8], outs: &[*mut u8], finish: Option<Finish>) -> bool {
    let supported = op.supports(dtype);
    let divides = op != ReduceOp::Avg || finish.is_none_or(|finish| finish.ranks > 0);
    debug_assert!(supported, "{op} is not defined on {dtype}");
    debug_assert!(!ins.is_empty(), "nothing to reduce");
    debug_assert!(!outs.is_empty(), "nowhere to put the result");
    debug_assert!(divides, "an average over no ranks");
    supported && divides && !ins.is_empty() && !outs.is_empty()
}
