//! [`Parts`]: the parts of an operation, several of which run at a time, in one kind of memory. [`PartRun`]: runs one of them, by the steps of its
//! plan or by loans of memory. [`Turn`]: how the parts share links.
//!
//! | file | what is in it |
//! |---|---|
//! | `plan_run.rs` | [`PlanRun`]: runs the steps of a plan slice by slice; it can stop after any slice and go on there later |
//! | `loan_run.rs` | [`LoanRun`]: runs the same collective by loans of memory, where all ranks can lend |
//! | `small_run.rs` | [`SmallRun`]: runs small operations, one whole step after another; where that is not possible, a `PlanRun` takes over |
//!
//! [`PlanRun`] and [`LoanRun`] do not know each other. A [`PartRun`] has one of each, and this file alone chooses between them. A part for
//! which ranks are to lend goes by loans, until it is done or some rank turns out not to be able to lend. In that case it takes the steps,
//! from the first one on. If this rank has already lent memory to peers, they give it back and have written nothing to it.

mod loan_run;
mod plan_run;
mod small_run;

use std::cmp::Ordering;

use self::loan_run::LoanRun;
use self::plan_run::PlanRun;
pub(crate) use self::plan_run::{STRIPE, StagedBuf, cut};
use self::small_run::{SmallPass, SmallRun};
use super::backend::{Backend, Context, Lends, Prepared, StepState};
use super::operation::{Operation, Part};
use super::port::{FrameSource, Lent, Port};
use crate::error::Error;
use crate::link::{Frame, Header, Loan};
use crate::mem::{ALL, Reach};
use crate::types::{Rank, Signature};

/// How many parts of one operation are in flight together. With several, a list of small buffers takes few round trips: each small
/// part takes one cell of a ring, and a ring has 16.
pub(crate) const WINDOW: usize = 16;

/// The part of an operation that is to start next: its index in the list of parts, and its number, which goes on in a second half.
#[derive(Clone, Copy, Default)]
pub(crate) struct NextPart {
    pub(super) index: usize,
    number: u16,
}

impl NextPart {
    /// The first part of an operation's second half.
    pub(crate) fn of_second_half(self) -> NextPart {
        NextPart { index: 0, ..self }
    }

    /// Whether no part of the operation has been started.
    fn is_first(self) -> bool {
        self.number == 0 && self.index == 0
    }

    fn following(self) -> NextPart {
        NextPart { index: self.index + 1, number: self.number.wrapping_add(1) }
    }
}

/// An operation, and how far its parts and its memory are.
pub(crate) struct Work<'a> {
    pub(crate) op: &'a Operation,
    pub(crate) next: &'a mut NextPart,
    /// How far the parts may go, by what has come of the operation's memory.
    pub(crate) reach: Reach,
}

/// How many rounds of a part may be touched, by what has come of the operation's memory.
fn rounds((part, rounds): Reach, order: usize) -> usize {
    match order.cmp(&part) {
        Ordering::Less => usize::MAX,
        Ordering::Equal => rounds,
        Ordering::Greater => 0,
    }
}

/// The runs of a communicator in one kind of memory. All memory is kept from one operation to the next.
#[allow(clippy::vec_box)] // they go from list to list, and are not small
pub(crate) struct Parts<B, L> {
    /// The communicator.
    comm: u64,
    /// Each new run gets a fresh backend like this one.
    backend: B,
    /// Each new run gets a clone of this.
    lends: L,
    /// The runs that have a part, in the order of their parts.
    running: Vec<Box<PartRun<B, L>>>,
    idle: Vec<Box<PartRun<B, L>>>,
    /// What runs the operation instead, if it is small.
    small: Option<SmallRun>,
    /// Whether a [`SmallRun`] is tried for small operations: it is until a link turns out to be unsuitable.
    tries_small: bool,
    /// Whether the last pass ended because it had touched as many bytes as a pass may.
    was_long: bool,
    /// Bytes of working memory that the finished parts of this operation have needed.
    needed: usize,
}

