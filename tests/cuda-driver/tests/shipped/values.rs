//! Random numbers, and elements worth computing with.

use allstream_kernels::DType;

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0xd134_2543_de82_ef95))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// How many bits of a float are exponent and mantissa.
fn layout(dtype: DType) -> Option<(u32, u32)> {
    Some(match dtype {
        DType::F16 => (5, 10),
        DType::BF16 => (8, 7),
        DType::F32 => (8, 23),
        DType::F64 => (11, 52),
        DType::F8E4M3 => (4, 3),
        DType::F8E5M2 => (5, 2),
        _ => return None,
    })
}

/// A float near 1, often with few bits, so that there are ties.
fn tame(random: &mut Random, exponent: u32, mantissa: u32) -> u64 {
    let bias = (1 << (exponent - 1)) - 1;
    let power = bias + random.below(7) as u64 - 3;
    let digits = random.bits() & ((1 << mantissa) - 1) & (u64::MAX << random.below(mantissa as usize + 1));
    (random.bits() & 1) << (exponent + mantissa) | power << mantissa | digits
}

/// A float at an edge: zeros, ends of the subnormal, normal and finite numbers, infinities, NaNs; or of random bits. (`F8E4M3` has no
/// infinities: there those bits, and most of the NaNs', are finite numbers.)
fn wild(random: &mut Random, exponent: u32, mantissa: u32) -> u64 {
    let (one, infinity) = (1 << mantissa, ((1 << exponent) - 1) << mantissa);
    let edges = [
        0,
        1,
        one - 1,
        one,
        one + 1,
        infinity - 1,
        infinity,
        infinity + 1,
        infinity | one >> 1,
        infinity | (one - 1),
        random.bits() >> 1,
    ];
    (random.bits() & 1) << (exponent + mantissa) | random.pick(&edges)
}

/// Fills memory with elements. Floats at an edge are rare in some memory, so that NaNs do not hide everything else.
pub(crate) fn fill(random: &mut Random, dtype: DType, bytes: &mut [u8]) {
    let rare = random.pick(&[2, 30, 1000]);
    for element in bytes.chunks_mut(dtype.size()) {
        let bits = match layout(dtype) {
            Some((exponent, mantissa)) if random.one_in(rare) => wild(random, exponent, mantissa),
            Some((exponent, mantissa)) => tame(random, exponent, mantissa),
            None if dtype == DType::Bool => random.bits() * (random.bits() & 1),
            None if random.one_in(8) => {
                let last = 1 << (8 * dtype.size() - 1);
                random.pick(&[0, 1, u64::MAX, last, last - 1])
            }
            None => random.bits(),
        };
        element.copy_from_slice(&bits.to_le_bytes()[..element.len()]);
    }
}
