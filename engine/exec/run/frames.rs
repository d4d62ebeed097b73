//! What a collective receives: the right frame or an account of what is wrong; and whom it waits for.

use super::{Backend, Context, PlanRun, Turn};
use crate::error::Error;
use crate::exec::port::Port;
use crate::link::{Frame, Loan};
use crate::plan::Operand;
use crate::types::{Rank, Signature};

impl<B: Backend> PlanRun<B> {
    /// The frame that operand `from` of step `i` needs in a round, if `useful` bytes of it are here; an error if what
    /// is here is something else.
    pub(super) fn expect(
        &self,
        t: Turn<'_, B>,
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
        // The header comes first: a disagreement is found before any data is used.
        let Some(mut frame) = port.rx(from)?.peek(0)? else { return Ok(None) };
        let state = &self.steps[i];
        check_frame(&frame, c, c.signature(state), from)?;
        // Of a loan all is here, always: what calls itself one and is not is refused below.
        while self.is_loan(&frame) && frame.ready == Loan::FRAME {
            // It would have folded all at once; some rank cannot, as its first frame says.
            port.rx(from)?.release(frame.ready);
            let Some(next) = port.rx(from)?.peek(0)? else { return Ok(None) };
            check_frame(&next, c, c.signature(state), from)?;
            frame = next;
        }
        let done = frame.done.checked_div(state.unit).unwrap_or(0);
        let left = frame.header.len as usize - frame.done;
        if frame.header.message != self.message(cursor.message)
            || frame.header.offset.wrapping_add(done as u64) != state.got as u64
            || left.checked_rem(state.unit).unwrap_or(left) != 0
            || left > (self.portion_end(state, state.got) - state.got) * state.unit
        {
            let problem = format!(
                "message {} at element {} ({left} bytes left), expected message {} at element {} in operation #{}",
                frame.header.message,
                frame.header.offset,
                self.message(cursor.message),
                state.got,
                c.op.number
            );
            return Err(Error::protocol(from, problem));
        }
        // A kernel that reads where no element begins would be the end of the device's context.
        if B::IS_ALIGNED && left > 0 && !frame.data.addr().is_multiple_of(state.unit) {
            let problem = format!("{} values begin at {:#x}", c.part.dtype, frame.data.addr());
            return Err(Error::protocol(from, problem));
        }
        if useful <= frame.ready {
            return Ok(Some(frame));
        }
        port.rx(from)?.peek(useful)
    }

    /// Adds the ranks whose frames, or whose room, the part waits for.
    pub(in crate::exec) fn waiting_for(&self, port: &mut Port, ranks: &mut Vec<Rank>) {
        let Some(part) = &self.work else { return };
        let program = &part.program;
        if self.lending_waits_for(program, port, ranks) {
            return;
        }
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

pub(super) fn check_frame(frame: &Frame, c: Context<'_>, ours: Signature, from: Rank) -> Result<(), Error> {
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
