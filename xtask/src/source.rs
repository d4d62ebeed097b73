//! Just enough of Rust's grammar for the checks of the house: words without comments and literals, and paths of imports.

/// A word or a sign of a source text, and its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub(crate) text: &'a str,
    pub(crate) line: usize,
}

/// Words, `::` and single signs; without comments, and without what is in string and character literals.
pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let mut out = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        let rest = &bytes[at..];
        if rest.starts_with(b"//") {
            at += rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            at += block_comment(rest);
        } else if let Some(length) = literal(rest) {
            at += length;
        } else if is_word(rest[0]) {
            at += rest.iter().position(|byte| !is_word(*byte)).unwrap_or(rest.len());
            out.push(Token { text: &source[start..at], line });
        } else if rest.starts_with(b"::") {
            at += 2;
            out.push(Token { text: "::", line });
        } else {
            at += 1;
            if rest[0].is_ascii_graphic() {
                out.push(Token { text: &source[start..at], line });
            }
        }
        line += bytes[start..at].iter().filter(|byte| **byte == b'\n').count();
    }
    out
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += 1;
        }
    }
    at
}

/// The length of the string or character literal that starts here, if one does.
fn literal(rest: &[u8]) -> Option<usize> {
    let prefix = rest.iter().take(2).take_while(|byte| matches!(byte, b'b' | b'c' | b'r')).count();
    let raw = rest[..prefix].contains(&b'r');
    let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
    if raw && rest.get(prefix + hashes) == Some(&b'"') {
        let mut end = vec![b'"'];
        end.resize(hashes + 1, b'#');
        let body = prefix + hashes + 1;
        let found = rest[body..].windows(end.len()).position(|window| window == end);
        return Some(found.map_or(rest.len(), |at| body + at + end.len()));
    }
    match rest.get(prefix) {
        Some(b'"') if !raw => {
            let mut at = prefix + 1;
            while at < rest.len() && rest[at] != b'"' {
                at += if rest[at] == b'\\' { 2 } else { 1 };
            }
            Some((at + 1).min(rest.len()))
        }
        // A lifetime has no quote behind its first character.
        Some(b'\'') if prefix == 0 || rest[..prefix] == *b"b" => {
            let body = &rest[prefix + 1..];
            let length = match body.first()? {
                b'\\' => 2 + body.get(2..)?.iter().position(|byte| *byte == b'\'')?,
                first => match first.leading_ones() {
                    0 => 1,
                    wide => wide as usize,
                },
            };
            (body.get(length) == Some(&b'\'')).then_some(prefix + 1 + length + 1)
        }
        _ => None,
    }
}

/// The paths of a tree of imports that starts at `at`: `a::{b, c::d as e}` gives `a::b` and `a::c::d`. Also the place
/// behind it.
pub(crate) fn import_tree<'a>(tokens: &[Token<'a>], mut at: usize) -> (Vec<Vec<&'a str>>, usize) {
    let mut path = Vec::new();
    while let Some(token) = tokens.get(at) {
        match token.text {
            "::" => at += 1,
            "{" => {
                let mut paths = Vec::new();
                at += 1;
                while tokens.get(at).is_some_and(|token| token.text != "}") {
                    let before = at;
                    let (tails, next) = import_tree(tokens, at);
                    paths.extend(tails.into_iter().filter(|tail| !tail.is_empty()).map(|tail| {
                        let mut whole = path.clone();
                        whole.extend(tail);
                        whole
                    }));
                    at = next;
                    // `as name`, commas, and anything that is no import.
                    while tokens.get(at).is_some_and(|token| !matches!(token.text, "," | "}")) {
                        at += 1;
                    }
                    if tokens.get(at).is_some_and(|token| token.text == ",") || at == before {
                        at += 1;
                    }
                }
                return (paths, at + 1);
            }
            text if text.bytes().all(is_word) || text == "*" => {
                path.push(text);
                at += 1;
                if tokens.get(at).is_none_or(|token| token.text != "::") {
                    break;
                }
            }
            _ => break,
        }
    }
    (vec![path], at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<&str> {
        tokens(source).into_iter().map(|token| token.text).collect()
    }

    #[test]
    fn comments_and_literals_are_left_out() {
        assert_eq!(words("a // unsafe\nb /* unsafe /* x */ */ c"), ["a", "b", "c"]);
        assert_eq!(
            words(r##"x("unsafe \" y", r#"un"safe"#, b"z", c"z") r"##),
            ["x", "(", ",", ",", ",", ")", "r"]
        );
        assert_eq!(words(r"['a', '\'', '\u{1f}', 'é', b'x']"), ["[", ",", ",", ",", ",", "]"]);
        assert_eq!(words("&'a str, 'b: loop"), ["&", "'", "a", "str", ",", "'", "b", ":", "loop"]);
        assert_eq!(tokens("\"\n\n\" x")[0], Token { text: "x", line: 3 });
    }

    #[test]
    fn trees_of_imports_are_flattened() {
        let tokens = tokens("use crate::{mem::{Buf, self}, plan::Step as S, error::*, }; x");
        let (paths, next) = import_tree(&tokens, 1);
        let paths: Vec<String> = paths.into_iter().map(|path| path.join("::")).collect();
        assert_eq!(paths, ["crate::mem::Buf", "crate::mem::self", "crate::plan::Step", "crate::error::*"]);
        assert_eq!(tokens[next].text, ";");
    }
}
