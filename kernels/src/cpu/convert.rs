//! Converts the small floats to `f32` and back, without branches, so that a loop over them
//! vectorises. For `f16` and `bf16` the bits are those that the `half` crate gives.

/// Widens an `f16`; exact. A NaN becomes quiet and keeps the rest of its payload.
#[inline(always)]
pub(super) const fn f16_to_f32(h: u16) -> f32 {
    let h = h as u32;
    let sign = (h & 0x8000) << 16;
    let magnitude = (h & 0x7FFF) << 13;
    // Rebias the exponent; for infinity and NaN once more, up to the top exponent.
    let normal = magnitude + ((127 - 15) << 23);
    let special = (normal + ((128 - 16) << 23)) | quiet(magnitude);
    // For a subnormal, put the mantissa under the exponent of the smallest normal number,
    // then subtract that number.
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

/// The quiet bit of an `f32` if the `f16` is a NaN whose shifted magnitude this is; else 0.
#[inline(always)]
const fn quiet(magnitude: u32) -> u32 {
    if magnitude > 0x7C00 << 13 { 1 << 22 } else { 0 }
}

/// Narrows to `f16`, to nearest even. A NaN becomes quiet and keeps what payload fits.
#[inline(always)]
pub(super) fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Rebias, and round: add half of the last place, less one if the last place is even, so
    // that the carry rounds to nearest even.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0FFF + odd) >> 13;
    // The last place of 0.5 in `f32` is the unit of `f16` subnormals, so adding 0.5 rounds
    // to that unit.
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

/// Widens an E4M3; exact. A NaN keeps its sign.
#[inline(always)]
pub(crate) const fn e4m3_to_f32(h: u8) -> f32 {
    let h = h as u32;
    let sign = (h & 0x80) << 24;
    let magnitude = (h & 0x7F) << 20;
    // As for `f16`, except that only the greatest magnitude is special: it is NaN.
    let normal = magnitude + ((127 - 7) << 23);
    let smallest = f32::from_bits(121 << 23);
    let subnormal = (f32::from_bits(magnitude + (121 << 23)) - smallest).to_bits();
    let wide = if magnitude == 0x7F << 20 {
        0x7FC0_0000
    } else if magnitude < 0x08 << 20 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(sign | wide)
}

/// The bits of 464: half way between the largest E4M3, 448, and what would come next, 480;
/// it rounds to the even one, 448. All that is greater, and infinities and NaN, become NaN.
pub(super) const E4M3_LAST: u32 = 0x43E8_0000;

/// Narrows to E4M3, to nearest even; out of range is NaN. The sign is kept.
#[inline(always)]
pub(crate) const fn f32_to_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7FFF_FFFF;
    let odd = (magnitude >> 20) & 1;
    let normal = magnitude.wrapping_sub((127 - 7) << 23).wrapping_add(0x0007_FFFF + odd) >> 20;
    // The last place of 2^14 in `f32` is the unit of E4M3 subnormals.
    let unit = f32::from_bits(141 << 23);
    let subnormal = (f32::from_bits(magnitude) + unit).to_bits().wrapping_sub(141 << 23);
    let narrow = if magnitude > E4M3_LAST {
        0x7F
    } else if magnitude < 121 << 23 {
        subnormal
    } else {
        normal
    };
    (sign | narrow) as u8
}

/// Widens an E5M2; exact. A NaN becomes quiet and keeps the rest of its payload.
#[inline(always)]
pub(crate) const fn e5m2_to_f32(h: u8) -> f32 {
    f16_to_f32((h as u16) << 8)
}

