//! A rank's place in a world: its communicators, and what is heard of the other ranks.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

mod agreements;
mod clocks;
mod comms;
mod defaults;
mod departed;
mod meetings;
mod pool;
mod records;
pub(super) mod requests;
#[cfg(test)]
mod tests;
mod wholes;

pub use self::agreements::Verdict;
pub(super) use self::agreements::{Agreements, Answer};
use self::comms::Comms;
pub(crate) use self::defaults::{Defaults, NcclUse};
use self::departed::Departed;
pub(super) use self::meetings::Meeting;
use self::meetings::Meetings;
use self::pool::Pool;
pub use self::pool::PoolStats;
pub(super) use self::pool::{Proposal, ROW};
use self::records::Records;
use super::links::{CommLinks, ProcessRanks, Topology, block_bytes};
use crate::error::{Error, Lost};
use crate::exec::{
    Control, Endpoint, EndpointConfig, IdleRuns, Opener, ProgressThread, QUEUE_LIMIT, Runtime,
};
use crate::forked;
use crate::group::message::{CommId, DataHello, Message};
use crate::group::{Events, Mesh, host};
use crate::link::kinds::farthest;
use crate::link::local::MemoryLock;
use crate::link::region::{Region, TURNED};
use crate::link::verbs::Card;
use crate::link::{Break, Lends, LinkKind, SLOT};
use crate::plan::choices::{Choices, GroupChoices, GroupShape};
use crate::plan::{Env, Shape, suitable};
use crate::trace::file_of;
use crate::trace::log::LOG;
use crate::types::{Map, Rank, Signature};

/// A rank writes its results past the last-level caches if the results of all ranks of its host together take at least a quarter
/// (1 / `STREAMED`) of the caches: there they would be evicted before anybody reads them. In place the limit is twice as high, because no
/// separate input takes room in the caches. Measured on 2 cores with 32 MB of cache (`allstream perf -N 2`; times relative to ordinary
/// stores), out of place: 4 MB all_gather 0.72, broadcast 0.64, all_to_all 0.62, all_reduce 0.88; but 2 MB 2.1, 1.5, 1.9, 1.3. In place:
/// 6 MB all_gather 0.85, broadcast 0.81; 4 MB 0.9 to 1.8.
const STREAMED: usize = 4;

/// How the ranks of a world send each other control messages.
pub(crate) enum Transport {
    /// Control connections between processes (or threads that joined as if they were).
    Mesh(Weak<Mesh>),
    /// Ranks that were made together in this process.
    Hub(Arc<Hub>),
}

/// The ranks of a world made in one process.
#[derive(Default)]
pub(crate) struct Hub {
    worlds: Mutex<Vec<Weak<World>>>,
    /// Messages on their way, by sender and receiver.
    sent: Mutex<Map<(Rank, Rank), VecDeque<Message>>>,
}

impl Hub {
    pub(crate) fn enter(&self, world: &Arc<World>) {
        self.worlds.lock().push(Arc::downgrade(world));
    }

    /// Delivers a message in a task of its own, so the receiver never handles it while the sender holds locks. In whatever order the tasks
    /// run, a receiver gets the messages of one sender in the order in which they were sent.
    fn deliver(self: &Arc<Self>, runtime: &dyn Runtime, to: Rank, from: Rank, message: Message) {
        let Some(world) = self.worlds.lock().get(to).and_then(Weak::upgrade) else { return };
        self.sent.lock().entry((from, to)).or_default().push_back(message);
        let hub = self.clone();
        let deliver = async move {
            let next = hub.sent.lock().get_mut(&(from, to)).and_then(VecDeque::pop_front);
            match next {
                Some(Message::Goodbye { cause }) => world.goodbye(from, cause),
                Some(message) => world.message(from, message),
                None => {}
            }
        };
        if let Err(error) = runtime.spawn(Box::pin(deliver)) {
            tracing::error!(%error, "a control message was lost");
        }
    }
}

