//! [`Whole`]: a library that takes a collective whole, and moves and combines everything by itself.
//!
//! The engine calls it when all ranks have called the same, which the host's links have found out by then
//! (`WholeOp`, `device/carriers/whole.rs`). So a library never sees ranks that disagree, nor waits for one that does not call.
//! `docs/adr/0026-whole-collectives.md` has the walk, and the locks.

mod order;

use std::sync::Arc;
use std::task::Waker;

pub(crate) use self::order::{Called, LaunchOrder, Ticket, Turn};
use crate::commands::Commands;
use crate::device::stream::DeviceStream;
use crate::error::{Error, MissingState};
use crate::mem::Witness;
use crate::plan::{INPUT, OUTPUT, Slot};
use crate::types::{DType, Kind, Rank, ReduceOp, Tables};

/// The memory of a call, or of one entry of a list.
#[derive(Clone)]
pub(crate) struct Piece {
    /// Equal to `output` in a call in place.
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// Elements, as the collective counts them. With a count for each rank: of all ranks together; without a meaning where a rank knows its own
    /// counts alone.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// With a count for each rank: where the blocks are, in the input and in the output. In a call in place the input has none of its own.
    pub(crate) tables: Option<Arc<Tables>>,
}

// SAFETY: the pointers are into buffers that the in-flight table owns (all `Buf: Send`) until the operation has ended.
unsafe impl Send for Piece {}

impl Piece {
    pub(crate) fn is_in_place(&self) -> bool {
        match &self.tables {
            None => self.input == self.output.cast_const(),
            // Its input may be a copy by now, which is laid out as the buffer is.
            Some(tables) => tables.slots[usize::from(INPUT)].is_empty(),
        }
    }

    /// Bytes of `count` elements.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Block `block` of `memory`, which has one of `count` elements for each rank.
    pub(crate) fn block(&self, memory: *mut u8, block: Rank) -> *mut u8 {
        memory.wrapping_add(block * self.bytes())
    }

    /// With a count for each rank: where block `block` of the input is, and its bytes. The block may be empty.
    pub(crate) fn input_block(&self, tables: &Tables, block: Rank) -> (*mut u8, usize) {
        let slot = if tables.slots[usize::from(INPUT)].is_empty() { OUTPUT } else { INPUT };
        self.at(self.input.cast_mut(), tables, (slot, block))
    }

    /// The same of the output.
    pub(crate) fn output_block(&self, tables: &Tables, block: Rank) -> (*mut u8, usize) {
        self.at(self.output, tables, (OUTPUT, block))
    }

    fn at(&self, memory: *mut u8, tables: &Tables, (slot, block): (Slot, Rank)) -> (*mut u8, usize) {
        let range = tables.slots[usize::from(slot)].get(block).cloned().unwrap_or_default();
        (memory.wrapping_add(range.start * self.dtype.size()), range.len() * self.dtype.size())
    }

    /// Where this rank's own block is, if the input is one block.
    pub(crate) fn own_input(&self, rank: Rank) -> *const u8 {
        if self.is_in_place() { self.block(self.output, rank) } else { self.input }
    }
}

/// What was called.
pub(crate) struct WholeCall {
    pub(crate) kind: Kind,
    /// 0 where there is none.
    pub(crate) root: Rank,
    /// Without a meaning where nothing is reduced.
    pub(crate) op: ReduceOp,
    /// What this rank's input is multiplied by first.
    pub(crate) scale: Option<f64>,
    /// One, or the entries of a list.
    pub(crate) pieces: Vec<Piece>,
}

/// This rank's end of a message.
#[derive(Clone, Copy)]
pub(crate) struct Moved {
    pub(crate) peer: Rank,
    /// Else it is received.
    pub(crate) is_sent: bool,
    /// On the device.
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
}

/// What messages on a device's memory go by, on a communicator that a library has taken over.
pub(crate) struct MessagePath {
    pub(crate) whole: Arc<dyn Whole>,
    pub(crate) order: Arc<LaunchOrder>,
    /// What calls the library and the driver for the messages.
    pub(crate) commands: Arc<Commands>,
    /// For messages alone: while one waits there for its other end, what devices run by plans goes on beside it.
    pub(crate) stream: DeviceStream,
    /// The communicator, for errors.
    pub(crate) comm: String,
    /// Of who drives it.
    pub(crate) waker: Waker,
}

// SAFETY: as of `Piece`.
unsafe impl Send for Moved {}

