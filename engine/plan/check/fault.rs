//! What can be wrong with the plans of a collective.

use std::fmt;

use super::super::{At, Rank};

/// The first thing found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The plans do not belong together: sizes, ranks, slots or layouts.
    Shape {
        /// Whose plan.
        rank: Rank,
        /// What about it.
        what: String,
    },
    /// A step that means nothing: no operands, a chunk that does not exist, a bad send set, a loan to itself.
    Malformed {
        /// Whose plan.
        rank: Rank,
        /// Which step.
        step: usize,
        /// What about it.
        what: &'static str,
    },
    /// A message that nobody receives.
    Unreceived {
        /// The sender.
        from: Rank,
        /// The sender's step.
        step: usize,
        /// Who should have received it.
        to: Rank,
    },
    /// A receive of what nobody sends.
    Unsent {
        /// Who should have sent it.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The receiver's step.
        step: usize,
    },
    /// A message that meets a step that borrows, or a loan that meets a step that receives.
    Mispaired {
        /// The sender, or lender.
        from: Rank,
        /// The sender's step.
        step: usize,
        /// The receiver, or borrower.
        to: Rank,
        /// The receiver's step.
        receiver: usize,
        /// Whether `from` lends and `to` receives; otherwise `from` sends and `to` borrows.
        is_loan: bool,
    },
    /// A chunk that is out on loan is touched by its owner: written, or read although the borrower may write it, or lent again
    /// so that two ranks would hold it. What a step waits for ([`crate::plan::Node`]) should make this impossible.
    Held {
        /// Whose chunk, and who touches it.
        rank: Rank,
        /// Which chunk.
        at: At,
        /// To whom it is lent.
        by: Rank,
    },
    /// A step whose operands, messages, loans or result differ in length.
    Length {
        /// Whose plan.
        rank: Rank,
        /// Which step.
        step: usize,
        /// Elements of the operation at which they differ.
        count: usize,
        /// Elements of the step itself.
        own: usize,
        /// Elements of its operand, message or loan.
        other: usize,
    },
    /// The plans stop before they are done.
    Deadlock {
        /// Slices in each chunk.
        slices: usize,
        /// The first unfinished step of each rank that has one.
        waits: Vec<Wait>,
        /// Whether links that store messages would hide it.
        hidden_by_buffering: bool,
    },
    /// A result without a rank's contribution.
    Missing {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
        /// Whose contribution.
        of: Rank,
    },
    /// A result with a rank's contribution more than once.
    Twice {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
        /// Whose contribution.
        of: Rank,
    },
    /// A result that is of other chunks or ranks than it should be, or of memory that holds nothing yet.
    Content {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
    },
    /// Two ranks hold the same result with different bits: the operands were combined in another order.
    Bits {
        /// One of them.
        rank: Rank,
        /// The other.
        other: Rank,
        /// Where.
        at: At,
    },
    /// A result of a scan that is not combined in rank order, which is part of what a scan is.
    Order {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
    },
    /// A result that was not finished exactly once, after the last contribution.
    Finish {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
        /// Whether it was finished too early or too often (or never).
        too_much: bool,
    },
    /// Memory that should be unchanged is not.
    Changed {
        /// Whose memory.
        rank: Rank,
        /// Where.
        at: At,
    },
}

/// A step that cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Whose step.
    pub rank: Rank,
    /// Which.
    pub step: usize,
    /// At which slice.
    pub slice: usize,
    /// What it waits for.
    pub on: On,
}

/// What a step waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum On {
    /// An earlier step of the same rank, by their memory.
    Step(usize),
    /// A message from a rank.
    From(Rank),
    /// A rank that has not taken its message.
    To(Rank),
    /// A loan of a rank.
    Loan(Rank),
    /// A rank that has not given back what it was lent.
    Back(Rank),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |at: &At| format!("chunk {} of slot {}", at.chunk, at.slot);
        match self {
            Fault::Shape { rank, what } => write!(f, "rank {rank}: {what}"),
            Fault::Malformed { rank, step, what } => write!(f, "rank {rank}, step {step}: {what}"),
            Fault::Unreceived { from, step, to } => {
                write!(f, "rank {from}, step {step}: rank {to} has no receive for this message")
            }
            Fault::Unsent { from, to, step } => {
                write!(f, "rank {to}, step {step}: rank {from} sends nothing for this receive")
            }
            Fault::Mispaired { from, step, to, receiver, is_loan: true } => {
                write!(
                    f,
                    "rank {from}, step {step}: a loan that rank {to} receives as a message in its step {receiver}"
                )
            }
            Fault::Mispaired { from, step, to, receiver, is_loan: false } => {
                write!(
                    f,
                    "rank {from}, step {step}: a message that rank {to} takes for a loan in its step {receiver}"
                )
            }
            Fault::Held { rank, at, by } => {
                write!(f, "rank {rank}, {}: touched while it is lent to rank {by}", place(at))
            }
            Fault::Length { rank, step, count, own, other } => write!(
                f,
                "rank {rank}, step {step}: {own} elements meet {other} in an operation of {count} elements"
            ),
            Fault::Deadlock { slices, waits, hidden_by_buffering } => {
                let hidden = if *hidden_by_buffering { " (links that buffer would hide it)" } else { "" };
                write!(f, "deadlock with {slices} slices a chunk{hidden}")?;
                waits.iter().try_for_each(|w| write!(f, "; {w}"))
            }
            Fault::Missing { rank, at, of } => {
                write!(f, "rank {rank}, {}: rank {of}'s contribution is missing", place(at))
            }
            Fault::Twice { rank, at, of } => {
                write!(f, "rank {rank}, {}: rank {of}'s contribution is in it more than once", place(at))
            }
            Fault::Content { rank, at } => write!(f, "rank {rank}, {}: wrong data", place(at)),
            Fault::Bits { rank, other, at } => {
                write!(f, "ranks {rank} and {other}, {}: not combined in the same order", place(at))
            }
            Fault::Order { rank, at } => write!(f, "rank {rank}, {}: not combined in rank order", place(at)),
            Fault::Finish { rank, at, too_much } => {
                let what = if *too_much { "finished too early or too often" } else { "never finished" };
                write!(f, "rank {rank}, {}: {what}", place(at))
            }
            Fault::Changed { rank, at } => {
                write!(f, "rank {rank}, {}: changed, but it is not to be written", place(at))
            }
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { rank, step, slice, on } = self;
        write!(f, "rank {rank}, step {step}, slice {slice} waits for ")?;
        match on {
            On::Step(earlier) => write!(f, "its step {earlier}"),
            On::From(from) => write!(f, "a message from rank {from}"),
            On::To(to) => write!(f, "rank {to} to take its message"),
            On::Loan(from) => write!(f, "a loan of rank {from}"),
            On::Back(to) => write!(f, "rank {to} to give back its loan"),
        }
    }
}

impl std::error::Error for Fault {}
