//! Arithmetic of floats, as PTX has it.

use super::Alu;

/// The one NaN that 32-bit arithmetic gives.
pub(crate) const NAN32: u32 = 0x7fff_ffff;

fn get32<const FTZ: bool>(bits: u64) -> f32 {
    let value = f32::from_bits(bits as u32);
    if FTZ { flush(value) } else { value }
}

/// Subnormal numbers become zeros of their sign.
pub(crate) fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0_f32.copysign(value) } else { value }
}

fn put32<const FTZ: bool>(value: f32) -> u64 {
    if value.is_nan() {
        return NAN32.into();
    }
    let value = if FTZ { flush(value) } else { value };
    value.to_bits().into()
}

fn get64(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// Clamps a value to the range from 0 to 1; a NaN becomes 0.
pub(crate) fn saturate(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// The smaller one; of zeros the negative one. A NaN gives way to a number, unless `strict`.
fn least(a: f64, b: f64, strict: bool) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) if strict => a,
        (_, true) if strict => b,
        (true, _) => b,
        (_, true) => a,
        _ if a < b || (a == b && a.is_sign_negative()) => a,
        _ => b,
    }
}

fn greatest(a: f64, b: f64, strict: bool) -> f64 {
    -least(-a, -b, strict)
}

fn arithmetic32<const FTZ: bool>(name: &str, parts: &[&str]) -> Option<Alu> {
    let has = |part: &str| parts.contains(&part);
    // `.sat` clamps the plain result.
    macro_rules! saturating {
        ($run:expr) => {
            if has("sat") {
                |a, b, c| {
                    let run: fn(f32, f32, f32) -> f32 = $run;
                    let value = run(get32::<FTZ>(a), get32::<FTZ>(b), get32::<FTZ>(c));
                    put32::<FTZ>(saturate(value.into()) as f32)
                }
            } else {
                |a, b, c| {
                    let run: fn(f32, f32, f32) -> f32 = $run;
                    put32::<FTZ>(run(get32::<FTZ>(a), get32::<FTZ>(b), get32::<FTZ>(c)))
                }
            }
        };
    }
    Some(match name {
        "add" => saturating!(|a, b, _| a + b),
        "sub" => saturating!(|a, b, _| a - b),
        "mul" => saturating!(|a, b, _| a * b),
        "fma" | "mad" => saturating!(f32::mul_add),
        "div" => |a, b, _| put32::<FTZ>(get32::<FTZ>(a) / get32::<FTZ>(b)),
        "rcp" => |a, _, _| put32::<FTZ>(1.0 / get32::<FTZ>(a)),
        "sqrt" => |a, _, _| put32::<FTZ>(get32::<FTZ>(a).sqrt()),
        "neg" => |a, _, _| get32::<FTZ>(a ^ 0x8000_0000).to_bits().into(),
        "abs" => |a, _, _| get32::<FTZ>(a & 0x7fff_ffff).to_bits().into(),
        "min" if has("NaN") => {
            |a, b, _| put32::<FTZ>(least(get32::<FTZ>(a).into(), get32::<FTZ>(b).into(), true) as f32)
        }
        "min" => |a, b, _| put32::<FTZ>(least(get32::<FTZ>(a).into(), get32::<FTZ>(b).into(), false) as f32),
        "max" if has("NaN") => {
            |a, b, _| put32::<FTZ>(greatest(get32::<FTZ>(a).into(), get32::<FTZ>(b).into(), true) as f32)
        }
        "max" => {
            |a, b, _| put32::<FTZ>(greatest(get32::<FTZ>(a).into(), get32::<FTZ>(b).into(), false) as f32)
        }
        "copysign" => |a, b, _| (a as u32 & 0x8000_0000 | b as u32 & 0x7fff_ffff).into(),
        _ => return None,
    })
}

fn arithmetic64(name: &str) -> Option<Alu> {
    Some(match name {
        "add" => |a, b, _| (get64(a) + get64(b)).to_bits(),
        "sub" => |a, b, _| (get64(a) - get64(b)).to_bits(),
        "mul" => |a, b, _| (get64(a) * get64(b)).to_bits(),
        "fma" | "mad" => |a, b, c| get64(a).mul_add(get64(b), get64(c)).to_bits(),
        "div" => |a, b, _| (get64(a) / get64(b)).to_bits(),
        "rcp" => |a, _, _| (1.0 / get64(a)).to_bits(),
        "sqrt" => |a, _, _| get64(a).sqrt().to_bits(),
        "neg" => |a, _, _| a ^ 1 << 63,
        "abs" => |a, _, _| a & !(1 << 63),
        "min" => |a, b, _| least(get64(a), get64(b), false).to_bits(),
        "max" => |a, b, _| greatest(get64(a), get64(b), false).to_bits(),
        "copysign" => |a, b, _| a & 1 << 63 | b & !(1 << 63),
        _ => return None,
    })
}

