//! What one kind of memory does in operations: [`Backend`] for plans that are run step by step, [`Lends`] for parts that go by loans.
//!
//! [`PlanRun`](super::run) decides which slice of which step goes on, and keeps the cursors; [`LoanRun`](super::run) decides which peer is lent
//! what, and when that comes back. Neither knows the kind of memory. A backend says where memory is, and combines, copies and scales what lies
//! there. `Lends` says how a peer reaches the memory, folds what lies there, and copies to and from staging slots.
//!
//! | backend | memory | what a call does | how it is lent |
//! |---|---|---|---|
//! | [`Host`](super::host::Host) | the host's | computes at once, on the calling thread | `HostLoans`: where it lies, or through staging slots |
//! | `Cuda` (`device/carriers/backend.rs`) | a CUDA device's | puts kernels on the rank's stream | `CudaLoans`: where it lies, to devices of this host; to those of other processes in large parts only |
//! | [`Timed`](super::timed::Timed) | none | tells a clock how many bytes would have been touched ([`crate::sim`]) | `Timed` itself: where it lies or through slots, as the simulated machine has it |

use super::operation::{Operation, Part, Reduction};
use super::port::{Payload, Port};
use crate::error::Error;
use crate::link::region::Slot as StagingSlot;
use crate::link::waits::Wait;
use crate::link::{self, SLOT};
use crate::plan::{INPUT, Lending, OUTPUT, Program, Slot, Step};
use crate::types::{Finish, Kind, Rank, ReduceOp, Signature};

/// Slices of each chunk per round: enough that two slots are in flight on each link while two more are filled.
const SLICES: usize = 2;
/// For two ranks over TCP. A whole round is sent, in few system calls, before the answers to it come. With this an all_reduce of 1 MB took 230 us
/// instead of 350: half of the difference came from the larger rounds (before: 256 KB, in frames of 128 KB), half from fewer, larger answers
/// (docs/adr/0021-whole-messages.md). Among four ranks on one host such rounds outgrew the caches: 4 MB took 7.9 ms instead of 6.2.
const PAIR: Slicing = Slicing { slice: SLOT, round: 4 * SLOT, least: 2 * SLOT };

/// How messages are cut, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slicing {
    /// Bytes of a slice: as many as a step works on at once.
    pub(crate) slice: usize,
    /// Bytes of each chunk in a round: the same on every rank of a communicator.
    pub(crate) round: usize,
    /// While more of a message's round is to follow, no frame of fewer bytes than this is sent.
    pub(crate) least: usize,
}

impl Slicing {
    /// Slices of `slice` bytes, two of them in a round.
    pub(crate) fn by(slice: usize) -> Slicing {
        Slicing { slice, round: SLICES * slice, least: 0 }
    }

    /// How messages of a program in the host's memory are cut.
    pub(crate) fn on_host(program: &Program) -> Slicing {
        if program.whole { PAIR } else { Slicing::by(SLOT) }
    }

    /// How many elements of `unit` bytes are in a slice.
    pub(crate) fn slice_of(&self, unit: usize) -> usize {
        self.slice.checked_div(unit).unwrap_or(1).max(1)
    }

    /// How many elements of `unit` bytes of each chunk are in a round.
    pub(crate) fn round_of(&self, unit: usize) -> usize {
        (self.round / unit).max(1)
    }
}

/// The operation, and the part of it, that a pass works on.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    /// The communicator, as frames name it.
    pub(crate) comm: u64,
    pub(crate) op: &'a Operation,
    pub(crate) part: &'a Part,
}

