//! `cvt`: from one type to another, rounded as written.

use super::floats::{flush, saturate};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Unsigned(u32),
    Signed(u32),
    F16,
    Bf16,
    F32,
    F64,
}

/// To which neighbour a value is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Convert {
    to: Kind,
    from: Kind,
    round: Round,
    /// Round to a whole number, even if the result is a float.
    whole: bool,
    ftz: bool,
    saturate: bool,
}

impl Kind {
    fn new(name: &str) -> Option<Self> {
        Some(match name {
            "u8" => Kind::Unsigned(8),
            "u16" => Kind::Unsigned(16),
            "u32" => Kind::Unsigned(32),
            "u64" => Kind::Unsigned(64),
            "s8" => Kind::Signed(8),
            "s16" => Kind::Signed(16),
            "s32" => Kind::Signed(32),
            "s64" => Kind::Signed(64),
            "f16" => Kind::F16,
            "bf16" => Kind::Bf16,
            "f32" => Kind::F32,
            "f64" => Kind::F64,
            _ => return None,
        })
    }

    fn is_float(self) -> bool {
        !matches!(self, Kind::Unsigned(_) | Kind::Signed(_))
    }

    /// Bits of the fraction.
    fn precision(self) -> u32 {
        match self {
            Kind::Bf16 => 7,
            Kind::F16 => 10,
            Kind::F32 => 23,
            _ => 52,
        }
    }

    fn whole(self, bits: u64) -> i128 {
        match self {
            Kind::Signed(width) => (((bits << (64 - width)) as i64) >> (64 - width)).into(),
            Kind::Unsigned(width) => (bits << (64 - width) >> (64 - width)).into(),
            _ => 0,
        }
    }

    fn limits(self) -> (i128, i128) {
        match self {
            Kind::Signed(width) => (-(1 << (width - 1)), (1 << (width - 1)) - 1),
            Kind::Unsigned(width) => (0, (1 << width) - 1),
            _ => (0, 0),
        }
    }

    fn float(self, bits: u64) -> f64 {
        match self {
            Kind::F16 => half(bits as u16),
            Kind::Bf16 => f32::from_bits((bits as u32) << 16).into(),
            Kind::F32 => f32::from_bits(bits as u32).into(),
            _ => f64::from_bits(bits),
        }
    }
}

impl Convert {
    /// By the parts of the name behind `cvt`. Conversions that can be inexact must name a rounding; the others must not, unless
    /// they round a float to a whole number.
    pub(crate) fn new(parts: &[&str]) -> Option<Self> {
        let [modes @ .., to, from] = parts else { return None };
        let (to, from) = (Kind::new(to)?, Kind::new(from)?);
        let (mut round, mut whole, mut ftz, mut saturate) = (None, false, false, false);
        for mode in modes {
            match *mode {
                "ftz" => ftz = true,
                "sat" => saturate = true,
                _ => {
                    round = Some(match mode.trim_end_matches('i') {
                        "rn" => Round::Nearest,
                        "rz" => Round::Zero,
                        "rm" => Round::Down,
                        "rp" => Round::Up,
                        _ => return None,
                    });
                    whole = mode.ends_with('i');
                }
            }
        }
        let written = round.is_some();
        let must = match (from.is_float(), to.is_float()) {
            (true, true) => to.precision() < from.precision() || from == Kind::F16 && to == Kind::Bf16,
            (false, false) => false,
            _ => true,
        };
        let sound = match (from.is_float(), to.is_float()) {
            (true, false) => whole,
            (false, false) => !written,
            (false, true) => !whole && round == Some(Round::Nearest),
            (true, true) => {
                if must {
                    written && !whole
                } else {
                    !written || whole
                }
            }
        };
        (sound && (!must || written)).then_some(Convert {
            to,
            from,
            round: round.unwrap_or(Round::Nearest),
            whole,
            ftz,
            saturate,
        })
    }

    pub(crate) fn run(&self, bits: u64) -> u64 {
        match (self.from.is_float(), self.to.is_float()) {
            (false, false) => {
                let value = self.from.whole(bits);
                let (least, most) = self.to.limits();
                (if self.saturate { value.clamp(least, most) } else { value }) as u64
            }
            (false, true) => self.float_of_whole(self.from.whole(bits)),
            (true, to_float) => {
                let mut value = self.from.float(bits);
                if self.ftz && self.from == Kind::F32 {
                    value = flush(value as f32).into();
                }
                if self.whole {
                    value = to_whole(value, self.round);
                }
                if to_float { self.float_of(value) } else { self.whole_of(value) }
            }
        }
    }

