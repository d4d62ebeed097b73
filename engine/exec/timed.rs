//! [`Timed`]: the backend that runs plans without memory, and tells a clock how many bytes would be touched. The simulator uses it ([`crate::sim`]).

use std::sync::Arc;

use super::backend::{
    Agreement, Backend, Combined, Context, Fold, Lends, LentSlot, Prepared, Reach, Slice, Slicing,
};
use super::host::{LEND_FROM, LEND_SLOTS_FROM};
use super::operation::Part;
use super::port::{Payload, Port};
use crate::error::Error;
use crate::link;
use crate::plan::{Lending, Program, Slot};

/// How simulated ranks lend each other memory, if there is a plan of loans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loans {
    /// Peers touch memory where it lies: as ranks of one process do, or ranks of one host whose buffers are in their regions.
    InPlace,
    /// Memory is lent in staging slots: as between ranks in processes of their own.
    InSlots,
}

/// Is told of the work of a simulated rank, which moves no memory.
pub(crate) trait Clock: Send + Sync {
    /// The rank has read or written so many bytes.
    fn touch(&self, bytes: usize);
    /// So many of the bytes that were touched are lent by other ranks, and had to be fetched from their cores, which takes time in addition.
    fn fetch(&self, bytes: usize);
}

/// The backend of a simulated rank.
#[derive(Clone)]
pub(crate) struct Timed {
    clock: Arc<dyn Clock>,
    /// Bytes of a slice.
    slice: usize,
    loans: Option<Loans>,
}

impl Timed {
    /// A backend that tells `clock` of its work, in slices of `slice` bytes. `loans`: how memory is lent; `None`: it is not.
    pub(crate) fn new(clock: Arc<dyn Clock>, slice: usize, loans: Option<Loans>) -> Timed {
        Timed { clock, slice, loans }
    }
}

impl Backend for Timed {
    /// Calls take the simulating thread no time, so the bytes of a pass need no limit.
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
