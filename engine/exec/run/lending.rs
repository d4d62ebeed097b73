//! A collective by loans: ranks lend each other memory, and each folds its chunk of all ranks' memory at once ([`Lending`]).
//!
//! A rank lends each peer what the plan says. Where the peer cannot reach that memory (buffers of another process that are not
//! in its region), it lends staging slots, a piece of the chunk each: it copies a piece of its input in, and what was folded
//! there out, when the slot comes back. A rank folds its own chunk as far as all have lent it, a slice a pass, and gives back
//! what is folded; it is done when all that it lent has come back. This is safe in place too: rank p alone reads and writes chunk p
//! of any buffer while that is lent.
//!
//! Where all ranks know that all can lend, they do ([`Agreement::Known`]). Else nobody has agreed beforehand: whether there are
//! slots, say, a rank alone knows. So each rank's *first frame* to a peer says it: a loan, or the first piece of its input,
//! which the steps send to every peer, whatever the others do. Who sees data where a loan could be gives back what it was lent,
//! and takes the steps. Take the earliest rank to do so: no other's data can have made it, so it could not lend, and its first
//! frame to everyone is data. Hence nobody ever has the loans of all, and all take the steps. If there is no such rank, all fold at
//! once. (The checker goes through it: [`crate::plan::check`].)

use std::ops::Range;

use super::frames::check_frame;
use super::{Backend, Context, Cursor, PlanRun, RECEIVER, RECEIVER_BITS, Turn};
use crate::error::Error;
use crate::exec::backend::{Agreement, Fold, LentSlot, PIECE, Reach};
use crate::exec::port::{Lent, Port};
use crate::link::{Frame, Header, Loan};
use crate::plan::{At, Lending, Operand, Program, Step};
use crate::types::Rank;

/// [`Lent::step`] of a loan: no plan has so many steps.
pub(super) const LOAN: u32 = u32::MAX;
/// What a loan is numbered among its part's messages: no plan sends so many.
const MESSAGE: u32 = 0xffff;
/// Groups up to this size: beyond, the choice takes other plans.
pub(crate) const MAX_LENDERS: usize = 32;
/// Pieces in flight to a peer. Of pieces of 32, 64 and 128 KB, 1 to 8 deep, none was faster at 2, 4 or 8 ranks by more than runs
/// differ; these take few slots.
const DEPTH: usize = 2;

/// How far a part has come.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd)]
enum Stage {
    /// It takes the plan's steps.
    #[default]
    Steps,
    /// It may go by loans, if this rank can lend to all.
    New,
    /// This rank lends, and waits for what the others do.
    Offered,
    /// All lend.
    Folding,
    /// Our chunk is in all outputs.
    Folded,
}

/// What passes between this rank and a peer.
#[derive(Clone, Default)]
struct Peer {
    /// What the peer is lent, in one loan or many.
    whole: Option<Loan>,
    /// Loans to the peer: all that there will be, those made, those that came back.
    loans: u32,
    lent: u32,
    back: u32,
    /// What the loans are in turn, where the peer cannot reach our memory.
    slots: [Option<LentSlot>; DEPTH],
    depth: u32,
    /// What the peer has lent us of our chunk, and where that ends there, in elements.
    loan: Option<Loan>,
    end: usize,
}

// SAFETY: the addresses are those of slots, which whoever holds them may use from any thread.
unsafe impl Send for Peer {}

/// How far the loans of a part have got.
#[derive(Default)]
pub(super) struct LendingState {
    stage: Stage,
    /// All ranks lend, and know it of each other.
    is_known: bool,
    /// By rank.
    peers: Vec<Peer>,
    /// The chunk that this rank folds, and its elements in the buffers.
    chunk: Option<At>,
    ours: Range<usize>,
    /// Elements of our chunk that are folded.
    done: usize,
}

/// What a peer sends next.
enum Next {
    NotYet,
    /// A loan, which is kept in its [`Peer`].
    Loan,
    Data,
}

impl LendingState {
    pub(super) fn clear(&mut self) {
        self.peers.clear();
        self.stage = Stage::Steps;
    }

    /// The part takes the plan's steps, if it has not begun.
    pub(super) fn take_steps(&mut self) {
        if self.stage == Stage::New {
            self.stage = Stage::Steps;
        }
    }

