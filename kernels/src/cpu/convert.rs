//! `f16` and `bf16` to `f32` and back, without branches, so that a loop over them
//! vectorises. Bit for bit what the `half` crate does.

/// Widens an `f16`; exact. A NaN becomes quiet and keeps the rest of its payload.
#[inline(always)]
pub(super) fn f16_to_f32(h: u16) -> f32 {
    let h = u32::from(h);
    let sign = (h & 0x8000) << 16;
    let magnitude = (h & 0x7FFF) << 13;
    // Rebias the exponent; infinity and NaN go up once more, to the top exponent.
    let normal = magnitude + ((127 - 15) << 23);
    let special = (normal + ((128 - 16) << 23)) | quiet(magnitude);
    // A subnormal is its mantissa under the exponent of the smallest normal, less that.
    let smallest = f32::from_bits(113 << 23);
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - smallest).to_bits();
    let wide = if magnitude >= 0x7C00 << 13 {
        special
    } else if magnitude < 0x0400 << 13 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(sign | wide)
}

/// The quiet bit of an `f32`, if the `f16` whose magnitude was shifted here is a NaN.
#[inline(always)]
fn quiet(magnitude: u32) -> u32 {
    if magnitude > 0x7C00 << 13 { 1 << 22 } else { 0 }
}

/// Narrows to `f16`, to nearest even. A NaN becomes quiet and keeps what payload fits.
#[inline(always)]
pub(super) fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Rebias, and let half of the last place, less one when that is even, carry.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0FFF + odd) >> 13;
    // 0.5's last place is the unit of an f16 subnormal, so this addition rounds to it.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let nan = 0x7E00 | ((magnitude >> 13) & 0x03FF);
    let narrow = if magnitude > 0x7F80_0000 {
        nan
    } else if magnitude >= (127 + 16) << 23 {
        0x7C00
    } else if magnitude < 113 << 23 {
        subnormal
    } else {
        normal
    };
    (sign | narrow) as u16
}

/// Widens a `bf16`; exact. A NaN becomes quiet and keeps the rest of its payload.
#[inline(always)]
pub(super) fn bf16_to_f32(h: u16) -> f32 {
    let bits = u32::from(h) << 16;
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    f32::from_bits(if nan { bits | (1 << 22) } else { bits })
}

/// Narrows to `bf16`, to nearest even. A NaN becomes quiet and keeps what payload fits.
#[inline(always)]
pub(super) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7FFF + odd) >> 16;
    let nan = (bits >> 16) | 0x0040;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Values on, beside and half way between the neighbours that narrowing picks from,
    /// and a walk over all exponents and mantissas.
    fn f32_values() -> impl Iterator<Item = f32> {
        let near = (0..=u16::MAX).flat_map(|h| {
            let exact = f16::from_bits(h).to_f32().to_bits();
            let half_up = exact.wrapping_add(0x1000);
            // Subnormal f16s lie farther apart than 0x2000 in f32 bits.
            let next = f16::from_bits(h.wrapping_add(1)).to_f32();
            let middle = ((f32::from_bits(exact) + next) / 2.0).to_bits();
            let coarse = u32::from(h) << 16;
            [exact, half_up, middle, coarse, coarse | 0x8000]
        });
        let walk = (0..=u32::MAX).step_by(0x9E3B);
        let near = near.flat_map(|x| [x.wrapping_sub(1), x, x.wrapping_add(1)]);
        near.chain(walk).map(f32::from_bits)
    }

    #[test]
    fn widening_is_that_of_half() {
        for h in 0..=u16::MAX {
            let expected = f16::from_bits(h).to_f32_const().to_bits();
            assert_eq!(f16_to_f32(h).to_bits(), expected, "f16 {h:#06x}");
            let expected = bf16::from_bits(h).to_f32_const().to_bits();
            assert_eq!(bf16_to_f32(h).to_bits(), expected, "bf16 {h:#06x}");
        }
    }

    #[test]
    fn narrowing_is_that_of_half() {
        for x in f32_values() {
            let bits = x.to_bits();
            let expected = f16::from_f32_const(x).to_bits();
            assert_eq!(f32_to_f16(x), expected, "f16 of {bits:#010x}");
            let expected = bf16::from_f32_const(x).to_bits();
            assert_eq!(f32_to_bf16(x), expected, "bf16 of {bits:#010x}");
        }
    }

    #[test]
    fn narrowing_by_hand() {
        let cases = [
            (0x0000_0001, 0x0000, 0x0000),
            (0x3300_0000, 0x0000, 0x3300), // half the least f16: to even, zero
            (0x3300_0001, 0x0001, 0x3300),
            (0x387F_E000, 0x0400, 0x3880), // just under the least normal f16, half way up
            (0x3F80_1000, 0x3C00, 0x3F80), // half way: to even, down
            (0x3F80_3000, 0x3C02, 0x3F80), // half way: to even, up
            (0x3F80_8000, 0x3C04, 0x3F80),
            (0x3F81_8000, 0x3C0C, 0x3F82),
            (0x477F_EFFF, 0x7BFF, 0x4780), // the last that stays finite in f16
            (0x477F_F000, 0x7C00, 0x4780),
            (0x7F7F_FFFF, 0x7C00, 0x7F80),
            (0xFF80_0000, 0xFC00, 0xFF80),
            (0x7F80_0001, 0x7E00, 0x7FC0),
        ];
        for (bits, half, brain) in cases {
            let x = f32::from_bits(bits);
            let got = (f32_to_f16(x), f32_to_bf16(x));
            assert_eq!(got, (half, brain), "{bits:#010x}");
        }
    }
}
