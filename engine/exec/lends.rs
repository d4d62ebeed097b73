//! [`Lends`]: one kind of memory that ranks lend each other.
//!
//! [`LoanRun`](super::run) decides which peer is lent what, and when that comes back. It does not know the kind of memory. An implementation
//! of this trait says how a peer reaches the memory, folds what lies there, and copies to and from staging slots. There is one
//! implementation for each [`Backend`](super::backend::Backend):
//!
//! | backend | how its memory is lent |
//! |---|---|
//! | [`Host`](super::host::Host) | `HostLoans`: where it lies, or through staging slots |
//! | `Cuda` (`device/carriers/backend.rs`) | `CudaLoans`: where it lies, to devices of this host; to those of other processes in large parts only |
//! | [`Timed`](super::timed::Timed) | `Timed` itself: where it lies or through slots, as the simulated machine has it; no memory is touched |

use super::backend::Context;
use super::operation::Part;
use super::port::Port;
use crate::error::Error;
use crate::link::region::Slot as StagingSlot;
use crate::link::{self, SLOT};
use crate::plan::{Lending, Slot, Step};
use crate::types::Rank;

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
    /// It is in a staging slot of a peer, which copies the result from there.
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
