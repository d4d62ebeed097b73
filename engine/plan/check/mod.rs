//! A symbolic checker: do the plans of all ranks together do what the collective promises?
//!
//! Values are expressions: which contributions, combined in which order. The plans are run as
//! [`crate::plan::compile`] describes, with 1, 2 and 3 slices a chunk, over links that **store nothing**: a
//! message is handed over when its receiver is at it and its sender has it ready. What ends under these
//! rules ends on every link, whatever it buffers, and with every timing: each link has one sender and one
//! receiver that use it in orders fixed by their plans, so all schedules come to the same (Kahn, "The
//! semantics of a simple language for parallel programming", 1974).
//!
//! Then every piece of every rank's memory is looked at: each result has every rank's contribution exactly
//! once, all who hold a result hold the same expression (the same bits), it was finished exactly once, and
//! what must not be written was not.

mod expr;
mod fault;
mod net;
mod run;

pub use fault::{Fault, On, Wait};

use self::expr::{Id, MAX_RANKS, NOTHING, Values};
use self::net::Net;
use self::run::{EMPTY, Mode, Run, Valued};
use super::{At, INPUT, Kind, Layout, OUTPUT, Plan, Rank, Slot};

/// What was found out about plans that are right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Steps of all ranks.
    pub steps: usize,
    /// Messages between all ranks.
    pub messages: usize,
    /// The longest chain of messages, each of which needs the one before.
    pub hops: usize,
    /// Elements sent by the rank that sends most, for each element of the operation's count.
    pub sent: f64,
    /// Whether steps must be gathered in a hand before their `dst` is free: an executor that starts each
    /// step only when it may also store the result would deadlock.
    pub needs_hand: bool,
}

/// Check the plans of all ranks, `plans[rank]`, with 1, 2 and 3 slices a chunk.
///
/// The other ranks' blocks in a reduce_scatter in place are not looked at: an algorithm may use them.
///
/// # Errors
/// The first [`Fault`] found.
pub fn check(kind: Kind, root: Rank, in_place: bool, plans: &[Plan]) -> Result<Report, Fault> {
    check_slices(kind, root, in_place, plans, 3)
}

/// [`check`], with up to `slices` slices a chunk.
///
/// # Errors
/// The first [`Fault`] found.
pub fn check_slices(
    kind: Kind,
    root: Rank,
    in_place: bool,
    plans: &[Plan],
    slices: usize,
) -> Result<Report, Fault> {
    let goal = Goal { kind, root, in_place: in_place || kind == Kind::Barrier, n: plans.len() };
    goal.belong_together(plans)?;
    let net = Net::new(plans)?;
    let mut report = Report {
        steps: net.steps(),
        messages: net.sends.iter().map(Vec::len).sum(),
        hops: 0,
        sent: net.most_sent(720_720 * plans.len()) as f64 / (720_720 * plans.len()) as f64,
        needs_hand: false,
    };
    let run = |slices, eager, strict| {
        let values = Values::new(goal.n, goal.pieces(plans, slices));
        let memory = goal.before(plans, slices, &values);
        Run::new(&net, Mode { slices, eager, strict }, memory, values)
    };
    for slices in 1..=slices {
        let done = run(slices, false, false);
        let waits = done.waits();
        if !waits.is_empty() {
            let hidden_by_buffering = run(slices, true, false).waits().is_empty();
            return Err(Fault::Deadlock { slices, waits, hidden_by_buffering });
        }
        goal.reached(plans, slices, &done)?;
        report.hops = done.hops as usize;
    }
    if net.programs.iter().flat_map(|p| &p.nodes).any(|node| node.hand) {
        report.needs_hand = !run(1, false, true).waits().is_empty();
    }
    Ok(report)
}

/// The memory of all ranks.
struct Memory {
    cells: Vec<Valued>,
    /// Per rank and slot, where its cells begin.
    base: Vec<[usize; 2]>,
    slices: usize,
}

