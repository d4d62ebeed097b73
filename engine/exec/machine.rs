//! A plan as a resumable machine over slices.
//!
//! Elements of a chunk go through a step in order. Per step there is a cursor for what was gathered, one for what is
//! stored in `dst`, one per receiver for what was sent and one for what that receiver's frames have freed. A step
//! moves when its cursors, and those of the steps it depends on, allow; a pass over all steps never waits.
//!
//! Messages of a link come in rounds: a *round* is the next slices of every chunk ([`Cut`]), and a plan's messages on a
//! link are ordered round by round. That keeps what is in flight inside the cache, and every round is one complete
//! run of the plan, so what the checker proves of one holds for all. The parts of one operation follow each other on
//! each link: the next one's machine may use it when this one's has nothing more for it.

mod context;
mod device;
mod frames;
mod fused;
mod kernel;
mod memory;
mod setting;
mod shared;
mod staged;

use std::collections::VecDeque;

use self::context::Context;
use self::device::OnDevice;
use self::memory::Memory;
pub(crate) use self::setting::Phantom;
pub(super) use self::setting::{Cut, Setting};
use self::shared::Shared;
pub(crate) use self::shared::{FROM as FOLDED_FROM, MOST as MOST_FOLD, STAGED_FROM};
pub(crate) use self::staged::{STRIPE, cut};
use super::operation::{Operation, Part, Reduction};
use super::port::{Lent, Payload, Port};
use crate::error::Error;
use crate::link::waits::Wait;
use crate::link::{Header, SLOT};
use crate::plan::compile::Holds;
use crate::plan::{At, INPUT, OUTPUT, Operand, Program, SCRATCH};
use crate::types::Rank;

/// A partly received frame is worth working on from this many bytes.
const USEFUL: usize = 32 << 10;
/// Bytes that are scaled in one pass: a lane has other work too.
const SCALED: usize = 256 << 10;
/// Bytes that a pass gathers and posts, about. A pass holds its rank's gate: while a peer keeps up, the other communicators of the
/// rank would wait for a whole chunk.
pub(super) const BUDGET: usize = 4 << 20;

#[derive(Clone, Copy, Default)]
struct NodeRun {
    /// Elements of this step's chunk; an empty chunk is one element of no bytes, so that it still makes a message.
    len: usize,
    /// Bytes of an element.
    unit: usize,
    /// Elements gathered, and elements stored (or handed to all receivers).
    got: usize,
    pos: usize,
    /// The operand that was missing last: looked at first, so that a step of many is not gone through for each.
    missing: usize,
    /// First of this step's receivers in `sent` and `freed`.
    first: usize,
}

/// Where the messages of a link have got to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cursor {
    message: u32,
    round: u32,
}

/// Steps to be looked at: what they wait for may have come. Each is listed once.
#[derive(Default)]
struct Hot {
    list: VecDeque<u32>,
    listed: Vec<bool>,
}

impl Hot {
    /// All of so many steps, in order.
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
}

/// The machine. Its vectors are kept from one part to the next.
pub(super) struct Machine {
    /// What it works on, and the number of the operation.
    work: Option<Part>,
    number: u64,
    /// Which part of the operation: its messages say so, and frames that come back.
    part: u16,
    nodes: Vec<NodeRun>,
    sent: Vec<usize>,
    freed: Vec<usize>,
    tx: Vec<Cursor>,
    rx: Vec<Cursor>,
    /// Hands, the third slot, and a scaled copy of the input.
    memory: Memory,
    /// The same of an operation that a device runs.
    on_device: OnDevice,
    /// Of a part that is folded at once, in all ranks' memory.
    shared: Shared,
    /// Elements scaled so far; `None`: nothing to scale (any more).
    scaled: Option<usize>,
    rounds: u32,
    round: usize,
    cut: Cut,
    /// Which part that is, counted as the operation does.
    pub(super) order: usize,
    /// So many rounds of the memory may be touched: of the rest, the input has not come.
    filled: usize,
    hot: Hot,
    done: Vec<bool>,
    /// Steps that are not done.
    left: usize,
    /// Bytes gathered and posted in this pass.
    touched: usize,
}

/// Scratch for an inline payload whose step keeps no copy.
#[repr(align(64))]
struct Scratch([u8; Port::INLINE]);

