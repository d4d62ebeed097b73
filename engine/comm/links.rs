//! What the links of a communicator are opened with: sockets, a port for RDMA, and rings in the ranks' regions.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::device::links::peer::PeerDevice;
use crate::error::Error;
use crate::exec::{DEVICES, Opener, ProgressThread};
use crate::group::Mesh;
use crate::group::message::{CommId, DataHello};
use crate::link::dialled::Dial;
use crate::link::exit::Exit;
use crate::link::layout::RING_BYTES;
use crate::link::local::{Doorbell, MemoryLock};
use crate::link::region::Region;
use crate::link::tcp::Accept;
use crate::link::verbs::Card;
use crate::link::{Lends, LinkKind, LinkName, LinkRx, LinkTx, Open, Place, Reactor, Site};
use crate::trace::log::LOG;
use crate::types::Rank;

/// Channels of a communicator: collectives, messages, and collectives that devices run.
pub(crate) const CHANNELS: usize = 3;

/// What ranks of one process know of each other directly.
#[derive(Default)]
pub(crate) struct ProcessRanks {
    regions: Mutex<HashMap<Rank, (Arc<Region>, MemoryLock)>>,
    /// By communicator, and rank in the world.
    devices: Mutex<HashMap<(u64, Rank), Weak<PeerDevice>>>,
}

impl ProcessRanks {
    /// What the ranks of a world in this process know of each other: all of them share it, and it lives as long as one of them. It keeps
    /// each rank's region until then, so that peers can still read what a rank sent before it left.
    pub(crate) fn of(world: [u8; 16]) -> Arc<ProcessRanks> {
        static ALL: Mutex<Vec<([u8; 16], Weak<ProcessRanks>)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|(_, mates)| mates.strong_count() > 0);
        if let Some(mates) = all.iter().find(|(w, _)| *w == world).and_then(|(_, m)| m.upgrade()) {
            return mates;
        }
        let mates = Arc::new(ProcessRanks::default());
        all.push((world, Arc::downgrade(&mates)));
        mates
    }

    pub(crate) fn enter(&self, rank: Rank, region: Arc<Region>, memory_lock: MemoryLock) {
        self.regions.lock().insert(rank, (region, memory_lock));
    }

    fn find(&self, rank: Rank) -> Option<(Arc<Region>, MemoryLock)> {
        self.regions.lock().get(&rank).cloned()
    }

    /// Notes a rank's device in a communicator. The others find it for as long as the rank holds it.
    pub(crate) fn enter_device(&self, comm: u64, rank: Rank, device: &Arc<PeerDevice>) {
        let mut devices = self.devices.lock();
        devices.retain(|_, device| device.strong_count() > 0);
        devices.insert((comm, rank), Arc::downgrade(device));
    }

    pub(crate) fn device(&self, comm: u64, rank: Rank) -> Option<Arc<PeerDevice>> {
        self.devices.lock().get(&(comm, rank))?.upgrade()
    }
}

/// Data connections that peers have opened, each until the link that receives from it asks for it.
#[derive(Default)]
pub(crate) struct Sockets(Mutex<HashMap<(CommId, Rank, u8), TcpStream>>);

impl Sockets {
    pub(crate) fn put(&self, hello: DataHello, socket: TcpStream) {
        let mut sockets = self.0.lock();
        if sockets.contains_key(&(hello.comm, hello.from, hello.channel)) {
            tracing::warn!(from = hello.from, "a second data connection for one channel was dropped");
            return;
        }
        sockets.insert((hello.comm, hello.from, hello.channel), socket);
    }

    pub(crate) fn take(&self, comm: CommId, from: Rank, channel: u8) -> Option<TcpStream> {
        self.0.lock().remove(&(comm, from, channel))
    }

    /// Closes the sockets of a communicator that has ended here, which no link will ask for.
    pub(crate) fn forget(&self, comm: CommId) {
        self.0.lock().retain(|(c, ..), _| *c != comm);
    }
}

