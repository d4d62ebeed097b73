//! Which link joins two ranks of a communicator, and how it is opened.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::error::Error;
use crate::exec::{DEVICES, Lane, Opener};
use crate::group::message::{CommId, DataHello};
use crate::group::{Locality, Mesh};
use crate::link::exit::Exit;
use crate::link::layout::RING_BYTES;
use crate::link::local::{Bell, Gate, LocalRx, LocalTx};
use crate::link::peer::{PeerDevice, Place};
use crate::link::region::Region;
use crate::link::tcp::{Dial, TcpRx, TcpTx};
use crate::link::{LinkRx, LinkTx};
use crate::types::Rank;

/// Channels of a communicator: collectives, messages, and collectives that devices run.
pub(crate) const CHANNELS: usize = 3;

/// What ranks of one process know of each other directly.
#[derive(Default)]
pub(crate) struct Housemates {
    regions: Mutex<HashMap<Rank, (Arc<Region>, Gate)>>,
    /// By communicator and rank of the world.
    devices: Mutex<HashMap<(u64, Rank), Weak<PeerDevice>>>,
}

impl Housemates {
    /// Those of a world: the same for all its ranks in this process, for as long as one of them lives. A region stays
    /// until then, so that what a rank sent before it left can still be read.
    pub(crate) fn of(world: [u8; 16]) -> Arc<Housemates> {
        static ALL: Mutex<Vec<([u8; 16], Weak<Housemates>)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|(_, mates)| mates.strong_count() > 0);
        if let Some(mates) = all.iter().find(|(w, _)| *w == world).and_then(|(_, m)| m.upgrade()) {
            return mates;
        }
        let mates = Arc::new(Housemates::default());
        all.push((world, Arc::downgrade(&mates)));
        mates
    }

    pub(crate) fn enter(&self, rank: Rank, region: Arc<Region>, gate: Gate) {
        self.regions.lock().insert(rank, (region, gate));
    }

    fn find(&self, rank: Rank) -> Option<(Arc<Region>, Gate)> {
        self.regions.lock().get(&rank).cloned()
    }

    /// A rank's device in a communicator, for the others to find as long as it is there.
    pub(crate) fn enter_device(&self, comm: u64, rank: Rank, device: &Arc<PeerDevice>) {
        let mut devices = self.devices.lock();
        devices.retain(|_, device| device.strong_count() > 0);
        devices.insert((comm, rank), Arc::downgrade(device));
    }

    pub(crate) fn device(&self, comm: u64, rank: Rank) -> Option<Arc<PeerDevice>> {
        self.devices.lock().get(&(comm, rank))?.upgrade()
    }
}

/// Sockets that peers have opened, until the link that wants them looks.
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

    /// Closes those of a communicator that nobody will want.
    pub(crate) fn forget(&self, comm: CommId) {
        self.0.lock().retain(|(c, ..), _| *c != comm);
    }
}

/// A rank's surroundings in a world: how each other rank is reached.
pub(crate) struct Neighbourhood {
    pub(crate) rank: Rank,
    pub(crate) region: Arc<Region>,
    pub(crate) lane: Arc<Lane>,
    pub(crate) mates: Arc<Housemates>,
    /// By world rank; our own entry is not looked at.
    pub(crate) localities: Vec<Locality>,
    pub(crate) mesh: Weak<Mesh>,
    pub(crate) sockets: Arc<Sockets>,
    /// Peers' regions, mapped when first needed.
    mapped: Vec<OnceLock<(Arc<Region>, Bell)>>,
}

impl Neighbourhood {
    pub(crate) fn new(
        rank: Rank,
        region: Arc<Region>,
        lane: Arc<Lane>,
        mates: Arc<Housemates>,
        localities: Vec<Locality>,
        mesh: Weak<Mesh>,
    ) -> Neighbourhood {
        let mapped = localities.iter().map(|_| OnceLock::new()).collect();
        let sockets = Arc::default();
        Neighbourhood { rank, region, lane, mates, localities, mesh, sockets, mapped }
    }

    /// Whether a rank, not this one, writes to the rings of this rank's that it reads from.
    pub(crate) fn is_near(&self, peer: Rank) -> bool {
        peer != self.rank && self.localities[peer] != Locality::Remote
    }

    /// Whether a rank is in this process.
    pub(crate) fn is_housemate(&self, peer: Rank) -> bool {
        peer == self.rank || self.localities[peer] == Locality::SameProcess
    }

