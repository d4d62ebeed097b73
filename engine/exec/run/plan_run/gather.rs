//! How a step goes on: it gathers its operands, has them combined, and sends the result.

use super::{Backend, LinkUse, PlanRun, Turn};
use crate::error::Error;
use crate::exec::backend::Slice;
use crate::exec::port::{Payload, Port};
use crate::plan::{Holds, INPUT, Operand};
use crate::types::Rank;

/// A partly received frame is worth working on from this many bytes.
const USEFUL: usize = 32 << 10;

/// The part of a step's chunk that one frame carries to one of the step's receivers.
#[derive(Clone, Copy)]
struct Fragment {
    /// Which of the step's receivers.
    receiver: usize,
    /// The first of its elements, in the chunk.
    at: usize,
    /// How many elements it has.
    len: usize,
}

/// Declares an array for the operands' addresses, as small as their count allows: most steps have one or two, and clearing a
/// large array takes time.
macro_rules! operands {
    ($ins:ident, $count:expr) => {
        let (mut few, mut some, mut many);
        let $ins: &mut [*const u8] = match $count {
            count @ 0..=4 => {
                few = [std::ptr::null(); 4];
                &mut few[..count]
            }
            count @ 5..=64 => {
                some = [std::ptr::null(); 64];
                &mut some[..count]
            }
            count => {
                many = vec![std::ptr::null(); count];
                &mut many[..]
            }
        };
    };
}

impl<B: Backend> PlanRun<B> {
    /// Whether step `i` stores a copy of our own input, and sends it from the input: the stored copy may have left the
    /// caches.
    fn sends_input(&self, t: Turn<'_, impl LinkUse>, i: usize) -> bool {
        let step = &t.c.program().plan.steps[i];
        let is_input = matches!(&step.operands[..], [Operand::Own(at)] if at.slot == INPUT);
        B::SENDS_INPUT && is_input && !t.c.divides(step) && !t.c.part.is_in_place()
    }

    /// Gathers and combines one slice of step `i`. Returns whether anything moved.
    pub(super) fn gather(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        i: usize,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let program = t.c.program();
        let step = &program.plan.steps[i];
        if step.holds() == Holds::Source {
            return Ok(false);
        }
        let state = self.steps[i];
        if state.got > state.pos {
            if self.flush(t, i, port)? {
                return Ok(true);
            }
            // The accumulator has a part of a slice (as much as one of the links had), whose destination is not free. Gather on
            // to the slice's end: peers may free the destination only when we have given back the frames that they lent us.
            if step.dst.is_none() || state.got.is_multiple_of(self.slicing.slice_of(state.unit)) {
                return Ok(false);
            }
        }
        if state.got == state.len {
            return Ok(false);
        }
        let round = state.got / self.round;
        let mut m = self.slice_end(&state, state.got) - state.got;
        m = m.min(self.written_limit(program, i).saturating_sub(state.got));
        let writable =
            if step.dst.is_some() { self.read_limit(program, i).saturating_sub(state.got) } else { m };
        if !program.nodes[i].hand || (step.dst.is_some() && !step.gathers_early()) {
            m = m.min(writable);
        }
        if m == 0 {
            return Ok(false);
        }
        // The link receives whenever there is room at `dst`: an earlier call of `LinkRx::receive_into` may have left that room to the
        // link, and then nothing may use the frame but another such call, which goes on there.
        if writable > 0 && self.receives_itself(t, i, port)? {
            return self.receive(t, i, writable, port);
        }
        operands!(ins, step.operands.len());
        for k in (state.missing..ins.len()).chain(0..state.missing) {
            ins[k] = match &step.operands[k] {
                Operand::Own(at) => self.address(t.c.part, *at, &state, state.got),
                // Plans of loans are not run step by step.
                Operand::Lent(_) => return Ok(false),
                Operand::Recv(from) => {
                    let useful = USEFUL.min(m * state.unit);
                    let Some(frame) = self.expect(t, i, *from, (round, useful), port)? else {
                        self.steps[i].missing = k;
                        return Ok(false);
                    };
                    if let Some(whole) = frame.ready.checked_div(state.unit) {
                        m = m.min(whole);
                    }
                    frame.data
                }
            };
        }
        if m == 0 {
            return Ok(false);
        }
        // A stored result that is too little for a frame of its own is sent later, with what follows it (`push`).
        let is_worth =
            m * state.unit >= self.slicing.least || state.got + m == self.portion_end(&state, state.got);
        let is_ready = is_worth && self.receivers_ready(t, i, port)?;
        let at = self.steps[i].got;
        let slice = Slice { m, ins, is_writable: m <= writable, is_ready, ..self.slice(t, i, at) };
        self.combine(t, &slice, port)
    }

