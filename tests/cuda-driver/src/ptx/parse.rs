//! From the text of a module to steps.

use super::body::Body;
use super::text::{Word, float, integer, words};
use super::{Inst, Refused, Slot, alu};

/// The newest PTX version that a driver of our version can read.
const NEWEST: (u32, u32) = (8, 7);

#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) version: (u32, u32),
    /// The number of `.target sm_…`.
    pub(crate) target: u32,
    pub(crate) entries: Vec<Entry>,
    pub(crate) globals: Vec<Global>,
}

/// A variable of the module.
#[derive(Debug)]
pub(crate) struct Global {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// What a slot holds before a thread starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Constant {
    Value(u64),
    /// The address of a variable, by its index in `Module::globals`.
    Global(usize),
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Offset and size of each parameter.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) param_bytes: usize,
    pub(crate) steps: Vec<Inst>,
    pub(crate) slots: usize,
    pub(crate) constants: Vec<(Slot, Constant)>,
    pub(crate) local: usize,
}

pub(super) type Parsed<T> = Result<T, Refused>;

/// Reads a module.
pub(crate) fn parse(source: &str) -> Parsed<Module> {
    let words = words(source)?;
    let mut cursor = Cursor { words: &words, at: 0 };
    let mut module = Module::default();
    let mut variables = Vec::new();
    while let Some(word) = cursor.next() {
        match word.text {
            ".version" => {
                let text = cursor.name()?;
                let pair = text.text.split_once('.').and_then(|(a, b)| a.parse().ok().zip(b.parse().ok()));
                module.version = pair.ok_or_else(|| Refused::new(text.line, "a version that is none"))?;
                if module.version > NEWEST {
                    return Err(Refused::new(text.line, format!(".version {}: too new", text.text)));
                }
            }
            ".target" => {
                let text = cursor.name()?;
                let digits = text.text.strip_prefix("sm_").map(|it| it.trim_end_matches(char::is_alphabetic));
                let number = digits.and_then(|it| it.parse().ok());
                module.target = number.ok_or_else(|| Refused::new(text.line, "a target that is none"))?;
                while cursor.take(",") {
                    cursor.name()?;
                }
            }
            ".address_size" => {
                let text = cursor.name()?;
                if text.text != "64" {
                    return Err(Refused::new(text.line, "addresses of other than 64 bits"));
                }
            }
            ".visible" | ".weak" | ".extern" => {}
            ".entry" => {
                let entry = Body::entry(&mut cursor, &variables)?;
                module.entries.push(entry);
            }
            ".global" | ".const" => {
                let (name, _, bytes) = cursor.variable()?;
                variables.push(name);
                module.globals.push(Global { name: name.into(), bytes });
            }
            ".file" | ".loc" => cursor.skip_line(word.line),
            other => return Err(Refused::new(word.line, format!("`{other}` is not understood"))),
        }
    }
    if module.version == (0, 0) || module.target == 0 {
        return Err(Refused::new(1, "no .version, or no .target"));
    }
    Ok(module)
}

pub(super) struct Cursor<'a> {
    words: &'a [Word<'a>],
    pub(super) at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn peek(&self) -> Option<Word<'a>> {
        self.words.get(self.at).copied()
    }

    pub(super) fn next(&mut self) -> Option<Word<'a>> {
        let word = self.peek()?;
        self.at += 1;
        Some(word)
    }

    fn line(&self) -> usize {
        self.peek().or(self.words.last().copied()).map_or(1, |word| word.line)
    }

    pub(super) fn name(&mut self) -> Parsed<Word<'a>> {
        self.next().ok_or_else(|| Refused::new(self.line(), "the text ends here"))
    }

    pub(super) fn take(&mut self, text: &str) -> bool {
        let there = self.peek().is_some_and(|word| word.text == text);
        self.at += usize::from(there);
        there
    }

    pub(super) fn expect(&mut self, text: &str) -> Parsed<()> {
        if self.take(text) {
            return Ok(());
        }
        let found = self.peek().map_or("the end", |word| word.text);
        Err(Refused::new(self.line(), format!("`{text}` expected, `{found}` found")))
    }

    pub(super) fn skip_line(&mut self, line: usize) {
        while self.peek().is_some_and(|word| word.line == line) {
            self.at += 1;
        }
    }

    pub(super) fn number(&mut self) -> Parsed<usize> {
        let word = self.name()?;
        let number = integer(word.text).and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| Refused::new(word.line, format!("a number expected, `{}` found", word.text)))
    }

    /// `.align 8 .b8 name[12] = {1, 2}`, with or without a `;`: the name, the alignment, the bytes.
    pub(super) fn variable(&mut self) -> Parsed<(&'a str, usize, Vec<u8>)> {
        const MOST: usize = 1 << 24;
        let mut align = 1;
        if self.take(".align") {
            align = self.number()?;
        }
        let kind = self.name()?;
        let size = kind.text.strip_prefix('.').and_then(alu::size);
        let size = size.ok_or_else(|| Refused::new(kind.line, format!("`{}` is no type", kind.text)))?;
        // What a pointer parameter points to does not matter here.
        if self.take(".ptr") {
            while self.peek().is_some_and(|word| word.text.starts_with('.')) {
                self.at += 1;
                if self.words[self.at - 1].text == ".align" {
                    self.number()?;
                }
            }
        }
        let name = self.name()?;
        let mut count = 1;
        while self.take("[") {
            count = self.number()?.saturating_mul(count);
            self.expect("]")?;
        }
        if count.saturating_mul(size) > MOST || !align.is_power_of_two() || align > 4096 {
            return Err(Refused::new(name.line, "a variable too large, or badly aligned"));
        }
        let mut bytes = Vec::new();
        if self.take("=") {
            let braces = self.take("{");
            loop {
                let minus = self.take("-");
                let word = self.name()?;
                let value = integer(word.text).or(float(word.text, size == 8));
                let value = value.ok_or_else(|| Refused::new(word.line, "no value"))?;
                let value = if minus { value.wrapping_neg() } else { value };
                bytes.extend(&value.to_le_bytes()[..size]);
                if !braces || !self.take(",") {
                    break;
                }
            }
            if braces {
                self.expect("}")?;
            }
        }
        if bytes.len() > count * size {
            return Err(Refused::new(name.line, "more values than room"));
        }
        bytes.resize(count * size, 0);
        self.take(";");
        Ok((name.text, align.max(size), bytes))
    }
}
