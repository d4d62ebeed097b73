//! What one rank does in a collective, as plain data.
//!
//! A [`Plan`] is a list of [`Step`]s over named memory ([`Slot`]s). Steps are **dataflow**: the order of the list counts only between
//! two steps of which one writes a `(slot, chunk)` that the other touches, and for the order of the messages between two ranks. A plan knows nothing of
//! bytes, slices, links or time. The executor (in host memory, on CUDA devices, or in the simulator) cuts chunks into slices and
//! pipelines them; the checker runs the same list symbolically.

use std::fmt;
use std::ops::Range;

use crate::Rank;

/// Index of a piece of memory that a plan names.
pub type Slot = u8;

/// The caller's input. An in-place plan does not use it: its input is what [`OUTPUT`] holds at the start.
pub const INPUT: Slot = 0;
/// The caller's output.
pub const OUTPUT: Slot = 1;
/// Scratch memory that the executor provides for plans that list a third slot: it holds nothing at the start, and nobody reads it at the end.
pub const SCRATCH: Slot = 2;

/// One chunk of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct At {
    /// Which memory.
    pub slot: Slot,
    /// Which chunk of it, an index into the slot's [`Layout`].
    pub chunk: u32,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk {} of slot {}", self.chunk, self.slot)
    }
}

/// Where an operand of a step comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The next message from this rank.
    Recv(Rank),
    /// Our own memory.
    Own(At),
    /// What the next [`Loan`] of this rank lets us read.
    Lent(Rank),
}

/// Memory of our own that a step lends to a peer, until the peer gives it back. Meanwhile the peer may read chunk `read` and
/// write chunk `write`, and no rank but the peer touches chunk `write`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Loan {
    /// Who borrows it.
    pub to: Rank,
    /// What the peer may read.
    pub read: At,
    /// What the peer may write: the same chunk, or another of the same length.
    pub write: At,
}

/// `out = operands, combined in the order given;  dst? <- out;  send? <- out`.
///
/// All operands and `dst` have one length. A step with one operand is a copy. `send` is a set: each
/// rank in it gets the same value. Memory that is sent from is not overwritten until every receiver has released the message.
///
/// A step may instead *lend* memory to a peer (`loan`; its other fields are then empty). Such a step stores nothing, takes its
/// place among the messages to that peer, and is over when the peer gives the memory back. The peer has a step that reads the lent
/// memory ([`Operand::Lent`]), writes its result into it (`into`), or both; that step gives the memory back when it is done.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Step {
    /// What is combined, in this order (floating point is not associative: order is part of the plan).
    pub operands: Vec<Operand>,
    /// Where the result is stored, if anywhere.
    pub dst: Option<At>,
    /// Who receives the result: ascending, without duplicates, without ourselves.
    pub send: Vec<Rank>,
    /// The result holds every rank's contribution: an average divides here, once.
    pub finish: bool,
    /// For a copy: gather the operand before `dst` is free, as a combining step always does. Two ranks that exchange data in
    /// place, each receiving into the memory that it sends from, would otherwise wait for each other for ever.
    pub early: bool,
    /// What the step lends, if it is a step that lends.
    pub loan: Option<Loan>,
    /// The ranks into whose loans the result is written: ascending, without duplicates, without ourselves.
    pub into: Vec<Rank>,
}

impl Step {
    /// Where this step holds what it sends.
    #[inline]
    pub fn holds(&self) -> Holds {
        match (self.dst, self.operands.as_slice()) {
            _ if self.loan.is_some() => Holds::Loan,
            (Some(_), _) => Holds::Dst,
            (None, [Operand::Own(_)]) if !self.finish && self.into.is_empty() => Holds::Source,
            _ => Holds::Hand,
        }
    }

