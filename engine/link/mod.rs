//! Links carry frames between two ranks of one communicator by lending memory.
//!
//! A link is **simplex**: a [`LinkTx`] at the sender, a [`LinkRx`] at the receiver, first in, first out. The
//! sender *posts* a frame whose payload stays where it is ([`Posted::Held`]) until the receiver has released
//! it, or is copied at once ([`Posted::Copied`]). The receiver *peeks* at the oldest frame, reads the payload
//! where it lies, and *releases* it, in parts if it likes. On one host a frame may also *lend* the receiver memory to read
//! and to write, until it is released ([`LinkTx::lend`]). Nothing here blocks.
//!
//! | link | payload lies in | credit |
//! |---|---|---|
//! | same process | the sender's own buffer, or a staging slot | ring cells, per communicator and peer |
//! | shared-memory arena | a staging slot of the sender's region | ring cells, per communicator and peer |
//! | GPU peer | the sender's device memory | ring cells, per communicator and peer |
//! | TCP | the socket, then the receiver's window | the connection's window, per communicator and peer |

pub(crate) mod arena;
mod cells;
pub(crate) mod exit;
pub(crate) mod ipc;
pub(crate) mod layout;
pub(crate) mod local;
pub(crate) mod peer;
pub(crate) mod region;
pub(crate) mod ring;
pub(crate) mod tcp;
#[cfg(test)]
pub(crate) mod virtual_link;
pub(crate) mod waits;
mod wire;
mod words;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::types::Signature;
pub(crate) use wire::{HEADER_BYTES, Header};

/// Payloads up to this travel inside the ring cell, beside the header.
pub(crate) const INLINE: usize = 192;
/// Size of a shared staging slot, and the largest frame in shared memory. 128 KB: two fit the L2 of current cores with room
/// for the operands (peers.md's arena prototype used the same).
pub(crate) const SLOT: usize = 128 << 10;

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
    fn most(&self) -> usize {
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

    /// Whether what was posted and copied reaches the peer without [`LinkTx::released`] being asked. A link that queues
    /// such frames must say no while it has any: nothing else may be outstanding, and then nobody asks.
    fn leaves(&self) -> bool {
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

    /// What the frame that `peek` has just shown lends. It may be used until it is released,
    /// as long as `peek` goes on to show it: in one process under this rank's gate, which the sender tries before it has
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

    /// Whether the payload is better received with [`LinkRx::receive_into`] than read where it lies: it is not in
    /// memory yet.
    fn streams(&self) -> bool {
        false
    }

    /// Receives up to `max` bytes of the oldest frame's rest straight into `dst`, and releases them. Returns how
    /// many, a multiple of `unit`; a part of a unit that has come already lies behind them in `dst`, and is
    /// expected there by the next call. Only where [`LinkRx::streams`].
    ///
    /// # Safety
    /// `dst` is valid for writes of `max` bytes, a multiple of `unit`.
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

/// Where links announce sockets to be watched, and that something may go on.
pub(crate) trait Reactor: Send + Sync {
    /// Wake the lane when this socket becomes readable or writable.
    fn watch(&self, socket: &std::net::TcpStream) -> Result<(), Error>;
    /// Wake the lane now.
    fn kick(&self);
}

impl Frame {
    pub(crate) fn signature(&self) -> Signature {
        self.header.signature
    }
}
