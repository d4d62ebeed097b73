//! What a collective receives: the right frame or an account of what is wrong; and whom it waits for.

use super::{Active, Request};
use crate::error::{Error, Operation};
use crate::exec::port::Port;
use crate::link::Frame;
use crate::plan::{Operand, Program};
use crate::types::Rank;

impl Active {
    /// The frame that operand `from` of step `i` needs, if it is here; an error if what is here is something else.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn expect(
        &self,
        r: &Request,
        program: &Program,
        i: usize,
        from: Rank,
        round: usize,
        useful: usize,
        port: &mut Port,
    ) -> Result<Option<Frame>, Error> {
        let cursor = self.rx[from];
        if cursor.round as usize != round
            || program.recvs[from].get(cursor.message as usize) != Some(&(i as u32))
        {
            return Ok(None);
        }
        // The header comes first: a disagreement is found before any data is used.
        let Some(frame) = port.rx(from)?.peek(0)? else { return Ok(None) };
        let node = &self.nodes[i];
        check_frame(&frame, r, from, program.plan.rank, self.comm)?;
        let done = frame.done.checked_div(node.unit).unwrap_or(0);
        let left = frame.header.len as usize - frame.done;
        if frame.header.message != cursor.message
            || frame.header.offset.wrapping_add(done as u64) != node.got as u64
            || left.checked_rem(node.unit).unwrap_or(left) != 0
            || left > (self.portion_end(node, node.got) - node.got) * node.unit
        {
            let problem = format!(
                "message {} at element {} ({left} bytes left), expected message {} at element {} in operation #{}",
                frame.header.message, frame.header.offset, cursor.message, node.got, r.number
            );
            return Err(Error::Protocol { peer: from, problem });
        }
        if useful <= frame.ready {
            return Ok(Some(frame));
        }
        port.rx(from)?.peek(useful)
    }

    /// The ranks whose frames, or whose room, the operation waits for.
    pub(crate) fn waiting_for(&self, port: &mut Port) -> Vec<Rank> {
        let Some((_, request)) = &self.current else { return Vec::new() };
        let program = &request.program;
        let mut ranks = Vec::new();
        for (i, step) in program.plan.steps.iter().enumerate() {
            if self.is_done(program, i) {
                continue;
            }
            let node = &self.nodes[i];
            for operand in &step.operands {
                if let Operand::Recv(from) = operand
                    && node.got < node.len
                    && !matches!(port.rx(*from).and_then(|rx| rx.peek(0)), Ok(Some(_)))
                {
                    ranks.push(*from);
                }
            }
            for (k, &peer) in step.send.iter().enumerate() {
                let (sent, freed) = (self.sent[node.first + k], self.freed[node.first + k]);
                let full = matches!(port.tx(peer).and_then(|tx| tx.room()), Ok(false));
                if freed < sent || (sent < node.len && full) {
                    ranks.push(peer);
                }
            }
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The operation in words.
    pub(crate) fn operation(&self, comm: &str) -> Option<Operation> {
        let (_, r) = self.current.as_ref()?;
        Some(Operation { comm: comm.to_owned(), number: r.number, signature: r.signature })
    }
}

fn check_frame(frame: &Frame, r: &Request, from: Rank, rank: Rank, comm: u64) -> Result<(), Error> {
    let header = &frame.header;
    if header.op == r.number && frame.signature() == r.signature && header.comm == comm as u32 {
        return Ok(());
    }
    if header.comm != comm as u32 {
        let problem = format!("a frame of communicator {:#x}, on a link of communicator {:#x}", header.comm, comm as u32);
        return Err(Error::Protocol { peer: from, problem });
    }
    Err(Error::Mismatch {
        comm: comm.to_string(),
        number: header.op.min(r.number),
        rank,
        ours: r.signature,
        peer: from,
        theirs: header.signature,
    })
}
