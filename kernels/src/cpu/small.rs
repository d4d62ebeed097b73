//! Kernels with AVX2 for the floats of 8 and 16 bits. They convert by the instructions of F16C
//! and, where those do not serve, by operations on bits; LLVM's vectoriser finds neither by
//! itself.

use std::arch::x86_64::*;

use super::convert::E4M3_LAST;
use super::job::Job;
use crate::{DType, ReduceOp};

const F16: u8 = DType::F16 as u8;
const BF16: u8 = DType::BF16 as u8;
const E4M3: u8 = DType::F8E4M3 as u8;
const E5M2: u8 = DType::F8E5M2 as u8;

const SUM: u8 = ReduceOp::Sum as u8;
const PROD: u8 = ReduceOp::Prod as u8;
const MIN: u8 = ReduceOp::Min as u8;
const MAX: u8 = ReduceOp::Max as u8;

/// Elements of a chunk, of one or two bytes each.
const CHUNK: usize = 16;

/// A chunk, widened. Which element is where is up to [`load`] and [`store`].
type Wide = [__m256; 2];

/// Folds whole chunks from `job.start` on; returns where the remainder starts.
///
/// # Safety
///
/// The CPU must have AVX2 and F16C; `dtype` must be a float of 8 or 16 bits; the pointers
/// must be as [`crate::reduce`] asks, each to `job.len` elements of that type.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn run(dtype: DType, op: ReduceOp, job: &Job<'_>) -> usize {
    // SAFETY: the caller vouches for the job.
    unsafe {
        match dtype {
            DType::BF16 => run_of::<BF16>(op, job),
            DType::F8E4M3 => run_of::<E4M3>(op, job),
            DType::F8E5M2 => run_of::<E5M2>(op, job),
            DType::F16 => run_of::<F16>(op, job),
            // Another type is left to the caller, whole.
            _ => job.start,
        }
    }
}

/// [`run`] for one type.
///
/// # Safety
///
/// As [`run`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn run_of<const TYPE: u8>(op: ReduceOp, job: &Job<'_>) -> usize {
    // SAFETY: the caller vouches for the job.
    unsafe {
        match op {
            ReduceOp::Prod => chunks::<TYPE, PROD>(job),
            ReduceOp::Min => chunks::<TYPE, MIN>(job),
            ReduceOp::Max => chunks::<TYPE, MAX>(job),
            _ => chunks::<TYPE, SUM>(job),
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
    let divisor = job.divisor.map(|by| _mm256_set1_ps(by.ranks as f32 * by.power()));
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
        // SAFETY: as above; every input of this chunk has been read, so outputs may be
        // inputs.
        unsafe { store::<TYPE>(job.outs, at, [x, y]) };
        at += CHUNK;
    }
    at
}

/// Scales whole chunks from the first on; returns where the remainder starts.
///
/// # Safety
///
/// The CPU must have AVX2 and F16C; `dtype` must be a float of 8 or 16 bits; the memory
/// must be as [`crate::scale`] asks, and hold `len` elements of that type.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn scale(dtype: DType, memory: *mut u8, len: usize, factor: f64) -> usize {
    let factor = _mm256_set1_ps(factor as f32);
    // SAFETY: the caller vouches for the memory.
    unsafe {
        match dtype {
            DType::BF16 => scale_chunks::<BF16>(memory, len, factor),
            DType::F8E4M3 => scale_chunks::<E4M3>(memory, len, factor),
            DType::F8E5M2 => scale_chunks::<E5M2>(memory, len, factor),
            DType::F16 => scale_chunks::<F16>(memory, len, factor),
            _ => 0,
        }
    }
}

/// [`scale`] for one type.
///
/// # Safety
///
/// As [`scale`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn scale_chunks<const TYPE: u8>(memory: *mut u8, len: usize, factor: __m256) -> usize {
    let mut at = 0;
    while at + CHUNK <= len {
        // SAFETY: elements `at..at + CHUNK` are in the memory.
        let [x, y] = unsafe { load::<TYPE>(memory, at) };
        let scaled = [_mm256_mul_ps(x, factor), _mm256_mul_ps(y, factor)];
        // SAFETY: as above.
        unsafe { store::<TYPE>(&[memory], at, scaled) };
        at += CHUNK;
    }
    at
}

/// Reads and widens a chunk. A signalling NaN may stay signalling: [`store`] makes every NaN
/// canonical.
///
/// # Safety
///
/// `p` must be valid for reads of the elements `at..at + CHUNK`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load<const TYPE: u8>(p: *const u8, at: usize) -> Wide {
    if TYPE == E4M3 || TYPE == E5M2 {
        // SAFETY: the caller vouches for these 16 bytes; the load needs no alignment.
        let raw = unsafe { _mm_loadu_si128(p.add(at).cast()) };
        // Each byte becomes the upper byte of 16 bits: for an E5M2 that makes it an `f16`.
        let halves = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(raw));
        return if TYPE == E5M2 { from_halves(halves) } else { from_e4m3(halves) };
    }
    // SAFETY: the caller vouches for these 32 bytes; the load needs no alignment.
    let raw = unsafe { _mm256_loadu_si256(p.add(2 * at).cast()) };
    if TYPE == BF16 {
        // A bf16 is the upper half of an f32. The even elements are shifted up into that half,
        // the odd ones are in it already: cheaper than to widen neighbours in order.
        let even = _mm256_slli_epi32::<16>(raw);
        let odd = _mm256_and_si256(raw, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
        [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
    } else {
        from_halves(raw)
    }
}

/// Widens 16 `f16`s, in order.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn from_halves(halves: __m256i) -> Wide {
    let low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    [low, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

/// Widens 16 E4M3s, in order, each given in the upper byte of 16 bits.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn from_e4m3(shifted: __m256i) -> Wide {
    // With its magnitude shifted down by one place an E4M3, even a subnormal one, is an f16
    // that is 2^8 times too small, as the biases differ by 8. A NaN becomes 16 ones, a NaN in f16.
    let magnitude = _mm256_and_si256(shifted, _mm256_set1_epi16(0x7F00));
    let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F00));
    let sign = _mm256_andnot_si256(_mm256_set1_epi16(0x7FFF), shifted);
    let half = _mm256_or_si256(_mm256_srli_epi16::<1>(magnitude), sign);
    let [x, y] = from_halves(_mm256_or_si256(half, nan));
    let up = _mm256_set1_ps(256.0);
    [_mm256_mul_ps(x, up), _mm256_mul_ps(y, up)]
}

