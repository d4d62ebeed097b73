//! What a machine does to memory: combining, copying, scaling.

use allstream_kernels as kernels;

use super::{Context, Machine, SCALED, Scratch};
use crate::error::Error;
use crate::exec::operation::Reduction;
use crate::exec::port::{Payload, Port};
use crate::link::SLOT;
use crate::plan::{INPUT, OUTPUT, Operand, Step};
use crate::types::Kind;

impl Machine {
    /// Combines `m` elements of the operands into `dst`, a slot on its way out, both, or the hand.
    pub(super) fn combine(
        &mut self,
        c: Context<'_>,
        i: usize,
        (mut m, writable, ready): (usize, usize, bool),
        ins: &[*const u8],
        port: &mut Port,
    ) -> Result<usize, Error> {
        if let Some(device) = &c.op.device {
            return self.combine_on_device(c, device, i, (m, writable, ready), ins, port);
        }
        let program = &c.part.program;
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let dst = step.dst.map(|at| self.address(c.part, at, &node, node.pos));
        let to_hand = (dst.is_some() && writable < m) || (dst.is_none() && !ready);
        let from_source = self.sends_source(c, i);
        let lent = if from_source { Some(ins[0]) } else { dst.map(<*mut u8>::cast_const) };
        let mut scratch = Scratch([0; Port::INLINE]);
        let mut outs = [std::ptr::null_mut::<u8>(); 2];
        let (mut used, mut payload, mut in_slot) = (0, None, false);
        if to_hand {
            if dst.is_none() && !program.nodes[i].hand {
                return Ok(0);
            }
            if c.setting.phantom.is_none() {
                let at = (node.got % self.slice(&node)) * node.unit;
                let hand = self.memory.hand(i);
                // It stands for one slice; `m` ends within it.
                outs[0] = hand[at..].as_mut_ptr();
            }
            used = 1;
        } else {
            if let Some(dst) = dst {
                outs[0] = dst;
                used = 1;
                payload = lent.map(Payload::Memory);
            }
            if ready && (dst.is_none() || self.needs_slot(step, lent, m * node.unit, port)?) {
                if c.setting.phantom.is_some() {
                    (used, payload) = (used.max(1), Some(Payload::Memory(outs[0])));
                } else if m * node.unit <= Port::INLINE {
                    // Inline payloads are copied by the link; without a dst the result passes through here.
                    if dst.is_none() {
                        outs[0] = scratch.0.as_mut_ptr();
                        (used, payload) = (1, Some(Payload::Memory(outs[0])));
                    }
                } else if let Some((slot, at)) = port.take_slot(m * node.unit) {
                    in_slot = true;
                    outs[used] = at;
                    used += 1;
                    payload = Some(Payload::Slot(slot, at));
                } else if dst.is_some() {
                    payload = None; // stored now, sent from dst when a slot is free
                } else {
                    m = Port::INLINE / node.unit;
                    outs[0] = scratch.0.as_mut_ptr();
                    (used, payload) = (1, Some(Payload::Memory(outs[0])));
                }
            }
            if !ready {
                payload = None;
            }
        }
        // Copies that nobody reads again soon: not even a peer, from there. A fold, which waits for what it reads, gained nothing.
        let is_copy = ins.len() == 1 && !c.divides(step);
        let is_final = dst.is_some() && !to_hand && program.nodes[i].is_final;
        let streams =
            self.shared.streams && is_copy && is_final && (step.send.is_empty() || in_slot || from_source);
        // Copied ahead, it would be read from memory once more to be sent. As a step that only sends, it waits for its receiver:
        // nothing waits for what it stores. Not where `push` waits for more of a message.
        if streams && from_source && !ready && self.cut.least == 0 && step.send.len() == 1 {
            return Ok(0);
        }
        if is_copy && in_slot && node.unit > 0 {
            // The source is in a cache when it is copied once more.
            used -= 1;
            // SAFETY: as in `run_kernel`; the slot, the last of the outs, has room for a slice.
            unsafe { port.filling.copy(ins[0], outs[used], m * node.unit) };
        }
        self.run_kernel(c, i, m, ins, (&outs[..used], streams))?;
        for operand in &step.operands {
            if let Operand::Recv(from) = operand {
                port.rx(*from)?.release(m * node.unit);
            }
        }
        self.gathered(program, i, m, !to_hand);
        if let Some(payload) = payload {
            for k in 0..step.send.len() {
                self.post(c, i, (k, node.pos, m), &payload, port)?;
            }
        }
        Ok(m)
    }

