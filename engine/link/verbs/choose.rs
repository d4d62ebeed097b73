//! Chooses ports, and an address of each: a function of what the host has ([`Facts`]) and what its user has said ([`Wishes`]).

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use allstream_sys::verbs::{GidType, LinkLayer, PortState, Transport};

use super::facts::{Device, Facts, Found, Gid, Interface, Locked};
use super::wishes::{DEVICE, GID, MEMORY, Wishes};

/// Bytes of memory that a rank registers for what its peers send, unless the user says otherwise (`ALLSTREAM_RDMA_MEMORY`).
pub(super) const AREAS: usize = 40 << 20;
/// Bytes that a rank must be able to lock besides, as registering memory locks it: for staging slots, narrow links, and the device's queues.
const OTHERS: usize = 24 << 20;

/// The RDMA of this host: what can carry links to other hosts, and what cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rdma {
    /// The file from which libibverbs was loaded.
    pub library: String,
    /// The ports that can be used, the best first: one at least, all InfiniBand or all RoCE.
    pub ports: Vec<RdmaPort>,
    /// How many of these carry a rank's links: the first, or the first two side by side.
    pub used: usize,
    /// The other devices, ports and addresses of this host, and why they are not used.
    pub passed_over: Vec<PassedOver>,
}

/// The kind of network behind a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RdmaLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RDMA in UDP packets.
    RoceV2,
}

impl fmt::Display for RdmaLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RdmaLayer::InfiniBand => "InfiniBand",
            RdmaLayer::RoceV2 => "RoCE v2",
        })
    }
}

/// A port of a network card that can be used, and the one of its addresses that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaPort {
    /// The device, such as `mlx5_0`.
    pub device: String,
    /// The port, from 1.
    pub port: u8,
    /// The kind of network behind it.
    pub layer: RdmaLayer,
    /// The index of the address in the port's table (GID).
    pub gid: u32,
    /// The address.
    pub address: IpAddr,
    /// The network interface that has the address, if this process sees it.
    pub interface: Option<String>,
    /// Bytes of data in a packet, at most, as the network is set up.
    pub mtu: u32,
    /// The same, if the network were set up for the most that the port can do.
    pub max_mtu: u32,
    /// Bytes of the largest message.
    pub max_message: u32,
}

impl fmt::Display for RdmaPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {} active, {}, GID {}", self.device, self.port, self.layer, self.gid)?;
        match &self.interface {
            Some(interface) => write!(f, " ({} of {interface})", self.address)?,
            None => write!(f, " ({})", self.address)?,
        }
        write!(f, ", MTU {}", self.mtu)?;
        if self.mtu < self.max_mtu {
            write!(f, " (the port can do {}", self.max_mtu)?;
            // An interface's MTU counts a packet's headers too, which fit in 104 bytes.
            match self.layer {
                RdmaLayer::RoceV2 => {
                    write!(
                        f,
                        ": give its interface an MTU of {} or more, and the switches)",
                        self.max_mtu + 104
                    )?;
                }
                RdmaLayer::InfiniBand => f.write_str(")")?,
            }
        }
        Ok(())
    }
}

/// What is not used, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// A device, a port, or addresses of a port.
    pub what: String,
    /// Why it is not used, and what to do if it should be.
    pub why: String,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

/// How well an address suits: the best compares as the least. What counts first is how near it is to where the other ranks reach this host,
/// then its family, then its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Suits {
    place: Place,
    family: Family,
    index: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// The very address at which the other ranks reach this host.
    There,
    /// Another address of the same interface.
    Beside,
    /// An address of another interface of this host.
    Elsewhere,
    /// An address of no interface that this process sees.
    Nowhere,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    V4,
    V6,
    LinkLocal,
}

/// What the choice of a port's address depends on, besides the port.
struct Around<'a> {
    interfaces: &'a [Interface],
    /// The addresses at which the other ranks reach this host.
    near: &'a [IpAddr],
    gid: Option<u32>,
}

