//! What each collective promises to have in memory at the end, and the check that it is there.

use super::Fault;
use super::expr::{Id, MAX_RANKS, NOTHING, Value, Values};
use super::memory::{EMPTY, Memory};
use crate::{At, INPUT, Kind, Layout, OUTPUT, Plan, Rank, Slot};

/// What a collective promises.
pub(super) struct Goal {
    kind: Kind,
    root: Rank,
    in_place: bool,
    /// Ranks.
    pub(super) n: usize,
    /// Whether each rank has a count of its own.
    pub(super) varied: bool,
}

/// What must be in a piece of memory at the end.
enum Due {
    /// Anything.
    Free,
    /// What was there at the start.
    Unchanged,
    /// This chunk of this rank's input.
    Copy(Rank, u32),
    /// The reduction of this chunk of the inputs of all ranks below this number.
    Reduced(u32, Rank),
}

/// How results are combined.
pub(super) struct Order {
    /// All in rank order.
    pub(super) in_order: bool,
    /// All in rank order, by one step.
    pub(super) one_step: bool,
}

impl Goal {
    /// The goal of these plans, if there is one plan for each rank and the slots have the layouts that the collective requires.
    pub(super) fn new(kind: Kind, root: Rank, in_place: bool, plans: &[Plan]) -> Result<Goal, Fault> {
        let n = plans.len();
        if n == 0 || n > MAX_RANKS || root >= n {
            let what = format!("{n} plans, root {root}: can check 1 to {MAX_RANKS}");
            return Err(Fault::Shape { rank: 0, what });
        }
        let table = |l: &Layout| matches!(l, Layout::Table { .. });
        let varied = kind.varies() && plans[0].slots.first().is_some_and(table);
        let goal = Goal { kind, root, in_place: in_place || kind == Kind::Barrier, n, varied };
        for (rank, plan) in plans.iter().enumerate() {
            let fault = |what: String| Err(Fault::Shape { rank, what });
            if (plan.size, plan.rank) != (n, rank) {
                return fault(format!("a plan of rank {} of {}, in a group of {n}", plan.rank, plan.size));
            }
            let [input, output, lent @ ..] = plan.slots.as_slice() else {
                return fault(format!("layouts {:?}: there are always an input and an output", plan.slots));
            };
            let same = plans[0].slots.starts_with(&[*input, *output]);
            if !same && !matches!(kind, Kind::Gather | Kind::Scatter) {
                return fault(format!("layouts {:?}, but rank 0 has {:?}", plan.slots, plans[0].slots));
            }
            let lent_right = match lent {
                [] => true,
                [layout] => layout.chunks() > 0 && table(layout) == varied,
                _ => false,
            };
            if !lent_right || !goal.laid_out(rank, *input, *output) {
                return fault(format!("layouts {:?} are not those of {kind}", plan.slots));
            }
        }
        Ok(goal)
    }

    fn laid_out(&self, rank: Rank, input: Layout, output: Layout) -> bool {
        let n = self.n as u32;
        let (one, blocks) = match self.varied {
            false => (Layout::Split { parts: 1 }, Layout::Blocks { blocks: n }),
            true => (Layout::Table { chunks: 1 }, Layout::Table { chunks: n }),
        };
        let blocks_if = |yes: bool| if yes { blocks } else { one };
        let root = rank == self.root;
        let right = match self.kind {
            Kind::AllGather => (one, blocks),
            Kind::ReduceScatter => (blocks, blocks_if(self.in_place)),
            Kind::Gather => (one, blocks_if(root)),
            Kind::Scatter => (blocks_if(root), blocks_if(root && self.in_place)),
            Kind::AllToAll => (blocks, blocks),
            _ => {
                let Layout::Split { parts } = input else { return false };
                return parts > 0 && input == output;
            }
        };
        right == (input, output)
    }

