//! The two 8-bit floats of the OCP 8-bit Floating Point Specification (revision 1.0):
//! E4M3 and E5M2. They are written here because the E4M3 of the crate `float8` saturates.

#![allow(non_camel_case_types)] // Named like primitive types and like the types of `half`.

use std::cmp::Ordering;
use std::fmt::{self, Debug, Display};

use crate::cpu::convert::{e4m3_to_f32, e5m2_to_f32, f32_to_e4m3, f32_to_e5m2};

/// An 8-bit float with 4 bits of exponent and 3 of mantissa: OCP's E4M3, PyTorch's
/// `float8_e4m3fn`.
///
/// The largest number is 448, the least normal one 2^-6, the least above zero 2^-9. There
/// are no infinities; the values with all bits of exponent and mantissa set (0x7F and 0xFF) are NaN.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct f8e4m3(u8);

/// An 8-bit float with 5 bits of exponent and 2 of mantissa: OCP's E5M2, PyTorch's
/// `float8_e5m2`, the upper half of an `f16`.
///
/// The largest number is 57,344, the least normal one 2^-14, the least above zero 2^-16.
/// Infinities and NaN are as in IEEE 754.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct f8e5m2(u8);

impl f8e4m3 {
    /// The NaN that reductions write.
    pub const NAN: f8e4m3 = f8e4m3(0x7F);
    /// The largest number, 448.
    pub const MAX: f8e4m3 = f8e4m3(0x7E);
    /// The least number, -448.
    pub const MIN: f8e4m3 = f8e4m3(0xFE);

    /// The nearest `f8e4m3`; of two equally near, the one whose last bit is 0. A magnitude out of
    /// range, that is above 464 (half way from 448 to 480, which would be next) or infinite, becomes
    /// NaN, as in PyTorch and in OCP's non-saturating conversion (CUDA's `__nv_fp8_e4m3` gives 448
    /// instead). The sign is kept, also that of a NaN.
    #[inline]
    pub const fn from_f32(x: f32) -> f8e4m3 {
        f8e4m3(f32_to_e4m3(x))
    }

    /// The same value, exactly.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        e4m3_to_f32(self.0)
    }
}

impl f8e5m2 {
    /// The NaN that reductions write.
    pub const NAN: f8e5m2 = f8e5m2(0x7E);
    /// The largest finite number, 57,344.
    pub const MAX: f8e5m2 = f8e5m2(0x7B);
    /// The least finite number, -57,344.
    pub const MIN: f8e5m2 = f8e5m2(0xFB);
    /// Infinity.
    pub const INFINITY: f8e5m2 = f8e5m2(0x7C);
    /// Minus infinity.
    pub const NEG_INFINITY: f8e5m2 = f8e5m2(0xFC);

    /// The nearest `f8e5m2`; of two equally near, the one whose last bit is 0. A magnitude of 61,440 or
    /// more becomes an infinity. A NaN becomes quiet and keeps its sign and the upper bits of its payload.
    #[inline]
    pub const fn from_f32(x: f32) -> f8e5m2 {
        f8e5m2(f32_to_e5m2(x))
    }

    /// The same value, exactly. A NaN becomes quiet.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        e5m2_to_f32(self.0)
    }
}

macro_rules! common {
    ($($t:ident)*) => {$(
        impl $t {
            /// The float with this representation.
            #[inline]
            pub const fn from_bits(bits: u8) -> $t {
                $t(bits)
            }

            /// The representation.
            #[inline]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Whether this is a NaN.
            #[inline]
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl From<$t> for f32 {
            fn from(x: $t) -> f32 {
                x.to_f32()
            }
        }

        impl From<$t> for f64 {
            fn from(x: $t) -> f64 {
                x.to_f32().into()
            }
        }

        /// Compares them as numbers: -0 equals +0, and a NaN equals nothing.
        impl PartialEq for $t {
            fn eq(&self, other: &$t) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $t {
            fn partial_cmp(&self, other: &$t) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                Debug::fmt(&self.to_f32(), f)
            }
        }

        impl Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                Display::fmt(&self.to_f32(), f)
            }
        }
    )*};
}

common!(f8e4m3 f8e5m2);