    /// A peer's region, and the bell that wakes its lane.
    fn reach(&self, peer: Rank) -> Result<(Arc<Region>, Bell), Error> {
        if let Some(reached) = self.mapped[peer].get() {
            return Ok(reached.clone());
        }
        let open = || Error::system(format!("open the link to rank {peer}"), "this rank has left the world");
        let reached = if self.localities[peer] == Locality::SameProcess {
            let (region, _) = self.mates.find(peer).ok_or_else(open)?;
            let bell = Bell::new(region.clone(), self.lane.bell().clone());
            (region, bell)
        } else {
            let mesh = self.mesh.upgrade().ok_or_else(open)?;
            let fds = mesh.peers().get(peer).and_then(Option::as_ref).map(|p| &p.fds[..]);
            let Some([region, bell]) = fds else {
                return Err(Error::system(
                    format!("open the link to rank {peer} through shared memory"),
                    "it offered no region; set ALLSTREAM_LINK=tcp on all ranks",
                ));
            };
            let copy = |fd: &std::os::fd::OwnedFd| {
                fd.try_clone().map_err(|e| Error::system(format!("open the link to rank {peer}"), e))
            };
            let region = Arc::new(Region::of_peer(copy(region)?)?);
            let bell = Bell::new(region.clone(), Arc::new(copy(bell)?));
            (region, bell)
        };
        Ok(self.mapped[peer].get_or_init(|| reached).clone())
    }

    /// Whether a peer's process has exited, where it is another one of this host.
    fn exit_of(&self, peer: Rank) -> Option<Exit> {
        self.mesh.upgrade()?.peers().get(peer)?.as_ref()?.exit.clone()
    }
}

/// The links of one communicator.
pub(crate) struct CommLinks {
    /// The communicator for which the rings were made: also its later generations open links under this name.
    pub(crate) comm: CommId,
    /// Our rank in the communicator.
    pub(crate) rank: Rank,
    /// World rank by rank.
    pub(crate) members: Vec<Rank>,
    /// Where each member's rings begin in its own region.
    pub(crate) blocks: Vec<u64>,
    pub(crate) around: Arc<Neighbourhood>,
}

/// Bytes of a member's rings: one per channel and peer.
pub(crate) fn block_bytes(size: usize) -> usize {
    CHANNELS * size * RING_BYTES
}

impl CommLinks {
    fn ring(&self, owner: Rank, to: Rank, channel: u8) -> u64 {
        self.blocks[owner] + ((usize::from(channel) * self.members.len() + to) * RING_BYTES) as u64
    }
}

impl Opener for CommLinks {
    fn open_tx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkTx>, Error> {
        let (around, world_rank) = (&self.around, self.members[peer]);
        if around.localities[world_rank] == Locality::Remote {
            let hello = DataHello { comm: self.comm, from: around.rank, channel };
            let mesh = around.mesh.clone();
            let dial: Dial = Box::new(move |done| match mesh.upgrade() {
                Some(mesh) => mesh.connect_data(world_rank, hello, done),
                None => done(Err(Error::Closed { call: "open a data connection".into() })),
            });
            return Ok(Box::new(TcpTx::new(dial, around.lane.clone())));
        }
        let (_, bell) = around.reach(world_rank)?;
        let gate = match around.localities[world_rank] {
            Locality::SameProcess => around.mates.find(world_rank).map(|(_, gate)| gate),
            _ => None,
        };
        let ring = self.ring(self.rank, peer, channel);
        let tx = LocalTx::new(around.region.clone(), ring as usize, bell, gate)?;
        Ok(Box::new(tx.between_processes(around.exit_of(world_rank))))
    }

    fn open_rx(&self, peer: Rank, channel: u8) -> Result<Box<dyn LinkRx>, Error> {
        let (around, world_rank) = (&self.around, self.members[peer]);
        if around.localities[world_rank] == Locality::Remote {
            let (sockets, comm) = (around.sockets.clone(), self.comm);
            let accept = Box::new(move || sockets.take(comm, world_rank, channel));
            return Ok(Box::new(TcpRx::new(peer, accept, around.lane.clone())));
        }
        let (region, bell) = around.reach(world_rank)?;
        let same_process = around.localities[world_rank] == Locality::SameProcess;
        let ring = self.ring(peer, self.rank, channel);
        Ok(Box::new(LocalRx::new(region, ring, bell, peer, same_process)?))
    }
    fn device_place(&self, peer: Rank, receiving: bool) -> Result<Option<Place>, Error> {
        let (around, world_rank) = (&self.around, self.members[peer]);
        if around.localities[world_rank] == Locality::Remote {
            return Ok(None);
        }
        let (theirs, bell) = around.reach(world_rank)?;
        let gate = around.mates.find(world_rank).map(|(_, gate)| gate);
        let (region, ring) = match receiving {
            true => (theirs, self.ring(peer, self.rank, DEVICES)),
            false => (around.region.clone(), self.ring(self.rank, peer, DEVICES)),
        };
        Ok(Some(Place { region, ring, bell, gate }))
    }
}
