//! An all_reduce that folds everyone's input in rank order, once, in memory that all ranks touch: rank p folds chunk p of all
//! inputs and writes it to all outputs. Together they read every input once and write every output once, which is the
//! least there is; step by step, each chunk is read and written once more on its way to every other rank.
//!
//! A rank lends each peer that peer's chunk of its input and its output. Where the peer cannot reach them (buffers of
//! another process that are not in its region), it lends staging slots, a piece of the chunk each: it copies a piece of its
//! input in, and what was folded there out, when the slot comes back. A rank folds its own chunk as far as all have lent it,
//! a slice a pass, and gives back what is folded; it is done when all that it lent has come back. In place no chunk is
//! touched by two ranks.
//!
//! Nobody has agreed beforehand to do it so: whether there are slots, say, a rank alone knows. So each rank's *first frame*
//! to a peer says it: a loan, or the first piece of its input, which the steps send to every peer, whatever the others do.
//! Who sees data where a loan could be gives back what it was lent, and takes the steps. The first rank to take them has
//! lent to nobody, so that all its first frames are data: then no rank ever has the loans of all, and all take the steps.
//! If there is no such rank, all fold at once.

use std::ops::Range;

use allstream_kernels as kernels;

use super::frames::check_frame;
use super::{Context, Cursor, Machine, RECEIVER, RECEIVER_BITS};
use crate::error::Error;
use crate::exec::operation::{Operation, Part, Reduction};
use crate::exec::port::{Lent, Port};
use crate::link::region::Slot;
use crate::link::{Frame, Header, Loan, SLOT};
use crate::plan::{Layout, OUTPUT, SMALL};
use crate::types::{Kind, LIST, Rank};

/// [`Lent::step`](super::Lent) of a loan: no plan has so many steps.
pub(super) const LOAN: u32 = u32::MAX;
/// What a loan is numbered among its part's messages: no plan sends so many.
const MESSAGE: u32 = 0xffff;
/// Groups up to this size: beyond, the choice takes other plans.
pub(crate) const MOST: usize = 32;
/// From this size of a buffer on. At 4 KB the steps of the plan took 1.0 to 1.9 times as long (2, 4 and 8 ranks on 2 cores,
/// threads and arena buffers); below, with 4 threads, they were faster.
pub(crate) const FROM: usize = 4 << 10;
/// From this size on where slots are lent, with two ranks and with more. On 2 cores the steps took 1.2 times as long at 4 KB,
/// 1.9 times at 16 KB and 3.3 times at 64 KB (2 ranks); 0.6, 1.0 and 1.3 times with 4; 1.0 to 1.3, 1.4 and 1.3 with 8.
pub(crate) const STAGED_FROM: [usize; 2] = [4 << 10, 16 << 10];
/// Bytes of a piece, and pieces in flight to a peer. Of pieces of 32, 64 and 128 KB, 1 to 8 deep, none was faster at 2, 4 or
/// 8 ranks by more than runs differ; these take few slots.
const PIECE: usize = SLOT;
const DEPTH: usize = 2;
/// So many slots are left to others when they are taken.
const LEFT: usize = 8;
/// Bytes of all ranks' memory that are touched in a pass, as a lane has other work too. With a quarter of it 1 MB took up to
/// 1.4 times as long, with four times as much nothing was faster.
const PASS: usize = 1 << 20;

/// How far a part has come.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd)]
enum Stage {
    /// It takes the plan's steps.
    #[default]
    Steps,
    /// It may be folded at once, if all links can lend.
    New,
    /// This rank lends, and waits for what the others do.
    Offered,
    /// All lend.
    Folding,
    /// Our chunk is in all outputs.
    Folded,
}

#[derive(Clone, Default)]
struct Peer {
    /// Loans of its chunk of ours: all that there will be, those made, those that came back.
    loans: u32,
    lent: u32,
    back: u32,
    /// What the loans are in turn, where it cannot reach our memory.
    slots: [Option<(Slot, *mut u8)>; DEPTH],
    depth: u32,
    /// What it has lent us of our chunk, and where that ends there, in elements.
    loan: Option<Loan>,
    end: usize,
}