    /// The part takes the plan's steps. Of its slots, those that peers still use stay taken until they come back.
    fn fall_back(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.slots = Default::default());
        self.stage = Stage::Steps;
    }

    /// Whether this rank has lent to all that it lends to, and has the loans of all that it borrows from.
    fn has_all(&self, lending: &Lending) -> bool {
        let peers = self.peers.iter().zip(&lending.borrows);
        peers
            .into_iter()
            .all(|(peer, borrows)| (peer.loans == 0 || peer.lent > 0) && (!borrows || peer.loan.is_some()))
    }
}

/// Elements of a chunk of a plan of loans.
fn range(c: Context<'_>, lending: &Lending, at: At) -> Range<usize> {
    lending.plan.slots[usize::from(at.slot)].range(at.chunk, c.part.count)
}

fn others(program: &Program) -> impl Iterator<Item = Rank> + Clone + use<> {
    let (size, rank) = (program.plan.size, program.plan.rank);
    (0..size).filter(move |peer| *peer != rank)
}

impl<B: Backend> PlanRun<B> {
    /// Whether the part goes by loans, as far as that is known when it starts.
    pub(super) fn begin_lending(&mut self, c: Context<'_>) {
        let lending = c.part.program.lending.as_ref();
        let agreement = lending.map_or(Agreement::Steps, |lending| self.backend.agreement(c, lending));
        self.lending.peers.clear();
        self.lending.done = 0;
        self.lending.is_known = matches!(agreement, Agreement::Known);
        self.lending.stage = Stage::Steps;
        if !matches!(agreement, Agreement::Steps) {
            self.lending.peers.resize(c.program().plan.size, Peer::default());
            self.lending.stage = Stage::New;
        }
    }

    /// Goes on with a part that goes by loans. `None`: it takes the plan's steps.
    pub(super) fn advance_lending(
        &mut self,
        t: Turn<'_, B>,
        port: &mut Port,
    ) -> Result<Option<(bool, bool)>, Error> {
        if self.lending.stage == Stage::Steps {
            return Ok(None);
        }
        let Some(lending) = &t.c.part.program.lending else { return Ok(None) };
        let mut moved = false;
        if self.lending.stage == Stage::New {
            if !self.can_lend(t.c, lending, port)? {
                if self.lending.is_known {
                    let problem = "this rank cannot, though all ranks know that it can (a bug)";
                    return Err(Error::system("lend memory to a peer", problem));
                }
                self.lending.fall_back();
                return Ok(None);
            }
            self.lending.stage = Stage::Offered;
        }
        for peer in others(t.c.program()) {
            moved |= self.offer(t, peer, port)?;
        }
        if self.lending.stage == Stage::Offered {
            for peer in others(t.c.program()) {
                if self.lending.peers[peer].loan.is_some() || !lending.borrows[peer] {
                    continue;
                }
                match self.next_loan(t, peer, port)? {
                    Next::NotYet => {}
                    Next::Loan => moved = true,
                    Next::Data if self.lending.is_known => {
                        let problem = "data where it was to lend memory";
                        return Err(Error::protocol(peer, problem));
                    }
                    Next::Data => {
                        self.give_back(usize::MAX, port)?;
                        self.lending.fall_back();
                        return Ok(None);
                    }
                }
            }
            if self.lending.has_all(lending) {
                self.lending.stage = Stage::Folding;
            }
        }
        if self.lending.stage == Stage::Folding {
            moved |= self.fold_slice(t, lending, port)?;
        }
        let mut complete = self.lending.stage == Stage::Folded;
        let agreed = self.lending.is_known || self.lending.stage > Stage::Offered;
        for peer in others(t.c.program()) {
            let &Peer { loans, lent, back, .. } = &self.lending.peers[peer];
            if lent == loans && agreed {
                self.tx[peer] = Cursor { message: 0, round: self.rounds };
            }
            // A peer that hangs up counts as having given all back, though it may not have written its results: that is no end.
            complete = complete && back == loans && !port.tx(peer)?.has_hung_up();
        }
        Ok(Some((moved, complete)))
    }