/// Narrows to E5M2, to nearest even. A NaN becomes quiet and keeps what payload fits.
#[inline(always)]
pub(crate) const fn f32_to_e5m2(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7FFF_FFFF;
    let odd = (magnitude >> 21) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x000F_FFFF + odd) >> 21;
    // The last place of 2^7 in `f32` is the unit of E5M2 subnormals.
    let unit = f32::from_bits(134 << 23);
    let subnormal = (f32::from_bits(magnitude) + unit).to_bits().wrapping_sub(134 << 23);
    let nan = 0x7E | ((magnitude >> 21) & 3);
    let narrow = if magnitude > 0x7F80_0000 {
        nan
    } else if magnitude >= (127 + 16) << 23 {
        0x7C
    } else if magnitude < 113 << 23 {
        subnormal
    } else {
        normal
    };
    (sign | narrow) as u8
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// The values that narrowing picks from, the points half way between two of them, the
    /// `f32`s next to all these, and samples of all `f32`s.
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
            (0x387F_E000, 0x0400, 0x3880), // half way to the least normal f16: to even, up
            (0x3F80_1000, 0x3C00, 0x3F80), // half way: to even, down
            (0x3F80_3000, 0x3C02, 0x3F80), // half way: to even, up
            (0x3F80_8000, 0x3C04, 0x3F80),
            (0x3F81_8000, 0x3C0C, 0x3F82),
            (0x477F_EFFF, 0x7BFF, 0x4780), // the greatest that stays finite in f16
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

    /// The value of an 8-bit float, from its definition.
    fn value(h: u8, mantissa: i32, bias: i32) -> f64 {
        let sign = if h & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, digits) = (i32::from(h & 0x7F) >> mantissa, f64::from(h & ((1 << mantissa) - 1)));
        let one = if exponent == 0 { 0.0 } else { 2f64.powi(mantissa) };
        sign * (one + digits) * 2f64.powi(exponent.max(1) - bias - mantissa)
    }

    /// The magnitude nearest to `x`; of two that are equally near, the even one. `last` is the
    /// first magnitude that is no finite number.
    fn nearest(x: f64, values: &[f64], last: u8) -> u8 {
        let above = values[..usize::from(last)].partition_point(|&v| v < x) as u8;
        let Some(below) = above.checked_sub(1) else { return 0 };
        let middle = (values[usize::from(below)] + values[usize::from(above)]) / 2.0;
        if x < middle || x == middle && below % 2 == 0 { below } else { above }
    }

    /// Every E4M3 and E5M2, all points half way between two, the `f32`s next to all these, and
    /// every `step`th `f32`.
    fn f32_values_for_eights(step: usize) -> impl Iterator<Item = f32> {
        let middles = [(3, 7), (2, 15)].into_iter().flat_map(|(mantissa, bias)| {
            (0..=u8::MAX).flat_map(move |h| {
                let (this, next) = (value(h, mantissa, bias), value(h.wrapping_add(1), mantissa, bias));
                [this as f32, ((this + next) / 2.0) as f32]
            })
        });
        let near = middles.map(f32::to_bits).flat_map(|x| [x.wrapping_sub(1), x, x.wrapping_add(1)]);
        near.chain((0..=u32::MAX).step_by(step)).map(f32::from_bits)
    }

    #[test]
    fn eights_widen_to_their_value() {
        for h in 0..=u8::MAX {
            let (four, five) = (e4m3_to_f32(h), e5m2_to_f32(h));
            let negative = h & 0x80 != 0;
            assert_eq!((four.is_sign_negative(), five.is_sign_negative()), (negative, negative), "{h:#04x}");
            match h & 0x7F {
                0x7F => assert!(four.is_nan()),
                _ => assert_eq!(f64::from(four), value(h, 3, 7), "{h:#04x}"),
            }
            match h & 0x7F {
                0x7D.. => assert!(five.is_nan()),
                0x7C => assert!(five.is_infinite()),
                _ => assert_eq!(f64::from(five), value(h, 2, 15), "{h:#04x}"),
            }
            // Narrowing gives the bits back, except that a NaN becomes quiet.
            assert_eq!(f32_to_e4m3(four), h);
            assert_eq!(f32_to_e5m2(five), if h & 0x7F == 0x7D { h | 0x02 } else { h });
        }
    }

    fn eights_narrow_to_the_nearest(step: usize) {
        let e4m3: Vec<f64> = (0..=0x7F).map(|h| value(h, 3, 7)).collect();
        let e5m2: Vec<f64> = (0..=0x7F).map(|h| value(h, 2, 15)).collect();
        for x in f32_values_for_eights(step) {
            let sign = if x.is_sign_negative() { 0x80 } else { 0 };
            let magnitude = f64::from(x.abs());
            let (four, five) = match x.is_nan() {
                true => (0x7F, 0x7E | (x.to_bits() >> 21 & 3) as u8),
                // 0x7F and 0x7C are where 480 and 65,536 would be.
                false => (nearest(magnitude, &e4m3, 0x7F), nearest(magnitude, &e5m2, 0x7C)),
            };
            assert_eq!(f32_to_e4m3(x), sign | four, "e4m3 of {x:e}, {:#010x}", x.to_bits());
            assert_eq!(f32_to_e5m2(x), sign | five, "e5m2 of {x:e}, {:#010x}", x.to_bits());
        }
    }

    #[test]
    fn eights_narrow_to_the_nearest_by_samples() {
        eights_narrow_to_the_nearest(0x0FFD);
    }

    #[test]
    #[ignore = "every f32: minutes"]
    fn eights_narrow_to_the_nearest_always() {
        eights_narrow_to_the_nearest(1);
    }

    #[test]
    fn narrowing_eights_by_hand() {
        let (min4, min5) = (2f32.powi(-9), 2f32.powi(-16));
        let cases = [
            (1.0, 0x38, 0x3C),
            (-1.0, 0xB8, 0xBC),
            (0.0, 0x00, 0x00),
            (-0.0, 0x80, 0x80),
            (1.0625, 0x38, 0x3C), // half way in e4m3: to even, down
            (1.1875, 0x3A, 0x3D), // half way in e4m3: to even, up
            (1.125, 0x39, 0x3C),  // half way in e5m2: to even, down
            (1.375, 0x3B, 0x3E),  // half way in e5m2: to even, up
            (min4, 0x01, 0x18),
            (min4 / 2.0, 0x00, 0x14), // half the least e4m3: to even, zero
            (min4 * 0.5001, 0x01, 0x14),
            (min4 * 1.5, 0x02, 0x1A),
            (min5 / 2.0, 0x00, 0x00),
            (-min5 * 0.5001, 0x80, 0x81),
            (448.0, 0x7E, 0x5F),
            (464.0, 0x7E, 0x5F), // the greatest that stays a number in e4m3
            (464.00003, 0x7F, 0x5F),
            (-465.0, 0xFF, 0xDF),
            (57_344.0, 0x7F, 0x7B),
            (61_439.996, 0x7F, 0x7B), // the greatest that stays finite in e5m2
            (61_440.0, 0x7F, 0x7C),
            (-1e30, 0xFF, 0xFC),
            (f32::INFINITY, 0x7F, 0x7C),
            (f32::NEG_INFINITY, 0xFF, 0xFC),
            (f32::from_bits(0x7FC0_0000), 0x7F, 0x7E),
            (f32::from_bits(0xFF80_0001), 0xFF, 0xFE),
        ];
        for (x, four, five) in cases {
            assert_eq!((f32_to_e4m3(x), f32_to_e5m2(x)), (four, five), "{x:e}");
        }
    }
}
