//! How ranks of one host lend each other memory: where it lies, or through staging slots.

use allstream_kernels as kernels;

use super::{is_large, kernel};
use crate::error::Error;
use crate::exec::backend::Context;
use crate::exec::lends::{Agreement, Fold, Lends, LentSlot, MAX_LENDERS, Out, Reach};
use crate::exec::operation::{Operation, Part};
use crate::exec::port::Port;
use crate::link;
use crate::plan::{Lending, SMALL};
use crate::types::{LIST, Rank};

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
    /// As [`Host`](super::Host) has it.
    bypass_from: usize,
    is_bypassing: bool,
    /// Whether all ranks share memory. Else no rank can lend to all others, and none needs to ask its links.
    lends: bool,
}

impl HostLoans {
    /// `bypass_from`: results out of place of so many bytes and more are written past the caches. `lends`: whether all ranks share memory.
    pub(in crate::exec) fn new(bypass_from: usize, lends: bool) -> HostLoans {
        HostLoans { bypass_from, is_bypassing: false, lends }
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
        if !self.lends || bytes(c.part) < lend_from(c.op, LEND_FROM) {
            return Agreement::Steps;
        }
        self.is_bypassing = is_large(self.bypass_from, c);
        Agreement::ByFirstFrame
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
