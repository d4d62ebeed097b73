//! The host's memory: [`Host`] runs plans in it and computes everything at once, on the thread that drives; [`HostLoans`] says how ranks of one host
//! lend each other theirs.

mod kernel;

use std::cell::UnsafeCell;

use allstream_kernels as kernels;

use super::backend::{
    Agreement, Backend, Combined, Context, Fold, Lends, LentSlot, MAX_LENDERS, Out, Prepared, Reach, Slice,
    Slicing, base_of,
};
use super::operation::{Operation, Part};
use super::port::{Payload, Port};
use crate::error::Error;
use crate::link::{self, SLOT};
use crate::plan::{INPUT, Lending, OUTPUT, Program, SCRATCH, SMALL, Slot};
use crate::types::{LIST, Rank};

/// Bytes that are scaled in one pass: the thread has other work too.
const SCALED: usize = 256 << 10;

/// Room for the result of a step that stores it nowhere and sends it in a ring's cell.
#[repr(align(64))]
struct Inline([u8; Port::INLINE]);

/// The host's memory.
pub(crate) struct Host {
    /// Results of so many bytes and more are written past the caches if the operation is out of place; in place, of twice as many.
    bypass_from: usize,
    /// Whether the results of this part are written past the caches, which could not hold them.
    is_bypassing: bool,
    /// How many elements of the input are scaled so far; `None` if nothing is to be scaled, or nothing more.
    scaled: Option<usize>,
    memory: Memory,
    inline: Inline,
}

impl Host {
    /// `bypass_from`: results out of place of so many bytes and more are written past the caches.
    pub(super) fn new(bypass_from: usize) -> Host {
        let inline = Inline([0; Port::INLINE]);
        Host { bypass_from, is_bypassing: false, scaled: None, memory: Memory::default(), inline }
    }

    /// Scales the next elements of the input: in place if the operation is in place and leaves a result on this rank, else in a copy.
    fn scale(&mut self, c: Context<'_>) {
        let (part, Some(done), Some(factor)) = (c.part, self.scaled, c.factor()) else { return };
        let unit = part.dtype.size();
        let len = part.total(if part.is_in_place() { OUTPUT } else { INPUT });
        // A rank that gets no result (all but the root of a reduce, say) keeps its buffer unchanged.
        let in_place = part.is_in_place() && part.leaves_result(&c.op.signature, true);
        let m = (len - done).min(SCALED / unit);
        let to = if in_place { part.output } else { self.memory.scale(len * unit) };
        let at = to.wrapping_add(done * unit);
        // SAFETY: `m` elements from `done` on are inside the input, which the table owns, and inside their destination: the
        // input itself, or memory of this run of the same length. No step has run yet, so nobody else touches the two.
        unsafe {
            if !in_place {
                kernels::copy(part.input.wrapping_add(done * unit), &[at], m * unit);
            }
            kernels::scale(part.dtype, at, m, factor);
        }
        self.scaled = (done + m < len).then_some(done + m);
    }
}

/// Whether the result of a part is written past the caches. In place this begins at twice as many bytes, as the caches have only one
/// buffer to hold.
fn is_large(bypass_from: usize, c: Context<'_>) -> bool {
    #[cfg(any(test, feature = "testing"))]
    if let Some(streams) = crate::testing::faults::streams(c.op.number) {
        return streams;
    }
    let bytes = c.part.total(OUTPUT) * c.part.dtype.size();
    bytes >= bypass_from << u32::from(c.part.is_in_place())
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
        self.is_bypassing = is_large(self.bypass_from, c);
    }

    fn end(&mut self) {}

    fn prepare(&mut self, c: Context<'_>, has_arrived: bool) -> Result<Prepared, Error> {
        if self.scaled.is_none() {
            return Ok(Prepared::Ready);
        }
        // All of the input is scaled, also what no step reads: so all of it has to be there.
        if has_arrived {
            self.scale(c);
        }
        Ok(Prepared::NotYet(has_arrived))
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
        // SAFETY: the accumulator, which is this run's alone, holds `m` elements. `dst` has room for them by the layout, and `PlanRun` has
        // seen that nobody reads there.
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
                // SAFETY: the accumulator holds `m` elements. A slot has room for a slice, and is ours alone until posted.
                unsafe { std::ptr::copy_nonoverlapping(from, at, m * unit) };
                Payload::Slot(slot, at)
            }
            None => {
                // If no slot is free, only as much is sent as a ring's cell holds: so a communicator that has taken all slots does not stop this one.
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

    fn check_values(&self, part: &Part) -> Result<(), Error> {
        part.check_values()
    }

    fn memory(&self) -> (usize, usize) {
        (self.memory.kept(), self.memory.needed())
    }
}