impl Around<'_> {
    /// The interface that has a GID's address. Only for a link-local address is the interface number in the GID enough: such an address is made
    /// from the card's own, so the interface need not list it. Otherwise the address must match, as a container may see the host's numbers.
    fn interface(&self, gid: &Gid) -> Option<&Interface> {
        let has = |own: &&Interface| {
            own.ip == gid.ip() && (own.index == gid.interface || own.index == 0 || gid.interface == 0)
        };
        let by_number =
            |own: &&Interface| is_link_local(gid) && gid.interface != 0 && own.index == gid.interface;
        self.interfaces.iter().find(has).or_else(|| self.interfaces.iter().find(by_number))
    }

    fn suits(&self, gid: &Gid) -> Suits {
        let interface = self.interface(gid).map(|own| &own.name);
        let is_near = |own: &Interface| Some(&own.name) == interface && self.near.contains(&own.ip);
        let place = match interface {
            Some(_) if self.near.contains(&gid.ip()) => Place::There,
            Some(_) if self.interfaces.iter().any(is_near) => Place::Beside,
            Some(_) => Place::Elsewhere,
            None => Place::Nowhere,
        };
        let family = match gid.ip() {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) if is_link_local(gid) => Family::LinkLocal,
            IpAddr::V6(_) => Family::V6,
        };
        Suits { place, family, index: gid.index }
    }

    /// Why `other` was not taken: it suits less than the address that was.
    fn less(&self, taken: Suits, other: &Gid) -> &'static str {
        let suits = self.suits(other);
        match (suits.place, suits.family) {
            (Place::Nowhere, _) if taken.place < Place::Nowhere => "of no interface that this process sees",
            (Place::Elsewhere, _) if taken.place < Place::Elsewhere => {
                "not of the interface at which the other ranks reach this host"
            }
            (_, Family::LinkLocal) if taken.family < Family::LinkLocal => {
                "a link-local address, which comes last"
            }
            (_, Family::V6) if taken.family < Family::V6 => {
                "an address of IPv6, and those of IPv4 come first"
            }
            _ if suits.place > taken.place => "not the address at which the other ranks reach this host",
            _ => "as good as the one taken, which comes first in the port's table",
        }
    }
}

fn is_link_local(gid: &Gid) -> bool {
    gid.address.is_unicast_link_local()
}

/// Numbers as a person writes them: `0, 1, 3`.
fn listed(gids: &[&Gid]) -> String {
    let numbers: Vec<String> = gids.iter().map(|gid| gid.index.to_string()).collect();
    if numbers.is_empty() { "none".into() } else { numbers.join(", ") }
}

/// The kind of network behind a port. Where the driver does not say (`UNSPECIFIED`), it is InfiniBand.
fn layer(device: &Device, port: &Found) -> Result<RdmaLayer, String> {
    match (port.layer, device.transport) {
        (LinkLayer::ETHERNET, _) => Ok(RdmaLayer::RoceV2),
        (LinkLayer::INFINIBAND | LinkLayer::UNSPECIFIED, Transport::IB) => Ok(RdmaLayer::InfiniBand),
        (other, _) => Err(format!("it is neither InfiniBand nor Ethernet ({other:?})")),
    }
}

/// Whether anything can be sent through a port.
fn is_up(layer: RdmaLayer, state: PortState) -> Result<(), String> {
    Err(match (state, layer) {
        (PortState::ACTIVE, _) => return Ok(()),
        (PortState::DOWN, RdmaLayer::RoceV2) => {
            "it is down: check the cable, and that its interface is up (ip link)".into()
        }
        (PortState::DOWN, RdmaLayer::InfiniBand) => "it is down: check the cable and the switch".into(),
        (PortState::INIT | PortState::ARMED, RdmaLayer::InfiniBand) => {
            "it has a link, and no subnet manager has set it up: start opensm, or the switch's own".into()
        }
        (other, _) => format!("it is not active ({other:?})"),
    })
}

/// The one of a port's addresses that is taken, and those that are passed over, by the reason.
type Taken<'a> = (&'a Gid, BTreeMap<&'static str, Vec<&'a Gid>>);

