//! An interpreter of PTX: enough of it for kernels that compute without talking to each other.
//!
//! A module's text becomes steps once; a step names registers by their slots and holds a plain function. Threads run one
//! after another. What is not understood is refused when the module is loaded, by its line and its name.

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

/// Why a text is no module for us.
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

/// What a step computes: of up to three values, in the low bits of words. A function looks at no more bits than its
/// types have, so what is above them does not matter.
pub(crate) type Alu = fn(u64, u64, u64) -> u64;

/// A register's place. Constants and special registers have one too.
pub(crate) type Slot = u32;

/// 1, for steps that are always taken.
pub(crate) const ONE: Slot = 0;
pub(crate) const ZERO: Slot = 1;
/// `%tid`, `%ntid`, `%ctaid`, `%nctaid`, three each.
pub(crate) const SPECIAL: Slot = 2;
pub(crate) const LANE: Slot = 14;
pub(crate) const FIRST_FREE: Slot = 15;

/// Where a thread sees its local memory: where nothing else is.
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
    /// A comparison, combined with another predicate; and the contrary, if it is wanted.
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
    /// Several registers of so many bits into one, and back.
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
    /// Bit by bit, by a table for three bits.
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
    /// Taken if this register's lowest bit is `wanted`.
    pub(crate) guard: Slot,
    pub(crate) wanted: u64,
    pub(crate) step: Step,
}