    /// Elements of a chunk of a table. The checker makes up the counts: they vary from rank to rank, and some are 0.
    pub(super) fn count_at(&self, rank: Rank, at: At) -> usize {
        let (chunk, root) = (at.chunk as Rank, rank == self.root);
        let of = |rank: Rank| [3, 0, 5, 1, 4, 0, 2][rank % 7] + 6 * (rank / 7);
        let between = |from: Rank, to: Rank| match self.in_place {
            true => (from.min(to) * 5 + from.max(to) * 3) % 7,
            false => (from * 5 + to * 3) % 7,
        };
        match (self.kind, at.slot) {
            (Kind::AllToAll, INPUT) => between(rank, chunk),
            (Kind::AllToAll, OUTPUT) => between(chunk, rank),
            (Kind::AllGather | Kind::Gather, INPUT) => of(rank),
            (Kind::Gather, OUTPUT) if !root => of(rank),
            (Kind::ReduceScatter, OUTPUT) if !self.in_place => of(rank),
            (Kind::Scatter, OUTPUT) if !root || !self.in_place => of(rank),
            _ => of(chunk),
        }
    }

    /// Number of pieces (slices of chunks) of one rank's input.
    pub(super) fn pieces(&self, plans: &[Plan], slices: usize) -> u32 {
        let chunks = match self.kind {
            Kind::AllGather | Kind::Gather => 1,
            _ => plans[self.root].slots[INPUT as usize].chunks(),
        };
        chunks * slices as u32
    }

    /// The input that a piece of memory holds at the start: the rank, and the chunk of that rank's input.
    fn input_at(&self, rank: Rank, at: At) -> Option<(Rank, u32)> {
        let mine = if self.in_place { OUTPUT } else { INPUT };
        let own = (at.chunk as Rank == rank).then_some((rank, 0));
        match self.kind {
            _ if at.slot != mine => None,
            Kind::Broadcast | Kind::Scatter if rank != self.root => None,
            Kind::AllGather if self.in_place => own,
            Kind::Gather if self.in_place && rank == self.root => own,
            _ => Some((rank, at.chunk)),
        }
    }

    /// The memory of all ranks at the start.
    pub(super) fn before(&self, plans: &[Plan], slices: usize, values: Values) -> Memory {
        let mut memory = Memory { cells: Vec::new(), base: Vec::with_capacity(self.n), slices, values };
        for (rank, plan) in plans.iter().enumerate() {
            let mut base = Vec::with_capacity(plan.slots.len());
            for (slot, layout) in plan.slots.iter().enumerate() {
                base.push(memory.cells.len());
                for chunk in 0..layout.chunks() {
                    let input = self.input_at(rank, At { slot: slot as Slot, chunk });
                    memory.cells.extend((0..slices as u32).map(|slice| match input {
                        Some((of, c)) => (memory.values.input(of, c * slices as u32 + slice), 0),
                        None => EMPTY,
                    }));
                }
            }
            memory.base.push(base);
        }
        memory
    }

    /// Checks all ranks' memory at the end, piece by piece.
    pub(super) fn reached(&self, plans: &[Plan], slices: usize, end: &Memory) -> Result<Order, Fault> {
        let mut order = Order { in_order: true, one_step: true };
        for (rank, plan) in plans.iter().enumerate() {
            for slot in [INPUT, OUTPUT] {
                for chunk in 0..plan.slots[slot as usize].chunks() {
                    for slice in 0..slices {
                        self.piece_reached(rank, At { slot, chunk }, slice, end, &mut order)?;
                    }
                }
            }
        }
        if matches!(self.kind, Kind::AllReduce) {
            self.same_bits(plans, slices, end)?;
        }
        Ok(order)
    }

    fn piece_reached(
        &self,
        rank: Rank,
        at: At,
        slice: usize,
        end: &Memory,
        order: &mut Order,
    ) -> Result<(), Fault> {
        let id = end.holds(rank, at, slice);
        let piece = |chunk: u32| chunk * end.slices as u32 + slice as u32;
        match self.due(rank, at) {
            Due::Free => Ok(()),
            Due::Unchanged => {
                let before =
                    self.input_at(rank, at).map_or(NOTHING, |(of, c)| end.values.input(of, piece(c)));
                if id == before { Ok(()) } else { Err(Fault::Changed { rank, at }) }
            }
            Due::Copy(of, chunk) => self.copied(rank, at, id, end.values.input(of, piece(chunk)), end),
            Due::Reduced(chunk, below) => {
                let value = end.values.get(id);
                self.reduced(rank, at, value, piece(chunk), below)?;
                // The order in which a barrier combines its tokens does not matter.
                if self.kind != Kind::Barrier {
                    order.in_order &= value.ordered;
                    order.one_step &= value.ordered && value.depth <= 1;
                }
                Ok(())
            }
        }
    }

