//! [`Endpoint`]: one rank's side of one communicator. It takes operations in, drives them, and ends them.
//!
//! An endpoint has these parts, each with its own state and lock:
//!
//! | part | owns | lock |
//! |---|---|---|
//! | submission ([`submit`], [`table`]) | buffers in flight, queues, the numbers of calls | `submitted` |
//! | progress ([`progress`], [`callers`]) | what executes: the collective in progress, messages, links | `run` |
//! | deadlines ([`deadlines`], [`ending`]) | how long each operation has waited | in `run` |
//! | programs ([`Programs`]) | what was compiled for calls of one shape | its own |
//! | completion ([`completions`], [`copy_backs`]) | whose wakers are to be called; results that are being copied back to a device | one each |
//! | driver calls ([`Commands`]) | what a pass leaves to a thread that holds none of the engine's locks | its own |
//! | teardown ([`health`], [`teardown`]) | why the communicator ended; how far its teardown has come | none (atomics); in `run` |
//! | the other ranks ([`peers`], [`breaks`]) | what they have told about themselves | `peers` |
//!
//! A method that needs the state of one part only is a method of that part: callers use `submitted`, `health`, `peers`, `programs` and
//! `commands` directly. [`Run`] makes the passes, checks the deadlines and fails operations; its methods get the endpoint as an
//! argument. Methods that need several parts at once are methods of the endpoint itself.
//!
//! A thread takes the locks in this order: `run`, the rank's memory lock (`config.memory_lock`), `submitted`, then at most one of the
//! others. To drive, a thread only tries `run`; to bind devices or to close the communicator, it waits for `run`. Wakers, and drops of
//! users' buffers, run while the thread holds none of these locks. Users' reduction functions, and the function that makes an
//! operation's second half (`Operation::then`), run in a pass: under `run` and the memory lock, but never under the lock of `submitted`.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

mod breaks;
mod callers;
mod completions;
mod copy_backs;
mod deadlines;
mod driven;
mod ending;
mod finish;
mod health;
mod peers;
mod progress;
mod reuse;
mod submit;
mod table;
mod teardown;
pub(super) mod together;

pub(crate) use reuse::IdleRuns;

use self::callers::Callers;
use self::completions::Completions;
use self::copy_backs::CopyBacks;
use self::driven::LookAgain;
use self::health::Health;
use self::peers::Peers;
use self::progress::Run;
use self::table::Submitted;
use super::carrier::{Bound, Lane};
use super::inflight;
use super::p2p::Messages;
use super::port::Port;
use super::runtime::Runtime;
use crate::commands::{Commands, LastOf};
use crate::error::{Error, Members, Missing, MissingState, Operation, RecordFile};
use crate::forked;
use crate::link::local::MemoryLock;
use crate::link::locks::EngineLock;
use crate::link::region::Region;
use crate::link::{Break, Opener};
use crate::mem::ErasedBufs;
use crate::plan::choices::GroupChoices;
use crate::plan::{Env, Program};
use crate::trace::Recorder;
use crate::types::{Map, Rank, Signature};

/// When a communicator closes, its ranks compare this many of their last calls.
const COMPARED: usize = 8;

/// The outcome of an operation that has finished, and its buffers unless they stay in quarantine.
pub(crate) type Finished = inflight::Finished<ErasedBufs, Box<Error>>;

/// How the executor talks to the other ranks outside the data path, over the control connections.
pub(crate) trait Control: Send + Sync {
    /// Tells the other members that the communicator dies of `cause`, which this rank has found or has been told.
    fn abort(&self, endpoint: &Endpoint, cause: &Error);
    /// The data connection to `peer` broke: asks `peer` whether it is still a member.
    fn broke(&self, endpoint: &Endpoint, peer: Rank, what: Break);
    /// Has the flight recorder written, as the communicator dies of `cause`. Must neither block nor do I/O: no thread of this rank has been
    /// woken yet.
    fn dies(self: Arc<Self>, endpoint: &Endpoint, cause: &Error);
    /// Notes that the user is told `cause`. Returns whether another communicator has told the user of the same failure before.
    fn told(&self, endpoint: &Endpoint, cause: &Error) -> bool;
    /// A collective has waited for a while: asks the other members what they called.
    fn stalled(&self, endpoint: &Endpoint, number: u64, signature: Signature);
    /// A message has been awaited for a while: tells rank `from`, which has to send it and may itself be waiting for something else.
    fn awaits(&self, endpoint: &Endpoint, from: Rank, number: u64, signature: Signature);
}

