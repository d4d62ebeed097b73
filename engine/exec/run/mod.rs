//! [`PlanRun`]: a plan as a run over slices that can stop and go on at any of them.
//!
//! Elements of a chunk go through a step in order. Per step there is a cursor for what was gathered, one for what is
//! stored in `dst`, one per receiver for what was sent and one for what that receiver's frames have freed. A step
//! moves when its cursors, and those of the steps it depends on, allow; a pass over all steps never waits.
//!
//! Messages of a link come in rounds: a *round* is the next slices of every chunk ([`Slicing`]), and a plan's messages on a
//! link are ordered round by round. That keeps what is in flight inside the cache, and every round is one complete
//! run of the plan, so what the checker proves of one holds for all. The parts of one operation follow each other on
//! each link: the next one's run may use it when this one's has nothing more for it.
//!
//! | file | what is in it |
//! |---|---|
//! | `steps.rs` | cursors of steps and links, and the limits that follow from them |
//! | `gather.rs` | how a step gathers, has combined, and sends |
//! | `frames.rs` | what is received: the right frame, or an account of what is wrong |
//! | `lending.rs` | the same collective by loans of memory, where all ranks can |
//! | `stripes.rs` | input that comes, and output that leaves, while the steps run |
//! | `ready.rs` | the list of steps to be looked at |
//!
//! Nothing here knows what memory is: that is a [`Backend`]'s.

mod frames;
mod gather;
mod lending;
mod ready;
mod steps;
mod stripes;

use self::lending::LendingState;
pub(crate) use self::lending::MAX_LENDERS;
use self::ready::ReadyList;
pub(crate) use self::stripes::{STRIPE, cut};
use super::backend::{Backend, Context, Prepared, StepState};
use super::operation::{Operation, Part};
use super::port::{Lent, Port};
use super::slicing::Slicing;
use crate::error::Error;
use crate::types::Rank;

/// Bytes that a pass gathers and posts, about. A pass holds its rank's memory lock: while a peer keeps up, the other communicators of the
/// rank would wait for a whole chunk.
pub(super) const BUDGET: usize = 4 << 20;

/// The low bits of [`Lent::receiver`] are the receiver, the high ones the part.
const RECEIVER_BITS: u32 = 16;
const RECEIVER: u32 = (1 << RECEIVER_BITS) - 1;

/// Where the messages of a link have got to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cursor {
    message: u32,
    round: u32,
}

/// What a run works on in a pass, and the runs of the parts before it, whose messages go first.
struct Turn<'a, B> {
    c: Context<'a>,
    earlier: &'a [Box<PlanRun<B>>],
}

impl<B> Clone for Turn<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Turn<'_, B> {}

impl<B: Backend> Turn<'_, B> {
    /// Whether the parts before have nothing more for the link to a peer.
    fn may_send(&self, peer: Rank) -> bool {
        self.earlier.iter().all(|run| run.tx_done(peer))
    }

    /// Whether nothing more comes for them from a peer.
    fn may_receive(&self, peer: Rank) -> bool {
        self.earlier.iter().all(|run| run.rx_done(peer))
    }
}

/// A part of an operation, being run. Its vectors are kept from one part to the next.
pub(super) struct PlanRun<B> {
    /// What it works on; none between two parts.
    work: Option<Part>,
    /// The number of the operation.
    number: u64,
    /// Which part of the operation: its messages say so, and frames that come back.
    part: u16,
    /// The same, counted as the operation counts.
    pub(super) order: usize,
    steps: Vec<StepState>,
    sent: Vec<usize>,
    freed: Vec<usize>,
    tx: Vec<Cursor>,
    rx: Vec<Cursor>,
    rounds: u32,
    /// Elements of a round.
    round: usize,
    slicing: Slicing,
    /// Rounds whose input has arrived; `usize::MAX`: all of it has.
    arrived: usize,
    ready: ReadyList,
    done: Vec<bool>,
    /// Steps that are not done.
    left: usize,
    /// Bytes gathered and posted in this pass.
    touched: usize,
    lending: LendingState,
    backend: B,
}

impl<B: Backend> PlanRun<B> {
    pub(super) fn new(backend: B) -> PlanRun<B> {
        PlanRun {
            work: None,
            number: 0,
            part: 0,
            order: 0,
            steps: Vec::new(),
            sent: Vec::new(),
            freed: Vec::new(),
            tx: Vec::new(),
            rx: Vec::new(),
            rounds: 0,
            round: 0,
            slicing: Slicing::by(1),
            arrived: usize::MAX,
            ready: ReadyList::default(),
            done: Vec::new(),
            left: 0,
            touched: 0,
            lending: LendingState::default(),
            backend,
        }
    }

    /// Whether a frame came from this run, and from the part that it is at: a frame that was copied as it was
    /// posted may come back when its part is long done, and the run is at another.
    pub(super) fn posted(&self, lent: &Lent) -> bool {
        lent.receiver >> RECEIVER_BITS == u32::from(self.part)
    }