    /// What a piece of memory must hold at the end.
    fn due(&self, rank: Rank, at: At) -> Due {
        let root = rank == self.root;
        if at.slot != OUTPUT {
            return Due::Unchanged;
        }
        match self.kind {
            Kind::AllReduce | Kind::Barrier => Due::Reduced(at.chunk, self.n),
            Kind::Broadcast => Due::Copy(self.root, at.chunk),
            Kind::Reduce if root => Due::Reduced(at.chunk, self.n),
            Kind::Reduce => Due::Unchanged,
            Kind::AllGather => Due::Copy(at.chunk as Rank, 0),
            Kind::ReduceScatter if !self.in_place => Due::Reduced(rank as u32, self.n),
            Kind::ReduceScatter if at.chunk as Rank == rank => Due::Reduced(at.chunk, self.n),
            Kind::ReduceScatter => Due::Free,
            Kind::Gather if root => Due::Copy(at.chunk as Rank, 0),
            Kind::Gather => Due::Unchanged,
            Kind::Scatter if root && self.in_place => Due::Unchanged,
            Kind::Scatter => Due::Copy(self.root, rank as u32),
            Kind::AllToAll => Due::Copy(at.chunk as Rank, rank as u32),
            Kind::Scan => Due::Reduced(at.chunk, rank + 1),
            Kind::ExScan if rank == 0 => Due::Unchanged,
            Kind::ExScan => Due::Reduced(at.chunk, rank),
        }
    }

    fn copied(&self, rank: Rank, at: At, id: Id, due: Id, end: &Memory) -> Result<(), Fault> {
        let value = end.values.get(id);
        if value.finished || value.spoiled {
            return Err(Fault::Finish { rank, at, too_much: true });
        }
        if id == due { Ok(()) } else { Err(Fault::Content { rank, at }) }
    }

    fn reduced(&self, rank: Rank, at: At, value: &Value, piece: u32, below: Rank) -> Result<(), Fault> {
        if value.nothing || value.piece != piece || (below..self.n).any(|r| value.from >> r & 1 == 1) {
            return Err(Fault::Content { rank, at });
        }
        if let Some(of) = (0..below).find(|r| value.from >> r & 1 == 0) {
            return Err(Fault::Missing { rank, at, of });
        }
        if value.twice != 0 && self.kind != Kind::Barrier {
            return Err(Fault::Twice { rank, at, of: value.twice.trailing_zeros() as Rank });
        }
        let scan = self.kind.is_scan();
        if scan && !value.ordered {
            return Err(Fault::Order { rank, at });
        }
        if value.spoiled || value.finished == scan {
            return Err(Fault::Finish { rank, at, too_much: value.spoiled || value.finished });
        }
        Ok(())
    }

    /// Checks that every rank holds the same expression. (The other reductions need no such check: in a reduce, a reduce_scatter and
    /// a scan each result is on one rank only, and in a barrier the order of the "or" does not matter.)
    fn same_bits(&self, plans: &[Plan], slices: usize, end: &Memory) -> Result<(), Fault> {
        for chunk in 0..plans[0].slots[OUTPUT as usize].chunks() {
            let at = At { slot: OUTPUT as Slot, chunk };
            for slice in 0..slices {
                let first = end.holds(0, at, slice);
                if let Some(rank) = (1..self.n).find(|&r| end.holds(r, at, slice) != first) {
                    return Err(Fault::Bits { rank: 0, other: rank, at });
                }
            }
        }
        Ok(())
    }
}
