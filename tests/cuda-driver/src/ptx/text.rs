//! Words of a PTX text.

use super::Refused;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word<'a> {
    pub(crate) text: &'a str,
    pub(crate) line: usize,
}

/// Names with their dots, and single signs; without comments.
pub(crate) fn words(source: &str) -> Result<Vec<Word<'_>>, Refused> {
    let bytes = source.as_bytes();
    let (mut out, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let start = at;
        let rest = &bytes[at..];
        let one = rest[0];
        if rest.starts_with(b"//") {
            at += rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            let end = rest.windows(2).skip(2).position(|pair| pair == b"*/");
            at += end.ok_or_else(|| Refused::new(line, "a comment without an end"))? + 4;
        } else if one == b'"' {
            let end = rest[1..].iter().position(|byte| *byte == b'"');
            at += end.ok_or_else(|| Refused::new(line, "a text without an end"))? + 2;
            out.push(Word { text: "\"", line });
        } else if is_name(one) {
            at += rest.iter().position(|byte| !is_name(*byte)).unwrap_or(rest.len());
            // `L1::no_allocate` is part of its name.
            while bytes[at..].starts_with(b"::") {
                at += 2;
                at += bytes[at..].iter().position(|byte| !is_name(*byte)).unwrap_or(bytes.len() - at);
            }
            out.push(Word { text: &source[start..at], line });
        } else if one.is_ascii_whitespace() {
            at += 1;
        } else if one.is_ascii_graphic() {
            at += 1;
            out.push(Word { text: &source[start..at], line });
        } else {
            return Err(Refused::new(line, format!("a byte that is no text: {one:#x}")));
        }
        line += bytes[start..at].iter().filter(|byte| **byte == b'\n').count();
    }
    Ok(out)
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$' | b'%')
}

/// A whole number, as PTX writes it, in 64 bits.
pub(crate) fn integer(text: &str) -> Option<u64> {
    let text = text.strip_suffix('U').unwrap_or(text);
    if let Some(digits) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        return u64::from_str_radix(digits, 16).ok();
    }
    if let Some(digits) = text.strip_prefix("0b") {
        return u64::from_str_radix(digits, 2).ok();
    }
    text.parse().ok()
}

/// A float's bits, as PTX writes them: `0f` and `0d`; or with a point, as a value.
pub(crate) fn float(text: &str, wide: bool) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0f").or(text.strip_prefix("0F")).filter(|it| it.len() == 8) {
        let bits = u32::from_str_radix(digits, 16).ok()?;
        return Some(if wide { f64::from(f32::from_bits(bits)).to_bits() } else { bits.into() });
    }
    if let Some(digits) = text.strip_prefix("0d").or(text.strip_prefix("0D")).filter(|it| it.len() == 16) {
        let bits = u64::from_str_radix(digits, 16).ok()?;
        return Some(if wide { bits } else { (f64::from_bits(bits) as f32).to_bits().into() });
    }
    let starts = text.starts_with(|digit: char| digit.is_ascii_digit());
    let value: f64 = (starts && text.contains('.')).then(|| text.parse().ok())??;
    Some(if wide { value.to_bits() } else { (value as f32).to_bits().into() })
}
