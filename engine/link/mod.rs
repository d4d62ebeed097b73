//! Links carry frames between two ranks of one communicator by lending memory.
//!
//! A link is **simplex**: a [`LinkTx`] at the sender, a [`LinkRx`] at the receiver, first in, first out. The
//! sender *posts* a frame whose payload stays where it is ([`Posted::Held`]) until the receiver has released
//! it, or is copied at once ([`Posted::Copied`]). The receiver *peeks* at the oldest frame, reads the payload
//! where it lies, and *releases* it, in parts if it likes. On one host a frame may also *lend* the receiver memory to read
//! and to write, until it is released ([`LinkTx::lend`]). Nothing here blocks.
//!
//! [`kinds`] lists the kinds of links that ranks' memory on the host goes over; a new one is a file of this folder, and a
//! line there.
//!
//! | link | payload lies in | credit |
//! |---|---|---|
//! | same process | the sender's own buffer, or a staging slot | ring cells, per communicator and peer |
//! | shared-memory arena | a staging slot of the sender's region | ring cells, per communicator and peer |
//! | GPU peer | the sender's device memory | ring cells, per communicator and peer |
//! | TCP | the socket, then the receiver's window | the connection's window, per communicator and peer |
//! | RDMA | a staging slot of the sender's region, then a slot of the receiver's area | cells and slots of that area, per communicator and peer |

pub(crate) mod arena;
pub(crate) mod cells;
pub(crate) mod dialled;
pub(crate) mod exit;
pub(crate) mod kinds;
pub(crate) mod layout;
pub(crate) mod local;
pub(crate) mod locks;
pub(crate) mod region;
pub(crate) mod ring;
pub(crate) mod tcp;
pub(crate) mod verbs;
pub(crate) mod waits;
mod wire;

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};

use self::dialled::Dial;
use self::exit::Exit;
use self::local::{Doorbell, MemoryLock};
use self::region::Region;
use self::tcp::Accept;
use self::verbs::Card;
use crate::error::Error;
use crate::types::{LinkClass, Rank, Signature};
pub(crate) use wire::{HEADER_BYTES, Header};

/// Payloads up to this travel inside the ring cell, beside the header.
pub(crate) const INLINE: usize = 192;
/// Size of a shared staging slot, and the largest frame in shared memory. 128 KB: two fit the L2 of current cores with room
/// for the operands (peers.md's arena prototype used the same).
pub(crate) const SLOT: usize = 128 << 10;

/// How near two ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Locality {
    /// In one process.
    SameProcess,
    /// On one host, where memory can be shared.
    SameHost,
    /// Reached over the network only.
    Remote,
}

/// Which memory the two ends of a link can lend each other where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lends {
    /// All that the process has.
    Anything,
    /// What is in their regions.
    Regions,
    /// None: payloads are moved.
    Nothing,
}

/// Opens one end of a link.
pub(crate) type Open<L> = fn(&dyn Site) -> Result<Box<L>, Error>;

/// A kind of links: what holds for all of them, and how one is opened.
#[derive(Debug)]
pub(crate) struct LinkKind {
    /// By what name they are chosen, measured and reported.
    pub(crate) class: LinkClass,
    /// The farthest ranks that they join.
    pub(crate) joins: Locality,
    pub(crate) lends: Lends,
    /// Bytes of the largest frame: [`SLOT`] at least.
    pub(crate) max_frame_len: usize,
    /// Whether this machine has what they need. Tried, without a peer.
    pub(crate) probe: fn() -> Result<(), Error>,
    /// The sending end to the peer of a site...
    pub(crate) open_tx: Open<dyn LinkTx>,
    /// ...and the receiving end from it.
    pub(crate) open_rx: Open<dyn LinkRx>,
}

/// Names one link of a process's worlds: both its ends know it, and no other link has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkName {
    pub(crate) world: [u8; 16],
    pub(crate) comm: u64,
    /// Ranks in the world, the sender's first.
    pub(crate) ends: (Rank, Rank),
    pub(crate) channel: u8,
}