impl<B: Backend, L: Lends> Parts<B, L> {
    pub(crate) fn new(comm: u64, backend: B, lends: L) -> Parts<B, L> {
        let (running, idle) = (Vec::new(), Vec::new());
        Parts {
            comm,
            backend,
            lends,
            running,
            idle,
            small: None,
            tries_small: true,
            was_long: false,
            needed: 0,
        }
    }

    /// Starts what may start, and makes one pass over all parts in flight. `reach`: how far the operation's memory has come.
    /// `news`: the only peer whose links have changed since the last pass, where that is known. Returns whether anything moved,
    /// and whether no part is left.
    pub(crate) fn pass(
        &mut self,
        work: &mut Work<'_>,
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let Work { op, next, reach } = work;
        let reach = *reach;
        let is_begun = self.small.is_some();
        let may_be_small = B::TAKES_TIME && (is_begun || self.tries_small && next.is_first() && reach == ALL);
        if may_be_small && let Some(passed) = self.pass_small(op, next, port)? {
            return Ok(passed);
        }
        while self.running.len() < WINDOW
            && let Some(part) = op.parts.get(next.index)
        {
            self.start(op, part, **next, reach);
            **next = next.following();
        }
        let (mut any, mut i, mut touched) = (false, 0, 0);
        while i < self.running.len() && touched < BUDGET {
            let (earlier, rest) = self.running.split_at_mut(i);
            let Some(run) = rest.first_mut() else { break };
            let (moved, complete) = run.pass((self.comm, op), earlier, news, port)?;
            any |= moved;
            touched += run.touched();
            if complete {
                any = true;
                run.check_values()?;
                let run = self.running.remove(i);
                self.put_away(run);
            } else {
                i += 1;
            }
        }
        self.was_long = touched >= BUDGET;
        Ok((any, self.running.is_empty() && op.parts.get(next.index).is_none()))
    }

    /// Begins an operation if it is small, or goes on with it. Returns what `pass` returns; `None`: the operation is for other runs.
    #[inline]
    fn pass_small(
        &mut self,
        op: &Operation,
        next: &mut NextPart,
        port: &mut Port,
    ) -> Result<Option<(bool, bool)>, Error> {
        let fits = |part: &&Part| {
            part.program.stepwise && (self.lends.shares_memory() || part.program.plan.steps.len() == 1)
        };
        let Some(part) = op.parts.only().filter(fits) else { return Ok(None) };
        let c = Context { comm: self.comm, op, part };
        let mut small = match self.small.take() {
            Some(small) => small,
            None => match SmallRun::new(c, &mut self.lends) {
                Some(small) => small,
                None => return Ok(None),
            },
        };
        if next.is_first() {
            *next = next.following();
        }
        let turn: Turn<'_, PartRun<B, L>> = Turn { c, part: 0, earlier: &[] };
        match small.pass(&mut self.backend, turn, port)? {
            SmallPass::Complete => Ok(Some((true, true))),
            SmallPass::Going(moved) => {
                self.small = Some(small);
                Ok(Some((moved, false)))
            }
            passed @ (SmallPass::TakeOver | SmallPass::Unsuitable) => {
                self.tries_small = matches!(passed, SmallPass::TakeOver);
                self.take_over(op, part, &small);
                Ok(None)
            }
        }
    }

    /// The rest of a small operation is for a run by steps.
    #[cold]
    fn take_over(&mut self, op: &Operation, part: &Part, small: &SmallRun) {
        self.start(op, part, NextPart::default(), ALL);
        if let Some(run) = self.running.last_mut() {
            run.go_on_after(small);
        }
    }

    fn start(&mut self, op: &Operation, part: &Part, next: NextPart, reach: Reach) {
        let new = || Box::new(PartRun::new(self.backend.fresh(), self.lends.clone()));
        let mut run = self.idle.pop().unwrap_or_else(new);
        run.start((self.comm, op), part.clone(), next.number, next.index);
        run.arrived(rounds(reach, next.index));
        self.running.push(run);
    }

    fn put_away(&mut self, mut run: Box<PartRun<B, L>>) {
        self.needed += run.memory().1;
        run.clear();
        self.idle.push(run);
    }