/// A rank's place in a world.
pub(crate) struct World {
    pub(crate) rank: Rank,
    hosts: Hosts,
    transport: Transport,
    pub(crate) topology: Arc<Topology>,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) common: Common,
    comms: Comms,
    losses: Losses,
    records: Records,
    pub(super) pool: Pool,
}

/// Where the ranks of a world run.
struct Hosts {
    /// The host of each rank.
    of_ranks: Vec<u32>,
    /// By rank: whether that rank may run on a core on which this rank may run, too. Used only for ranks that share memory with this one.
    beside: Vec<bool>,
}

/// What all communicators of a rank have in common.
pub(crate) struct Common {
    pub(crate) defaults: Defaults,
    choices: Arc<Choices>,
    memory_lock: MemoryLock,
    /// In tests: makes the opener of a communicator's links that replaces [`CommLinks`].
    #[cfg(test)]
    pub(crate) opener: std::sync::OnceLock<MakeOpener>,
}

/// Which ranks have gone, and what the others agree on to go on without them.
#[derive(Default)]
struct Losses {
    departed: Mutex<Departed>,
    agreements: Mutex<Agreements>,
    meetings: Meetings,
}

/// What a communicator's links are made of.
pub(crate) enum LinksFrom {
    /// New rings: where they begin in each member's region.
    NewRings(Vec<u64>),
    /// The links of an idle communicator of the same members. The new communicator is its next generation.
    IdleRuns(IdleRuns),
}

/// Makes the opener of a communicator's links, from the communicator's id and this rank's number in it.
#[cfg(test)]
pub(crate) type MakeOpener = Box<dyn Fn(CommId, Rank) -> Arc<dyn Opener> + Send + Sync>;

