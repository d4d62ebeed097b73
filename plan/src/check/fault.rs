//! What can be wrong with the plans of a collective.

use std::fmt;

use crate::{At, Rank};

/// The first fault that was found.
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
    /// A step without a meaning: no operands, a chunk that does not exist, a bad send set, a loan of a rank to itself.
    #[error("rank {rank}, step {step}: {what}")]
    Malformed {
        /// Whose plan.
        rank: Rank,
        /// Which step.
        step: usize,
        /// What about it.
        what: &'static str,
    },
    /// A message or a loan that nobody receives.
    #[error("rank {from}, step {step}: rank {to} has no receive for this message")]
    Unreceived {
        /// The sender.
        from: Rank,
        /// The sender's step.
        step: usize,
        /// Who should have received it.
        to: Rank,
    },
    /// A receive, or the use of a loan, for which the other rank sends or lends nothing.
    #[error("rank {to}, step {step}: rank {from} sends nothing for this receive")]
    Unsent {
        /// The rank that sends nothing.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The receiver's step.
        step: usize,
    },
    /// A message whose place on the link belongs to a step that borrows, or a loan whose place belongs to a step that receives.
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
    /// A rank touches a chunk that it has lent: it writes the chunk, reads it although the borrower may write it, or lends it again
    /// although one of the borrowers may write it. What steps wait for ([`crate::StepNode`]) should make this impossible.
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
        /// The operation's `count` at which the lengths differ.
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
        /// Whether the plans would come to their end on links that store messages.
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
    /// A result made of other chunks or ranks than it should be, or of memory that held nothing.
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
        /// One of the two ranks.
        rank: Rank,
        /// The other rank.
        other: Rank,
        /// Where.
        at: At,
    },
    /// A result of a scan that is not combined in rank order, as the definition of a scan requires.
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
        /// `true`: it was finished too early or too often; `false`: it was never finished.
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
    /// An earlier step of the same rank that uses the same memory.
    Step(usize),
    /// A message from a rank.
    From(Rank),
    /// A rank that has not taken its message.
    To(Rank),
    /// A loan from a rank.
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
