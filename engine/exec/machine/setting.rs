//! What all operations of a rank have in common, and how they are cut.

use std::sync::Arc;

use crate::exec::device;
use crate::exec::operation::Operation;
use crate::link::SLOT;
use crate::plan::Program;

/// Slices of each chunk per round: two slots in flight on each link while two more are filled.
const SLICES: usize = 2;
/// Between two ranks over TCP. All of a round is on its way before the answers to it, in few calls of the system: 1 MB took
/// 230 us instead of 350, of which rounds of 256 KB and frames of 128 KB are the one half and many small answers the other
/// (docs/bench/profile.md). Of four ranks on one host such rounds outgrew the cache: 4 MB took 7.9 ms instead of 6.2.
const PAIR: Cut = Cut { slice: SLOT, round: 4 * SLOT, least: 2 * SLOT };

/// How messages are cut, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    /// What is worked on at once.
    pub(in crate::exec) slice: usize,
    /// Of each chunk in a round: the same on every rank of a communicator.
    pub(crate) round: usize,
    /// A part of a message's round is worth a frame from this size on: the rest of it follows.
    pub(in crate::exec) least: usize,
}

impl Cut {
    pub(crate) fn by(slice: usize) -> Cut {
        Cut { slice, round: SLICES * slice, least: 0 }
    }

    /// For a plan, on the host.
    pub(crate) fn of(program: &Program) -> Cut {
        if program.whole { PAIR } else { Cut::by(SLOT) }
    }
}

/// How operations of one communicator and rank are run, whatever they are.
pub(in crate::exec) struct Setting {
    pub(in crate::exec) comm: u64,
    /// Operations move no memory: their work is told to this instead.
    pub(in crate::exec) phantom: Option<Arc<dyn Phantom>>,
    /// Where machines on the host are not to cut as the plan says.
    pub(in crate::exec) cut: Option<Cut>,
    /// Results out of place of so many bytes and more are written past the caches; in place, of twice as many.
    pub(in crate::exec) streams_from: usize,
}

impl Setting {
    /// Whether passes over this operation move memory. What a device runs, or what moves none, takes no time here.
    pub(in crate::exec) fn takes_time(&self, op: &Operation) -> bool {
        op.device.is_none() && self.phantom.is_none()
    }

    /// How messages of a program are cut.
    pub(super) fn cut(&self, op: &Operation, program: &Program) -> Cut {
        match self.cut {
            _ if op.device.is_some() => Cut::by(device::limits().0),
            Some(cut) => cut,
            None => Cut::of(program),
        }
    }
}

/// Hears of the work of operations that move no memory: a simulation's clock.
pub(crate) trait Phantom: Send + Sync {
    /// So many bytes were read or written.
    fn work(&self, bytes: usize);
}