impl World {
    /// To be called after this rank has been entered among the ranks of its process ([`ProcessRanks::enter`]).
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        (rank, id): (Rank, [u8; 16]),
        transport: Transport,
        (mates, memory_lock): (Arc<ProcessRanks>, MemoryLock),
        (region, card): (Arc<Region>, Option<Arc<Card>>),
        (progress_thread, runtime): (Arc<ProgressThread>, Arc<dyn Runtime>),
        links: Vec<&'static LinkKind>,
        (defaults, choices): (Defaults, Arc<Choices>),
    ) -> Arc<World> {
        let mesh = match &transport {
            Transport::Mesh(mesh) => mesh.clone(),
            Transport::Hub(_) => Weak::new(),
        };
        let met = mesh.upgrade();
        // `links` has an entry for each rank of the world, this one included.
        let size = links.len();
        debug_assert!(met.as_ref().is_none_or(|mesh| mesh.size() == size));
        let of_ranks = met.as_ref().map_or(vec![0; size], |mesh| mesh.hosts().to_vec());
        // The system is asked only here, and only about processes that share memory with this one.
        let beside = |rank: Rank| match links[rank].lends {
            Lends::Regions => {
                let peer = met.as_ref().and_then(|mesh| mesh.peers()[rank].as_ref());
                peer.is_none_or(|peer| host::shares_cores(peer.pid))
            }
            _ => true,
        };
        let hosts = Hosts { of_ranks, beside: (0..size).map(beside).collect() };
        let topology =
            Arc::new(Topology::new((id, rank), (region, card), progress_thread, mates, links, mesh));
        Arc::new(World {
            rank,
            hosts,
            transport,
            runtime,
            comms: Comms::default(),
            losses: Losses::default(),
            records: Records::new(file_of(&topology.world_name(), rank)),
            pool: Pool::new(defaults.pool),
            common: Common {
                defaults,
                choices,
                memory_lock,
                #[cfg(test)]
                opener: std::sync::OnceLock::new(),
            },
            topology,
        })
    }

    pub(crate) fn name(&self) -> String {
        self.topology.world_name()
    }

    /// How many ranks the world has.
    fn size(&self) -> usize {
        self.hosts.of_ranks.len()
    }

    /// Makes this rank's side of a communicator.
    pub(crate) fn endpoint(
        self: &Arc<Self>,
        comm: CommId,
        name: String,
        members: Vec<Rank>,
        lines: LinksFrom,
    ) -> Result<Arc<Endpoint>, Error> {
        let rank = members.iter().position(|m| *m == self.rank).ok_or_else(|| {
            Error::invalid(
                "make a communicator",
                format!("rank {} is not among its members {members:?}", self.rank),
            )
        })?;
        let near = |m: &&Rank| **m == self.rank || self.topology.is_near(**m);
        let here = members.iter().filter(near).count();
        let beside = members.iter().filter(near).filter(|m| self.hosts.beside[**m]).count();
        let (opener, generation, runs): (Arc<dyn Opener>, u32, _) = match lines {
            #[cfg(test)]
            LinksFrom::NewRings(_) if self.common.opener.get().is_some() => {
                let make = self.common.opener.get().expect("it was just there");
                (make(comm, rank), 0, None)
            }
            LinksFrom::NewRings(blocks) => {
                let (members, topology) = (members.clone(), self.topology.clone());
                (Arc::new(CommLinks { comm, rank, members, blocks, topology }), 0, None)
            }
            LinksFrom::IdleRuns(runs) => (runs.opener(), runs.generation.wrapping_add(1), Some(runs)),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let hosts = host::numbered(members.iter().map(|m| self.hosts.of_ranks[*m]), members.len());
        let others = self.links_to(&members);
        let (env, tuned) = self.choice(&others, (rank, here), &hosts);
        let config = EndpointConfig {
            comm: comm.0,
            generation,
            name,
            rank,
            record: self.records.file.clone(),
            crowded: beside > cores,
            turned: TURNED * cores / beside.max(cores),
            streams_from: host::last_caches() / STREAMED / here,
            hosts,
            has_long_frames: env.n == 2 && others.iter().all(|link| link.max_frame_len > SLOT),
            tuned,
            env,
            members,
            region: self.topology.region.clone(),
            memory_lock: self.common.memory_lock.clone(),
            opener,
            control: self.clone(),
            runtime: self.runtime.clone(),
            timeout: self.common.defaults.timeout,
            #[cfg(not(any(test, feature = "testing")))]
            queue_limit: QUEUE_LIMIT,
            #[cfg(any(test, feature = "testing"))]
            queue_limit: crate::testing::faults::queue_limit().unwrap_or(QUEUE_LIMIT),
            deterministic: self.common.defaults.deterministic,
        };
        let endpoint = match runs {
            None => Endpoint::new(config),
            Some(runs) => Endpoint::reuse(config, runs),
        };
        self.take_up(comm, &endpoint);
        Ok(endpoint)
    }

    /// The kinds of the links from this rank to the other members.
    pub(super) fn links_to(&self, members: &[Rank]) -> Vec<&'static LinkKind> {
        members.iter().filter(|m| **m != self.rank).map(|m| self.topology.links[*m]).collect()
    }

    /// What the choice of an algorithm depends on in a group, and what the tuner's table says about such a group. `others`: the links to the
    /// other members; `here`: how many members are on this host.
    fn choice(
        &self,
        others: &[&LinkKind],
        (rank, here): (Rank, usize),
        hosts: &[u32],
    ) -> (Env, GroupChoices) {
        let env = Env {
            n: others.len() + 1,
            one_host: here == others.len() + 1,
            hosts: hosts.iter().max().map_or(0, |last| *last as usize + 1),
            ..Env::default()
        };
        let group = GroupShape { link: farthest(others), hosts: env.hosts, ranks: env.n };
        let shape = Shape { n: env.n, rank, hosts, ..Shape::default() };
        let tuned = self.common.choices.of_group(group, |kind, algo| suitable(kind, algo, &shape).is_ok());
        (env, tuned)
    }

    /// Adds a communicator to those that this rank has. Messages and losses that came before also count for it, in the order in which they came.
    fn take_up(self: &Arc<Self>, comm: CommId, endpoint: &Arc<Endpoint>) {
        self.comms.insert(comm, endpoint);
        for (from, message, known) in self.comms.early(comm) {
            self.apply_losses(endpoint, known);
            self.message(from, message);
        }
        self.apply_losses(endpoint, usize::MAX);
        let left = self.losses.departed.lock().left_among(&endpoint.config.members);
        left.into_iter().for_each(|peer| endpoint.peer_left(peer));
    }

    /// Makes the world's own communicator. Its rings lie at the same offset in every rank's region, as they are allocated first.
    pub(crate) fn world_endpoint(self: &Arc<Self>) -> Result<Arc<Endpoint>, Error> {
        let block = self.topology.region.alloc(block_bytes(self.size()))? as u64;
        self.endpoint(
            CommId::WORLD,
            "world".into(),
            (0..self.size()).collect(),
            LinksFrom::NewRings(vec![block; self.size()]),
        )
    }

    pub(super) fn send(&self, to: Rank, message: Message) {
        if forked::is_forked() {
            return;
        }
        match &self.transport {
            Transport::Mesh(mesh) => {
                if let Some(mesh) = mesh.upgrade() {
                    mesh.send(to, message);
                }
            }
            Transport::Hub(hub) => hub.deliver(&*self.runtime, to, self.rank, message),
        }
    }

    fn tell_members(&self, endpoint: &Endpoint, message: &Message) {
        for &to in endpoint.config.members.iter().filter(|m| **m != self.rank) {
            self.send(to, message.clone());
        }
    }

    /// Tells the members that this rank closes a communicator, after `calls` collectives. Before that it sends them its last
    /// calls to compare: where no rank waited for another, nothing has compared these, and each rank must find out about a
    /// disagreement before it has closed.
    pub(crate) fn closing(&self, endpoint: &Endpoint, calls: u64) {
        for (number, signature) in endpoint.submitted.last_calls() {
            self.stalled(endpoint, number, signature);
        }
        self.tell_members(endpoint, &Message::Closing { comm: CommId(endpoint.config.comm), calls });
    }

    /// Kills a communicator that has lost a member. Of the world's losses, in the order heard, only the first `known` count. The cause is the
    /// first of them that is the loss of a member.
    fn apply_losses(&self, endpoint: &Arc<Endpoint>, known: usize) {
        let first = self.losses.departed.lock().first_among(&endpoint.config.members, known);
        let Some((rank, how)) = first.filter(|_| endpoint.health.first_cause().is_none()) else { return };
        endpoint.poison(Error::lost(rank, how));
    }

    /// This rank leaves the world. Tells the ranks of a hub; a mesh says goodbye by itself.
    pub(crate) fn leave(&self) {
        requests::leave(self);
        self.empty_pool();
        if let Transport::Hub(_) = &self.transport {
            for to in (0..self.size()).filter(|r| *r != self.rank) {
                self.send(to, Message::Goodbye { cause: self.loss() });
            }
        }
    }

    /// The first loss this rank knows of, to be passed on with its goodbye.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.losses.departed.lock().first().map(|(rank, how)| Error::lost(rank, how))
    }
}

