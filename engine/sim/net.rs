//! A network in virtual time: links between simulated ranks, and the events on them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Network;
use crate::error::Error;
use crate::exec::{self, Opener};
use crate::link::{Frame, Header, LinkRx, LinkTx, Loan, Posted};
use crate::types::Rank;

/// Frames that a link holds: posted, and not yet released (as many as the ring of a real one).
const WINDOW: u64 = crate::link::ring::CELLS;

/// Picoseconds: a byte at 1 TB/s is one.
pub(super) type Time = u64;

pub(super) fn time(seconds: f64) -> Time {
    (seconds * 1e12) as Time
}

/// Something happens between two ranks (to the first, from the second).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A frame is at the receiver's port, and comes in when that is free.
    AtPort,
    /// A frame is there whole, or the room of one that was released.
    News,
}

/// When, in which order, what, to whom, from whom.
type Event = Reverse<(Time, u64, What, u32, u32)>;

/// Not there yet.
const COMING: Time = Time::MAX;
/// The end of virtual time, after 213 days: what would come later comes now.
pub(super) const END: Time = COMING - 1;

/// `takes` later, or the end of time.
fn later(at: Time, takes: Time) -> Time {
    at.saturating_add(takes).min(END)
}

/// A frame on its way.
#[derive(Clone, Copy)]
struct InFlight {
    /// When it is there, or [`COMING`].
    arrives: Time,
    header: Header,
    /// Bytes that it lends.
    lends: usize,
}

/// Frames of one link, in order.
#[derive(Default)]
struct Wire {
    frames: VecDeque<InFlight>,
    /// Of them, those whose arrival is known.
    landed: usize,
    /// When the last one is at the receiver's port.
    last: Time,
    posted: u64,
    /// Released by the receiver, with the time at which the sender knows.
    released: VecDeque<Time>,
    known: u64,
}

/// What a rank's port to the network is busy with, each way.
#[derive(Clone, Copy, Default)]
struct Busy {
    out: Time,
    into: Time,
}

struct State {
    /// By sender, then by receiver; made when first used.
    wires: Vec<Option<Box<Wire>>>,
    busy: Vec<Busy>,
    events: BinaryHeap<Event>,
    order: u64,
    random: u64,
    frames: u64,
    lost: u64,
}

/// The network, and the clocks of its ranks.
pub(super) struct Net {
    state: Mutex<State>,
    clocks: Vec<AtomicU64>,
    alpha: Time,
    /// Picoseconds a byte.
    per_byte: f64,
    work_per_byte: f64,
    /// What a byte that another rank has lent costs beside that.
    fetch_per_byte: f64,
    /// A rank's work: for a frame, and for each of its bytes, at the sender and at the receiver.
    frame: Time,
    ends: [f64; 2],
    /// When each core of each host is free, and the ranks of a host; none where each rank has a core.
    cores: Mutex<Vec<Vec<Time>>>,
    per_host: usize,
    loss: f64,
    retry: Time,
    slow: Option<(Rank, f64)>,
}

impl Net {
    pub(super) fn new(n: usize, network: &Network) -> Arc<Net> {
        Arc::new(Net {
            state: Mutex::new(State {
                wires: (0..n * n).map(|_| None).collect(),
                busy: vec![Busy::default(); n],
                events: BinaryHeap::new(),
                order: 0,
                random: network.seed | 1,
                frames: 0,
                lost: 0,
            }),
            clocks: (0..n).map(|_| AtomicU64::new(0)).collect(),
            alpha: time(network.latency.as_secs_f64()),
            per_byte: 1e12 / network.bandwidth,
            work_per_byte: network.memory.map_or(0.0, |memory| 1e12 / memory),
            fetch_per_byte: network.loans.and_then(|loans| loans.fetch).map_or(0.0, |rate| 1e12 / rate),
            frame: time(network.frame.as_secs_f64()),
            ends: [network.send, network.receive].map(|rate| rate.map_or(0.0, |rate| 1e12 / rate)),
            cores: Mutex::new(network.cores.map_or(Vec::new(), |cores| {
                // More cores than ranks are idle.
                vec![vec![0; cores.min(n)]; network.per_host.map_or(1, |per| n.div_ceil(per))]
            })),
            per_host: network.per_host.unwrap_or(n),
            loss: network.loss,
            retry: time(network.retry.as_secs_f64()),
            slow: network.straggler,
        })
    }