fn address<'a>(around: &Around<'_>, layer: RdmaLayer, gids: &'a [Gid]) -> Result<Taken<'a>, String> {
    // On InfiniBand all addresses are of one kind.
    let fits = |gid: &&Gid| layer == RdmaLayer::InfiniBand || gid.kind == GidType::ROCE_V2;
    let (fit, unfit): (Vec<&Gid>, Vec<&Gid>) = gids.iter().partition(fits);
    if let Some(index) = around.gid {
        if let Some(named) = fit.iter().find(|gid| gid.index == index) {
            return Ok((named, BTreeMap::new()));
        }
        let problem = match unfit.iter().any(|gid| gid.index == index) {
            true => format!("GID {index}, which {GID} names, is not of RoCE v2"),
            false => format!("it has no GID {index}, which {GID} names"),
        };
        return Err(format!("{problem}; it has of {layer}: {}", listed(&fit)));
    }
    let best = match layer {
        // On InfiniBand the first address is the port's own; the others belong to virtual ports that a hypervisor has made of it.
        RdmaLayer::InfiniBand => fit.iter().min_by_key(|gid| gid.index),
        RdmaLayer::RoceV2 => fit.iter().min_by_key(|gid| around.suits(gid)),
    };
    let Some(best) = best.copied() else {
        return Err(match (layer, gids.is_empty()) {
            (RdmaLayer::InfiniBand, _) => "it has no GID: no subnet manager has given it one".into(),
            (RdmaLayer::RoceV2, true) => "it has no address: give its interface one (ip addr add)".into(),
            (RdmaLayer::RoceV2, false) => format!(
                "it has no address of RoCE v2, only others (GID {}): give its interface an IP address (ip addr add), and see that \
                 the card's default is not RoCE v1",
                listed(&unfit)
            ),
        });
    };
    let mut passed_over: BTreeMap<&'static str, Vec<&Gid>> = BTreeMap::new();
    if layer == RdmaLayer::RoceV2 {
        let taken = around.suits(best);
        let other = "not of RoCE v2, and RoCE v1 gets past no router";
        unfit.into_iter().for_each(|gid| passed_over.entry(other).or_default().push(gid));
        for gid in fit.into_iter().filter(|gid| gid.index != best.index) {
            passed_over.entry(around.less(taken, gid)).or_default().push(gid);
        }
    }
    Ok((best, passed_over))
}

/// A port that can be used, how well its address suits, and which of its addresses are passed over; or why the port cannot be used.
fn usable(
    around: &Around<'_>,
    device: &Device,
    number: u8,
    port: &Found,
) -> Result<(RdmaPort, Suits, Vec<PassedOver>), String> {
    let layer = layer(device, port)?;
    is_up(layer, port.state)?;
    let mtu = port
        .mtu
        .bytes()
        .ok_or_else(|| format!("it reports an MTU code that does not exist ({})", port.mtu.0))?;
    if port.max_message == 0 {
        return Err("it reports 0 bytes as its largest message".into());
    }
    let (gid, unused) = address(around, layer, &port.gids)?;
    let unused = unused.into_iter().map(|(why, gids)| PassedOver {
        what: format!("{} port {number} GID {}", device.name, listed(&gids)),
        why: why.into(),
    });
    let usable = RdmaPort {
        device: device.name.clone(),
        port: number,
        layer,
        gid: gid.index,
        address: gid.ip(),
        interface: around.interface(gid).map(|own| own.name.clone()),
        mtu,
        max_mtu: port.max_mtu.bytes().unwrap_or(mtu),
        max_message: port.max_message,
    };
    Ok((usable, around.suits(gid), unused.collect()))
}

