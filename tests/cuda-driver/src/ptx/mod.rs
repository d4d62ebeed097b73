//! An interpreter of PTX: enough of it for kernels that compute without talking to each other.
//!
//! A module's text is turned into steps when it is loaded; a step names registers by their slots and holds a plain function.
//! Threads run one after another. What is not understood is refused at loading, with its line and its name.

mod alu;
mod body;
mod convert;
mod floats;
mod parse;
mod run;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use parse::{Constant, Entry, Module, parse};
pub(crate) use run::{Launch, View, run};

/// Why a module's text was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) line: usize,
    pub(crate) why: String,
}

impl Refused {
    fn new(line: usize, why: impl Into<String>) -> Self {
        Refused { line, why: why.into() }
    }
}

/// What a step computes from up to three values, which lie in the low bits of words. A function looks at no more bits than its
/// types have, so the bits above do not matter.
pub(crate) type Alu = fn(u64, u64, u64) -> u64;

/// A register's place. Constants and special registers have one too.
pub(crate) type Slot = u32;

/// The slot that holds 1: the guard of steps that are always taken.
pub(crate) const ONE: Slot = 0;
pub(crate) const ZERO: Slot = 1;
/// `%tid`, `%ntid`, `%ctaid`, `%nctaid`, three each.
pub(crate) const SPECIAL: Slot = 2;
pub(crate) const LANE: Slot = 14;
pub(crate) const FIRST_FREE: Slot = 15;

/// The address at which a thread sees its local memory; nothing else lies there.
pub(crate) const LOCAL: u64 = 0x10_0000;
pub(crate) const MOST_LOCAL: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Param,
    /// Global, constant, generic and local: addresses tell them apart.
    Memory,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Alu {
        run: Alu,
        to: Slot,
        from: [Slot; 3],
    },
    /// A comparison, combined with another predicate. `contrary` gets the contrary comparison, combined likewise.
    Compare {
        run: Alu,
        to: Slot,
        contrary: Slot,
        from: [Slot; 2],
        combine: Alu,
        with: Slot,
        with_not: u64,
    },
    Load {
        space: Space,
        size: u8,
        count: u8,
        extend: Alu,
        to: [Slot; 4],
        base: Slot,
        offset: i64,
    },
    Store {
        size: u8,
        count: u8,
        from: [Slot; 4],
        base: Slot,
        offset: i64,
    },
    /// `Pack` puts `count` registers of `bits` bits into one, `Unpack` takes them out of one.
    Pack {
        bits: u8,
        count: u8,
        to: Slot,
        from: [Slot; 4],
    },
    Unpack {
        bits: u8,
        count: u8,
        to: [Slot; 4],
        from: Slot,
    },
    /// `lop3`: the table gives each bit of the result for the three bits of the operands.
    Lookup {
        table: u8,
        to: Slot,
        from: [Slot; 3],
    },
    Convert {
        how: convert::Convert,
        to: Slot,
        from: Slot,
    },
    Branch(u32),
    Exit,
    Trap,
}

#[derive(Clone, Debug)]
pub(crate) struct Inst {
    /// The step is taken if this register's lowest bit is `wanted`.
    pub(crate) guard: Slot,
    pub(crate) wanted: u64,
    pub(crate) step: Step,
}