impl Machine {
    pub(super) fn new() -> Machine {
        Machine {
            work: None,
            number: 0,
            part: 0,
            nodes: Vec::new(),
            sent: Vec::new(),
            freed: Vec::new(),
            tx: Vec::new(),
            rx: Vec::new(),
            memory: Memory::default(),
            on_device: OnDevice::default(),
            shared: Shared::default(),
            scaled: None,
            rounds: 0,
            round: 0,
            cut: Cut::by(SLOT),
            order: 0,
            filled: usize::MAX,
            hot: Hot::default(),
            done: Vec::new(),
            left: 0,
            touched: 0,
        }
    }

    /// Whether a frame came from this machine, and from the part that it is at: a frame that was copied as it was
    /// posted may come back when its part is long done, and the machine is at another.
    pub(super) fn posted(&self, lent: &Lent) -> bool {
        lent.receiver >> RECEIVER_BITS == u32::from(self.part)
    }

    /// Sets the machine up. No allocation once the vectors have grown.
    pub(super) fn start(&mut self, setting: &Setting, op: &Operation, part: Part, index: u16) {
        let plan = &part.program.plan;
        let unit = part.dtype.size();
        (self.number, self.part) = (op.number, index);
        self.cut = setting.cut(op, &part.program);
        self.round = (self.cut.round / unit).max(1);
        self.nodes.clear();
        self.sent.clear();
        let mut longest = 1;
        for step in &plan.steps {
            // Every plan's steps name memory of our own (plan/tests).
            let len = step.chunk().map_or(0, |at| part.range(at.slot, at.chunk).len());
            let node = NodeRun {
                len: len.max(1),
                unit: if len == 0 { 0 } else { unit },
                first: self.sent.len(),
                ..NodeRun::default()
            };
            longest = longest.max(node.len);
            self.nodes.push(node);
            self.sent.resize(self.sent.len() + step.send.len(), 0);
        }
        self.freed.clear();
        self.freed.resize(self.sent.len(), 0);
        self.rounds = longest.div_ceil(self.round) as u32;
        for cursors in [&mut self.tx, &mut self.rx] {
            cursors.clear();
            cursors.resize(plan.size, Cursor::default());
        }
        let has_scratch = plan.slots.len() > usize::from(SCRATCH) && setting.takes_time(op);
        let scratch = if has_scratch { part.total(SCRATCH) * unit } else { 0 };
        self.memory.begin(plan.steps.len(), scratch);
        self.done.clear();
        self.done.resize(plan.steps.len(), false);
        self.left = plan.steps.len();
        self.hot.reset(plan.steps.len());
        self.filled = usize::MAX;
        self.scaled = op.scale.map(|_| 0);
        let c = Context { setting, op, part: &part, earlier: &[] };
        if c.is_fused() {
            self.start_fused(part.program.plan.size);
        }
        self.shared.start(c);
        self.work = Some(part);
    }

    /// Forgets the part: done, or failed.
    pub(super) fn clear(&mut self) {
        self.work = None;
        self.on_device.clear();
        self.shared.clear();
    }

    /// Bytes gathered and posted in the last pass.
    pub(super) fn touched(&self) -> usize {
        self.touched
    }

    /// Bytes of memory of its own that it keeps, and how many of them the part has needed.
    pub(super) fn memory(&self) -> (usize, usize) {
        (self.memory.kept(), self.memory.needed())
    }

    /// Gives it back, between parts.
    pub(super) fn give_memory_back(&mut self) {
        self.memory = Memory::default();
    }

    /// Whether nothing more of this part goes to a peer.
    fn tx_done(&self, peer: Rank) -> bool {
        let Some(part) = &self.work else { return true };
        self.tx[peer].round >= self.rounds || part.program.sends[peer].is_empty()
    }

    /// Whether nothing more of this part comes from a peer.
    fn rx_done(&self, peer: Rank) -> bool {
        let Some(part) = &self.work else { return true };
        self.rx[peer].round >= self.rounds || part.program.recvs[peer].is_empty()
    }

    /// Notes memory that a receiver has given back.
    pub(super) fn freed(&mut self, lent: Lent) {
        if lent.step == shared::LOAN && lent.owner == self.number {
            self.came_back(&lent);
        } else if let (Some(part), Some(node)) = (&self.work, self.nodes.get(lent.step as usize))
            && lent.owner == self.number
        {
            let at = node.first + (lent.receiver & RECEIVER) as usize;
            self.freed[at] = self.freed[at].max(lent.end);
            self.hot.mark(lent.step);
            part.program.nodes[lent.step as usize].dependents.iter().for_each(|j| self.hot.mark(*j));
        }
    }

