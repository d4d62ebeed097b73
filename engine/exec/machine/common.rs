//! What all parts of an operation share, and how they are cut.

use std::sync::Arc;

use crate::exec::device::DeviceOp;
use crate::exec::operation::Reduction;
use crate::link::SLOT;
use crate::plan::Program;
use crate::types::Signature;

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

/// What all parts of an operation share.
pub(in crate::exec) struct Common {
    pub(in crate::exec) comm: u64,
    pub(in crate::exec) number: u64,
    pub(in crate::exec) signature: Signature,
    pub(in crate::exec) reduction: Reduction,
    pub(in crate::exec) scale: Option<f64>,
    /// The operation moves no memory: its work is told to this instead.
    pub(in crate::exec) phantom: Option<Arc<dyn Phantom>>,
    /// Where the machine is not to cut as the plan says.
    pub(in crate::exec) cut: Option<Cut>,
    /// The device that does the work, on memory of its own.
    pub(in crate::exec) device: Option<Arc<DeviceOp>>,
    /// Results out of place of so many bytes and more are written past the caches; in place, of twice as many.
    pub(in crate::exec) streams_from: usize,
}

impl Common {
    /// Whether passes move memory. What a device runs, or what moves none, takes no time here.
    pub(in crate::exec) fn takes_time(&self) -> bool {
        self.device.is_none() && self.phantom.is_none()
    }
}

/// Hears of the work of operations that move no memory: a simulation's clock.
pub(crate) trait Phantom: Send + Sync {
    /// So many bytes were read or written.
    fn work(&self, bytes: usize);
}
