//! [`Operation`]: a collective, from the call that builds it to its end.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use allstream_kernels::Combine;

use crate::device::Staged;
use crate::device::operation::DeviceOp;
use crate::device::whole::{Standing, Ticket, Turn, Whole, WholeCall};
use crate::error::{Error, MissingState};
use crate::mem::{ErasedBufs, check_bools};
use crate::plan::{INPUT, Layout, OUTPUT, Program, SCRATCH, Slot, Step};
use crate::types::{DType, Kind, Rank, ReduceOp, Signature};

/// How values are combined.
#[derive(Clone)]
pub(crate) enum Reduction {
    /// One of ours.
    Op(ReduceOp),
    /// A user's.
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

/// The ranges of the chunks of slots whose layout is [`Layout::Table`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    /// By slot, then by chunk: elements.
    pub(crate) slots: [Vec<Range<usize>>; 3],
}

/// A plan, and the memory it is about.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) program: Arc<Program>,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// Elements, as the collective counts them.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// Where a slot's layout is a table: its ranges.
    pub(crate) tables: Option<Arc<Tables>>,
    /// Every rank knows its own counts alone: each message says how long it is, and is compared.
    pub(crate) pairwise: bool,
}

// SAFETY: the pointers are into buffers that the in-flight table owns (all `Buf: Send`) until the operation finishes.
unsafe impl Send for Part {}

impl Part {
    /// How many times the elements are halved before they are combined by this: an average of `f16` whose sums on the way are stored as `f16`
    /// must not leave its range, and does not, where 2^this is at least the number of ranks.
    pub(super) fn halved(&self, reduction: &Reduction) -> u8 {
        let averages = matches!(reduction, Reduction::Op(ReduceOp::Avg)) && self.dtype == DType::F16;
        let ranks = self.program.plan.size;
        // Two ranks' elements are combined once, by every algorithm.
        if averages && !self.program.one_fold && ranks > 2 {
            ranks.next_power_of_two().ilog2() as u8
        } else {
            0
        }
    }

    /// What the elements are multiplied by before they are combined: the user's factor `scale`, or what keeps an average in range.
    pub(crate) fn factor(&self, scale: Option<f64>, reduction: &Reduction) -> Option<f64> {
        let halved = self.halved(reduction);
        scale.or_else(|| (halved > 0).then(|| 0.5_f64.powi(halved.into())))
    }

    /// The elements of a chunk.
    pub(super) fn range(&self, slot: Slot, chunk: u32) -> Range<usize> {
        match (self.program.plan.slots[usize::from(slot)], &self.tables) {
            (Layout::Table { .. }, Some(tables)) => {
                let ranges = &tables.slots[usize::from(slot)];
                ranges.get(chunk as usize).cloned().unwrap_or_default()
            }
            (layout, _) => layout.range(chunk, self.count),
        }
    }

    /// Bytes that a device keeps for it beside the buffers, at most: its scratch, a scaled copy, and what its steps have in
    /// hand where not all is `fused`.
    pub(super) fn kept_on_device(&self, scaled: bool, fused: bool) -> usize {
        let plan = &self.program.plan;
        let steps = plan.steps.iter().zip(&self.program.nodes).filter(|(_, node)| node.hand && !fused);
        let chunk = |(step, _): (&Step, _)| step.chunk().map_or(0, |at| self.range(at.slot, at.chunk).len());
        let copy = if scaled { self.total(if self.is_in_place() { OUTPUT } else { INPUT }) } else { 0 };
        (steps.map(chunk).sum::<usize>() + self.total(SCRATCH) + copy) * self.dtype.size()
    }

    /// Whether input and output are one buffer.
    pub(super) fn is_in_place(&self) -> bool {
        self.input.cast_mut() == self.output
    }

