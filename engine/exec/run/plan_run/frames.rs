//! How a step finds the frame that it expects, or says what is wrong with the one that has come; and which ranks a part waits for.

use super::{Backend, LinkUse, PlanRun, Turn};
use crate::error::Error;
use crate::exec::port::Port;
use crate::link::Frame;
use crate::plan::{Operand, Program};
use crate::types::Rank;

impl<B: Backend> PlanRun<B> {
    /// The frame from rank `from` that step `i` needs in a round, if `useful` bytes of it have come; an error if the frame that has come
    /// is another one.
    pub(super) fn expect(
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
    pub(in crate::exec) fn waiting_for(&self, program: &Program, port: &mut Port, ranks: &mut Vec<Rank>) {
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
