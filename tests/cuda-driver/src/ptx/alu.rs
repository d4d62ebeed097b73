//! Functions of whole numbers and bits, found by the parts of their names.
#![allow(clippy::unnecessary_cast, reason = "one text for all types: for one of them the cast is none")]

use super::{Alu, floats};

/// Makes a function for each of the types that are named; `T` is that type in it.
macro_rules! for_type {
    ($kind:expr, $run:expr; $($names:pat => $type:ty),*) => {
        match $kind {
            $($names => {
                #[allow(dead_code, reason = "some functions do not need its name")]
                type T = $type;
                Some($run as Alu)
            })*
            _ => None,
        }
    };
}

macro_rules! numbers {
    ($kind:expr, $run:expr) => {
        for_type!($kind, $run; "u16" => u16, "s16" => i16, "u32" => u32, "s32" => i32, "u64" => u64, "s64" => i64)
    };
}

macro_rules! bits {
    ($kind:expr, $run:expr) => {
        for_type!($kind, $run; "b16" => u16, "b32" => u32, "b64" => u64)
    };
}

/// The function of an instruction's name, split at its dots: for instructions that compute one value from up to three.
pub(crate) fn function(parts: &[&str]) -> Option<Alu> {
    let (name, rest) = parts.split_first()?;
    let (kind, rest) = rest.split_last()?;
    if matches!(*kind, "f32" | "f64") && *name != "mov" && *name != "selp" {
        return if *name == "testp" && rest.len() == 1 {
            floats::property(rest[0], kind)
        } else {
            floats::arithmetic(parts)
        };
    }
    match (*name, rest) {
        ("mul" | "mad", [half]) => return product(name, half, kind),
        ("shf", [direction, mode]) => return funnel(direction, mode, kind),
        (_, []) => {}
        _ => return None,
    }
    match *name {
        "add" => numbers!(*kind, |a, b, _| (a as T).wrapping_add(b as T) as u64),
        "sub" => numbers!(*kind, |a, b, _| (a as T).wrapping_sub(b as T) as u64),
        // As the hardware: all ones for a division by zero, and no trap.
        "div" => numbers!(*kind, |a, b, _| match b as T {
            0 => u64::MAX,
            b => (a as T).wrapping_div(b) as u64,
        }),
        "rem" => numbers!(*kind, |a, b, _| match b as T {
            0 => a,
            b => (a as T).wrapping_rem(b) as u64,
        }),
        "min" => numbers!(*kind, |a, b, _| (a as T).min(b as T) as u64),
        "max" => numbers!(*kind, |a, b, _| (a as T).max(b as T) as u64),
        "neg" => {
            for_type!(*kind, |a, _, _| (a as T).wrapping_neg() as u64; "s16" => i16, "s32" => i32, "s64" => i64)
        }
        "abs" => {
            for_type!(*kind, |a, _, _| (a as T).wrapping_abs() as u64; "s16" => i16, "s32" => i32, "s64" => i64)
        }
        "and" | "or" | "xor" if *kind == "pred" => logic(name),
        "and" | "or" | "xor" => bits!(*kind, |_, _, _| 0 as T as u64).and(logic(name)),
        "not" if *kind == "pred" => Some(|a, _, _| !a & 1),
        "not" => bits!(*kind, |a, _, _| !(a as T) as u64),
        "cnot" => bits!(*kind, |a, _, _| (a as T == 0).into()),
        "shl" => bits!(*kind, |a, b, _| (a as T).checked_shl(b as u32).unwrap_or(0) as u64),
        "shr" => shift_right(kind),
        "popc" => for_type!(*kind, |a, _, _| (a as T).count_ones().into(); "b32" => u32, "b64" => u64),
        "clz" => for_type!(*kind, |a, _, _| (a as T).leading_zeros().into(); "b32" => u32, "b64" => u64),
        "brev" => for_type!(*kind, |a, _, _| (a as T).reverse_bits() as u64; "b32" => u32, "b64" => u64),
        "bfe" => extract(kind),
        "prmt" => (*kind == "b32").then_some(permute),
        "selp" => is_word(kind).then_some(|a, b, c| if c & 1 != 0 { a } else { b }),
        "mov" => (is_word(kind) || *kind == "pred").then_some(|a, _, _| a),
        _ => None,
    }
}

