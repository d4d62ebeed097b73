//! The collective that a communicator is working on: a plan as a resumable machine over slices.
//!
//! Elements of a chunk go through a step in order. Per step there is a cursor for what was gathered, one for what is
//! stored in `dst`, one per receiver for what was sent and one for what that receiver's frames have freed. A step
//! moves when its cursors, and those of the steps it depends on, allow; a pass over all steps never waits.
//!
//! Messages of a link come in rounds: a *round* is the next [`ROUND`] bytes of every chunk, and a plan's messages on a
//! link are ordered round by round. That keeps what is in flight inside the cache, and every round is one complete
//! run of the plan, so what the checker proves of one holds for all.

mod frames;

use std::sync::Arc;
use std::time::{Duration, Instant};

use allstream_kernels as kernels;

use super::inflight::Key;
use super::port::{Lent, Payload, Port};
use crate::error::Error;
use crate::link::{Header, SLOT};
use crate::plan::compile::Holds;
use crate::plan::{At, INPUT, Operand, Program};
use crate::types::{DType, Rank, ReduceOp, Signature};

/// Bytes of each chunk per round: two slots in flight on each link while two more are filled. Chosen for the
/// arena (4 slots per peer pair in flight at 8 ranks fit 4 MB); step 4 measures it per link.
const ROUND: usize = 2 * SLOT;
/// A partly received frame is worth working on from this many bytes.
const USEFUL: usize = 32 << 10;

/// A collective, ready to run.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) program: Arc<Program>,
    pub(crate) number: u64,
    pub(crate) signature: Signature,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) timeout: Duration,
}

// SAFETY: the pointers are into buffers that the in-flight table owns (all `Buf: Send`) until the operation finishes.
unsafe impl Send for Request {}

#[derive(Clone, Copy, Default)]
struct NodeRun {
    /// Elements of this step's chunk; an empty chunk is one element of no bytes, so that it still makes a message.
    len: usize,
    /// Bytes of an element.
    unit: usize,
    /// Elements gathered, and elements stored (or handed to all receivers).
    got: usize,
    pos: usize,
    /// First of this step's receivers in `sent` and `freed`.
    first: usize,
}

/// Where the messages of a link have got to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cursor {
    message: u32,
    round: u32,
}

/// The machine. Its vectors are kept from one operation to the next.
#[derive(Default)]
pub(crate) struct Active {
    current: Option<(Key, Request)>,
    started: Option<Instant>,
    nodes: Vec<NodeRun>,
    sent: Vec<usize>,
    freed: Vec<usize>,
    tx: Vec<Cursor>,
    rx: Vec<Cursor>,
    hands: Vec<Vec<u8>>,
    rounds: u32,
    round: usize,
    comm: u64,
    pub(crate) stalled_at: Option<Instant>,
}

/// Scratch for an inline payload whose step keeps no copy.
#[repr(align(64))]
struct Scratch([u8; Port::INLINE]);