impl<'a> Context<'a> {
    pub(crate) fn program(&self) -> &'a Program {
        &self.part.program
    }

    /// Whether a step divides its result by the number of ranks.
    pub(crate) fn divides(&self, step: &Step) -> bool {
        step.finish && matches!(self.op.reduction, Reduction::Op(ReduceOp::Avg))
    }

    /// What the elements of the part are multiplied by before they are combined.
    pub(crate) fn factor(&self) -> Option<f64> {
        self.part.factor(self.op.scale, &self.op.reduction)
    }

    /// If a step completes an average: the number of ranks, and how often each element was halved before.
    pub(crate) fn divisor(&self, step: &Step) -> Option<Finish> {
        let ranks = self.program().plan.size as u32;
        self.divides(step).then(|| Finish { ranks, halved: self.part.halved(&self.op.reduction) })
    }

    /// Whether receivers only copy a payload of step `i`, of so many bytes, and do not combine it with other operands: that is so if the collective
    /// combines no values, or if the payload is a final result; but in a scan the next rank adds to a final result.
    pub(crate) fn is_copied(&self, i: usize, bytes: usize) -> bool {
        bytes > Port::INLINE
            && self.op.signature.collective().is_some_and(|kind| match kind {
                Kind::Scan | Kind::ExScan => false,
                kind => !kind.reduces() || self.program().nodes[i].is_final,
            })
    }

    /// The signature in the frames of step `i`.
    pub(crate) fn signature(&self, i: usize, state: &StepState) -> Signature {
        let mut signature = self.op.signature;
        if self.part.pairwise {
            signature.count = match &self.part.stated {
                Some(tables) => self.program().plan.steps[i].chunk().map_or(0, |at| tables.len_of(at)) as u64,
                None if state.unit == 0 => 0,
                None => state.len as u64,
            };
        }
        signature
    }
}

/// How far a step has got with its chunk. The run keeps it.
#[derive(Clone, Copy, Default)]
pub(crate) struct StepState {
    /// Elements of this step's chunk; an empty chunk is one element of no bytes, so that it still makes a message.
    pub(crate) len: usize,
    /// Bytes of an element.
    pub(crate) unit: usize,
    /// Elements gathered.
    pub(crate) got: usize,
    /// Elements stored, or handed to all receivers.
    pub(crate) pos: usize,
    /// The operand that was missing last. It is looked at first, so that not all operands are looked at for each that comes.
    pub(crate) missing: usize,
    /// The index of this step's first receiver in the run's `sent` and `freed`.
    pub(crate) first: usize,
}

/// One slice of a step, whose operands have come. [`PlanRun`](super::run) alone makes slices, and vouches for their addresses:
/// `m` elements of each operand may be read now, and `m` elements at `dst` may be written now if `is_writable`.
pub(crate) struct Slice<'a> {
    pub(crate) c: Context<'a>,
    /// Which step of the plan.
    pub(crate) i: usize,
    pub(crate) step: &'a Step,
    pub(crate) state: StepState,
    /// How many elements.
    pub(crate) m: usize,
    /// Where the operands are, in the plan's order.
    pub(crate) ins: &'a [*const u8],
    /// Where the result belongs, if the step keeps it.
    pub(crate) dst: Option<*mut u8>,
    /// Whether all of that place may be written now.
    pub(crate) is_writable: bool,
    /// Whether the result may be sent now: on the link to each receiver this message is the next one and there is room, and the result is long enough
    /// for a frame.
    pub(crate) is_ready: bool,
    /// The step copies a part of the operation's input to `dst`, and what it sends is read from the input.
    pub(crate) is_input: bool,
    /// How messages are cut.
    pub(crate) slicing: Slicing,
}

impl Slice<'_> {
    /// Whether the result has to wait in the step's accumulator: `dst` is not free yet, or there is no `dst` and it cannot be sent yet.
    pub(crate) fn must_wait(&self) -> bool {
        match self.dst {
            Some(_) => !self.is_writable,
            None => !self.is_ready,
        }
    }

    /// How many elements an accumulator of one slice holds before element `at` of the chunk.
    pub(crate) fn before(&self, at: usize) -> usize {
        at % self.slicing.slice_of(self.state.unit)
    }

    /// Whether messages wait until there is enough for a long frame ([`Slicing`]).
    pub(crate) fn holds_back(&self) -> bool {
        self.slicing.least > 0
    }

    /// Whether the step has an accumulator (in the plan: a hand).
    pub(crate) fn has_accumulator(&self) -> bool {
        self.c.program().nodes[self.i].hand
    }

    /// Whether the result is an unchanged copy of one operand.
    pub(crate) fn is_copy(&self) -> bool {
        self.ins.len() == 1 && !self.c.divides(self.step)
    }
}

