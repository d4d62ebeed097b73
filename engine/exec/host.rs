//! Plans in the host's memory: everything is computed at once, on the thread that drives.

mod kernel;
mod memory;

use allstream_kernels as kernels;

use self::memory::Memory;
use super::backend::{
    Agreement, Backend, Combined, Context, Fold, LentSlot, Prepared, Reach, Slice, base_of,
};
use super::operation::{Operation, Part};
use super::port::{Payload, Port};
use super::run::MAX_LENDERS;
use super::slicing::Slicing;
use crate::error::Error;
use crate::link::{self, SLOT};
use crate::plan::{INPUT, Lending, OUTPUT, Program, SCRATCH, SMALL, Slot};
use crate::types::LIST;

/// Bytes that are scaled in one pass: the thread has other work too.
const SCALED: usize = 256 << 10;
/// Ranks lend each other their memory from this size of a buffer on. At 4 KB the steps of the plan took 1.0 to 1.9 times as
/// long (2, 4 and 8 ranks on 2 cores, threads and arena buffers); below, with 4 threads, they were faster.
pub(crate) const LEND_FROM: usize = 4 << 10;
/// From this size on where slots are lent, with two ranks and with more. On 2 cores the steps took 1.2 times as long at 4 KB,
/// 1.9 times at 16 KB and 3.3 times at 64 KB (2 ranks); 0.6, 1.0 and 1.3 times with 4; 1.0 to 1.3, 1.4 and 1.3 with 8.
pub(crate) const LEND_SLOTS_FROM: [usize; 2] = [4 << 10, 16 << 10];
/// Bytes of all ranks' memory that are touched in a pass that folds, as the thread has other work too. With a quarter of it
/// 1 MB took up to 1.4 times as long, with four times as much nothing was faster.
const FOLDED: usize = 1 << 20;
/// So many slots are left to others when they are lent.
const LEFT: usize = 8;

/// Room for a payload that travels in a ring's cell, and that its step keeps nowhere.
#[repr(align(64))]
struct Inline([u8; Port::INLINE]);

/// The host's memory.
pub(crate) struct Host {
    /// Results out of place of so many bytes and more are written past the caches; in place, of twice as many.
    bypass_from: usize,
    /// The results of this part are: the caches could not hold them.
    is_bypassing: bool,
    /// Elements of the input that are scaled; none where nothing is to be scaled (any more).
    scaled: Option<usize>,
    memory: Memory,
    inline: Inline,
}

impl Host {
    /// `bypass_from`: the size of results from which on they are written past the caches, out of place.
    pub(super) fn new(bypass_from: usize) -> Host {
        let inline = Inline([0; Port::INLINE]);
        Host { bypass_from, is_bypassing: false, scaled: None, memory: Memory::default(), inline }
    }

    /// Whether the result of a part is written past the caches. In place, where nothing else is in them, from twice as many
    /// bytes on.
    fn is_large(&self, c: Context<'_>) -> bool {
        #[cfg(any(test, feature = "testing"))]
        if let Some(streams) = crate::testing::faults::streams(c.op.number) {
            return streams;
        }
        let bytes = c.part.total(OUTPUT) * c.part.dtype.size();
        bytes >= self.bypass_from << u32::from(c.part.is_in_place())
    }

    /// Multiplies the next elements of the input: in place where the operation is, else in a copy.
    fn scale(&mut self, c: Context<'_>) {
        let (part, Some(done), Some(factor)) = (c.part, self.scaled, c.factor()) else { return };
        let unit = part.dtype.size();
        let len = part.total(if part.is_in_place() { OUTPUT } else { INPUT });
        // A rank that only gives (to the root of a reduce, say) keeps its buffer as it was.
        let in_place = part.is_in_place() && part.leaves_result(&c.op.signature, true);
        let m = (len - done).min(SCALED / unit);
        let to = if in_place { part.output } else { self.memory.scale(len * unit) };
        let at = to.wrapping_add(done * unit);
        // SAFETY: `m` elements from `done` on are inside the input, which the table owns, and inside what they go to:
        // the input itself, or memory of ours of the same length. No step has run yet: nobody else touches either.
        unsafe {
            if !in_place {
                kernels::copy(part.input.wrapping_add(done * unit), &[at], m * unit);
            }
            kernels::scale(part.dtype, at, m, factor);
        }
        self.scaled = (done + m < len).then_some(done + m);
    }
}

/// From which size on memory is lent, in this operation.
fn lend_from(op: &Operation, size: usize) -> usize {
    #[cfg(any(test, feature = "testing"))]
    if let Some(from) = crate::testing::faults::folded_from(op.number) {
        return from;
    }
    // Small parts of a list share their round trips: each loan would have to wait for the answer to the one before.
    if op.signature.dtype == LIST { SMALL + 1 } else { size }
}

fn bytes(part: &Part) -> usize {
    part.count * part.dtype.size()
}

impl Backend for Host {
    const TAKES_TIME: bool = true;
    const SENDS_INPUT: bool = true;
    const IS_ALIGNED: bool = false;

    fn fresh(&self) -> Host {
        Host::new(self.bypass_from)
    }

    fn slicing(&self, program: &Program) -> Slicing {
        Slicing::on_host(program)
    }