/// Where a link is opened: who is at its other end, and by what the two can meet. A kind takes what it needs.
pub(crate) trait Site {
    /// The rank at the other end, in the communicator.
    fn peer(&self) -> Rank;
    /// The link's name.
    fn name(&self) -> LinkName;
    /// Its ring in the sender's region, where the two share memory.
    fn place(&self) -> Result<Place, Error>;
    /// Whether the peer's process has exited, where it is another one of this host.
    fn exit(&self) -> Option<Exit>;
    /// Dials the peer for this link: the sender does.
    fn dial(&self) -> Dial;
    /// Asks whether the peer has: the receiver does.
    fn accept(&self) -> Accept;
    /// What watches descriptors, and is told that something may go on.
    fn reactor(&self) -> Arc<dyn Reactor>;
    /// The port of a network card that this rank's links over RDMA go through.
    fn card(&self) -> Result<Arc<Card>, Error>;
}

/// Opens links of one communicator.
pub(crate) trait Opener: Send + Sync {
    /// The sending end to a peer on a channel.
    fn open_tx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkTx>, Error>;
    /// The receiving end from a peer on a channel.
    fn open_rx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkRx>, Error>;
    /// Where the link for devices is, to a peer or (`receiving`) from it; none where they are not on one host.
    fn device_place(&self, _peer: Rank, _receiving: bool) -> Result<Option<Place>, Error> {
        Ok(None)
    }
    /// Whether a peer's process has exited, where it is another one of this host and the system can tell.
    fn exit(&self, _peer: Rank) -> Option<Exit> {
        None
    }
}

/// Where a link through memory is: its ring, who is to be woken, and the peer's memory lock if it is in this process.
pub(crate) struct Place {
    pub(crate) region: Arc<Region>,
    pub(crate) ring: u64,
    pub(crate) doorbell: Doorbell,
    pub(crate) memory_lock: Option<MemoryLock>,
}

/// What became of a posted frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Posted {
    /// Copied: the source is free.
    Copied,
    /// Lent: the source must stay as it is until [`LinkTx::released`] counts this frame.
    Held,
}

/// Memory that a rank lends a peer, to read the one and to write the other. Where an operation is in place they are one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loan {
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// At each end.
    pub(crate) bytes: usize,
}

impl Loan {
    /// What names one in a frame: two places and a length.
    pub(crate) const FRAME: usize = size_of::<[u64; 3]>();
}

// SAFETY: two addresses; whoever uses them states why it may.
unsafe impl Send for Loan {}

/// What is known, at one end, of a connection that broke.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Break {
    /// The kind of link.
    pub(crate) kind: String,
    /// The address of the end that noticed.
    pub(crate) at: String,
    /// The address of the other end.
    pub(crate) peer_at: String,
    /// What the system said.
    pub(crate) problem: String,
}

/// The sending end.
pub(crate) trait LinkTx: Send {
    /// Whether a frame can be posted now.
    fn room(&mut self) -> Result<bool, Error>;

    /// Bytes of the largest frame.
    fn max_frame_len(&self) -> usize {
        SLOT
    }

    /// Whether a payload there, beyond [`INLINE`], must be copied to a staging slot: the peer cannot read it.
    fn needs_slot(&self, payload: *const u8, len: usize) -> bool;

    /// Posts a frame of `header.len` bytes at `payload`. Only when `room` just said so.
    ///
    /// # Safety
    /// `payload` is valid for reads of `header.len` bytes, and stays valid and unchanged until the frame is
    /// released or [`LinkTx::revoke`] has returned `true`, unless this returns [`Posted::Copied`].
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error>;

    /// From here on a peer that sleeps is not woken for each frame that is posted, but by [`LinkTx::ring_bell`].
    fn hold_bell(&mut self) {}

    /// Wakes the peer for what was posted since [`LinkTx::hold_bell`], if it sleeps.
    fn ring_bell(&mut self) {}

    /// Whether what was posted and copied reaches the peer without [`LinkTx::released`] being asked. A link that queues
    /// such frames must say no while it has any: nothing else may be outstanding, and then nobody asks.
    fn leaves(&self) -> bool {
        true
    }

    /// Whether the frame that was posted last, from a staging slot, reaches the peer although nobody there reads what came before. If not, the operation
    /// is over only when the frame is released: the peer may never read it.
    fn arrives_unread(&self) -> bool {
        true
    }