/// Chooses the ports. `near` are the addresses at which the other ranks reach this host, as far as they are known.
///
/// # Errors
/// Why nothing can be used, and what to do.
pub(crate) fn choose(library: &str, facts: &Facts, wishes: &Wishes, near: &[IpAddr]) -> Result<Rdma, String> {
    are_there(facts, wishes)?;
    let around = Around { interfaces: &facts.interfaces, near, gid: wishes.gid };
    let mut passed_over = unlisted(facts);
    let mut usables = Vec::new();
    for (device, number, port) in ports(facts, &mut passed_over) {
        let refused = |why: String| PassedOver { what: format!("{} port {number}", device.name), why };
        let place = match wished(wishes, &device.name, number) {
            Ok(place) => place,
            Err(why) => {
                passed_over.push(refused(why));
                continue;
            }
        };
        let rate = port.as_ref().map_or((0, 0), |found| found.rate);
        match port.and_then(|found| usable(&around, device, number, &found)) {
            Ok((port, suits, unused)) => {
                let order = (place, port.layer != RdmaLayer::InfiniBand, suits.place);
                usables.push(Usable { order, is_far: device.is_far, rate, port, unused });
            }
            Err(why) => passed_over.push(refused(why)),
        }
    }
    // The sort is stable: where nothing else decides, the order of the devices stays.
    usables.sort_by_key(|usable| usable.order);
    let is_named = wishes.devices.as_ref().is_some_and(|named| !named.all_but);
    let second = second(&usables, is_named);
    if let Some(second) = second {
        usables[1..=second].rotate_right(1);
    }
    let mut chosen: Vec<RdmaPort> = Vec::new();
    for Usable { port, unused, .. } in usables {
        if let Some(first) = chosen.first().filter(|first| first.layer != port.layer) {
            passed_over.push(PassedOver {
                what: format!("{} port {}", port.device, port.port),
                why: format!(
                    "it is {}, and {} is {}: one of the two is used; name devices in {DEVICE} to take the other",
                    port.layer, first.device, first.layer
                ),
            });
            continue;
        }
        passed_over.extend(unused);
        chosen.push(port);
    }
    if chosen.is_empty() {
        return Err(nothing(&passed_over, facts));
    }
    let memory = wishes.memory.unwrap_or(AREAS);
    may_lock(facts.locked, &chosen[0], memory, 1)?;
    // The second card registers the same memory once more.
    let is_used = second.is_some() && may_lock(facts.locked, &chosen[0], memory, 2).is_ok();
    Ok(Rdma { library: library.to_owned(), ports: chosen, used: 1 + usize::from(is_used), passed_over })
}

/// A port that can be used.
struct Usable {
    /// What decides first comes first: the place that the user has given it, InfiniBand before RoCE, how near its address is to the other ranks.
    order: (usize, bool, Place),
    is_far: bool,
    rate: (u8, u8),
    port: RdmaPort,
    unused: Vec<PassedOver>,
}

/// Which port carries a rank's links beside the first: the best of those that are as fast as the first. After the user's order, what counts is
/// whether a port is near to where this process runs. An address of no interface that this process sees most likely leads nowhere, so a port with
/// such an address is taken only if the user has named (`is_named`) the device, or if the first port's address is such a one, too.
fn second(usables: &[Usable], is_named: bool) -> Option<usize> {
    let first = usables.first()?;
    let suits = |other: &Usable| {
        other.port.layer == first.port.layer
            && other.rate == first.rate
            && (is_named || other.order.2 != Place::Nowhere || first.order.2 == Place::Nowhere)
    };
    let all = usables.iter().enumerate().skip(1).filter(|(_, other)| suits(other));
    all.min_by_key(|(_, other)| (other.order.0, other.is_far, other.order.2)).map(|(at, _)| at)
}

/// Checks that all devices and ports exist that the user has named for use. Those named to be left out need not exist.
fn are_there(facts: &Facts, wishes: &Wishes) -> Result<(), String> {
    let Some(named) = wishes.devices.as_ref().filter(|named| !named.all_but) else { return Ok(()) };
    for name in &named.names {
        let found = facts.devices.iter().find(|device| device.name == name.device);
        if found.is_none() && !facts.unlisted.contains(&name.device) {
            let names: Vec<&str> = facts.devices.iter().map(|device| device.name.as_str()).collect();
            let there = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(format!(
                "{DEVICE} is `{named}`, and there is no device {} here; there are: {there}",
                name.device
            ));
        }
        let ports = found.and_then(|device| device.ports.as_ref().ok());
        let numbers: Option<Vec<u8>> = ports.map(|ports| ports.iter().map(|port| port.number).collect());
        if let (Some(port), Some(numbers)) = (name.port, numbers)
            && !numbers.contains(&port)
        {
            let numbers: Vec<String> = numbers.iter().map(u8::to_string).collect();
            return Err(format!(
                "{DEVICE} is `{named}`, and {} has no port {port}; it has {}",
                name.device,
                numbers.join(", ")
            ));
        }
    }
    Ok(())
}