/// Rounds a chunk to nearest even, with NaN made canonical, and writes it to every one of
/// `outs`; undoes the order of [`load`].
///
/// # Safety
///
/// The pointers must be valid for writes of the elements `at..at + CHUNK`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store<const TYPE: u8>(outs: &[*mut u8], at: usize, [x, y]: Wide) {
    if TYPE == E4M3 || TYPE == E5M2 {
        // First to 16 bits, with four of `x` and four of `y` in each half of the vector; then
        // into the right order; then to bytes.
        let mixed = _mm256_packus_epi32(to_eights::<TYPE>(x), to_eights::<TYPE>(y));
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(mixed);
        let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        let bytes = _mm_packus_epi16(low, high);
        for p in outs {
            // SAFETY: the caller vouches for these 16 bytes; the store needs no alignment.
            unsafe { _mm_storeu_si128(p.add(at).cast(), bytes) };
        }
        return;
    }
    let narrow = to_halves::<TYPE>([canonical(x), canonical(y)]);
    for p in outs {
        // SAFETY: the caller vouches for these 32 bytes; the store needs no alignment.
        unsafe { _mm256_storeu_si256(p.add(2 * at).cast(), narrow) };
    }
}

/// Rounds `f32`s to `bf16` or `f16`. Every NaN among them must be the canonical one.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn to_halves<const TYPE: u8>([x, y]: Wide) -> __m256i {
    if TYPE == BF16 {
        let even = _mm256_srli_epi32::<16>(round_to_upper(x));
        _mm256_blend_epi16::<0b1010_1010>(even, round_to_upper(y))
    } else {
        let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(y);
        _mm256_set_m128i(high, low)
    }
}

/// As `f32_to_bf16` in `convert.rs`, but the result is left in the upper half, and NaN is no
/// special case: rounding the canonical NaN does not carry.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn round_to_upper(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let bits = _mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF));
    _mm256_add_epi32(bits, odd)
}

/// As `f32_to_e4m3` or `f32_to_e5m2` in `convert.rs`, but every NaN is made the canonical
/// one.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn to_eights<const TYPE: u8>(x: __m256) -> __m256i {
    // The biased exponents of the least normal number, and of the number whose last place in
    // f32 is the unit of subnormals; the greatest f32 that does not become NaN; NaN's bits.
    let (normal, unit, last, nan) =
        if TYPE == E4M3 { (121, 141, E4M3_LAST, 0x7F) } else { (113, 134, 0x7F80_0000, 0x7E) };
    let set = |x: u32| _mm256_set1_epi32(x as i32);
    let bits = _mm256_castps_si256(x);
    let magnitude = _mm256_and_si256(bits, set(0x7FFF_FFFF));
    let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), set(0x80));
    let is_nan = _mm256_cmpgt_epi32(magnitude, set(last));
    let is_subnormal = _mm256_cmpgt_epi32(set(normal << 23), magnitude);
    let added = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(set(unit << 23)));
    let subnormal = _mm256_sub_epi32(_mm256_castps_si256(added), set(unit << 23));
    // `rebias` subtracts the least normal exponent less one, and adds one less than half of the
    // last place. `odd` makes that a half if the last place is odd. So the carry rounds to
    // nearest even.
    let rebias = |half: u32| set(half.wrapping_sub((normal - 1) << 23));
    let rounded = if TYPE == E4M3 {
        let odd = _mm256_and_si256(_mm256_srli_epi32::<20>(magnitude), set(1));
        let sum = _mm256_add_epi32(_mm256_add_epi32(magnitude, rebias(0x0007_FFFF)), odd);
        _mm256_srli_epi32::<20>(sum)
    } else {
        // All from 2^16 on becomes 2^16, whose bits after rebiasing are E5M2's infinity.
        let magnitude = _mm256_min_epi32(magnitude, set((127 + 16) << 23));
        let odd = _mm256_and_si256(_mm256_srli_epi32::<21>(magnitude), set(1));
        let sum = _mm256_add_epi32(_mm256_add_epi32(magnitude, rebias(0x000F_FFFF)), odd);
        _mm256_srli_epi32::<21>(sum)
    };
    let number = _mm256_or_si256(_mm256_blendv_epi8(rounded, subnormal, is_subnormal), sign);
    _mm256_blendv_epi8(number, set(nan), is_nan)
}

/// Replaces every NaN by the canonical one.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn canonical(x: __m256) -> __m256 {
    let canonical = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC0_0000));
    _mm256_blendv_ps(x, canonical, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

/// What `Fold` does in `lane.rs`, on eight elements.
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
