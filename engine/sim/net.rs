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

/// The most frames that a link holds, posted and not yet released: as many as the ring of a real link.
const WINDOW: u64 = crate::link::ring::CELLS;

/// Picoseconds: a byte at 1 TB/s takes one.
pub(super) type Time = u64;

pub(super) fn time(seconds: f64) -> Time {
    (seconds * 1e12) as Time
}

/// What happens at an [`Event`]: something reaches one rank from another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// The first byte of a frame has reached the receiver's port. The frame comes in when that port is free.
    AtPort,
    /// All of a frame has arrived, or the sender hears that one was released.
    News,
}

/// The time, the order among events of one time, what happens, the rank that it reaches, and the rank that it comes from.
type Event = Reverse<(Time, u64, What, u32, u32)>;

/// The arrival time of a frame whose arrival is not known yet.
const COMING: Time = Time::MAX;
/// The end of virtual time, after 213 days: what would happen later happens at this time.
pub(super) const END: Time = COMING - 1;

/// The time `takes` after `at`, but at most [`END`].
fn later(at: Time, takes: Time) -> Time {
    at.saturating_add(takes).min(END)
}

/// A frame on its way.
#[derive(Clone, Copy)]
struct InFlight {
    /// When all of it has arrived, or [`COMING`].
    arrives: Time,
    header: Header,
    /// Bytes of the memory that it lends; 0 if it carries data.
    lends: usize,
}

/// Frames of one link, in order.
#[derive(Default)]
struct Wire {
    frames: VecDeque<InFlight>,
    /// How many of `frames`, from the front, have a known arrival time.
    landed: usize,
    /// When the last frame posted reaches the receiver's port.
    last: Time,
    posted: u64,
    /// When the sender learns of each frame that the receiver has released. Frames of which it has learnt are counted in `known`, and not kept here.
    released: VecDeque<Time>,
    known: u64,
}

/// Until when a rank's port to the network is busy, in each direction.
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
    /// Picoseconds to fetch a byte that another rank has lent, on top of `work_per_byte`.
    fetch_per_byte: f64,
    /// A rank's work for each frame; `ends`: for each byte of it, at the sender and at the receiver.
    frame: Time,
    ends: [f64; 2],
    /// By host: when each of its cores is free. Empty if each rank has a core of its own. `per_host`: the ranks of a host.
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
                // The generator would never leave 0.
                random: if network.seed == 0 { 0x9e37_79b9_7f4a_7c15 } else { network.seed },
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
                // No more than `n` cores of a host are ever busy.
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

    /// Moves the rank's clock forward to `at`, unless it is later already. Returns the clock's time.
    pub(super) fn reach(&self, rank: Rank, at: Time) -> Time {
        let now = self.clock(rank).max(at);
        self.clocks[rank].store(now, Ordering::Relaxed);
        now
    }

    pub(super) fn at(&self, rank: Rank) -> Time {
        self.clock(rank)
    }

    /// A rank works for `takes` picoseconds, as soon as a core of its host is free.
    fn work(&self, rank: Rank, takes: f64) {
        let (now, takes) = (self.clock(rank), (takes * self.slowness(rank)) as Time);
        if takes == 0 {
            return;
        }
        let mut cores = self.cores.lock();
        // Of the free cores the one that became free last, so that a rank that goes on stays on its core; else the first to become free.
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

    /// What a frame costs the rank at one end of its link (0: the sender, 1: the receiver).
    fn handle(&self, rank: Rank, end: usize, header: &Header) {
        self.work(rank, self.frame as f64 + f64::from(header.len) * self.ends[end]);
    }

    /// The next news: when it comes, which rank it reaches, and from which rank.
    pub(super) fn next(&self) -> Option<(Time, Rank, Rank)> {
        let mut state = self.state.lock();
        loop {
            let Reverse((at, _, what, to, from)) = state.events.pop()?;
            let (to, from) = (to as Rank, from as Rank);
            if what == What::News {
                return Some((at, to, from));
            }
            // A port takes frames in the order in which they reach it.
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

    /// Frames sent, and how often a frame was lost and sent again.
    pub(super) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.frames, state.lost)
    }

    fn slowness(&self, rank: Rank) -> f64 {
        self.slow.map_or(1.0, |(slow, factor)| if slow == rank { factor } else { 1.0 })
    }

    /// Sends a frame when the sender's port is free. The frame reaches the receiver's port after the latency, and comes in when that
    /// port is free. Each of the two ports is busy for as long as the frame's bytes take.
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
        // Frames of a link arrive in order: one that was lost holds up those behind it.
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

    /// How many frames the sender, at its clock's time, knows to be released, and how many it has posted.
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

/// Counts a rank's work on its clock.
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
        // As if a socket had taken the payload. The link's credit (`room`) bounds how many frames are on their way.
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
