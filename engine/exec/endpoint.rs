//! One rank's side of one communicator: it takes operations in, drives them, and ends them.
//!
//! It has parts, each with its own state and lock:
//!
//! | part | owns | lock |
//! |---|---|---|
//! | submission ([`submit`], [`table`]) | buffers in flight, queues, the numbers of calls | `submitted` |
//! | progress ([`run`], [`progress`], [`callers`]) | what executes: the collective in work, messages, links | `run` |
//! | deadlines ([`deadlines`], [`ending`]) | since when what waits | in `run` |
//! | programs ([`programs`]) | what was compiled for calls of one shape | its own |
//! | completion ([`completions`], [`copy_backs`]) | who is to be woken; results on their way to a device | one each |
//! | calls of a driver ([`Commands`]) | what passes leave to a thread that holds no lock | its own |
//! | teardown ([`health`], [`teardown`]) | what ended the communicator; how far its end has come | none; in `run` |
//! | the other ranks ([`peers`], [`breaks`]) | what they have told of themselves | `peers` |
//!
//! Each part has the methods that need its state alone: callers speak to `submitted`, `health`, `peers`, `programs` and `commands`
//! themselves. What executes ([`run::Run`]) makes the passes, looks at the deadlines and ends what has failed; its methods are told which
//! endpoint they do it for. The endpoint itself has what needs several parts at once.
//!
//! Locks are taken in this order: `run`, the memory lock of the rank (`config.memory_lock`), `submitted`, then any one of the others.
//! `run` is only tried by those who drive; waited for when devices are bound and when a communicator closes. A user's code
//! (wakers, drops of buffers, functions that follow) runs while this thread holds none of them but `run`: never the table's.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

mod asked;
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
mod programs;
mod progress;
mod reuse;
mod run;
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
pub(crate) use self::programs::ProgramKey;
use self::programs::Programs;
use self::run::Run;
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
use crate::plan::Env;
use crate::plan::choices::GroupChoices;
use crate::trace::Recorder;
use crate::types::{Rank, Signature};

/// How many of the last calls ranks compare when they close.
const COMPARED: usize = 8;

/// An operation that has finished: how, and its buffers unless they are kept in quarantine.
pub(crate) type Finished = inflight::Finished<ErasedBufs, Box<Error>>;

/// What the executor tells the other ranks, outside the data path.
pub(crate) trait Control: Send + Sync {
    /// The communicator is dead, for this cause, found here: tells the others.
    fn abort(&self, endpoint: &Endpoint, cause: &Error);
    /// A data connection broke: ask its other end whether it is still a member.
    fn broke(&self, endpoint: &Endpoint, peer: Rank, what: Break);
    /// The communicator dies, for this cause, wherever it was found. Neither blocks nor does I/O: nobody here knows yet.
    fn dies(self: Arc<Self>, endpoint: &Endpoint, cause: &Error);
    /// The user is told this cause. Whether the same failure was told before, by another communicator.
    fn told(&self, endpoint: &Endpoint, cause: &Error) -> bool;
    /// An operation waits: ask the others what they called.
    fn stalled(&self, endpoint: &Endpoint, number: u64, signature: Signature);
    /// A message is waited for: tell the rank that is to send it, which may wait for something else.
    fn awaits(&self, endpoint: &Endpoint, from: Rank, number: u64, signature: Signature);
}