    /// Puts the steps on the list whose messages with a peer are next.
    fn mark_heads(&mut self, program: &Program, peer: Rank) {
        for (cursor, messages) in [(self.tx[peer], &program.sends), (self.rx[peer], &program.recvs)] {
            if cursor.round < self.rounds
                && let Some(&i) = messages[peer].get(cursor.message as usize)
            {
                self.hot.mark(i);
            }
        }
    }

    /// Goes on with all steps that may. `earlier`: the machines of parts before this one, whose messages go first.
    /// `news`: the only peer whose links have changed since the last pass, where that is known. Returns whether
    /// anything moved, and whether the part is complete.
    pub(super) fn pass(
        &mut self,
        (setting, op): (&Setting, &Operation),
        earlier: &[Box<Machine>],
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        let Some(part) = self.work.take() else { return Ok((false, true)) };
        let result = self.advance_all(Context { setting, op, part: &part, earlier }, news, port);
        self.work = Some(part);
        result
    }

    fn advance_all(
        &mut self,
        c: Context<'_>,
        news: Option<Rank>,
        port: &mut Port,
    ) -> Result<(bool, bool), Error> {
        self.touched = 0;
        if let Some(device) = &c.op.device {
            self.prepare_on_device(c)?;
            if c.is_fused() {
                return self.advance_fused(c, device, port);
            }
        } else if self.scaled.is_some() {
            // Of rounds that no step names, too: all of it.
            if self.filled != usize::MAX {
                return Ok((false, false));
            }
            self.scale(c);
            return Ok((true, false));
        } else if let Some(result) = self.advance_shared(c, port)? {
            return Ok(result);
        }
        let program = &c.part.program;
        match news {
            Some(peer) => self.mark_heads(program, peer),
            None => (0..program.plan.size).for_each(|peer| self.mark_heads(program, peer)),
        }
        let mut moved = false;
        let is_bounded = c.setting.takes_time(c.op);
        // Bounded: what a pass makes possible is for the next one, and others may be waiting for the thread.
        for _ in 0..2 * self.nodes.len() {
            if is_bounded && self.touched >= BUDGET {
                break;
            }
            let Some(i) = self.hot.next() else { break };
            if self.done[i] {
                continue;
            }
            let mut any = false;
            while self.gather(c, i, port)? {
                any = true;
                if is_bounded && self.touched >= BUDGET {
                    self.hot.mark(i as u32);
                    break;
                }
                // What was held back leaves as one, and before more is gathered: then nobody else may have news for the step.
                if self.cut.least > 0 && self.nodes[i].got.is_multiple_of(self.round) {
                    self.hot.mark(i as u32);
                    break;
                }
            }
            while self.push(c, i, port)? {
                any = true;
                if is_bounded && self.touched >= BUDGET {
                    self.hot.mark(i as u32);
                    break;
                }
            }
            if any {
                moved = true;
                program.nodes[i].dependents.iter().for_each(|j| self.hot.mark(*j));
            }
            if self.is_done(program, i) {
                self.done[i] = true;
                self.left -= 1;
            }
        }
        Ok((moved || !self.hot.list.is_empty(), self.left == 0))
    }

    fn is_done(&self, program: &Program, i: usize) -> bool {
        let (node, step) = (&self.nodes[i], &program.plan.steps[i]);
        let stored = step.holds() == Holds::Source || node.pos == node.len;
        let receivers = node.first..node.first + step.send.len();
        // A message posted from memory of ours that is still lent is not done; `freed` says so.
        let freed = self.freed[receivers].iter().all(|f| *f == node.len);
        stored && (freed || !self.on_device.keeps(Wait::Freed))
    }

    /// How far (exclusive) step `i` may write or read at most, by the steps before it, and by what has come of the input.
    fn written_limit(&self, program: &Program, i: usize) -> usize {
        let after = &program.nodes[i].after_write;
        let after = after.iter().filter(|_| self.on_device.keeps(Wait::Written));
        let come = self.filled.saturating_mul(self.round);
        after.map(|j| self.whole(i, *j, self.nodes[*j as usize].pos)).min().unwrap_or(come).min(come)
    }

