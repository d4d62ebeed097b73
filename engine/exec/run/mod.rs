//! [`PartRun`]: runs one part of an operation, by the steps of its plan or by loans of memory.
//!
//! | file | what is in it |
//! |---|---|
//! | `plan_run.rs` | [`PlanRun`]: runs the steps of a plan slice by slice; it can stop after any slice and go on there later |
//! | `loan_run.rs` | [`LoanRun`]: runs the same collective by loans of memory, where all ranks can lend |
//! | `at_once.rs` | small parts of one step, which need no run |
//! | `turn.rs` | how both use a link: when it is a part's turn, how messages are numbered, whether a frame is the expected one |
//!
//! Neither of the two runs knows the other. A [`PartRun`] has one of each, and this file alone chooses between them. A part for which
//! ranks are to lend goes by loans, until it is done or some rank turns out not to be able to lend. Then it takes the steps, from the
//! first one on. If this rank has already lent memory to peers, they give it back and have written nothing to it.

pub(super) mod at_once;
mod loan_run;
mod plan_run;
mod turn;

use self::loan_run::LoanRun;
use self::plan_run::PlanRun;
pub(crate) use self::plan_run::{STRIPE, StagedBuf, cut};
use self::turn::{LinkUse, Turn};
use super::backend::{Backend, Context, Prepared};
use super::lends::Lends;
use super::operation::{Operation, Part};
use super::port::{Lent, Port};
use crate::error::Error;
use crate::types::Rank;

/// A pass ends when it has gathered and posted about this many bytes. A pass holds the memory lock of its rank. Without this bound it
/// would go on as long as its peer keeps up, and the rank's other communicators would wait until a whole chunk has moved.
pub(super) const BUDGET: usize = 4 << 20;

/// What runs a part of an operation. It serves one part after another, and keeps what it has allocated.
pub(super) struct PartRun<B, L> {
    /// The part that it runs; `None` between two parts.
    work: Option<Part>,
    /// The number of the operation.
    number: u64,
    /// The number of the part: the messages that it sends carry it, and so does the source of each frame that comes back. In an
    /// operation's second half the numbers go on. After 2^16 parts they begin again.
    part: u16,
    /// The index of the part in the list of the operation's parts. The second half has a list of its own.
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

    /// Whether a frame that comes back was posted for the part that this run is at. A frame whose payload was copied when it was
    /// posted may come back long after its part is done, when the run is at another one.
    pub(super) fn posted(&self, lent: &Lent) -> bool {
        turn::part_of(lent) == self.part
    }

    /// Sets the run up for a part with the number `index` and the place `order` in the operation's list. Allocates nothing once the vectors
    /// have grown.
    pub(super) fn start(&mut self, (comm, op): (u64, &Operation), part: Part, index: u16, order: usize) {
        (self.number, self.part, self.order) = (op.number, index, order);
        let c = Context { comm, op, part: &part };
        self.plan.begin(c);
        self.loans.start(c);
        if !self.loans.is_on() {
            self.plan.start(&part);
        }
        self.work = Some(part);
    }

    /// Called after `start`, if all of the part was done at once but this: what was posted has to come back.
    pub(super) fn posted_at_once(&mut self) {
        self.plan.posted();
    }

    /// Forgets the part, which is done or has failed.
    pub(super) fn clear(&mut self) {
        self.work = None;
        self.loans.clear();
        self.plan.clear();
    }

    /// Bytes gathered and posted in the last pass; 0 where the backend does not do the work on the calling thread.
    pub(super) fn touched(&self) -> usize {
        if B::TAKES_TIME { self.touched } else { 0 }
    }

    /// Checks that the result holds only values that its type has, once all of it has come.
    pub(super) fn check_values(&self) -> Result<(), Error> {
        self.work.as_ref().map_or(Ok(()), |part| self.plan.check_values(part))
    }

    /// How many bytes of working memory the run keeps, and how many the part has needed.
    pub(super) fn memory(&self) -> (usize, usize) {
        self.plan.memory()
    }

    /// Gives the working memory back. Called between two parts.
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

    /// Notes that so many rounds of the input have come. A part whose input comes in stripes takes the steps: only steps can begin
    /// before all of the input is there.
    pub(super) fn arrived(&mut self, rounds: usize) {
        let Some(part) = &self.work else { return };
        if self.plan.arrived(rounds) && self.loans.take_steps() {
            self.plan.start(part);
        }
    }

    /// How many rounds of the output have their final results. Steps may still send them, but do not change them.
    pub(super) fn stored(&self) -> usize {
        let by_steps = self.work.as_ref().filter(|_| !self.loans.is_on());
        by_steps.map_or(0, |part| self.plan.stored(&part.program))
    }

    /// Adds the ranks whose frames, or whose room, the part waits for.
    pub(super) fn waiting_for(&self, port: &mut Port, ranks: &mut Vec<Rank>) {
        match &self.work {
            Some(part) if self.loans.is_on() => self.loans.waiting_for(&part.program, port, ranks),
            Some(part) => self.plan.waiting_for(&part.program, port, ranks),
            None => {}
        }
    }

    /// Makes one pass: does all that the part can do now. `earlier`: the runs of the parts before this one, whose messages go first.
    /// `news`: the only peer whose links have changed since the last pass, where that is known. Returns whether
    /// anything moved, and whether the part is complete.
    pub(super) fn pass(
        &mut self,
        (comm, op): (u64, &Operation),
        earlier: &[Box<PartRun<B, L>>],
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let PartRun { work: Some(part), plan, loans, touched, .. } = self else { return Ok((false, true)) };
        let turn = Turn { c: Context { comm, op, part }, part: self.part, earlier };
        if let Prepared::NotYet(moved) = plan.prepare(turn.c)? {
            *touched = 0;
            return Ok((moved, false));
        }
        // By loans as long as these are possible, else by steps.
        let by_loans = match loans.is_on() {
            true => loans.pass(turn, |slot| plan.base(part, slot), port)?,
            false => None,
        };
        let passed = match by_loans {
            Some(passed) => passed,
            None => {
                if !plan.has_started() {
                    plan.start(part);
                }
                plan.pass(turn, news, port)?
            }
        };
        *touched = passed.touched;
        Ok((passed.moved, passed.complete))
    }
}

#[cfg(test)]
mod tests;
