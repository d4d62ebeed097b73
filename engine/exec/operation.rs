//! [`Operation`]: a collective, from the call that builds it to its end.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use allstream_kernels::Combine;

use crate::error::Error;
use crate::mem::{ErasedBufs, check_bools};
use crate::plan::{INPUT, Layout, OUTPUT, Program, SCRATCH, Slot, Step};
use crate::types::{DType, Kind, Rank, ReduceOp, Signature, Tables};

/// How values are combined.
#[derive(Clone)]
pub(crate) enum Reduction {
    /// A built-in operator.
    Op(ReduceOp),
    /// A user's function.
    Function(Arc<dyn Combine>),
}

impl std::fmt::Debug for Reduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reduction::Op(op) => write!(f, "{op}"),
            Reduction::Function(function) => write!(f, "the function {:?}", function.name()),
        }
    }
}

/// A compiled plan, and the memory that it works on.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) program: Arc<Program>,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// Elements, as the collective counts them.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// The ranges of the slots whose layout is a table.
    pub(crate) tables: Option<Arc<Tables>>,
    /// Each rank knows only its own counts. So each message states its length, and the receiver compares that with what it expects.
    pub(crate) pairwise: bool,
    /// Lengths that the messages of a `pairwise` part state instead of their own. The messages have no payload: by them ranks only compare how
    /// much a library is to move between them.
    pub(crate) stated: Option<Arc<Tables>>,
}

// SAFETY: the pointers are into buffers that the in-flight table owns (all `Buf: Send`) until the operation finishes.
unsafe impl Send for Part {}

impl Part {
    /// How many times each element is halved before the part combines it. The sums of an average of `f16` are stored as `f16` on the way and
    /// could leave its range. They cannot if the elements are divided by a power of two that is at least the number of ranks.
    pub(crate) fn halved(&self, reduction: &Reduction) -> u8 {
        let averages = matches!(reduction, Reduction::Op(ReduceOp::Avg)) && self.dtype == DType::F16;
        let ranks = self.program.plan.size;
        // Two ranks' elements are combined once, by every algorithm.
        if averages && !self.program.one_fold && ranks > 2 {
            ranks.next_power_of_two().ilog2() as u8
        } else {
            0
        }
    }

    /// What the elements are multiplied by before they are combined: the user's factor `scale`, or the factor that keeps an average in range.
    pub(crate) fn factor(&self, scale: Option<f64>, reduction: &Reduction) -> Option<f64> {
        let halved = self.halved(reduction);
        scale.or_else(|| (halved > 0).then(|| 0.5_f64.powi(halved.into())))
    }

    /// The elements of a chunk.
    pub(crate) fn range(&self, slot: Slot, chunk: u32) -> Range<usize> {
        match (self.program.plan.slots[usize::from(slot)], &self.tables) {
            (Layout::Table { .. }, Some(tables)) => {
                let ranges = &tables.slots[usize::from(slot)];
                ranges.get(chunk as usize).cloned().unwrap_or_default()
            }
            (layout, _) => layout.range(chunk, self.count),
        }
    }

    /// The most bytes that a device needs for this part beside the buffers: scratch memory, a scaled copy of the input, and the steps'
    /// accumulators unless one kernel folds all (`fused`).
    pub(crate) fn kept_on_device(&self, scaled: bool, fused: bool) -> usize {
        let plan = &self.program.plan;
        let steps = plan.steps.iter().zip(&self.program.nodes).filter(|(_, node)| node.hand && !fused);
        let chunk = |(step, _): (&Step, _)| step.chunk().map_or(0, |at| self.range(at.slot, at.chunk).len());
        let copy = if scaled { self.total(if self.is_in_place() { OUTPUT } else { INPUT }) } else { 0 };
        (steps.map(chunk).sum::<usize>() + self.total(SCRATCH) + copy) * self.dtype.size()
    }

    /// Whether input and output are one buffer.
    pub(crate) fn is_in_place(&self) -> bool {
        self.input.cast_mut() == self.output
    }

