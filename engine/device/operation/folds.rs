//! What an operation of devices needs, as its call finds out: above all which of its parts are folded at once.

use std::sync::Arc;

use crate::device::copied::Copied;
use crate::device::workspace::Workspace;
use crate::error::Error;
use crate::plan::Lending;

/// Which of an operation's parts one kernel of each rank folds ([`Lends`](crate::exec::lends::Lends)), as the call knows.
#[derive(Clone, Copy, Default)]
pub(crate) struct Folds {
    /// There are no other parts.
    pub(crate) are_all: bool,
    /// And there is one part.
    pub(crate) are_one: bool,
    /// And one launch may fold it for all ranks: they are in this process, and share a device.
    pub(crate) may_be_for_all: bool,
    /// What this rank lends, its own stream writes first: it multiplies its input, or lends copies.
    pub(crate) own_work_is_lent: bool,
    /// The ranks that the buffers are lent to, and those whose buffers are lent to this rank: a bit for each.
    pub(super) lent_to: u64,
    pub(super) lent_by: u64,
}

impl Folds {
    /// A part is folded, as this plan says.
    pub(crate) fn add(&mut self, lending: &Lending) {
        let lent_to = lending.loans.iter().enumerate().filter(|(_, loan)| loan.is_some());
        self.lent_to = lent_to.fold(self.lent_to, |bits, (rank, _)| bits | 1 << rank);
        let lent_by = lending.borrows.iter().enumerate().filter(|(_, borrows)| **borrows);
        self.lent_by = lent_by.fold(self.lent_by, |bits, (rank, _)| bits | 1 << rank);
    }

    /// Whether there is one.
    pub(crate) fn are_any(&self) -> bool {
        self.lent_to | self.lent_by != 0
    }
}

/// What an operation needs beside its buffers.
pub(crate) struct Needs {
    /// The error for which there is no workspace.
    pub(crate) workspace: Result<Arc<Workspace>, Error>,
    pub(crate) copied: Vec<Copied>,
    pub(crate) folds: Folds,
}
