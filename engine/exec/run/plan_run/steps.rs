//! How far the steps of a part, and the messages of its links, have got.

use super::{Backend, Cursor, PlanRun};
use crate::exec::backend::StepState;
use crate::exec::operation::Part;
use crate::link::waits::Wait;
use crate::plan::compile::Holds;
use crate::plan::{At, Program};
use crate::types::Rank;

impl<B: Backend> PlanRun<B> {
    /// Whether nothing more of this part goes to a peer.
    #[inline]
    pub(in super::super) fn tx_done(&self, program: &Program, peer: Rank) -> bool {
        self.tx[peer].round >= self.rounds || program.sends[peer].is_empty()
    }

    /// Whether nothing more of this part comes from a peer.
    #[inline]
    pub(in super::super) fn rx_done(&self, program: &Program, peer: Rank) -> bool {
        self.rx[peer].round >= self.rounds || program.recvs[peer].is_empty()
    }

    /// Lists the steps whose messages to or from a peer are the next ones on their links.
    pub(super) fn mark_heads(&mut self, program: &Program, peer: Rank) {
        for (cursor, messages) in [(self.tx[peer], &program.sends), (self.rx[peer], &program.recvs)] {
            if cursor.round < self.rounds
                && let Some(&i) = messages[peer].get(cursor.message as usize)
            {
                self.ready.mark(i);
            }
        }
    }

    pub(super) fn is_done(&self, program: &Program, i: usize) -> bool {
        let (state, step) = (&self.steps[i], &program.plan.steps[i]);
        let stored = step.holds() == Holds::Source || state.pos == state.len;
        let receivers = state.first..state.first + step.send.len();
        // A step is not done while memory of ours is lent for one of its messages: `freed` tells.
        let freed = self.freed[receivers].iter().all(|f| *f == state.len);
        stored && (freed || !self.backend.keeps(Wait::Freed))
    }

    /// Up to which element (exclusive) step `i` may read and write, by what the steps before it have written and what has come of the input.
    pub(super) fn written_limit(&self, program: &Program, i: usize) -> usize {
        let after = &program.nodes[i].after_write;
        let after = after.iter().filter(|_| self.backend.keeps(Wait::Written));
        let come = self.arrived.saturating_mul(self.round);
        after.map(|j| self.limit(i, *j, self.steps[*j as usize].pos)).min().unwrap_or(come).min(come)
    }

    /// Up to which element (exclusive) step `i` may write, by how far the steps before it have got that read there or send from there.
    pub(super) fn read_limit(&self, program: &Program, i: usize) -> usize {
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
    pub(super) fn portion_end(&self, state: &StepState, at: usize) -> usize {
        ((at / self.round + 1) * self.round).min(state.len)
    }

    /// Where the slice ends that element `at` is in. Slices begin at multiples of their length.
    pub(super) fn slice_end(&self, state: &StepState, at: usize) -> usize {
        self.frame_end(state, at, 0)
    }

    /// Where the frame ends that element `at` is in: with its slice, or after `most` bytes if a frame of the link may be longer than a slice.
    pub(super) fn frame_end(&self, state: &StepState, at: usize, most: usize) -> usize {
        let frame = most.checked_div(state.unit).unwrap_or(1).max(self.slicing.slice_of(state.unit));
        ((at / frame + 1) * frame).min(self.portion_end(state, at))
    }

    /// Where element `pos` of a chunk is.
    pub(super) fn address(&self, part: &Part, at: At, state: &StepState, pos: usize) -> *mut u8 {
        let start = part.range(at.slot, at.chunk).start * part.dtype.size();
        self.backend.base(part, at.slot).wrapping_add(start + pos * state.unit)
    }

    /// Moves a link's cursor to the next message. Skips messages whose chunk is too short to have anything in the cursor's round.
    pub(super) fn advance(
        steps: &[StepState],
        messages: &[u32],
        cursor: &mut Cursor,
        rounds: u32,
        round: usize,
    ) {
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
    pub(super) fn gathered(&mut self, program: &Program, i: usize, m: usize, stored: bool) {
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
            if let crate::plan::Operand::Recv(from) = operand {
                Self::advance(&self.steps, &program.recvs[*from], &mut self.rx[*from], self.rounds, round);
                self.mark_heads(program, *from);
            }
        }
    }
}