/// A rank's surroundings in a world: how each other rank is reached.
pub(crate) struct Topology {
    /// The world's name, and our rank in it.
    pub(crate) world: [u8; 16],
    pub(crate) rank: Rank,
    pub(crate) region: Arc<Region>,
    pub(crate) progress_thread: Arc<ProgressThread>,
    pub(crate) mates: Arc<ProcessRanks>,
    /// By rank in the world: the kind of the links to that rank. Our own entry is a filler: no rank opens a link to itself.
    pub(crate) links: Vec<&'static LinkKind>,
    pub(crate) mesh: Weak<Mesh>,
    pub(crate) sockets: Arc<Sockets>,
    /// The port that this rank's links over RDMA go through, if it has such links.
    card: Option<Arc<Card>>,
    /// Peers' regions, mapped when first needed.
    mapped: Vec<OnceLock<(Arc<Region>, Doorbell)>>,
}

impl Topology {
    /// The world's name, as people read it.
    pub(crate) fn world_name(&self) -> String {
        self.world.iter().map(|b| format!("{b:02x}")).collect()
    }

    pub(crate) fn new(
        (world, rank): ([u8; 16], Rank),
        (region, card): (Arc<Region>, Option<Arc<Card>>),
        progress_thread: Arc<ProgressThread>,
        mates: Arc<ProcessRanks>,
        links: Vec<&'static LinkKind>,
        mesh: Weak<Mesh>,
    ) -> Topology {
        let mapped = links.iter().map(|_| OnceLock::new()).collect();
        let sockets = Arc::default();
        Topology { world, rank, region, progress_thread, mates, links, mesh, sockets, card, mapped }
    }

    /// Whether a rank is another one that shares memory with this rank. Such a rank reads from rings in this rank's region, and writes there
    /// which frames it has released.
    pub(crate) fn is_near(&self, peer: Rank) -> bool {
        peer != self.rank && self.links[peer].lends != Lends::Nothing
    }

    /// Whether a rank is in this process.
    pub(crate) fn is_housemate(&self, peer: Rank) -> bool {
        peer == self.rank || self.links[peer].lends == Lends::Anything
    }

    /// A peer's region, and the doorbell that wakes its progress thread.
    fn reach(&self, peer: Rank) -> Result<(Arc<Region>, Doorbell), Error> {
        if let Some(reached) = self.mapped[peer].get() {
            return Ok(reached.clone());
        }
        // All ranks are told of an error here, so its text names the rank that had the trouble.
        let opening = || format!("on rank {} of the world, open the link to rank {peer}", self.rank);
        let open = || Error::system(opening(), "this rank has left the world");
        let reached = if self.links[peer].lends == Lends::Anything {
            let (region, _) = self.mates.find(peer).ok_or_else(open)?;
            let doorbell = Doorbell::new(region.clone(), self.progress_thread.doorbell().clone());
            (region, doorbell)
        } else {
            let mesh = self.mesh.upgrade().ok_or_else(open)?;
            let fds = mesh.peers().get(peer).and_then(Option::as_ref).map(|p| &p.fds[..]);
            let Some([region, doorbell]) = fds else {
                return Err(Error::system(
                    format!("{} through shared memory", opening()),
                    "it offered no shared-memory region; set ALLSTREAM_LINK=tcp on all ranks",
                ));
            };
            let copy = |fd: &std::os::fd::OwnedFd| fd.try_clone().map_err(|e| Error::os(opening(), e));
            let mapped = Region::of_peer(copy(region)?).map_err(|error| match error {
                Error::System { doing, problem } => Error::system(format!("{}, {doing}", opening()), problem),
                error => error,
            });
            let region = Arc::new(mapped?);
            let doorbell = Doorbell::new(region.clone(), Arc::new(copy(doorbell)?));
            (region, doorbell)
        };
        Ok(self.mapped[peer].get_or_init(|| reached).clone())
    }
}

/// The links of one communicator.
pub(crate) struct CommLinks {
    /// The communicator for which the rings were made. Later communicators that take the rings up again open links under this id, too.
    pub(crate) comm: CommId,
    /// Our rank in the communicator.
    pub(crate) rank: Rank,
    /// By rank in the communicator: the rank in the world.
    pub(crate) members: Vec<Rank>,
    /// Where each member's rings begin in its own region.
    pub(crate) blocks: Vec<u64>,
    pub(crate) topology: Arc<Topology>,
}