    /// Whether this rank's result is in the output when all is done, other than what was there: the plan puts it there, or
    /// it is the rank's own input, scaled (the first rank's of a scan; anyone's who is alone).
    pub(crate) fn leaves_result(&self, signature: &Signature, scaled: bool) -> bool {
        let own = match signature.collective() {
            Some(Kind::AllReduce | Kind::ReduceScatter | Kind::Scan) => true,
            Some(Kind::Reduce) => signature.root as usize == self.program.plan.rank,
            _ => false,
        };
        self.writes_output() || (scaled && own)
    }

    /// Whether the values that the plan left in the output, on the host, are such as the type has.
    pub(super) fn check_values(&self) -> Result<(), Error> {
        if self.dtype != DType::Bool || !self.writes_output() {
            return Ok(());
        }
        // SAFETY: the operation's output, as long as the plan says, which the table owns. All has come, and nothing moves.
        let Some(problem) = (unsafe { check_bools(self.output, self.total(OUTPUT)) }) else { return Ok(()) };
        let sent = |from: &Rank| !self.program.recvs[*from].is_empty();
        let senders: Vec<Rank> = (0..self.program.recvs.len()).filter(sent).collect();
        let peer = senders.first().copied().unwrap_or(self.program.plan.rank);
        let one_of = match senders.len() {
            0 | 1 => String::new(),
            _ => format!(" (it, or another of ranks {senders:?}, which send to this one here)"),
        };
        Err(Error::protocol(peer, problem + &one_of))
    }

    /// Whether the plan leaves anything in the output.
    fn writes_output(&self) -> bool {
        self.program.plan.steps.iter().any(|step| step.dst.is_some_and(|at| at.slot == OUTPUT))
    }

    /// Elements of a slot.
    pub(super) fn total(&self, slot: Slot) -> usize {
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
    pub(super) fn get(&self, i: usize) -> Option<&Part> {
        match self {
            PartList::One(part) => (i == 0).then_some(part),
            PartList::Many(parts) => parts.get(i),
        }
    }
}

/// What follows when all parts are done: looks at the buffers, and says what is to be done next. For operations whose
/// first half tells how long the second is.
pub(crate) type Then = Box<dyn FnOnce(&mut ErasedBufs) -> Result<Vec<Part>, Error> + Send>;

/// What carries an operation out.
pub(crate) enum Executor {
    /// The host, in its memory.
    Host,
    /// The rank's device, by the plan. The parts' memory is then the device's.
    Device(Arc<DeviceOp>),
    /// A library takes it whole, once all ranks have called the same: the parts are then those of a barrier.
    Whole(Box<WholeOp>),
}

/// An operation that a library takes whole.
pub(crate) struct WholeOp {
    /// Until it is submitted to the library.
    call: Option<WholeCall>,
    by: Arc<dyn Whole>,
    /// If it is on a device's memory.
    pub(super) device: Option<Arc<DeviceOp>>,
    /// Its place in the queue for the device, until it is launched.
    pub(super) ticket: Option<Ticket>,
    /// When it is launched there: from when all ranks have called until it is.
    turn: Option<Turn>,
    /// What the barriers pass round: in the end the largest number that any rank has put there.
    token: Arc<AtomicU64>,
}

impl WholeOp {
    pub(crate) fn new(
        call: WholeCall,
        by: Arc<dyn Whole>,
        device: Option<Arc<DeviceOp>>,
        token: Arc<AtomicU64>,
    ) -> WholeOp {
        WholeOp { call: Some(call), by, device, ticket: None, turn: None, token }
    }

    /// Whether it may be told to the peers: all that was submitted before it for the same device has been launched.
    pub(super) fn is_first(&self) -> bool {
        self.ticket.as_ref().is_none_or(Ticket::is_first)
    }

    pub(super) fn is_submitted(&self) -> bool {
        self.call.is_none()
    }

