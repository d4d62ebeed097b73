//! [`Comm`]: a rank's handle on a group.

use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::links::ProcessRanks;
use super::runtime::process_runtime;
use super::world::{Defaults, Hub, PoolStats, Transport, World, requests};
use crate::error::Error;
use crate::exec::{Endpoint, ProgressThread, Runtime};
use crate::forked;
use crate::group::message::{CommId, Message};
use crate::group::{Mesh, Reach, Rendezvous, host, rdma, runtime};
use crate::link::local::{INPROC, MemoryLock};
use crate::link::region::Region;
use crate::plan::choices::Choices;
use crate::trace::Recorder;
use crate::trace::log::LOG;
use crate::tuning;
use crate::types::LinkClass;

/// How long dropping a communicator waits for what it still has to send.
const FLUSH: Duration = Duration::from_secs(1);

/// The most ranks of [`Comm::local`]: what they hold for each other grows with the square of their number.
pub(super) const MOST_LOCAL: usize = 4096;
/// How long the last handle of a world waits for its flight recorders, if they are still to be written.
pub(super) const RECORDERS: Duration = Duration::from_millis(500);

/// This rank's membership in its world: the last handle that goes says goodbye.
pub(crate) struct Membership {
    pub(crate) world: Arc<World>,
    pub(crate) mesh: Option<Arc<Mesh>>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        if forked::is_forked() {
            // Nobody leaves: the parent is the member. Its connections are not let go of here, which would touch what wakes
            // it; they end with this process.
            std::mem::forget((self.world.clone(), self.mesh.take()));
            return;
        }
        self.world.leave();
        if let Some(mesh) = &self.mesh {
            mesh.leave_blocking(self.world.loss(), FLUSH);
        }
        // This may be the end of the process. The control thread has others to look after.
        if !runtime::is_control_thread() && self.world.runtime.may_wait() {
            self.world.wait_for_recorders(RECORDERS);
            LOG.flush(RECORDERS);
        }
    }
}

/// What joining makes, on the control thread.
type Made = Arc<Mutex<Option<Result<(Arc<World>, Arc<Endpoint>), Error>>>>;

/// Descriptors that it takes to tell the other ranks that this one cannot take part: those of the control thread, a listener, a
/// connection.
const SPARE: usize = 12;

/// What a rank has before it meets the others.
struct Prepared {
    defaults: Defaults,
    turns: (Arc<ProgressThread>, Arc<dyn Runtime>),
    region: Arc<Region>,
    /// The descriptors that the other ranks of this host get.
    offers: Vec<OwnedFd>,
}

impl Prepared {
    fn new(rendezvous: &mut Rendezvous) -> Result<Prepared, Error> {
        let defaults = Defaults::from_env()?;
        if rendezvous.reach.is_none() {
            rendezvous.reach = Some(Reach::from_env()?);
        }
        if rendezvous.rank == 0 && !rendezvous.chosen {
            rendezvous.choices = tuning::choices_from_env()?.up_to(rendezvous.size);
        }
        let turns = process_runtime()?;
        let region = Arc::new(Region::shared()?);
        // The rank registers with what it has.
        rendezvous.rdma = rdma::look(rendezvous.rdma_need(), &region)?;
        let mut offers = Vec::new();
        for fd in region.fd().into_iter().chain([&**turns.0.doorbell()]) {
            offers.push(fd.try_clone().map_err(|e| Error::os("offer this rank's region to its peers", e))?);
        }
        Ok(Prepared { defaults, turns, region, offers })
    }
}

pub(crate) struct Handle {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(super) membership: Arc<Membership>,
    /// Groups made from this one so far: all members count alike, so names agree.
    pub(super) children: Mutex<u64>,
    /// Held while something is made together with the other ranks, which takes several collectives.
    pub(super) making: tokio::sync::Mutex<()>,
    /// The name of its rings; none for the world's own, which last as long as it.
    rings: Option<CommId>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if forked::is_forked() {
            return;
        }
        self.endpoint.submitted.close();
        let runtime = &self.membership.world.runtime;
        let end = runtime.now() + FLUSH;
        // Peers depend on what was submitted here: give it a bounded time to leave.
        let runs = loop {
            let done = self.endpoint.health.cause().is_some() || self.endpoint.is_quiet();
            let runs = if done && self.rings.is_some() { self.endpoint.take_runs() } else { None };
            let waiting = self.endpoint.health.cause().is_none() && runtime.now() < end && runtime.may_wait();
            if runs.is_some() || done && self.rings.is_none() || !waiting {
                break runs;
            }
            std::thread::sleep(Duration::from_micros(50));
        };
        if let Some(rings) = self.rings {
            self.membership.world.release(rings, &self.endpoint, runs);
        }
    }
}

