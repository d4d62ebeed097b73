//! [`LoanRun`]: a collective by loans: ranks lend each other memory, and each folds its chunk of all ranks' memory at once ([`Lending`]).
//!
//! A rank lends each peer what the plan says. Where the peer cannot reach that memory (buffers of another process that are not
//! in its region), it lends staging slots, a piece of the chunk each: it copies a piece of its input in, and what was folded
//! there out, when the slot comes back. A rank folds its own chunk as far as all have lent it, a slice a pass, and gives back
//! what is folded; it is done when all that it lent has come back. This is safe in place too: rank p alone reads and writes chunk p
//! of any buffer while that is lent.
//!
//! Where all ranks know that all can lend, they do ([`Agreement::Known`]). Else each rank's *first frame* to a peer tells whether it
//! does: a loan, or the first message of the plan's steps. Who does what upon that, and why all ranks come to the same, is said where
//! it is proven: `plan/check/agreement.rs`. Whoever runs the part takes the steps when this run says so ([`LoanRun::pass`]).
//!
//! Nothing here knows what memory is: that is said by what implements [`Lends`].

use std::ops::Range;

use super::turn::{LOAN, LOAN_MESSAGE, LinkUse, Passed, Turn, check_frame, receiver_of};
use crate::error::Error;
use crate::exec::backend::Context;
use crate::exec::lends::{Agreement, Fold, Lends, LentSlot, MAX_LENDERS, Out, PIECE, Reach};
use crate::exec::operation::Part;
use crate::exec::port::{FrameSource, Lent, Port};
use crate::link::{Header, Loan};
use crate::plan::{At, Lending, Operand, Program, Slot, Step};
use crate::types::Rank;

/// Pieces in flight to a peer. Of pieces of 32, 64 and 128 KB, 1 to 8 deep, none was faster at 2, 4 or 8 ranks by more than runs
/// differ; these take few slots.
const DEPTH: usize = 2;

/// How far a part has come.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd)]
enum Stage {
    /// It does not go by loans.
    #[default]
    Off,
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

/// The loans of a part, being run. What it has allocated is kept from one part to the next.
pub(super) struct LoanRun<L> {
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
    lends: L,
}

/// What a peer sends next.
enum Next {
    NotYet,
    /// A loan, which is kept in its [`Peer`].
    Loan,
    Data,
}

/// Elements of a chunk of a plan of loans.
fn range(c: Context<'_>, lending: &Lending, at: At) -> Range<usize> {
    lending.plan.slots[usize::from(at.slot)].range(at.chunk, c.part.count)
}

fn others(program: &Program) -> impl Iterator<Item = Rank> + Clone + use<> {
    let (size, rank) = (program.plan.size, program.plan.rank);
    (0..size).filter(move |peer| *peer != rank)
}

impl<L: Lends> LoanRun<L> {
    pub(super) fn new(lends: L) -> LoanRun<L> {
        let (stage, is_known, peers) = (Stage::Off, false, Vec::new());
        LoanRun { stage, is_known, peers, chunk: None, ours: 0..0, done: 0, lends }
    }

    /// A part begins. Whether it goes by loans is known now as far as it can be.
    #[inline]
    pub(super) fn start(&mut self, c: Context<'_>) {
        let lending = c.program().lending.as_ref().filter(|lending| lending.plan.size <= MAX_LENDERS);
        let agreement = lending.map_or(Agreement::Steps, |lending| self.lends.begin(c, lending));
        self.peers.clear();
        self.done = 0;
        self.is_known = matches!(agreement, Agreement::Known);
        self.stage = Stage::Off;
        if !matches!(agreement, Agreement::Steps) {
            self.peers.resize(c.program().plan.size, Peer::default());
            self.stage = Stage::New;
        }
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.peers.clear();
        self.stage = Stage::Off;
    }

    /// Whether the part goes by loans, or is to.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.stage != Stage::Off
    }

    /// The part takes the plan's steps, if it has not begun.
    #[inline]
    pub(super) fn take_steps(&mut self) {
        if self.stage == Stage::New {
            self.stage = Stage::Off;
        }
    }

