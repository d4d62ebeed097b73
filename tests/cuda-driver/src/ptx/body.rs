//! The body of a kernel: its registers, labels and instructions.

use std::collections::BTreeMap;

use super::convert::Convert;
use super::parse::{Constant, Cursor, Entry, Parsed};
use super::text::{Word, float, integer};
use super::{
    Alu, FIRST_FREE, Inst, LANE, LOCAL, MOST_LOCAL, ONE, Refused, SPECIAL, Slot, Space, Step, ZERO, alu,
};

/// What a name stands for.
#[derive(Clone, Copy)]
enum Symbol {
    Register(Slot),
    /// An offset: of a parameter, or of local memory.
    Offset(u64),
    Global(usize),
}

/// A kernel while it is read.
pub(super) struct Body<'a> {
    symbols: BTreeMap<&'a str, Symbol>,
    /// Registers that were declared together: by their prefix, the first one's slot and how many there are.
    ranges: BTreeMap<&'a str, (Slot, usize)>,
    labels: BTreeMap<&'a str, u32>,
    /// All branches, until all labels are known: the step, and the label with its line.
    open: Vec<(usize, Word<'a>)>,
    constants: BTreeMap<u64, Slot>,
    global_slots: BTreeMap<usize, Slot>,
    entry: Entry,
}

/// The words of one operand; operands are split at their commas.
type Operand<'a> = Vec<Word<'a>>;

