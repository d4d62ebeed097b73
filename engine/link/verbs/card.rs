//! An opened port of a network card, over which all RDMA links of a rank go. If the rank uses a second port, that carries some of the large frames.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use allstream_sys::verbs::{Access, IbvDeviceAttr, IbvPortAttr, Mtu, Verbs, VerbsError};
use parking_lot::Mutex;
use rustix::io::Errno;

use super::blocks::{Blocks, Part};
use super::choose::{AREAS, RdmaPort};
use super::credits::{CELLS, MOST_SLOTS};
use super::domain::{Domain, Registered};
use super::events::Events;
use super::hello::{Area, Hello};
use super::layout::{LARGEST, PIECES, TRIAL_BYTES, area_bytes, cut};
use super::offers::Reads;
use super::read::addresses_of;
use super::wishes::Wishes;
use crate::error::Error;
use crate::link::region::Region;
use crate::trace::log::LOG;

/// The vendor that Soft-RoCE names (`RXE_VENDOR_ID`). With a retry count of 7, Soft-RoCE sends a packet again for ever.
const SOFT_ROCE: u32 = 0xff_ffff;
/// On kernels before this version, a fork moves registered memory away from the device.
const FORK_SAFE: (u32, u32) = (5, 12);

/// The settings of the queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    pub(super) timeout: u8,
    pub(super) retry: u8,
    pub(super) traffic_class: u8,
    pub(super) service_level: u8,
    pub(super) pkey: u16,
}

impl Tuning {
    /// A card sends an unacknowledged packet again after about a second (code 18), seven times; Soft-RoCE after 67 ms (code 14), six times. So
    /// a lost path is reported after some seconds by a card, and after half a second by Soft-RoCE.
    fn of(wishes: &Wishes, vendor: u32) -> Tuning {
        let (timeout, retry) = if vendor == SOFT_ROCE { (14, 6) } else { (18, 7) };
        Tuning {
            timeout: wishes.timeout.unwrap_or(timeout),
            retry: wishes.retry.unwrap_or(retry),
            traffic_class: wishes.traffic_class.unwrap_or(0),
            service_level: wishes.service_level.unwrap_or(0),
            pkey: wishes.pkey.unwrap_or(0),
        }
    }
}

/// An open port, and the rank's memory that is registered for it. A rank's RDMA links share one `Card`, and its second port if it has one.
pub(crate) struct Card {
    domain: Arc<Domain>,
    events: Arc<Events>,
    port: RdmaPort,
    attributes: IbvPortAttr,
    gid: [u8; 16],
    tuning: Tuning,
    /// Requests that a queue takes, at most.
    most_requests: u32,
    region: Arc<Region>,
    /// The region's staging slots, registered when the first link is opened.
    slots: Mutex<Option<Arc<Registered>>>,
    blocks: Arc<Blocks>,
    reads: Reads,
    /// Bytes of all receive areas.
    areas: AtomicUsize,
    /// From so many bytes of receive areas on, a new link gets no slots: it is narrow, and takes 16 KB at its two ends together.
    most_areas: usize,
    /// The rank's second port, if this is the first and there is another one.
    second: Option<Arc<Card>>,
    /// If this is a second port: the peers' ports, by their addresses, that no message from here has reached, and when that was tried.
    unreached: Mutex<BTreeMap<[u8; 16], Instant>>,
    /// This second port is not used for further links: the device could not connect it to a peer's port. Each attempt may take a second, during
    /// which the progress thread stands still.
    is_given_up: AtomicBool,
    /// The user has been told that messages do not get through.
    is_told: AtomicBool,
}

/// A port that no message has reached is tried again after this long.
const AGAIN: Duration = Duration::from_secs(60);

