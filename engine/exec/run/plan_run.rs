//! [`PlanRun`]: runs the steps of a plan slice by slice. It can stop after any slice and go on there later.
//!
//! Elements of a chunk go through a step in order. Per step there is a cursor for what was gathered, one for what is
//! stored in `dst`, one per receiver for what was sent and one for what that receiver's frames have freed. A step
//! moves when its cursors, and those of the steps it depends on, allow; a pass over all steps never waits.
//!
//! Messages of a link come in rounds: a *round* is the next slices of every chunk ([`Slicing`]), and a plan's messages on a
//! link are ordered round by round. That keeps what is in flight inside the cache, and every round is one complete
//! run of the plan, so what the checker proves of one holds for all. The parts of one operation follow each other on
//! each link: a part may use it when the parts before have nothing more for it.
//!
//! | file | what is in it |
//! |---|---|
//! | `steps.rs` | cursors of steps and links, and the limits that follow from them |
//! | `gather.rs` | how a step gathers its operands, has them combined, and sends the result |
//! | `frames.rs` | what is received: the right frame, or an account of what is wrong |
//! | `stripes.rs` | input that comes, and output that leaves, while the steps run |
//! | `ready.rs` | the list of steps to be looked at |
//!
//! Nothing here knows the kind of memory: only a [`Backend`] does.

mod frames;
mod gather;
mod ready;
mod steps;
mod stripes;

use self::ready::ReadyList;
pub(crate) use self::stripes::{STRIPE, StagedBuf, cut};
use super::BUDGET;
use super::turn::{LinkUse, Passed, Turn, receiver_of};
use crate::error::Error;
use crate::exec::backend::{Backend, Context, Prepared, StepState};
use crate::exec::operation::Part;
use crate::exec::port::{Lent, Port};
use crate::exec::slicing::Slicing;
use crate::plan::{Program, Slot};
use crate::types::Rank;

/// The next message of a link, and its round.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cursor {
    message: u32,
    round: u32,
}

/// Runs the steps of parts, one part after another. Its vectors are kept from one part to the next.
pub(super) struct PlanRun<B> {
    steps: Vec<StepState>,
    sent: Vec<usize>,
    freed: Vec<usize>,
    tx: Vec<Cursor>,
    rx: Vec<Cursor>,
    rounds: u32,
    /// Elements of each chunk in a round.
    round: usize,
    slicing: Slicing,
    /// Rounds whose input has arrived; `usize::MAX`: all of it has.
    arrived: usize,
    ready: ReadyList,
    done: Vec<bool>,
    /// How many steps are not done.
    left: usize,
    /// Bytes gathered and posted in this pass.
    touched: usize,
    /// Whether the backend has made ready what the steps need.
    is_prepared: bool,
    backend: B,
}

impl<B: Backend> PlanRun<B> {
    pub(super) fn new(backend: B) -> PlanRun<B> {
        PlanRun {
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
            is_prepared: false,
            backend,
        }
    }

    /// A part begins. Its steps are set up by [`start`](Self::start) when the part takes them: one that goes by loans needs its memory alone.
    #[inline]
    pub(super) fn begin(&mut self, c: Context<'_>) {
        self.steps.clear();
        self.arrived = usize::MAX;
        self.is_prepared = false;
        self.backend.begin(c);
    }

    /// Whether the steps of the part are set up.
    pub(super) fn has_started(&self) -> bool {
        !self.steps.is_empty()
    }

    /// Sets up the steps of a part. Allocates nothing once the vectors have grown.
    #[inline]
    pub(super) fn start(&mut self, part: &Part) {
        let plan = &part.program.plan;
        let unit = part.dtype.size();
        self.slicing = self.backend.slicing(&part.program);
        self.round = self.slicing.round_of(unit);
        self.sent.clear();
        let mut longest = 1;
        for step in &plan.steps {
            // Each step of every plan names memory of our own (`plan/src/tests/all.rs`).
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
    }

    /// Called after `start`, for a part of one step of which all is done (`at_once.rs`), but what was posted has to come back.
    pub(super) fn posted(&mut self) {
        let [state] = &mut self.steps[..] else { return };
        (state.got, state.pos) = (state.len, state.len);
        self.sent.fill(state.len);
        let over = Cursor { message: 0, round: self.rounds };
        self.tx.fill(over);
        self.rx.fill(over);
    }

    /// Forgets the part, which is done or has failed.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.backend.end();
    }

    /// Where a slot of the part's plans begins.
    #[inline]
    pub(super) fn base(&self, part: &Part, slot: Slot) -> *mut u8 {
        self.backend.base(part, slot)
    }

    /// Checks that the result holds only values that its type has, once all of it has come.
    pub(super) fn check_values(&self, part: &Part) -> Result<(), Error> {
        self.backend.check_values(part)
    }

    /// How many bytes of working memory the run keeps, and how many the part has needed.
    pub(super) fn memory(&self) -> (usize, usize) {
        self.backend.memory()
    }

    /// Gives the working memory back. Called between two parts.
    pub(super) fn give_memory_back(&mut self) {
        self.backend = self.backend.fresh();
    }

    /// Notes memory that a receiver has given back.
    #[inline]
    pub(super) fn freed(&mut self, program: &Program, lent: &Lent) {
        if let Some(state) = self.steps.get(lent.source.step as usize) {
            let at = state.first + receiver_of(lent);
            self.freed[at] = self.freed[at].max(lent.source.end);
            self.ready.mark(lent.source.step);
            program.nodes[lent.source.step as usize].dependents.iter().for_each(|j| self.ready.mark(*j));
        }
    }

    /// Makes ready what the steps or the loans need. Called at the start of every pass.
    #[inline]
    pub(super) fn prepare(&mut self, c: Context<'_>) -> Result<Prepared, Error> {
        let prepared = self.backend.prepare(c, self.arrived == usize::MAX)?;
        self.is_prepared = matches!(prepared, Prepared::Ready);
        Ok(prepared)
    }

    /// Goes on with all steps that may. `news`: the only peer whose links have changed since the last pass, where that is known.
    #[inline]
    pub(super) fn pass(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<Passed, Error> {
        self.touched = 0;
        let program = t.c.program();
        match news {
            // As in the first pass over a part.
            _ if self.ready.has_all() => {}
            Some(peer) => self.mark_heads(program, peer),
            None => (0..program.plan.size).for_each(|peer| self.mark_heads(program, peer)),
        }
        let mut moved = false;
        // The number of looks is bounded, as others may be waiting for the thread: what is possible after these is for the next pass.
        for _ in 0..2 * self.steps.len() {
            if self.is_long() {
                break;
            }
            let Some(i) = self.ready.next() else { break };
            if !self.done[i] {
                moved |= self.advance_step(t, i, port)?;
            }
        }
        let moved = moved || !self.ready.is_empty();
        Ok(Passed { moved, complete: self.left == 0, touched: self.touched })
    }

    /// Whether this pass has taken as much as a pass may.
    fn is_long(&self) -> bool {
        B::TAKES_TIME && self.touched >= BUDGET
    }

    /// Goes on with a step as far as it may. Returns whether anything moved.
    fn advance_step(&mut self, t: Turn<'_, impl LinkUse>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let program = t.c.program();
        let mut any = false;
        while self.gather(t, i, port)? {
            any = true;
            // At the end of a round `push` sends what was held back as one frame, before more is gathered. The step is listed again
            // here, as nothing else may list it.
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
}
