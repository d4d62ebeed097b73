//! How messages are cut.

use crate::link::SLOT;
use crate::plan::Program;

/// Slices of each chunk per round: two slots in flight on each link while two more are filled.
const SLICES: usize = 2;
/// Between two ranks over TCP. All of a round is on its way before the answers to it, in few calls of the system: 1 MB took
/// 230 us instead of 350, of which rounds of 256 KB and frames of 128 KB are the one half and many small answers the other
/// (docs/bench/profile.md). Of four ranks on one host such rounds outgrew the cache: 4 MB took 7.9 ms instead of 6.2.
const PAIR: Slicing = Slicing { slice: SLOT, round: 4 * SLOT, least: 2 * SLOT };

/// How messages are cut, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slicing {
    /// What is worked on at once.
    pub(crate) slice: usize,
    /// Of each chunk in a round: the same on every rank of a communicator.
    pub(crate) round: usize,
    /// A part of a message's round is worth a frame from this size on: the rest of it follows.
    pub(crate) least: usize,
}

impl Slicing {
    /// Slices of so many bytes.
    pub(crate) fn by(slice: usize) -> Slicing {
        Slicing { slice, round: SLICES * slice, least: 0 }
    }

    /// For a program in the host's memory.
    pub(crate) fn on_host(program: &Program) -> Slicing {
        if program.whole { PAIR } else { Slicing::by(SLOT) }
    }

    /// Elements of a slice, by the bytes of an element.
    pub(crate) fn slice_of(&self, unit: usize) -> usize {
        self.slice.checked_div(unit).unwrap_or(1).max(1)
    }

    /// Elements of each chunk in a round, by the bytes of an element.
    pub(crate) fn round_of(&self, unit: usize) -> usize {
        (self.round / unit).max(1)
    }
}