impl Card {
    /// Opens the ports that were chosen, for the rank that has this region. If the second cannot be used, a warning says why, and it is left out.
    pub(crate) fn open(
        verbs: &'static Verbs,
        (first, second): (&RdmaPort, Option<&RdmaPort>),
        wishes: &Wishes,
        region: Arc<Region>,
    ) -> Result<Card, Error> {
        let mut card = Card::open_one(verbs, first, wishes, region.clone())?;
        let opened = second.map(|second| Card::open_one(verbs, second, wishes, region));
        let is_as_good = |second: &Card| {
            let needed = card.max_message().min(LARGEST as u32);
            let (place, bytes) = (second.place(), second.max_message());
            if bytes < needed {
                return Err(format!("{place} takes messages of {bytes} bytes at most"));
            }
            // A link has one number of slots for both ports. So a second port with a shorter queue would take slots from the first.
            let (slots, wanted) = (second.slots_to_send(needed), card.slots_to_send(needed));
            if slots < wanted {
                return Err(format!(
                    "{place} has room for {slots} large frames in a queue, and the first port for {wanted}"
                ));
            }
            Ok(())
        };
        let opened = opened.map(|opened| {
            let opened = opened.map_err(|error| error.to_string())?;
            is_as_good(&opened).map(|()| opened)
        });
        let told = |problem: &String| {
            let (place, problem) = (card.place(), problem.clone());
            LOG.warn(move || tracing::warn!("links over RDMA go by {place} alone: {problem}"));
        };
        card.second = opened.and_then(|opened| opened.inspect_err(told).ok()).map(Arc::new);
        Ok(card)
    }

    fn open_one(
        verbs: &'static Verbs,
        port: &RdmaPort,
        wishes: &Wishes,
        region: Arc<Region>,
    ) -> Result<Card, Error> {
        let failed = |problem: String| Error::Unavailable {
            what: "RDMA".into(),
            problem: format!("{} port {} cannot be used: {problem}", port.device, port.port),
        };
        let leaves_forks = survive_forks(verbs).map_err(failed)?;
        if port.gid > u8::MAX.into() {
            return Err(failed(format!(
                "its GID has index {}, above 255; name another one by ALLSTREAM_RDMA_GID",
                port.gid
            )));
        }
        let open = || -> Result<_, VerbsError> {
            let domain = Arc::new(Domain::open(verbs, &port.device)?);
            let events = Events::of(&domain, &port.device, port.port)?;
            let limits = domain.attributes()?;
            let attributes = domain.port(port.port)?;
            let gid = domain.gid(limits.phys_port_cnt, port.port, port.gid)?;
            Ok((domain, events, limits, attributes, gid))
        };
        let (domain, events, limits, attributes, gid) = open().map_err(|error| failed(error.to_string()))?;
        let most_requests = most_requests(&limits, attributes.max_msg_sz).map_err(failed)?;
        let blocks = Arc::new(Blocks::new(&domain, leaves_forks));
        Ok(Card {
            domain,
            events: Arc::new(events),
            port: port.clone(),
            attributes,
            gid,
            tuning: Tuning::of(wishes, limits.vendor_id),
            most_requests,
            region,
            slots: Mutex::default(),
            blocks,
            reads: Reads::of(&limits),
            areas: AtomicUsize::new(0),
            most_areas: wishes.memory.unwrap_or(AREAS),
            second: None,
            unreached: Mutex::default(),
            is_given_up: AtomicBool::new(false),
            is_told: AtomicBool::new(false),
        })
    }

    /// The rank's second port.
    pub(super) fn second(&self) -> Option<&Arc<Card>> {
        self.second.as_ref()
    }

    /// Whether links are to connect this second port to the peer's port with this address.
    pub(super) fn reaches(&self, gid: &[u8; 16]) -> bool {
        let unreached = self.unreached.lock();
        !self.is_given_up.load(Ordering::Relaxed) && unreached.get(gid).is_none_or(|at| at.elapsed() >= AGAIN)
    }

    /// No message from this port, a second one, has reached that peer's port.
    pub(super) fn cannot_reach(&self, other: &Hello, problem: String) {
        self.unreached.lock().insert(other.gid, Instant::now());
        self.tell(other, problem);
    }

