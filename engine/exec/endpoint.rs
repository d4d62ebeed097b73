//! One rank's side of one communicator: submission, the table, and driving what was submitted.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

mod asked;
mod bound;
mod breaks;
mod drain;
mod driven;
mod ending;
mod finish;
mod programs;
mod reuse;
mod submit;
pub(super) mod together;
mod watch;
mod whole;

pub(crate) use reuse::Machines;
pub(crate) use submit::Submission;

use self::asked::Asked;
use self::ending::Endings;
use self::finish::{Backing, Over};
use self::programs::Programs;
use super::Progress;
use super::active::{Active, Pass};
use super::device::{Binding, DeviceOp};
use super::inflight::{Finished, Inflight, Key};
use super::lane::Lane;
use super::operation::Operation;
use super::p2p::{Direction, Message, Messages};
use super::port::{Opener, Port};
use super::whole::BoundWhole;
use crate::error::Error;
use crate::forked;
use crate::link::Break;
use crate::link::local::Gate;
use crate::link::region::Region;
use crate::link::waits::{Point, stop};
use crate::mem::{ErasedBufs, Event};
use crate::plan::Env;
use crate::plan::choices::GroupChoices;
use crate::trace::{Recorder, State};
use crate::types::{Rank, Signature};

/// Signatures remembered, so that a peer's late question can be answered.
const HISTORY: usize = 256;
/// How many of the last calls ranks compare when they close.
const COMPARED: usize = 8;
/// A poll looks so often at least where ranks outnumber cores, for ten times its budget at most.
const FEW_PASSES: u32 = 32;

/// A thread that waits drives for so long without progress; then the lane takes over.
const SPIN: Duration = Duration::from_micros(200);
/// Passes in vain between two looks at the clock.
const LOOK: u32 = 16;
/// And before the core is given away. A pass over memory takes 0.1 us: 16 of them are over in the middle of an operation
/// of 4 KB. Over TCP it is a system call for each peer: on 2 cores 4 ranks took 50 us for 4 B with 4 of them, 56 to 89
/// with 16, 165 with 128; 2 ranks took as long with 4 as with 16.
const YIELD_OVER_MEMORY: u32 = 128;
const YIELD_OVER_TCP: u32 = 4;

/// How long a dead communicator waits for its slots.
const HANG_UP: Duration = Duration::from_secs(1);

/// What the executor tells the other ranks, outside the data path.
pub(crate) trait Control: Send + Sync {
    /// The communicator is dead, for this cause, found here: tells the others.
    fn abort(&self, endpoint: &Endpoint, cause: &Error);
    /// A data connection broke: ask its other end whether it is still a member.
    fn broke(&self, endpoint: &Endpoint, peer: Rank, what: Break);
    /// The communicator dies, for this cause, wherever it was found. Neither blocks nor does I/O: nobody here knows yet.
    fn dies(self: Arc<Self>, endpoint: &Endpoint, cause: &Error);
    /// An operation waits: ask the others what they called.
    fn stalled(&self, endpoint: &Endpoint, number: u64, signature: Signature);
}

pub(crate) struct EndpointConfig {
    pub(crate) comm: u64,
    pub(crate) generation: u32,
    pub(crate) name: String,
    pub(crate) rank: Rank,
    /// World rank of each member.
    pub(crate) members: Vec<Rank>,
    /// The host of each member, numbered from 0 in the order of their first ranks.
    pub(crate) hosts: Vec<u32>,
    /// What the choice of an algorithm depends on, of this group.
    pub(crate) env: Env,
    /// What the tuner's table says of it.
    pub(crate) tuned: GroupChoices,
    pub(crate) region: Arc<Region>,
    pub(crate) gate: Gate,
    pub(crate) opener: Arc<dyn Opener>,
    pub(crate) control: Arc<dyn Control>,
    pub(crate) lane: Arc<Lane>,
    pub(crate) timeout: Duration,
    pub(crate) queue_limit: usize,
    /// Calls are deterministic unless they say otherwise.
    pub(crate) deterministic: bool,
    /// More ranks than cores on this host: give the core away instead of spinning.
    pub(crate) crowded: bool,
    /// Bytes of staging slots that are filled in turn.
    pub(crate) turned: usize,
    /// Results of so many bytes and more are written past the caches.
    pub(crate) streams_from: usize,
}

