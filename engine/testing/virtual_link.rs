//! Links in virtual time, for tests: frames arrive some time after they were sent, by a clock that a test moves on, and payloads stay where they are
//! in the sender's real memory until they are released. All ranks take turns on one thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::Error;
use crate::link::ring::CELLS;
use crate::link::{Frame, Header, INLINE, LinkRx, LinkTx, Posted};
use crate::types::Rank;

/// What a network in virtual time asks of whoever tells the story.
pub(crate) trait Timeline: Send + Sync {
    fn now(&self) -> Instant;
    /// How long it takes until something that is sent now arrives.
    fn latency(&self) -> Duration;
    /// Something arrives at this time: ranks are to look for it then.
    fn look_at(&self, at: Instant);
    fn log(&self, event: String);
}

/// One way between two ranks, by communicator, sender, receiver (both of the world) and channel.
type Way = (u64, Rank, Rank, u8);

/// All ways between ranks.
pub(crate) struct Network {
    timeline: Arc<dyn Timeline>,
    ways: Mutex<BTreeMap<Way, Arc<Mutex<Wire>>>>,
}

#[derive(Default)]
struct Wire {
    /// Posted, and not released.
    frames: VecDeque<Sent>,
    posted: u64,
    /// When the sender hears of each release, in order.
    releases: VecDeque<Instant>,
    /// Releases that the sender has heard of.
    heard: u64,
    /// When the last frame arrives. Frames that are sent after it do not arrive before.
    last: Option<Instant>,
    revoked: bool,
    hung_up: bool,
}

struct Sent {
    header: Header,
    arrives: Instant,
    payload: Payload,
}

enum Payload {
    Copied(Box<[u8]>),
    /// Where it lies in the sender's memory.
    Lent(*const u8),
}

// SAFETY: the address of memory that the sender keeps as it is until the frame is released or it has revoked the link, after
// which nobody follows the address (`LinkTx::post`).
unsafe impl Send for Payload {}

impl Payload {
    fn at(&self) -> *const u8 {
        match self {
            Payload::Copied(bytes) => bytes.as_ptr(),
            Payload::Lent(at) => *at,
        }
    }
}

impl Network {
    pub(crate) fn new(timeline: Arc<dyn Timeline>) -> Arc<Network> {
        Arc::new(Network { timeline, ways: Mutex::default() })
    }

    fn wire(&self, way: Way) -> Arc<Mutex<Wire>> {
        self.ways.lock().entry(way).or_default().clone()
    }

    pub(crate) fn tx(self: &Arc<Self>, comm: u64, from: Rank, to: Rank, channel: u8) -> Box<dyn LinkTx> {
        let wire = self.wire((comm, from, to, channel));
        Box::new(VirtualTx { network: self.clone(), wire, from, to })
    }

    pub(crate) fn rx(self: &Arc<Self>, comm: u64, from: Rank, to: Rank, channel: u8) -> Box<dyn LinkRx> {
        let wire = self.wire((comm, from, to, channel));
        Box::new(VirtualRx { network: self.clone(), wire, done: 0 })
    }
}

struct VirtualTx {
    network: Arc<Network>,
    wire: Arc<Mutex<Wire>>,
    from: Rank,
    to: Rank,
}

impl LinkTx for VirtualTx {
    fn room(&mut self) -> Result<bool, Error> {
        let released = self.released()?;
        Ok(self.wire.lock().posted - released < CELLS)
    }

    fn needs_slot(&self, _payload: *const u8, _len: usize) -> bool {
        false
    }

    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let (timeline, mut wire) = (&self.network.timeline, self.wire.lock());
        let len = header.len as usize;
        let (payload, posted) = if len <= INLINE {
            let mut bytes = vec![0; len].into_boxed_slice();
            if len > 0 {
                // SAFETY: the caller's promise: `len` bytes to be read; `bytes` has as many and is new.
                unsafe { std::ptr::copy_nonoverlapping(payload, bytes.as_mut_ptr(), len) };
            }
            (Payload::Copied(bytes), Posted::Copied)
        } else {
            (Payload::Lent(payload), Posted::Held)
        };
        let arrives = (timeline.now() + timeline.latency()).max(wire.last.unwrap_or(timeline.now()));
        wire.last = Some(arrives);
        wire.posted += 1;
        wire.frames.push_back(Sent { header, arrives, payload });
        timeline.look_at(arrives);
        let (number, message) = (header.op, header.message);
        timeline.log(format!(
            "rank {} sends {len} B to rank {}: #{number}, message {message}",
            self.from, self.to
        ));
        Ok(posted)
    }

    fn has_hung_up(&self) -> bool {
        self.wire.lock().hung_up
    }

    fn released(&mut self) -> Result<u64, Error> {
        let (now, mut wire) = (self.network.timeline.now(), self.wire.lock());
        while wire.releases.front().is_some_and(|at| *at <= now) {
            wire.releases.pop_front();
            wire.heard += 1;
        }
        Ok(wire.heard)
    }

    /// All ranks take turns: while this one has its turn, nobody reads.
    fn revoke(&mut self) -> bool {
        self.wire.lock().revoked = true;
        true
    }
}

struct VirtualRx {
    network: Arc<Network>,
    wire: Arc<Mutex<Wire>>,
    /// Bytes of the oldest frame that are released.
    done: usize,
}

impl LinkRx for VirtualRx {
    fn peek(&mut self, _useful: usize) -> Result<Option<Frame>, Error> {
        let (timeline, wire) = (&self.network.timeline, self.wire.lock());
        if wire.revoked || wire.hung_up {
            return Ok(None);
        }
        let arrived = wire.frames.front().filter(|sent| sent.arrives <= timeline.now());
        Ok(arrived.map(|sent| Frame {
            header: sent.header,
            data: sent.payload.at().wrapping_add(self.done),
            ready: sent.header.len as usize - self.done,
            done: self.done,
        }))
    }

    fn release(&mut self, bytes: usize) {
        let (timeline, mut wire) = (&self.network.timeline, self.wire.lock());
        self.done += bytes;
        if wire.frames.front().is_some_and(|sent| self.done == sent.header.len as usize) {
            self.done = 0;
            wire.frames.pop_front();
            let heard = timeline.now() + timeline.latency();
            let heard = wire.releases.back().map_or(heard, |last| heard.max(*last));
            wire.releases.push_back(heard);
            timeline.look_at(heard);
        }
    }

    fn hang_up(&mut self) {
        self.wire.lock().hung_up = true;
    }
}
