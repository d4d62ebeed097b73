//! The oracle: `reduce` and `scale` written one element at a time, with nothing in it that
//! is there for speed. The fast kernels are tested against it bit for bit.

use half::{bf16, f16};

use super::{scalable, valid};
use crate::{DType, Finish, ReduceOp, f8e4m3, f8e5m2};

/// Does the same as [`crate::reduce`], slowly.
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
    finish: Option<Finish>,
) {
    if !valid(dtype, op, ins, outs, finish) {
        return;
    }
    let n = op.divides(finish);
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
                    n.map_or(folded, |n| (<$wide>::from(folded) / <$wide>::from(n.ranks)) as $t)
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
                    let result: $t =
                        $narrow(n.map_or(folded, |n| {
                            folded / (n.ranks as $acc * $acc::powi(0.5, n.halved.into()))
                        }));
                    // Checked after narrowing, which makes NaN of what is out of the range of E4M3.
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

/// Does the same as [`crate::scale`], slowly.
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

/// Casts and multiplies floats as `pack` of the crate `allstream-cuda-kernels` does on a device. There is no faster version for the CPU.
/// The [rules](crate#rules) say what exactly is computed.
///
/// # Safety
///
/// `from` must be valid for reads of `len` elements of its type, and `to` valid for writes of as many of its type; no
/// alignment is needed. They must not overlap, and nothing else may write `from` or touch `to` during the call.
pub unsafe fn convert(from: (DType, *const u8), to: (DType, *mut u8), len: usize, factor: f64) {
    let ((from, source), (to, target)) = (from, to);
    if !scalable(from) || !scalable(to) {
        return;
    }
    for i in 0..len {
        // SAFETY: `i < len`.
        let x = unsafe { value(from, source.add(i * from.size())) };
        let x = match from == DType::F64 || to == DType::F64 {
            true => x * factor,
            false => f64::from(x as f32 * factor as f32),
        };
        /// Rounds once, and writes.
        macro_rules! write {
            ($t:ty, $x:expr, $nan:expr) => {{
                let x: $t = $x;
                let x = if x.is_nan() { <$t>::from_bits($nan) } else { x };
                // SAFETY: `i < len`, and `$t` is the type of the target's elements.
                unsafe { target.cast::<$t>().add(i).write_unaligned(x) }
            }};
        }
        match to {
            DType::F16 => write!(f16, f16::from_f32(to_odd(x)), 0x7E00),
            DType::BF16 => write!(bf16, bf16::from_f32(to_odd(x)), 0x7FC0),
            DType::F32 => write!(f32, x as f32, 0x7FC0_0000),
            DType::F8E4M3 => write!(f8e4m3, f8e4m3::from_f32(to_odd(x)), 0x7F),
            DType::F8E5M2 => write!(f8e5m2, f8e5m2::from_f32(to_odd(x)), 0x7E),
            _ => write!(f64, x, 0x7FF8_0000_0000_0000),
        }
    }
}

/// Reads a float of any type as `f64`, which is exact.
///
/// # Safety
///
/// `at` must be valid for reads of an element of the type.
unsafe fn value(dtype: DType, at: *const u8) -> f64 {
    // SAFETY: the type is that of the element that the caller vouches for.
    unsafe {
        match dtype {
            DType::F16 => at.cast::<f16>().read_unaligned().to_f32().into(),
            DType::BF16 => at.cast::<bf16>().read_unaligned().to_f32().into(),
            DType::F32 => at.cast::<f32>().read_unaligned().into(),
            DType::F8E4M3 => at.cast::<f8e4m3>().read().into(),
            DType::F8E5M2 => at.cast::<f8e5m2>().read().into(),
            _ => at.cast::<f64>().read_unaligned(),
        }
    }
}

/// Rounds to `f32` toward zero, and sets the last bit if that was not exact ("round to odd"). Rounding the result to fewer bits then gives
/// the same as rounding `x` itself.
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if x.is_nan() || f64::from(near) == x {
        return near;
    }
    let away = f64::from(near).abs() > x.abs();
    f32::from_bits((near.to_bits() - u32::from(away)) | 1)
}

/// At every index, applies `f` to the inputs' elements and writes its result to all outputs.
///
/// # Safety
///
/// The pointers must be valid for `len` elements of `T`, and any bytes must be a valid `T`.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn cast<A: Copy, B: Copy + Default>(from: DType, x: A, to: DType, factor: f64) -> B {
        let mut y = B::default();
        assert_eq!((from.size(), to.size()), (size_of::<A>(), size_of::<B>()));
        // SAFETY: one element each, of the sizes just compared.
        unsafe {
            convert((from, (&raw const x).cast()), (to, (&raw mut y).cast()), 1, factor);
        }
        y
    }

    #[test]
    fn casts_round_once() {
        let up = |x: f64| f64::from_bits(x.to_bits() + 1);
        let to_f16 = |x: f64| cast::<f64, u16>(DType::F64, x, DType::F16, 1.0);
        // A value half way between two neighbours rounds to the even one, and the next f64 above it rounds up. Rounding to f32
        // first would make the two equal.
        for h in 0..0x7BFFu16 {
            let middle = (f16::from_bits(h).to_f64() + f16::from_bits(h + 1).to_f64()) / 2.0;
            assert_eq!((to_f16(middle), to_f16(up(middle))), (h + h % 2, h + 1), "{h:#06x}");
        }
        assert_eq!((to_f16(65_519.999_999_999), to_f16(65_520.0), to_f16(-1e300)), (0x7BFF, 0x7C00, 0xFC00));
        let to_e4m3 = |x: f64| cast::<f64, u8>(DType::F64, x, DType::F8E4M3, 1.0);
        assert_eq!((to_e4m3(464.0), to_e4m3(up(464.0)), to_e4m3(-5e-324)), (0x7E, 0x7F, 0x80));
        // The factor is rounded to f32, the product is computed in f32, and only that is rounded to bf16.
        let scaled = cast::<f32, u16>(DType::F32, 3.0, DType::BF16, 0.1);
        assert_eq!(scaled, bf16::from_f32(3.0 * 0.1f32).to_bits());
        assert_eq!(cast::<f32, f64>(DType::F32, 3.0, DType::F64, 0.1), 3.0 * 0.1);
    }

    #[test]
    fn casts_make_nan_canonical() {
        let nan = 0xFF80_0001u32;
        assert_eq!(cast::<_, u16>(DType::F32, nan, DType::F16, 1.0), 0x7E00);
        assert_eq!(cast::<_, u32>(DType::F32, nan, DType::F32, 1.0), 0x7FC0_0000);
        assert_eq!(cast::<_, u64>(DType::F32, nan, DType::F64, 1.0), 0x7FF8_0000_0000_0000);
        assert_eq!(cast::<_, u8>(DType::F8E5M2, 0xFDu8, DType::F8E4M3, 1.0), 0x7F);
        assert_eq!(cast::<_, u8>(DType::F8E4M3, 0xFFu8, DType::F8E5M2, 1.0), 0x7E);
    }
}
