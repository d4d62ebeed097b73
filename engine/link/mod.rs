//! Links carry frames between two ranks of one communicator by lending memory.
//!
//! A link is **simplex**: a [`LinkTx`] at the sender, a [`LinkRx`] at the receiver, first in, first out. The
//! sender *posts* a frame whose payload stays where it is ([`Posted::Held`]) until the receiver has released
//! it, or is copied at once ([`Posted::Copied`]). The receiver *peeks* at the oldest frame, reads the payload
//! where it lies, and *releases* it, in parts if it likes. On one host a frame may also *lend* the receiver memory to read
//! and to write, until it is released ([`LinkTx::lend`]). Nothing here blocks.
//!
//! [`kinds`] lists the kinds of links that carry memory of the host. A new kind is a new file of this folder, and a line in that list.
//!
//! | link | payload lies in | credit |
//! |---|---|---|
//! | same process | the sender's own buffer, or a staging slot | ring cells, per communicator and peer |
//! | shared-memory arena | a staging slot of the sender's region | ring cells, per communicator and peer |
//! | GPU peer | the sender's device memory | ring cells, per communicator and peer |
//! | TCP | the socket, then the receiver's window | the connection's window, per communicator and peer |
//! | RDMA | a staging slot of the sender's region, or a buffer from `alloc`; then a slot of the receiver's area, or the place where it belongs in the receiver's own buffer from `alloc` | cells and slots of that area, per communicator and peer |

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

/// Payloads of at most this many bytes travel inside the ring's cell, beside the header.
pub(crate) const INLINE: usize = 192;
/// Bytes of a shared staging slot, and of the largest frame in shared memory. Two slots of 128 KB fit the L2 cache of current cores, with
/// room for the operands.
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

/// Which memory a rank can lend the peer at the other end of a link, which then uses it in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lends {
    /// Any memory of the process.
    Anything,
    /// What is in the ranks' regions.
    Regions,
    /// No memory: payloads are copied to the peer.
    Nothing,
}

/// Opens one end of a link.
pub(crate) type Open<L> = fn(&dyn Site) -> Result<Box<L>, Error>;

/// A kind of links: what holds for all links of the kind, and how one is opened.
#[derive(Debug)]
pub(crate) struct LinkKind {
    /// The name by which links of this kind are chosen, measured and reported.
    pub(crate) class: LinkClass,
    /// How far apart the ranks may be that these links join.
    pub(crate) joins: Locality,
    pub(crate) lends: Lends,
    /// Bytes of the largest frame: [`SLOT`] at least.
    pub(crate) max_frame_len: usize,
    /// Tries, without a peer, whether this machine has what these links need.
    pub(crate) probe: fn() -> Result<(), Error>,
    /// Opens the sending end of a link to a site's peer.
    pub(crate) open_tx: Open<dyn LinkTx>,
    /// Opens the receiving end of a link from a site's peer.
    pub(crate) open_rx: Open<dyn LinkRx>,
}

/// The name of one link of a process's worlds: both ends of the link know the name, and no other link has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkName {
    pub(crate) world: [u8; 16],
    pub(crate) comm: u64,
    /// Ranks in the world, the sender's first.
    pub(crate) ends: (Rank, Rank),
    pub(crate) channel: u8,
}

/// What a link is opened with: who is at its other end, and the ways to reach that rank. Each kind of links uses the ways that it needs.
pub(crate) trait Site {
    /// The rank, in the communicator, of the link's other end.
    fn peer(&self) -> Rank;
    /// The link's name.
    fn name(&self) -> LinkName;
    /// The link's ring in the sender's region; an error if the two ranks share no memory.
    fn place(&self) -> Result<Place, Error>;
    /// What tells whether the peer's process has exited, if that is another process of this host and the system can tell.
    fn exit(&self) -> Option<Exit>;
    /// The function that dials the peer for this link. Only the sending end calls it.
    fn dial(&self) -> Dial;
    /// The function that takes the connection that the peer has dialled, once it has come. Only the receiving end calls it.
    fn accept(&self) -> Accept;
    /// The reactor that watches the link's descriptors. The link also [kicks](Reactor::kick) it when the link can go on.
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
    /// The place of the link for devices to a peer, or (`receiving`) of the one from that peer; `None` if the two ranks share no memory.
    fn device_place(&self, _peer: Rank, _receiving: bool) -> Result<Option<Place>, Error> {
        Ok(None)
    }
    /// What tells whether a peer's process has exited, if that is another process of this host and the system can tell.
    fn exit(&self, _peer: Rank) -> Option<Exit> {
        None
    }
}