impl Control for World {
    fn abort(&self, endpoint: &Endpoint, cause: &Error) {
        self.tell_members(
            endpoint,
            &Message::Abort { comm: CommId(endpoint.config.comm), cause: cause.clone() },
        );
    }

    fn dies(self: Arc<Self>, endpoint: &Endpoint, cause: &Error) {
        self.record(endpoint, cause);
    }

    fn told(&self, endpoint: &Endpoint, cause: &Error) -> bool {
        let Error::PeerLost { rank, .. } = cause else { return false };
        let Some(&lost) = endpoint.config.members.get(*rank) else { return false };
        self.losses.departed.lock().tell(lost)
    }

    fn broke(&self, endpoint: &Endpoint, peer: Rank, what: Break) {
        let to = endpoint.config.members[peer];
        let (comm, told) = (endpoint.config.name.clone(), what.clone());
        LOG.warn(move || tracing::warn!(comm, peer = to, what = ?told, "a data connection broke"));
        self.send(to, Message::Broke { comm: CommId(endpoint.config.comm), what });
    }

    fn stalled(&self, endpoint: &Endpoint, number: u64, signature: Signature) {
        let comm = CommId(endpoint.config.comm);
        self.tell_members(endpoint, &Message::Stalled { comm, number, signature });
    }

