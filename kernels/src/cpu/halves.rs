//! `f16` and `bf16` with AVX2: F16C's conversions, which LLVM does not find by itself, and
//! `bf16` taken apart in a way that it does not find either.

use std::arch::x86_64::*;

use super::simd::Job;
use crate::{DType, ReduceOp};

const F16: u8 = DType::F16 as u8;
const BF16: u8 = DType::BF16 as u8;

const SUM: u8 = ReduceOp::Sum as u8;
const PROD: u8 = ReduceOp::Prod as u8;
const MIN: u8 = ReduceOp::Min as u8;
const MAX: u8 = ReduceOp::Max as u8;

/// Elements of a chunk; two bytes each.
const CHUNK: usize = 16;

/// A chunk, widened. Which element is where is up to [`load`] and [`narrow`].
type Wide = [__m256; 2];

/// Folds whole chunks from `job.start` on; returns where the remainder starts.
///
/// # Safety
///
/// The CPU must have AVX2 and F16C; the pointers must be as [`crate::reduce`] asks, over
/// `len` elements of `f16`, or of `bf16` if `dtype` is that.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn run(dtype: DType, op: ReduceOp, job: &Job<'_>) -> usize {
    // SAFETY: the caller vouches for the job.
    unsafe {
        match (dtype, op) {
            (DType::BF16, ReduceOp::Prod) => chunks::<BF16, PROD>(job),
            (DType::BF16, ReduceOp::Min) => chunks::<BF16, MIN>(job),
            (DType::BF16, ReduceOp::Max) => chunks::<BF16, MAX>(job),
            (DType::BF16, _) => chunks::<BF16, SUM>(job),
            (_, ReduceOp::Prod) => chunks::<F16, PROD>(job),
            (_, ReduceOp::Min) => chunks::<F16, MIN>(job),
            (_, ReduceOp::Max) => chunks::<F16, MAX>(job),
            _ => chunks::<F16, SUM>(job),
        }
    }
}

/// [`run`] for one type and operator.
///
/// # Safety
///
/// As [`run`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn chunks<const TYPE: u8, const OP: u8>(job: &Job<'_>) -> usize {
    let divisor = job.divisor.map(|n| _mm256_set1_ps(n as f32));
    let (first, rest) = (job.ins[0], &job.ins[1..]);
    let mut at = job.start;
    while at + CHUNK <= job.len {
        // SAFETY: elements `at..at + CHUNK` are in the buffers.
        let [mut x, mut y] = unsafe { load::<TYPE>(first, at) };
        for &p in rest {
            // SAFETY: as above.
            let [p, q] = unsafe { load::<TYPE>(p, at) };
            x = fold::<OP>(x, p);
            y = fold::<OP>(y, q);
        }
        if let Some(divisor) = divisor {
            x = _mm256_div_ps(x, divisor);
            y = _mm256_div_ps(y, divisor);
        }
        let narrow = narrow::<TYPE>([canonical(x), canonical(y)]);
        for p in job.outs {
            // SAFETY: as above; the store needs no alignment, and every input of this chunk
            // has been read, so outputs may be inputs.
            unsafe { _mm256_storeu_si256(p.add(2 * at).cast(), narrow) };
        }
        at += CHUNK;
    }
    at
}

/// Reads and widens a chunk. A signalling NaN may stay one: results are made canonical.
///
/// # Safety
///
/// `p` must be valid for reads of the two-byte elements `at..at + CHUNK`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load<const TYPE: u8>(p: *const u8, at: usize) -> Wide {
    // SAFETY: the caller vouches for these 32 bytes; the load needs no alignment.
    let raw = unsafe { _mm256_loadu_si256(p.add(2 * at).cast()) };
    if TYPE == BF16 {
        // A bf16 is the upper half of an f32. The even elements are shifted up to there,
        // the odd ones are there: cheaper than spreading neighbours over two vectors.
        let even = _mm256_slli_epi32::<16>(raw);
        let odd = _mm256_and_si256(raw, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
        [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
    } else {
        let low = _mm256_cvtph_ps(_mm256_castsi256_si128(raw));
        [low, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(raw))]
    }
}

/// Rounds a chunk without non-canonical NaN to nearest even; undoes the order of [`load`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow<const TYPE: u8>([x, y]: Wide) -> __m256i {
    if TYPE == BF16 {
        let even = _mm256_srli_epi32::<16>(round_to_upper(x));
        _mm256_blend_epi16::<0b1010_1010>(even, round_to_upper(y))
    } else {
        let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(y);
        _mm256_set_m128i(high, low)
    }
}

/// As `f32_to_bf16` in `convert.rs`, but the result is left in the upper half, and the
/// canonical NaN needs no care, for it does not carry.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn round_to_upper(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let bits = _mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF));
    _mm256_add_epi32(bits, odd)
}

/// Replaces every NaN by the canonical one.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn canonical(x: __m256) -> __m256 {
    let canonical = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC0_0000));
    _mm256_blendv_ps(x, canonical, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

/// What `Fold` does in `lane.rs`, eight times.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn fold<const OP: u8>(a: __m256, b: __m256) -> __m256 {
    match OP {
        PROD => _mm256_mul_ps(a, b),
        MIN => _mm256_or_ps(_mm256_min_ps(a, b), _mm256_min_ps(b, a)),
        MAX => {
            let sign = _mm256_set1_ps(-0.0);
            let (a, b) = (_mm256_xor_ps(a, sign), _mm256_xor_ps(b, sign));
            _mm256_xor_ps(fold::<MIN>(a, b), sign)
        }
        _ => _mm256_add_ps(a, b),
    }
}
