//! What a plan depends on, and the small vocabulary that the algorithms are written in. "We" and "our" mean the rank whose plan is made.

use crate::{Algo, At, INPUT, Kind, Layout, OUTPUT, Operand, Plan, Rank, SCRATCH, Step};

/// All that a plan depends on besides the collective and the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Shape<'a> {
    /// Ranks in the group.
    pub n: usize,
    /// The rank whose plan it is.
    pub rank: Rank,
    /// The root of a broadcast, reduce, gather or scatter; not looked at otherwise.
    pub root: Rank,
    /// Whether input and output are one buffer. A barrier always is.
    pub in_place: bool,
    /// Whether each rank has a count of its own: chunks are then whole blocks, whose ranges come with the operation, in tables
    /// ([`Layout::Table`]).
    pub varied: bool,
    /// The host of each rank, numbered from 0 in the order of their first ranks; empty: all ranks share one.
    pub hosts: &'a [u32],
}

/// A collective cannot be carried out as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} by {algo}: {why}")]
pub struct Unsuitable {
    /// The collective.
    pub kind: Kind,
    /// The algorithm asked for.
    pub algo: Algo,
    /// Why not.
    pub why: String,
}

impl Shape<'_> {
    /// Where chunk `chunk` of our input is.
    pub(super) fn input(&self, chunk: usize) -> At {
        At { slot: if self.in_place { OUTPUT } else { INPUT }, chunk: chunk as u32 }
    }

    /// Chunk `chunk` of our input, wherever it is, as an operand.
    pub(super) fn own(&self, chunk: usize) -> Operand {
        Operand::Own(self.input(chunk))
    }

    /// Chunk `chunk` of the output.
    pub(super) fn out(&self, chunk: usize) -> At {
        At { slot: OUTPUT, chunk: chunk as u32 }
    }

    /// Everyone else, ascending: a set to send to.
    pub(super) fn others(&self) -> Vec<Rank> {
        (0..self.n).filter(|&p| p != self.rank).collect()
    }

    /// Everyone else, from our right neighbour on: an order of work in which no rank is everyone's first.
    pub(super) fn onwards(&self) -> impl Iterator<Item = Rank> + use<> {
        let (n, rank) = (self.n, self.rank);
        (1..n).map(move |k| (rank + k) % n)
    }

    /// The rank (or chunk) `k` before us on the ring.
    pub(super) fn before(&self, k: usize) -> usize {
        (self.rank + self.n - k % self.n) % self.n
    }

    /// The next rank on the ring.
    pub(super) fn right(&self) -> Rank {
        (self.rank + 1) % self.n
    }

    /// Operands in rank order: a message from each other rank, and `own` in our place.
    pub(super) fn in_rank_order(&self, own: Operand) -> Vec<Operand> {
        (0..self.n).map(|p| if p == self.rank { own } else { Operand::Recv(p) }).collect()
    }

    /// A plan over these layouts.
    pub(super) fn over(&self, input: Layout, output: Layout, steps: Vec<Step>) -> Plan {
        Plan { size: self.n, rank: self.rank, slots: vec![input, output], steps }
    }

    /// A plan with input and output cut alike into `parts`.
    pub(super) fn split(&self, parts: usize, steps: Vec<Step>) -> Plan {
        let layout = Layout::Split { parts: parts as u32 };
        self.over(layout, layout, steps)
    }

    /// Chunk `chunk` of the scratch memory.
    pub(super) fn scratch(&self, chunk: usize) -> At {
        At { slot: SCRATCH, chunk: chunk as u32 }
    }

    /// Our number counted from the root: the root is 0.
    pub(super) fn past_root(&self) -> usize {
        self.before(self.root)
    }

    /// The rank with this number counted from the root.
    pub(super) fn real(&self, past_root: usize) -> Rank {
        (self.root + past_root) % self.n
    }

    /// One block for each rank.
    pub(super) fn blocks(&self) -> Layout {
        let n = self.n as u32;
        if self.varied { Layout::Table { chunks: n } } else { Layout::Blocks { blocks: n } }
    }

    /// One piece.
    pub(super) fn one(&self) -> Layout {
        if self.varied { Layout::Table { chunks: 1 } } else { Layout::Split { parts: 1 } }
    }

    /// A plan of a collective whose input and output are each either whole blocks or one piece, as [`super::plan`] lists.
    pub(super) fn whole(&self, kind: Kind, steps: Vec<Step>) -> Plan {
        let root = self.rank == self.root;
        let blocks_if = |yes: bool| if yes { self.blocks() } else { self.one() };
        let (input, output) = match kind {
            Kind::AllGather => (false, true),
            Kind::ReduceScatter => (true, self.in_place),
            Kind::Gather => (false, root),
            Kind::Scatter => (root, root && self.in_place),
            Kind::AllToAll => (true, true),
            _ => (false, false),
        };
        self.over(blocks_if(input), blocks_if(output), steps)
    }

    /// The plan of a group of one: it copies the input if out of place, and finishes a reduction; for an exscan it does nothing.
    pub(super) fn alone(&self, kind: Kind) -> Plan {
        let finish = finishes(kind);
        let step = Step { finish, ..keep(self.own(0), self.out(0)) };
        let nothing = kind == Kind::ExScan || (self.in_place && !finish);
        self.whole(kind, if nothing { vec![] } else { vec![step] })
    }
}

/// Whether the collective reduces every rank's contribution into each result, so that it can be an average: scans do not.
pub(super) fn finishes(kind: Kind) -> bool {
    kind.reduces() && !kind.is_scan()
}

impl Plan {
    /// The same plan with a third slot: scratch memory of this layout.
    pub(super) fn and_scratch(mut self, layout: Layout) -> Plan {
        self.slots.push(layout);
        self
    }
}

/// Send one operand and keep nothing.
pub(super) fn send(what: Operand, to: Vec<Rank>) -> Step {
    Step { operands: vec![what], send: to, ..Step::default() }
}

/// Copy one operand to `dst`.
pub(super) fn keep(what: Operand, dst: At) -> Step {
    Step { operands: vec![what], dst: Some(dst), ..Step::default() }
}