    /// The device has failed to connect this port, a second one, to a peer's: this port is not used for further links.
    pub(super) fn give_up(&self, other: &Hello, problem: String) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.tell(other, problem);
    }

    /// Warns the user that messages do not get through, the first time only.
    fn tell(&self, other: &Hello, problem: String) {
        if self.is_told.swap(true, Ordering::Relaxed) {
            return;
        }
        let (place, address) = (self.place(), other.address());
        LOG.warn(move || {
            tracing::warn!(
                "links over RDMA go by the first ports alone, as nothing gets from {place} to {address}: {problem}; if the two are not to reach each \
                 other, name one port in ALLSTREAM_RDMA_DEVICE (mlx5_0:1)"
            );
        });
    }

    pub(super) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// The device's events, which tell of its failures.
    pub(super) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(super) fn port(&self) -> &RdmaPort {
        &self.port
    }

    pub(super) fn tuning(&self) -> Tuning {
        self.tuning
    }

    pub(super) fn gid(&self) -> &[u8; 16] {
        &self.gid
    }

    pub(super) fn mtu(&self) -> Mtu {
        Mtu(self.attributes.active_mtu)
    }

    /// Bytes of the largest message that the port takes.
    pub(super) fn max_message(&self) -> u32 {
        self.attributes.max_msg_sz
    }

    pub(super) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The port, for messages to people.
    pub(super) fn place(&self) -> String {
        format!("{} port {} ({})", self.port.device, self.port.port, self.port.address)
    }

    /// What this end of a link tells the other end about itself and its port.
    pub(super) fn hello(&self, pair: u32, first_packet: u32, slots: u32, area: Option<Area>) -> Hello {
        Hello {
            layer: self.port.layer,
            mtu: self.mtu(),
            pair,
            first_packet,
            lid: self.attributes.lid,
            gid: self.gid,
            max_message: self.max_message(),
            slots,
            reads: 0,
            requests: 0,
            area,
        }
    }

    /// The region's staging slots, registered.
    pub(super) fn slots(&self) -> Result<Arc<Registered>, Error> {
        let mut slots = self.slots.lock();
        match &*slots {
            Some(there) => Ok(there.clone()),
            None => {
                let new = Arc::new(Registered::slots_of(&self.domain, &self.region)?);
                Ok(slots.insert(new).clone())
            }
        }
    }

    /// Where these bytes are, if all of them lie in one buffer from `Comm::alloc` that the card has registered, or registers now.
    pub(super) fn block(&self, at: *const u8, bytes: usize) -> Option<Part> {
        self.blocks.part(&self.region, at, bytes)
    }

    /// From here on the region tells this card of each buffer from `Comm::alloc` that is given back. To be called once for the card that a rank uses,
    /// before its first link.
    pub(crate) fn pin(&self) {
        let pins: Weak<Blocks> = Arc::downgrade(&self.blocks);
        self.region.pin_by(pins);
        self.second.iter().for_each(|second| second.pin());
    }

    /// How many READs the device carries out at once.
    pub(super) fn reads(&self) -> Reads {
        self.reads
    }

    /// How many slots a sender can have under way at once, as its queue has to take the requests for all of them.
    pub(super) fn slots_to_send(&self, max_message: u32) -> u32 {
        let most = self.most_requests.saturating_sub(CELLS as u32) / requests_of_large(max_message);
        most.clamp(1, MOST_SLOTS)
    }

    /// Memory for what one peer sends over one link, with `wanted` slots, or fewer if the rank's areas take much memory already. `is_wide`: the link
    /// is to have a second lane. The second port can then write there, too, unless the area gets no slots, cannot be registered twice, or would then
    /// leave later links fewer slots.
    pub(super) fn area(self: &Arc<Self>, wanted: u32, is_wide: bool) -> Result<ReceiveArea, Error> {
        let used = self.areas.load(Ordering::Relaxed);
        let slots = grant(used, self.most_areas).min(wanted);
        let has_memory = used + 2 * (area_bytes(slots) + TRIAL_BYTES) <= self.most_areas / 2;
        let second = self.second.as_ref().filter(|_| is_wide && slots > 0 && has_memory);
        let bytes = area_bytes(slots) + if second.is_some() { TRIAL_BYTES } else { 0 };
        let access = [Access::LOCAL_WRITE, Access::REMOTE_WRITE];
        let memory = Registered::new(&self.domain, bytes, &access)?;
        // `ReceiveArea` drops this registration before the one above, with which the mapping ends.
        let again = |second: &Arc<Card>| Registered::block(&second.domain, memory.start(), bytes, &access);
        let second = second.and_then(|second| again(second).ok());
        let registered = bytes * (1 + usize::from(second.is_some()));
        self.areas.fetch_add(registered, Ordering::Relaxed);
        Ok(ReceiveArea { second, memory: Some(memory), slots, registered, card: self.clone() })
    }

    /// Memory for the headers and small payloads that a link sends.
    pub(super) fn cells(&self, bytes: usize) -> Result<Registered, Error> {
        Registered::new(&self.domain, bytes, &[Access::LOCAL_WRITE])
    }
}