    fn begin(&mut self, c: Context<'_>) {
        let plan = &c.program().plan;
        let has_scratch = plan.slots.len() > usize::from(SCRATCH);
        let scratch = if has_scratch { c.part.total(SCRATCH) * c.part.dtype.size() } else { 0 };
        self.memory.begin(plan.steps.len(), scratch);
        self.scaled = c.factor().map(|_| 0);
        self.is_bypassing = self.is_large(c);
    }

    fn end(&mut self) {}

    fn prepare(&mut self, c: Context<'_>, has_arrived: bool) -> Result<Prepared, Error> {
        if self.scaled.is_none() {
            return Ok(Prepared::Ready);
        }
        // Of rounds that no step names, too: all of it.
        if has_arrived {
            self.scale(c);
        }
        Ok(Prepared::NotYet(has_arrived))
    }

    fn is_prepared(&self) -> bool {
        self.scaled.is_none()
    }

    fn base(&self, part: &Part, slot: Slot) -> *mut u8 {
        base_of(part, slot, self.memory.scaled(), self.memory.scratch())
    }

    fn combine(&mut self, slice: &Slice<'_>, port: &mut Port) -> Result<Combined, Error> {
        self.combine_slice(slice, port)
    }

    fn store(&mut self, slice: &Slice<'_>) -> Result<(), Error> {
        let Some(to) = slice.dst else { return Ok(()) };
        let bytes = slice.m * slice.state.unit;
        let from = self.accumulator(slice, slice.state.pos);
        // SAFETY: the accumulator holds `m` elements; `dst` has room by the layout, and nothing reads it (`PlanRun` has looked).
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    fn send_accumulated(&mut self, slice: &Slice<'_>, port: &mut Port) -> Result<(usize, Payload), Error> {
        let (mut m, unit) = (slice.m, slice.state.unit);
        let from = self.accumulator(slice, slice.state.pos).cast_const();
        debug_assert!(m * unit <= SLOT);
        let slot = if m * unit > Port::INLINE { port.take_slot(m * unit) } else { None };
        let payload = match slot {
            Some((slot, at)) => {
                // SAFETY: a slot has room for a slice, and is ours alone until posted.
                unsafe { std::ptr::copy_nonoverlapping(from, at, m * unit) };
                Payload::Slot(slot, at)
            }
            None => {
                // What fits a cell goes: no other communicator's backlog stops us.
                m = m.min(Port::INLINE.checked_div(unit).unwrap_or(m));
                Payload::Memory(from)
            }
        };
        Ok((m, payload))
    }

    unsafe fn fill_slot(&mut self, from: *const u8, slot: *mut u8, bytes: usize, port: &mut Port) {
        // SAFETY: as the caller vouches.
        unsafe { port.filling.copy(from, slot, bytes) };
    }

    fn agreement(&self, c: Context<'_>, lending: &Lending) -> Agreement {
        match lending.plan.size <= MAX_LENDERS && bytes(c.part) >= lend_from(c.op, LEND_FROM) {
            true => Agreement::ByFirstFrame,
            false => Agreement::Steps,
        }
    }

    fn reach(&self, c: Context<'_>, peer: usize, loan: &link::Loan, port: &mut Port) -> Result<Reach, Error> {
        let plan = &c.program().plan;
        #[cfg(any(test, feature = "testing"))]
        if crate::testing::faults::keeps_to_itself(plan.rank, c.op.number) {
            return Ok(Reach::Nowhere);
        }
        let tx = port.tx(peer)?;
        if tx.can_lend(loan.input, loan.bytes) && tx.can_lend(loan.output, loan.bytes) {
            return Ok(Reach::InPlace);
        }
        let from = lend_from(c.op, LEND_SLOTS_FROM[usize::from(plan.size > 2)]);
        let in_slots = bytes(c.part) >= from && tx.can_lend_slots();
        Ok(if in_slots { Reach::InSlots } else { Reach::Nowhere })
    }

    fn free_slots(&self, port: &Port) -> usize {
        port.free_slots().saturating_sub(LEFT)
    }

    fn hold_slot(&self, port: &mut Port) -> Option<LentSlot> {
        port.hold_slot().map(|(slot, at)| (Some(slot), at))
    }

    unsafe fn empty_slot(&mut self, part: &Part, slot: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: as the caller vouches.
        unsafe {
            match self.is_bypassing && !part.is_in_place() {
                true => kernels::copy_streaming(slot, to, bytes),
                false => kernels::copy(slot, &[to], bytes),
            }
        }
    }

    fn fold_len(&self, ranks: usize, unit: usize) -> usize {
        (FOLDED / (2 * ranks)).next_multiple_of(4096) / unit
    }

    /// A result over the input stays in the caches: it has just been read there. What goes back through a slot follows how slots
    /// are filled.
    fn bypasses(&self, in_slot: bool, in_place: bool, bytes: usize, port: &Port) -> bool {
        match in_slot {
            true => port.filling.is_past(bytes),
            false => self.is_bypassing && !in_place,
        }
    }

    fn fold(&mut self, fold: &Fold<'_>) -> Result<(), Error> {
        kernel::fold(fold)
    }

    fn check_values(&self, part: &Part) -> Result<(), Error> {
        part.check_values()
    }

    fn memory(&self) -> (usize, usize) {
        (self.memory.kept(), self.memory.needed())
    }

    fn give_memory_back(&mut self) {
        self.memory = Memory::default();
    }
}