    /// More of the operation's memory has come.
    pub(crate) fn arrived(&mut self, reach: Reach) {
        self.running.iter_mut().for_each(|run| run.arrived(rounds(reach, run.order)));
    }

    /// How far the results are complete: all parts before the returned one, and so many rounds of that.
    pub(crate) fn stored(&self, next: NextPart) -> Reach {
        if self.small.is_some() {
            return (0, 0);
        }
        self.running.first().map_or((next.index, 0), |first| (first.order, first.stored()))
    }

    /// Forgets the parts in flight, as the operation is done or has failed. Returns how many bytes of working memory it has needed.
    pub(crate) fn clear(&mut self) -> usize {
        while let Some(run) = self.running.pop() {
            self.put_away(run);
        }
        (self.was_long, self.small) = (false, None);
        std::mem::take(&mut self.needed)
    }

    /// Notes memory that a receiver has given back.
    pub(crate) fn freed(&mut self, lent: &Lent) {
        if let Some(run) = self.running.iter_mut().find(|run| run.posted(lent)) {
            run.freed(lent);
        }
    }

    /// Whether the last pass ended because it had taken long, and not because nothing was left to do.
    pub(crate) fn was_long(&self) -> bool {
        self.was_long
    }

    /// Adds the ranks whose frames, or whose room, the parts of this operation wait for.
    pub(crate) fn waiting_for(&self, op: Option<&Operation>, port: &mut Port, ranks: &mut Vec<Rank>) {
        if let (Some(small), Some(op)) = (&self.small, op) {
            small.waiting_for(op, port, ranks);
        }
        self.running.iter().for_each(|run| run.waiting_for(port, ranks));
    }

    pub(crate) fn is_running(&self) -> bool {
        self.small.is_some() || !self.running.is_empty()
    }

    /// Bytes of working memory that idle runs keep.
    pub(crate) fn kept(&self) -> usize {
        self.idle.iter().map(|run| run.memory().0).sum()
    }

    /// Lets idle runs keep so many bytes together at most. Returns how many they keep now.
    pub(crate) fn give_memory_back(&mut self, most: usize) -> usize {
        let mut kept = 0;
        for run in &mut self.idle {
            let more = run.memory().0;
            match kept + more > most {
                true => run.give_memory_back(),
                false => kept += more,
            }
        }
        kept
    }
}

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
        part_of(lent) == self.part
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

    /// Called after `start`: `small` has done the part's first steps.
    fn go_on_after(&mut self, small: &SmallRun) {
        if let Some(part) = &self.work {
            self.plan.go_on_after(&part.program, small);
        }
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
        match is_of_loan(lent) {
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
        let is_on = loans.is_on();
        let by_loans = if is_on { loans.pass(turn, |slot| plan.base(part, slot), port)? } else { None };
        let passed = match by_loans {
            Some(passed) => passed,
            None => {
                if is_on {
                    plan.start(part);
                }
                plan.pass(turn, news, port)?
            }
        };
        *touched = passed.touched;
        Ok((passed.moved, passed.complete))
    }
}

/// The low bits of `receiver` in [`Lent::source`] name the receiver, the high bits the part.
const RECEIVER_BITS: u32 = 16;
const RECEIVER: u32 = (1 << RECEIVER_BITS) - 1;
/// The value of `step` in [`Lent::source`] of a loan: no plan has so many steps.
const LOAN: u32 = u32::MAX;

/// The part that posted a frame.
#[inline]
fn part_of(lent: &Lent) -> u16 {
    (lent.source.receiver >> RECEIVER_BITS) as u16
}

/// Which of its step's receivers a frame went to; for a loan: which rank.
#[inline]
fn receiver_of(lent: &Lent) -> usize {
    (lent.source.receiver & RECEIVER) as usize
}

/// Whether what came back is a loan, and not a message of a step.
#[inline]
fn is_of_loan(lent: &Lent) -> bool {
    lent.source.step == LOAN
}

/// What came of a pass over a part.
struct Passed {
    /// Whether anything moved.
    moved: bool,
    /// Whether the part is complete.
    complete: bool,
    /// Bytes gathered and posted; of a part that goes by loans: bytes that its folds read and wrote.
    touched: usize,
}