    fn clock(&self, rank: Rank) -> Time {
        self.clocks[rank].load(Ordering::Relaxed)
    }

    /// The rank's clock goes on to `at`, or is further already. Returns where it is.
    pub(super) fn reach(&self, rank: Rank, at: Time) -> Time {
        let now = self.clock(rank).max(at);
        self.clocks[rank].store(now, Ordering::Relaxed);
        now
    }

    pub(super) fn at(&self, rank: Rank) -> Time {
        self.clock(rank)
    }

    /// A rank works, on a core of its host's that is free, or as soon as one is.
    fn work(&self, rank: Rank, takes: f64) {
        let (now, takes) = (self.clock(rank), (takes * self.slowness(rank)) as Time);
        if takes == 0 {
            return;
        }
        let mut cores = self.cores.lock();
        // The one that was busy last: who goes on stays on its core, and leaves the others to others.
        let core = cores.get_mut(rank / self.per_host).and_then(|cores| {
            cores
                .iter_mut()
                .min_by_key(|free| (**free > now, if **free > now { **free } else { now - **free }))
        });
        let start = core.as_ref().map_or(now, |free| now.max(**free));
        if let Some(core) = core {
            *core = later(start, takes);
        }
        self.reach(rank, later(start, takes));
    }

    /// What a frame costs the rank at an end of its link.
    fn handle(&self, rank: Rank, end: usize, header: &Header) {
        self.work(rank, self.frame as f64 + f64::from(header.len) * self.ends[end]);
    }

    /// The next news: whom it reaches, from whom, and when.
    pub(super) fn next(&self) -> Option<(Time, Rank, Rank)> {
        let mut state = self.state.lock();
        loop {
            let Reverse((at, _, what, to, from)) = state.events.pop()?;
            let (to, from) = (to as Rank, from as Rank);
            if what == What::News {
                return Some((at, to, from));
            }
            // Ports take frames in the order in which they come to them.
            let index = from * self.clocks.len() + to;
            let header = state.wires[index].as_ref().and_then(|wire| wire.frames.get(wire.landed))?.header;
            let takes = self.takes(from, &header).max(self.takes(to, &header));
            let arrives = later(at.max(state.busy[to].into), takes);
            state.busy[to].into = arrives;
            if let Some(wire) = &mut state.wires[index] {
                let landed = wire.landed;
                wire.frames[landed].arrives = arrives;
                wire.landed += 1;
            }
            state.announce(arrives, What::News, to, from);
        }
    }

    /// How long a rank's port is busy with a frame.
    fn takes(&self, rank: Rank, header: &Header) -> Time {
        let bytes = f64::from(header.len) + crate::link::HEADER_BYTES as f64;
        (bytes * self.per_byte * self.slowness(rank)) as Time
    }

    /// Frames sent, and how many of them had to be sent again.
    pub(super) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.frames, state.lost)
    }

    fn slowness(&self, rank: Rank) -> f64 {
        self.slow.map_or(1.0, |(slow, factor)| if slow == rank { factor } else { 1.0 })
    }

    /// A frame leaves when the sender's port is free, is on its way, and comes in when the receiver's port is free: both
    /// are busy for its length, at the same time but for the latency.
    fn post(&self, from: Rank, to: Rank, header: Header, lends: usize) {
        self.handle(from, 0, &header);
        let (now, takes) = (self.clock(from), self.takes(from, &header));
        let mut state = self.state.lock();
        state.frames += 1;
        let start = now.max(state.busy[from].out);
        state.busy[from].out = later(start, takes);
        let mut first = later(start, self.alpha);
        while self.loss > 0.0 && state.chance() < self.loss {
            state.lost += 1;
            first = later(later(first, self.retry), takes);
        }
        let wire = state.wires[from * self.clocks.len() + to].get_or_insert_default();
        // In order: what was lost holds up what follows.
        wire.last = wire.last.max(first);
        first = wire.last;
        wire.frames.push_back(InFlight { arrives: COMING, header, lends });
        wire.posted += 1;
        state.announce(first, What::AtPort, to, from);
    }

    fn release(&self, from: Rank, to: Rank) {
        let mut at = later(self.clock(to), self.alpha);
        let mut state = self.state.lock();
        if let Some(wire) = &mut state.wires[from * self.clocks.len() + to] {
            wire.frames.pop_front();
            wire.landed = wire.landed.saturating_sub(1);
            at = at.max(wire.released.back().copied().unwrap_or(0));
            wire.released.push_back(at);
        }
        state.announce(at, What::News, from, to);
    }

    /// Frames released so far, as the sender knows at its clock; and frames posted.
    fn known(&self, from: Rank, to: Rank) -> (u64, u64) {
        let now = self.clock(from);
        let mut state = self.state.lock();
        let Some(wire) = &mut state.wires[from * self.clocks.len() + to] else { return (0, 0) };
        while wire.released.front().is_some_and(|at| *at <= now) {
            wire.released.pop_front();
            wire.known += 1;
        }
        (wire.known, wire.posted)
    }

    fn head(&self, from: Rank, to: Rank) -> Option<InFlight> {
        let now = self.clock(to);
        let state = self.state.lock();
        let head = *state.wires[from * self.clocks.len() + to].as_ref()?.frames.front()?;
        (head.arrives <= now).then_some(head)
    }
}

