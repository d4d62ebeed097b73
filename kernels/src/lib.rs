//! Combines several buffers into one: the data types, the reduction operators and the CPU
//! kernels of allstream.
//!
//! [`reduce`] folds several equally long buffers into one result and writes it to one or
//! more places; [`copy`] does the same for a single buffer that needs no arithmetic.
//! [`scale`] multiplies a buffer in place. [`scalar`] holds a second, plainly written
//! `reduce` and `scale` that the fast ones are tested against bit for bit.
//!
//! # Rules
//!
//! These hold on every path (portable, AVX2, [`scalar`]), so that ranks on
//! different machines arrive at the same bits.
//!
//! **Memory.** Pointers need no alignment. An output may be exactly equal to an input (in
//! place) or to another output; apart from that an output overlaps nothing. No reference
//! to the caller's memory is ever formed, so inputs may lie in memory that other processes
//! have mapped, as long as nobody writes them during the call.
//!
//! **One input.** Its bytes are copied unchanged, whatever the operator: NaN payloads and
//! `bool` bytes other than 0 and 1 survive. The one exception is an average that is
//! finished over two ranks or more.
//!
//! **Order.** Operands fold from the left in the order given:
//! `((a0 op a1) op a2) op ...`.
//!
//! **Integers.** Sum and product wrap. An average is the wrapping sum, divided once when
//! it is finished, truncating toward zero.
//!
//! **bool.** A nonzero byte is true; results are written as 0 or 1. Sum, max and bor are
//! "or"; prod, min and band are "and"; bxor is "xor". There is no average.
//!
//! **Floats.** `f32` is computed in `f32` and `f64` in `f64`, one rounding per operation,
//! never fused. The small floats, `f16`, `bf16`, `f8e4m3` and `f8e5m2`, are widened to
//! `f32`, computed there across all operands of one call, and rounded once at the end, to
//! nearest even; subnormals are kept. An average is the sum; when the average is finished, the
//! sum is divided by the divisor. The divisor has the type in which the sum was computed, and
//! the division is done in that type. Small floats are divided before they are rounded that one time.
//!
//! **Overflow.** A result too large for its type is an infinity. `f8e4m3` has no infinity: a
//! result that would round to more than 448 is NaN there. This is OCP's non-saturating
//! conversion and what PyTorch does with `float8_e4m3fn`; CUDA's `__nv_fp8_e4m3` stops at 448
//! instead. NaN shows that a sum has left the range; 448 would look like a result.
//! [`f8e4m3::from_f32`] and [`f8e5m2::from_f32`] give the same bits as PyTorch, except for the
//! payload of an E5M2 NaN.
//!
//! **NaN.** A NaN that a reduction or a scale computes is written as the type's one
//! canonical quiet NaN: `f16` `0x7E00`, `bf16` `0x7FC0`, `f32` `0x7FC0_0000`, `f64`
//! `0x7FF8_0000_0000_0000`, `f8e4m3` `0x7F`, `f8e5m2` `0x7E`. In `f8e4m3` a result out of
//! range, positive or negative, is this NaN too.
//!
//! **Minimum and maximum of floats.** As IEEE 754-2019 `minimum` and `maximum`: a NaN
//! operand makes the result NaN, and -0 is less than +0.
//!
//! **Finishing.** On the step that completes a reduction over its ranks, `finish` is a
//! [`Finish`]. Only an average uses it: the sum is divided by the number of ranks `n`, or, if
//! the operands are floats that were halved `h` times before, by `n / 2^h`. Without a
//! [`Finish`], an average is a sum.
//!
//! **Scale.** Every element is multiplied once: `f64` by the factor; all other floats, in
//! `f32`, by the factor rounded to `f32`. Small floats are then rounded once, to nearest even.
//! A factor of 1 changes nothing but NaN, which becomes canonical. Integers and `bool` cannot
//! be scaled: [`DType::scales`].
//!
//! **Cast.** `pack` of the crate `allstream-cuda-kernels` and [`scalar::convert`] turn one float type into another. An
//! element is widened to `f64` if either type is `f64`, else to `f32`, and multiplied there by a factor
//! (in `f32`: by the factor rounded to `f32`). The product is rounded once, to nearest even, also from
//! `f64` to a small float. NaN and results out of range are as above.
//!
//! **Misuse.** An operator that does not [support](ReduceOp::supports) the type, no inputs,
//! no outputs, an average finished over no ranks, or a scale of a type that cannot be scaled:
//! with debug assertions this panics; without, nothing is read or written.

#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![deny(clippy::undocumented_unsafe_blocks)]

mod cpu;
mod dtype;
mod f8;
mod function;
mod op;

pub use cpu::{compress, copy, copy_streaming, expand, reduce, reduce_streaming, scalar, scale};
pub use dtype::{DType, Element};
pub use f8::{f8e4m3, f8e5m2};
pub use function::{Combine, Function};
pub use half::{bf16, f16};
pub use op::{Finish, ReduceOp};

/// The error of parsing a [`DType`] or a [`ReduceOp`]: there is none with this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownName {
    kind: &'static str,
    name: String,
}

impl UnknownName {
    fn new(kind: &'static str, name: &str) -> Self {
        let name = name.to_owned();
        Self { kind, name }
    }
}

impl std::fmt::Display for UnknownName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unknown {}: {:?}", self.kind, self.name)
    }
}

impl std::error::Error for UnknownName {}