/// What a backend has done with a slice.
pub(crate) struct Combined {
    /// How many elements were taken from each operand: 0 if the slice has to wait.
    pub(crate) taken: usize,
    /// Whether the result is where it belongs, or is sent with `payload`. Otherwise it waits in the accumulator.
    pub(crate) is_stored: bool,
    /// What is to be sent to all receivers now.
    pub(crate) payload: Option<Payload>,
}

impl Combined {
    pub(crate) const NOTHING: Combined = Combined { taken: 0, is_stored: false, payload: None };
}

/// How far a backend is with a part's input.
pub(crate) enum Prepared {
    /// Steps may run.
    Ready,
    /// Steps may not run yet. The value says whether anything was done.
    NotYet(bool),
}

/// Where a slot of a plan begins: in the user's memory, in the scaled copy of the input if there is one, or in scratch memory.
pub(crate) fn base_of(part: &Part, slot: Slot, scaled: Option<*mut u8>, scratch: *mut u8) -> *mut u8 {
    match (slot, scaled) {
        (OUTPUT, Some(_)) if !part.is_in_place() => part.output,
        (INPUT | OUTPUT, Some(scaled)) => scaled,
        (OUTPUT, None) => part.output,
        (INPUT, None) => part.input.cast_mut(),
        _ => scratch,
    }
}

/// One kind of memory. A value belongs to one [`PlanRun`](super::run). It may keep working memory from one part to the
/// next.
pub(crate) trait Backend: Send + Sized {
    /// Whether calls do the work on the calling thread, and do not only put it on a stream. If so, a pass ends after
    /// [`BUDGET`](super::run::BUDGET) bytes, as other communicators wait for the thread.
    const TAKES_TIME: bool;
    /// Whether copies of the input are sent from the input, not from where they were stored.
    const SENDS_INPUT: bool;
    /// Whether the address of an operand must be a multiple of the size of its elements.
    const IS_ALIGNED: bool;

    /// A new backend for the same rank and communicator, without working memory.
    fn fresh(&self) -> Self;

    /// How messages of a part are cut.
    fn slicing(&self, program: &Program) -> Slicing;