/// The arithmetic of floats: `parts` are those of the name, and every one must be known. Roundings other than to the nearest are
/// not known, nor are the approximations, whose results differ from one device to the next.
pub(crate) fn arithmetic(parts: &[&str]) -> Option<Alu> {
    let (name, rest) = parts.split_first()?;
    let (kind, rest) = rest.split_last()?;
    let saturates = matches!(*name, "add" | "sub" | "mul" | "fma" | "mad");
    let rounds = saturates || matches!(*name, "div" | "rcp" | "sqrt");
    let known = rest.iter().all(|part| match *part {
        "rn" => rounds,
        "ftz" => *kind == "f32",
        "sat" => *kind == "f32" && saturates,
        "NaN" => *kind == "f32" && matches!(*name, "min" | "max"),
        _ => false,
    });
    // Without a rounding, the names of these mean approximations, or nothing at all.
    let exact = rest.contains(&"rn") || !matches!(*name, "div" | "rcp" | "sqrt" | "fma" | "mad");
    match *kind {
        _ if !known || !exact => None,
        "f32" if rest.contains(&"ftz") => arithmetic32::<true>(name, rest),
        "f32" => arithmetic32::<false>(name, rest),
        "f64" => arithmetic64(name),
        _ => None,
    }
}

fn compare<const FTZ: bool>(how: &str, wide: bool) -> Option<Alu> {
    macro_rules! test {
        ($run:expr) => {
            if wide {
                |a, b, _| {
                    let run: fn(f64, f64) -> bool = $run;
                    run(get64(a), get64(b)).into()
                }
            } else {
                |a, b, _| {
                    let run: fn(f64, f64) -> bool = $run;
                    run(get32::<FTZ>(a).into(), get32::<FTZ>(b).into()).into()
                }
            }
        };
    }
    fn unordered(a: f64, b: f64) -> bool {
        a.is_nan() || b.is_nan()
    }
    Some(match how {
        "eq" => test!(|a, b| a == b),
        "ne" => test!(|a, b| a != b && !unordered(a, b)),
        "lt" => test!(|a, b| a < b),
        "le" => test!(|a, b| a <= b),
        "gt" => test!(|a, b| a > b),
        "ge" => test!(|a, b| a >= b),
        "equ" => test!(|a, b| a == b || unordered(a, b)),
        "neu" => test!(|a, b| a != b),
        "ltu" => test!(|a, b| a < b || unordered(a, b)),
        "leu" => test!(|a, b| a <= b || unordered(a, b)),
        "gtu" => test!(|a, b| a > b || unordered(a, b)),
        "geu" => test!(|a, b| a >= b || unordered(a, b)),
        "num" => test!(|a, b| !unordered(a, b)),
        "nan" => test!(unordered),
        _ => return None,
    })
}

/// A comparison of floats.
pub(crate) fn comparison(how: &str, kind: &str, ftz: bool) -> Option<Alu> {
    match (kind, ftz) {
        ("f32", true) => compare::<true>(how, false),
        ("f32", false) => compare::<false>(how, false),
        ("f64", false) => compare::<false>(how, true),
        _ => None,
    }
}

/// `testp`.
pub(crate) fn property(what: &str, kind: &str) -> Option<Alu> {
    macro_rules! test {
        ($method:ident) => {
            match kind {
                "f32" => |a, _, _| f32::from_bits(a as u32).$method().into(),
                "f64" => |a, _, _| f64::from_bits(a).$method().into(),
                _ => return None,
            }
        };
    }
    Some(match what {
        "finite" => test!(is_finite),
        "infinite" => test!(is_infinite),
        "notanumber" => test!(is_nan),
        "normal" => test!(is_normal),
        "subnormal" => test!(is_subnormal),
        "number" if kind == "f32" => |a, _, _| (!f32::from_bits(a as u32).is_nan()).into(),
        "number" if kind == "f64" => |a, _, _| (!f64::from_bits(a).is_nan()).into(),
        _ => return None,
    })
}