    fn read_limit(&self, program: &Program, i: usize) -> usize {
        let mut limit = usize::MAX;
        for &j in program.nodes[i].after_read.iter().filter(|_| self.on_device.keeps(Wait::Read)) {
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

    /// Slices begin at multiples of their length.
    fn slice_end(&self, node: &NodeRun, at: usize) -> usize {
        self.frame_end(node, at, 0)
    }

    /// A frame ends with its slice, or where the link takes more at once, with as many of them.
    fn frame_end(&self, node: &NodeRun, at: usize, most: usize) -> usize {
        let frame = most.checked_div(node.unit).unwrap_or(1).max(self.slice(node));
        ((at / frame + 1) * frame).min(self.portion_end(node, at))
    }

    fn slice(&self, node: &NodeRun) -> usize {
        self.cut.slice.checked_div(node.unit).unwrap_or(1).max(1)
    }

    fn address(&self, part: &Part, at: At, node: &NodeRun, pos: usize) -> *mut u8 {
        let scaled = self.on_device.scaled().or_else(|| self.memory.scaled());
        let base = match (at.slot, scaled) {
            (OUTPUT, Some(_)) if !part.is_in_place() => part.output,
            (INPUT | OUTPUT, Some(scaled)) => scaled,
            (OUTPUT, None) => part.output,
            (INPUT, None) => part.input.cast_mut(),
            _ => self.on_device.scratch().unwrap_or(self.memory.scratch()),
        };
        base.wrapping_add(part.range(at.slot, at.chunk).start * part.dtype.size() + pos * node.unit)
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

    fn sending(&self, c: Context<'_>, peer: Rank, i: usize, at: usize) -> bool {
        let cursor = self.tx[peer];
        cursor.round as usize == at / self.round
            && c.part.program.sends[peer].get(cursor.message as usize) == Some(&(i as u32))
            && c.earlier.iter().all(|machine| machine.tx_done(peer))
    }

    /// Gathers and combines one slice of step `i`. Returns whether anything moved.
    fn gather(&mut self, c: Context<'_>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let program = &c.part.program;
        let step = &program.plan.steps[i];
        if step.holds() == Holds::Source {
            return Ok(false);
        }
        let node = self.nodes[i];
        let has_hand = program.nodes[i].hand;
        if node.got > node.pos {
            if self.empty_hand(c, i, port)? {
                return Ok(true);
            }
            // A part of a slice (all that one of the links had) is in the hand, and its place is not free. Go on to the
            // slice's end: peers wait to have back what they lent us, a frame at a time, before they free that place.
            if step.dst.is_none() || node.got.is_multiple_of(self.slice(&node)) {
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
        if !has_hand || (step.dst.is_some() && !step.gathers_early()) {
            m = m.min(writable);
        }
        if m == 0 {
            return Ok(false);
        }
        // A copy whose payload is still in a socket goes straight to where it belongs.
        if let ([Operand::Recv(from)], Some(dst)) = (&step.operands[..], step.dst)
            && !c.divides(step)
            && port.rx(*from)?.streams()
            && node.unit > 0
            && m <= writable
        {
            let Some(_) = self.expect(c, i, *from, (round, 0), port)? else { return Ok(false) };
            // As much as one call of the system brings: nothing is to be done with it.
            let m = writable
                .min(self.written_limit(program, i).min(self.portion_end(&node, node.got)) - node.got);
            let at = self.address(c.part, dst, &node, node.pos);
            // SAFETY: `m` elements at `pos` of chunk `dst`: inside the operation's buffer, which the table
            // owns; no other step touches them now (the limits above), no peer reads them (freed).
            let bytes = unsafe { port.rx(*from)?.receive_into(at, m * node.unit, node.unit)? };
            self.gathered(program, i, bytes / node.unit, true);
            return Ok(bytes > 0);
        }
        // Most steps have one or two operands: the rest of a large array would be cleared for nothing.
        let (mut few, mut some, mut many);
        let ins = match step.operands.len() {
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
        for k in (node.missing..ins.len()).chain(0..node.missing) {
            ins[k] = match &step.operands[k] {
                Operand::Own(at) => self.address(c.part, *at, &node, node.got),
                // Plans of loans are not run step by step.
                Operand::Lent(_) => return Ok(false),
                Operand::Recv(from) => {
                    let useful = USEFUL.min(m * node.unit);
                    let Some(frame) = self.expect(c, i, *from, (round, useful), port)? else {
                        self.nodes[i].missing = k;
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
        // What is stored and too little for a frame of its own goes with what follows (`push`).
        let is_worth = m * node.unit >= self.cut.least || node.got + m == self.portion_end(&node, node.got);
        let ready = is_worth && self.receivers_ready(c, i, port)?;
        let m = self.combine(c, i, (m, writable, ready), ins, port)?;
        Ok(m > 0)
    }

    /// Whether a result can go to all receivers at once: each is at this message, and has room.
    fn receivers_ready(&self, c: Context<'_>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let (node, step) = (&self.nodes[i], &c.part.program.plan.steps[i]);
        for (k, &peer) in step.send.iter().enumerate() {
            if self.sent[node.first + k] != node.pos
                || !self.sending(c, peer, i, node.pos)
                || !port.tx(peer)?.room()?
            {
                return Ok(false);
            }
        }
        Ok(!step.send.is_empty())
    }

    /// Books `m` gathered elements, and the ends of messages.
    fn gathered(&mut self, program: &Program, i: usize, m: usize, stored: bool) {
        let round = self.round;
        let node = &mut self.nodes[i];
        self.touched += m * node.unit;
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
                    self.mark_heads(program, *from);
                }
            }
        }
    }

    /// Sends one slice that is stored (or our own input) and not sent yet. Returns whether anything moved.
    fn push(&mut self, c: Context<'_>, i: usize, port: &mut Port) -> Result<bool, Error> {
        let program = &c.part.program;
        let (node, step) = (self.nodes[i], &program.plan.steps[i]);
        let source = step.holds() == Holds::Source;
        let from = match (source, step.dst, &step.operands[..]) {
            (_, dst, [Operand::Own(at)]) if source || dst.is_some() && self.sends_source(c, i) => *at,
            (false, Some(dst), _) => dst,
            _ => return Ok(false), // sent from the hand, or nothing to send
        };
        let limit = if source { self.written_limit(program, i).min(node.len) } else { node.pos };
        for (k, &peer) in step.send.iter().enumerate() {
            let sent = self.sent[node.first + k];
            if sent >= limit || !self.sending(c, peer, i, sent) {
                continue;
            }
            let tx = port.tx(peer)?;
            if !tx.room()? {
                continue;
            }
            let end = self.frame_end(&node, sent, if program.whole { tx.most() } else { 0 });
            let mut m = limit.min(end) - sent;
            if sent + m < end && m * node.unit < USEFUL.max(self.cut.least) {
                continue; // more of this message is about to be there
            }
            let at = self.address(c.part, from, &node, sent).cast_const();
            let mut payload = Payload::Memory(at);
            if m * node.unit > Port::INLINE && port.tx(peer)?.needs_slot(at, m * node.unit) {
                if let Some((slot, place)) = port.take_slot(m * node.unit) {
                    // SAFETY: `m` elements of our own chunk (or stored result), at most a slot; the slot is ours.
                    unsafe { port.filling.copy(at, place, m * node.unit) };
                    payload = Payload::Slot(slot, place);
                } else {
                    // No slot is free: what fits a cell goes, so that no other communicator's backlog stops us.
                    m = Port::INLINE / node.unit;
                }
            }
            self.post(c, i, (k, sent, m), &payload, port)?;
            // The same slot serves every receiver that is at the same place.
            if matches!(payload, Payload::Slot(..)) {
                for (other, &peer) in step.send.iter().enumerate().skip(k + 1) {
                    if self.sent[node.first + other] == sent
                        && self.sending(c, peer, i, sent)
                        && port.tx(peer)?.room()?
                    {
                        self.post(c, i, (other, sent, m), &payload, port)?;
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
        c: Context<'_>,
        i: usize,
        (k, at, m): (usize, usize, usize),
        payload: &Payload,
        port: &mut Port,
    ) -> Result<(), Error> {
        let program = &c.part.program;
        let (node, peer) = (self.nodes[i], program.plan.steps[i].send[k]);
        let header = Header {
            comm: c.setting.comm as u32,
            op: c.op.number,
            offset: at as u64,
            len: (m * node.unit) as u32,
            message: self.message(self.tx[peer].message),
            signature: c.signature(&node),
        };
        let (end, receiver) = (at + m, k as u32 | u32::from(self.part) << RECEIVER_BITS);
        let free = port.post(peer, header, payload, (c.op.number, i as u32, receiver, end))?;
        self.touched += m * node.unit;
        let index = node.first + k;
        if free && self.freed[index] == at {
            self.freed[index] = end;
        }
        self.sent[index] = end;
        if end % self.round == 0 || end == node.len {
            Self::advance(&self.nodes, &program.sends[peer], &mut self.tx[peer], self.rounds, self.round);
            self.mark_heads(program, peer);
        }
        Ok(())
    }

    /// How a message of this part is numbered in its frames.
    fn message(&self, message: u32) -> u32 {
        u32::from(self.part) << 16 | message & 0xffff
    }
}

/// The low bits of [`Lent::receiver`] are the receiver, the high ones the part.
const RECEIVER_BITS: u32 = 16;
const RECEIVER: u32 = (1 << RECEIVER_BITS) - 1;
