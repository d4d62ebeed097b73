//! Plans without memory: a clock hears how many bytes would be touched. The simulator runs them ([`crate::sim`]).

use std::sync::Arc;

use super::backend::{Backend, Combined, Context, Prepared, Slice};
use super::host::{LEND_FROM, LEND_SLOTS_FROM};
use super::lends::{Agreement, Fold, Lends, LentSlot, Reach};
use super::operation::Part;
use super::port::{Payload, Port};
use super::slicing::Slicing;
use crate::error::Error;
use crate::link;
use crate::plan::{Lending, Program, Slot};

/// How simulated ranks are to lend each other memory, where the plan has a form for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loans {
    /// Peers touch memory where it lies: ranks of one process, or buffers in their hosts' regions.
    InPlace,
    /// Memory is lent in staging slots: ranks in processes of their own.
    InSlots,
}

/// Hears of the work of a rank that moves no memory.
pub(crate) trait Clock: Send + Sync {
    /// So many bytes of this rank's own were read or written.
    fn touch(&self, bytes: usize);
    /// So many bytes were read that another rank has lent, from that rank's core.
    fn fetch(&self, bytes: usize);
}

/// No memory.
#[derive(Clone)]
pub(crate) struct Timed {
    clock: Arc<dyn Clock>,
    /// Bytes of a slice.
    slice: usize,
    loans: Option<Loans>,
}

impl Timed {
    /// What this clock hears of, in slices of so many bytes; whether and how memory is lent.
    pub(crate) fn new(clock: Arc<dyn Clock>, slice: usize, loans: Option<Loans>) -> Timed {
        Timed { clock, slice, loans }
    }
}

impl Backend for Timed {
    /// The thread that simulates loses none to it.
    const TAKES_TIME: bool = false;
    const SENDS_INPUT: bool = true;
    const IS_ALIGNED: bool = false;

    fn fresh(&self) -> Timed {
        self.clone()
    }

    fn slicing(&self, _: &Program) -> Slicing {
        Slicing::by(self.slice)
    }

    fn begin(&mut self, _: Context<'_>) {}

    fn end(&mut self) {}

    fn prepare(&mut self, _: Context<'_>, _: bool) -> Result<Prepared, Error> {
        Ok(Prepared::Ready)
    }

    fn base(&self, _: &Part, _: Slot) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn combine(&mut self, slice: &Slice<'_>, _: &mut Port) -> Result<Combined, Error> {
        let waits = slice.must_wait();
        if waits && slice.dst.is_none() && !slice.has_accumulator() {
            return Ok(Combined::NOTHING);
        }
        self.clock.touch((slice.ins.len() + 1) * slice.m * slice.state.unit);
        let sent = slice.is_ready && !waits;
        let payload = sent.then_some(Payload::Memory(std::ptr::null()));
        Ok(Combined { taken: slice.m, is_stored: !waits, payload })
    }

    fn store(&mut self, _: &Slice<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn send_accumulated(&mut self, slice: &Slice<'_>, _: &mut Port) -> Result<(usize, Payload), Error> {
        Ok((slice.m, Payload::Memory(std::ptr::null())))
    }

    unsafe fn fill_slot(&mut self, _: *const u8, _: *mut u8, bytes: usize, _: &mut Port) {
        self.clock.touch(2 * bytes);
    }
}

impl Lends for Timed {
    fn begin(&mut self, c: Context<'_>, lending: &Lending) -> Agreement {
        let from = match self.loans {
            None => return Agreement::Steps,
            Some(Loans::InPlace) => LEND_FROM,
            Some(Loans::InSlots) => LEND_SLOTS_FROM[usize::from(lending.plan.size > 2)],
        };
        let large = c.part.count * c.part.dtype.size() >= from;
        if large { Agreement::ByFirstFrame } else { Agreement::Steps }
    }

    fn reach(&self, _: Context<'_>, _: usize, _: &link::Loan, _: &mut Port) -> Result<Reach, Error> {
        Ok(if self.loans == Some(Loans::InSlots) { Reach::InSlots } else { Reach::InPlace })
    }

    fn free_slots(&self, _: &Port) -> usize {
        usize::MAX
    }

    fn hold_slot(&self, _: &mut Port) -> Option<LentSlot> {
        Some((None, std::ptr::null_mut()))
    }

    unsafe fn fill(&mut self, _: *const u8, _: *mut u8, bytes: usize, _: &mut Port) {
        self.clock.touch(2 * bytes);
    }

    unsafe fn empty(&mut self, _: &Part, _: *const u8, _: *mut u8, bytes: usize) {
        self.clock.touch(2 * bytes);
    }

    fn fold(&mut self, fold: &Fold<'_>, _: &Port) -> Result<usize, Error> {
        let unit = fold.c.part.dtype.size();
        let m = fold.m.min(self.slice / unit);
        let bytes = m * unit;
        self.clock.touch((fold.ins.len() + fold.outs.len()) * bytes);
        self.clock.fetch(fold.ins.len().saturating_sub(1) * bytes);
        Ok(m)
    }
}