impl Memory {
    fn index(&self, rank: Rank, at: At, slice: usize) -> usize {
        self.base[rank][at.slot as usize] + at.chunk as usize * self.slices + slice
    }
}

/// What a collective promises.
struct Goal {
    kind: Kind,
    root: Rank,
    in_place: bool,
    n: usize,
}

impl Goal {
    /// One plan a rank, with the layouts of the collective.
    fn belong_together(&self, plans: &[Plan]) -> Result<(), Fault> {
        let n = self.n;
        if n == 0 || n > MAX_RANKS || self.root >= n {
            let what = format!("{n} plans, root {}: can check 1 to {MAX_RANKS}", self.root);
            return Err(Fault::Shape { rank: 0, what });
        }
        let (one, blocks) = (Layout::Split { parts: 1 }, Layout::Blocks { blocks: n as u32 });
        for (rank, plan) in plans.iter().enumerate() {
            let fault = |what: String| Err(Fault::Shape { rank, what });
            if (plan.size, plan.rank) != (n, rank) {
                return fault(format!("a plan of rank {} of {}, in a group of {n}", plan.rank, plan.size));
            }
            if plan.slots != plans[0].slots {
                return fault(format!("layouts {:?}, but rank 0 has {:?}", plan.slots, plans[0].slots));
            }
            let right = match (self.kind, plan.slots.as_slice()) {
                (Kind::AllGather, slots) => slots == [one, blocks],
                (Kind::ReduceScatter, slots) => slots == [blocks, if self.in_place { blocks } else { one }],
                (_, [Layout::Split { parts: a }, Layout::Split { parts: b }]) => a == b && *a > 0,
                _ => false,
            };
            if !right {
                return fault(format!("layouts {:?} are not those of {}", plan.slots, self.kind));
            }
        }
        Ok(())
    }

    /// Pieces of one rank's input.
    fn pieces(&self, plans: &[Plan], slices: usize) -> u32 {
        let chunks = match self.kind {
            Kind::AllGather => 1,
            _ => plans[0].slots[INPUT as usize].chunks(),
        };
        chunks * slices as u32
    }

    /// The input that a piece of memory holds at the start: whose, and which chunk of it.
    fn input_at(&self, rank: Rank, at: At) -> Option<(Rank, u32)> {
        let mine = if self.in_place { OUTPUT } else { INPUT };
        match self.kind {
            _ if at.slot != mine => None,
            Kind::Broadcast if rank != self.root => None,
            Kind::AllGather if self.in_place => (at.chunk as usize == rank).then_some((rank, 0)),
            _ => Some((rank, at.chunk)),
        }
    }

    /// Memory at the start.
    fn before(&self, plans: &[Plan], slices: usize, values: &Values) -> Memory {
        let mut memory = Memory { cells: Vec::new(), base: Vec::with_capacity(self.n), slices };
        for (rank, plan) in plans.iter().enumerate() {
            let mut base = [0; 2];
            for slot in [INPUT, OUTPUT] {
                base[slot as usize] = memory.cells.len();
                for chunk in 0..plan.slots[slot as usize].chunks() {
                    let input = self.input_at(rank, At { slot, chunk });
                    memory.cells.extend((0..slices as u32).map(|slice| match input {
                        Some((of, c)) => (values.input(of, c * slices as u32 + slice), 0),
                        None => EMPTY,
                    }));
                }
            }
            memory.base.push(base);
        }
        memory
    }

    /// Memory at the end, piece by piece.
    fn reached(&self, plans: &[Plan], slices: usize, run: &Run<'_>) -> Result<(), Fault> {
        for (rank, plan) in plans.iter().enumerate() {
            for slot in [INPUT, OUTPUT] {
                for chunk in 0..plan.slots[slot as usize].chunks() {
                    for slice in 0..slices {
                        self.piece_reached(rank, At { slot, chunk }, slice, run)?;
                    }
                }
            }
        }
        if matches!(self.kind, Kind::AllReduce) {
            self.same_bits(plans, slices, run)?;
        }
        Ok(())
    }