/// 64-byte aligned words. They are in a cell, as they are written through pointers that come from a shared reference to this memory.
#[repr(C, align(64))]
struct Line(UnsafeCell<[u64; 8]>);

/// Makes room for so many bytes.
fn grow(lines: &mut Vec<Line>, bytes: usize) {
    let wanted = bytes.div_ceil(size_of::<Line>());
    if lines.len() < wanted {
        lines.resize_with(wanted, || Line(UnsafeCell::new([0; 8])));
    }
}

/// The working memory of a run. It is kept from one part to the next, until its owner drops it.
#[derive(Default)]
struct Memory {
    /// By step: room for one slice, or nothing if the step has never needed it.
    accumulators: Vec<Vec<u8>>,
    /// The third slot of plans that have one.
    scratch: Vec<Line>,
    /// A scaled copy of the input.
    scaled: Vec<Line>,
    /// How many accumulators have memory.
    filled: usize,
    /// Bytes that the part has asked for beside accumulators.
    wanted: usize,
}

impl Memory {
    /// A part of so many steps begins, with so many bytes of scratch.
    fn begin(&mut self, steps: usize, scratch: usize) {
        if self.accumulators.len() < steps {
            self.accumulators.resize_with(steps, Vec::new);
        }
        grow(&mut self.scratch, scratch);
        self.scaled.clear();
        self.wanted = scratch;
    }

    /// The accumulator of a step.
    fn accumulator(&mut self, step: usize) -> &mut [u8] {
        let accumulator = &mut self.accumulators[step];
        if accumulator.is_empty() {
            accumulator.resize(SLOT, 0);
            self.filled += 1;
        }
        accumulator
    }

    /// The third slot.
    fn scratch(&self) -> *mut u8 {
        self.scratch.as_ptr().cast::<u8>().cast_mut()
    }

    /// The scaled copy of the input, if this part has one.
    fn scaled(&self) -> Option<*mut u8> {
        (!self.scaled.is_empty()).then(|| self.scaled.as_ptr().cast::<u8>().cast_mut())
    }

    /// Room for a scaled copy of so many bytes.
    fn scale(&mut self, bytes: usize) -> *mut u8 {
        if self.scaled.is_empty() {
            self.wanted += bytes;
        }
        grow(&mut self.scaled, bytes);
        self.scaled.as_mut_ptr().cast()
    }

    /// Bytes that are kept.
    fn kept(&self) -> usize {
        (self.scratch.capacity() + self.scaled.capacity()) * size_of::<Line>() + self.filled * SLOT
    }

    /// Bytes that the part has needed. All accumulators that have memory are counted, as it is not noted which of them the part has used.
    fn needed(&self) -> usize {
        self.wanted + self.filled * SLOT
    }
}

/// Ranks lend each other their memory from this size of a buffer on. At 4 KB the plan's steps took 1.0 to 1.9 times as long as loans (2, 4
/// and 8 ranks on 2 cores, threads and arena buffers). Below 4 KB, with 4 threads, the steps were faster.
pub(crate) const LEND_FROM: usize = 4 << 10;
/// The same where ranks lend staging slots, with two ranks and with more. On 2 cores, at 4, 16 and 64 KB, the steps took 1.2, 1.9 and 3.3
/// times as long as loans with 2 ranks; 0.6, 1.0 and 1.3 times with 4; 1.0 to 1.3, 1.4 and 1.3 times with 8.
pub(crate) const LEND_SLOTS_FROM: [usize; 2] = [4 << 10, 16 << 10];
/// About so many bytes of all ranks' memory are touched in one pass that folds: no more, as the thread has other work too. With a quarter of
/// this an all_reduce of 1 MB took up to 1.4 times as long; with four times as much nothing was faster.
const FOLDED: usize = 1 << 20;
/// A rank that lends staging slots leaves so many of them to its other operations.
const LEFT: usize = 8;