// SAFETY: the addresses are those of slots, which whoever holds them may use from any thread.
unsafe impl Send for Peer {}

/// What a part has come to that is folded at once.
#[derive(Default)]
pub(super) struct Shared {
    stage: Stage,
    /// By rank.
    peers: Vec<Peer>,
    /// Elements of our chunk that are folded.
    done: usize,
    /// What is only written, folded at once or not, goes past the caches: they could not hold it.
    pub(super) streams: bool,
}

/// What a peer sends next.
enum Next {
    NotYet,
    /// A loan, which is kept in its [`Peer`].
    Loan,
    Data,
}

impl Shared {
    pub(super) fn start(&mut self, c: Context<'_>) {
        let (program, size) = (&c.part.program, c.part.program.plan.size);
        let on_host = c.op.device.is_none() && c.setting.phantom.is_none();
        self.streams = on_host && streams(c);
        let large = || c.part.count * c.part.dtype.size() >= from(c.op, FROM);
        self.peers.clear();
        self.done = 0;
        self.stage = Stage::Steps;
        if on_host && program.lending.is_some() && size <= MOST && large() {
            self.peers.resize(size, Peer::default());
            self.stage = Stage::New;
        }
    }

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

    /// Of the slots, those that peers still use stay taken until they come back.
    fn let_go(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.slots = Default::default());
    }
}

/// From which size on operations are folded at once.
fn from(op: &Operation, size: usize) -> usize {
    #[cfg(any(test, feature = "testing"))]
    if let Some(from) = crate::testing::folded_from(op.number) {
        return from;
    }
    // Small parts of a list share their round trips: each loan would have to wait for the answer to the one before.
    if op.signature.dtype == LIST { SMALL + 1 } else { size }
}

/// Whether the result is written past the caches. In place, where nothing else is in them, from twice as many bytes on.
fn streams(c: Context<'_>) -> bool {
    #[cfg(any(test, feature = "testing"))]
    if let Some(streams) = crate::testing::streams(c.op.number) {
        return streams;
    }
    let bytes = c.part.total(OUTPUT) * c.part.dtype.size();
    bytes >= c.setting.streams_from << u32::from(c.part.is_in_place())
}

/// A rank's chunk, in bytes of a buffer.
fn chunk(part: &Part, rank: Rank) -> Range<usize> {
    let range = Layout::Split { parts: part.program.plan.size as u32 }.range(rank as u32, part.count);
    let unit = part.dtype.size();
    range.start * unit..range.end * unit
}

impl Machine {
    /// Goes on with a part that may be folded at once. `None`: it takes the plan's steps.
    pub(super) fn advance_shared(
        &mut self,
        c: Context<'_>,
        port: &mut Port,
    ) -> Result<Option<(bool, bool)>, Error> {
        if self.shared.stage == Stage::Steps {
            return Ok(None);
        }
        let rank = c.part.program.plan.rank;
        let others = (0..c.part.program.plan.size).filter(|peer| *peer != rank);
        let mut moved = false;
        if self.shared.stage == Stage::New {
            if !self.can_lend(c, port)? {
                self.shared.let_go();
                self.shared.stage = Stage::Steps;
                return Ok(None);
            }
            self.shared.stage = Stage::Offered;
        }
        for peer in others.clone() {
            moved |= self.offer(c, peer, port)?;
        }
        if self.shared.stage == Stage::Offered {
            for peer in others.clone() {
                if self.shared.peers[peer].loan.is_some() {
                    continue;
                }
                match self.next_loan(c, peer, port)? {
                    Next::NotYet => {}
                    Next::Loan => moved = true,
                    Next::Data => {
                        self.give_back(c, usize::MAX, port)?;
                        self.shared.let_go();
                        self.shared.stage = Stage::Steps;
                        return Ok(None);
                    }
                }
            }
            let peers = &self.shared.peers;
            if others.clone().all(|peer| peers[peer].lent > 0 && peers[peer].loan.is_some()) {
                self.shared.stage = Stage::Folding;
            }
        }
        if self.shared.stage == Stage::Folding {
            moved |= self.fold_slice(c, port)?;
        }
        let mut complete = self.shared.stage == Stage::Folded;
        for peer in others {
            let &Peer { loans, lent, back, .. } = &self.shared.peers[peer];
            if lent == loans && self.shared.stage > Stage::Offered {
                self.tx[peer] = Cursor { message: 0, round: self.rounds };
            }
            // Who has hung up gave back what it may never have written.
            complete = complete && back == loans && !port.tx(peer)?.has_hung_up();
        }
        Ok(Some((moved, complete)))
    }