    fn float_of_whole(self, value: i128) -> u64 {
        match self.to {
            Kind::F64 => (value as f64).to_bits(),
            Kind::F32 => (value as f32).to_bits().into(),
            // Up to 64 bits are rounded to 11 or fewer, by way of a double: what the double has lost must still break ties.
            _ => {
                let double = value as f64;
                let lost = (value - double as i128).signum();
                let odd = double.to_bits() & 1 == 0 && lost != 0;
                let sticky = if odd { nudge(double, lost > 0) } else { double };
                narrow(sticky, self.to, self.round)
            }
        }
    }

    fn float_of(self, value: f64) -> u64 {
        let value = if self.saturate { saturate(value) } else { value };
        match self.to {
            Kind::F64 => value.to_bits(),
            to => {
                let bits = narrow(value, to, self.round);
                if self.ftz && to == Kind::F32 {
                    return flush(f32::from_bits(bits as u32)).to_bits().into();
                }
                bits
            }
        }
    }

    /// A value out of range becomes the nearest limit. A NaN becomes 0, or if the source is `f64` or the target has 64 bits, the highest
    /// bit alone.
    fn whole_of(self, value: f64) -> u64 {
        let (least, most) = self.to.limits();
        let wide = matches!(self.to, Kind::Unsigned(64) | Kind::Signed(64)) || self.from == Kind::F64;
        if value.is_nan() {
            return match self.to {
                Kind::Unsigned(width) | Kind::Signed(width) if wide => 1 << (width - 1),
                _ => 0,
            };
        }
        (value as i128).clamp(least, most) as u64
    }
}

/// The next larger double if `up`, else the next smaller one.
fn nudge(value: f64, up: bool) -> f64 {
    let bits = value.to_bits();
    f64::from_bits(if (value > 0.0) == up { bits + 1 } else { bits - 1 })
}

fn to_whole(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2_f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (fraction + 1024.0) * 2_f64.powi(exponent - 25),
    };
    if bits >> 15 == 0 { size } else { -size }
}

/// A float of fewer bits, rounded once. A NaN becomes the one with all bits set but the sign, as in PTX of 16 and 32 bits.
pub(crate) fn narrow(value: f64, to: Kind, round: Round) -> u64 {
    let fraction = to.precision();
    let exponents = if to == Kind::F16 { 5 } else { 8 };
    let (bits, top) = (value.to_bits(), ((1_u64 << exponents) - 1) << fraction);
    let negative = value.is_sign_negative();
    let sign = u64::from(negative) << (exponents + fraction);
    if value.is_nan() {
        return top | ((1 << fraction) - 1);
    }
    if value.is_infinite() {
        return sign | top;
    }
    let least = 2 - (1 << (exponents - 1));
    // The value is `digits` times 2^(exponent - 52); subnormal doubles are far smaller than any number of the target.
    let biased = (bits >> 52 & 0x7ff) as i32;
    let digits = bits & ((1 << 52) - 1) | u64::from(biased != 0) << 52;
    let exponent = biased.max(1) - 1023;
    let drop = (exponent.max(least) - fraction as i32 - (exponent - 52)) as u32;
    let kept = digits.checked_shr(drop).unwrap_or(0);
    let rest = digits - kept.checked_shl(drop).unwrap_or(0);
    let half = 1_u64.checked_shl(drop - 1).unwrap_or(u64::MAX);
    let up = match round {
        Round::Nearest => rest > half || (rest == half && kept & 1 == 1),
        Round::Zero => false,
        Round::Down => negative && rest > 0,
        Round::Up => !negative && rest > 0,
    };
    // The leading one bit of `kept`, if it is there, adds 1 to the exponent.
    let magnitude = ((exponent.max(least) - least) as u64).wrapping_shl(fraction) + kept + u64::from(up);
    if magnitude < top {
        return sign | magnitude;
    }
    let infinite = match round {
        Round::Nearest => true,
        Round::Zero => false,
        Round::Down => negative,
        Round::Up => !negative,
    };
    sign | if infinite { top } else { top - 1 }
}