/// A rank's handle on a group: the collectives.
///
/// Every rank makes the same calls in the same order. A call submits at once and returns a [`Work`](super::Work); options are given
/// first: `comm.op(ReduceOp::Max).timeout(five_seconds).all_reduce(v)`.
///
/// Failure of one operation (a timeout, a lost rank, a disagreement, [`abort`](Comm::abort)) is the end of the whole
/// communicator on all ranks: later calls return the same cause. Other communicators are not touched, unless they lost
/// the same rank.
///
/// Dropping it says goodbye to the group after waiting, at most a second, for what is still to be sent; prefer
/// [`close`](Comm::close), which reports.
pub struct Comm(pub(super) Arc<Handle>);

/// What a rank holds for communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Operations of this communicator that are queued or running.
    pub in_flight: usize,
    /// Bytes of staging slots in use, by all communicators of this rank's world.
    pub staging_bytes: usize,
    /// The most that can be, whatever the number of communicators.
    pub staging_limit: usize,
    /// Bytes of working memory that all communicators of this rank's world keep from one operation to the next: scaled
    /// copies, and results on their way that have no other place. Of each communicator 16 MB at most for long: more is given
    /// back a second after the last operation that needed it. One that waits in the pool keeps none.
    pub scratch_bytes: usize,
    /// Bytes of pinned memory that this process has for operations on device memory that go by way of the host, in use or kept
    /// for the next ones: 64 MB at most for each device, and one larger block for a second after its last use.
    pub pinned_bytes: usize,
    /// Bytes of memory that this process has registered with network cards, for links over RDMA: it is pinned. 4 MB for each rank whose links go over RDMA, and
    /// up to 1.1 MB for each such link that was used, until these are 40 MiB of a rank's (`ALLSTREAM_RDMA_MEMORY`), then 16 KB for each further link. 0 when all
    /// worlds that used RDMA are closed.
    pub registered_bytes: usize,
    /// Operations of this rank's world that have failed and whose buffers are kept back, because another process that has not
    /// let go of them (it is stopped, say) may yet touch them. They are given up when it does, or when it has exited.
    pub quarantined: usize,
    /// Communicators that come and go, in this rank's world.
    pub pool: PoolStats,
}

/// A [`Comm`] to be held in several places: `Clone + Send + Sync`, calls through `&self`.
///
/// Calls from several threads are ordered by a lock that is held to submit only; all ranks must still make the same
/// calls in the same order. Where tasks call as it happens, equal calls of two tasks cannot be told apart, and meet each other's data: a
/// [key](super::Call::key) for each makes that an error, and a communicator for each ([`dup`](SharedComm::dup)) makes the order free.
///
/// A library takes `&mut Comm`, [`dup`](Comm::dup)s it and [shares](Comm::share) the `dup`.
#[derive(Clone)]
pub struct SharedComm(pub(super) Arc<Handle>);

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm({}, rank {} of {})", self.0.endpoint.config.name, self.rank(), self.size())
    }
}

impl fmt::Debug for SharedComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedComm({}, rank {} of {})", self.0.endpoint.config.name, self.rank(), self.size())
    }
}

impl SharedComm {
    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }
}

impl Comm {
    pub(super) fn handle(&self) -> &Handle {
        &self.0
    }

    /// A rank of the group as a text names it: `rank 0`, in a group with its number in the world beside it.
    pub(crate) fn named_rank(&self, rank: usize) -> String {
        self.0.endpoint.config.named().rank(rank).to_string()
    }

