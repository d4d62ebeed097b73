//! What every run of a part puts on a link and finds there: whose turn it is, how messages are numbered, and whether a frame is
//! the right one.

use crate::error::Error;
use crate::exec::backend::Context;
use crate::exec::port::{Lent, Port};
use crate::link::{Frame, Loan};
use crate::types::{Rank, Signature};

/// The low bits of the receiver in [`Lent::source`] are the receiver, the high ones the part.
const RECEIVER_BITS: u32 = 16;
const RECEIVER: u32 = (1 << RECEIVER_BITS) - 1;
/// The step in [`Lent::source`] of a loan: no plan has so many steps.
pub(super) const LOAN: u32 = u32::MAX;
/// What a loan is numbered among its part's messages: no plan sends so many.
pub(super) const LOAN_MESSAGE: u32 = 0xffff;

/// The part that posted a frame.
#[inline]
pub(super) fn part_of(lent: &Lent) -> u16 {
    (lent.source.receiver >> RECEIVER_BITS) as u16
}

/// Which of its step's receivers a frame went to; of a loan: which rank.
#[inline]
pub(super) fn receiver_of(lent: &Lent) -> usize {
    (lent.source.receiver & RECEIVER) as usize
}

/// Whether what came back is a loan, and not a message of a step's.
#[inline]
pub(super) fn is_of_loan(lent: &Lent) -> bool {
    lent.source.step == LOAN
}

/// What came of a pass over a part.
pub(super) struct Passed {
    /// Whether anything moved.
    pub(super) moved: bool,
    /// Whether the part is complete.
    pub(super) complete: bool,
    /// Bytes gathered and posted.
    pub(super) touched: usize,
}

/// The run of a part as those of the parts after it see it.
pub(super) trait LinkUse {
    /// Whether nothing more of this part goes to a peer.
    fn tx_done(&self, peer: Rank) -> bool;
    /// Whether nothing more of this part comes from a peer.
    fn rx_done(&self, peer: Rank) -> bool;
}

/// What a run works on in a pass, and the runs of the parts before it, whose messages go first.
pub(super) struct Turn<'a, R> {
    pub(super) c: Context<'a>,
    /// Which part of the operation.
    pub(super) part: u16,
    pub(super) earlier: &'a [Box<R>],
}

impl<R> Clone for Turn<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Turn<'_, R> {}

impl<R: LinkUse> Turn<'_, R> {
    /// Whether the parts before have nothing more for the link to a peer.
    #[inline]
    pub(super) fn may_send(&self, peer: Rank) -> bool {
        self.earlier.iter().all(|run| run.tx_done(peer))
    }

    /// Whether nothing more comes for them from a peer.
    #[inline]
    pub(super) fn may_receive(&self, peer: Rank) -> bool {
        self.earlier.iter().all(|run| run.rx_done(peer))
    }

    /// How a message of this part is numbered in its frames.
    #[inline]
    pub(super) fn message(&self, message: u32) -> u32 {
        u32::from(self.part) << 16 | message & 0xffff
    }

    /// The receiver in [`Lent::source`] of a frame of this part.
    #[inline]
    pub(super) fn receiver(&self, receiver: usize) -> u32 {
        receiver as u32 | u32::from(self.part) << RECEIVER_BITS
    }

    /// Whether a frame is a loan of this part's.
    #[inline]
    pub(super) fn is_loan(&self, frame: &Frame) -> bool {
        frame.header.message == self.message(LOAN_MESSAGE)
    }

    /// What a peer sends next to a part that takes the steps, if it has begun to come. A peer that has lent to us, and would have
    /// folded all at once, has its loan back: some rank cannot, as that one's first frame says.
    #[inline]
    pub(super) fn next_of_steps(
        &self,
        from: Rank,
        ours: Signature,
        port: &mut Port,
    ) -> Result<Option<Frame>, Error> {
        // The header comes first: a disagreement is found before any data is used.
        while let Some(frame) = port.rx(from)?.peek(0)? {
            check_frame(&frame, self.c, ours, from)?;
            // Of a loan all is here, always: what calls itself one and is not is refused by the step.
            if !self.is_loan(&frame) || frame.ready != Loan::FRAME {
                return Ok(Some(frame));
            }
            port.rx(from)?.release(frame.ready);
        }
        Ok(None)
    }
}

/// Whether a frame is of this operation, and its sender called what we did.
#[inline]
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