/// How many slots the next link gets when the areas use `used` of at most `most` bytes. With 0 slots the link is narrow.
fn grant(used: usize, most: usize) -> u32 {
    match used {
        used if used < most / 2 => MOST_SLOTS,
        used if used < most / 4 * 3 => MOST_SLOTS / 2,
        used if used < most => MOST_SLOTS / 4,
        _ => 0,
    }
}

/// The receive area of a link.
pub(super) struct ReceiveArea {
    /// The registration of the same memory for the second port.
    second: Option<Registered>,
    /// `None` once the memory was left to the device (`leave`).
    memory: Option<Registered>,
    pub(super) slots: u32,
    registered: usize,
    card: Arc<Card>,
}

impl ReceiveArea {
    pub(super) fn memory(&self) -> Option<&Registered> {
        self.memory.as_ref()
    }

    /// The memory's registration for the first port, or for the second.
    pub(super) fn of_lane(&self, lane: usize) -> Option<&Registered> {
        if lane == 0 { self.memory.as_ref() } else { self.second.as_ref() }
    }

    /// The link does without its second port.
    pub(super) fn end_second(&mut self) {
        let Some(second) = self.second.take() else { return };
        let bytes = self.registered / 2;
        match second.end() {
            true => {
                self.registered -= bytes;
                self.card.areas.fetch_sub(bytes, Ordering::Relaxed);
            }
            // The second device may write to the memory for ever.
            false => self.leave(),
        }
    }

    /// A device may write to the memory for ever, so it stays mapped and is never used for anything else.
    pub(super) fn leave(&mut self) {
        std::mem::forget((self.second.take(), self.memory.take()));
    }
}

impl Drop for ReceiveArea {
    fn drop(&mut self) {
        self.end_second();
        self.card.areas.fetch_sub(self.registered, Ordering::Relaxed);
    }
}

/// How many requests a large frame may take: its messages, or three for an offer (`offers.rs`), which binds a window, writes, and invalidates the key.
fn requests_of_large(max_message: u32) -> u32 {
    (cut(LARGEST, max_message).0 as u32).max(3)
}

/// How many requests a sender's queue has to take, if the link has so many slots (0: it is narrow).
pub(super) fn requests(slots: u32, max_message: u32) -> u32 {
    CELLS as u32 + (slots * requests_of_large(max_message)).max(PIECES as u32)
}

/// How many requests a queue may have; an error if a link needs more, or if one request cannot gather two pieces of memory.
fn most_requests(limits: &IbvDeviceAttr, max_message: u32) -> Result<u32, String> {
    let most = u32::try_from(limits.max_qp_wr).unwrap_or(0);
    let needed = requests(1, max_message).max(super::RECEIVER_REQUESTS);
    if most < needed {
        return Err(format!(
            "a queue pair takes {most} requests of {max_message} bytes at most, and a frame of {LARGEST} bytes needs {needed} of them"
        ));
    }
    if limits.max_sge < 2 {
        return Err(format!("its requests gather {} pieces of memory, and 2 are needed", limits.max_sge));
    }
    Ok(most)
}

