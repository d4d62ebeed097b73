//! [`Whole`]: a library that takes a collective whole, and moves and combines everything by itself.
//!
//! The engine calls the library once all ranks have called the same operation, which they find out over the host's links
//! (`WholeOp`, `device/carriers/whole.rs`). So a library never sees ranks that disagree, nor waits for one that does not call.
//! `docs/adr/0026-whole-collectives.md` describes each step.

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

/// The memory of a call, or of one buffer if the call has a list of buffers.
#[derive(Clone)]
pub(crate) struct Piece {
    /// Equal to `output` in a call in place.
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// Elements, as the collective counts them. With a count for each rank: those of all ranks together, but without meaning in a
    /// collective in which each rank knows only its own counts.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// With a count for each rank: where each rank's block is, in the input and in the output. In a call in place there is no table of the input.
    pub(crate) tables: Option<Arc<Tables>>,
}

// SAFETY: the pointers are into buffers that the in-flight table owns (each is `Send`) until the operation has ended. All else is `Send`.
unsafe impl Send for Piece {}

impl Piece {
    pub(crate) fn is_in_place(&self) -> bool {
        match &self.tables {
            None => self.input == self.output.cast_const(),
            // The addresses do not tell: the input may be a copy by now, which is laid out as the buffer is.
            Some(tables) => tables.slots[usize::from(INPUT)].is_empty(),
        }
    }

    /// Bytes of `count` elements.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Where block `block` of `memory` is, which has a block of `count` elements for each rank.
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

    /// Where this rank's own block is, in a collective whose input is one block. In place it is one block of the output.
    pub(crate) fn own_input(&self, rank: Rank) -> *const u8 {
        if self.is_in_place() { self.block(self.output, rank) } else { self.input }
    }
}

/// What was called.
pub(crate) struct WholeCall {
    pub(crate) kind: Kind,
    /// 0 if the collective has none.
    pub(crate) root: Rank,
    /// Meaningless if nothing is reduced.
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
    /// Whether this rank sends the message; otherwise it receives it.
    pub(crate) is_sent: bool,
    /// An address on the device.
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
}

/// How messages of device memory are moved on a communicator whose operations a library takes.
pub(crate) struct MessagePath {
    pub(crate) whole: Arc<dyn Whole>,
    pub(crate) order: Arc<LaunchOrder>,
    /// The commands in which the library and the driver are called for the messages.
    pub(crate) commands: Arc<Commands>,
    /// A stream for messages alone: while a message waits there for its other end, collectives that devices run by plans go on beside it.
    pub(crate) stream: DeviceStream,
    /// The communicator, for errors.
    pub(crate) comm: String,
    /// Wakes whoever drives the communicator.
    pub(crate) waker: Waker,
}

// SAFETY: as for `Piece`, with an address of a device.
unsafe impl Send for Moved {}

/// How far a library has got with what it was told to do last: make its end of a communicator, carry out a call, or move messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The library is still at work on the host. If the call is on device memory, not all of it is on the stream yet.
    InProgress,
    /// For a call on device memory: all of it is on the stream, and ends when the stream has come to that point.
    OnStream,
    /// The library is done. If the call is on host memory, the results are there.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(dead_code, reason = "the only library that takes the host's memory is one for tests")
    )]
    Over,
}

/// One rank's end of a library's own communicator: for NCCL, an `ncclComm_t`.
///
/// One thread at a time calls `submit`, `exchange` and `poll`. For device memory, once the end is made, it is the thread that carries the
/// communicator's commands out. These functions, and `get_ready`, may block as long as the driver does. The others do not block.
/// [`check`](Witness::check) tells any thread whether the library has failed, at anything; while another thread is in a call of the library it
/// may say `Ok`, and that thread then hears of the failure. After an abort the library counts as failed.
pub(crate) trait Whole: Witness {
    /// The library and its version, for people.
    fn name(&self) -> &str;

    /// Whether it takes such a call. The answer depends only on what all ranks of a call have in common, and on what all of them
    /// compared when the communicator was bound: so it is the same on all ranks.
    fn takes(&self, call: &WholeCall) -> bool;

    /// Called when such a call is made: gets from the driver what the call will need on this stream. Later nothing may wait for the device.
    fn get_ready(&self, _: &WholeCall, _stream: &DeviceStream) -> Result<(), Error> {
        Ok(())
    }

    /// Begins a call, on the stream if the memory is a device's. Nothing else is in progress ([`Standing`]).
    ///
    /// # Safety
    /// The memory is as long as the call says, the inputs are valid for reads and the outputs for writes, and nobody else touches
    /// them out of the stream's order, until the call has ended; or, after an abort, until [`is_quiet`](Self::is_quiet) is true.
    unsafe fn submit(&self, call: WholeCall, stream: Option<&DeviceStream>) -> Result<(), Error>;

    /// Whether the library's failure is not to be reported yet, as the driver will soon say more about the cause. Meanwhile no call counts as done.
    fn gives_way(&self) -> bool {
        false
    }

    /// Whether the library also moves messages of a device's memory. The same on all ranks.
    fn moves_messages(&self) -> bool {
        false
    }

    /// Begins to move these messages, all at once, on the stream. The ranks at their other ends do the same, perhaps not all at
    /// once. Nothing else is in progress.
    ///
    /// # Safety
    /// As for [`submit`](Self::submit).
    unsafe fn exchange(&self, _: &[Moved], _stream: &DeviceStream) -> Result<(), Error> {
        Err(Error::system("give messages to a library", "it moves none (a bug)"))
    }

    /// What an operation that all ranks have called still waits for: the library, and the operation that is to be launched before it, if any.
    fn not_ended(&self, turn: Option<&Turn>) -> MissingState {
        let behind = turn.and_then(Turn::before).map(|before| format!(" (behind {before})"));
        MissingState::NotEnded { by: self.name().to_owned() + &behind.unwrap_or_default() }
    }

    /// How far the library is with what was begun last.
    fn poll(&self) -> Result<Standing, Error>;

    /// Ends whatever the library does, as the communicator is dead. A second call does nothing.
    fn abort(&self);

    /// Whether, after an abort, this rank's end touches memory only by work that is on the stream.
    fn is_quiet(&self) -> bool;
}

/// Whether a library takes several ranks on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// This version of the library does not.
    Unknown,
    /// This version does so if the environment allows it, which it does not here.
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

/// The library to which a communicator is bound, and which takes its operations whole.
#[derive(Clone)]
pub(crate) struct BoundWhole {
    pub(crate) whole: Arc<dyn Whole>,
    /// The order of launches on the rank's device; `None` if the library takes the host's memory.
    pub(crate) order: Option<Arc<LaunchOrder>>,
    /// The device's UUID; `None` if the library takes the host's memory.
    pub(crate) device: Option<[u8; 16]>,
    /// A number made from the id ([`Library::id`]), the same on all ranks.
    pub(crate) number: u64,
}