    fn run_kernel(
        &self,
        c: Context<'_>,
        i: usize,
        m: usize,
        ins: &[*const u8],
        (outs, streams): (&[*mut u8], bool),
    ) -> Result<(), Error> {
        let plan = &c.part.program.plan;
        let (node, step) = (&self.nodes[i], &plan.steps[i]);
        if node.unit == 0 || outs.is_empty() {
            return Ok(());
        }
        if let Some(phantom) = &c.setting.phantom {
            phantom.work((ins.len() + outs.len()) * m * node.unit);
            return Ok(());
        }
        let finish = c.divides(step).then_some(plan.size as u32);
        // SAFETY: every operand has `m` elements readable: our own chunks by the layout (the table owns the buffers),
        // frames by `ready`. Outs have room: `dst` by the layout, slots, hands and scratch by their size. An out is
        // either equal to an operand (in place) or disjoint from all: chunks of a layout do not overlap, and staging
        // belongs to this frame alone.
        unsafe {
            if streams {
                kernels::copy_streaming(ins[0], outs[0], m * node.unit);
            } else if ins.len() == 1 && finish.is_none() {
                if ins[0] != outs[0].cast_const() {
                    kernels::copy(ins[0], outs, m * node.unit);
                } else if outs.len() > 1 {
                    kernels::copy(ins[0], &outs[1..], m * node.unit);
                }
            } else {
                match &c.op.reduction {
                    Reduction::Op(op) => kernels::reduce(c.part.dtype, *op, ins, outs, m, finish),
                    Reduction::Function(function) => {
                        if !function.combine(ins, outs, m) {
                            let kind = c.op.signature.collective();
                            return Err(Error::Function {
                                call: kind.map_or("a reduction", Kind::name).into(),
                                name: function.name().into(),
                                rank: plan.rank,
                            });
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a step that stores a copy of our own input sends it from the input, where it stays: what was stored may have
    /// left the caches.
    pub(super) fn sends_source(&self, c: Context<'_>, i: usize) -> bool {
        let step = &c.part.program.plan.steps[i];
        let is_input = matches!(&step.operands[..], [Operand::Own(at)] if at.slot == INPUT);
        is_input && !c.divides(step) && c.op.device.is_none() && !c.part.is_in_place()
    }

    fn needs_slot(
        &self,
        step: &Step,
        lent: Option<*const u8>,
        bytes: usize,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let at = lent.unwrap_or(std::ptr::null());
        if bytes <= Port::INLINE {
            return Ok(false);
        }
        for &peer in &step.send {
            if port.tx(peer)?.needs_slot(at, bytes) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Moves what the hand holds to where it belongs, once that is free.
    pub(super) fn empty_hand(&mut self, c: Context<'_>, i: usize, port: &mut Port) -> Result<bool, Error> {
        if let Some(device) = &c.op.device {
            return self.empty_hand_on_device(c, device, i, port);
        }
        let program = &c.part.program;
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let mut m = node.got - node.pos;
        let mut bytes = m * node.unit;
        let phantom = c.setting.phantom.is_some();
        let begin = (node.pos % self.slice(&node)) * node.unit;
        let hand = match phantom {
            true => std::ptr::null(),
            false => self.memory.hand(i)[begin..].as_ptr(),
        };
        if let Some(dst) = step.dst {
            if self.read_limit(program, i) < node.got {
                return Ok(false);
            }
            let at = self.address(c.part, dst, &node, node.pos);
            if !phantom {
                // SAFETY: the hand holds `m` elements; `dst` has room by the layout and nothing reads it (read_limit).
                unsafe { std::ptr::copy_nonoverlapping(hand, at, bytes) };
            }
        } else {
            if !self.receivers_ready(c, i, port)? {
                return Ok(false);
            }
            let slot = if bytes > Port::INLINE && !phantom { port.take_slot(bytes) } else { None };
            let payload = match slot {
                _ if phantom => Payload::Memory(hand),
                Some((slot, at)) => {
                    // SAFETY: a slot has room for a slice, and is ours alone until posted.
                    unsafe { std::ptr::copy_nonoverlapping(hand, at, bytes) };
                    Payload::Slot(slot, at)
                }
                None => {
                    // What fits a cell goes: no other communicator's backlog stops us.
                    m = m.min(Port::INLINE.checked_div(node.unit).unwrap_or(m));
                    bytes = m * node.unit;
                    Payload::Memory(hand)
                }
            };
            debug_assert!(bytes <= SLOT);
            for k in 0..step.send.len() {
                self.post(c, i, (k, node.pos, m), &payload, port)?;
            }
        }
        self.nodes[i].pos += m;
        Ok(true)
    }

    /// Multiplies the next elements of the input: in place where the operation is, else in a copy.
    pub(super) fn scale(&mut self, c: Context<'_>) {
        let (part, Some(done), Some(factor)) = (c.part, self.scaled, c.op.scale) else { return };
        let unit = part.dtype.size();
        let len = part.total(if part.is_in_place() { OUTPUT } else { INPUT });
        // A rank that only gives (to the root of a reduce, say) keeps its buffer as it was.
        let in_place = part.is_in_place() && part.leaves_result(&c.op.signature, true);
        let m = (len - done).min(SCALED / unit);
        let to = if in_place { part.output } else { self.memory.scale(len * unit) };
        let at = to.wrapping_add(done * unit);
        // SAFETY: `m` elements from `done` on are inside the input, which the table owns, and inside what they go to:
        // the input itself, or memory of ours of the same length. No step has run yet: nobody else touches either.
        unsafe {
            if !in_place {
                kernels::copy(part.input.wrapping_add(done * unit), &[at], m * unit);
            }
            kernels::scale(part.dtype, at, m, factor);
        }
        self.scaled = (done + m < len).then_some(done + m);
    }
}