/// On a kernel before 5.12, has libibverbs keep registered memory out of forked children, as a fork would otherwise move that memory. Returns whether
/// forked children still have that memory (`false`: libibverbs hides it from them).
fn survive_forks(verbs: &Verbs) -> Result<bool, String> {
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy();
    if version(&release).is_some_and(|version| version >= FORK_SAFE) {
        return Ok(true);
    }
    // SAFETY: the function takes no arguments and may be called at any time; it fails if that is too late.
    let kept_out = unsafe { verbs.fork_init() };
    kept_out.map(|()| false).map_err(|error| {
        format!("kernel {release} moves registered memory when a process forks (5.12 does not), and {error}")
    })
}

/// The first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

impl Domain {
    fn port(&self, number: u8) -> Result<IbvPortAttr, VerbsError> {
        let mut attributes = IbvPortAttr::default();
        // SAFETY: the device is open, and `attributes` has room for what the call writes, as in `allstream_sys`'s `Context::port`.
        unsafe { self.verbs.query_port(self.context(), number, &raw mut attributes) }?;
        Ok(attributes)
    }

    /// An address of a port, by its index. The library gives the addresses of all of the device's ports in one table.
    fn gid(&self, ports: u8, port: u8, index: u32) -> Result<[u8; 16], VerbsError> {
        let of = |port| addresses_of(self.port(port).as_ref());
        let room: usize = (1..=ports.max(port)).map(|port| of(port).min(1 << 12)).sum();
        let mut entries = vec![allstream_sys::verbs::IbvGidEntry::default(); room + 1];
        let size = size_of::<allstream_sys::verbs::IbvGidEntry>();
        // SAFETY: the device is open, and `entries` has room for so many entries of this size. The flags are 0: none is defined.
        let count = unsafe {
            self.verbs.query_gid_table(self.context(), entries.as_mut_ptr(), entries.len(), 0, size)
        }?;
        entries.truncate(usize::try_from(count).unwrap_or(0));
        let found = entries.iter().find(|e| e.port_num == u32::from(port) && e.gid_index == index);
        // The address is missing only if the port has lost it since it was chosen.
        found
            .map(|entry| entry.gid.raw)
            .ok_or(VerbsError { call: "_ibv_query_gid_table", code: Errno::ADDRNOTAVAIL.raw_os_error() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart_by_their_release() {
        for (release, expected) in [
            ("6.1.0-28-amd64", Some((6, 1))),
            ("5.12", Some((5, 12))),
            ("4.18.0-553.el8", Some((4, 18))),
            ("x", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
        assert!(version("5.4.0").unwrap() < FORK_SAFE && version("5.15.0").unwrap() >= FORK_SAFE);
    }

    #[test]
    fn areas_shrink_as_memory_is_used_and_none_is_refused() {
        let used = [0, AREAS / 2, AREAS / 4 * 3, AREAS, 2 * AREAS];
        assert_eq!(used.map(|used| grant(used, AREAS)), [8, 4, 2, 0, 0]);
        assert_eq!(grant(0, 0), 0, "a user who grants no memory has narrow links alone");
        // What a rank of 8 with 100 groups registers: its areas, and the cells that its links send from; 4 MB of staging slots come on top.
        let links = 7 * 100;
        let mut used = 0;
        for _ in 0..links {
            used += area_bytes(grant(used, AREAS));
        }
        assert!(used + links * super::super::layout::CELLS_BYTES < (60 << 20), "{used}");
    }

    #[test]
    fn soft_roce_gives_up_and_the_user_is_believed() {
        let soft = Tuning::of(&Wishes::default(), SOFT_ROCE);
        assert_eq!((soft.timeout, soft.retry), (14, 6));
        let wishes = Wishes { timeout: Some(20), traffic_class: Some(106), ..Wishes::default() };
        let card = Tuning::of(&wishes, 0x2c9);
        assert_eq!((card.timeout, card.retry, card.traffic_class, card.pkey), (20, 7, 106, 0));
    }
}