pub(crate) struct EndpointConfig {
    pub(crate) comm: u64,
    pub(crate) generation: u32,
    pub(crate) name: String,
    pub(crate) rank: Rank,
    /// World rank of each member.
    pub(crate) members: Vec<Rank>,
    /// The file to which this rank's flight recorder is written when the communicator dies.
    pub(crate) record: Option<Arc<RecordFile>>,
    /// The number of each member's host. Hosts are numbered from 0, in the order of their first ranks.
    pub(crate) hosts: Vec<u32>,
    /// The properties of this group on which the choice of an algorithm depends.
    pub(crate) env: Env,
    /// Whether there is only one peer and its link takes frames longer than a slot. There system calls cost most, so a message may be
    /// sent as one frame. Among more ranks such long rounds would outgrow the caches ([`Slicing`](super::backend::Slicing)).
    pub(crate) has_long_frames: bool,
    /// What the tuner's table says about this group.
    pub(crate) tuned: GroupChoices,
    pub(crate) region: Arc<Region>,
    pub(crate) memory_lock: MemoryLock,
    pub(crate) opener: Arc<dyn Opener>,
    pub(crate) control: Arc<dyn Control>,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) timeout: Duration,
    pub(crate) queue_limit: usize,
    /// Whether calls are deterministic unless they say otherwise, at first (`Endpoint::deterministic` may change later).
    pub(crate) deterministic: bool,
    /// Whether this host has more ranks than cores: then a thread that waits gives its core away instead of spinning.
    pub(crate) crowded: bool,
    /// About this many bytes are put into other staging slots before a staging slot is filled again.
    pub(crate) turned: usize,
    /// Results of at least this many bytes (in place: of twice as many) are written past the caches.
    pub(crate) streams_from: usize,
}

impl EndpointConfig {
    /// The members, as error messages name them.
    pub(crate) fn named(&self) -> Members {
        // The world's own communicator alone has the number 0.
        let members = if self.comm == 0 { Members::world() } else { Members::of_group(&self.members) };
        members.recorded_in(self.record.clone())
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The time on the clock that measures deadlines.
    pub(crate) fn now(&self) -> Instant {
        self.runtime.now()
    }

    /// The error for a collective in which a peer has called something other than this rank.
    fn mismatch(&self, number: u64, ours: Signature, peer: Rank, theirs: Signature) -> Error {
        let (comm, rank) = (self.name.clone(), self.rank);
        Error::mismatch(comm, number, (rank, ours), (peer, theirs), Vec::new())
    }

    /// The error for an operation whose memory this rank's device has not brought, or whose results it has not copied back, in time.
    fn not_come(&self, number: u64, signature: Signature, after: Duration) -> Error {
        let rank = self.rank;
        let operation = Operation { comm: self.name.clone(), number, signature };
        Error::timeout(operation, rank, after, vec![Missing { rank, state: MissingState::NotReady }])
    }
}

/// What a program is made for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProgramKey {
    /// The collective, with [`VARIED`](crate::types::VARIED).
    pub(crate) kind: u8,
    pub(crate) algo: u8,
    pub(crate) root: Rank,
    pub(crate) in_place: bool,
}

/// The programs made so far.
#[derive(Default)]
pub(crate) struct Programs(Mutex<Known>);

/// All programs. The last one used is looked at first, as most calls are like the one before.
#[derive(Default)]
struct Known {
    last: Option<(ProgramKey, Arc<Program>)>,
    all: Map<ProgramKey, Arc<Program>>,
}

impl Programs {
    /// The program for a key: made once.
    pub(crate) fn get(
        &self,
        key: ProgramKey,
        make: impl FnOnce() -> Result<Program, Error>,
    ) -> Result<Arc<Program>, Error> {
        let mut known = self.0.lock();
        if let Some((last, program)) = &known.last
            && *last == key
        {
            return Ok(program.clone());
        }
        let program = match known.all.get(&key) {
            Some(program) => program.clone(),
            None => {
                let program = Arc::new(make()?);
                known.all.insert(key, program.clone());
                program
            }
        };
        known.last = Some((key, program.clone()));
        Ok(program)
    }
}