/// A peer's answer: about which operation, its own last call, when.
type Heard = (u64, Option<u64>, Instant);

type Queued<R> = (Key, R, Option<Event>);

struct Table {
    inflight: Inflight<ErasedBufs, Box<Error>>,
    collectives: VecDeque<Queued<Operation>>,
    messages: VecDeque<Queued<Message>>,
    next: u64,
    /// Next message number by (peer, direction, tag).
    numbers: HashMap<(Rank, Direction, u32), u64>,
    history: VecDeque<Signature>,
    /// What peers asked about operations that we have not called yet.
    asked: Asked,
    closed: bool,
    /// The operations whose memory is to be taken back; those of which it is to be done now; and those of which it is on
    /// its way, since when.
    staged: HashMap<u64, Backing>,
    due: Vec<Backing>,
    backing: Vec<(Instant, Backing)>,
    /// The operations that devices run.
    devices: HashMap<u64, Arc<DeviceOp>>,
    /// Operations that have finished, whose users are to hear of it when no lock is held.
    over: Vec<Over>,
}

impl Table {
    /// What was called as this operation, if that is remembered.
    fn called(&self, number: u64) -> Option<Signature> {
        let first = self.next - self.history.len() as u64;
        self.history.get(number.checked_sub(first)? as usize).copied()
    }
}

struct Run {
    active: Active,
    port: Port,
    /// The links between the ranks' devices, once those are bound.
    devices: Option<Port>,
    /// Collectives that are on a stream, and not over.
    endings: Endings,
    messages: Messages,
    checked: Instant,
    /// Since when this process has not stood still, as far as it was looked at.
    awake: Instant,
    blocked: u32,
    /// Something could not be done. What it was part of goes no further.
    failed: bool,
    /// When everything was failed, once it was.
    drained: Option<Instant>,
    /// When peers were told that nothing of theirs is read any more, and lent memory was taken back.
    revoked: Option<Instant>,
}

/// One rank's side of one communicator.
pub(crate) struct Endpoint {
    pub(crate) config: EndpointConfig,
    table: Mutex<Table>,
    run: Mutex<Run>,
    cause: OnceLock<Error>,
    poisoned: AtomicBool,
    /// Its machines and links were taken out: it has ended.
    hollowed: AtomicBool,
    /// Something is to be done last, now.
    is_due: AtomicBool,
    /// Users are to hear of operations that have finished. Changed under the table's lock.
    is_over: AtomicBool,
    /// The table may hold operations that have not begun. Changed under its lock.
    is_queued: AtomicBool,
    /// On the lane's list.
    enlisted: AtomicBool,
    /// Threads that drive this endpoint themselves right now.
    pub(crate) drivers: AtomicU32,
    /// Blocking waits so far: a thread that has just waited is likely to wait again.
    waits: AtomicU32,
    /// `waits` when the lane last looked.
    waits_seen: AtomicU32,
    deterministic: AtomicBool,
    /// Answers of peers to `stalled`.
    heard: Mutex<Vec<Option<Heard>>>,
    left: Mutex<Vec<bool>>,
    /// Peers that have closed, and how many collectives they had called.
    closing: Mutex<Vec<Option<u64>>>,
    pub(crate) recorder: Arc<Recorder>,
    programs: Mutex<Programs>,
    binding: OnceLock<Arc<Binding>>,
    /// What takes its operations whole, if anything does.
    whole: OnceLock<BoundWhole>,
    /// The byte that barriers pass round. One serves all: collectives of a communicator run one after another.
    token: Box<AtomicU8>,
}

/// What becomes, in a child of a fork, of an operation of its parent's. Its buffer stays where it is: the parent's lane may
/// have been at it.
fn orphaned() -> Option<Finished<ErasedBufs, Box<Error>>> {
    forked::is_forked().then(|| (Err(Box::new(forked::refusal())), None))
}

/// A look at an operation.
#[allow(clippy::large_enum_variant)] // moved once, and only when ready
pub(crate) enum Polled {
    Pending,
    Ready(Finished<ErasedBufs, Box<Error>>),
}