/// What the runs of later parts see of a part's run.
trait LinkUse {
    /// Whether nothing more of this part goes to a peer.
    fn tx_done(&self, peer: Rank) -> bool;
    /// Whether nothing more of this part comes from a peer.
    fn rx_done(&self, peer: Rank) -> bool;
}

/// What a run works on in a pass, and the runs of the parts before it, whose messages go first.
struct Turn<'a, R> {
    c: Context<'a>,
    /// Which part of the operation.
    part: u16,
    earlier: &'a [Box<R>],
}

impl<R> Clone for Turn<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Turn<'_, R> {}

impl<R: LinkUse> Turn<'_, R> {
    /// Whether the parts before have nothing more for the link to a peer.
    #[inline]
    fn may_send(&self, peer: Rank) -> bool {
        self.earlier.iter().all(|run| run.tx_done(peer))
    }

    /// Whether the parts before have nothing more to come from a peer.
    #[inline]
    fn may_receive(&self, peer: Rank) -> bool {
        self.earlier.iter().all(|run| run.rx_done(peer))
    }

    /// How a message of this part is numbered in its frames.
    #[inline]
    fn message(&self, message: u32) -> u32 {
        u32::from(self.part) << 16 | message & 0xffff
    }

    /// The receiver in [`Lent::source`] of a frame of this part.
    #[inline]
    fn receiver(&self, receiver: usize) -> u32 {
        receiver as u32 | u32::from(self.part) << RECEIVER_BITS
    }

    /// What goes with a frame of step `i` to its receiver number `k`: `m` elements from element `at` on, in the message with this number on its link.
    #[inline]
    fn frame(
        &self,
        i: usize,
        state: &StepState,
        k: usize,
        (at, m): (usize, usize),
        message: u32,
    ) -> (Header, FrameSource) {
        let (c, len) = (self.c, m * state.unit);
        let header = Header {
            comm: c.comm as u32,
            op: c.op.number,
            offset: at as u64,
            len: len as u32,
            message: self.message(message),
            signature: c.signature(i, state),
        };
        let (operation, step, receiver) = (c.op.number, i as u32, self.receiver(k));
        (header, FrameSource { operation, step, receiver, is_copied: c.is_copied(i, len), end: at + m })
    }

    /// Whether a frame is a loan of this part's.
    #[inline]
    fn is_loan(&self, frame: &Frame) -> bool {
        frame.header.message == self.message(Loan::MESSAGE)
    }

    /// The next frame from a peer for a part that takes the steps, if it has begun to come. A loan that comes first is given back: the peer
    /// meant to go by loans, and takes the steps when it sees the first frame of a rank that cannot lend.
    #[inline]
    fn next_of_steps(&self, from: Rank, ours: Signature, port: &mut Port) -> Result<Option<Frame>, Error> {
        // The header comes first: a disagreement is found before any data is used.
        while let Some(frame) = port.rx(from)?.peek(0)? {
            check_frame(&frame, self.c, ours, from)?;
            // All of a loan comes at once. A frame that has a loan's number and another length is refused by the step.
            if !self.is_loan(&frame) || frame.ready != Loan::FRAME {
                return Ok(Some(frame));
            }
            port.rx(from)?.release(frame.ready);
        }
        Ok(None)
    }
}

/// Checks that a frame is of this operation, and that its sender has called what this rank has.
#[inline]
fn check_frame(frame: &Frame, c: Context<'_>, ours: Signature, from: Rank) -> Result<(), Error> {
    let (header, comm, number) = (&frame.header, c.comm, c.op.number);
    if header.op == number && frame.signature() == ours && header.comm == comm as u32 {
        return Ok(());
    }
    if header.comm != comm as u32 {
        let problem = format!(
            "a frame of communicator {:#x}, on a link of communicator {:#x}",
            header.comm, comm as u32
        );
        return Err(Error::protocol(from, problem));
    }
    let us = (c.part.program.plan.rank, ours);
    Err(Error::mismatch(comm.to_string(), header.op.min(number), us, (from, header.signature), Vec::new()))
}

#[cfg(test)]
pub(super) mod tests;
