//! Rounds `f32` to 16 bits with error feedback, and widens the result again: for gradients that are sent in 16 bits.

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::simd::{Level, level};
use crate::DType;

/// Adds to each number of `from` its `residual`, which is what rounding took from it the last time, and rounds the sum to `wire`
/// ([`DType::F16`] or [`DType::BF16`]), to nearest even. The bits go to `to`, and what rounding takes this time goes to `residual`: 0 where
/// the sum or its rounded value is infinite or NaN.
///
/// If `wire` is another type, or lengths differ, returns `false` and writes nothing.
pub fn compress(wire: DType, from: &[f32], residual: &mut [f32], to: &mut [u16]) -> bool {
    compress_at(level(), wire, from, residual, to)
}

/// Widens to `to` the numbers whose bits are in `from`, as [`compress`] made them with the same `wire`; exact.
///
/// If `wire` is another type than [`compress`] takes, or lengths differ, returns `false` and writes nothing.
pub fn expand(wire: DType, from: &[u16], to: &mut [f32]) -> bool {
    expand_at(level(), wire, from, to)
}

fn compress_at(level: Level, wire: DType, from: &[f32], residual: &mut [f32], to: &mut [u16]) -> bool {
    if from.len() != residual.len() || from.len() != to.len() || !matches!(wire, DType::F16 | DType::BF16) {
        return false;
    }
    match level {
        Level::Portable => compress_all(wire, from, residual, to),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: callers give a level that this CPU has.
        Level::Avx2 => unsafe { compress_avx2(wire, from, residual, to) },
    }
    true
}

fn expand_at(level: Level, wire: DType, from: &[u16], to: &mut [f32]) -> bool {
    if from.len() != to.len() || !matches!(wire, DType::F16 | DType::BF16) {
        return false;
    }
    match level {
        Level::Portable => expand_all(wire, from, to),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: callers give a level that this CPU has.
        Level::Avx2 => unsafe { expand_avx2(wire, from, to) },
    }
    true
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn compress_avx2(wire: DType, from: &[f32], residual: &mut [f32], to: &mut [u16]) {
    compress_all(wire, from, residual, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn expand_avx2(wire: DType, from: &[u16], to: &mut [f32]) {
    expand_all(wire, from, to);
}

#[inline(always)]
fn compress_all(wire: DType, from: &[f32], residual: &mut [f32], to: &mut [u16]) {
    match wire {
        DType::F16 => compress_by(from, residual, to, f32_to_f16, f16_to_f32),
        _ => compress_by(from, residual, to, f32_to_bf16, bf16_to_f32),
    }
}

#[inline(always)]
fn compress_by(
    from: &[f32],
    residual: &mut [f32],
    to: &mut [u16],
    narrow: impl Fn(f32) -> u16,
    widen: impl Fn(u16) -> f32,
) {
    for ((from, residual), to) in from.iter().zip(residual).zip(to) {
        let exact = *from + *residual;
        *to = narrow(exact);
        let lost = exact - widen(*to);
        *residual = if lost.is_finite() { lost } else { 0.0 };
    }
}

#[inline(always)]
fn expand_all(wire: DType, from: &[u16], to: &mut [f32]) {
    match wire {
        DType::F16 => to.iter_mut().zip(from).for_each(|(to, from)| *to = f16_to_f32(*from)),
        _ => to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16_to_f32(*from)),
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Numbers of all magnitudes, also subnormal, too large for `f16`, infinite and NaN. Their count is no multiple of a vector's lanes.
    fn numbers() -> Vec<f32> {
        let special =
            [0.0, -0.0, 1.0, 65519.9, 65520.0, 1e-7, 1e-40, f32::MAX, f32::INFINITY, f32::NEG_INFINITY];
        let drawn = (0..1003_u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B9)));
        special.into_iter().chain(drawn).chain([f32::NAN]).collect()
    }

    #[test]
    fn every_level_rounds_as_half_does_and_keeps_what_that_takes() {
        let from = numbers();
        let before: Vec<f32> =
            from.iter().map(|x| x / 300.0).map(|x| if x.is_finite() { x } else { 0.0 }).collect();
        for wire in [DType::F16, DType::BF16] {
            for level in Level::available() {
                let (mut residual, mut to) = (before.clone(), vec![0; from.len()]);
                assert!(compress_at(level, wire, &from, &mut residual, &mut to));
                let mut back = vec![0.0; from.len()];
                assert!(expand_at(level, wire, &to, &mut back));
                for (i, (x, kept)) in from.iter().zip(&before).enumerate() {
                    let exact = x + kept;
                    let rounded = match wire {
                        DType::F16 => f16::from_f32(exact).to_f32(),
                        _ => bf16::from_f32(exact).to_f32(),
                    };
                    assert!(
                        back[i] == rounded || back[i].is_nan() && rounded.is_nan(),
                        "{wire} {exact} {}",
                        back[i]
                    );
                    let lost = exact - rounded;
                    assert_eq!(residual[i], if lost.is_finite() { lost } else { 0.0 }, "{wire} {exact}");
                }
            }
        }
    }

    #[test]
    fn other_types_and_lengths_are_refused() {
        let (from, mut residual, mut to) = ([1.0; 3], [0.5; 3], [7; 3]);
        assert!(!compress(DType::F64, &from, &mut residual, &mut to));
        assert!(!compress(DType::BF16, &from, &mut residual[..2], &mut to));
        assert!(!compress(DType::BF16, &from, &mut residual, &mut to[..2]));
        let mut back = [9.0; 3];
        assert!(!expand(DType::F32, &to, &mut back) && !expand(DType::F16, &to[..2], &mut back));
        assert_eq!((residual, to, back), ([0.5; 3], [7; 3], [9.0; 3]));
    }
}