impl Endpoint {
    pub(crate) fn new(config: EndpointConfig) -> Arc<Endpoint> {
        let size = config.members.len();
        let port = |channel| {
            let (region, opener) = (config.region.clone(), config.opener.clone());
            let mut port = Port::new((config.rank, size), channel, region, opener);
            port.turned = config.turned;
            port
        };
        let run = Run {
            active: Active::new(config.comm, config.streams_from).of_rank(&config.region),
            port: port(0),
            devices: None,
            endings: Endings::default(),
            messages: Messages::new(config.comm, config.rank, config.generation, size, port(1)),
            checked: Instant::now(),
            awake: Instant::now(),
            blocked: 0,
            failed: false,
            drained: None,
            revoked: None,
        };
        Endpoint::with(config, run)
    }

    fn with(config: EndpointConfig, run: Run) -> Arc<Endpoint> {
        let size = config.members.len();
        let table = Table {
            inflight: Inflight::with_capacity(64),
            collectives: VecDeque::with_capacity(64),
            messages: VecDeque::with_capacity(64),
            next: 0,
            numbers: HashMap::new(),
            history: VecDeque::with_capacity(HISTORY + 1),
            asked: Asked::default(),
            closed: false,
            staged: HashMap::new(),
            due: Vec::new(),
            backing: Vec::new(),
            devices: HashMap::new(),
            over: Vec::with_capacity(16),
        };
        Arc::new(Endpoint {
            table: Mutex::new(table),
            run: Mutex::new(run),
            cause: OnceLock::new(),
            poisoned: AtomicBool::new(false),
            hollowed: AtomicBool::new(false),
            is_due: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_queued: AtomicBool::new(false),
            enlisted: AtomicBool::new(false),
            drivers: AtomicU32::new(0),
            waits: AtomicU32::new(0),
            waits_seen: AtomicU32::new(0),
            deterministic: AtomicBool::new(config.deterministic),
            heard: Mutex::new(vec![None; size]),
            left: Mutex::new(vec![false; size]),
            closing: Mutex::new(vec![None; size]),
            recorder: Arc::new(Recorder::new()),
            programs: Mutex::default(),
            binding: OnceLock::new(),
            whole: OnceLock::new(),
            token: Box::default(),
            config,
        })
    }

    pub(crate) fn size(&self) -> usize {
        self.config.members.len()
    }

    /// Whether calls are deterministic unless they say otherwise.
    pub(crate) fn is_deterministic(&self) -> bool {
        self.deterministic.load(Ordering::Relaxed)
    }

    pub(crate) fn set_deterministic(&self, on: bool) {
        self.deterministic.store(on, Ordering::Relaxed);
    }

    /// Memory for barriers; lives as long as the endpoint.
    pub(crate) fn token(&self) -> *mut u8 {
        self.token.as_ptr()
    }

    /// Operations queued or running.
    pub(crate) fn in_flight(&self) -> usize {
        self.table.lock().inflight.running()
    }

    /// The first cause by which this communicator died, if it has.
    pub(crate) fn cause(&self) -> Option<Error> {
        if self.poisoned.load(Ordering::Acquire) { self.cause.get().cloned() } else { None }
    }

    /// The same for a user, who may know the cause already: from an error that one thread returned while another was about to
    /// mark this communicator dead. That one neither blocks nor does I/O meanwhile (`Control::dies`), and is waited for.
    pub(crate) fn died_of(&self) -> Option<Error> {
        let cause = self.cause.get()?;
        while !self.poisoned.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Some(cause.clone())
    }

    /// The same, also while those who wait are still to be woken.
    pub(crate) fn dying_of(&self) -> Option<&Error> {
        self.cause.get()
    }

    fn mismatch(&self, number: u64, ours: Signature, peer: Rank, theirs: Signature) -> Error {
        Error::Mismatch { comm: self.config.name.clone(), number, rank: self.config.rank, ours, peer, theirs }
    }

    /// Puts the endpoint on the lane's list and makes sure that the lane looks at it.
    fn arm(self: &Arc<Self>) {
        // Pairs with the lane's fence as it takes an endpoint off: it sees what was submitted, or we see that it is off.
        fence(Ordering::SeqCst);
        if !self.enlisted.load(Ordering::Relaxed) && !self.enlisted.swap(true, Ordering::AcqRel) {
            self.config.lane.enlist(self.clone());
        }
        self.config.lane.nudge();
    }