    /// Whether the operation changes this rank's output: a step of the plan writes the result there, or the result is the rank's own
    /// input, scaled (on the first rank of a scan, or in a group of one rank).
    pub(crate) fn leaves_result(&self, signature: &Signature, scaled: bool) -> bool {
        let own = match signature.collective() {
            Some(Kind::AllReduce | Kind::ReduceScatter | Kind::Scan) => true,
            Some(Kind::Reduce) => signature.root as usize == self.program.plan.rank,
            _ => false,
        };
        self.writes_output() || (scaled && own)
    }

    /// Checks that the output, in the host's memory, holds only values that its type has.
    pub(crate) fn check_values(&self) -> Result<(), Error> {
        if self.dtype != DType::Bool || !self.writes_output() {
            return Ok(());
        }
        // SAFETY: the table owns the output, which has `total(OUTPUT)` elements of one byte. Callers see to it that all data has come, or that the
        // operation has failed and no peer touches its buffers: so nobody writes there any more.
        let Some(problem) = (unsafe { check_bools(self.output, self.total(OUTPUT)) }) else { return Ok(()) };
        let sent = |from: &Rank| !self.program.recvs[*from].is_empty();
        let senders: Vec<Rank> = (0..self.program.recvs.len()).filter(sent).collect();
        let peer = senders.first().copied().unwrap_or(self.program.plan.rank);
        let one_of = match senders.len() {
            0 | 1 => String::new(),
            _ => format!(" (sent by this rank or another of ranks {senders:?})"),
        };
        Err(Error::protocol(peer, problem + &one_of))
    }

    /// Whether the plan leaves anything in the output.
    fn writes_output(&self) -> bool {
        self.program.plan.steps.iter().any(|step| step.dst.is_some_and(|at| at.slot == OUTPUT))
    }

    /// Elements of a slot.
    pub(crate) fn total(&self, slot: Slot) -> usize {
        match (self.program.plan.slots.get(usize::from(slot)), &self.tables) {
            (None, _) => 0,
            (Some(Layout::Table { .. }), Some(tables)) => {
                tables.slots[usize::from(slot)].iter().map(|r| r.end).max().unwrap_or(0)
            }
            (Some(layout), _) => layout.total(self.count),
        }
    }
}

/// The parts of an operation, in order.
pub(crate) enum PartList {
    One(Part),
    Many(Vec<Part>),
}

impl PartList {
    /// All of them.
    pub(crate) fn all(&mut self) -> &mut [Part] {
        match self {
            PartList::One(part) => std::slice::from_mut(part),
            PartList::Many(parts) => parts,
        }
    }

    /// Part `i`, if there are so many.
    pub(crate) fn get(&self, i: usize) -> Option<&Part> {
        match self {
            PartList::One(part) => (i == 0).then_some(part),
            PartList::Many(parts) => parts.get(i),
        }
    }

    /// The only part, if there is no other.
    pub(super) fn only(&self) -> Option<&Part> {
        self.get(0).filter(|_| self.get(1).is_none())
    }
}

/// Called when all parts are done: looks at the buffers, and returns the parts of the second half. For operations whose first half tells
/// how long the second one is.
pub(crate) type Then = Box<dyn FnOnce(&mut ErasedBufs) -> Result<Vec<Part>, Error> + Send>;

/// A collective. The call builds this value, which is moved into the endpoint's queue and from there into the executor, without
/// being rebuilt on the way.
pub(crate) struct Operation {
    /// What the user called, for errors.
    pub(crate) call: &'static str,
    /// Which of the communicator's collectives it is: the endpoint numbers them as they are submitted.
    pub(crate) number: u64,
    /// What ranks compare.
    pub(crate) signature: Signature,
    /// How long it may be the communicator's oldest unfinished collective.
    pub(crate) timeout: Duration,
    pub(crate) reduction: Reduction,
    /// What this rank's input is multiplied by first; the other ranks may have other factors.
    pub(crate) scale: Option<f64>,
    pub(crate) parts: PartList,
    pub(crate) then: Option<Then>,
}

impl Operation {
    /// An operation on the host's memory, which has no number yet, no scale and no second half.
    pub(crate) fn new(
        call: &'static str,
        signature: Signature,
        timeout: Duration,
        reduction: Reduction,
        parts: PartList,
    ) -> Operation {
        let (number, scale, then) = (0, None, None);
        Operation { call, number, signature, timeout, reduction, scale, parts, then }
    }
}
