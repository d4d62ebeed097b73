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
//! This file has the cursors, and the limits that follow from them. `gather.rs`: how a step gathers its operands, has them combined, and sends the
//! result. `stripes.rs`: how buffers are cut whose input comes, and whose output leaves, while the steps run.
//!
//! Nothing here knows the kind of memory: only a [`Backend`] does.

mod gather;
mod stripes;

use std::collections::VecDeque;

pub(crate) use self::stripes::{STRIPE, StagedBuf, cut};
use super::small_run::SmallRun;
use super::{BUDGET, LinkUse, Passed, Turn, receiver_of};
use crate::error::Error;
use crate::exec::backend::{Backend, Context, Prepared, Slicing, StepState};
use crate::exec::operation::Part;
use crate::exec::port::{Lent, Port};
use crate::link::Frame;
use crate::link::waits::Wait;
use crate::plan::{At, Holds, OUTPUT, Operand, Program, Slot, Step};
use crate::types::Rank;

/// The next message of a link, and its round.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cursor {
    message: u32,
    round: u32,
}

/// Steps that may be able to go on, as something that they wait for may have come. A step is listed at most once.
#[derive(Default)]
struct ReadyList {
    list: VecDeque<u32>,
    listed: Vec<bool>,
}

impl ReadyList {
    /// Lists the steps `0..steps`, in this order, and no others.
    fn reset(&mut self, steps: usize) {
        self.list.clear();
        self.list.extend(0..steps as u32);
        self.listed.clear();
        self.listed.resize(steps, true);
    }

    fn mark(&mut self, i: u32) {
        if !std::mem::replace(&mut self.listed[i as usize], true) {
            self.list.push_back(i);
        }
    }

    fn next(&mut self) -> Option<usize> {
        let i = self.list.pop_front()? as usize;
        self.listed[i] = false;
        Some(i)
    }

    /// Whether every step is listed.
    fn has_all(&self) -> bool {
        self.list.len() == self.listed.len()
    }

    fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
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