    /// Looks at an operation, and drives for a bounded time if it is not finished. With `again` the caller will poll
    /// once more at once; otherwise the lane takes over.
    pub(crate) fn poll(self: &Arc<Self>, key: Key, waker: &Waker, budget: Duration, again: bool) -> Polled {
        if let Some(refused) = orphaned() {
            return Polled::Ready(refused);
        }
        let start = Instant::now();
        let mut passes = 0u32;
        self.count_wait();
        loop {
            // The waker is stored before driving: whoever finishes the operation from here on wakes us.
            if let Some(finished) = self.look(key, Some(waker)) {
                return Polled::Ready(finished);
            }
            if self.drive_once() != Progress::Advanced
                && !self.relax(&mut passes)
                && !passes.is_multiple_of(LOOK)
                && !budget.is_zero()
            {
                continue;
            }
            // Where each pass gives the core away, the time goes by on the others' account.
            let few = self.config.crowded && passes < FEW_PASSES;
            if start.elapsed() >= if few { 10 * budget } else { budget } {
                break;
            }
        }
        if again {
            waker.wake_by_ref();
            return Polled::Pending;
        }
        self.arm();
        self.config.lane.kick();
        match self.look(key, Some(waker)) {
            Some(finished) => Polled::Ready(finished),
            None => Polled::Pending,
        }
    }