impl State {
    fn announce(&mut self, at: Time, what: What, rank: Rank, peer: Rank) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, what, rank as u32, peer as u32)));
    }

    /// A number in `0.0..1.0` (xorshift64*).
    fn chance(&mut self) -> f64 {
        let mut x = self.random;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.random = x;
        (x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A rank's work, on its clock.
pub(super) struct Clock(pub(super) Arc<Net>, pub(super) Rank);

impl exec::Clock for Clock {
    fn touch(&self, bytes: usize) {
        self.0.work(self.1, bytes as f64 * self.0.work_per_byte);
    }

    fn fetch(&self, bytes: usize) {
        self.0.work(self.1, bytes as f64 * self.0.fetch_per_byte);
    }
}

/// Opens a rank's simulated links.
pub(super) struct SimOpener(pub(super) Arc<Net>, pub(super) Rank);

impl Opener for SimOpener {
    fn open_tx(&self, peer: Rank, _: u8) -> Result<Box<dyn LinkTx>, Error> {
        Ok(Box::new(SimTx { net: self.0.clone(), from: self.1, to: peer }))
    }

    fn open_rx(&self, peer: Rank, _: u8) -> Result<Box<dyn LinkRx>, Error> {
        Ok(Box::new(SimRx { net: self.0.clone(), from: peer, to: self.1, done: 0 }))
    }
}

struct SimTx {
    net: Arc<Net>,
    from: Rank,
    to: Rank,
}

impl LinkTx for SimTx {
    fn room(&mut self) -> Result<bool, Error> {
        let (known, posted) = self.net.known(self.from, self.to);
        Ok(posted - known < WINDOW)
    }

    fn needs_slot(&self, _: *const u8, _: usize) -> bool {
        false
    }

    unsafe fn post(&mut self, header: Header, _: *const u8) -> Result<Posted, Error> {
        self.net.post(self.from, self.to, header, 0);
        // As of a socket that takes what it is given: a link's credit bounds how much.
        Ok(Posted::Copied)
    }

    unsafe fn lend(&mut self, header: Header, loan: Loan) -> Result<(), Error> {
        let header = Header { len: Loan::FRAME as u32, ..header };
        self.net.post(self.from, self.to, header, loan.bytes);
        Ok(())
    }

    fn released(&mut self) -> Result<u64, Error> {
        Ok(self.net.known(self.from, self.to).0)
    }

    fn revoke(&mut self) -> bool {
        true
    }
}

struct SimRx {
    net: Arc<Net>,
    from: Rank,
    to: Rank,
    done: usize,
}

impl LinkRx for SimRx {
    fn peek(&mut self, _: usize) -> Result<Option<Frame>, Error> {
        let head = self.net.head(self.from, self.to);
        Ok(head.map(|InFlight { header, .. }| Frame {
            header,
            data: std::ptr::null(),
            ready: header.len as usize - self.done,
            done: self.done,
        }))
    }

    fn borrow(&self) -> Result<Loan, Error> {
        let head = self.net.head(self.from, self.to);
        let bytes = head.map_or(0, |head| head.lends);
        Ok(Loan { input: std::ptr::null(), output: std::ptr::null_mut(), bytes })
    }

    fn release(&mut self, bytes: usize) {
        self.done += bytes;
        let head = self.net.head(self.from, self.to);
        if let Some(head) = head.filter(|head| self.done >= head.header.len as usize) {
            self.done = 0;
            self.net.handle(self.to, 1, &head.header);
            self.net.release(self.from, self.to);
        }
    }
}