/// Where a link through memory is: its ring, the doorbell that wakes the peer, and the peer's memory lock if the peer is in this process.
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

/// Memory that a rank lends a peer: the peer reads `input` and writes `output`. For an operation in place, the two are the same memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loan {
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// Bytes of `input`, and of `output`.
    pub(crate) bytes: usize,
}

impl Loan {
    /// Bytes of payload of the frame that names a loan: the places of its input and its output, and its length.
    pub(crate) const FRAME: usize = size_of::<[u64; 3]>();
    /// The number of a loan among the messages of its part (the low 16 bits of a header's `message`): no plan sends so many messages.
    pub(crate) const MESSAGE: u32 = 0xffff;
}

// SAFETY: two addresses and a length, not tied to a thread; whoever dereferences them states why that is sound.
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

    /// Whether a payload of more than [`INLINE`] bytes must be copied to a staging slot first, because the peer cannot read it where it lies.
    fn needs_slot(&self, payload: *const u8, len: usize) -> bool;

    /// Posts a frame with the `header.len` bytes at `payload`. To be called only after `room` has returned `true`. A link between hosts always
    /// copies a payload of at most [`INLINE`] bytes.
    ///
    /// # Safety
    /// `payload` is valid for reads of `header.len` bytes, and stays valid and unchanged until the frame is
    /// released or [`LinkTx::revoke`] has returned `true`, unless this returns [`Posted::Copied`].
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error>;

    /// As [`LinkTx::post`], for a payload that the receiver is expected to copy, and not to combine with other operands. A link whose receiver
    /// can fetch the payload by itself may leave it where it is.
    ///
    /// # Safety
    /// As there.
    unsafe fn post_to_copy(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.post(header, payload) }
    }

    /// From here on, posting a frame does not wake a peer that sleeps; [`LinkTx::ring_bell`] does, once for all frames.
    fn hold_bell(&mut self) {}

    /// Wakes the peer for what was posted since [`LinkTx::hold_bell`], if it sleeps.
    fn ring_bell(&mut self) {}

    /// Whether frames whose payload was copied reach the peer even if nobody calls [`LinkTx::released`]. A link that queues such frames must
    /// return `false` while it has any: the caller then goes on calling `released`, which sends them.
    fn leaves(&self) -> bool {
        true
    }

    /// Whether the frame that was posted last, from a staging slot, reaches the peer's memory even if the peer reads nothing meanwhile. If not,
    /// the sender's operation ends only when the frame is released: the frame moves only as the peer reads, and the peer may never read.
    fn arrives_unread(&self) -> bool {
        true
    }

    /// Whether the peer can read and write this memory in place.
    fn can_lend(&self, _at: *const u8, _len: usize) -> bool {
        false
    }

    /// Whether the peer can read and write staging slots in place.
    fn can_lend_slots(&self) -> bool {
        false
    }

    /// Posts a frame that lends a loan's input and output. To be called only after `room` has returned `true`, and only if
    /// [`LinkTx::can_lend`] holds for both, or both are in a staging slot and [`LinkTx::can_lend_slots`] holds.
    ///
    /// # Safety
    /// `loan.input` and `loan.output` are valid for `loan.bytes`, the output for writes. Both stay valid, the input is not written and the
    /// output not touched at this end, until the frame is released or [`LinkTx::revoke`] has returned `true`. For memory that a peer
    /// [touches](LinkTx::touches) in another process, that holds until the frame is released or that process has exited.
    unsafe fn lend(&mut self, _header: Header, _loan: Loan) -> Result<(), Error> {
        Err(Error::system("lend memory to a peer", "this link cannot (a bug)"))
    }

    /// Whether the peer has hung up. All frames that it held then count as released, whether or not it has used them.
    fn has_hung_up(&self) -> bool {
        false
    }

    /// How many frames, of those posted since the link was made, have a source that is free again. Sources become free in order.
    fn released(&mut self) -> Result<u64, Error>;

    /// Takes lent memory back for good; the link is dead afterwards. `true` once the peer cannot be reading
    /// any more; `false`: ask again.
    fn revoke(&mut self) -> bool;

    /// Whether this memory is a user's buffer which, once lent, a peer in another process or this rank's network card touches in place. Nothing
    /// can stop such a peer, but the peer says when it has hung up; the [lease](LinkTx::lease) tells when a card is done.
    fn touches(&self, _at: *const u8, _len: usize) -> bool {
        false
    }

    /// For a link between devices: whether the peer's device may still be touching what was lent to it.
    fn is_read_elsewhere(&mut self) -> bool {
        false
    }

    /// How the connection under the link broke, if it did; each break is returned once. A link cannot know whether the peer has died, has
    /// closed the connection in peace, or lives and knows nothing of the break.
    fn take_break(&mut self) -> Option<Break> {
        None
    }

    /// Whether the peer's process is known to have exited: it touches nothing any more.
    fn has_exited(&self) -> bool {
        false
    }

    /// The lease by which the caller learns, after it has stopped using this end, whether the peer (or a network card) may still touch what
    /// this end lent. `None` for links that lend nothing for longer than they live.
    fn lease(&self) -> Option<exit::Lease> {
        None
    }

    /// Whether this end has nothing posted that it must still send by itself, and no break that [`LinkTx::take_break`] has not returned yet.
    fn is_flushed(&mut self) -> bool {
        true
    }
}