pub(crate) struct EndpointConfig {
    pub(crate) comm: u64,
    pub(crate) generation: u32,
    pub(crate) name: String,
    pub(crate) rank: Rank,
    /// World rank of each member.
    pub(crate) members: Vec<Rank>,
    /// Where this rank's flight recorder is written when the communicator dies.
    pub(crate) record: Option<Arc<RecordFile>>,
    /// The host of each member, numbered from 0 in the order of their first ranks.
    pub(crate) hosts: Vec<u32>,
    /// What the choice of an algorithm depends on, of this group.
    pub(crate) env: Env,
    /// There is one peer, and frames to it may be longer than a slot: there calls of the system are what costs, and a message may
    /// go as one. Of more than two ranks the rounds would be too long ([`Slicing`](super::slicing::Slicing)).
    pub(crate) has_long_frames: bool,
    /// What the tuner's table says of it.
    pub(crate) tuned: GroupChoices,
    pub(crate) region: Arc<Region>,
    pub(crate) memory_lock: MemoryLock,
    pub(crate) opener: Arc<dyn Opener>,
    pub(crate) control: Arc<dyn Control>,
    pub(crate) runtime: Arc<dyn Runtime>,
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

impl EndpointConfig {
    /// The members, for errors and texts to name.
    pub(crate) fn named(&self) -> Members {
        // The world's own communicator alone has the number 0.
        let members = if self.comm == 0 { Members::world() } else { Members::of_group(&self.members) };
        members.recorded_in(self.record.clone())
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The time that deadlines are measured by.
    pub(crate) fn now(&self) -> Instant {
        self.runtime.now()
    }

    /// A peer has called something else than this rank.
    fn mismatch(&self, number: u64, ours: Signature, peer: Rank, theirs: Signature) -> Error {
        let (comm, rank) = (self.name.clone(), self.rank);
        Error::mismatch(comm, number, (rank, ours), (peer, theirs), Vec::new())
    }

    /// This rank's device has not brought an operation's memory, or not copied its results back.
    fn not_come(&self, number: u64, signature: Signature, after: Duration) -> Error {
        let rank = self.rank;
        let operation = Operation { comm: self.name.clone(), number, signature };
        Error::timeout(operation, rank, after, vec![Missing { rank, state: MissingState::NotReady }])
    }
}

/// One rank's side of one communicator.
pub(crate) struct Endpoint {
    pub(crate) config: EndpointConfig,
    pub(crate) submitted: Submitted,
    run: EngineLock<Run>,
    callers: Callers,
    /// On the progress thread's list.
    enlisted: AtomicBool,
    completions: Completions,
    /// What passes leave to be done by a thread that holds none of these locks.
    pub(crate) commands: Arc<Commands>,
    copy_backs: CopyBacks,
    pub(crate) health: Health,
    pub(crate) peers: Peers,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) programs: Programs,
    /// Whether calls are deterministic unless they say otherwise.
    pub(crate) deterministic: AtomicBool,
    /// What it is bound to beside the host's memory and links.
    bound: OnceLock<Arc<dyn Bound>>,
    /// At the last pass, something was waited for that does not tell when it is there: a library, or memory that a device of another process lends.
    is_asked: AtomicBool,
    /// At the last look, a device was at work, whose end is a word in memory.
    look_again: LookAgain,
    /// Memory that barriers pass round. One serves all: collectives of a communicator run one after another.
    pub(crate) token: Arc<AtomicU64>,
    /// Dropped behind all that appends commands.
    _last: LastOf,
}

/// What becomes, in a child of a fork, of an operation of its parent's. Its buffer stays where it is: the parent's progress
/// thread may have been at it.
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

    /// From here on this communicator is bound to `bound`, whose parts run in `lane`. All ranks do this between the same two operations. The
    /// first time counts.
    pub(crate) fn bind(&self, bound: Arc<dyn Bound>, lane: Option<Box<dyn Lane>>) {
        let mut run = self.run.lock();
        if self.bound.set(bound).is_ok() {
            run.device = lane;
        }
    }

    /// The cause by which this communicator died, if it has, for a user: who may know the cause already from an error that another thread
    /// returned, and knows it now.
    pub(crate) fn died_of(&self) -> Option<Error> {
        let cause = self.health.cause_when_dead()?;
        self.tell();
        Some(cause.clone())
    }

    /// The same, if no call of the user's has returned it: the first time only.
    pub(crate) fn died_untold(&self) -> Option<Error> {
        let cause = self.health.cause_when_dead()?;
        (!self.tell()).then(|| cause.clone())
    }

    /// A call of the user's returns the cause by which this communicator died, or the user is that cause. Whether one has before.
    pub(crate) fn tell(&self) -> bool {
        let Some(cause) = self.health.first_cause() else { return false };
        self.health.tell() || self.config.control.told(self, cause)
    }
}
