//! An all_reduce that folds everyone's input in rank order, once, in memory that all ranks touch: rank p folds chunk p of all
//! inputs and writes it to all outputs. Together they read every input once and write every output once, which is the
//! least there is; step by step, each chunk is read and written once more on its way to every other rank.
//!
//! A rank lends each peer that peer's chunk of its input and its output, in one frame. Once it has been lent its own chunk by
//! all, it folds it, a slice a pass, and gives all of them back; it is done when all of its own memory has come back. In
//! place no chunk is touched by two ranks.
//!
//! Nobody has agreed beforehand to do it so: between processes memory is lent only if it is in the rank's region, which the
//! rank alone knows. So each rank's *first frame* to a peer says it: a loan, or the first piece of its input, which the steps
//! send to every peer, whatever the others do. Who sees data where a loan could be gives back what it was lent, and takes the
//! steps. The first rank to take them has lent to nobody, so that all its first frames are data: then no rank ever has the
//! loans of all, and all take the steps. If there is no such rank, all fold at once.

use allstream_kernels as kernels;

use super::frames::check_frame;
use super::{Common, Context, Cursor, Machine, RECEIVER_BITS};
use crate::error::Error;
use crate::exec::operation::Reduction;
use crate::exec::port::Port;
use crate::link::{Frame, Header, Loan};
use crate::plan::{Layout, SMALL};
use crate::types::{Kind, LIST, Rank};

/// [`Lent::step`](super::Lent) of a loan: no plan has so many steps.
pub(super) const LOAN: u32 = u32::MAX;
/// What a loan is numbered among its part's messages: no plan sends so many.
const MESSAGE: u32 = 0xffff;
/// Groups up to this size: beyond, the choice takes other plans.
const MOST: usize = 32;
/// From this size of a buffer on. At 4 KB the steps of the plan took 1.0 to 1.9 times as long (2, 4 and 8 ranks on 2 cores,
/// threads and arena buffers); below, with 4 threads, they were faster.
const FROM: usize = 4 << 10;
/// Bytes of all ranks' memory that are touched in a pass, as a lane has other work too. With a quarter of it 1 MB took up to
/// 1.4 times as long, with four times as much nothing was faster.
const PASS: usize = 1 << 20;

/// How far a part has come.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
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

#[derive(Clone, Copy, Default)]
struct Peer {
    /// It was lent its chunk of ours; it has given that back.
    offered: bool,
    freed: bool,
    /// It has lent us our chunk.
    loan: Option<Loan>,
}

/// What a part has come to that is folded at once.
#[derive(Default)]
pub(super) struct Shared {
    stage: Stage,
    /// By rank.
    peers: Vec<Peer>,
    /// Elements of our chunk that are folded.
    done: usize,
}

/// A peer's first frame.
enum First {
    NotYet,
    Loan(Loan),
    Data,
}

impl Shared {
    pub(super) fn start(&mut self, c: Context<'_>) {
        let (program, size) = (&c.part.program, c.part.program.plan.size);
        let on_host = c.common.device.is_none() && c.common.phantom.is_none();
        let large = || c.part.count * c.part.dtype.size() >= from(c.common);
        self.peers.clear();
        self.done = 0;
        self.stage = Stage::Steps;
        if on_host && program.folds_all && size <= MOST && large() {
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

    /// A peer has given back what it was lent.
    pub(super) fn freed(&mut self, peer: Rank) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.freed = true;
        }
    }
}