fn is_word(kind: &str) -> bool {
    matches!(kind, "b16" | "b32" | "b64" | "u16" | "u32" | "u64" | "s16" | "s32" | "s64" | "f32" | "f64")
}

fn logic(name: &str) -> Option<Alu> {
    Some(match name {
        "and" => |a, b, _| a & b,
        "or" => |a, b, _| a | b,
        "xor" => |a, b, _| a ^ b,
        _ => return None,
    })
}

/// A shift by the width of the type or more leaves zeros, or of a signed type copies of the sign.
fn shift_right(kind: &str) -> Option<Alu> {
    match kind {
        "s16" => Some(|a, b, _| (a as i16 >> (b as u32).min(15)) as u64),
        "s32" => Some(|a, b, _| (a as i32 >> (b as u32).min(31)) as u64),
        "s64" => Some(|a, b, _| (a as i64 >> (b as u32).min(63)) as u64),
        _ => for_type!(kind, |a, b, _| (a as T).checked_shr(b as u32).unwrap_or(0) as u64;
            "u16" | "b16" => u16, "u32" | "b32" => u32, "u64" | "b64" => u64),
    }
}

fn product(name: &str, half: &str, kind: &str) -> Option<Alu> {
    match (name, half) {
        ("mul", "lo") => numbers!(kind, |a, b, _| (a as T).wrapping_mul(b as T) as u64),
        ("mad", "lo") => numbers!(kind, |a, b, c| (a as T).wrapping_mul(b as T).wrapping_add(c as T) as u64),
        ("mul", "hi") => {
            numbers!(kind, |a, b, _| ((i128::from(a as T).wrapping_mul(i128::from(b as T))) >> T::BITS)
                as u64)
        }
        ("mad", "hi") => {
            numbers!(
                kind,
                |a, b, c| (((i128::from(a as T).wrapping_mul(i128::from(b as T))) >> T::BITS) as T)
                    .wrapping_add(c as T) as u64
            )
        }
        ("mul", "wide") => {
            for_type!(kind, |a, b, _| (i64::from(a as T).wrapping_mul(i64::from(b as T))) as u64;
            "u16" => u16, "s16" => i16, "u32" => u32, "s32" => i32)
        }
        ("mad", "wide") => {
            for_type!(kind, |a, b, c| (i64::from(a as T).wrapping_mul(i64::from(b as T))).wrapping_add(c as i64) as u64;
                "u16" => u16, "s16" => i16, "u32" => u32, "s32" => i32)
        }
        _ => None,
    }
}

fn funnel(direction: &str, mode: &str, kind: &str) -> Option<Alu> {
    fn pair(a: u64, b: u64) -> u64 {
        u64::from(b as u32) << 32 | u64::from(a as u32)
    }
    match (direction, mode, kind) {
        ("l", "wrap", "b32") => Some(|a, b, c| pair(a, b) << (c & 31) >> 32),
        ("l", "clamp", "b32") => Some(|a, b, c| pair(a, b) << (c as u32).min(32) >> 32),
        ("r", "wrap", "b32") => Some(|a, b, c| u64::from((pair(a, b) >> (c & 31)) as u32)),
        ("r", "clamp", "b32") => Some(|a, b, c| u64::from((pair(a, b) >> (c as u32).min(32)) as u32)),
        _ => None,
    }
}

