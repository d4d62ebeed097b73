//! The oracle: `reduce` and `scale` written one element at a time, with nothing in it that
//! is there for speed. The fast kernels are tested against it bit for bit.

use half::{bf16, f16};

use super::{divisor, scalable, valid};
use crate::{DType, ReduceOp, f8e4m3, f8e5m2};

/// What [`crate::reduce`] does, slowly.
///
/// # Safety
///
/// As [`crate::reduce`].
pub unsafe fn reduce(
    dtype: DType,
    op: ReduceOp,
    ins: &[*const u8],
    outs: &[*mut u8],
    len: usize,
    finish: Option<u32>,
) {
    if !valid(dtype, op, ins, outs, finish) {
        return;
    }
    let n = divisor(op, finish);
    if ins.len() == 1 && n.is_none() {
        // SAFETY: bytes of the buffers that the caller vouches for.
        return unsafe { each::<u8>(ins, outs, len * dtype.size(), |x| x[0]) };
    }
    /// Integers: fold as they are, then divide as a wider integer.
    macro_rules! integer {
        ($t:ty, $wide:ty) => {
            // SAFETY: `$t` is the element type of buffers that the caller vouches for.
            unsafe {
                each::<$t>(ins, outs, len, |x| {
                    let x = x.iter().copied();
                    let folded = match op {
                        ReduceOp::Sum | ReduceOp::Avg => x.reduce(<$t>::wrapping_add),
                        ReduceOp::Prod => x.reduce(<$t>::wrapping_mul),
                        ReduceOp::Min => x.reduce(<$t>::min),
                        ReduceOp::Max => x.reduce(<$t>::max),
                        ReduceOp::BitAnd => x.reduce(|a, b| a & b),
                        ReduceOp::BitOr => x.reduce(|a, b| a | b),
                        ReduceOp::BitXor => x.reduce(|a, b| a ^ b),
                    }
                    .unwrap_or_default();
                    n.map_or(folded, |n| (<$wide>::from(folded) / <$wide>::from(n)) as $t)
                })
            }
        };
    }
    /// Floats: widen to `$acc`, fold and divide there, narrow once.
    macro_rules! float {
        ($t:ty, $acc:ident, $widen:expr, $narrow:expr, $nan:expr) => {
            // SAFETY: `$t` is the element type of buffers that the caller vouches for.
            unsafe {
                each::<$t>(ins, outs, len, |x| {
                    let x = x.iter().copied().map($widen);
                    let folded = match op {
                        ReduceOp::Prod => x.reduce(|a, b| a * b),
                        ReduceOp::Min => x.reduce($acc::least),
                        ReduceOp::Max => x.reduce($acc::greatest),
                        _ => x.reduce(|a, b| a + b),
                    }
                    .unwrap_or_default();
                    let result: $t = $narrow(n.map_or(folded, |n| folded / n as $acc));
                    // After narrowing: out of the range of E4M3 is NaN too.
                    if result.is_nan() { <$t>::from_bits($nan) } else { result }
                })
            }
        };
    }
    match dtype {
        // SAFETY: one byte is the size of a bool; the caller vouches for the buffers.
        DType::Bool => unsafe {
            each::<u8>(ins, outs, len, |x| {
                let mut x = x.iter().map(|&x| x != 0);
                u8::from(match op {
                    ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => x.all(|x| x),
                    ReduceOp::BitXor => x.filter(|&x| x).count() % 2 == 1,
                    _ => x.any(|x| x),
                })
            })
        },
        DType::I8 => integer!(i8, i64),
        DType::I16 => integer!(i16, i64),
        DType::I32 => integer!(i32, i64),
        DType::I64 => integer!(i64, i64),
        DType::U8 => integer!(u8, u64),
        DType::U16 => integer!(u16, u64),
        DType::U32 => integer!(u32, u64),
        DType::U64 => integer!(u64, u64),
        DType::F16 => float!(f16, f32, f16::to_f32, f16::from_f32, 0x7E00),
        DType::BF16 => float!(bf16, f32, bf16::to_f32, bf16::from_f32, 0x7FC0),
        DType::F32 => float!(f32, f32, |x: f32| x, |x: f32| x, 0x7FC0_0000),
        DType::F64 => float!(f64, f64, |x: f64| x, |x: f64| x, 0x7FF8_0000_0000_0000),
        DType::F8E4M3 => float!(f8e4m3, f32, f8e4m3::to_f32, f8e4m3::from_f32, 0x7F),
        DType::F8E5M2 => float!(f8e5m2, f32, f8e5m2::to_f32, f8e5m2::from_f32, 0x7E),
    }
}

/// What [`crate::scale`] does, slowly.
///
/// # Safety
///
/// As [`crate::scale`].
pub unsafe fn scale(dtype: DType, memory: *mut u8, len: usize, factor: f64) {
    if !scalable(dtype) {
        return;
    }
    let (ins, outs) = ([memory.cast_const()], [memory]);
    macro_rules! float {
        ($t:ty, $acc:ident, $widen:expr, $narrow:expr, $nan:expr) => {
            // SAFETY: `$t` is the element type of memory that the caller vouches for.
            unsafe {
                each::<$t>(&ins, &outs, len, |x| {
                    let result: $t = $narrow($widen(x[0]) * factor as $acc);
                    if result.is_nan() { <$t>::from_bits($nan) } else { result }
                })
            }
        };
    }
    match dtype {
        DType::F16 => float!(f16, f32, f16::to_f32, f16::from_f32, 0x7E00),
        DType::BF16 => float!(bf16, f32, bf16::to_f32, bf16::from_f32, 0x7FC0),
        DType::F32 => float!(f32, f32, f32::from, f32::from, 0x7FC0_0000),
        DType::F64 => float!(f64, f64, f64::from, f64::from, 0x7FF8_0000_0000_0000),
        DType::F8E4M3 => float!(f8e4m3, f32, f8e4m3::to_f32, f8e4m3::from_f32, 0x7F),
        DType::F8E5M2 => float!(f8e5m2, f32, f8e5m2::to_f32, f8e5m2::from_f32, 0x7E),
        _ => {}
    }
}

/// Writes `f` of the inputs' elements at an index to the outputs there, for every index.
///
/// # Safety
///
/// The pointers must be valid for `len` elements of `T`, for any bytes in them.
unsafe fn each<T: Copy>(ins: &[*const u8], outs: &[*mut u8], len: usize, f: impl Fn(&[T]) -> T) {
    let mut operands = Vec::with_capacity(ins.len());
    for i in 0..len {
        operands.clear();
        for p in ins {
            // SAFETY: `i < len`.
            operands.push(unsafe { p.cast::<T>().add(i).read_unaligned() });
        }
        let result = f(&operands);
        for p in outs {
            // SAFETY: `i < len`.
            unsafe { p.cast::<T>().add(i).write_unaligned(result) };
        }
    }
}

/// IEEE 754-2019 minimum and maximum, which std has not stabilised.
trait MinMax {
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! min_max {
    ($($t:ident)*) => {$(
        impl MinMax for $t {
            fn least(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    $t::NAN
                } else if self == other {
                    if self.is_sign_negative() { self } else { other }
                } else if self < other {
                    self
                } else {
                    other
                }
            }

            fn greatest(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    $t::NAN
                } else if self == other {
                    if self.is_sign_negative() { other } else { self }
                } else if self > other {
                    self
                } else {
                    other
                }
            }
        }
    )*};
}

min_max!(f32 f64);
