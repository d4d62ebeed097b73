//! Finds out whether the devices of a communicator's ranks reach each other's memory, and what its ranks tell each other for that.

use std::sync::Arc;

use super::links::Topology;
use crate::device::DeviceBuf;
use crate::device::links::ipc::{Far, FarPeer, FarRings};
use crate::device::links::offer::{CARD, Offer, Offered};
use crate::device::links::peer::PeerDevice;
use crate::device::nccl::LEAVE_TO_SHARE;
use crate::device::whole::{Library, Sharing};
use crate::error::{Error, Members};
use crate::exec::EndpointConfig;
use crate::types::Rank;

/// Bytes of a row, which is what a rank says of itself: whether it can be bound, notes, its process's number, its device's UUID.
pub(super) const ROW: usize = 2 + 16 + 16;
/// The first byte: the rank can be bound.
const OK: u8 = 1;
/// The second byte has one bit for each of the notes that follow. There are members in other processes than the rank's.
const FAR: u8 = 1;
/// There are members with which the rank shares no memory, such as those on other hosts.
const REMOTE: u8 = 2;
/// The rank's driver lacks what sharing device memory with other processes needs.
const LACKS: u8 = 4;
/// The rank asks for NCCL.
const NCCL: u8 = 8;
/// The rank's NCCL takes several ranks on one device.
const SHARES: u8 = 16;
/// The rank's NCCL would take several ranks on one device if the environment allowed it ([`LEAVE_TO_SHARE`]).
const NO_LEAVE: u8 = 32;

/// The row of a rank that can be bound.
#[derive(Clone, Copy)]
pub(super) struct Row {
    notes: u8,
    process: u128,
    uuid: [u8; 16],
}

/// What follows from the rows of all ranks.
pub(super) enum Heard {
    Rows(Vec<Row>),
    /// Why devices do not reach each other.
    Staged(String),
    /// Why the ranks cannot have what they ask for.
    Refused(String),
}

/// Reads the rows of all ranks. All ranks come to the same verdict. `Err(rank)`: that rank cannot be bound. `library`: the name of this
/// rank's library, for texts.
pub(super) fn heard(rows: &[u8], members: &Members, library: Option<&str>) -> Result<Heard, Rank> {
    let (rows, _) = rows.as_chunks::<ROW>();
    if let Some(rank) = rows.iter().position(|row| row[0] != OK) {
        return Err(rank);
    }
    let read = |row: &[u8; ROW]| {
        let (mut process, mut uuid) = ([0; 16], [0; 16]);
        process.copy_from_slice(&row[2..18]);
        uuid.copy_from_slice(&row[18..]);
        Row { notes: row[1], process: u128::from_le_bytes(process), uuid }
    };
    let rows: Vec<_> = rows.iter().map(read).collect();
    let noted = |what: u8| rows.iter().position(|row| row.notes & what != 0);
    if let Some(rank) = noted(NCCL) {
        if let Some(other) = rows.iter().position(|row| row.notes & NCCL == 0) {
            let problem = format!(
                "{} asks for NCCL, and {} does not; all ranks must ask for the same",
                members.rank(rank),
                members.rank(other)
            );
            return Ok(Heard::Refused(problem));
        }
        let before = |at: usize| rows[..at].iter().position(|row| row.uuid == rows[at].uuid);
        let shared = (0..rows.len()).find_map(|at| Some((before(at)?, at)));
        // One rank whose NCCL takes no shared device is enough to make NCCL fail on all ranks.
        let strict = rows.iter().position(|row| row.notes & SHARES == 0);
        if let Some(((one, other), strict)) = shared.zip(strict) {
            let why = match rows[strict].notes & NO_LEAVE {
                0 => format!("that of {} is older", members.rank(strict)),
                _ => format!("{} has not set {LEAVE_TO_SHARE}=1", members.rank(strict)),
            };
            let problem = format!(
                "{} and {} have one device, and NCCL wants one for each rank; from 2.30 on it shares one where {LEAVE_TO_SHARE}=1 is set for all \
                 ranks of the communicator, but {why} (this rank has {}, and {LEAVE_TO_SHARE} is {}); see to that, give each rank a device of its own, \
                 or call bind_device instead",
                members.rank(one),
                members.rank(other),
                library.unwrap_or("none"),
                std::env::var(LEAVE_TO_SHARE).map_or_else(|_| "not set".into(), |set| format!("{set:?}")),
            );
            return Ok(Heard::Refused(problem));
        }
    }
    if let Some(rank) = noted(REMOTE) {
        let why = format!(
            "{} is not on one host with all others, or does not share memory with them",
            members.rank(rank)
        );
        return Ok(Heard::Staged(why));
    }
    if let Some(rank) = noted(LACKS).filter(|_| noted(FAR).is_some()) {
        let why =
            format!("the CUDA driver of {} cannot share memory with other processes", members.rank(rank));
        return Ok(Heard::Staged(why));
    }
    Ok(Heard::Rows(rows))
}

/// A communicator's members, and where they are.
pub(super) struct Group<'a> {
    pub(super) config: &'a EndpointConfig,
    pub(super) topology: &'a Topology,
}

/// What [`Group::reach`] has found and made.
pub(super) struct Reached {
    /// By rank: the device. `None`: the rank is in another process.
    pub(super) all: Vec<Option<Arc<PeerDevice>>>,
    /// By rank: what was made for a rank in another process.
    pub(super) offers: Vec<Option<Offer>>,
    /// The cards of the offers, one after another; zeros for a rank in this process.
    pub(super) cards: Vec<u8>,
}