    /// All ranks have called the same. On a device they pass the barrier a second time, with a time for the launch: whether that is
    /// to begin now.
    pub(super) fn begins_to_agree(&mut self) -> bool {
        let Some(ticket) = self.ticket.as_ref().filter(|_| self.turn.is_none()) else { return false };
        self.turn = ticket.turn();
        if let Some(turn) = &self.turn {
            self.token.store(turn.time(), Ordering::Relaxed);
        }
        self.turn.is_some()
    }

    /// Ranks have passed the barriers: gives the call to the library when it is due, or asks how far that is with it. Returns also
    /// whether anything was done. What is on the device's stream is marked there.
    pub(super) fn go_on(&mut self) -> Result<(bool, Standing), Error> {
        if let Some(turn) = self.turn.as_mut().filter(|_| self.call.is_some()) {
            turn.agree(self.token.load(Ordering::Relaxed));
            if !turn.is_due() {
                return Ok((false, Standing::InProgress));
            }
        }
        let call = self.call.take();
        let moved = call.is_some();
        if let Some(call) = call {
            let stream = match &self.device {
                Some(device) => {
                    device.begin()?;
                    self.turn.as_ref().map_or(Ok(()), |turn| turn.launches(device.stream()))?;
                    Some(device.stream())
                }
                None => None,
            };
            // SAFETY: the buffers are as long as the call was checked to say, and the in-flight table owns them until the
            // operation has ended. If the communicator dies first, `Endpoint::drain` aborts the library, and gives the
            // buffers back when that is quiet, or never. Streams that used the buffers before are waited for (`begin`), and
            // so is this rank's host (`Operation::after`).
            unsafe { self.by.submit(call, stream) }?;
        }
        let standing = self.by.poll()?;
        if standing != Standing::InProgress
            && let Some(device) = &self.device
        {
            let end = device.enqueued()?;
            if let Some(turn) = self.turn.take() {
                turn.launched(device.stream(), end);
            }
            self.ticket = None;
        }
        Ok((moved || standing != Standing::InProgress, standing))
    }

    /// What keeps it from its end, though nobody's call is missing: a launch that must come first, or the library.
    pub(super) fn held_up(&self) -> Option<MissingState> {
        if self.call.is_none() || self.turn.is_some() {
            return Some(self.by.not_ended(self.turn.as_ref()));
        }
        let (other, is_before) = self.ticket.as_ref()?.other()?;
        Some(MissingState::LaunchOrder { other: other.to_string(), is_before })
    }
}

/// A collective. The call builds it; it is moved into the endpoint's queue and from there into the executor, and nothing on
/// the way is made anew.
pub(crate) struct Operation {
    /// What the user called, for errors.
    pub(crate) call: &'static str,
    /// Which of the communicator's collectives it is: the endpoint numbers them as they are submitted.
    pub(crate) number: u64,
    /// What ranks compare.
    pub(crate) signature: Signature,
    /// How long it may be the oldest unfinished one.
    pub(crate) timeout: Duration,
    pub(crate) reduction: Reduction,
    /// What each rank's input is multiplied by first.
    pub(crate) scale: Option<f64>,
    pub(crate) parts: PartList,
    pub(crate) then: Option<Then>,
    pub(crate) executor: Executor,
    /// What brings the parts' memory from devices, and takes it back when all has moved.
    pub(crate) staged: Option<Arc<Staged>>,
}

impl Operation {
    /// One that runs on the host, on memory of the host's.
    pub(crate) fn new(
        call: &'static str,
        signature: Signature,
        timeout: Duration,
        reduction: Reduction,
        parts: PartList,
    ) -> Operation {
        let (number, scale, then, executor, staged) = (0, None, None, Executor::Host, None);
        Operation { call, number, signature, timeout, reduction, scale, parts, then, executor, staged }
    }

    /// The device that it is on, whoever puts it there.
    pub(crate) fn device(&self) -> Option<&Arc<DeviceOp>> {
        match &self.executor {
            Executor::Host => None,
            Executor::Device(device) => Some(device),
            Executor::Whole(whole) => whole.device.as_ref(),
        }
    }
}