    /// Whether the peer can read and write memory there, where it lies.
    fn can_lend(&self, _at: *const u8, _len: usize) -> bool {
        false
    }

    /// Whether the peer can read and write staging slots where they lie.
    fn can_lend_slots(&self) -> bool {
        false
    }

    /// Posts a frame that lends both ends of a loan. Only when `room` just said so, and [`LinkTx::can_lend`] of both, or
    /// they are in a staging slot and [`LinkTx::can_lend_slots`].
    ///
    /// # Safety
    /// Both ends are valid for `loan.bytes`, the output for writes. They stay valid, the input is not written and the
    /// output not touched until the frame is released or [`LinkTx::revoke`] has returned `true`; what the peer
    /// [touches](LinkTx::touches) in another process, until the frame is released or that process has exited.
    unsafe fn lend(&mut self, _header: Header, _loan: Loan) -> Result<(), Error> {
        Err(Error::system("lend memory to a peer", "this link cannot (a bug)"))
    }

    /// Whether the peer has hung up. All it held then counts as released, whatever it has done with it.
    fn has_hung_up(&self) -> bool {
        false
    }

    /// How many frames, since the link was made, have a source that is free again. In order.
    fn released(&mut self) -> Result<u64, Error>;

    /// Takes lent memory back for good; the link is dead afterwards. `true` once the peer cannot be reading
    /// any more; `false`: ask again.
    fn revoke(&mut self) -> bool;

    /// Whether memory there, if it is lent, is a user's that the peer touches where it lies, in another process: there is
    /// no way to stop it, but it says when it has hung up.
    fn touches(&self, _at: *const u8, _len: usize) -> bool {
        false
    }

    /// Of a link between devices: whether the peer's may still be touching what was lent to it.
    fn is_read_elsewhere(&mut self) -> bool {
        false
    }

    /// How the connection beneath broke, if it did and nobody asked since. Whether the peer has died, or closed it in peace,
    /// or lives and knows nothing of it, a link cannot know.
    fn take_break(&mut self) -> Option<Break> {
        None
    }

    /// Whether the peer's process is known to have exited: it touches nothing any more.
    fn has_exited(&self) -> bool {
        false
    }

    /// What tells, when this end is not used any more, whether the peer may still touch what was lent to it. None of links
    /// that lend no memory which outlives them.
    fn lease(&self) -> Option<exit::Lease> {
        None
    }

    /// Whether everything posted has left this process's own memory, and no break is left to be told.
    fn is_flushed(&mut self) -> bool {
        true
    }
}

/// The receiving end.
pub(crate) trait LinkRx: Send {
    /// The oldest frame, if its header is here and `useful` bytes of what is left of it (or all, if less).
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error>;

    /// Releases `bytes` more of the oldest frame; the frame itself once all of it is released (at once, for an
    /// empty one).
    fn release(&mut self, bytes: usize);

    /// As [`LinkTx::hold_bell`], of frames that are released.
    fn hold_bell(&mut self) {}

    /// As [`LinkTx::ring_bell`].
    fn ring_bell(&mut self) {}

    /// What the frame that `peek` has just shown lends. It may be used until it is released,
    /// as long as `peek` goes on to show it: in one process under this rank's memory lock, which the sender tries before it has
    /// its memory back.
    fn borrow(&self) -> Result<Loan, Error> {
        Err(Error::system("use memory that a peer lends", "this link cannot (a bug)"))
    }

    /// As [`LinkTx::take_break`].
    fn take_break(&mut self) -> Option<Break> {
        None
    }

    /// Nothing of this link is read any more, now or ever: the sender has all its memory back.
    fn hang_up(&mut self) {}

    /// Stops what the link writes by itself, for good; the link is dead afterwards. `true` once nothing is written any more
    /// to what [`LinkRx::receive_into`] was given; `false`: ask again. As [`LinkTx::revoke`] of what is read.
    fn revoke(&mut self) -> bool {
        true
    }