impl Group<'_> {
    fn housemate(&self, rank: Rank) -> bool {
        self.topology.is_housemate(self.config.members[rank])
    }

    /// What this rank says of itself. From here on the other ranks of the process can find its device.
    pub(super) fn row(
        &self,
        device: &Arc<PeerDevice>,
        process: u128,
        library: Option<&dyn Library>,
    ) -> [u8; ROW] {
        let (members, ours) = (&self.config.members, self.config.rank);
        self.topology.mates.enter_device(self.config.comm, members[ours], device);
        let mut row = [0; ROW];
        row[0] = OK;
        let far = (0..members.len()).any(|rank| !self.housemate(rank));
        let remote = members.iter().any(|member| *member != members[ours] && !self.topology.is_near(*member));
        let lacks = device.stream.missing_for_sharing().is_some() || !device.has_words();
        let sharing = library.map(|library| library.sharing());
        let (shares, no_leave) = (sharing == Some(Sharing::Yes), sharing == Some(Sharing::NoLeave));
        let notes = [
            (far, FAR),
            (remote, REMOTE),
            (lacks, LACKS),
            (library.is_some(), NCCL),
            (shares, SHARES),
            (no_leave, NO_LEAVE),
        ];
        row[1] = notes.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).sum();
        row[2..18].copy_from_slice(&process.to_le_bytes());
        row[18..].copy_from_slice(&device.stream.device().uuid());
        row
    }

    /// Lets this rank's device touch the memory of the other devices in this process, and makes an offer for each rank in another process.
    /// Offered memory is not given back to the driver as long as `keep` lives. `Ok(Err(why))`: this device cannot reach another one, or its
    /// memory cannot be offered.
    pub(super) fn reach(
        &self,
        ours: &PeerDevice,
        keep: &Arc<()>,
        rows: &[Row],
    ) -> Result<Result<Reached, String>, Error> {
        let named = self.config.named();
        let mut reached = Reached { all: Vec::new(), offers: Vec::new(), cards: Vec::new() };
        // One byte of the pool is offered, so that ranks in other processes can try to open memory of this device.
        let far = (0..rows.len()).any(|rank| !self.housemate(rank));
        let probe = DeviceBuf::<u8>::raw(&ours.stream, usize::from(far))?;
        for (rank, row) in rows.iter().enumerate() {
            if self.housemate(rank) {
                let theirs = self.topology.mates.device(self.config.comm, self.config.members[rank]);
                let gone = || Error::system("bind devices", "a rank has taken its device back (a bug)");
                let theirs = theirs.ok_or_else(gone)?;
                if !ours.stream.reach(&theirs.stream)? {
                    let (a, b) = (ours.stream.device().ordinal(), theirs.stream.device().ordinal());
                    let why = format!(
                        "device {a} cannot reach the memory of device {b}, which is that of {}",
                        named.rank(rank)
                    );
                    return Ok(Err(why));
                }
                reached.all.push(Some(theirs));
                reached.offers.push(None);
                reached.cards.resize(reached.cards.len() + CARD, 0);
                continue;
            }
            if let Err(why) = ours.stream.reaches(row.uuid)? {
                return Ok(Err(format!("{}: {why}", named.rank(rank))));
            }
            // If the driver refuses to share memory, as it may in a virtual machine, that is no error: device buffers are staged then.
            let offer = || {
                let named = ours.stream.export(keep, probe.as_ptr(), 1)?;
                let nameless = || Error::system("share device memory", "the pool has lost it (a bug)");
                let exit = self.config.opener.exit(rank);
                Offer::new(&ours.stream, &self.config.region, &named.ok_or_else(nameless)?, exit)
            };
            match offer() {
                Ok(offer) => {
                    reached.cards.extend_from_slice(&offer.card);
                    reached.offers.push(Some(offer));
                }
                Err(error) => return Ok(Err(format!("for {}: {error}", named.rank(rank)))),
            }
            reached.all.push(None);
        }
        Ok(Ok(reached))
    }

    /// Opens what the ranks in other processes have offered. `Err`: why it cannot be opened.
    pub(super) fn open(
        &self,
        ours: &PeerDevice,
        keep: Arc<()>,
        rows: &[Row],
        (offers, cards): (&[Option<Offer>], &[u8]),
    ) -> Result<Far, String> {
        let (links, mut all, mut rings) = (&self.config.opener, Vec::new(), Vec::new());
        let named = &self.config.named();
        let why = |rank| move |error: Error| format!("{}: {error}", named.rank(rank));
        // All cards are read before the first offer is opened. If one offer cannot be opened, all `Offered` are dropped: so each rank in another
        // process sees that its offer is not used.
        for (rank, offer) in offers.iter().enumerate() {
            let mut offered = None;
            if rank != self.config.rank {
                let to = links.device_place(rank, false).map_err(why(rank))?;
                let from = links.device_place(rank, true).map_err(why(rank))?;
                let (Some(to), Some(from)) = (to, from) else {
                    return Err(format!("{} has no rings here (a bug)", named.rank(rank)));
                };
                if let Some(offer) = offer {
                    let card = cards.get(rank * CARD..(rank + 1) * CARD).unwrap_or_default();
                    let theirs = Offered::new(rank, from.region.clone(), card);
                    offered = Some((offer, theirs.map_err(why(rank))?));
                }
                rings.push(FarRings { rank, to, from });
            }
            all.push(offered);
        }
        let open = |((rank, row), offered): ((Rank, &Row), Option<(&Offer, Offered)>)| {
            let Some((offer, offered)) = offered else { return Ok(None) };
            let peer = FarPeer::new(&ours.stream, row.process, links.exit(rank), offer, offered);
            peer.map(|peer| Some(Arc::new(peer))).map_err(why(rank))
        };
        let peers = rows.iter().enumerate().zip(all).map(open).collect::<Result<_, _>>()?;
        Far::new(peers, keep, rings).map_err(|error| error.to_string())
    }
}