    /// Has a slice combined, gives its operands back and posts its result. Returns whether anything was done.
    fn combine(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        slice: &Slice<'_>,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let program = t.c.program();
        let done = self.backend.combine(slice, port)?;
        if done.taken == 0 {
            return Ok(false);
        }
        let (i, state, step) = (slice.i, slice.state, slice.step);
        for operand in &step.operands {
            if let Operand::Recv(from) = operand {
                port.rx(*from)?.release(done.taken * state.unit);
            }
        }
        self.gathered(program, i, done.taken, done.is_stored);
        if let Some(payload) = done.payload {
            for receiver in 0..step.send.len() {
                self.post(t, i, Fragment { receiver, at: state.pos, len: done.taken }, &payload, port)?;
            }
        }
        Ok(true)
    }

    /// Step `i` at element `at` of its chunk, as a backend sees it, without operands.
    #[inline(always)] // most of it is known where it is called
    fn slice<'a>(&self, t: Turn<'a, impl LinkUse>, i: usize, at: usize) -> Slice<'a> {
        let (step, state) = (&t.c.program().plan.steps[i], self.steps[i]);
        Slice {
            c: t.c,
            i,
            step,
            state,
            m: 0,
            ins: &[],
            dst: step.dst.map(|dst| self.address(t.c.part, dst, &state, at)),
            is_writable: true,
            is_ready: false,
            is_input: self.sends_input(t, i),
            slicing: self.slicing,
        }
    }

    /// Whether step `i` is a copy whose payload is not in this rank's memory yet, but in a socket or still at the sender: then the link brings it
    /// straight to its place.
    fn receives_itself(&self, t: Turn<'_, impl LinkUse>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let step = &t.c.program().plan.steps[i];
        let ([Operand::Recv(from)], Some(_)) = (&step.operands[..], step.dst) else { return Ok(false) };
        Ok(!t.c.divides(step) && port.rx(*from)?.is_byte_stream() && self.steps[i].unit > 0)
    }

    /// Has the link bring what has come of a payload for which `receives_itself` is true. Returns whether anything moved.
    fn receive(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        i: usize,
        writable: usize,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let (program, state) = (t.c.program(), self.steps[i]);
        let step = &program.plan.steps[i];
        let ([Operand::Recv(from)], Some(dst)) = (&step.operands[..], step.dst) else { return Ok(false) };
        let Some(_) = self.expect(t, i, *from, (state.got / self.round, 0), port)? else { return Ok(false) };
        // As much as the link brings at once, not cut into slices: a copy has nothing to compute.
        let end = self.written_limit(program, i).min(self.portion_end(&state, state.got));
        let m = writable.min(end - state.got);
        let at = self.address(t.c.part, dst, &state, state.pos);
        // SAFETY: `m` elements at `pos` of chunk `dst`: inside the operation's buffer, which the table
        // owns; no other step touches them now, and no peer reads them, as `written_limit` and `writable` say.
        let bytes = unsafe { port.rx(*from)?.receive_into(at, m * state.unit, state.unit)? };
        self.gathered(program, i, bytes / state.unit, true);
        Ok(bytes > 0)
    }

    /// Moves what the accumulator holds to where it belongs, once that is free, or sends it. Returns whether anything moved.
    fn flush(&mut self, t: Turn<'_, impl LinkUse>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let state = self.steps[i];
        let slice = Slice { m: state.got - state.pos, ..self.slice(t, i, state.pos) };
        if slice.dst.is_some() {
            if self.read_limit(t.c.program(), i) < state.got {
                return Ok(false);
            }
            self.backend.store(&slice)?;
            self.steps[i].pos += slice.m;
            return Ok(true);
        }
        if !self.receivers_ready(t, i, port)? {
            return Ok(false);
        }
        let (m, payload) = self.backend.send_accumulated(&slice, port)?;
        for receiver in 0..slice.step.send.len() {
            self.post(t, i, Fragment { receiver, at: state.pos, len: m }, &payload, port)?;
        }
        self.steps[i].pos += m;
        Ok(true)
    }

    /// Whether the next message to a peer is step `i`'s, at element `at`.
    fn sending(&self, t: Turn<'_, impl LinkUse>, peer: Rank, i: usize, at: usize) -> bool {
        let cursor = self.tx[peer];
        cursor.round as usize == at / self.round
            && t.c.program().sends[peer].get(cursor.message as usize) == Some(&(i as u32))
            && t.may_send(peer)
    }

    /// Whether a result can go to all receivers at once: on the link to each, this message is the next one, and there is room.
    fn receivers_ready(&self, t: Turn<'_, impl LinkUse>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let (state, step) = (&self.steps[i], &t.c.program().plan.steps[i]);
        for (k, &peer) in step.send.iter().enumerate() {
            if self.sent[state.first + k] != state.pos
                || !self.sending(t, peer, i, state.pos)
                || !port.tx(peer)?.room()?
            {
                return Ok(false);
            }
        }
        Ok(!step.send.is_empty())
    }

    /// Sends, in one frame, elements that are stored (or are our own input) and were not sent yet. Returns whether anything moved.
    pub(super) fn push(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        i: usize,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let program = t.c.program();
        let (state, step) = (self.steps[i], &program.plan.steps[i]);
        let source = step.holds() == Holds::Source;
        let from = match (source, step.dst, &step.operands[..]) {
            (_, dst, [Operand::Own(at)]) if source || dst.is_some() && self.sends_input(t, i) => *at,
            (false, Some(dst), _) => dst,
            _ => return Ok(false), // sent from the accumulator, or nothing to send
        };
        let limit = if source { self.written_limit(program, i).min(state.len) } else { state.pos };
        for (k, &peer) in step.send.iter().enumerate() {
            let sent = self.sent[state.first + k];
            if sent >= limit || !self.sending(t, peer, i, sent) {
                continue;
            }
            let tx = port.tx(peer)?;
            if !tx.room()? {
                continue;
            }
            let end = self.frame_end(&state, sent, if program.whole { tx.max_frame_len() } else { 0 });
            let m = limit.min(end) - sent;
            if sent + m < end && m * state.unit < USEFUL.max(self.slicing.least) {
                continue; // more of this message is about to be there
            }
            let at = self.address(t.c.part, from, &state, sent).cast_const();
            self.push_slice(t, i, Fragment { receiver: k, at: sent, len: m }, at, port)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Sends a fragment of step `i` that lies in memory at `from` to its receiver. If it goes in a slot, later receivers whose
    /// next element is the same get it, too.
    fn push_slice(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        i: usize,
        mut fragment: Fragment,
        from: *const u8,
        port: &mut Port,
    ) -> Result<(), Error> {
        let (state, step) = (self.steps[i], &t.c.program().plan.steps[i]);
        let (mut payload, bytes) = (Payload::Memory(from), fragment.len * state.unit);
        if bytes > Port::INLINE && port.tx(step.send[fragment.receiver])?.needs_slot(from, bytes) {
            if let Some((slot, place)) = port.take_slot(bytes) {
                // SAFETY: the fragment is elements of our own chunk (or stored result), at most a slot; the slot is ours.
                unsafe { self.backend.fill_slot(from, place, bytes, port) };
                payload = Payload::Slot(slot, place);
            } else {
                // No slot is free: only what fits into a cell is sent, so that no other communicator's backlog stops us.
                fragment.len = Port::INLINE / state.unit;
            }
        }
        self.post(t, i, fragment, &payload, port)?;
        if matches!(payload, Payload::Slot(..)) {
            for (other, &peer) in step.send.iter().enumerate().skip(fragment.receiver + 1) {
                if self.sent[state.first + other] == fragment.at
                    && self.sending(t, peer, i, fragment.at)
                    && port.tx(peer)?.room()?
                {
                    self.post(t, i, Fragment { receiver: other, ..fragment }, &payload, port)?;
                }
            }
        }
        Ok(())
    }

    /// Posts a fragment of step `i` to its receiver.
    fn post(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        i: usize,
        Fragment { receiver: k, at, len: m }: Fragment,
        payload: &Payload,
        port: &mut Port,
    ) -> Result<(), Error> {
        let program = t.c.program();
        let (state, peer) = (self.steps[i], program.plan.steps[i].send[k]);
        let end = at + m;
        let (header, source) = t.frame(i, &state, k, (at, m), self.tx[peer].message);
        let free = port.post(peer, header, payload, source)?;
        self.touched += m * state.unit;
        let index = state.first + k;
        if free && self.freed[index] == at {
            self.freed[index] = end;
        }
        self.sent[index] = end;
        if end % self.round == 0 || end == state.len {
            Self::advance(&self.steps, &program.sends[peer], &mut self.tx[peer], self.rounds, self.round);
            self.mark_heads(program, peer);
        }
        Ok(())
    }
}