/// Bytes of one member's rings: the member has one ring for each channel and member.
pub(crate) fn block_bytes(size: usize) -> usize {
    CHANNELS * size * RING_BYTES
}

impl CommLinks {
    fn kind(&self, peer: Rank) -> &'static LinkKind {
        self.topology.links[self.members[peer]]
    }

    fn site(&self, peer: Rank, channel: u8, receiving: bool) -> CommSite<'_> {
        CommSite { links: self, peer, channel, receiving }
    }
}

impl Opener for CommLinks {
    fn open_tx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkTx>, Error> {
        self.site(peer, channel, false).open(self.kind(peer).open_tx)
    }

    fn open_rx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkRx>, Error> {
        self.site(peer, channel, true).open(self.kind(peer).open_rx)
    }

    fn device_place(&self, peer: Rank, receiving: bool) -> Result<Option<Place>, Error> {
        match self.kind(peer).lends {
            Lends::Nothing => Ok(None),
            _ => self.site(peer, DEVICES, receiving).place().map(Some),
        }
    }

    fn exit(&self, peer: Rank) -> Option<Exit> {
        self.site(peer, DEVICES, false).exit()
    }
}

/// One of the communicator's links.
struct CommSite<'a> {
    links: &'a CommLinks,
    peer: Rank,
    channel: u8,
    /// This rank is the receiver.
    receiving: bool,
}

impl CommSite<'_> {
    fn open<L: ?Sized>(&self, open: Open<L>) -> Result<Box<L>, Error> {
        let (name, class) = (self.name(), self.links.kind(self.peer).class);
        LOG.debug(move || tracing::debug!(?name, %class, "a link is opened"));
        open(self)
    }

    /// The peer's rank in the world.
    fn world_rank(&self) -> Rank {
        self.links.members[self.peer]
    }
}

impl Site for CommSite<'_> {
    fn peer(&self) -> Rank {
        self.peer
    }

    fn name(&self) -> LinkName {
        let (ours, theirs) = (self.links.topology.rank, self.world_rank());
        let ends = if self.receiving { (theirs, ours) } else { (ours, theirs) };
        LinkName { world: self.links.topology.world, comm: self.links.comm.0, ends, channel: self.channel }
    }

    fn place(&self) -> Result<Place, Error> {
        let CommLinks { topology, members, blocks, rank, .. } = self.links;
        let (theirs, doorbell) = topology.reach(self.world_rank())?;
        let memory_lock = topology.mates.find(self.world_rank()).map(|(_, memory_lock)| memory_lock);
        let (region, from, to) = match self.receiving {
            true => (theirs, self.peer, *rank),
            false => (topology.region.clone(), *rank, self.peer),
        };
        let ring = blocks[from] + ((usize::from(self.channel) * members.len() + to) * RING_BYTES) as u64;
        Ok(Place { region, ring, doorbell, memory_lock })
    }

    fn exit(&self) -> Option<Exit> {
        let mesh = self.links.topology.mesh.upgrade()?;
        mesh.peers().get(self.world_rank())?.as_ref()?.exit.clone()
    }

    fn dial(&self) -> Dial {
        let (mesh, to) = (self.links.topology.mesh.clone(), self.world_rank());
        let hello =
            DataHello { comm: self.links.comm, from: self.links.topology.rank, channel: self.channel };
        Box::new(move |done| match mesh.upgrade() {
            Some(mesh) => mesh.connect_data(to, hello, done),
            None => done(Err(Error::Closed { call: "open a data connection".into() })),
        })
    }

    fn accept(&self) -> Accept {
        let (sockets, comm) = (self.links.topology.sockets.clone(), self.links.comm);
        let (from, channel) = (self.world_rank(), self.channel);
        Box::new(move || sockets.take(comm, from, channel))
    }

    fn reactor(&self) -> Arc<dyn Reactor> {
        self.links.topology.progress_thread.clone()
    }

    fn card(&self) -> Result<Arc<Card>, Error> {
        let none = || Error::system("open a link over RDMA", "this rank has opened no port (a bug)");
        self.links.topology.card.clone().ok_or_else(none)
    }
}