/// `bfe`: takes `length` bits from bit `from` on; if signed, the highest of them fills the bits above.
fn extract(kind: &str) -> Option<Alu> {
    fn field(value: u64, width: u32, from: u64, length: u64, signed: bool) -> u64 {
        let (from, length) = ((from & 255) as u32, (length & 255) as u32);
        if length == 0 {
            return 0;
        }
        let highest = (from + length - 1).min(width - 1);
        let sign = signed && value >> highest & 1 != 0;
        let length = length.min(width.saturating_sub(from)).min(64);
        let mask = if length == 64 { u64::MAX } else { (1 << length) - 1 };
        let low = value.checked_shr(from).unwrap_or(0) & mask;
        if sign { low | !mask } else { low }
    }
    Some(match kind {
        "u32" => |a, b, c| field(u64::from(a as u32), 32, b, c, false),
        "s32" => |a, b, c| field(u64::from(a as u32), 32, b, c, true),
        "u64" => |a, b, c| field(a, 64, b, c, false),
        "s64" => |a, b, c| field(a, 64, b, c, true),
        _ => return None,
    })
}

/// `prmt`: four bytes, each chosen from eight; if the fourth bit of a choice is set, copies of that byte's sign bit instead.
fn permute(a: u64, b: u64, choices: u64) -> u64 {
    let bytes = (u64::from(b as u32) << 32 | u64::from(a as u32)).to_le_bytes();
    let chosen = [0, 4, 8, 12].map(|shift| {
        let choice = (choices >> shift) as usize;
        let byte = bytes[choice & 7];
        if choice & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    });
    u32::from_le_bytes(chosen).into()
}

/// `lop3`: each bit of the table is the result for one combination of three bits.
pub(crate) fn lookup(a: u64, b: u64, c: u64, table: u8) -> u64 {
    (0..8).filter(|index| table >> index & 1 != 0).fold(0, |result, index| {
        let pick = |value: u64, bit: u8| if index & bit != 0 { value } else { !value };
        result | pick(a, 4) & pick(b, 2) & pick(c, 1)
    })
}

/// What `setp` compares with: how, and values of what type.
pub(crate) fn comparison(how: &str, kind: &str, ftz: bool) -> Option<Alu> {
    if matches!(kind, "f32" | "f64") {
        return floats::comparison(how, kind, ftz);
    }
    macro_rules! any {
        ($run:expr) => {
            for_type!(kind, $run; "u16" | "b16" => u16, "s16" => i16, "u32" | "b32" => u32, "s32" => i32,
                "u64" | "b64" => u64, "s64" => i64)
        };
    }
    match how {
        _ if ftz => None,
        "eq" => any!(|a, b, _| (a as T == b as T).into()),
        "ne" => any!(|a, b, _| (a as T != b as T).into()),
        _ if kind.starts_with('b') => None,
        "lt" => numbers!(kind, |a, b, _| ((a as T) < b as T).into()),
        "le" => numbers!(kind, |a, b, _| (a as T <= b as T).into()),
        "gt" => numbers!(kind, |a, b, _| (a as T > b as T).into()),
        "ge" => numbers!(kind, |a, b, _| (a as T >= b as T).into()),
        "lo" => {
            for_type!(kind, |a, b, _| ((a as T) < b as T).into(); "u16" => u16, "u32" => u32, "u64" => u64)
        }
        "ls" => {
            for_type!(kind, |a, b, _| (a as T <= b as T).into(); "u16" => u16, "u32" => u32, "u64" => u64)
        }
        "hi" => for_type!(kind, |a, b, _| (a as T > b as T).into(); "u16" => u16, "u32" => u32, "u64" => u64),
        "hs" => {
            for_type!(kind, |a, b, _| (a as T >= b as T).into(); "u16" => u16, "u32" => u32, "u64" => u64)
        }
        _ => None,
    }
}

/// How `setp` combines a comparison with another predicate.
pub(crate) fn combination(name: &str) -> Option<Alu> {
    logic(name)
}

/// What a narrow value becomes in a wider register.
pub(crate) fn extension(kind: &str) -> Option<Alu> {
    for_type!(kind, |a, _, _| a as T as u64; "u8" | "b8" => u8, "s8" => i8, "u16" | "b16" => u16, "s16" => i16,
        "u32" | "b32" | "f32" => u32, "s32" => i32, "u64" | "b64" | "f64" | "s64" => u64)
}

/// The bytes of a type.
pub(crate) fn size(kind: &str) -> Option<usize> {
    Some(match kind {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}