/// From which size on operations are folded at once.
fn from(common: &Common) -> usize {
    #[cfg(any(test, feature = "testing"))]
    if let Some(from) = crate::testing::folded_from(common.number) {
        return from;
    }
    // Small parts of a list share their round trips: each loan would have to wait for the answer to the one before.
    if common.signature.dtype == LIST { SMALL + 1 } else { FROM }
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
            for peer in others.clone() {
                let (Loan { input, output }, bytes) = self.loan_to(c, peer);
                let tx = port.tx(peer)?;
                if !tx.can_lend(input, bytes) || !tx.can_lend(output, bytes) {
                    self.shared.stage = Stage::Steps;
                    return Ok(None);
                }
            }
            self.shared.stage = Stage::Offered;
        }
        if self.shared.stage == Stage::Offered {
            for peer in others.clone() {
                moved |= self.offer(c, peer, port)?;
            }
            for peer in others.clone() {
                match self.first(c, peer, port)? {
                    First::NotYet => {}
                    First::Loan(loan) => (self.shared.peers[peer].loan, moved) = (Some(loan), true),
                    First::Data => {
                        self.give_all_back(c, port)?;
                        self.shared.stage = Stage::Steps;
                        return Ok(None);
                    }
                }
            }
            if others
                .clone()
                .all(|peer| self.shared.peers[peer].offered && self.shared.peers[peer].loan.is_some())
            {
                self.tx.fill(Cursor { message: 0, round: self.rounds });
                self.shared.stage = Stage::Folding;
            }
        }
        if self.shared.stage == Stage::Folding {
            moved |= self.fold_slice(c, port)?;
        }
        let mut complete = self.shared.stage == Stage::Folded;
        for peer in others {
            // Who has hung up gave back what it may never have written.
            complete = complete && self.shared.peers[peer].freed && !port.tx(peer)?.has_hung_up();
        }
        Ok(Some((moved, complete)))
    }

    /// A peer's chunk of our memory, and its bytes.
    fn loan_to(&self, c: Context<'_>, peer: Rank) -> (Loan, usize) {
        let (part, unit) = (c.part, c.part.dtype.size());
        let range = Layout::Split { parts: part.program.plan.size as u32 }.range(peer as u32, part.count);
        let input = match self.scaled_input.is_empty() {
            true => part.input,
            false => self.scaled_input.as_ptr().cast(),
        };
        let (input, output) =
            (input.wrapping_add(range.start * unit), part.output.wrapping_add(range.start * unit));
        (Loan { input, output }, range.len() * unit)
    }

    /// Lends a peer its chunk. Whether it was lent now.
    fn offer(&mut self, c: Context<'_>, peer: Rank, port: &mut Port) -> Result<bool, Error> {
        if self.shared.peers[peer].offered
            || !c.earlier.iter().all(|machine| machine.tx_done(peer))
            || !port.tx(peer)?.room()?
        {
            return Ok(false);
        }
        let (loan, bytes) = self.loan_to(c, peer);
        let header = Header {
            comm: c.common.comm as u32,
            op: c.common.number,
            offset: bytes as u64,
            len: 0,
            message: self.message(MESSAGE),
            signature: c.common.signature,
        };
        let receiver = peer as u32 | u32::from(self.part) << RECEIVER_BITS;
        port.lend(peer, header, loan, (c.common.number, LOAN, receiver))?;
        self.shared.peers[peer].offered = true;
        Ok(true)
    }

    pub(super) fn is_loan(&self, frame: &Frame) -> bool {
        frame.header.message == self.message(MESSAGE)
    }

    /// Looks at what a peer sends first.
    fn first(&self, c: Context<'_>, peer: Rank, port: &mut Port) -> Result<First, Error> {
        if self.shared.peers[peer].loan.is_some() || !c.earlier.iter().all(|machine| machine.rx_done(peer)) {
            return Ok(First::NotYet);
        }
        let Some(frame) = port.rx(peer)?.peek(0)? else { return Ok(First::NotYet) };
        check_frame(&frame, c, c.common.signature, peer)?;
        if !self.is_loan(&frame) {
            return Ok(First::Data);
        }
        let bytes = self.loan_to(c, c.part.program.plan.rank).1;
        if frame.header.offset != bytes as u64 {
            let problem = format!("a loan of {} bytes, expected {bytes}", frame.header.offset);
            return Err(Error::Protocol { peer, problem });
        }
        Ok(First::Loan(port.rx(peer)?.borrow(bytes)?))
    }

    /// Gives all back that was lent to us.
    fn give_all_back(&mut self, c: Context<'_>, port: &mut Port) -> Result<(), Error> {
        for peer in 0..c.part.program.plan.size {
            if self.shared.peers[peer].loan.take().is_some()
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
            if port.rx(peer)?.peek(0)?.is_none() {
                return Ok(false);
            }
        }
        let unit = part.dtype.size();
        let (ours, bytes) = self.loan_to(c, plan.rank);
        let (len, done) = (bytes / unit, self.shared.done);
        let slice = (PASS / (2 * plan.size)).next_multiple_of(4096) / unit;
        let m = slice.min(len - done);
        let (mut ins, mut outs) = ([std::ptr::null(); MOST], [std::ptr::null_mut(); MOST]);
        for (rank, peer) in self.shared.peers.iter().enumerate() {
            let Loan { input, output } = peer.loan.unwrap_or(ours);
            (ins[rank], outs[rank]) = (input.wrapping_add(done * unit), output.wrapping_add(done * unit));
        }
        let (ins, outs) = (&ins[..plan.size], &outs[..plan.size]);
        let finish = c.averages().then_some(plan.size as u32);
        // SAFETY: `m` elements from `done` on are inside our chunk of every rank's buffers: of ours, which the table owns,
        // and of what peers lend, which they have just been seen not to take back, under the gate where they are in this
        // process (`LinkRx::borrow` has checked the rest). Each rank's input and output are equal or disjoint, those of
        // two ranks are disjoint, and by the protocol this rank alone touches this chunk of them now.
        unsafe {
            match &c.common.reduction {
                _ if m == 0 => {}
                Reduction::Op(op) => kernels::reduce(part.dtype, *op, ins, outs, m, finish),
                Reduction::Function(function) => {
                    if !function.combine(ins, outs, m) {
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
        if self.shared.done == len {
            self.give_all_back(c, port)?;
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
                Stage::Folded => !state.freed || port.tx(peer).is_ok_and(|tx| tx.has_hung_up()),
                _ if silent => {
                    let has_come = matches!(port.rx(peer).and_then(|rx| rx.peek(0)), Ok(Some(_)));
                    state.loan.is_none() && !has_come
                }
                _ => !state.offered,
            };
            if waited_for {
                ranks.push(peer);
            }
        }
        true
    }
}
