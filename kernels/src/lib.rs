//! What turns buffers into one: the data types, the reduction operators and the CPU
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
//! finished with a divisor above 1.
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
//! nearest even; subnormals are kept. An average is the sum, divided when it is finished by
//! the divisor as a float of the type computed in (for small floats before that one
//! rounding).
//!
//! **Overflow.** A result too large for its type is an infinity; but `f8e4m3` has none, and
//! there it is NaN: what rounds to more than 448, and a computed infinity. That is OCP's
//! non-saturating conversion and what PyTorch does with `float8_e4m3fn`; CUDA's
//! `__nv_fp8_e4m3` stops at 448 instead. NaN, because a sum that left the range must not
//! pass for a number. [`f8e4m3::from_f32`] and [`f8e5m2::from_f32`] give PyTorch's bits for
//! everything but the payload of an E5M2 NaN.
//!
//! **NaN.** A NaN that a reduction or a scale computes is written as the type's one
//! canonical quiet NaN: `f16` `0x7E00`, `bf16` `0x7FC0`, `f32` `0x7FC0_0000`, `f64`
//! `0x7FF8_0000_0000_0000`, `f8e4m3` `0x7F`, `f8e5m2` `0x7E`; in `f8e4m3` also for what is
//! out of range, of either sign.
//!
//! **Minimum and maximum of floats.** As IEEE 754-2019 `minimum` and `maximum`: a NaN
//! operand makes the result NaN, and -0 is less than +0.
//!
//! **Finishing.** `finish` is a [`Finish`] on the step that completes a reduction over its
//! ranks. Only an average looks at it: it divides by their number `n`, and of floats whose
//! operands were halved `h` times before by `n / 2^h`, in the type computed in. Without it,
//! an average is a sum.
//!
//! **Scale.** Every element is multiplied once, `f64` by the factor and all else, in `f32`,
//! by the factor rounded to `f32`; small floats are rounded once, to nearest even. A factor
//! of 1 changes nothing but NaN, which becomes canonical. Integers and `bool` have no
//! scale: [`DType::scales`].
//!
//! **Cast.** From one float to another, by `pack` of the crate `allstream-cuda-kernels` and [`scalar::convert`]: widened to
//! `f64` if either type is `f64`, else to `f32`; multiplied there by a factor, which in `f32` is
//! rounded to that first; rounded once, to nearest even, also from `f64` to a small float. NaN
//! and what is out of range are as above.
//!
//! **Misuse.** An operator that does not [support](ReduceOp::supports) the type, no inputs,
//! no outputs, an average finished with `n == 0`, or a scale of a type that has none: a
//! panic with debug assertions, and otherwise nothing is read or written.

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

/// The error of parsing a [`DType`] or a [`ReduceOp`]: no such name.
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
