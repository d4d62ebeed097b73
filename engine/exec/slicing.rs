//! How messages are cut.

use crate::link::SLOT;
use crate::plan::Program;

/// Slices of each chunk per round. So two slots can be in flight on each link while two more are filled.
const SLICES: usize = 2;
/// For two ranks over TCP. A whole round is sent, in few system calls, before the answers to it come. 1 MB took 230 us so, instead of 350; half of
/// the difference came from the larger rounds (before: 256 KB, in frames of 128 KB), half from fewer, larger answers
/// (docs/adr/0021-whole-messages.md). Among four ranks on one host such rounds outgrew the caches: 4 MB took 7.9 ms instead of 6.2.
const PAIR: Slicing = Slicing { slice: SLOT, round: 4 * SLOT, least: 2 * SLOT };

/// How messages are cut, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slicing {
    /// Bytes of a slice: as many as a step works on at once.
    pub(crate) slice: usize,
    /// Bytes of each chunk in a round: the same on every rank of a communicator.
    pub(crate) round: usize,
    /// While more of a message's round is to follow, no frame of fewer bytes than this is sent.
    pub(crate) least: usize,
}

impl Slicing {
    /// Slices of `slice` bytes, two of them in a round.
    pub(crate) fn by(slice: usize) -> Slicing {
        Slicing { slice, round: SLICES * slice, least: 0 }
    }

    /// How messages of a program in the host's memory are cut.
    pub(crate) fn on_host(program: &Program) -> Slicing {
        if program.whole { PAIR } else { Slicing::by(SLOT) }
    }

    /// How many elements of `unit` bytes are in a slice.
    pub(crate) fn slice_of(&self, unit: usize) -> usize {
        self.slice.checked_div(unit).unwrap_or(1).max(1)
    }

    /// How many elements of `unit` bytes of each chunk are in a round.
    pub(crate) fn round_of(&self, unit: usize) -> usize {
        (self.round / unit).max(1)
    }
}