/// The least size of a part for which this operation lends memory: `size`, except on a list.
fn lend_from(op: &Operation, size: usize) -> usize {
    #[cfg(any(test, feature = "testing"))]
    if let Some(from) = crate::testing::faults::folded_from(op.number) {
        return from;
    }
    // Small parts of a list take the steps, whose messages are under way together. A part's loan could go out only when all peers have
    // lent for the part before it.
    if op.signature.dtype == LIST { SMALL + 1 } else { size }
}

fn bytes(part: &Part) -> usize {
    part.count * part.dtype.size()
}

/// How the host's memory is lent.
#[derive(Clone)]
pub(crate) struct HostLoans {
    /// As [`Host`] has it.
    bypass_from: usize,
    is_bypassing: bool,
    /// Whether all ranks share memory. Else no rank can lend to all others, and none needs to ask its links.
    shares_memory: bool,
}

impl HostLoans {
    /// `bypass_from`: results out of place of so many bytes and more are written past the caches. `shares_memory`: whether all ranks do.
    pub(super) fn new(bypass_from: usize, shares_memory: bool) -> HostLoans {
        HostLoans { bypass_from, is_bypassing: false, shares_memory }
    }

    /// Whether a pass that writes so many bytes of a result writes them past the caches. Over the result's own input it does not: the caches
    /// hold that memory, as it has just been read. In a peer's slot it does if this rank fills its own slots past the caches, too.
    fn bypasses(&self, out: &Out, bytes: usize, port: &Port) -> bool {
        match out.in_slot {
            true => port.filling.is_past(bytes),
            false => self.is_bypassing && !out.is_over_input,
        }
    }
}

impl Lends for HostLoans {
    fn begin(&mut self, c: Context<'_>, _: &Lending) -> Agreement {
        if !self.shares_memory || bytes(c.part) < lend_from(c.op, LEND_FROM) {
            return Agreement::Steps;
        }
        self.is_bypassing = is_large(self.bypass_from, c);
        Agreement::ByFirstFrame
    }

    fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    fn reach(&self, c: Context<'_>, peer: Rank, loan: &link::Loan, port: &mut Port) -> Result<Reach, Error> {
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

    unsafe fn fill(&mut self, from: *const u8, slot: *mut u8, bytes: usize, port: &mut Port) {
        // SAFETY: as the caller vouches.
        unsafe { port.filling.copy(from, slot, bytes) };
    }

    unsafe fn empty(&mut self, part: &Part, slot: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: as the caller vouches.
        unsafe {
            match self.is_bypassing && !part.is_in_place() {
                true => kernels::copy_streaming(slot, to, bytes),
                false => kernels::copy(slot, &[to], bytes),
            }
        }
    }

    fn fold(&mut self, fold: &Fold<'_>, port: &Port) -> Result<usize, Error> {
        let unit = fold.c.part.dtype.size();
        let most = (FOLDED / (2 * fold.c.program().plan.size)).next_multiple_of(4096) / unit;
        // `kernel::fold` wants the results that are written past the caches first.
        let (mut outs, mut bypassing) = ([std::ptr::null_mut::<u8>(); MAX_LENDERS], 0);
        for (i, out) in fold.outs.iter().enumerate() {
            outs[i] = out.at;
            if self.bypasses(out, most * unit, port) {
                outs.swap(i, bypassing);
                bypassing += 1;
            }
        }
        let m = fold.m.min(most);
        kernel::fold(fold, m, &outs[..fold.outs.len()], bypassing)?;
        Ok(m)
    }
}
