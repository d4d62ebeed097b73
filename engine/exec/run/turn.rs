//! How the runs of parts use a link: when it is a part's turn, how messages are numbered, and whether a frame is the expected one.

use crate::error::Error;
use crate::exec::backend::Context;
use crate::exec::port::{Lent, Port};
use crate::link::{Frame, Loan};
use crate::types::{Rank, Signature};

/// The low bits of `receiver` in [`Lent::source`] name the receiver, the high bits the part.
const RECEIVER_BITS: u32 = 16;
const RECEIVER: u32 = (1 << RECEIVER_BITS) - 1;
/// The value of `step` in [`Lent::source`] of a loan: no plan has so many steps.
pub(super) const LOAN: u32 = u32::MAX;

/// The part that posted a frame.
#[inline]
pub(super) fn part_of(lent: &Lent) -> u16 {
    (lent.source.receiver >> RECEIVER_BITS) as u16
}

/// Which of its step's receivers a frame went to; for a loan: which rank.
#[inline]
pub(super) fn receiver_of(lent: &Lent) -> usize {
    (lent.source.receiver & RECEIVER) as usize
}

/// Whether what came back is a loan, and not a message of a step.
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
    /// Bytes gathered and posted; of a part that goes by loans: bytes that its folds read and wrote.
    pub(super) touched: usize,
}

/// What the runs of later parts see of a part's run.
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

    /// Whether the parts before have nothing more to come from a peer.
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
        frame.header.message == self.message(Loan::MESSAGE)
    }

    /// The next frame from a peer for a part that takes the steps, if it has begun to come. A loan that comes first is given back: the peer
    /// meant to go by loans, and takes the steps when it sees the first frame of a rank that cannot lend.
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
            // All of a loan comes at once. A frame that has a loan's number and another length is refused by the step.
            if !self.is_loan(&frame) || frame.ready != Loan::FRAME {
                return Ok(Some(frame));
            }
            port.rx(from)?.release(frame.ready);
        }
        Ok(None)
    }
}

/// Checks that a frame is of this operation, and that its sender has called what this rank has.
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
