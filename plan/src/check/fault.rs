//! What can be wrong with the plans of a collective.

use std::fmt;

use crate::{At, Rank};

/// The first thing found wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The plans do not belong together: sizes, ranks, slots or layouts.
    #[error("rank {rank}: {what}")]
    Shape {
        /// Whose plan.
        rank: Rank,
        /// What about it.
        what: String,
    },
    /// A step that means nothing: no operands, a chunk that does not exist, a bad send set, a loan to itself.
    #[error("rank {rank}, step {step}: {what}")]
    Malformed {
        /// Whose plan.
        rank: Rank,
        /// Which step.
        step: usize,
        /// What about it.
        what: &'static str,
    },
    /// A message that nobody receives.
    #[error("rank {from}, step {step}: rank {to} has no receive for this message")]
    Unreceived {
        /// The sender.
        from: Rank,
        /// The sender's step.
        step: usize,
        /// Who should have received it.
        to: Rank,
    },
    /// A receive of what nobody sends.
    #[error("rank {to}, step {step}: rank {from} sends nothing for this receive")]
    Unsent {
        /// Who should have sent it.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The receiver's step.
        step: usize,
    },
    /// A message that meets a step that borrows, or a loan that meets a step that receives.
    #[error(
        "rank {from}, step {step}: a {} in its step {receiver}",
        if *.is_loan { format!("loan that rank {to} receives as a message") } else { format!("message that rank {to} takes for a loan") }
    )]
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
    /// so that two ranks would hold it. What a step waits for ([`crate::StepNode`]) should make this impossible.
    #[error("rank {rank}, {at}: touched while it is lent to rank {by}")]
    Held {
        /// Whose chunk, and who touches it.
        rank: Rank,
        /// Which chunk.
        at: At,
        /// To whom it is lent.
        by: Rank,
    },
    /// A step whose operands, messages, loans or result differ in length.
    #[error("rank {rank}, step {step}: {own} elements meet {other} in an operation of {count} elements")]
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
    #[error(
        "deadlock with {slices} slices a chunk{}{}",
        if *.hidden_by_buffering { " (links that buffer would hide it)" } else { "" },
        .waits.iter().map(|wait| format!("; {wait}")).collect::<String>()
    )]
    Deadlock {
        /// Slices in each chunk.
        slices: usize,
        /// The first unfinished step of each rank that has one.
        waits: Vec<Wait>,
        /// Whether links that store messages would hide it.
        hidden_by_buffering: bool,
    },
    /// A result without a rank's contribution.
    #[error("rank {rank}, {at}: rank {of}'s contribution is missing")]
    Missing {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
        /// Whose contribution.
        of: Rank,
    },
    /// A result with a rank's contribution more than once.
    #[error("rank {rank}, {at}: rank {of}'s contribution is in it more than once")]
    Twice {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
        /// Whose contribution.
        of: Rank,
    },
    /// A result that is of other chunks or ranks than it should be, or of memory that holds nothing yet.
    #[error("rank {rank}, {at}: wrong data")]
    Content {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
    },
    /// Two ranks hold the same result with different bits: the operands were combined in another order.
    #[error("ranks {rank} and {other}, {at}: not combined in the same order")]
    Bits {
        /// One of them.
        rank: Rank,
        /// The other.
        other: Rank,
        /// Where.
        at: At,
    },
    /// A result of a scan that is not combined in rank order, which is part of what a scan is.
    #[error("rank {rank}, {at}: not combined in rank order")]
    Order {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
    },
    /// A result that was not finished exactly once, after the last contribution.
    #[error(
        "rank {rank}, {at}: {}",
        if *.too_much { "finished too early or too often" } else { "never finished" }
    )]
    Finish {
        /// Who holds the result.
        rank: Rank,
        /// Where.
        at: At,
        /// Whether it was finished too early or too often (or never).
        too_much: bool,
    },
    /// Memory that should be unchanged is not.
    #[error("rank {rank}, {at}: changed, but it is not to be written")]
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