/// How far a library has got with what it was given last: its own making, or a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It works at it on the host. Of a call on a device, not all is on the stream yet.
    InProgress,
    /// Of a call on a device: all of it is on the stream, which comes to its end when the call does.
    OnStream,
    /// It is done. Of a call on the host's memory, the results are there.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(dead_code, reason = "the only library that takes the host's memory is one for tests")
    )]
    Over,
}

/// One rank's end of what a library has of a communicator: of NCCL, an `ncclComm_t`.
///
/// One thread at a time calls `submit`, `exchange` and `poll`: of memory on a device, the one that carries the communicator's commands out. They
/// may block as long as the driver does. The others do not block.
/// [`check`](Witness::check) tells from any thread whether it has failed, at anything, by now; after an abort it has.
pub(crate) trait Whole: Witness {
    /// The library and its version, for people.
    fn name(&self) -> &str;

    /// Whether it takes such a call. What it answers depends on what all ranks of a call have in common, and on what all of them
    /// compared when the communicator was bound.
    fn takes(&self, call: &WholeCall) -> bool;

    /// Gets what such a call on this stream will need of the device's driver, when it is made: at its turn nothing may wait for the device.
    fn get_ready(&self, _: &WholeCall, _stream: &DeviceStream) -> Result<(), Error> {
        Ok(())
    }

    /// Begins a call, on the stream if the memory is a device's. Nothing else is in progress ([`Standing`]).
    ///
    /// # Safety
    /// The memory is as long as the call says, the inputs are valid for reads and the outputs for writes, and nobody else touches
    /// them out of the stream's order, until the call has ended, or [`is_quiet`](Self::is_quiet) says that the abort has.
    unsafe fn submit(&self, call: WholeCall, stream: Option<&DeviceStream>) -> Result<(), Error>;

    /// Whether what it said to have failed is not to be told yet, as somebody else will soon say more of it. Nothing of it counts as done meanwhile.
    fn gives_way(&self) -> bool {
        false
    }

    /// Whether it moves messages of a device's memory, too. The same on all ranks.
    fn moves_messages(&self) -> bool {
        false
    }

    /// Begins to move messages, all at once, on the stream. Their other ends do so, too, if not all at once. Nothing else is in
    /// progress.
    ///
    /// # Safety
    /// As of [`submit`](Self::submit).
    unsafe fn exchange(&self, _: &[Moved], _stream: &DeviceStream) -> Result<(), Error> {
        Err(Error::system("give messages to a library", "it moves none (a bug)"))
    }

    /// What keeps an operation from its end that was called on all ranks concerned: the library, or what is due before it.
    fn not_ended(&self, turn: Option<&Turn>) -> MissingState {
        let behind = turn.and_then(Turn::before).map(|before| format!(" (behind {before})"));
        MissingState::NotEnded { by: self.name().to_owned() + &behind.unwrap_or_default() }
    }

    /// How far it is with that.
    fn poll(&self) -> Result<Standing, Error>;

    /// Ends whatever it does: the communicator is dead. Called again it does nothing.
    fn abort(&self);

    /// Whether, after an abort, this rank's end touches no memory any more but by what is on the stream.
    fn is_quiet(&self) -> bool;
}

/// Whether a library takes several ranks on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// This version does not know how.
    Unknown,
    /// It would, if the environment gave it leave.
    NoLeave,
    Yes,
}

/// A library that was found, from which ranks make a [`Whole`] for a communicator.
pub(crate) trait Library: Send + Sync {
    /// Name and version. Ranks must have the same.
    fn name(&self) -> String;

    /// Whether several ranks may have one device.
    fn sharing(&self) -> Sharing {
        Sharing::Unknown
    }

    /// Bytes by which the ranks of a communicator find each other. One rank asks for them, all get them.
    fn id(&self) -> Result<[u8; ID], Error>;

    /// Begins to make this rank's end. It is made when [`poll`](Whole::poll) says that nothing is in progress.
    fn open(
        &self,
        id: &[u8; ID],
        place: (Rank, usize),
        stream: Option<&DeviceStream>,
    ) -> Result<Arc<dyn Whole>, Error>;
}

/// Bytes of an id: as many as NCCL's has.
pub(crate) const ID: usize = 128;

/// What a communicator is bound to that takes its operations whole.
#[derive(Clone)]
pub(crate) struct BoundWhole {
    pub(crate) whole: Arc<dyn Whole>,
    /// The order of launches on the rank's device; none where the host's memory is meant.
    pub(crate) order: Option<Arc<LaunchOrder>>,
    /// The device, by its identity.
    pub(crate) device: Option<[u8; 16]>,
    /// A number made of its id, the same on all ranks.
    pub(crate) number: u64,
}
