//! The values of test elements and their reductions: the rules of `allstream_kernels`, written a second time.

use std::ops::Range;

use allstream::{Element, Function, ReduceOp, bf16, f8e4m3, f8e5m2, f16};

use crate::combine;
use crate::inputs::{self, Expected, Inputs};

/// The most ranks of a world.
pub const MOST: usize = 16;

/// Mixes the bits of some numbers into one (SplitMix64).
pub fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x5eed, |x, part| {
        let mut x = x ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    })
}

/// An element type, with what the tests need of it.
pub trait Value: Element {
    /// Twice the unit roundoff, and the least number above 0; `None`: the type does not round.
    const ROUNDS: Option<(f64, f64)>;
    /// Makes a value for a reduction (`None`: any bits, which are only copied) from random bits: `h` are this value's own, and
    /// `all` are the same for all ranks at this place. `special`: NaN, infinities and zeros may come too.
    fn make(op: Option<ReduceOp>, special: bool, h: u64, all: u64) -> Self;
    /// Reduces the values from the left, and divides by their number for an average.
    fn fold(op: ReduceOp, values: &[Self]) -> Self;
    /// All bits of the value.
    fn bits(self) -> u64;
    /// The value as an `f64`; used only for types that round.
    fn wide(self) -> f64;
    /// See [`inputs::of_rank`].
    fn inputs(of: Inputs, rank: usize, count: usize) -> Vec<Self>;
    /// See [`inputs::reductions`].
    fn reductions(of: Inputs, n: usize, count: usize, ranges: &[Range<usize>]) -> Expected<Self>;
    /// See [`inputs::compare`].
    fn compare(name: &str, got: &[Self], expected: &[Self], near: &[(f64, f64)]) -> Result<(), String>;
    /// See [`inputs::hash`].
    fn hash(values: &[Self]) -> u64;
    /// See [`combine::bits_added`].
    fn bits_added() -> Function<Self>;
    /// See [`combine::maps_in_turn`].
    fn maps_in_turn() -> Function<Self>;
}

/// The methods that only call a generic function of this crate, so that it is compiled here, for each type.
macro_rules! compiled_here {
    () => {
        fn inputs(of: Inputs, rank: usize, count: usize) -> Vec<Self> {
            inputs::of_rank(of, rank, count)
        }
        fn reductions(of: Inputs, n: usize, count: usize, ranges: &[Range<usize>]) -> Expected<Self> {
            inputs::reductions(of, n, count, ranges)
        }
        fn compare(name: &str, got: &[Self], expected: &[Self], near: &[(f64, f64)]) -> Result<(), String> {
            inputs::compare(name, got, expected, near)
        }
        fn hash(values: &[Self]) -> u64 {
            inputs::hash(values)
        }
        fn bits_added() -> Function<Self> {
            combine::bits_added::<Self>()
        }
        fn maps_in_turn() -> Function<Self> {
            combine::maps_in_turn::<Self>()
        }
    };
}

macro_rules! integers {
    ($($t:ident)*) => {$(
        impl Value for $t {
            compiled_here!();
            const ROUNDS: Option<(f64, f64)> = None;
            fn make(op: Option<ReduceOp>, special: bool, h: u64, _: u64) -> $t {
                let more = mix(&[h]);
                let ends = [0, 1, $t::MIN, $t::MAX, $t::MAX - 1, !0];
                match op {
                    // No product of odd numbers is 0.
                    Some(ReduceOp::Prod) => h as $t | 1,
                    Some(ReduceOp::BitAnd) => (h | more | h.rotate_left(21)) as $t,
                    Some(ReduceOp::BitOr) => (h & more & h.rotate_left(21)) as $t,
                    Some(_) if special && more % 4 == 0 => ends[(h % 6) as usize],
                    _ => h as $t,
                }
            }
            fn fold(op: ReduceOp, values: &[$t]) -> $t {
                let n = values.len() as i128;
                let x = values.iter().copied();
                let folded = match op {
                    ReduceOp::Sum => x.reduce(|a, b| a.wrapping_add(b)),
                    ReduceOp::Avg => x.reduce(|a, b| a.wrapping_add(b)).map(|s| (s as i128 / n) as $t),
                    ReduceOp::Prod => x.reduce(|a, b| a.wrapping_mul(b)),
                    ReduceOp::Min => x.min(),
                    ReduceOp::Max => x.max(),
                    ReduceOp::BitAnd => x.reduce(|a, b| a & b),
                    ReduceOp::BitOr => x.reduce(|a, b| a | b),
                    ReduceOp::BitXor => x.reduce(|a, b| a ^ b),
                };
                folded.expect("a rank")
            }
            fn bits(self) -> u64 {
                self as u64
            }
            fn wide(self) -> f64 {
                self as f64
            }
        }
    )*};
}

integers!(i8 i16 i32 i64 u8 u16 u32 u64);

impl Value for bool {
    compiled_here!();
    const ROUNDS: Option<(f64, f64)> = None;
    fn make(op: Option<ReduceOp>, _: bool, h: u64, _: u64) -> bool {
        // Mostly true for "and", mostly false for "or", so that the result over many ranks is sometimes true and sometimes false.
        match op {
            Some(ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd) => !h.is_multiple_of(8),
            Some(ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr) => h.is_multiple_of(8),
            _ => h.is_multiple_of(2),
        }
    }
    fn fold(op: ReduceOp, values: &[bool]) -> bool {
        match op {
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => values.iter().all(|x| *x),
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => values.iter().any(|x| *x),
            ReduceOp::BitXor => values.iter().fold(false, |a, b| a != *b),
            ReduceOp::Avg => unreachable!("no average of bool"),
        }
    }
    fn bits(self) -> u64 {
        self.into()
    }
    fn wide(self) -> f64 {
        self.into()
    }
}