    /// A part begins.
    fn begin(&mut self, c: Context<'_>);

    /// The part is over, or given up.
    fn end(&mut self);

    /// Makes ready what the steps need: gets working memory, and scales the input (on the host, one piece in each call). Called at the
    /// start of every pass. `has_arrived`: all of the input is there.
    fn prepare(&mut self, c: Context<'_>, has_arrived: bool) -> Result<Prepared, Error>;

    /// Where a slot of a plan begins.
    fn base(&self, part: &Part, slot: Slot) -> *mut u8;

    /// Whether steps keep to this wait. They always do, except in test builds that leave a wait out to see that a test fails.
    fn keeps(&self, _: Wait) -> bool {
        true
    }

    /// Combines the operands of a slice, and puts the result where it belongs, where it is sent from, or in the accumulator.
    fn combine(&mut self, slice: &Slice<'_>, port: &mut Port) -> Result<Combined, Error>;

    /// Moves what the accumulator of a step holds (`slice.m` elements) to `slice.dst`, which is free now.
    fn store(&mut self, slice: &Slice<'_>) -> Result<(), Error>;

    /// Makes a payload of what the accumulator of a step holds. Returns how many elements the payload has, and the payload.
    fn send_accumulated(&mut self, slice: &Slice<'_>, port: &mut Port) -> Result<(usize, Payload), Error>;

    /// Copies a payload to a staging slot, from which it is sent.
    ///
    /// # Safety
    /// `from` is valid for reads of `bytes` bytes, and `slot` for writes of as many; they do not overlap.
    unsafe fn fill_slot(&mut self, from: *const u8, slot: *mut u8, bytes: usize, port: &mut Port);

    /// Checks, once all data has come, that the result holds only values that its type has. Only then may the user see it.
    fn check_values(&self, _: &Part) -> Result<(), Error> {
        Ok(())
    }

    /// How many bytes of working memory the backend keeps, and how many the part has needed.
    fn memory(&self) -> (usize, usize) {
        (0, 0)
    }
}

/// The most ranks of a group that lends. In larger groups operations take the plan's steps.
pub(crate) const MAX_LENDERS: usize = 32;
/// Bytes of a piece of a chunk that is lent in a slot.
pub(crate) const PIECE: usize = SLOT;

/// Whether the ranks of an operation lend each other their memory ([`Lending`]).
pub(crate) enum Agreement {
    /// They do not: all take the steps.
    Steps,
    /// Each finds out by itself whether it can, and its first frames say so ([`crate::plan::check::agree`]).
    ByFirstFrame,
    /// All can, and all of them know that.
    Known,
}

/// How a peer can be lent memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It touches our memory where that lies.
    InPlace,
    /// It touches staging slots of ours.
    InSlots,
    Nowhere,
}

/// A staging slot and its address. The slot is lent again and again, as the peer cannot reach the memory itself. In a simulation
/// there is no slot, and the address is null.
pub(crate) type LentSlot = (Option<StagingSlot>, *mut u8);

/// Where a result of a fold goes.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    pub(crate) at: *mut u8,
    /// Judging by its length, it is in a staging slot of a peer, which copies the result from there.
    pub(crate) in_slot: bool,
    /// The result overwrites the input of the rank that owns this memory.
    pub(crate) is_over_input: bool,
}

/// Elements of a chunk to be folded at once, from all operands into all results of a plan of loans. Only `LoanRun` makes values of this
/// type, and it vouches for all addresses in them.
pub(crate) struct Fold<'a> {
    pub(crate) c: Context<'a>,
    pub(crate) step: &'a Step,
    /// How many elements there are.
    pub(crate) m: usize,
    /// Whether this rank has nothing more of the part to fold after these elements.
    pub(crate) is_last: bool,
    pub(crate) ins: &'a [*const u8],
    /// In the order in which writing them is fastest.
    pub(crate) outs: &'a [Out],
}

/// How one kind of memory is lent. Each `LoanRun` has a value of its own, a clone.
pub(crate) trait Lends: Send + Clone {
    /// A part of at most [`MAX_LENDERS`] ranks begins. Returns whether the ranks are to lend each other memory for it.
    fn begin(&mut self, c: Context<'_>, lending: &Lending) -> Agreement;

    /// Whether the ranks of a part are to lend each other memory for it. Asked once by each run that may take the part.
    fn agreement(&mut self, c: Context<'_>) -> Agreement {
        let lending = c.program().lending.as_ref().filter(|lending| lending.plan.size <= MAX_LENDERS);
        lending.map_or(Agreement::Steps, |lending| self.begin(c, lending))
    }

    /// Whether all ranks share memory, over which links have room for a ring's frames from the beginning.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Called when all that the part is to lend can be lent, and before any of it is. `base`: where a slot of the plan begins.
    fn before_lending(
        &mut self,
        _: Context<'_>,
        _: &Lending,
        _base: &dyn Fn(Slot) -> *mut u8,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// How a peer can be lent this memory.
    fn reach(&self, c: Context<'_>, peer: Rank, loan: &link::Loan, port: &mut Port) -> Result<Reach, Error>;

    /// How many staging slots may be held for lending, for all peers together.
    fn free_slots(&self, port: &Port) -> usize;

    /// Takes one of these slots, if one is free.
    fn hold_slot(&self, port: &mut Port) -> Option<LentSlot>;

    /// Copies a piece of the input to the slot that is lent next.
    ///
    /// # Safety
    /// `from` is valid for reads of so many bytes and `slot` for writes; they do not overlap.
    unsafe fn fill(&mut self, from: *const u8, slot: *mut u8, bytes: usize, port: &mut Port);

    /// Copies a result from the slot in which a peer has folded it.
    ///
    /// # Safety
    /// `slot` is valid for reads of so many bytes and `to` for writes; they do not overlap.
    unsafe fn empty(&mut self, part: &Part, slot: *const u8, to: *mut u8, bytes: usize);

    /// Folds the elements, but no more of them than one pass may. Returns how many it has folded.
    fn fold(&mut self, fold: &Fold<'_>, port: &Port) -> Result<usize, Error>;
}
