//! What the ranks of a run hold: which value is where.

use super::expr::{Id, NOTHING, Values};
use crate::{At, Rank};

/// A value, and the length of the longest chain of messages that led to it.
pub(super) type Valued = (Id, u32);

/// What memory holds before anything was written to it.
pub(super) const EMPTY: Valued = (NOTHING, 0);

/// The memory of all ranks, and the values in it.
pub(super) struct Memory {
    pub(super) cells: Vec<Valued>,
    /// Per rank and slot, where its cells begin.
    pub(super) base: Vec<Vec<usize>>,
    pub(super) slices: usize,
    /// All values, also those that are nowhere any more.
    pub(super) values: Values,
}

impl Memory {
    pub(super) fn index(&self, rank: Rank, at: At, slice: usize) -> usize {
        self.base[rank][at.slot as usize] + at.chunk as usize * self.slices + slice
    }

    /// The value that a piece of memory holds.
    pub(super) fn holds(&self, rank: Rank, at: At, slice: usize) -> Id {
        self.cells[self.index(rank, at, slice)].0
    }
}