macro_rules! floats {
    ($(
        $t:ident as $acc:ident, $bits:ident, $nan:literal, $ends:expr, $factor:expr, $eps:expr, $tiny:expr,
        $to:expr, $from:expr;
    )*) => {$(
        impl Value for $t {
            compiled_here!();
            const ROUNDS: Option<(f64, f64)> = Some(($eps, $tiny));
            fn make(op: Option<ReduceOp>, special: bool, h: u64, all: u64) -> $t {
                let from: fn($acc) -> $t = $from;
                let Some(op) = op else { return $t::from_bits(h as $bits) };
                if special && all % 17 == 0 {
                    return from(-0.0);
                }
                if special {
                    match h % 64 {
                        0 => return $t::from_bits($nan | (all % 64) as $bits),
                        1 => return $ends[0],
                        2 => return $ends[1],
                        3..=6 => return from(-0.0),
                        7..=10 => return from(0.0),
                        // (Not for products: if one underflows, later factors would enlarge the error.)
                        11 if op != ReduceOp::Prod => return $t::from_bits(1 + (h >> 32) as $bits % 7),
                        _ => {}
                    }
                }
                let part = (h >> 11) as f64 / (1_u64 << 53) as f64;
                let sign = if h & 256 == 0 { 1.0 } else { -1.0 };
                match op {
                    ReduceOp::Prod => from((sign * (1.0 + part * ($factor - 1.0))) as $acc),
                    _ => from((16.0 * part - 8.0) as $acc),
                }
            }
            fn fold(op: ReduceOp, values: &[$t]) -> $t {
                if let [one] = values {
                    return *one;
                }
                let (to, from): (fn($t) -> $acc, fn($acc) -> $t) = ($to, $from);
                let x = values.iter().map(|x| to(*x));
                let pick = |less: bool| move |a: $acc, b: $acc| match (a.is_nan() || b.is_nan(), a.total_cmp(&b).is_lt()) {
                    (true, _) => $acc::NAN,
                    (false, lt) => if lt == less { a } else { b },
                };
                let folded = match op {
                    ReduceOp::Sum => x.reduce(|a, b| a + b),
                    ReduceOp::Avg => x.reduce(|a, b| a + b).map(|s| s / values.len() as $acc),
                    ReduceOp::Prod => x.reduce(|a, b| a * b),
                    ReduceOp::Min => x.reduce(pick(true)),
                    ReduceOp::Max => x.reduce(pick(false)),
                    _ => unreachable!("no bits of floats"),
                };
                let folded = from(folded.expect("a rank"));
                // (In a type without infinities, a result that is too large becomes NaN only in the conversion.)
                if folded.is_nan() { $t::from_bits($nan) } else { folded }
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn wide(self) -> f64 {
                self.into()
            }
        }
    )*};
}

/// The infinities of a float type. (The largest finite numbers would make the result depend on the order.)
macro_rules! ends {
    ($t:ident) => {
        [$t::INFINITY, $t::NEG_INFINITY]
    };
}

// Columns: the type; the type that it is computed in; the type of its bits; the bits of NaN; the infinities, or NaNs; the largest
// factor of products, so small that the product over all ranks stays finite in spite of rounding; twice the unit roundoff; the
// least number above 0; the conversions to and from the type that it is computed in.
floats! {
    f16 as f32, u16, 0x7e00, ends!(f16), 1.5, 1.0 / 1024.0, 6e-8, |x| x.to_f32(), f16::from_f32;
    bf16 as f32, u16, 0x7fc0, ends!(bf16), 1.5, 1.0 / 128.0, 1e-40, |x| x.to_f32(), bf16::from_f32;
    f32 as f32, u32, 0x7fc0_0000, ends!(f32), 1.5, f32::EPSILON as f64, 1.5e-45, |x| x, |x| x;
    f64 as f64, u64, 0x7ff8_0000_0000_0000, ends!(f64), 1.5, f64::EPSILON, 5e-324, |x| x, |x| x;
    f8e4m3 as f32, u8, 0x7f, [0x7f, 0xff].map(f8e4m3::from_bits), 1.25, 0.125, 1.0 / 512.0, |x| x.to_f32(),
        f8e4m3::from_f32;
    f8e5m2 as f32, u8, 0x7e, ends!(f8e5m2), 1.5, 0.25, 1.0 / 65_536.0, |x| x.to_f32(), f8e5m2::from_f32;
}

/// `$body`, with `$t` as the Rust type of a [`DType`](allstream::DType).
#[macro_export]
macro_rules! typed {
    ($dtype:expr, $t:ident => $body:expr) => {
        $crate::typed!(@ $dtype, $t, $body, Bool bool, I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16, U32 u32, U64 u64,
            F16 allstream::f16, BF16 allstream::bf16, F32 f32, F64 f64,
            F8E4M3 allstream::f8e4m3, F8E5M2 allstream::f8e5m2)
    };
    (@ $dtype:expr, $t:ident, $body:expr, $($d:ident $r:ty),*) => {
        match $dtype {
            $(allstream::DType::$d => { type $t = $r; $body })*
        }
    };
}
pub use crate::typed;