    /// A part begins. [`start`](Self::start) sets its steps up when the part takes them: a part that goes by loans needs only the backend.
    #[inline]
    pub(super) fn begin(&mut self, c: Context<'_>) {
        self.steps.clear();
        self.arrived = usize::MAX;
        self.is_prepared = false;
        self.backend.begin(c);
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

    /// Called after `start`, for a part whose first steps `small` has done, each as a whole.
    pub(super) fn go_on_after(&mut self, program: &Program, small: &SmallRun) {
        let done = small.next;
        for (i, step) in program.plan.steps.iter().enumerate().take(done) {
            let state = &mut self.steps[i];
            (state.got, state.pos) = (state.len, state.len);
            let (first, len, (rounds, round)) = (state.first, state.len, (self.rounds, self.round));
            for operand in &step.operands {
                if let Operand::Recv(from) = operand {
                    Self::advance(&self.steps, &program.recvs[*from], &mut self.rx[*from], rounds, round);
                }
            }
            for (k, &peer) in step.send.iter().enumerate() {
                self.sent[first + k] = len;
                let is_held = i + 1 == done && small.held >> k & 1 == 1;
                self.freed[first + k] = if is_held { 0 } else { len };
                Self::advance(&self.steps, &program.sends[peer], &mut self.tx[peer], rounds, round);
            }
            if self.is_done(program, i) {
                self.done[i] = true;
                self.left -= 1;
            }
        }
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

/// How far steps and links have got, and what follows from that.
impl<B: Backend> PlanRun<B> {
    /// Notes that so many rounds of the input have come. Returns whether this number is new.
    #[inline]
    pub(super) fn arrived(&mut self, rounds: usize) -> bool {
        let is_news = self.arrived != rounds;
        if is_news {
            self.arrived = rounds;
            (0..self.steps.len() as u32).for_each(|i| self.ready.mark(i));
        }
        is_news
    }

    /// How many rounds of the output have their final results; `usize::MAX`: all. Steps may still send them, but do not change them.
    pub(super) fn stored(&self, program: &Program) -> usize {
        if !self.is_prepared {
            return 0;
        }
        let steps = program.plan.steps.iter().zip(&self.steps);
        let to_output = |step: &Step| step.dst.is_some_and(|at| at.slot == OUTPUT);
        let left = steps.filter(|(step, state)| to_output(step) && state.pos < state.len);
        left.map(|(_, state)| state.pos / self.round).min().unwrap_or(usize::MAX)
    }

    /// Whether nothing more of this part goes to a peer.
    #[inline]
    pub(super) fn tx_done(&self, program: &Program, peer: Rank) -> bool {
        self.tx[peer].round >= self.rounds || program.sends[peer].is_empty()
    }

    /// Whether nothing more of this part comes from a peer.
    #[inline]
    pub(super) fn rx_done(&self, program: &Program, peer: Rank) -> bool {
        self.rx[peer].round >= self.rounds || program.recvs[peer].is_empty()
    }

    /// Lists the steps whose messages to or from a peer are the next ones on their links.
    fn mark_heads(&mut self, program: &Program, peer: Rank) {
        for (cursor, messages) in [(self.tx[peer], &program.sends), (self.rx[peer], &program.recvs)] {
            if cursor.round < self.rounds
                && let Some(&i) = messages[peer].get(cursor.message as usize)
            {
                self.ready.mark(i);
            }
        }
    }

    fn is_done(&self, program: &Program, i: usize) -> bool {
        let (state, step) = (&self.steps[i], &program.plan.steps[i]);
        let stored = step.holds() == Holds::Source || state.pos == state.len;
        let receivers = state.first..state.first + step.send.len();
        // A step is not done while memory of ours is lent for one of its messages: `freed` tells.
        let freed = self.freed[receivers].iter().all(|f| *f == state.len);
        stored && (freed || !self.backend.keeps(Wait::Freed))
    }

    /// Up to which element (exclusive) step `i` may read and write, by what the steps before it have written and what has come of the input.
    fn written_limit(&self, program: &Program, i: usize) -> usize {
        let after = &program.nodes[i].after_write;
        let after = after.iter().filter(|_| self.backend.keeps(Wait::Written));
        let come = self.arrived.saturating_mul(self.round);
        after.map(|j| self.limit(i, *j, self.steps[*j as usize].pos)).min().unwrap_or(come).min(come)
    }

    /// Up to which element (exclusive) step `i` may write. Steps before it that read there, or send from there, limit this by how far they have got.
    fn read_limit(&self, program: &Program, i: usize) -> usize {
        let mut limit = usize::MAX;
        for &j in program.nodes[i].after_read.iter().filter(|_| self.backend.keeps(Wait::Read)) {
            let (state, step) = (&self.steps[j as usize], &program.plan.steps[j as usize]);
            if step.holds() != Holds::Source {
                limit = limit.min(self.limit(i, j, state.got));
            }
            for freed in &self.freed[state.first..state.first + step.send.len()] {
                limit = limit.min(self.limit(i, j, *freed));
            }
        }
        limit
    }

    /// A cursor of step `j` as a limit for step `i`. Steps that depend on each other share a chunk, so their lengths agree.
    fn limit(&self, i: usize, j: u32, cursor: usize) -> usize {
        debug_assert_eq!(self.steps[i].len, self.steps[j as usize].len);
        cursor
    }

    /// Where the round ends that element `at` is in.
    fn portion_end(&self, state: &StepState, at: usize) -> usize {
        ((at / self.round + 1) * self.round).min(state.len)
    }

    /// Where the slice ends that element `at` is in. Slices begin at multiples of their length.
    fn slice_end(&self, state: &StepState, at: usize) -> usize {
        self.frame_end(state, at, 0)
    }

    /// Where the frame ends that element `at` is in: with its slice, or after `most` bytes if a frame of the link may be longer than a slice.
    fn frame_end(&self, state: &StepState, at: usize, most: usize) -> usize {
        let frame = most.checked_div(state.unit).unwrap_or(1).max(self.slicing.slice_of(state.unit));
        ((at / frame + 1) * frame).min(self.portion_end(state, at))
    }

    /// Where element `pos` of a chunk is.
    fn address(&self, part: &Part, at: At, state: &StepState, pos: usize) -> *mut u8 {
        let start = part.range(at.slot, at.chunk).start * part.dtype.size();
        self.backend.base(part, at.slot).wrapping_add(start + pos * state.unit)
    }

    /// Moves a link's cursor to the next message. Skips messages whose chunk is too short to have anything in the cursor's round.
    fn advance(steps: &[StepState], messages: &[u32], cursor: &mut Cursor, rounds: u32, round: usize) {
        loop {
            cursor.message += 1;
            if cursor.message as usize >= messages.len() {
                *cursor = Cursor { message: 0, round: cursor.round + 1 };
                if cursor.round >= rounds {
                    return;
                }
            }
            let state = &steps[messages[cursor.message as usize] as usize];
            if state.len > cursor.round as usize * round {
                return;
            }
        }
    }

    /// Notes that step `i` has gathered `m` elements, and moves on the cursors of links whose messages end there.
    fn gathered(&mut self, program: &Program, i: usize, m: usize, stored: bool) {
        let round = self.round;
        let state = &mut self.steps[i];
        self.touched += m * state.unit;
        state.got += m;
        if stored {
            state.pos = state.got;
        }
        let (got, at_end) = (state.got, state.got.is_multiple_of(round) || state.got == state.len);
        if m == 0 || !at_end || got == 0 {
            return;
        }
        for operand in &program.plan.steps[i].operands {
            if let Operand::Recv(from) = operand {
                Self::advance(&self.steps, &program.recvs[*from], &mut self.rx[*from], self.rounds, round);
                self.mark_heads(program, *from);
            }
        }
    }
}

/// What is received, and what is waited for.
impl<B: Backend> PlanRun<B> {
    /// The frame from rank `from` that step `i` needs in a round, if `useful` bytes of it have come; an error if the frame that has come
    /// is another one.
    fn expect(
        &self,
        t: Turn<'_, impl LinkUse>,
        i: usize,
        from: Rank,
        (round, useful): (usize, usize),
        port: &mut Port,
    ) -> Result<Option<Frame>, Error> {
        let (c, cursor) = (t.c, self.rx[from]);
        if cursor.round as usize != round
            || c.program().recvs[from].get(cursor.message as usize) != Some(&(i as u32))
            || !t.may_receive(from)
        {
            return Ok(None);
        }
        let state = &self.steps[i];
        let Some(frame) = t.next_of_steps(from, c.signature(i, state), port)? else { return Ok(None) };
        let done = frame.done.checked_div(state.unit).unwrap_or(0);
        let left = frame.header.len as usize - frame.done;
        if frame.header.message != t.message(cursor.message)
            || frame.header.offset.wrapping_add(done as u64) != state.got as u64
            || left.checked_rem(state.unit).unwrap_or(left) != 0
            || left > (self.portion_end(state, state.got) - state.got) * state.unit
        {
            let problem = format!(
                "message {} at element {} ({left} bytes left), expected message {} at element {} in operation #{}",
                frame.header.message,
                frame.header.offset,
                t.message(cursor.message),
                state.got,
                c.op.number
            );
            return Err(Error::protocol(from, problem));
        }
        // A kernel that reads elements at an address that is not a multiple of their size would break the device's context for good.
        if B::IS_ALIGNED && left > 0 && !frame.data.addr().is_multiple_of(state.unit) {
            let problem = format!(
                "{} values at address {:#x}, which is not a multiple of their size",
                c.part.dtype,
                frame.data.addr()
            );
            return Err(Error::protocol(from, problem));
        }
        if useful <= frame.ready {
            return Ok(Some(frame));
        }
        port.rx(from)?.peek(useful)
    }

    /// Adds to `ranks` those whose frames the part waits for, those that have yet to release what it sent, and those to which it cannot send for
    /// want of room.
    pub(super) fn waiting_for(&self, program: &Program, port: &mut Port, ranks: &mut Vec<Rank>) {
        for (i, step) in program.plan.steps.iter().enumerate() {
            if self.is_done(program, i) {
                continue;
            }
            let state = &self.steps[i];
            for operand in &step.operands {
                if let Operand::Recv(from) = operand
                    && state.got < state.len
                    && !matches!(port.rx(*from).and_then(|rx| rx.peek(0)), Ok(Some(_)))
                {
                    ranks.push(*from);
                }
            }
            for (k, &peer) in step.send.iter().enumerate() {
                let (sent, freed) = (self.sent[state.first + k], self.freed[state.first + k]);
                let full = matches!(port.tx(peer).and_then(|tx| tx.room()), Ok(false));
                if freed < sent || (sent < state.len && full) {
                    ranks.push(peer);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_listed_once_until_it_was_looked_at() {
        let mut ready = ReadyList::default();
        ready.reset(2);
        ready.mark(1);
        assert_eq!([ready.next(), ready.next(), ready.next()], [Some(0), Some(1), None]);
        ready.mark(1);
        ready.mark(0);
        ready.mark(1);
        assert_eq!([ready.next(), ready.next()], [Some(1), Some(0)]);
        assert!(ready.is_empty());
    }
}
