//! What an operation on devices needs, as the user's call finds out: memory, copies, and which of its parts are folded.

use std::sync::Arc;

use crate::device::copied::Copied;
use crate::device::workspace::Workspace;
use crate::error::Error;
use crate::plan::Lending;
use crate::types::Rank;

/// Which of an operation's parts are *folded*: the ranks lend each other their memory, and one kernel of each rank combines what is lent
/// ([`Lends`](crate::exec::backend::Lends)).
#[derive(Clone, Copy, Default)]
pub(crate) struct Folds {
    /// All parts are folded, all ranks are in this process, and no buffer of this rank is replaced by a copy.
    pub(crate) are_all: bool,
    /// The same, and there is only one part.
    pub(crate) are_one: bool,
    /// The same, and one launch may fold that part for all ranks, as they share a device.
    pub(crate) may_be_for_all: bool,
    /// Before peers read what this rank lends, they must wait for this rank's own stream: it scales the input or makes copies first, or there
    /// are ranks in other processes.
    pub(crate) own_work_is_lent: bool,
    /// The ranks that this rank lends its buffers to, and the ranks that lend theirs to this one: bit `r` stands for rank `r`.
    pub(super) lent_to: u64,
    pub(super) lent_by: u64,
}

/// Bits that name all ranks, also in a communicator of more than 64 ranks, where no part is folded.
pub(super) const ALL: u64 = u64::MAX;

/// Whether these bits name this rank.
pub(super) fn is_named(bits: u64, rank: Rank) -> bool {
    bits == ALL || bits.checked_shr(rank as u32).is_some_and(|bits| bits & 1 == 1)
}

impl Folds {
    /// Adds a part that is folded: the ranks that it is lent to, and those that lend theirs.
    pub(crate) fn add(&mut self, lending: &Lending) {
        let lent_to = lending.loans.iter().enumerate().filter(|(_, loan)| loan.is_some());
        self.lent_to = lent_to.fold(self.lent_to, |bits, (rank, _)| bits | 1 << rank);
        let lent_by = lending.borrows.iter().enumerate().filter(|(_, borrows)| **borrows);
        self.lent_by = lent_by.fold(self.lent_by, |bits, (rank, _)| bits | 1 << rank);
    }

    /// Whether any part is folded.
    pub(crate) fn are_any(&self) -> bool {
        self.lent_to | self.lent_by != 0
    }
}

/// What an operation needs besides its buffers. `copied`: the copies of those that the devices of other ranks cannot touch.
pub(crate) struct Needs {
    /// The memory that its parts need; or the error, if it could not be had.
    pub(crate) workspace: Result<Arc<Workspace>, Error>,
    pub(crate) copied: Vec<Copied>,
    pub(crate) folds: Folds,
}