    /// What a peer is to be lent.
    fn loan_to(&self, c: Context<'_>, lending: &Lending, peer: Rank) -> Option<Loan> {
        let loan = lending.loans[peer]?;
        let (unit, read) = (c.part.dtype.size(), range(c, lending, loan.read));
        let slots = &lending.plan.slots;
        let is_alike = loan.read.chunk == loan.write.chunk
            && slots[usize::from(loan.read.slot)] == slots[usize::from(loan.write.slot)];
        let write = if is_alike { read.start } else { range(c, lending, loan.write).start };
        let input = self.backend.base(c.part, loan.read.slot).wrapping_add(read.start * unit);
        let output = self.backend.base(c.part, loan.write.slot).wrapping_add(write * unit);
        Some(Loan { input: input.cast_const(), output, bytes: read.len() * unit })
    }

    /// Whether all peers can be lent what they need. Takes the slots for that.
    fn can_lend(&mut self, c: Context<'_>, lending: &Lending, port: &mut Port) -> Result<bool, Error> {
        let chunk = lending.fold.and_then(|i| lending.plan.steps[i].chunk());
        self.lending.chunk = chunk;
        self.lending.ours = chunk.map_or(0..0, |at| range(c, lending, at));
        let mut staged = 0;
        for peer in others(c.program()) {
            let Some(loan) = self.loan_to(c, lending, peer) else { continue };
            let reach = self.backend.reach(c, peer, &loan, port)?;
            let state = &mut self.lending.peers[peer];
            (state.whole, state.loans) = (Some(loan), 1);
            match reach {
                Reach::InPlace => {}
                Reach::InSlots => {
                    state.loans = loan.bytes.div_ceil(PIECE).max(1) as u32;
                    state.depth = state.loans.min(DEPTH as u32);
                    staged += 1;
                }
                Reach::Nowhere => return Ok(false),
            }
        }
        // As deep as there are slots: each peer has its own, so that none waits for what another holds.
        let deep = self.backend.free_slots(port).checked_div(staged).unwrap_or(DEPTH) as u32;
        for peer in others(c.program()) {
            let state = &mut self.lending.peers[peer];
            if state.depth > 0 && deep == 0 {
                return Ok(false);
            }
            state.depth = state.depth.min(deep);
            for slot in &mut state.slots[..state.depth as usize] {
                *slot = self.backend.hold_slot(port);
                if slot.is_none() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Lends a peer what it is to be lent, or the next piece of that. Whether it did.
    fn offer(&mut self, t: Turn<'_, B>, peer: Rank, port: &mut Port) -> Result<bool, Error> {
        let Peer { whole, loans, lent, back, ref slots, depth, .. } = self.lending.peers[peer];
        if lent == loans
            || (depth > 0 && lent - back == depth)
            || !t.may_send(peer)
            || !port.tx(peer)?.room()?
        {
            return Ok(false);
        }
        let slot = lent.checked_rem(depth).and_then(|turn| slots[turn as usize].clone());
        let Some(mut loan) = whole else { return Ok(false) };
        let mut start = 0;
        if let Some((_, place)) = slot {
            start = lent as usize * PIECE;
            let bytes = PIECE.min(loan.bytes - start);
            // SAFETY: a piece of a chunk of our own input, which the table owns; the slot holds a piece, and is ours: it
            // was never lent, or it has come back (`lent - back`, and loans come back in order).
            unsafe { self.backend.fill_slot(loan.input.wrapping_add(start), place, bytes, port) };
            loan = Loan { input: place, output: place, bytes };
        }
        let header = Header {
            comm: t.c.comm as u32,
            op: t.c.op.number,
            offset: start as u64,
            len: 0,
            message: self.message(MESSAGE),
            signature: t.c.op.signature,
        };
        let receiver = peer as u32 | u32::from(self.part) << RECEIVER_BITS;
        let owner = (t.c.op.number, LOAN, receiver, start + loan.bytes);
        port.lend(peer, header, (loan, slot.and_then(|(slot, _)| slot)), owner)?;
        self.lending.peers[peer].lent += 1;
        Ok(true)
    }

    /// A loan has come back. What was folded in a slot goes where it belongs.
    pub(super) fn came_back(&mut self, lent: &Lent) {
        let peer = (lent.receiver & RECEIVER) as usize;
        let Some(state) = self.lending.peers.get_mut(peer) else { return };
        let turn = state.back.checked_rem(state.depth);
        let start = state.back as usize * PIECE;
        state.back += 1;
        if let (Some(part), Some(loan)) = (&self.work, state.whole)
            && let Some(&(_, place)) = turn.and_then(|turn| state.slots[turn as usize].as_ref())
        {
            let to = loan.output.wrapping_add(start);
            // SAFETY: a piece (up to `end`) of a chunk of our own output, which the table owns and nobody else touches; the
            // slot has come back.
            unsafe { self.backend.empty_slot(part, place, to, lent.end - start) };
        }
    }

    /// Whether a frame is a loan of this part's.
    pub(super) fn is_loan(&self, frame: &Frame) -> bool {
        frame.header.message == self.message(MESSAGE)
    }

    /// Looks at what a peer sends next, and keeps what it lends.
    fn next_loan(&mut self, t: Turn<'_, B>, peer: Rank, port: &mut Port) -> Result<Next, Error> {
        if !t.may_receive(peer) {
            return Ok(Next::NotYet);
        }
        let Some(frame) = port.rx(peer)?.peek(0)? else { return Ok(Next::NotYet) };
        check_frame(&frame, t.c, t.c.op.signature, peer)?;
        if !self.is_loan(&frame) {
            return Ok(Next::Data);
        }
        let loan = port.rx(peer)?.borrow()?;
        let unit = t.c.part.dtype.size();
        let ours = self.lending.ours.len() * unit;
        let state = &mut self.lending.peers[peer];
        let start = state.end * unit;
        let fits = loan.bytes <= ours - start && loan.bytes.is_multiple_of(unit);
        if frame.header.offset != start as u64 || !fits || (loan.bytes == 0 && ours > 0) {
            let Header { offset, .. } = frame.header;
            let problem = format!(
                "a loan of {} bytes at {offset} of a chunk, expected at most {} at {start}",
                loan.bytes,
                ours - start
            );
            return Err(Error::protocol(peer, problem));
        }
        state.end += loan.bytes / unit;
        state.loan = Some(loan);
        Ok(Next::Loan)
    }

    /// Gives back what was lent to us up to so many elements of our chunk.
    fn give_back(&mut self, until: usize, port: &mut Port) -> Result<(), Error> {
        for (peer, state) in self.lending.peers.iter_mut().enumerate() {
            if state.end <= until
                && state.loan.take().is_some()
                && let Some(frame) = port.rx(peer)?.peek(0)?
            {
                port.rx(peer)?.release(frame.ready);
            }
        }
        Ok(())
    }

    /// Looks whether all that this rank borrows is still there, and has it lent where it is not yet. Whether all is there.
    fn borrow_all(&mut self, t: Turn<'_, B>, lending: &Lending, port: &mut Port) -> Result<bool, Error> {
        for peer in others(t.c.program()).filter(|peer| lending.borrows[*peer]) {
            // Looked at in each pass: the peer may have taken its memory back.
            if self.lending.peers[peer].loan.is_some() {
                if port.rx(peer)?.peek(0)?.is_none() {
                    return Ok(false);
                }
                continue;
            }
            match self.next_loan(t, peer, port)? {
                Next::NotYet => return Ok(false),
                Next::Loan => {}
                Next::Data => {
                    let problem = "data after it had lent memory to be folded in";
                    return Err(Error::protocol(peer, problem));
                }
            }
        }
        Ok(true)
    }

    /// Folds the next slice of our chunk. Whether anything moved.
    fn fold_slice(&mut self, t: Turn<'_, B>, lending: &Lending, port: &mut Port) -> Result<bool, Error> {
        if !self.borrow_all(t, lending, port)? {
            return Ok(false);
        }
        let (step, len) = (lending.fold.map(|i| &lending.plan.steps[i]), self.lending.ours.len());
        if let Some(step) = step.filter(|_| len > 0) {
            self.fold_some(t.c, (lending, step), port)?;
        }
        self.give_back(self.lending.done, port)?;
        if self.lending.done == len {
            self.rx.fill(Cursor { message: 0, round: self.rounds });
            self.lending.stage = Stage::Folded;
        }
        Ok(true)
    }

    /// Folds as much of our chunk as a pass may and as all have lent.
    fn fold_some(
        &mut self,
        c: Context<'_>,
        (lending, step): (&Lending, &Step),
        port: &mut Port,
    ) -> Result<(), Error> {
        let (unit, done, size) = (c.part.dtype.size(), self.lending.done, lending.plan.size);
        let slice = self.backend.fold_len(size, unit);
        let LendingState { chunk, ours, .. } = &self.lending;
        let mut m = slice.min(ours.len() - done);
        let peers = &self.lending.peers;
        let lent = peers.iter().zip(&lending.borrows).filter(|(_, borrows)| **borrows);
        lent.for_each(|(peer, _)| m = m.min(peer.end - done));
        // Where the first of these elements is in a loan, which ends at `end`.
        let within = |peer: &Peer, loan: &Loan| done * unit + loan.bytes - peer.end * unit;
        let own = |at: At| {
            let slots = &lending.plan.slots;
            let alike = |ours: At| slots[usize::from(ours.slot)] == slots[usize::from(at.slot)];
            let is_ours = chunk.is_some_and(|ours| ours.chunk == at.chunk && alike(ours));
            let start = if is_ours { ours.start } else { range(c, lending, at).start };
            self.backend.base(c.part, at.slot).wrapping_add((start + done) * unit)
        };
        let mut ins = [std::ptr::null::<u8>(); MAX_LENDERS];
        let mut count = 0;
        for (operand, to) in step.operands.iter().zip(&mut ins) {
            *to = match *operand {
                Operand::Own(at) => own(at).cast_const(),
                Operand::Lent(from) | Operand::Recv(from) => {
                    let Some(loan) = &peers[from].loan else { return Ok(()) };
                    loan.input.wrapping_add(within(&peers[from], loan))
                }
            };
            count += 1;
        }
        let mut outs = [std::ptr::null_mut::<u8>(); MAX_LENDERS];
        let (mut results, mut bypassing) = (0, 0);
        let mut add = |output: *mut u8, in_slot: bool, in_place: bool| {
            outs[results] = output;
            if self.backend.bypasses(in_slot, in_place, slice.saturating_mul(unit), port) {
                outs.swap(results, bypassing);
                bypassing += 1;
            }
            results += 1;
        };
        let is_over_input = step.dst.is_some_and(|dst| step.operands.contains(&Operand::Own(dst)));
        // Over the inputs in the order of ranks, as they are read; else our own result first. With 2 ranks on 2 cores 256 KB and
        // 1 MB through slots took 1.25 times as long in place with our own first, and 1.7 times out of place in the order of ranks.
        let first = (!is_over_input).then_some(lending.plan.rank);
        for rank in first.into_iter().chain((0..size).filter(|rank| Some(*rank) != first)) {
            if let Some(dst) = step.dst.filter(|_| rank == lending.plan.rank) {
                add(own(dst), false, is_over_input);
            } else if let Some(loan) = peers[rank].loan.as_ref().filter(|_| step.into.contains(&rank)) {
                let output = loan.output.wrapping_add(within(&peers[rank], loan));
                add(output, loan.bytes <= PIECE, loan.input == loan.output.cast_const());
            }
        }
        let fold = Fold { c, step, m, ins: &ins[..count], outs: &outs[..results], bypassing };
        self.backend.fold(&fold)?;
        self.lending.done += m;
        self.touched += (count + results) * m * unit;
        Ok(())
    }

    /// Adds the ranks that a part waits for, if it goes by loans.
    pub(super) fn lending_waits_for(
        &self,
        program: &Program,
        port: &mut Port,
        ranks: &mut Vec<Rank>,
    ) -> bool {
        let LendingState { stage, peers, .. } = &self.lending;
        let Some(lending) = program.lending.as_ref().filter(|_| *stage != Stage::Steps) else { return false };
        let missing = |peer: Rank| lending.borrows[peer] && peers[peer].loan.is_none();
        let silent = others(program).any(missing);
        for peer in others(program) {
            let state = &peers[peer];
            let waited_for = match stage {
                Stage::Folded => state.back < state.loans || port.tx(peer).is_ok_and(|tx| tx.has_hung_up()),
                _ if silent => {
                    missing(peer) && !matches!(port.rx(peer).and_then(|rx| rx.peek(0)), Ok(Some(_)))
                }
                _ => state.lent < state.loans || missing(peer),
            };
            if waited_for {
                ranks.push(peer);
            }
        }
        true
    }
}
