//! What happens to one element: in which type it is computed, and how two values fold. All
//! of it is without branches, so that loops over it vectorise.

use half::{bf16, f16};

use super::convert::{
    E4M3_LAST, bf16_to_f32, e4m3_to_f32, e5m2_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3, f32_to_e5m2,
    f32_to_f16,
};
use crate::{Finish, f8e4m3, f8e5m2};

/// A stored type and the type it is computed in.
///
/// Every bit pattern of both is valid: kernels read them from raw memory.
pub(super) trait Lane: Copy {
    type Acc: Copy;
    fn widen(self) -> Self::Acc;
    /// Turns a result into its stored form; a NaN becomes the canonical one.
    fn narrow(acc: Self::Acc) -> Self;
    /// Divides a sum, to finish an average over more than one rank.
    fn divide(acc: Self::Acc, by: Finish) -> Self::Acc;
}

/// A float type: [`scale`](crate::scale) can multiply its elements.
pub(super) trait Scaled: Lane {
    /// The product with the factor, which is first rounded to the type computed in.
    fn times(acc: Self::Acc, factor: f64) -> Self::Acc;
}

macro_rules! integer_lanes {
    ($($t:ident through $wide:ident),*) => {$(
        impl Lane for $t {
            type Acc = $t;
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            #[inline(always)]
            fn narrow(acc: $t) -> $t {
                acc
            }
            #[inline(always)]
            fn divide(acc: $t, by: Finish) -> $t {
                (acc as $wide / by.ranks as $wide) as $t
            }
        }
    )*};
}

// For integers of up to 32 bits the truncated quotient of `f64`s is exact: a quotient that is
// no integer differs from the nearest integer by at least one part in 2^32, which is more than
// `f64` rounds by. Unlike integer division, the division of `f64`s vectorises.
integer_lanes!(
    i8 through f64, i16 through f64, i32 through f64, i64 through i64,
    u8 through f64, u16 through f64, u32 through f64, u64 through u64
);

macro_rules! float_lanes {
    ($($t:ident in $acc:ident: $widen:expr, $narrow:expr;)*) => {$(
        impl Lane for $t {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> $t {
                // Narrowing makes the canonical NaN of `f32` that of the narrower type.
                $narrow(if acc.is_nan() { $acc::CANONICAL } else { acc })
            }
            #[inline(always)]
            fn divide(acc: $acc, by: Finish) -> $acc {
                acc / (by.ranks as $acc * $acc::from(by.power()))
            }
        }

        impl Scaled for $t {
            #[inline(always)]
            fn times(acc: $acc, factor: f64) -> $acc {
                acc * factor as $acc
            }
        }
    )*};
}

float_lanes! {
    f16 in f32: |x: f16| f16_to_f32(x.to_bits()), |x| f16::from_bits(f32_to_f16(x));
    bf16 in f32: |x: bf16| bf16_to_f32(x.to_bits()), |x| bf16::from_bits(f32_to_bf16(x));
    f32 in f32: |x| x, |x| x;
    f64 in f64: |x| x, |x| x;
    f8e4m3 in f32: |x: f8e4m3| e4m3_to_f32(x.to_bits()), |x| f8e4m3::from_bits(f32_to_e4m3(in_range(x)));
    f8e5m2 in f32: |x: f8e5m2| e5m2_to_f32(x.to_bits()), |x| f8e5m2::from_bits(f32_to_e5m2(x));
}

/// Replaces what is out of E4M3's range by the canonical NaN: narrowing would make it a NaN
/// of the same sign.
#[inline(always)]
fn in_range(x: f32) -> f32 {
    if x.to_bits() & 0x7FFF_FFFF > E4M3_LAST { f32::CANONICAL } else { x }
}

/// The one NaN that results are written as. The bits of Rust's `NAN` are not guaranteed.
trait Canonical {
    const CANONICAL: Self;
}

impl Canonical for f32 {
    const CANONICAL: f32 = f32::from_bits(0x7FC0_0000);
}

impl Canonical for f64 {
    const CANONICAL: f64 = f64::from_bits(0x7FF8_0000_0000_0000);
}

/// A `bool` whose byte may have any value: all but 0 are true.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Lane for Truth {
    type Acc = u8;
    #[inline(always)]
    fn widen(self) -> u8 {
        u8::from(self.0 != 0)
    }
    #[inline(always)]
    fn narrow(acc: u8) -> Truth {
        Truth(acc)
    }
    #[inline(always)]
    fn divide(acc: u8, _: Finish) -> u8 {
        acc
    }
}

/// An operator on values of `A`, a type that is computed in. Swapping the operands changes no bit
/// of the result, except in the payload of a NaN.
pub(super) trait Fold<A> {
    fn fold(a: A, b: A) -> A;
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;

macro_rules! fold {
    ($($op:ident on $t:ident: $f:expr;)*) => {$(
        impl Fold<$t> for $op {
            #[inline(always)]
            fn fold(a: $t, b: $t) -> $t {
                $f(a, b)
            }
        }
    )*};
}

macro_rules! integer_folds {
    ($($t:ident)*) => {$(
        fold! {
            Sum on $t: $t::wrapping_add;
            Prod on $t: $t::wrapping_mul;
            Min on $t: Ord::min;
            Max on $t: Ord::max;
        }
    )*};
}

integer_folds!(i8 i16 i32 i64 u8 u16 u32 u64);

fold! {
    And on u8: |a, b| a & b;
    Or on u8: |a, b| a | b;
    Xor on u8: |a, b| a ^ b;
}

macro_rules! float_folds {
    ($($t:ident)*) => {$(
        fold! {
            Sum on $t: |a, b| a + b;
            Prod on $t: |a, b| a * b;
            // Each `if` is one minps, which yields its second operand if both are zeros or
            // one is NaN. So the bitwise or of both orders keeps the sign of -0 and any NaN.
            Min on $t: |a: $t, b: $t| {
                let ab = if a < b { a } else { b };
                let ba = if b < a { b } else { a };
                $t::from_bits(ab.to_bits() | ba.to_bits())
            };
            Max on $t: |a: $t, b: $t| -<Min as Fold<$t>>::fold(-a, -b);
        }
    )*};
}

float_folds!(f32 f64);