    /// What has been called here, and when.
    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.0.endpoint.recorder
    }

    /// Joins the world that `rendezvous` names; returns when all ranks are there.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] naming the ranks that did not come by the deadline; [`Error::Refused`] when tokens or
    /// versions differ.
    pub async fn connect(mut rendezvous: Rendezvous) -> Result<Comm, Error> {
        // Held for when no descriptor is left for the rest: to tell the others takes some.
        let spare: Vec<File> = (0..SPARE).map_while(|_| File::open("/dev/null").ok()).collect();
        let prepared = Prepared::new(&mut rendezvous);
        drop(spare);
        let Prepared { defaults, turns, region, offers } = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                Mesh::decline(rendezvous, &error).await;
                return Err(error);
            }
        };
        let made: Made = Arc::default();
        let place = made.clone();
        // A rank of this process may open its link to this one as soon as it is connected, so it finds the region then.
        let (memory_lock, house) = (MemoryLock::default(), Arc::new(OnceLock::new()));
        let at = rendezvous.place();
        let (rank, ours, entered) = (rendezvous.rank, (region.clone(), memory_lock.clone()), house.clone());
        let rdma = rendezvous.rdma.clone();
        let named = move |id| {
            let mates: &Arc<ProcessRanks> = entered.get_or_init(|| ProcessRanks::of(id));
            mates.enter(rank, ours.0, ours.1);
        };
        let mesh = Mesh::join(rendezvous, offers, named, move |mesh| {
            // Ourselves: never looked at.
            let links: Vec<_> =
                mesh.peers().iter().map(|peer| peer.as_ref().map_or(&INPROC, |p| p.link)).collect();
            // Where no link goes over RDMA the port is closed again.
            let is_used = links.iter().any(|link| link.class == LinkClass::RDMA);
            let card = rdma.filter(|_| is_used).and_then(|prospect| prospect.card());
            let transport = Transport::Mesh(Arc::downgrade(mesh));
            let who = (mesh.rank(), mesh.world());
            let mates = house.get_or_init(|| ProcessRanks::of(mesh.world())).clone();
            let settings = (defaults, mesh.choices().clone());
            let world =
                World::new(who, transport, (mates, memory_lock), (region, card), turns, links, settings);
            *place.lock() = Some(world.world_endpoint().map(|endpoint| (world.clone(), endpoint)));
            world
        })
        .await?;
        let missing = || Err(Error::system("join the world", "no communicator was made (a bug)"));
        let made = made.lock().take().unwrap_or_else(missing);
        let listens = made.and_then(|(world, endpoint)| {
            requests::listen(Arc::downgrade(&world))?;
            Ok((world, endpoint))
        });
        let (world, endpoint) = listens.inspect_err(|error| {
            // The others have met this rank, and would wait for it.
            let problem = format!("rank {rank} cannot take part: {error}");
            let cause = Error::Rendezvous { address: at, rank, problem };
            mesh.broadcast(Message::Abort { comm: CommId::WORLD, cause });
        })?;
        world.compare_clocks();
        Ok(Comm::of(endpoint, Arc::new(Membership { world, mesh: Some(mesh) }), None))
    }

    /// A group of `n` ranks in this process, in rank order: one for each thread or task.
    ///
    /// # Errors
    /// [`Error::Invalid`] for `n == 0` and for more than 4096, and for a table that is named and cannot be read ([`crate::tuning`]); [`Error::System`] when the system has no memory or threads to give.
    pub fn local(n: usize) -> Result<Vec<Comm>, Error> {
        Comm::local_by(n, tuning::choices_from_env()?)
    }

    /// The same, whatever the environment says of a table.
    pub(super) fn local_by(n: usize, choices: Choices) -> Result<Vec<Comm>, Error> {
        if n == 0 {
            return Err(Error::invalid("local", "a group has at least one rank, found n = 0"));
        }
        if n > MOST_LOCAL {
            let problem = format!("a group in one process has at most {MOST_LOCAL} ranks, found n = {n}");
            return Err(Error::invalid("local", problem));
        }
        let (defaults, choices) = (Defaults::from_env()?, Arc::new(choices));
        let (turns, id) = (process_runtime()?, host::random::<16>()?);
        let hub = Arc::new(Hub::default());
        let mut worlds = Vec::new();
        for rank in 0..n {
            let region = Arc::new(Region::private()?);
            let links = vec![&INPROC; n];
            let transport = Transport::Hub(hub.clone());
            let (mates, memory_lock) = (ProcessRanks::of(id), MemoryLock::default());
            mates.enter(rank, region.clone(), memory_lock.clone());
            let (who, house) = ((rank, id), (mates, memory_lock));
            let settings = (defaults, choices.clone());
            let world = World::new(who, transport, house, (region, None), turns.clone(), links, settings);
            hub.enter(&world);
            worlds.push(world);
        }
        let each = |world: Arc<World>| {
            let endpoint = world.world_endpoint()?;
            requests::listen(Arc::downgrade(&world))?;
            Ok(Comm::of(endpoint, Arc::new(Membership { world, mesh: None }), None))
        };
        worlds.into_iter().map(each).collect()
    }

    pub(crate) fn of(endpoint: Arc<Endpoint>, membership: Arc<Membership>, rings: Option<CommId>) -> Comm {
        Comm(Arc::new(Handle {
            endpoint,
            membership,
            children: Mutex::new(0),
            making: tokio::sync::Mutex::default(),
            rings,
        }))
    }

    /// A handle to hold in several places. It and this one may be used side by side.
    pub fn share(&self) -> SharedComm {
        SharedComm(self.0.clone())
    }
}