impl Active {
    pub(crate) fn new(comm: u64) -> Active {
        Active { comm, ..Active::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    pub(crate) fn current(&self) -> Option<(Key, &Request, Instant)> {
        let (key, request) = self.current.as_ref()?;
        Some((*key, request, self.started?))
    }

    /// Sets the machine up. No allocation once the vectors have grown.
    pub(crate) fn start(&mut self, key: Key, request: Request) {
        let program = request.program.clone();
        let plan = &program.plan;
        let unit = request.dtype.size();
        self.round = (ROUND / unit).max(1);
        (self.nodes, self.sent, self.freed) =
            (clear(&mut self.nodes), clear(&mut self.sent), clear(&mut self.freed));
        let mut longest = 1;
        for step in &plan.steps {
            let len = length(&program, step, request.count);
            let node = NodeRun {
                len: len.max(1),
                unit: if len == 0 { 0 } else { unit },
                first: self.sent.len(),
                ..NodeRun::default()
            };
            longest = longest.max(node.len);
            self.nodes.push(node);
            self.sent.resize(self.sent.len() + step.send.len(), 0);
            self.freed.resize(self.sent.len(), 0);
        }
        self.rounds = longest.div_ceil(self.round) as u32;
        for cursors in [&mut self.tx, &mut self.rx] {
            cursors.clear();
            cursors.resize(plan.size, Cursor::default());
        }
        if self.hands.len() < plan.steps.len() {
            self.hands.resize_with(plan.steps.len(), Vec::new);
        }
        self.started = Some(Instant::now());
        self.stalled_at = None;
        self.current = Some((key, request));
    }

    /// Forgets the operation: done, or failed.
    pub(crate) fn take(&mut self) -> Option<(Key, Request)> {
        self.started = None;
        self.current.take()
    }

    /// Notes memory that a receiver has given back.
    pub(crate) fn freed(&mut self, lent: Lent) {
        let Some((_, request)) = &self.current else { return };
        if lent.owner == request.number {
            let at = self.nodes[lent.step as usize].first + lent.receiver as usize;
            self.freed[at] = self.freed[at].max(lent.end);
        }
    }

    /// One pass over all steps. Returns whether anything moved, and whether the operation is complete.
    pub(crate) fn pass(&mut self, port: &mut Port) -> Result<(bool, bool), Error> {
        let Some((_, request)) = self.current.clone() else { return Ok((false, false)) };
        let program = request.program.clone();
        let (mut moved, mut complete) = (false, true);
        for i in 0..self.nodes.len() {
            if self.is_done(&program, i) {
                continue;
            }
            while self.gather(&request, &program, i, port)? {
                moved = true;
            }
            while self.push(&request, &program, i, port)? {
                moved = true;
            }
            complete &= self.is_done(&program, i);
        }
        Ok((moved, complete))
    }

    fn is_done(&self, program: &Program, i: usize) -> bool {
        let (node, step) = (&self.nodes[i], &program.plan.steps[i]);
        let stored = step.holds() == Holds::Source || node.pos == node.len;
        let receivers = node.first..node.first + step.send.len();
        // A message posted from memory of ours that is still lent is not done; `freed` says so.
        stored && self.freed[receivers].iter().all(|f| *f == node.len)
    }

    /// How far (exclusive) step `i` may write or read at most, by the steps before it.
    fn written_limit(&self, program: &Program, i: usize) -> usize {
        let after = &program.nodes[i].after_write;
        after.iter().map(|j| self.whole(i, *j, self.nodes[*j as usize].pos)).min().unwrap_or(usize::MAX)
    }

    fn read_limit(&self, program: &Program, i: usize) -> usize {
        let mut limit = usize::MAX;
        for &j in &program.nodes[i].after_read {
            let (node, step) = (&self.nodes[j as usize], &program.plan.steps[j as usize]);
            if step.holds() != Holds::Source {
                limit = limit.min(self.whole(i, j, node.got));
            }
            for freed in &self.freed[node.first..node.first + step.send.len()] {
                limit = limit.min(self.whole(i, j, *freed));
            }
        }
        limit
    }

    /// A cursor of step `j` as a limit for step `i`. Dependent steps share a chunk, so their lengths agree.
    fn whole(&self, i: usize, j: u32, cursor: usize) -> usize {
        debug_assert_eq!(self.nodes[i].len, self.nodes[j as usize].len);
        cursor
    }

    fn portion_end(&self, node: &NodeRun, at: usize) -> usize {
        ((at / self.round + 1) * self.round).min(node.len)
    }

    /// Slices begin at multiples of their length: a frame is always a part of one.
    fn slice_end(&self, node: &NodeRun, at: usize) -> usize {
        let slice = Self::slice(node);
        ((at / slice + 1) * slice).min(self.portion_end(node, at))
    }

    fn slice(node: &NodeRun) -> usize {
        SLOT.checked_div(node.unit).unwrap_or(1)
    }

    fn address(request: &Request, program: &Program, at: At, node: &NodeRun, pos: usize) -> *mut u8 {
        let range = program.plan.slots[at.slot as usize].range(at.chunk, request.count);
        let base = if at.slot == INPUT { request.input.cast_mut() } else { request.output };
        base.wrapping_add(range.start * request.dtype.size() + pos * node.unit)
    }

    /// Moves a link's cursor past the message it is at, skipping messages that have nothing in later rounds.
    fn advance(nodes: &[NodeRun], messages: &[u32], cursor: &mut Cursor, rounds: u32, round: usize) {
        loop {
            cursor.message += 1;
            if cursor.message as usize >= messages.len() {
                *cursor = Cursor { message: 0, round: cursor.round + 1 };
                if cursor.round >= rounds {
                    return;
                }
            }
            let node = &nodes[messages[cursor.message as usize] as usize];
            if node.len > cursor.round as usize * round {
                return;
            }
        }
    }

    fn sending(&self, program: &Program, peer: Rank, i: usize, at: usize) -> bool {
        let cursor = self.tx[peer];
        cursor.round as usize == at / self.round
            && program.sends[peer].get(cursor.message as usize) == Some(&(i as u32))
    }

    /// Gathers and combines one slice of step `i`. Returns whether anything moved.
    fn gather(&mut self, r: &Request, program: &Program, i: usize, port: &mut Port) -> Result<bool, Error> {
        let step = &program.plan.steps[i];
        if step.holds() == Holds::Source {
            return Ok(false);
        }
        let node = self.nodes[i];
        let has_hand = program.nodes[i].hand;
        if node.got > node.pos {
            if self.empty_hand(r, program, i, port)? {
                return Ok(true);
            }
            // A part of a slice (all that one of the links had) is in the hand, and its place is not free. Go on to the
            // slice's end: peers wait to have back what they lent us, a frame at a time, before they free that place.
            if step.dst.is_none() || node.got.is_multiple_of(Self::slice(&node)) {
                return Ok(false);
            }
        }
        if node.got == node.len {
            return Ok(false);
        }
        let round = node.got / self.round;
        let end = self.slice_end(&node, node.got);
        let mut m = end - node.got;
        m = m.min(self.written_limit(program, i).saturating_sub(node.got));
        let writable =
            if step.dst.is_some() { self.read_limit(program, i).saturating_sub(node.got) } else { m };
        if step.operands.len() == 1 || !has_hand {
            m = m.min(writable);
        }
        if m == 0 {
            return Ok(false);
        }
        // A copy whose payload is still in a socket goes straight to where it belongs.
        if let ([Operand::Recv(from)], Some(dst)) = (&step.operands[..], step.dst)
            && !(step.finish && r.op == ReduceOp::Avg)
            && port.rx(*from)?.streams()
            && node.unit > 0
        {
            let Some(_) = self.expect(r, program, i, *from, round, 0, port)? else { return Ok(false) };
            let at = Self::address(r, program, dst, &node, node.pos);
            // SAFETY: `m` elements at `pos` of chunk `dst`: inside the operation's buffer, which the table
            // owns; no other step touches them now (the limits above), no peer reads them (freed).
            let bytes = unsafe { port.rx(*from)?.receive_into(at, m * node.unit, node.unit)? };
            self.gathered(program, i, bytes / node.unit, true);
            return Ok(bytes > 0);
        }
        let mut ins = [std::ptr::null::<u8>(); 64];
        let mut many = Vec::new();
        let count = step.operands.len();
        let ins = if count <= ins.len() {
            &mut ins[..count]
        } else {
            many.resize(count, std::ptr::null());
            &mut many[..]
        };
        for (place, operand) in ins.iter_mut().zip(&step.operands) {
            *place = match operand {
                Operand::Own(at) => Self::address(r, program, *at, &node, node.got),
                Operand::Recv(from) => {
                    let useful = USEFUL.min(m * node.unit);
                    let Some(frame) = self.expect(r, program, i, *from, round, useful, port)? else {
                        return Ok(false);
                    };
                    if let Some(whole) = frame.ready.checked_div(node.unit) {
                        m = m.min(whole);
                    }
                    frame.data
                }
            };
        }
        if m == 0 {
            return Ok(false);
        }
        let ready = self.receivers_ready(program, i, port)?;
        let m = self.combine(r, program, i, (m, writable, ready), ins, port)?;
        Ok(m > 0)
    }

    /// Whether a result can go to all receivers at once: each is at this message, and has room.
    fn receivers_ready(&self, program: &Program, i: usize, port: &mut Port) -> Result<bool, Error> {
        let (node, step) = (&self.nodes[i], &program.plan.steps[i]);
        for (k, &peer) in step.send.iter().enumerate() {
            if self.sent[node.first + k] != node.pos
                || !self.sending(program, peer, i, node.pos)
                || !port.tx(peer)?.room()?
            {
                return Ok(false);
            }
        }
        Ok(!step.send.is_empty())
    }

    /// Combines `m` elements of the operands into `dst`, a slot on its way out, both, or the hand.
    fn combine(
        &mut self,
        r: &Request,
        program: &Program,
        i: usize,
        (mut m, writable, ready): (usize, usize, bool),
        ins: &[*const u8],
        port: &mut Port,
    ) -> Result<usize, Error> {
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let dst = step.dst.map(|at| Self::address(r, program, at, &node, node.pos));
        let to_hand = (dst.is_some() && writable < m) || (dst.is_none() && !ready);
        let mut scratch = Scratch([0; Port::INLINE]);
        let mut outs = [std::ptr::null_mut::<u8>(); 2];
        let (mut used, mut payload) = (0, None);
        if to_hand {
            if dst.is_none() && !program.nodes[i].hand {
                return Ok(0);
            }
            let hand = &mut self.hands[i];
            hand.resize(SLOT, 0);
            // It stands for one slice; `m` ends within it.
            outs[0] = hand[(node.got % Self::slice(&node)) * node.unit..].as_mut_ptr();
            used = 1;
        } else {
            if let Some(dst) = dst {
                outs[0] = dst;
                used = 1;
                payload = Some(Payload::Memory(dst));
            }
            if ready && (dst.is_none() || self.needs_slot(step, m * node.unit, port)?) {
                if m * node.unit <= Port::INLINE {
                    // Inline payloads are copied by the link; without a dst the result passes through here.
                    if dst.is_none() {
                        outs[0] = scratch.0.as_mut_ptr();
                        (used, payload) = (1, Some(Payload::Memory(outs[0])));
                    }
                } else if let Some((slot, at)) = port.take_slot() {
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
        self.run_kernel(r, program, i, m, ins, &outs[..used]);
        for operand in &step.operands {
            if let Operand::Recv(from) = operand {
                port.rx(*from)?.release(m * node.unit);
            }
        }
        self.gathered(program, i, m, !to_hand);
        if let Some(payload) = payload {
            for k in 0..step.send.len() {
                self.post(r, program, i, (k, node.pos, m), payload, port)?;
            }
        }
        Ok(m)
    }

    fn run_kernel(
        &self,
        r: &Request,
        program: &Program,
        i: usize,
        m: usize,
        ins: &[*const u8],
        outs: &[*mut u8],
    ) {
        let (node, step) = (&self.nodes[i], &program.plan.steps[i]);
        if node.unit == 0 || outs.is_empty() {
            return;
        }
        let finish = (step.finish && r.op == ReduceOp::Avg).then_some(program.plan.size as u32);
        // SAFETY: every operand has `m` elements readable: our own chunks by the layout (the table owns the buffers),
        // frames by `ready`. Outs have room: `dst` by the layout, slots, hands and scratch by their size. An out is
        // either equal to an operand (in place) or disjoint from all: chunks of a layout do not overlap, and staging
        // belongs to this frame alone.
        unsafe {
            if ins.len() == 1 && finish.is_none() {
                if ins[0] != outs[0].cast_const() {
                    kernels::copy(ins[0], outs, m * node.unit);
                } else if outs.len() > 1 {
                    kernels::copy(ins[0], &outs[1..], m * node.unit);
                }
            } else {
                kernels::reduce(r.dtype, r.op, ins, outs, m, finish);
            }
        }
    }

    fn needs_slot(&self, step: &crate::plan::Step, bytes: usize, port: &mut Port) -> Result<bool, Error> {
        if bytes <= Port::INLINE {
            return Ok(false);
        }
        for &peer in &step.send {
            if port.tx(peer)?.needs_slot() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Books `m` gathered elements, and the ends of messages.
    fn gathered(&mut self, program: &Program, i: usize, m: usize, stored: bool) {
        let round = self.round;
        let node = &mut self.nodes[i];
        node.got += m;
        if stored {
            node.pos = node.got;
        }
        let (got, at_end) = (node.got, node.got.is_multiple_of(round) || node.got == node.len);
        if m > 0 && at_end && got > 0 {
            for operand in &program.plan.steps[i].operands {
                if let Operand::Recv(from) = operand {
                    Self::advance(
                        &self.nodes,
                        &program.recvs[*from],
                        &mut self.rx[*from],
                        self.rounds,
                        round,
                    );
                }
            }
        }
    }

    /// Moves what the hand holds to where it belongs, once that is free.
    fn empty_hand(
        &mut self,
        r: &Request,
        program: &Program,
        i: usize,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let mut m = node.got - node.pos;
        let mut bytes = m * node.unit;
        let hand = self.hands[i][(node.pos % Self::slice(&node)) * node.unit..].as_ptr();
        if let Some(dst) = step.dst {
            if self.read_limit(program, i) < node.got {
                return Ok(false);
            }
            let at = Self::address(r, program, dst, &node, node.pos);
            // SAFETY: the hand holds `m` elements; `dst` has room by the layout and nothing reads it (read_limit).
            unsafe { std::ptr::copy_nonoverlapping(hand, at, bytes) };
        } else {
            if !self.receivers_ready(program, i, port)? {
                return Ok(false);
            }
            let slot = if bytes > Port::INLINE { port.take_slot() } else { None };
            let payload = match slot {
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
                self.post(r, program, i, (k, node.pos, m), payload, port)?;
            }
        }
        self.nodes[i].pos += m;
        Ok(true)
    }

    /// Sends one slice that is stored (or our own input) and not sent yet. Returns whether anything moved.
    fn push(&mut self, r: &Request, program: &Program, i: usize, port: &mut Port) -> Result<bool, Error> {
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let source = step.holds() == Holds::Source;
        let from = match (source, step.dst, &step.operands[..]) {
            (true, _, [Operand::Own(at)]) => *at,
            (false, Some(dst), _) => dst,
            _ => return Ok(false), // sent from the hand, or nothing to send
        };
        let limit = if source { self.written_limit(program, i).min(node.len) } else { node.pos };
        for (k, &peer) in step.send.iter().enumerate() {
            let sent = self.sent[node.first + k];
            if sent >= limit || !self.sending(program, peer, i, sent) || !port.tx(peer)?.room()? {
                continue;
            }
            let end = self.slice_end(&node, sent);
            let mut m = limit.min(end) - sent;
            if sent + m < end && m * node.unit < USEFUL {
                continue; // more of this message is about to be there
            }
            let at = Self::address(r, program, from, &node, sent).cast_const();
            let mut payload = Payload::Memory(at);
            if m * node.unit > Port::INLINE && port.tx(peer)?.needs_slot() {
                if let Some((slot, place)) = port.take_slot() {
                    // SAFETY: `m` elements of our own chunk (or stored result), at most a slot; the slot is ours.
                    unsafe { kernels::copy(at, &[place], m * node.unit) };
                    payload = Payload::Slot(slot, place);
                } else {
                    // No slot is free: what fits a cell goes, so that no other communicator's backlog stops us.
                    m = Port::INLINE / node.unit;
                }
            }
            self.post(r, program, i, (k, sent, m), payload, port)?;
            // The same slot serves every receiver that is at the same place.
            if matches!(payload, Payload::Slot(..)) {
                for (other, &peer) in step.send.iter().enumerate().skip(k + 1) {
                    if self.sent[node.first + other] == sent
                        && self.sending(program, peer, i, sent)
                        && port.tx(peer)?.room()?
                    {
                        self.post(r, program, i, (other, sent, m), payload, port)?;
                    }
                }
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// Posts elements `at..at + m` of step `i` to its `k`-th receiver.
    fn post(
        &mut self,
        r: &Request,
        program: &Program,
        i: usize,
        (k, at, m): (usize, usize, usize),
        payload: Payload,
        port: &mut Port,
    ) -> Result<(), Error> {
        let (node, peer) = (self.nodes[i], program.plan.steps[i].send[k]);
        let header = Header {
            comm: self.comm as u32,
            op: r.number,
            offset: at as u64,
            len: (m * node.unit) as u32,
            message: self.tx[peer].message,
            signature: r.signature,
        };
        let end = at + m;
        let free = port.post(peer, header, payload, (r.number, i as u32, k as u32, end))?;
        let index = node.first + k;
        if free && self.freed[index] == at {
            self.freed[index] = end;
        }
        self.sent[index] = end;
        if end % self.round == 0 || end == node.len {
            Self::advance(&self.nodes, &program.sends[peer], &mut self.tx[peer], self.rounds, self.round);
        }
        Ok(())
    }
}

fn clear<T>(v: &mut Vec<T>) -> Vec<T> {
    let mut v = std::mem::take(v);
    v.clear();
    v
}

/// Elements of a step: the length of any chunk it names, or of the message that passes through.
fn length(program: &Program, step: &crate::plan::Step, count: usize) -> usize {
    let own = step.operands.iter().find_map(|o| match o {
        Operand::Own(at) => Some(*at),
        Operand::Recv(_) => None,
    });
    step.dst.or(own).map_or(0, |at| program.plan.slots[at.slot as usize].range(at.chunk, count).len())
}