/// The receiving end.
pub(crate) trait LinkRx: Send {
    /// The oldest frame, if its header has come and so have at least `useful` of its unreleased bytes (all of them, if they are fewer).
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error>;

    /// Releases `bytes` more of the oldest frame. The frame itself is released with its last byte; an empty frame, by the first
    /// call.
    fn release(&mut self, bytes: usize);

    /// As [`LinkTx::hold_bell`], for releasing frames.
    fn hold_bell(&mut self) {}

    /// As [`LinkTx::ring_bell`].
    fn ring_bell(&mut self) {}

    /// The memory lent by the frame that `peek` has just shown. It may be used until the frame is released, as long as `peek` goes on to
    /// show the frame. If the sender is in this process, it may be used only under this rank's memory lock: a sender that takes its memory
    /// back ([`LinkTx::revoke`]) tries that lock.
    fn borrow(&self) -> Result<Loan, Error> {
        Err(Error::system("use memory that a peer lends", "this link cannot (a bug)"))
    }

    /// As [`LinkTx::take_break`].
    fn take_break(&mut self) -> Option<Break> {
        None
    }

    /// Ends reading for good: the caller uses nothing of the link any more. A link through a ring tells the sender that all its memory is free.
    fn hang_up(&mut self) {}

    /// Whether the sender has been told of each release that one of the sender's operations waits for. A link that tells releases by messages of
    /// its own also returns `false` while [`LinkRx::take_break`] has a break to return.
    fn is_flushed(&mut self) -> bool {
        true
    }

    /// Stops for good what the link writes by itself; the link is dead afterwards. `true` once nothing is written any more to the memory
    /// that [`LinkRx::receive_into`] was given; `false`: ask again. ([`LinkTx::revoke`] does the same for memory that a peer reads.)
    fn revoke(&mut self) -> bool {
        true
    }

    /// For a revoked link that may still write: what tells when it writes no more, even after this end was dropped. `None`: nothing can
    /// tell.
    fn writes_until(&self) -> Option<exit::IsOver> {
        None
    }

    /// Whether the oldest frame's payload is better received with [`LinkRx::receive_into`] than read where it lies, because it is not in
    /// memory yet.
    fn is_byte_stream(&mut self) -> bool {
        false
    }