    /// Between two passes that moved nothing: gives the core away now and then, at once where ranks outnumber cores.
    fn relax(&self, passes: &mut u32) -> bool {
        *passes = passes.wrapping_add(1);
        let every = if self.config.env.one_host { YIELD_OVER_MEMORY } else { YIELD_OVER_TCP };
        let yields = self.config.crowded || (*passes).is_multiple_of(every);
        if yields {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        yields
    }

    /// Of two threads at once one may not count: all that matters is whether there were any.
    fn count_wait(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Blocks until the operation is finished: drives it from this thread for a while, then leaves it to the lane.
    pub(crate) fn wait(self: &Arc<Self>, key: Key) -> Finished<ErasedBufs, Box<Error>> {
        if let Some(refused) = orphaned() {
            return refused;
        }
        self.count_wait();
        if let Some(finished) = self.look(key, None) {
            return finished;
        }
        self.drivers.fetch_add(1, Ordering::AcqRel);
        let mut idle_since = None;
        let mut passes = 0u32;
        let found = loop {
            // Not asked for in every pass: somebody else finishes it only now and then.
            let progress = self.drive_once();
            if progress == Progress::Advanced {
                idle_since = None;
            } else {
                let yielded = self.relax(&mut passes);
                let looks = passes.is_multiple_of(LOOK);
                if looks && idle_since.get_or_insert_with(Instant::now).elapsed() > SPIN {
                    break None;
                }
                if progress == Progress::Blocked && !yielded && !looks {
                    continue;
                }
            }
            if let Some(finished) = self.look(key, None) {
                break Some(finished);
            }
        };
        self.drivers.fetch_sub(1, Ordering::AcqRel);
        if let Some(finished) = found {
            return finished;
        }
        let waker = super::lane::parker();
        loop {
            match self.poll(key, &waker, Duration::ZERO, false) {
                Polled::Ready(finished) => return finished,
                Polled::Pending => std::thread::park(),
            }
        }
    }

    /// The user let go of the operation.
    pub(crate) fn detach(&self, key: Key) {
        if forked::is_forked() {
            return;
        }
        let (held, waker) = self.table.lock().inflight.detach(key);
        drop((held, waker));
    }

    /// Drives if nobody else does.
    pub(crate) fn drive_once(self: &Arc<Self>) -> Progress {
        self.try_drive(true)
    }

    fn try_drive(self: &Arc<Self>, spinning: bool) -> Progress {
        match self.run.try_lock() {
            Some(run) => self.drive_with(run, spinning),
            None => Progress::Blocked,
        }
    }

    fn drive_with(self: &Arc<Self>, run: MutexGuard<'_, Run>, spinning: bool) -> Progress {
        let progress = self.drive(run, spinning);
        self.hand_over();
        if self.is_due.load(Ordering::Relaxed) {
            self.do_last();
        }
        progress
    }

    fn drive(self: &Arc<Self>, mut run: MutexGuard<'_, Run>, spinning: bool) -> Progress {
        stop(Point::Drive, self.config.rank);
        if self.poisoned.load(Ordering::Acquire) {
            return self.drain(&mut run);
        }
        if run.failed {
            return Progress::Blocked;
        }
        stop(Point::Gate, self.config.rank);
        // Not waited for: a waker or a buffer's drop may run under it, on this very thread.
        let Some(gate) = self.config.gate.try_lock() else {
            self.config.region.want_gate();
            return Progress::Blocked;
        };
        let moved = self.advance(&mut run);
        drop(gate);
        // Whoever wants the gate tries it now and then: between two long passes there must be time for that.
        if run.active.was_long() && !run.active.is_empty() && self.config.region.was_gate_wanted() {
            std::thread::yield_now();
        }
        match moved {
            Ok(Progress::Advanced) => Progress::Advanced,
            Ok(progress) => {
                // The clock is not for every pass: a spinning thread makes millions a second.
                run.blocked = run.blocked.wrapping_add(1);
                if progress == Progress::Blocked && run.blocked.is_multiple_of(64) || !spinning {
                    let now = Instant::now();
                    if now - run.checked > Duration::from_millis(10) {
                        run.look(now);
                        self.check_time(&mut run, now);
                    }
                }
                if !spinning && !run.endings.is_empty() {
                    self.watch_endings(&mut run);
                }
                progress
            }
            Err(error) => {
                // Nobody else goes on with what was done in part, before all know that it failed.
                run.failed = true;
                drop(run);
                self.fail(error);
                Progress::Advanced
            }
        }
    }

    fn advance(self: &Arc<Self>, run: &mut Run) -> Result<Progress, Error> {
        let mut any = !run.endings.is_empty() && self.end_some(run)?;
        // Who queues something looks after it, or leaves it to the lane: neither misses it here.
        if self.is_queued.load(Ordering::Relaxed) {
            any |= self.take_in(run)?;
        }
        let Run { active, port, devices, messages, .. } = run;
        any |= active.arrived(self.config.lane.waker())?;
        any |= port.reap(|lent| active.freed(&lent))?;
        if !active.is_empty() {
            let port = match devices {
                Some(devices) if active.runs_on_devices() => {
                    any |= devices.reap(|lent| active.freed(&lent))?;
                    devices
                }
                _ => port,
            };
            match active.pass(port)? {
                Pass::Going(moved) => any |= moved,
                Pass::Then(key, then) => {
                    let held = self.table.lock().inflight.borrow(key);
                    if let Some(mut held) = held {
                        let parts = then(&mut held);
                        self.table.lock().inflight.give_back(key, held);
                        active.go_on(parts?);
                    }
                    any = true;
                }
                Pass::Done(key) if active.device().is_some() => {
                    Self::filled(run, key);
                    return Ok(Progress::Advanced);
                }
                Pass::Done(key) => {
                    if let Some((_, number)) = active.take() {
                        self.recorder.finished(number, State::Done);
                    }
                    self.moved(key);
                    any = true;
                }
            }
        }
        messages.arrived(self.config.lane.waker())?;
        any |= messages.pass(|key| self.moved(key))?;
        if any {
            return Ok(Progress::Advanced);
        }
        let waiting = !active.is_empty() || !messages.is_idle() || self.table.lock().inflight.running() > 0;
        if waiting || !port.is_flushed() || !messages.is_flushed() {
            return Ok(Progress::Blocked);
        }
        Ok(Progress::Idle)
    }

    /// Whether nothing is left to do and everything sent has left.
    pub(crate) fn is_quiet(self: &Arc<Self>) -> bool {
        self.drive_once() == Progress::Idle && self.table.lock().inflight.running() == 0
    }

    /// No more submissions. Returns how many collectives were called.
    pub(crate) fn close(&self) -> u64 {
        let mut table = self.table.lock();
        table.closed = true;
        table.next
    }
}