/// The place of a port in the order that the user has named; an error if the user has left it out.
fn wished(wishes: &Wishes, device: &str, port: u8) -> Result<usize, String> {
    let Some(named) = &wishes.devices else { return Ok(0) };
    let at = named.names.iter().position(|name| name.means(device, port));
    match (named.all_but, at) {
        (false, Some(at)) => Ok(at),
        (true, None) => Ok(0),
        (false, None) | (true, Some(_)) => Err(format!("left out: {DEVICE} is `{named}`")),
    }
}

/// A port's device and number, and what the port said of itself.
type Asked<'a> = (&'a Device, u8, Result<Found, String>);

/// The ports of all devices that speak InfiniBand or RoCE; the other devices are put in `passed_over`.
fn ports<'a>(facts: &'a Facts, passed_over: &mut Vec<PassedOver>) -> Vec<Asked<'a>> {
    let mut all = Vec::new();
    for device in &facts.devices {
        let mut pass = |why: String| passed_over.push(PassedOver { what: device.name.clone(), why });
        match &device.ports {
            _ if device.transport != Transport::IB => {
                let spoken = device.transport.name().unwrap_or("something unknown");
                pass(format!("it speaks {spoken}; InfiniBand and RoCE v2 are used"));
            }
            Err(problem) => pass(format!("{problem}{}", about_files(facts))),
            Ok(ports) if ports.is_empty() => pass("it has no port".into()),
            Ok(ports) => all.extend(ports.iter().map(|port| (device, port.number, port.found.clone()))),
        }
    }
    all
}

/// What to do if the files are missing through which devices are reached.
fn about_files(facts: &Facts) -> &'static str {
    if facts.has_device_files {
        ""
    } else {
        "; there is no /dev/infiniband: start the container with --device=/dev/infiniband"
    }
}

fn unlisted(facts: &Facts) -> Vec<PassedOver> {
    let pass = |name: &String| PassedOver {
        what: name.clone(),
        why: if facts.has_device_files {
            "the kernel has it, and libibverbs has no driver for it: install ibverbs-providers (Debian, Ubuntu) or rdma-core".into()
        } else {
            "the kernel has it, and there is no /dev/infiniband: start the container with --device=/dev/infiniband".into()
        },
    };
    facts.unlisted.iter().map(pass).collect()
}

/// Says that nothing can be used, and why.
fn nothing(passed_over: &[PassedOver], facts: &Facts) -> String {
    if passed_over.is_empty() {
        return format!(
            "there is no device{}; a card needs its driver's kernel modules, and Ethernet without such a card can stand in for one slowly \
             (Soft-RoCE: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev INTERFACE)",
            if facts.has_device_files {
                ""
            } else {
                ", and no /dev/infiniband (of a container: --device=/dev/infiniband)"
            }
        );
    }
    let each: Vec<String> = passed_over.iter().map(PassedOver::to_string).collect();
    format!("no port can be used: {}", each.join("; "))
}

/// Checks that this process may lock the memory that it would register with so many ports' cards.
fn may_lock(locked: Locked, port: &RdmaPort, areas: usize, ports: u64) -> Result<(), String> {
    let needed = (areas.saturating_add(OTHERS) as u64).saturating_mul(ports);
    match locked {
        Locked::UpTo(most) if most < needed => Err(format!(
            "{} port {} could be used, but this process may lock {most} bytes of memory (RLIMIT_MEMLOCK), and {needed} are needed: raise \
             the limit with `ulimit -l unlimited` before the program starts (LimitMEMLOCK=infinity for a service of systemd's, `memlock` in \
             /etc/security/limits.conf), or start the container with --ulimit memlock=-1; {MEMORY}=0 needs {OTHERS}, for slower links",
            port.device, port.port
        )),
        _ => Ok(()),
    }
}