    /// Receives up to `max` of the bytes of the oldest frame that are not released yet, straight into `dst`, and releases them. Returns how many:
    /// a multiple of `unit`. To be called only if [`LinkRx::is_byte_stream`]. `max` may be more than is left of the frame: then the room behind
    /// this frame's bytes is for the payloads of the message's next frames.
    ///
    /// Until calls have returned all `max` bytes, the room after the returned ones is the link's: a part of a unit may lie there already, and
    /// a device may go on writing there after this call. The next use of the frame must be a call that goes on where this one has ended,
    /// with at least the room that was left; otherwise the link must be [revoked](LinkRx::revoke).
    ///
    /// # Safety
    /// `dst` has `max` bytes, a multiple of `unit`, that are initialised and valid for reads and writes. They stay so, and nobody else
    /// touches them, until calls have returned `max` bytes, or `revoke` has returned `true`, or what [`LinkRx::writes_until`] gave says that
    /// writing is over.
    unsafe fn receive_into(&mut self, _dst: *mut u8, _max: usize, _unit: usize) -> Result<usize, Error> {
        Ok(0)
    }
}

/// A frame at the head of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    /// The first byte that is not released yet; null if none of the rest is in memory.
    pub(crate) data: *const u8,
    /// How many bytes can be read from there now.
    pub(crate) ready: usize,
    /// Bytes already released.
    pub(crate) done: usize,
}

impl Frame {
    /// Whether the frame is all of this message, from the first element on, and all of its `bytes` can be read and none is released.
    pub(crate) fn is_whole(&self, message: u32, bytes: usize) -> bool {
        let header = &self.header;
        header.message == message
            && header.offset == 0
            && header.len as usize == bytes
            && self.ready == bytes
            && self.done == 0
    }

    /// Counts `bytes` as released, in a frame all of whose bytes can be read. Returns whether the whole frame is released.
    pub(crate) fn advance(&mut self, bytes: usize) -> bool {
        self.done += bytes;
        self.data = self.data.wrapping_add(bytes);
        self.ready = self.ready.saturating_sub(bytes);
        self.ready == 0
    }
}

/// Which change of a descriptor wakes the progress thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Readable,
    Writable,
}

/// A source of news that no descriptor announces, such as a device whose completions must be polled.
pub(crate) trait Poller: Send + Sync {
    /// Looks for news, and returns whether there is any. It must neither block nor register another poller.
    fn poll(&self) -> bool;
}

/// What reads a descriptor: the progress thread calls it when the descriptor has become readable.
pub(crate) trait Source: Send + Sync {
    /// Takes all that the descriptor has to tell, which may be nothing. Must not block.
    fn read(&self);
}

/// Where links register what is to wake the progress thread while it sleeps.
pub(crate) trait Reactor: Send + Sync {
    /// Wakes the progress thread each time that this descriptor becomes readable or writable (edge-triggered). It is watched until all
    /// descriptors of the same open file are closed, also those of other processes.
    fn watch(&self, fd: BorrowedFd<'_>, interest: Interest) -> Result<(), Error>;
    /// Has the progress thread call [`Source::read`] when this descriptor has become readable: at once if the thread sleeps on its descriptors,
    /// otherwise when it next does. The owner keeps `source` alive; once the owner has dropped it, nothing is called any more.
    fn listen(&self, fd: BorrowedFd<'_>, source: Weak<dyn Source>) -> Result<(), Error>;
    /// From now on the progress thread polls `poller` in each pass that finds work waiting which no other thread drives, and sleeps only for
    /// microseconds between such passes. That ends when the poller's owners have dropped it.
    #[cfg_attr(not(any(test, feature = "testing")), allow(dead_code))] // So far only a link for tests calls it: `testing/late.rs`.
    fn ask(&self, poller: Weak<dyn Poller>);
    /// Wakes the progress thread now.
    fn kick(&self);
}

/// A reactor that does nothing, for tests that drive a link themselves: no thread sleeps there.
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