    fn piece_reached(&self, rank: Rank, at: At, slice: usize, run: &Run<'_>) -> Result<(), Fault> {
        let id = run.holds(rank, at, slice);
        let piece = |chunk: u32| chunk * run.memory.slices as u32 + slice as u32;
        match self.due(rank, at) {
            Due::Free => Ok(()),
            Due::Unchanged => {
                let before =
                    self.input_at(rank, at).map_or(NOTHING, |(of, c)| run.values.input(of, piece(c)));
                if id == before { Ok(()) } else { Err(Fault::Changed { rank, at }) }
            }
            Due::Copy(of, chunk) => self.copied(rank, at, id, run.values.input(of, piece(chunk)), run),
            Due::Reduced(chunk) => self.reduced(rank, at, id, piece(chunk), run),
        }
    }

    /// What must be where at the end.
    fn due(&self, rank: Rank, at: At) -> Due {
        if at.slot != OUTPUT {
            return Due::Unchanged;
        }
        match self.kind {
            Kind::AllReduce | Kind::Barrier => Due::Reduced(at.chunk),
            Kind::Broadcast => Due::Copy(self.root, at.chunk),
            Kind::Reduce if rank == self.root => Due::Reduced(at.chunk),
            Kind::Reduce => Due::Unchanged,
            Kind::AllGather => Due::Copy(at.chunk as Rank, 0),
            Kind::ReduceScatter if !self.in_place => Due::Reduced(rank as u32),
            Kind::ReduceScatter if at.chunk as Rank == rank => Due::Reduced(at.chunk),
            _ => Due::Free,
        }
    }

    fn copied(&self, rank: Rank, at: At, id: Id, due: Id, run: &Run<'_>) -> Result<(), Fault> {
        let value = run.values.get(id);
        if value.finished || value.spoiled {
            return Err(Fault::Finish { rank, at, too_much: true });
        }
        if id == due { Ok(()) } else { Err(Fault::Content { rank, at }) }
    }

    fn reduced(&self, rank: Rank, at: At, id: Id, piece: u32, run: &Run<'_>) -> Result<(), Fault> {
        let value = run.values.get(id);
        if value.nothing || value.piece != piece {
            return Err(Fault::Content { rank, at });
        }
        if let Some(of) = (0..self.n).find(|r| value.from >> r & 1 == 0) {
            return Err(Fault::Missing { rank, at, of });
        }
        if value.twice != 0 && self.kind != Kind::Barrier {
            return Err(Fault::Twice { rank, at, of: value.twice.trailing_zeros() as Rank });
        }
        if value.spoiled || !value.finished {
            return Err(Fault::Finish { rank, at, too_much: value.spoiled });
        }
        Ok(())
    }

    /// Every rank holds the same expression. (A reduce and a reduce_scatter leave each result with one
    /// rank; in a barrier all orders of an "or" are the same.)
    fn same_bits(&self, plans: &[Plan], slices: usize, run: &Run<'_>) -> Result<(), Fault> {
        for chunk in 0..plans[0].slots[OUTPUT as usize].chunks() {
            let at = At { slot: OUTPUT as Slot, chunk };
            for slice in 0..slices {
                let first = run.holds(0, at, slice);
                if let Some(rank) = (1..self.n).find(|&r| run.holds(r, at, slice) != first) {
                    return Err(Fault::Bits { rank: 0, other: rank, at });
                }
            }
        }
        Ok(())
    }
}

/// What must be in a piece of memory at the end.
enum Due {
    /// Anything.
    Free,
    /// What was there before.
    Unchanged,
    /// This chunk of this rank's input.
    Copy(Rank, u32),
    /// This chunk of every rank's input.
    Reduced(u32),
}