    /// Of a link that was revoked and may still write: what tells when it does not any more, also when this end is gone. `None`:
    /// nothing can tell.
    fn writes_until(&self) -> Option<exit::IsOver> {
        None
    }

    /// Whether the payload is better received with [`LinkRx::receive_into`] than read where it lies: it is not in
    /// memory yet.
    fn is_byte_stream(&self) -> bool {
        false
    }

    /// Receives up to `max` bytes of the oldest frame's rest straight into `dst`, and releases them. Returns how
    /// many, a multiple of `unit`. Only where [`LinkRx::is_byte_stream`].
    ///
    /// Until all `max` bytes were returned, what is behind those that were is the link's: a part of a unit may lie there
    /// already, and a device may go on writing there when this has returned. The next use of the frame is a call that goes on
    /// where this one has ended, with as much room at least; or the link is [revoked](LinkRx::revoke).
    ///
    /// # Safety
    /// `dst` is valid for writes of `max` bytes, a multiple of `unit`. It stays so, and nobody else touches it, until so many
    /// bytes were returned, or `revoke` has returned `true`, or what [`LinkRx::writes_until`] gave says that it is over.
    unsafe fn receive_into(&mut self, _dst: *mut u8, _max: usize, _unit: usize) -> Result<usize, Error> {
        Ok(0)
    }
}

/// A frame at the head of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    /// The part not yet released.
    pub(crate) data: *const u8,
    /// How many bytes of it can be read now.
    pub(crate) ready: usize,
    /// Bytes already released.
    pub(crate) done: usize,
}

impl Frame {
    /// So many bytes are released. Whether that was all of it.
    pub(crate) fn advance(&mut self, bytes: usize) -> bool {
        self.done += bytes;
        self.data = self.data.wrapping_add(bytes);
        self.ready = self.ready.saturating_sub(bytes);
        self.ready == 0
    }
}

/// What of a descriptor wakes the progress thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Readable,
    Writable,
}

/// What has news that no descriptor tells of: a device whose completions must be looked at.
pub(crate) trait Poller: Send + Sync {
    /// Looks for news; whether there is any. Neither blocks nor registers another one.
    fn poll(&self) -> bool;
}

/// What the progress thread reads itself when a descriptor has become readable.
pub(crate) trait Source: Send + Sync {
    /// Takes all that the descriptor has to tell, which may be nothing. Does not block.
    fn read(&self);
}

/// Where links say what the progress thread, while it sleeps, is to be woken by.
pub(crate) trait Reactor: Send + Sync {
    /// Wakes the progress thread whenever this descriptor becomes readable or writable: each time that it changes, not for as long as it
    /// is. It is watched until all descriptors of what it stands for are closed, also those of other processes.
    fn watch(&self, fd: BorrowedFd<'_>, interest: Interest) -> Result<(), Error>;
    /// Has the progress thread call [`Source::read`] when this descriptor has become readable, as soon as it sleeps or was about to. `source` is kept by its
    /// owner: once that has dropped it, nothing is called any more.
    fn listen(&self, fd: BorrowedFd<'_>, source: Weak<dyn Source>) -> Result<(), Error>;
    /// From now on this is asked in each pass of the progress thread over work that only the progress thread looks after, and then the progress thread sleeps for
    /// microseconds only. It ends when nobody else has the poller any more.
    #[cfg_attr(not(any(test, feature = "testing")), allow(dead_code))] // So far by a link for tests alone: `testing/late.rs`.
    fn ask(&self, poller: Weak<dyn Poller>);
    /// Wakes the progress thread now.
    fn kick(&self);
}

/// Where nobody sleeps: in tests that drive a link themselves.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) struct NoReactor;

#[cfg(any(test, feature = "fuzzing"))]
impl Reactor for NoReactor {
    fn watch(&self, _: BorrowedFd<'_>, _: Interest) -> Result<(), Error> {
        Ok(())
    }
    fn listen(&self, _: BorrowedFd<'_>, _: Weak<dyn Source>) -> Result<(), Error> {
        Ok(())
    }
    fn ask(&self, _: Weak<dyn Poller>) {}
    fn kick(&self) {}
}

impl Frame {
    pub(crate) fn signature(&self) -> Signature {
        self.header.signature
    }
}