    /// Sets the run up. No allocation once the vectors have grown.
    pub(super) fn start(&mut self, (comm, op): (u64, &Operation), part: Part, index: u16, order: usize) {
        let plan = &part.program.plan;
        let unit = part.dtype.size();
        (self.number, self.part, self.order) = (op.number, index, order);
        self.slicing = self.backend.slicing(&part.program);
        self.round = self.slicing.round_of(unit);
        self.steps.clear();
        self.sent.clear();
        let mut longest = 1;
        for step in &plan.steps {
            // Every plan's steps name memory of our own (plan/tests).
            let len = step.chunk().map_or(0, |at| part.range(at.slot, at.chunk).len());
            let state = StepState {
                len: len.max(1),
                unit: if len == 0 { 0 } else { unit },
                first: self.sent.len(),
                ..StepState::default()
            };
            longest = longest.max(state.len);
            self.steps.push(state);
            self.sent.resize(self.sent.len() + step.send.len(), 0);
        }
        self.freed.clear();
        self.freed.resize(self.sent.len(), 0);
        self.rounds = longest.div_ceil(self.round) as u32;
        for cursors in [&mut self.tx, &mut self.rx] {
            cursors.clear();
            cursors.resize(plan.size, Cursor::default());
        }
        self.done.clear();
        self.done.resize(plan.steps.len(), false);
        self.left = plan.steps.len();
        self.ready.reset(plan.steps.len());
        self.arrived = usize::MAX;
        let c = Context { comm, op, part: &part };
        self.backend.begin(c);
        self.begin_lending(c);
        self.work = Some(part);
    }

    /// Forgets the part: done, or failed.
    pub(super) fn clear(&mut self) {
        self.work = None;
        self.lending.clear();
        self.backend.end();
    }

    /// Bytes gathered and posted in the last pass, if they took time.
    pub(super) fn touched(&self) -> usize {
        if B::TAKES_TIME { self.touched } else { 0 }
    }

    /// Looks at the values that have come, once all have.
    pub(super) fn check_values(&self) -> Result<(), Error> {
        self.work.as_ref().map_or(Ok(()), |part| self.backend.check_values(part))
    }

    /// Bytes of memory of its own that it keeps, and how many of them the part has needed.
    pub(super) fn memory(&self) -> (usize, usize) {
        self.backend.memory()
    }

    /// Gives it back, between parts.
    pub(super) fn give_memory_back(&mut self) {
        self.backend.give_memory_back();
    }

    /// Notes memory that a receiver has given back.
    pub(super) fn freed(&mut self, lent: &Lent) {
        if lent.owner != self.number {
            return;
        }
        if lent.step == lending::LOAN {
            return self.came_back(lent);
        }
        if let (Some(part), Some(state)) = (&self.work, self.steps.get(lent.step as usize)) {
            let at = state.first + (lent.receiver & RECEIVER) as usize;
            self.freed[at] = self.freed[at].max(lent.end);
            self.ready.mark(lent.step);
            part.program.nodes[lent.step as usize].dependents.iter().for_each(|j| self.ready.mark(*j));
        }
    }

    /// Goes on with all steps that may. `earlier`: the runs of the parts before this one, whose messages go first.
    /// `news`: the only peer whose links have changed since the last pass, where that is known. Returns whether
    /// anything moved, and whether the part is complete.
    pub(super) fn pass(
        &mut self,
        (comm, op): (u64, &Operation),
        earlier: &[Box<PlanRun<B>>],
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let Some(part) = self.work.take() else { return Ok((false, true)) };
        self.touched = 0;
        let turn = Turn { c: Context { comm, op, part: &part }, earlier };
        let result = self.go_on(turn, news, port);
        self.work = Some(part);
        result
    }

    fn go_on(&mut self, t: Turn<'_, B>, news: Option<Rank>, port: &mut Port) -> Result<(bool, bool), Error> {
        if let Prepared::NotYet(moved) = self.backend.prepare(t.c, self.arrived == usize::MAX)? {
            return Ok((moved, false));
        }
        if let Some(result) = self.advance_lending(t, port)? {
            return Ok(result);
        }
        let program = t.c.program();
        match news {
            Some(peer) => self.mark_heads(program, peer),
            None => (0..program.plan.size).for_each(|peer| self.mark_heads(program, peer)),
        }
        let mut moved = false;
        // Bounded: what a pass makes possible is for the next one, and others may be waiting for the thread.
        for _ in 0..2 * self.steps.len() {
            if self.is_long() {
                break;
            }
            let Some(i) = self.ready.next() else { break };
            if !self.done[i] {
                moved |= self.advance_step(t, i, port)?;
            }
        }
        Ok((moved || !self.ready.is_empty(), self.left == 0))
    }

    /// Whether this pass has taken as much as a pass may.
    fn is_long(&self) -> bool {
        B::TAKES_TIME && self.touched >= BUDGET
    }

    /// Goes on with a step as far as it may. Returns whether anything moved.
    fn advance_step(&mut self, t: Turn<'_, B>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let program = t.c.program();
        let mut any = false;
        while self.gather(t, i, port)? {
            any = true;
            // At the end of a round `push` sends what was held back as one frame, before more is gathered. The step lists itself again:
            // nobody else may have a reason to.
            let leaves = self.slicing.least > 0 && self.steps[i].got.is_multiple_of(self.round);
            if self.is_long() || leaves {
                self.ready.mark(i as u32);
                break;
            }
        }
        while self.push(t, i, port)? {
            any = true;
            if self.is_long() {
                self.ready.mark(i as u32);
                break;
            }
        }
        if any {
            program.nodes[i].dependents.iter().for_each(|j| self.ready.mark(*j));
        }
        if self.is_done(program, i) {
            self.done[i] = true;
            self.left -= 1;
        }
        Ok(any)
    }

    /// How a message of this part is numbered in its frames.
    fn message(&self, message: u32) -> u32 {
        u32::from(self.part) << 16 | message & 0xffff
    }
}