    /// The part takes the plan's steps. Of its slots, those that peers still use stay taken until they come back.
    fn fall_back(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.slots = Default::default());
        self.stage = Stage::Off;
    }

    /// Whether all ranks lend, for all that this one knows.
    fn is_agreed(&self) -> bool {
        self.stage > Stage::Offered || (self.is_known && self.stage == Stage::Offered)
    }

    /// Whether nothing more of this part goes to a peer.
    #[inline]
    pub(super) fn tx_done(&self, peer: Rank) -> bool {
        let Peer { loans, lent, .. } = self.peers[peer];
        self.is_agreed() && lent == loans
    }

    /// Whether nothing more of this part comes from any peer.
    #[inline]
    pub(super) fn rx_done(&self) -> bool {
        self.stage == Stage::Folded
    }

    /// Whether this rank has lent to all that it lends to, and has the loans of all that it borrows from.
    fn has_all(&self, lending: &Lending) -> bool {
        let peers = self.peers.iter().zip(&lending.borrows);
        peers
            .into_iter()
            .all(|(peer, borrows)| (peer.loans == 0 || peer.lent > 0) && (!borrows || peer.loan.is_some()))
    }

    /// Goes on with a part that goes by loans. `base`: where a slot of the plan begins. `None`: this is not possible, nothing was
    /// folded, and the part takes the plan's steps, all of them.
    pub(super) fn pass(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        base: impl Fn(Slot) -> *mut u8,
        port: &mut Port,
    ) -> Result<Option<Passed>, Error> {
        let Some(lending) = &t.c.part.program.lending else { return Ok(None) };
        let (mut moved, mut touched) = (false, 0);
        if self.stage == Stage::New {
            if !self.can_lend(t.c, lending, &base, port)? {
                if self.is_known {
                    let problem = "this rank cannot, though all ranks know that it can (a bug)";
                    return Err(Error::system("lend memory to a peer", problem));
                }
                self.fall_back();
                return Ok(None);
            }
            self.lends.before_lending(t.c, lending, &base)?;
            self.stage = Stage::Offered;
        }
        for peer in others(t.c.program()) {
            moved |= self.offer(t, peer, port)?;
        }
        if self.stage == Stage::Offered {
            for peer in others(t.c.program()) {
                if self.peers[peer].loan.is_some() || !lending.borrows[peer] {
                    continue;
                }
                match self.next_loan(t, peer, port)? {
                    Next::NotYet => {}
                    Next::Loan => moved = true,
                    Next::Data if self.is_known => {
                        let problem = "data where it was to lend memory";
                        return Err(Error::protocol(peer, problem));
                    }
                    Next::Data => {
                        self.give_back(usize::MAX, port)?;
                        self.fall_back();
                        return Ok(None);
                    }
                }
            }
            if self.has_all(lending) {
                self.stage = Stage::Folding;
            }
        }
        if self.stage == Stage::Folding && self.borrow_all(t, lending, port)? {
            touched = self.fold_slice(t.c, lending, &base, port)?;
            moved = true;
        }
        let mut complete = self.stage == Stage::Folded;
        for peer in others(t.c.program()) {
            let &Peer { loans, back, .. } = &self.peers[peer];
            // A peer that hangs up counts as having given all back, though it may not have written its results: that is no end.
            complete = complete && back == loans && !port.tx(peer)?.has_hung_up();
        }
        Ok(Some(Passed { moved, complete, touched }))
    }

    /// What a peer is to be lent.
    fn loan_to(
        c: Context<'_>,
        lending: &Lending,
        base: &impl Fn(Slot) -> *mut u8,
        peer: Rank,
    ) -> Option<Loan> {
        let loan = lending.loans[peer]?;
        let (unit, read) = (c.part.dtype.size(), range(c, lending, loan.read));
        let slots = &lending.plan.slots;
        let is_alike = loan.read.chunk == loan.write.chunk
            && slots[usize::from(loan.read.slot)] == slots[usize::from(loan.write.slot)];
        let write = if is_alike { read.start } else { range(c, lending, loan.write).start };
        let input = base(loan.read.slot).wrapping_add(read.start * unit);
        let output = base(loan.write.slot).wrapping_add(write * unit);
        Some(Loan { input: input.cast_const(), output, bytes: read.len() * unit })
    }

    /// Whether all peers can be lent what they need. Takes the slots for that.
    fn can_lend(
        &mut self,
        c: Context<'_>,
        lending: &Lending,
        base: &impl Fn(Slot) -> *mut u8,
        port: &mut Port,
    ) -> Result<bool, Error> {
        let chunk = lending.fold.and_then(|i| lending.plan.steps[i].chunk());
        self.chunk = chunk;
        self.ours = chunk.map_or(0..0, |at| range(c, lending, at));
        let mut staged = 0;
        for peer in others(c.program()) {
            let Some(loan) = Self::loan_to(c, lending, base, peer) else { continue };
            let reach = self.lends.reach(c, peer, &loan, port)?;
            let state = &mut self.peers[peer];
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
        let deep = self.lends.free_slots(port).checked_div(staged).unwrap_or(DEPTH) as u32;
        for peer in others(c.program()) {
            let state = &mut self.peers[peer];
            if state.depth > 0 && deep == 0 {
                return Ok(false);
            }
            state.depth = state.depth.min(deep);
            for slot in &mut state.slots[..state.depth as usize] {
                *slot = self.lends.hold_slot(port);
                if slot.is_none() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Lends a peer what it is to be lent, or the next piece of that. Whether it did.
    fn offer(&mut self, t: Turn<'_, impl LinkUse>, peer: Rank, port: &mut Port) -> Result<bool, Error> {
        let Peer { whole, loans, lent, back, ref slots, depth, .. } = self.peers[peer];
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
            unsafe { self.lends.fill(loan.input.wrapping_add(start), place, bytes, port) };
            loan = Loan { input: place, output: place, bytes };
        }
        let header = Header {
            comm: t.c.comm as u32,
            op: t.c.op.number,
            offset: start as u64,
            len: 0,
            message: t.message(LOAN_MESSAGE),
            signature: t.c.op.signature,
        };
        let source = FrameSource {
            operation: t.c.op.number,
            step: LOAN,
            receiver: t.receiver(peer),
            end: start + loan.bytes,
        };
        port.lend(peer, header, (loan, slot.and_then(|(slot, _)| slot)), source)?;
        self.peers[peer].lent += 1;
        Ok(true)
    }

    /// A loan has come back. What was folded in a slot goes where it belongs.
    pub(super) fn came_back(&mut self, part: &Part, lent: &Lent) {
        let Some(state) = self.peers.get_mut(receiver_of(lent)) else { return };
        let turn = state.back.checked_rem(state.depth);
        let start = state.back as usize * PIECE;
        state.back += 1;
        if let Some(loan) = state.whole
            && let Some(&(_, place)) = turn.and_then(|turn| state.slots[turn as usize].as_ref())
        {
            let to = loan.output.wrapping_add(start);
            // SAFETY: a piece (up to `end`) of a chunk of our own output, which the table owns and nobody else touches; the
            // slot has come back.
            unsafe { self.lends.empty(part, place, to, lent.source.end - start) };
        }
    }

    /// Looks at what a peer sends next, and keeps what it lends.
    fn next_loan(&mut self, t: Turn<'_, impl LinkUse>, peer: Rank, port: &mut Port) -> Result<Next, Error> {
        if !t.may_receive(peer) {
            return Ok(Next::NotYet);
        }
        let Some(frame) = port.rx(peer)?.peek(0)? else { return Ok(Next::NotYet) };
        check_frame(&frame, t.c, t.c.op.signature, peer)?;
        if !t.is_loan(&frame) {
            return Ok(Next::Data);
        }
        let loan = port.rx(peer)?.borrow()?;
        let unit = t.c.part.dtype.size();
        let ours = self.ours.len() * unit;
        let state = &mut self.peers[peer];
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
        for (peer, state) in self.peers.iter_mut().enumerate() {
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
    fn borrow_all(
        &mut self,
        t: Turn<'_, impl LinkUse>,
        lending: &Lending,
        port: &mut Port,
    ) -> Result<bool, Error> {
        for peer in others(t.c.program()).filter(|peer| lending.borrows[*peer]) {
            // Looked at in each pass: the peer may have taken its memory back.
            if self.peers[peer].loan.is_some() {
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

    /// Folds the next slice of our chunk, as far as all have lent it. How many bytes were touched.
    fn fold_slice(
        &mut self,
        c: Context<'_>,
        lending: &Lending,
        base: &impl Fn(Slot) -> *mut u8,
        port: &mut Port,
    ) -> Result<usize, Error> {
        let (step, len) = (lending.fold.map(|i| &lending.plan.steps[i]), self.ours.len());
        let touched = match step.filter(|_| len > 0) {
            Some(step) => self.fold_some(c, (lending, step), base, port)?,
            None => 0,
        };
        self.give_back(self.done, port)?;
        if self.done == len {
            self.stage = Stage::Folded;
        }
        Ok(touched)
    }

    /// Folds as much of our chunk as a pass may and as all have lent. How many bytes were touched.
    fn fold_some(
        &mut self,
        c: Context<'_>,
        (lending, step): (&Lending, &Step),
        base: &impl Fn(Slot) -> *mut u8,
        port: &Port,
    ) -> Result<usize, Error> {
        let (unit, done, size) = (c.part.dtype.size(), self.done, lending.plan.size);
        let LoanRun { chunk, ours, peers, .. } = &*self;
        let mut m = ours.len() - done;
        let lent = peers.iter().zip(&lending.borrows).filter(|(_, borrows)| **borrows);
        lent.for_each(|(peer, _)| m = m.min(peer.end - done));
        // Where the first of these elements is in a loan, which ends at `end`.
        let within = |peer: &Peer, loan: &Loan| done * unit + loan.bytes - peer.end * unit;
        let own = |at: At| {
            let slots = &lending.plan.slots;
            let alike = |ours: At| slots[usize::from(ours.slot)] == slots[usize::from(at.slot)];
            let is_ours = chunk.is_some_and(|ours| ours.chunk == at.chunk && alike(ours));
            let start = if is_ours { ours.start } else { range(c, lending, at).start };
            base(at.slot).wrapping_add((start + done) * unit)
        };
        let mut ins = [std::ptr::null::<u8>(); MAX_LENDERS];
        let mut count = 0;
        for (operand, to) in step.operands.iter().zip(&mut ins) {
            *to = match *operand {
                Operand::Own(at) => own(at).cast_const(),
                Operand::Lent(from) | Operand::Recv(from) => {
                    let Some(loan) = &peers[from].loan else { return Ok(0) };
                    loan.input.wrapping_add(within(&peers[from], loan))
                }
            };
            count += 1;
        }
        let nowhere = Out { at: std::ptr::null_mut(), in_slot: false, is_over_input: false };
        let (mut outs, mut results) = ([nowhere; MAX_LENDERS], 0);
        let mut add = |out| {
            outs[results] = out;
            results += 1;
        };
        let is_over_input = step.dst.is_some_and(|dst| step.operands.contains(&Operand::Own(dst)));
        // Over the inputs in the order of ranks, as they are read; else our own result first. With 2 ranks on 2 cores 256 KB and
        // 1 MB through slots took 1.25 times as long in place with our own first, and 1.7 times out of place in the order of ranks.
        let first = (!is_over_input).then_some(lending.plan.rank);
        for rank in first.into_iter().chain((0..size).filter(|rank| Some(*rank) != first)) {
            if let Some(dst) = step.dst.filter(|_| rank == lending.plan.rank) {
                add(Out { at: own(dst), in_slot: false, is_over_input });
            } else if let Some(loan) = peers[rank].loan.as_ref().filter(|_| step.into.contains(&rank)) {
                let at = loan.output.wrapping_add(within(&peers[rank], loan));
                let is_over_input = loan.input == loan.output.cast_const();
                add(Out { at, in_slot: loan.bytes <= PIECE, is_over_input });
            }
        }
        let is_last = done + m == ours.len();
        let fold = Fold { c, step, m, is_last, ins: &ins[..count], outs: &outs[..results] };
        let folded = self.lends.fold(&fold, port)?;
        self.done += folded;
        Ok((count + results) * folded * unit)
    }

    /// Adds the ranks that the part waits for.
    pub(super) fn waiting_for(&self, program: &Program, port: &mut Port, ranks: &mut Vec<Rank>) {
        let LoanRun { stage, peers, .. } = self;
        let Some(lending) = &program.lending else { return };
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
    }
}