    /// A peer's chunk of our memory.
    fn loan_of(&self, c: Context<'_>, peer: Rank) -> Loan {
        let range = chunk(c.part, peer);
        let input = self.memory.scaled().map_or(c.part.input, <*mut u8>::cast_const);
        let (input, output) = (input.wrapping_add(range.start), c.part.output.wrapping_add(range.start));
        Loan { input, output, bytes: range.len() }
    }

    /// Whether all peers can be lent what they need. Takes the slots for that.
    fn can_lend(&mut self, c: Context<'_>, port: &mut Port) -> Result<bool, Error> {
        let plan = &c.part.program.plan;
        let others = (0..plan.size).filter(|peer| *peer != plan.rank);
        let is_large =
            c.part.count * c.part.dtype.size() >= from(c.op, STAGED_FROM[usize::from(plan.size > 2)]);
        #[cfg(any(test, feature = "testing"))]
        if crate::testing::keeps_to_itself(plan.rank, c.op.number) {
            return Ok(false);
        }
        let mut staged = 0;
        for peer in others.clone() {
            let Loan { input, output, bytes } = self.loan_of(c, peer);
            let tx = port.tx(peer)?;
            let reaches = tx.can_lend(input, bytes) && tx.can_lend(output, bytes);
            if !(reaches || is_large && tx.can_lend_slots()) {
                return Ok(false);
            }
            let state = &mut self.shared.peers[peer];
            state.loans = if reaches { 1 } else { bytes.div_ceil(PIECE).max(1) as u32 };
            state.depth = if reaches { 0 } else { state.loans.min(DEPTH as u32) };
            staged += usize::from(!reaches);
        }
        // As deep as there are slots: each peer has its own, so that none waits for what another holds.
        let deep = (port.free_slots().saturating_sub(LEFT).checked_div(staged)).unwrap_or(DEPTH) as u32;
        for peer in others {
            let state = &mut self.shared.peers[peer];
            if state.depth > 0 && deep == 0 {
                return Ok(false);
            }
            state.depth = state.depth.min(deep);
            for slot in &mut state.slots[..state.depth as usize] {
                *slot = port.hold_slot();
                if slot.is_none() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Lends a peer its chunk, or the next piece of it. Whether it did.
    fn offer(&mut self, c: Context<'_>, peer: Rank, port: &mut Port) -> Result<bool, Error> {
        let Peer { loans, lent, back, ref slots, depth, .. } = self.shared.peers[peer];
        if lent == loans
            || (depth > 0 && lent - back == depth)
            || !c.earlier.iter().all(|machine| machine.tx_done(peer))
            || !port.tx(peer)?.room()?
        {
            return Ok(false);
        }
        let mut loan = self.loan_of(c, peer);
        let mut start = 0;
        let slot = lent.checked_rem(depth).and_then(|turn| slots[turn as usize].clone());
        if let Some((_, place)) = slot {
            start = lent as usize * PIECE;
            let bytes = PIECE.min(loan.bytes - start);
            // SAFETY: a piece of a chunk of our own input, which the table owns; the slot holds a piece, and is ours: it
            // was never lent, or it has come back (`lent - back`, and loans come back in order).
            unsafe { port.filling.copy(loan.input.wrapping_add(start), place, bytes) };
            loan = Loan { input: place, output: place, bytes };
        }
        let header = Header {
            comm: c.setting.comm as u32,
            op: c.op.number,
            offset: start as u64,
            len: 0,
            message: self.message(MESSAGE),
            signature: c.op.signature,
        };
        let receiver = peer as u32 | u32::from(self.part) << RECEIVER_BITS;
        let owner = (c.op.number, LOAN, receiver, start + loan.bytes);
        port.lend(peer, header, (loan, slot.map(|(slot, _)| slot)), owner)?;
        self.shared.peers[peer].lent += 1;
        Ok(true)
    }

    /// A loan has come back. What was folded in a slot goes where it belongs.
    pub(super) fn came_back(&mut self, lent: &Lent) {
        let Some(part) = &self.work else { return };
        let peer = (lent.receiver & RECEIVER) as usize;
        let Some(state) = self.shared.peers.get_mut(peer) else { return };
        let turn = state.back.checked_rem(state.depth);
        let start = state.back as usize * PIECE;
        state.back += 1;
        let Some(&(_, place)) = turn.and_then(|turn| state.slots[turn as usize].as_ref()) else { return };
        let at = part.output.wrapping_add(chunk(part, peer).start + start);
        // SAFETY: a piece (up to `end`) of a chunk of our own output, which the table owns and nobody else touches; the slot
        // has come back.
        unsafe {
            match self.shared.streams && !part.is_in_place() {
                true => kernels::copy_streaming(place, at, lent.end - start),
                false => kernels::copy(place, &[at], lent.end - start),
            }
        };
    }

    pub(super) fn is_loan(&self, frame: &Frame) -> bool {
        frame.header.message == self.message(MESSAGE)
    }

    /// Looks at what a peer sends next, and keeps what it lends.
    fn next_loan(&mut self, c: Context<'_>, peer: Rank, port: &mut Port) -> Result<Next, Error> {
        if !c.earlier.iter().all(|machine| machine.rx_done(peer)) {
            return Ok(Next::NotYet);
        }
        let Some(frame) = port.rx(peer)?.peek(0)? else { return Ok(Next::NotYet) };
        check_frame(&frame, c, c.op.signature, peer)?;
        if !self.is_loan(&frame) {
            return Ok(Next::Data);
        }
        let loan = port.rx(peer)?.borrow()?;
        let (ours, unit) = (chunk(c.part, c.part.program.plan.rank).len(), c.part.dtype.size());
        let state = &mut self.shared.peers[peer];
        let start = state.end * unit;
        let fits = loan.bytes <= ours - start && loan.bytes.is_multiple_of(unit);
        if frame.header.offset != start as u64 || !fits || (loan.bytes == 0 && ours > 0) {
            let Header { offset, .. } = frame.header;
            let problem = format!(
                "a loan of {} bytes at {offset} of a chunk, expected at most {} at {start}",
                loan.bytes,
                ours - start
            );
            return Err(Error::Protocol { peer, problem });
        }
        state.end += loan.bytes / unit;
        state.loan = Some(loan);
        Ok(Next::Loan)
    }

    /// Gives back what was lent to us up to so many elements of our chunk.
    fn give_back(&mut self, c: Context<'_>, until: usize, port: &mut Port) -> Result<(), Error> {
        for peer in 0..c.part.program.plan.size {
            let state = &mut self.shared.peers[peer];
            if state.end <= until
                && state.loan.take().is_some()
                && let Some(frame) = port.rx(peer)?.peek(0)?
            {
                port.rx(peer)?.release(frame.ready);
            }
        }
        Ok(())
    }

    /// Folds the next slice of our chunk. Whether anything moved.
    fn fold_slice(&mut self, c: Context<'_>, port: &mut Port) -> Result<bool, Error> {
        let (plan, part) = (&c.part.program.plan, c.part);
        for peer in (0..plan.size).filter(|peer| *peer != plan.rank) {
            // Looked at in each pass: the peer may have taken its memory back.
            if self.shared.peers[peer].loan.is_some() {
                if port.rx(peer)?.peek(0)?.is_none() {
                    return Ok(false);
                }
                continue;
            }
            match self.next_loan(c, peer, port)? {
                Next::NotYet => return Ok(false),
                Next::Loan => {}
                Next::Data => {
                    let problem = "data after it had lent memory to be folded in".into();
                    return Err(Error::Protocol { peer, problem });
                }
            }
        }
        let unit = part.dtype.size();
        let ours = self.loan_of(c, plan.rank);
        let (len, done) = (ours.bytes / unit, self.shared.done);
        let slice = (PASS / (2 * plan.size)).next_multiple_of(4096) / unit;
        let mut m = slice.min(len - done);
        let (mut ins, mut outs) = ([std::ptr::null(); MOST], [std::ptr::null_mut(); MOST]);
        let mut streamed = 0;
        for (rank, peer) in self.shared.peers.iter().enumerate() {
            // Where in the loan: it ends at `end`.
            let (Loan { input, output, .. }, at) = match peer.loan {
                Some(loan) => {
                    m = m.min(peer.end - done);
                    (loan, done * unit + loan.bytes - peer.end * unit)
                }
                None => (ours, done * unit),
            };
            (ins[rank], outs[rank]) = (input.wrapping_add(at), output.wrapping_add(at));
            // Not what has been read there; and what goes back through a slot as slots are filled.
            let through_slot = peer.loan.is_some_and(|loan| loan.bytes <= PIECE);
            let to_memory = self.shared.streams && !through_slot && input != output.cast_const();
            if to_memory || through_slot && port.filling.is_past(slice * unit) {
                outs.swap(rank, streamed);
                streamed += 1;
            }
        }
        let (ins, all) = (&ins[..plan.size], &outs[..plan.size]);
        let (streamed, outs) = all.split_at(streamed);
        let finish = c.averages().then_some(plan.size as u32);
        // SAFETY: `m` elements from `done` on are inside our chunk of every rank's buffers: of ours, which the table owns,
        // and of what peers lend, which they have just been seen not to take back, under the gate where they are in this
        // process (`LinkRx::borrow` has checked the rest). Each rank's input and output are equal or disjoint, those of
        // two ranks are disjoint, and by the protocol this rank alone touches this chunk of them now.
        unsafe {
            match &c.op.reduction {
                _ if m == 0 => {}
                Reduction::Op(op) if streamed.is_empty() => {
                    kernels::reduce(part.dtype, *op, ins, outs, m, finish);
                }
                Reduction::Op(op) => {
                    kernels::reduce_streaming(part.dtype, *op, ins, outs, streamed, m, finish);
                }
                Reduction::Function(function) => {
                    if !function.combine(ins, all, m) {
                        return Err(Error::Function {
                            call: Kind::AllReduce.name().into(),
                            name: function.name().into(),
                            rank: plan.rank,
                        });
                    }
                }
            }
        }
        self.shared.done += m;
        self.touched += 2 * plan.size * m * unit;
        self.give_back(c, self.shared.done, port)?;
        if self.shared.done == len {
            self.rx.fill(Cursor { message: 0, round: self.rounds });
            self.shared.stage = Stage::Folded;
        }
        Ok(true)
    }

    /// Adds the ranks that a part waits for, if it may be folded at once.
    pub(super) fn shared_waits_for(&self, ours: Rank, port: &mut Port, ranks: &mut Vec<Rank>) -> bool {
        let Shared { stage, peers, .. } = &self.shared;
        if *stage == Stage::Steps {
            return false;
        }
        let others = || peers.iter().enumerate().filter(|(peer, _)| *peer != ours);
        let silent = others().any(|(_, peer)| peer.loan.is_none());
        for (peer, state) in others() {
            let waited_for = match stage {
                Stage::Folded => state.back < state.loans || port.tx(peer).is_ok_and(|tx| tx.has_hung_up()),
                _ if silent => {
                    let has_come = matches!(port.rx(peer).and_then(|rx| rx.peek(0)), Ok(Some(_)));
                    state.loan.is_none() && !has_come
                }
                _ => state.lent < state.loans || state.loan.is_none(),
            };
            if waited_for {
                ranks.push(peer);
            }
        }
        true
    }
}
