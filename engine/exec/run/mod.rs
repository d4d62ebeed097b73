//! [`PartRun`]: a part of an operation, being run, by the plan's steps or by loans of memory.
//!
//! | file | what is in it |
//! |---|---|
//! | `plan_run.rs` | [`PlanRun`]: the steps of a plan, as a run over slices that can stop and go on at any of them |
//! | `loan_run.rs` | [`LoanRun`]: the same collective by loans of memory, where all ranks can |
//! | `turn.rs` | what both put on a link and find there: whose turn it is, how messages are numbered, whether a frame is the right one |
//!
//! Neither of the two runs knows the other. A part has one of each, and this file alone chooses between them: a part for which
//! ranks are to lend goes by loans, until it is done or the loans turn out not to be possible. Then it takes the steps, from the
//! first one on. That may be after loans have been made to peers, which give them back: nothing was written to them.

mod loan_run;
mod plan_run;
mod turn;

use self::loan_run::LoanRun;
use self::plan_run::PlanRun;
pub(crate) use self::plan_run::{STRIPE, StagedBuf, cut};
use self::turn::{LinkUse, Passed, Turn};
use super::backend::{Backend, Context, Prepared};
use super::lends::Lends;
use super::operation::{Operation, Part};
use super::port::{Lent, Port};
use crate::error::Error;
use crate::types::Rank;

/// Bytes that a pass gathers and posts, about. A pass holds its rank's memory lock: while a peer keeps up, the other communicators of the
/// rank would wait for a whole chunk.
pub(super) const BUDGET: usize = 4 << 20;

/// A part of an operation, being run. What it has allocated is kept from one part to the next.
pub(super) struct PartRun<B, L> {
    /// What it works on; none between two parts.
    work: Option<Part>,
    /// The number of the operation.
    number: u64,
    /// Which part of the operation: its messages say so, and frames that come back.
    part: u16,
    /// The same, counted as the operation counts.
    pub(super) order: usize,
    /// Bytes gathered and posted in the last pass.
    touched: usize,
    plan: PlanRun<B>,
    loans: LoanRun<L>,
}

impl<B: Backend, L: Lends> LinkUse for PartRun<B, L> {
    fn tx_done(&self, peer: Rank) -> bool {
        let Some(part) = &self.work else { return true };
        if self.loans.is_on() { self.loans.tx_done(peer) } else { self.plan.tx_done(&part.program, peer) }
    }

    fn rx_done(&self, peer: Rank) -> bool {
        let Some(part) = &self.work else { return true };
        if self.loans.is_on() { self.loans.rx_done() } else { self.plan.rx_done(&part.program, peer) }
    }
}

impl<B: Backend, L: Lends> PartRun<B, L> {
    pub(super) fn new(backend: B, lends: L) -> PartRun<B, L> {
        let (plan, loans) = (PlanRun::new(backend), LoanRun::new(lends));
        PartRun { work: None, number: 0, part: 0, order: 0, touched: 0, plan, loans }
    }

    /// Whether a frame came from this run, and from the part that it is at: a frame that was copied as it was
    /// posted may come back when its part is long done, and the run is at another.
    pub(super) fn posted(&self, lent: &Lent) -> bool {
        turn::part_of(lent) == self.part
    }

    /// Sets the run up. No allocation once the vectors have grown.
    pub(super) fn start(&mut self, (comm, op): (u64, &Operation), part: Part, index: u16, order: usize) {
        (self.number, self.part, self.order) = (op.number, index, order);
        let c = Context { comm, op, part: &part };
        self.plan.start(c);
        self.loans.start(c);
        self.work = Some(part);
    }

    /// Forgets the part: done, or failed.
    pub(super) fn clear(&mut self) {
        self.work = None;
        self.loans.clear();
        self.plan.clear();
    }

    /// Bytes gathered and posted in the last pass, if they took time.
    pub(super) fn touched(&self) -> usize {
        if B::TAKES_TIME { self.touched } else { 0 }
    }

    /// Looks at the values that have come, once all have.
    pub(super) fn check_values(&self) -> Result<(), Error> {
        self.work.as_ref().map_or(Ok(()), |part| self.plan.check_values(part))
    }

    /// Bytes of memory of its own that it keeps, and how many of them the part has needed.
    pub(super) fn memory(&self) -> (usize, usize) {
        self.plan.memory()
    }

    /// Gives it back, between parts.
    pub(super) fn give_memory_back(&mut self) {
        self.plan.give_memory_back();
    }

    /// Notes memory that a receiver has given back.
    pub(super) fn freed(&mut self, lent: &Lent) {
        let Some(part) = self.work.as_ref().filter(|_| lent.source.operation == self.number) else { return };
        match turn::is_of_loan(lent) {
            true => self.loans.came_back(part, lent),
            false => self.plan.freed(&part.program, lent),
        }
    }

    /// So many rounds of the input have come. What comes in stripes goes on in them: by steps.
    pub(super) fn arrived(&mut self, rounds: usize) {
        if self.plan.arrived(rounds) {
            self.loans.take_steps();
        }
    }

    /// So many rounds of the output have their results, and no step touches them any more but to send them.
    pub(super) fn stored(&self) -> usize {
        self.work.as_ref().map_or(0, |part| self.plan.stored(&part.program))
    }

    /// Adds the ranks whose frames, or whose room, the part waits for.
    pub(super) fn waiting_for(&self, port: &mut Port, ranks: &mut Vec<Rank>) {
        match &self.work {
            Some(part) if self.loans.is_on() => self.loans.waiting_for(&part.program, port, ranks),
            Some(part) => self.plan.waiting_for(&part.program, port, ranks),
            None => {}
        }
    }

    /// Goes on with all that may. `earlier`: the runs of the parts before this one, whose messages go first.
    /// `news`: the only peer whose links have changed since the last pass, where that is known. Returns whether
    /// anything moved, and whether the part is complete.
    pub(super) fn pass(
        &mut self,
        (comm, op): (u64, &Operation),
        earlier: &[Box<PartRun<B, L>>],
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let Some(part) = self.work.take() else { return Ok((false, true)) };
        let turn = Turn { c: Context { comm, op, part: &part }, part: self.part, earlier };
        let result = self.go_on(turn, news, port);
        self.work = Some(part);
        let Passed { moved, complete, touched } = result?;
        self.touched = touched;
        Ok((moved, complete))
    }

    /// By loans as long as those are possible, else by steps.
    fn go_on(&mut self, t: Turn<'_, Self>, news: Option<Rank>, port: &mut Port) -> Result<Passed, Error> {
        if let Prepared::NotYet(moved) = self.plan.prepare(t.c)? {
            return Ok(Passed { moved, complete: false, touched: 0 });
        }
        if self.loans.is_on() {
            let base = |slot| self.plan.base(t.c.part, slot);
            if let Some(passed) = self.loans.pass(t, base, port)? {
                return Ok(passed);
            }
        }
        self.plan.pass(t, news, port)
    }
}

#[cfg(test)]
mod tests;