    /// The ranks whose loans the step borrows, each of them once: first those whose loans it reads, in the order of its
    /// operands, then those whose loans it only writes into.
    #[inline]
    pub fn lenders(&self) -> impl Iterator<Item = Rank> + '_ {
        let read = self.operands.iter().filter_map(|operand| match operand {
            Operand::Lent(from) => Some(*from),
            Operand::Recv(_) | Operand::Own(_) => None,
        });
        read.chain(self.only_into())
    }

    /// The ranks whose loans the step writes into and does not read.
    pub(crate) fn only_into(&self) -> impl Iterator<Item = Rank> + '_ {
        self.into.iter().copied().filter(|from| !self.operands.contains(&Operand::Lent(*from)))
    }

    /// A chunk of our own memory that the step names, if it names any. All chunks that it names, and its messages, have one length.
    #[inline]
    pub fn chunk(&self) -> Option<At> {
        let own = self.operands.iter().find_map(|o| match o {
            Operand::Own(at) => Some(*at),
            Operand::Recv(_) | Operand::Lent(_) => None,
        });
        self.dst.or(own).or(self.loan.map(|loan| loan.read))
    }

    /// Whether it combines several operands. Else it copies one, or lends.
    #[inline]
    pub fn combines(&self) -> bool {
        self.operands.len() > 1
    }

    /// Whether it gathers before its `dst` is free.
    #[inline]
    pub fn gathers_early(&self) -> bool {
        self.early || self.combines()
    }
}

/// Where a step holds what it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Where it lies already: the step only sends from our own memory (one own operand, no `dst`).
    Source,
    /// In `dst`.
    Dst,
    /// In the hand: the step computes it, but has no `dst`.
    Hand,
    /// Nowhere: the step sends nothing, it lends ([`Step::loan`]).
    Loan,
}

/// How a slot's elements are cut into chunks, given the operation's `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `count` elements in `parts` nearly equal chunks: the first `count % parts` are one element longer.
    Split {
        /// Number of chunks.
        parts: u32,
    },
    /// `blocks` chunks of `count` elements each, one after another.
    Blocks {
        /// Number of chunks.
        blocks: u32,
    },
    /// Chunks whose ranges come with the operation, as each rank has a count of its own. See [`Shape::varied`].
    ///
    /// [`Shape::varied`]: super::Shape::varied
    Table {
        /// Number of chunks.
        chunks: u32,
    },
}

impl Layout {
    /// Number of chunks.
    #[inline]
    pub fn chunks(self) -> u32 {
        match self {
            Layout::Split { parts } => parts,
            Layout::Blocks { blocks } => blocks,
            Layout::Table { chunks } => chunks,
        }
    }

    /// Elements of the whole slot; 0 for a table, whose ranges come with the operation.
    #[inline]
    pub fn total(self, count: usize) -> usize {
        match self {
            Layout::Split { .. } => count,
            Layout::Blocks { blocks } => count * blocks as usize,
            Layout::Table { .. } => 0,
        }
    }

    /// The elements of one chunk; none for a table, whose ranges come with the operation.
    #[inline]
    pub fn range(self, chunk: u32, count: usize) -> Range<usize> {
        let chunk = chunk as usize;
        match self {
            Layout::Split { parts } => {
                let parts = parts as usize;
                let (base, longer) = (count / parts, count % parts);
                let start = chunk * base + chunk.min(longer);
                start..start + base + usize::from(chunk < longer)
            }
            Layout::Blocks { .. } => chunk * count..(chunk + 1) * count,
            Layout::Table { .. } => 0..0,
        }
    }
}

/// One rank's part of a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Ranks in the group.
    pub size: usize,
    /// Whose part this is.
    pub rank: Rank,
    /// The layout of each slot, indexed by [`Slot`].
    pub slots: Vec<Layout>,
    /// What to do.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Whether any step reads or writes this slot (what steps lend is not looked at). A rank may have no memory for a slot that no step
    /// touches (the input of a scatter on all ranks but the root, say).
    pub fn touches(&self, slot: Slot) -> bool {
        let of = |at: At| at.slot == slot;
        let reads =
            |step: &Step| step.operands.iter().any(|from| matches!(from, Operand::Own(at) if of(*at)));
        self.steps.iter().any(|step| reads(step) || step.dst.is_some_and(of))
    }
}