    fn awaits(&self, endpoint: &Endpoint, from: Rank, number: u64, signature: Signature) {
        let comm = CommId(endpoint.config.comm);
        self.send(endpoint.config.members[from], Message::Stalled { comm, number, signature });
    }
}

impl Events for World {
    fn message(&self, from: Rank, message: Message) {
        let message = match message {
            Message::Agree { comm, lost, step } => return self.agree_heard(from, comm, &lost, step),
            other => other,
        };
        if let Message::Clock { asked_us, at_us } = message {
            return self.clock_told(from, asked_us, at_us);
        }
        let Some(comm) = message.comm() else { return };
        match message {
            Message::Retired { .. } => return self.peer_retired(from, comm),
            Message::Meet { row, .. } => return self.losses.meetings.hear(from, comm, row),
            _ => {}
        }
        if self.pool.has_ended(comm) && self.comms.find(comm).is_none() {
            return;
        }
        if self.comms.find(comm).is_none()
            && matches!(message, Message::Abort { .. } | Message::Closing { .. } | Message::Broke { .. })
        {
            let known = self.losses.departed.lock().count();
            self.comms.keep_early(from, message.clone(), known);
        }
        // Looked up after the message was kept: if the communicator is made meanwhile, it is found here, or `take_up` finds the message.
        let Some(endpoint) = self.comms.find(comm) else { return };
        let Some(peer) = endpoint.config.members.iter().position(|m| *m == from) else { return };
        match message {
            Message::Abort { cause, .. } => {
                // A member says that this rank itself is lost: from here on this rank takes part in no agreement. A lost rank's word does not count.
                if let Error::PeerLost { rank, how, .. } = cause
                    && endpoint.config.members.get(rank) == Some(&self.rank)
                    && !self.losses.departed.lock().is_lost(from)
                {
                    self.agree_lost(self.rank, how);
                }
                endpoint.poison(cause);
            }
            Message::Stalled { number, signature, .. } if signature.is_message() => {
                endpoint.peers.awaits(peer, number, signature);
            }
            Message::Stalled { number, signature, .. } => {
                let last = endpoint.asked(peer, number, signature);
                let receives = endpoint.recorder.awaited();
                self.send(from, Message::Called { comm, number, last, receives });
            }
            Message::Called { number, last, receives, .. } => {
                endpoint.peers.answered(peer, number, last, receives, endpoint.config.now());
            }
            Message::Broke { what, .. } => {
                if let Some(cause) = endpoint.peer_broke(peer, what) {
                    self.send(from, Message::Abort { comm, cause });
                }
            }
            Message::Closing { calls, .. } => endpoint.peers.closes(peer, calls),
            Message::Heartbeat
            | Message::Clock { .. }
            | Message::Goodbye { .. }
            | Message::Retired { .. }
            | Message::Meet { .. }
            | Message::Agree { .. } => {}
        }
    }

    fn lost(&self, rank: Rank, how: Lost) {
        self.agree_lost(rank, how);
        // The loss is noted first: a communicator that is being made is found by the loop, or finds the loss in `take_up`.
        if self.losses.departed.lock().lose(rank, how) {
            for endpoint in self.comms.all() {
                self.apply_losses(&endpoint, usize::MAX);
            }
        }
        self.member_gone(rank);
    }

    fn goodbye(&self, rank: Rank, cause: Option<Error>) {
        self.member_gone(rank);
        self.agree_goodbye(rank, &cause);
        // If `rank` left because another rank was lost, the groups with the lost rank fail first. All other groups only learn that `rank` has left.
        if let Some(Error::PeerLost { rank: dead, how, .. }) = cause {
            self.lost(dead, how);
        }
        self.losses.departed.lock().leave(rank);
        for endpoint in self.comms.all() {
            if let Some(peer) = endpoint.config.members.iter().position(|m| *m == rank) {
                endpoint.peer_left(peer);
            }
        }
    }

    fn data(&self, hello: DataHello, socket: TcpStream) {
        if self.pool.has_retired(hello.comm) {
            return;
        }
        self.topology.sockets.put(hello, socket);
        self.topology.progress_thread.kick();
    }
}