/// One rank's side of one communicator.
pub(crate) struct Endpoint {
    pub(crate) config: EndpointConfig,
    pub(crate) submitted: Submitted,
    run: EngineLock<Run>,
    callers: Callers,
    /// Whether this endpoint is on the progress thread's list.
    enlisted: AtomicBool,
    completions: Completions,
    /// What passes leave to a thread that holds none of the engine's locks.
    pub(crate) commands: Arc<Commands>,
    copy_backs: CopyBacks,
    pub(crate) health: Health,
    pub(crate) peers: Peers,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) programs: Programs,
    /// Whether calls are deterministic unless they say otherwise.
    pub(crate) deterministic: AtomicBool,
    /// What this communicator is bound to beside the host's memory and links.
    bound: OnceLock<Arc<dyn Bound>>,
    /// Whether, at the last pass, an operation waited for something that wakes nobody when it is ready, so that the progress thread has to
    /// poll it: a library, or memory that a device of another process lends.
    is_asked: AtomicBool,
    /// How soon the progress thread must check again whether a device is done, which only a word in memory shows.
    look_again: LookAgain,
    /// The word that barriers send and receive. All barriers share it, as the collectives of a communicator run one after another.
    pub(crate) token: Arc<AtomicU64>,
    /// The last field, so that it is dropped after every field whose drop may append commands.
    _last: LastOf,
}

/// In a forked child: the outcome of an operation that the parent has submitted; `None` in any other process. The child does not get the
/// buffer back, as the parent's progress thread may have been working on it at the fork.
fn orphaned() -> Option<Finished> {
    forked::is_forked().then(|| (Err(Box::new(forked::refusal())), None))
}

impl Endpoint {
    pub(crate) fn new(config: EndpointConfig) -> Arc<Endpoint> {
        let size = config.size();
        let port = |channel| {
            let (region, opener) = (config.region.clone(), config.opener.clone());
            let mut port = Port::new((config.rank, size), channel, region, opener);
            port.turned = config.turned;
            port
        };
        let messages = Messages::new(config.comm, config.rank, config.generation, size, port(1));
        let run = Run::new(&config, port(0), messages);
        Endpoint::with(config, run)
    }

    fn with(config: EndpointConfig, run: Run) -> Arc<Endpoint> {
        let commands = Commands::new(config.runtime.waker().clone());
        Arc::new(Endpoint {
            submitted: Submitted::new(),
            run: EngineLock::new(run),
            callers: Callers::default(),
            enlisted: AtomicBool::new(false),
            completions: Completions::default(),
            _last: LastOf(commands.clone()),
            commands,
            copy_backs: CopyBacks::default(),
            health: Health::default(),
            peers: Peers::new(config.size()),
            recorder: Arc::new(Recorder::new()),
            programs: Programs::default(),
            deterministic: AtomicBool::new(config.deterministic),
            bound: OnceLock::new(),
            is_asked: AtomicBool::new(false),
            look_again: LookAgain::default(),
            token: Arc::default(),
            config,
        })
    }

    /// What this communicator is bound to beside the host's memory and links.
    pub(crate) fn bound(&self) -> Option<&dyn Bound> {
        self.bound.get().map(|bound| &**bound)
    }

    /// Binds this communicator to `bound`, whose parts run in `lane`. All ranks do this between the same two operations. Only the first call
    /// has an effect.
    pub(crate) fn bind(&self, bound: Arc<dyn Bound>, lane: Option<Box<dyn Lane>>) {
        let mut run = self.run.lock();
        if self.bound.set(bound).is_ok() {
            run.device = lane;
        }
    }

    /// The cause of which this communicator died, if it has, to be returned to the user. The user counts as told from now on, and may have
    /// been told before, by an error that another thread got.
    pub(crate) fn died_of(&self) -> Option<Error> {
        let cause = self.health.cause_when_dead()?;
        self.tell();
        Some(cause.clone())
    }

    /// Like `died_of`, but returns the cause only if the user has not been told before.
    pub(crate) fn died_untold(&self) -> Option<Error> {
        let cause = self.health.cause_when_dead()?;
        (!self.tell()).then(|| cause.clone())
    }

    /// Notes that the user knows the cause of which this communicator dies: a call returns the cause, or the user's `abort` is the cause.
    /// Returns whether the user was told before.
    pub(crate) fn tell(&self) -> bool {
        let Some(cause) = self.health.first_cause() else { return false };
        self.health.tell() || self.config.control.told(self, cause)
    }
}