impl<'a> Body<'a> {
    pub(super) fn entry(cursor: &mut Cursor<'a>, globals: &[&'a str]) -> Parsed<Entry> {
        let name = cursor.name()?;
        let entry = Entry {
            name: name.text.into(),
            params: Vec::new(),
            param_bytes: 0,
            steps: Vec::new(),
            slots: FIRST_FREE as usize,
            constants: vec![(ONE, Constant::Value(1)), (ZERO, Constant::Value(0))],
            local: 0,
        };
        let mut body = Body {
            symbols: BTreeMap::new(),
            ranges: BTreeMap::new(),
            labels: BTreeMap::new(),
            open: Vec::new(),
            constants: BTreeMap::from([(1, ONE), (0, ZERO)]),
            global_slots: BTreeMap::new(),
            entry,
        };
        body.special();
        for (index, global) in globals.iter().enumerate() {
            body.symbols.insert(global, Symbol::Global(index));
        }
        if cursor.take("(") {
            while !cursor.take(")") {
                cursor.expect(".param")?;
                let (name, align, bytes) = cursor.variable()?;
                let offset = body.entry.param_bytes.next_multiple_of(align);
                body.entry.params.push((offset, bytes.len()));
                body.entry.param_bytes = offset + bytes.len();
                body.symbols.insert(name, Symbol::Offset(offset as u64));
                cursor.take(",");
            }
        }
        // `.maxntid`, `.minnctapersm` and the like: hints for a real compiler, which change nothing here.
        while let Some(word) = cursor.peek().filter(|word| word.text != "{") {
            if !word.text.starts_with('.') && word.text != "," && integer(word.text).is_none() {
                return Err(Refused::new(word.line, format!("`{}` is not understood", word.text)));
            }
            cursor.at += 1;
        }
        cursor.expect("{")?;
        let mut depth = 1;
        while depth > 0 {
            let word = cursor.name()?;
            match word.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                ".reg" => body.registers(cursor)?,
                ".local" => {
                    let (name, align, bytes) = cursor.variable()?;
                    let offset = body.entry.local.next_multiple_of(align);
                    body.entry.local = offset + bytes.len();
                    if body.entry.local > MOST_LOCAL {
                        return Err(Refused::new(word.line, "too much local memory"));
                    }
                    body.symbols.insert(name, Symbol::Offset(LOCAL + offset as u64));
                }
                ".pragma" => while !cursor.take(";") && cursor.next().is_some() {},
                ".loc" => cursor.skip_line(word.line),
                _ if cursor.take(":") => {
                    if body.labels.insert(word.text, body.entry.steps.len() as u32).is_some() {
                        return Err(Refused::new(word.line, format!("a second label `{}`", word.text)));
                    }
                }
                text if text.starts_with('.') => {
                    return Err(Refused::new(word.line, format!("`{text}` is not understood")));
                }
                _ => body.instruction(word, cursor)?,
            }
        }
        for (at, label) in std::mem::take(&mut body.open) {
            let target = body.labels.get(label.text);
            let target =
                target.ok_or_else(|| Refused::new(label.line, format!("no label `{}`", label.text)))?;
            body.entry.steps[at].step = Step::Branch(*target);
        }
        body.entry.steps.push(Inst { guard: ONE, wanted: 1, step: Step::Exit });
        Ok(body.entry)
    }

    fn special(&mut self) {
        const NAMES: [&str; 12] = [
            "%tid.x",
            "%tid.y",
            "%tid.z",
            "%ntid.x",
            "%ntid.y",
            "%ntid.z",
            "%ctaid.x",
            "%ctaid.y",
            "%ctaid.z",
            "%nctaid.x",
            "%nctaid.y",
            "%nctaid.z",
        ];
        for (index, name) in NAMES.into_iter().enumerate() {
            self.symbols.insert(name, Symbol::Register(SPECIAL + index as Slot));
        }
        self.symbols.insert("%laneid", Symbol::Register(LANE));
    }

    fn fresh(&mut self) -> Slot {
        self.entry.slots += 1;
        self.entry.slots as Slot - 1
    }

    /// `.reg .b32 %r<9>, %x;`
    fn registers(&mut self, cursor: &mut Cursor<'a>) -> Parsed<()> {
        const MOST: usize = 1 << 20;
        cursor.name()?;
        loop {
            let name = cursor.name()?;
            let mut count = None;
            if cursor.take("<") {
                count = Some(cursor.number()?);
                cursor.expect(">")?;
            }
            if self.entry.slots.saturating_add(count.unwrap_or(1)) > MOST {
                return Err(Refused::new(name.line, "too many registers"));
            }
            let first = self.entry.slots as Slot;
            match count {
                Some(count) => {
                    self.ranges.insert(name.text, (first, count));
                    self.entry.slots += count;
                }
                None => {
                    let slot = self.fresh();
                    self.symbols.insert(name.text, Symbol::Register(slot));
                }
            }
            if !cursor.take(",") {
                return cursor.expect(";");
            }
        }
    }

    /// One instruction, which begins with this word.
    fn instruction(&mut self, first: Word<'a>, cursor: &mut Cursor<'a>) -> Parsed<()> {
        let (mut guard, mut wanted, mut name) = (ONE, 1, first);
        if first.text == "@" {
            wanted = u64::from(!cursor.take("!"));
            guard = self.register(cursor.name()?)?;
            name = cursor.name()?;
        }
        let mut operands: Vec<Operand<'a>> = vec![Vec::new()];
        let mut depth = 0_usize;
        loop {
            let word = cursor.name()?;
            match word.text {
                ";" => break,
                "{" | "[" => depth += 1,
                "}" | "]" => depth = depth.saturating_sub(1),
                "," if depth == 0 => {
                    operands.push(Vec::new());
                    continue;
                }
                _ => {}
            }
            if let Some(operand) = operands.last_mut() {
                operand.push(word);
            }
        }
        if operands.last().is_some_and(Vec::is_empty) {
            operands.pop();
        }
        if let Some(step) = self.step(name, &operands)? {
            self.entry.steps.push(Inst { guard, wanted, step });
        }
        Ok(())
    }

    fn step(&mut self, name: Word<'a>, operands: &[Operand<'a>]) -> Parsed<Option<Step>> {
        let unknown = || Refused::new(name.line, format!("`{}` is not understood", name.text));
        let parts: Vec<&str> = name.text.split('.').collect();
        let (&opcode, modes) = parts.split_first().ok_or_else(unknown)?;
        let kind = modes.last().copied().unwrap_or("");
        Ok(Some(match (opcode, operands) {
            ("bra", [target]) => {
                let label = target.first().ok_or_else(unknown)?;
                self.open.push((self.entry.steps.len(), *label));
                Step::Branch(0)
            }
            ("ret" | "exit", []) => Step::Exit,
            ("trap", []) => Step::Trap,
            // Threads run one after another, so these have nothing to do.
            ("membar" | "fence" | "prefetch" | "prefetchu" | "nanosleep", _) => return Ok(None),
            ("ld", [to, from]) => self.load(name, modes, to, from)?,
            ("st", [to, from]) => self.store(name, modes, to, from)?,
            ("mov", [to, from]) if starts(to, "{") || starts(from, "{") => self.pack(name, kind, to, from)?,
            ("cvta", [to, from]) => Step::Alu {
                run: |a, _, _| a,
                to: self.target(name, to)?,
                from: [self.value(from, kind)?, ZERO, ZERO],
            },
            ("cvt", [to, from]) => Step::Convert {
                how: Convert::new(modes).ok_or_else(unknown)?,
                to: self.target(name, to)?,
                from: self.value(from, kind)?,
            },
            ("setp", [to, a, b, rest @ ..]) => self.compare(name, modes, to, (a, b), rest)?,
            ("lop3", [to, a, b, c, table]) => {
                let table = table.first().and_then(|word| integer(word.text)).ok_or_else(unknown)?;
                let from = [self.value(a, kind)?, self.value(b, kind)?, self.value(c, kind)?];
                Step::Lookup { table: table as u8, to: self.target(name, to)?, from }
            }
            (_, [to, from @ ..]) => {
                let run = alu::function(&parts).ok_or_else(unknown)?;
                if from.len() != arity(opcode) {
                    return Err(Refused::new(
                        name.line,
                        format!("`{}`: wrong number of operands", name.text),
                    ));
                }
                let mut slots = [ZERO; 3];
                for (slot, operand) in slots.iter_mut().zip(from) {
                    *slot = self.value(operand, kind)?;
                }
                Step::Alu { run, to: self.target(name, to)?, from: slots }
            }
            _ => return Err(unknown()),
        }))
    }

    fn compare(
        &mut self,
        name: Word<'a>,
        modes: &[&str],
        to: &Operand<'a>,
        (a, b): (&Operand<'a>, &Operand<'a>),
        rest: &[Operand<'a>],
    ) -> Parsed<Step> {
        let unknown = || Refused::new(name.line, format!("`{}` is not understood", name.text));
        let ftz = modes.contains(&"ftz");
        let modes: Vec<&str> = modes.iter().copied().filter(|mode| *mode != "ftz").collect();
        let (how, combine, kind) = match modes[..] {
            [how, kind] => (how, None, kind),
            [how, combine, kind] => (how, Some(combine), kind),
            _ => return Err(unknown()),
        };
        let run = alu::comparison(how, kind, ftz).ok_or_else(unknown)?;
        let (mut combined, mut with, mut with_not) = ((|a, _, _| a) as Alu, ZERO, 0);
        if let Some(combine) = combine {
            let [operand] = rest else { return Err(unknown()) };
            let negated = starts(operand, "!");
            combined = alu::combination(combine).ok_or_else(unknown)?;
            with = self.value(&operand[usize::from(negated)..].to_vec(), "pred")?;
            with_not = negated.into();
        } else if !rest.is_empty() {
            return Err(unknown());
        }
        let from = [self.value(a, kind)?, self.value(b, kind)?];
        let (to, contrary) = match to[..] {
            [to] => (to, None),
            [to, bar, contrary] if bar.text == "|" => (to, Some(contrary)),
            _ => return Err(unknown()),
        };
        let to = self.target(name, &vec![to])?;
        let contrary = match contrary {
            Some(contrary) => self.target(name, &vec![contrary])?,
            None => self.fresh(),
        };
        Ok(Step::Compare { run, to, contrary, from, combine: combined, with, with_not })
    }

    /// What the name of an `ld` or `st` says: the space, the number of values, their size in bytes and their type.
    fn access<'m>(&self, name: Word<'a>, modes: &[&'m str]) -> Parsed<(Space, u8, u8, &'m str)> {
        let unknown =
            |what: &str| Refused::new(name.line, format!("`{}`: `{what}` is not understood", name.text));
        let (kind, modes) = modes.split_last().ok_or_else(|| unknown(name.text))?;
        let (mut space, mut count) = (Space::Memory, 1);
        for mode in modes {
            match *mode {
                "param" => space = Space::Param,
                "v2" => count = 2,
                "v4" => count = 4,
                "global" | "const" | "local" | "volatile" | "relaxed" | "acquire" | "release" | "weak"
                | "sys" | "gpu" | "cta" | "ca" | "cg" | "cs" | "lu" | "cv" | "nc" | "wb" | "wt" => {}
                other if other.starts_with("L1::") || other.starts_with("L2::") => {}
                other => return Err(unknown(other)),
            }
        }
        let size = alu::size(kind).ok_or_else(|| unknown(kind))?;
        if size * count > 16 {
            return Err(unknown("an access of more than 16 bytes"));
        }
        Ok((space, count as u8, size as u8, *kind))
    }

    fn load(&mut self, name: Word<'a>, modes: &[&str], to: &Operand<'a>, from: &Operand<'a>) -> Parsed<Step> {
        let (space, count, size, kind) = self.access(name, modes)?;
        let extend = alu::extension(kind);
        let extend =
            extend.ok_or_else(|| Refused::new(name.line, format!("`{}`: no such type", name.text)))?;
        let mut targets = [ZERO; 4];
        let list = self.list(name, to, count)?;
        for (slot, word) in targets.iter_mut().zip(list) {
            *slot = self.target(name, &vec![word])?;
        }
        let (base, offset) = self.address(name, from)?;
        Ok(Step::Load { space, size, count, extend, to: targets, base, offset })
    }

    fn store(
        &mut self,
        name: Word<'a>,
        modes: &[&str],
        to: &Operand<'a>,
        from: &Operand<'a>,
    ) -> Parsed<Step> {
        let (space, count, size, kind) = self.access(name, modes)?;
        if space == Space::Param || modes.contains(&"const") {
            return Err(Refused::new(name.line, format!("`{}`: nothing is written there", name.text)));
        }
        let mut sources = [ZERO; 4];
        if count == 1 {
            sources[0] = self.value(from, kind)?;
        } else {
            for (slot, word) in sources.iter_mut().zip(self.list(name, from, count)?) {
                *slot = self.value(&vec![word], kind)?;
            }
        }
        let (base, offset) = self.address(name, to)?;
        Ok(Step::Store { size, count, from: sources, base, offset })
    }

    fn pack(&mut self, name: Word<'a>, kind: &str, to: &Operand<'a>, from: &Operand<'a>) -> Parsed<Step> {
        let unknown = || Refused::new(name.line, format!("`{}`: its operands are not understood", name.text));
        let whole = alu::size(kind).ok_or_else(unknown)? * 8;
        let (many, one) = if starts(to, "{") { (to, from) } else { (from, to) };
        let count = many.iter().filter(|word| word.text == ",").count() + 1;
        if !matches!(count, 2 | 4) || whole / count < 8 {
            return Err(unknown());
        }
        let mut slots = [ZERO; 4];
        for (slot, word) in slots.iter_mut().zip(self.list(name, many, count as u8)?) {
            *slot = if starts(to, "{") {
                self.target(name, &vec![word])?
            } else {
                self.value(&vec![word], kind)?
            };
        }
        let (bits, count) = ((whole / count) as u8, count as u8);
        Ok(if starts(to, "{") {
            Step::Unpack { bits, count, to: slots, from: self.value(one, kind)? }
        } else {
            Step::Pack { bits, count, to: self.target(name, one)?, from: slots }
        })
    }

    /// The words `a` and `b` of `{a, b}`, or the single word of `a`.
    fn list(&self, name: Word<'a>, operand: &Operand<'a>, count: u8) -> Parsed<Vec<Word<'a>>> {
        let inner = match &operand[..] {
            [open, inner @ .., close] if open.text == "{" && close.text == "}" => inner,
            one => one,
        };
        let words: Vec<Word<'a>> =
            inner.split(|word| word.text == ",").filter_map(|it| it.first().copied()).collect();
        if words.len() != usize::from(count) {
            return Err(Refused::new(name.line, format!("`{}`: wrong number of values", name.text)));
        }
        Ok(words)
    }

    /// `[base+offset]`.
    fn address(&mut self, name: Word<'a>, operand: &Operand<'a>) -> Parsed<(Slot, i64)> {
        let wrong = || Refused::new(name.line, format!("`{}`: an address is not understood", name.text));
        let [open, inner @ .., close] = &operand[..] else { return Err(wrong()) };
        if open.text != "[" || close.text != "]" {
            return Err(wrong());
        }
        let (base, offset) = match inner {
            [base] => (base, 0),
            [base, sign, offset] => {
                let offset = integer(offset.text).ok_or_else(wrong)? as i64;
                (base, if sign.text == "-" { offset.wrapping_neg() } else { offset })
            }
            // `+-8`
            [base, _, minus, offset] if minus.text == "-" => {
                (base, (integer(offset.text).ok_or_else(wrong)? as i64).wrapping_neg())
            }
            _ => return Err(wrong()),
        };
        Ok((self.value(&vec![*base], "u64")?, offset))
    }

    fn register(&self, word: Word<'a>) -> Parsed<Slot> {
        if let Some(Symbol::Register(slot)) = self.symbols.get(word.text) {
            return Ok(*slot);
        }
        let prefix = word.text.trim_end_matches(|digit: char| digit.is_ascii_digit());
        let number = word.text[prefix.len()..].parse::<usize>().ok();
        let found = self.ranges.get(prefix).zip(number).filter(|((_, count), number)| number < count);
        let found = found.map(|((first, _), number)| first + number as Slot);
        found.ok_or_else(|| Refused::new(word.line, format!("no register `{}`", word.text)))
    }

    /// The register that an instruction writes. `_` stands for a result that is not wanted.
    fn target(&mut self, name: Word<'a>, operand: &Operand<'a>) -> Parsed<Slot> {
        let [word] = operand[..] else {
            return Err(Refused::new(name.line, format!("`{}`: no place for its result", name.text)));
        };
        if word.text == "_" {
            return Ok(self.fresh());
        }
        let slot = self.register(word)?;
        if slot < FIRST_FREE {
            return Err(Refused::new(word.line, format!("`{}` cannot be written", word.text)));
        }
        Ok(slot)
    }

    /// A register, a number, or the address of a variable.
    fn value(&mut self, operand: &Operand<'a>, kind: &str) -> Parsed<Slot> {
        let (minus, word) = match operand[..] {
            [word] => (false, word),
            [sign, word] if sign.text == "-" => (true, word),
            _ => {
                let line = operand.first().map_or(0, |word| word.line);
                return Err(Refused::new(line, "an operand is not understood"));
            }
        };
        if word.text.starts_with('%') {
            return self.register(word);
        }
        match self.symbols.get(word.text).copied() {
            Some(Symbol::Register(slot)) => return Ok(slot),
            Some(Symbol::Offset(offset)) => return Ok(self.constant(offset)),
            Some(Symbol::Global(index)) => return Ok(self.global(index)),
            None => {}
        }
        let wide = alu::size(kind) == Some(8);
        let whole = integer(word.text).map(|value| match kind {
            // A whole number where a float is expected.
            "f32" => u64::from((value as f32).to_bits()),
            "f64" => (value as f64).to_bits(),
            _ if minus => value.wrapping_neg(),
            _ => value,
        });
        let value = whole.or_else(|| float(word.text, wide));
        let mut value =
            value.ok_or_else(|| Refused::new(word.line, format!("`{}` is no value", word.text)))?;
        if minus && (matches!(kind, "f32" | "f64") || integer(word.text).is_none()) {
            value ^= if wide { 1 << 63 } else { 1 << 31 };
        }
        Ok(self.constant(value))
    }

    fn constant(&mut self, value: u64) -> Slot {
        if let Some(slot) = self.constants.get(&value) {
            return *slot;
        }
        let slot = self.fresh();
        self.constants.insert(value, slot);
        self.entry.constants.push((slot, Constant::Value(value)));
        slot
    }

    fn global(&mut self, index: usize) -> Slot {
        if let Some(slot) = self.global_slots.get(&index) {
            return *slot;
        }
        let slot = self.fresh();
        self.global_slots.insert(index, slot);
        self.entry.constants.push((slot, Constant::Global(index)));
        slot
    }
}

fn starts(operand: &[Word<'_>], text: &str) -> bool {
    operand.first().is_some_and(|word| word.text == text)
}

fn arity(opcode: &str) -> usize {
    match opcode {
        "mov" | "neg" | "abs" | "not" | "cnot" | "popc" | "clz" | "brev" | "rcp" | "sqrt" | "testp" => 1,
        "mad" | "fma" | "bfe" | "prmt" | "selp" | "shf" => 3,
        _ => 2,
    }
}
