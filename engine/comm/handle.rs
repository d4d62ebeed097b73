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

/// The most ranks of [`Comm::local`]. The memory that ranks hold for each other grows with the square of their number.
pub(super) const MOST_LOCAL: usize = 4096;
/// How long the last handle of a world waits for files of the flight recorder that are still to be written.
pub(super) const RECORDERS: Duration = Duration::from_millis(500);

/// This rank's membership in its world. Handles share it; when the last is dropped, this rank says goodbye.
pub(crate) struct Membership {
    pub(crate) world: Arc<World>,
    pub(crate) mesh: Option<Arc<Mesh>>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        if forked::is_forked() {
            // The parent is the member, so the child does not leave. Dropping the connections here would touch descriptors that
            // wake the parent's threads, so they are leaked, and end with this process.
            std::mem::forget((self.world.clone(), self.mesh.take()));
            return;
        }
        self.world.leave();
        if let Some(mesh) = &self.mesh {
            mesh.leave_blocking(self.world.loss(), FLUSH);
        }
        // The process may end next, so its files are waited for; but not on the control thread, which serves other worlds, too.
        if !runtime::is_control_thread() && self.world.runtime.may_wait() {
            self.world.wait_for_recorders(RECORDERS);
            LOG.flush(RECORDERS);
        }
    }
}

/// The world and its endpoint, which the control thread makes when this rank joins; `None` until then.
type Made = Arc<Mutex<Option<Result<(Arc<World>, Arc<Endpoint>), Error>>>>;

/// How many descriptors are needed to tell the other ranks that this rank cannot take part: for the control thread, a listener and a
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
        // When the rank registers, it tells the others whether it can use RDMA, so that is found out first.
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
    /// How many groups were made from this one. All members count alike, so they give a new group the same id and name.
    pub(super) children: Mutex<u64>,
    /// Held while something is made together with the other ranks, which takes several collectives.
    pub(super) making: tokio::sync::Mutex<()>,
    /// The id of the communicator's rings. `None` for the world's own communicator: its rings last as long as the world.
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
        // Peers depend on what was submitted here, so it gets a bounded time to be sent.
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
/// Dropping a communicator's last handle waits, for a second at most, for what is still to be sent; with the world's last handle
/// this rank says goodbye. Prefer [`close`](Comm::close), which reports errors.
pub struct Comm(pub(super) Arc<Handle>);

/// What a rank holds for communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Operations of this communicator that are queued or running.
    pub in_flight: usize,
    /// Bytes of staging slots in use, by all communicators of this rank's world.
    pub staging_bytes: usize,
    /// The most bytes of staging slots that can be in use, whatever the number of communicators.
    pub staging_limit: usize,
    /// Bytes of working memory that all communicators of this rank's world keep from one operation to the next: for scaled
    /// copies, and for intermediate results that have no other place. A communicator keeps 16 MB of it; what is beyond is given
    /// back a second after the last operation that needed it. An idle communicator in the pool keeps none.
    pub scratch_bytes: usize,
    /// Bytes of pinned memory that this process has, in use or kept for reuse, for operations on device memory that are staged on
    /// the host. At most 64 MB are kept for each device, or one larger block for a second after its last use.
    pub pinned_bytes: usize,
    /// Bytes of memory that this process has registered with network cards for links over RDMA, which pins it: 4 MB for each rank that has such
    /// links, up to 1.1 MB for each such link that was used, and buffers of [`Comm::alloc`](crate::Comm::alloc) that such links have carried.
    /// Once the links of a rank have 40 MiB (`ALLSTREAM_RDMA_MEMORY`), each further link takes 16 KB. 0 when all worlds that used RDMA are
    /// closed.
    pub registered_bytes: usize,
    /// Failed operations of this rank's world whose buffers are kept in quarantine, because another process (one that is stopped,
    /// say) or a device may still touch them. The buffers are dropped once nobody can, such as when that process has exited.
    pub quarantined: usize,
    /// The communicators that were made in this rank's world, and those that are kept to be used again.
    pub pool: PoolStats,
}

/// A [`Comm`] to be held in several places: `Clone + Send + Sync`, calls through `&self`.
///
/// Calls from several threads are ordered by a lock that is held to submit only; all ranks must still make the same
/// calls in the same order. If several tasks call in no fixed order, equal calls of two tasks cannot be told apart, and one task's call
/// may be matched with the other's on another rank. With a [key](super::Call::key) for each task that is an error; with a communicator for each task
/// ([`dup`](SharedComm::dup)) tasks may call in any order.
///
/// A library should take `&mut Comm`, [`dup`](Comm::dup) it and [share](Comm::share) the `dup`.
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

    /// A rank of the group as error texts name it: `rank 0`, and in a group other than the world also its rank in the world.
    pub(crate) fn named_rank(&self, rank: usize) -> String {
        self.0.endpoint.config.named().rank(rank).to_string()
    }

    /// The flight recorder: what was called here, and when.
    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.0.endpoint.recorder
    }

    /// Joins the world that `rendezvous` names; returns when all ranks are there.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] naming the ranks that did not come by the deadline; [`Error::Refused`] when tokens or
    /// versions differ.
    pub async fn connect(mut rendezvous: Rendezvous) -> Result<Comm, Error> {
        // Reserved: should the process run out of descriptors below, these are free again for telling the other ranks.
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
        // Another rank of this process may open its link to this rank as soon as the two are connected. So this rank's region is entered
        // before that, when the world's name is known.
        let (memory_lock, house) = (MemoryLock::default(), Arc::new(OnceLock::new()));
        let at = rendezvous.place();
        let (rank, ours, entered) = (rendezvous.rank, (region.clone(), memory_lock.clone()), house.clone());
        let rdma = rendezvous.rdma.clone();
        let named = move |id| {
            let mates: &Arc<ProcessRanks> = entered.get_or_init(|| ProcessRanks::of(id));
            mates.enter(rank, ours.0, ours.1);
        };
        let mesh = Mesh::join(rendezvous, offers, named, move |mesh| {
            // This rank's own entry is a filler: no rank opens a link to itself.
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
    /// [`Error::Invalid`] if `n` is 0 or more than 4096, or if the environment names a tuner's table that cannot be read ([`crate::tuning`]);
    /// [`Error::System`] when the system has no memory or threads to give.
    pub fn local(n: usize) -> Result<Vec<Comm>, Error> {
        Comm::local_by(n, tuning::choices_from_env()?)
    }

    /// [`local`](Comm::local) with these choices of algorithms, whatever table the environment names.
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

    /// A handle to hold in several places. This handle and the new one may be used side by side.
    pub fn share(&self) -> SharedComm {
        SharedComm(self.0.clone())
    }
}
