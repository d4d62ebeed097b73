//! Plans in the host's memory: everything is computed at once, on the thread that drives.

mod kernel;
mod loans;
mod memory;

use allstream_kernels as kernels;

pub(crate) use self::loans::{HostLoans, LEND_FROM, LEND_SLOTS_FROM};
use self::memory::Memory;
use super::backend::{Backend, Combined, Context, Prepared, Slice, base_of};
use super::operation::Part;
use super::port::{Payload, Port};
use super::slicing::Slicing;
use crate::error::Error;
use crate::link::SLOT;
use crate::plan::{INPUT, OUTPUT, Program, SCRATCH, Slot};

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
