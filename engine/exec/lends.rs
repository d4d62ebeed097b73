//! [`Lends`]: one kind of memory that ranks lend each other.
//!
//! [`LoanRun`](super::run) decides who is lent what and when it comes back. It knows no memory. Whoever implements this trait says
//! how a peer reaches memory, folds what lies there, and copies to and from staging slots. There is one for each
//! [`Backend`](super::backend::Backend):
//!
//! | backend | how its memory is lent |
//! |---|---|
//! | [`Host`](super::host::Host) | `HostLoans`: where it lies, or through staging slots |
//! | `Cuda` (`device/carriers/backend.rs`) | `CudaLoans`: where it lies, to devices of the same process |
//! | [`Timed`](super::timed::Timed) | the same value: as the simulated network says |

use super::backend::Context;
use super::operation::Part;
use super::port::Port;
use crate::error::Error;
use crate::link::region::Slot as StagingSlot;
use crate::link::{self, SLOT};
use crate::plan::{Lending, Slot, Step};
use crate::types::Rank;

/// Groups that lend have up to so many ranks: beyond, the choice takes other plans.
pub(crate) const MAX_LENDERS: usize = 32;
/// Bytes of a piece of a chunk that is lent in a slot.
pub(crate) const PIECE: usize = SLOT;

/// Whether the ranks of an operation lend each other their memory ([`Lending`]).
pub(crate) enum Agreement {
    /// They do not: all take the steps.
    Steps,
    /// Each finds out by itself whether it can, and its first frames say so ([`crate::plan::check::agree`]).
    ByFirstFrame,
    /// All can, by what all of them know.
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

/// A staging slot that is lent again and again, as the peer cannot reach the memory itself, and where it is. In a simulation there is
/// no slot, and the address is null.
pub(crate) type LentSlot = (Option<StagingSlot>, *mut u8);

/// Where a result of a fold goes.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    pub(crate) at: *mut u8,
    /// Into a staging slot of a peer's, which copies it from there.
    pub(crate) in_slot: bool,
    /// Over what its owner gave to be folded.
    pub(crate) is_over_input: bool,
}

/// Elements that are folded at once, of the operands and into the results of a plan of loans. `LoanRun` alone
/// makes these, and vouches for all addresses in them.
pub(crate) struct Fold<'a> {
    pub(crate) c: Context<'a>,
    pub(crate) step: &'a Step,
    /// How many elements there are.
    pub(crate) m: usize,
    /// Nothing of the part is left to be folded by this rank then.
    pub(crate) is_last: bool,
    pub(crate) ins: &'a [*const u8],
    /// In the order in which they had best be written.
    pub(crate) outs: &'a [Out],
}

/// How one kind of memory is lent. A value belongs to one run of a part's loans, and a clone of it to another.
pub(crate) trait Lends: Send + Clone {
    /// A part begins, of at most [`MAX_LENDERS`] ranks. Whether they are to lend each other memory for it.
    fn begin(&mut self, c: Context<'_>, lending: &Lending) -> Agreement;

    /// All that the part is to lend can be lent, and nothing is yet. `base`: where a slot of the plan begins.
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

    /// Slots that may be held for lending, in all.
    fn free_slots(&self, port: &Port) -> usize;

    /// Takes one.
    fn hold_slot(&self, port: &mut Port) -> Option<LentSlot>;

    /// Copies to a slot what is to be lent there.
    ///
    /// # Safety
    /// `from` is valid for reads of so many bytes and `slot` for writes; they do not overlap.
    unsafe fn fill(&mut self, from: *const u8, slot: *mut u8, bytes: usize, port: &mut Port);

    /// Copies back what was folded in a slot.
    ///
    /// # Safety
    /// `slot` is valid for reads of so many bytes and `to` for writes; they do not overlap.
    unsafe fn empty(&mut self, part: &Part, slot: *const u8, to: *mut u8, bytes: usize);

    /// Folds, as many elements as a pass may at most. Says how many those are.
    fn fold(&mut self, fold: &Fold<'_>, port: &Port) -> Result<usize, Error>;
}
