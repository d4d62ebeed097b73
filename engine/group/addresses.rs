//! The addresses of this host at which other hosts reach it, and the listeners of a rank there.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::ops::RangeInclusive;
use std::str::FromStr;

use if_addrs::{IfAddr, Interface};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::host;
use crate::error::{Error, limits};

/// The variable that says at which interfaces the others reach a rank.
pub(crate) const INTERFACE: &str = "ALLSTREAM_INTERFACE";
/// The variable that says which ports a rank's own listener may take.
pub(crate) const PORTS: &str = "ALLSTREAM_PORTS";

/// The most addresses that a rank gives the others: they try them in turn, and each may use up its share of the time for connecting.
const MOST: usize = 8;

/// The interfaces at which the others reach a rank, written as in `NCCL_SOCKET_IFNAME`: those whose names begin with a name (`eth`), those that have
/// just this name (`=eth0`), or those whose address is in a subnet (`10.1.0.0/16`); the first named come first. With `^` in front: all but those,
/// without loopback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interfaces {
    text: String,
    but: bool,
    names: Vec<Named>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    Prefix(String),
    Exact(String),
    Subnet(IpAddr, u8),
}

impl FromStr for Interfaces {
    type Err = String;

    fn from_str(text: &str) -> Result<Interfaces, String> {
        let trimmed = text.trim();
        let but = trimmed.starts_with('^');
        let mut names = Vec::new();
        for name in trimmed.strip_prefix('^').unwrap_or(trimmed).split(',').map(str::trim) {
            // `^a,^b` is meant as `^a,b`.
            let name = name.strip_prefix('^').map_or(Ok(name), |name| {
                if but {
                    Ok(name)
                } else {
                    Err("either all of them are left out, or none: `^` stands before the first".to_string())
                }
            })?;
            if name.is_empty() {
                return Err("a name is empty".into());
            }
            names.push(match (name.strip_prefix('='), name.parse::<IpAddr>(), name.split_once('/')) {
                (Some(""), ..) => return Err("a name is empty".into()),
                (Some(exact), ..) => Named::Exact(exact.into()),
                (None, Ok(ip), _) => Named::Subnet(ip, if ip.is_ipv4() { 32 } else { 128 }),
                (None, _, Some((ip, bits))) => {
                    subnet(ip, bits).ok_or_else(|| format!("`{name}` is no subnet"))?
                }
                (None, _, None) => Named::Prefix(name.into()),
            });
        }
        Ok(Interfaces { text: trimmed.into(), but, names })
    }
}

fn subnet(ip: &str, bits: &str) -> Option<Named> {
    let (ip, bits) = (ip.parse::<IpAddr>().ok()?, bits.parse::<u8>().ok()?);
    (bits <= if ip.is_ipv4() { 32 } else { 128 }).then_some(Named::Subnet(ip, bits))
}

/// Whether the first `bits` bits of two addresses are the same.
fn is_within(ip: IpAddr, net: IpAddr, bits: u8) -> bool {
    let same = |a: u128, b: u128, width: u8| {
        let rest = u32::from(width - bits);
        a.checked_shr(rest).unwrap_or(0) == b.checked_shr(rest).unwrap_or(0)
    };
    match (ip, net) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

impl Named {
    fn fits(&self, name: &str, ip: IpAddr) -> bool {
        match self {
            Named::Prefix(prefix) => name.starts_with(prefix.as_str()),
            Named::Exact(exact) => name == exact,
            Named::Subnet(net, bits) => is_within(ip, *net, *bits),
        }
    }
}

impl Interfaces {
    /// The addresses that are chosen, the best first: in the order of the names, and for one name those of the family of `family` first.
    fn choose(&self, mut all: Vec<Own>, family: IpAddr) -> Vec<IpAddr> {
        all.sort_by_key(|own| own.ip.is_ipv4() != family.is_ipv4());
        let fits = |named: &Named, own: &Own| named.fits(&own.name, own.ip);
        let mut chosen: Vec<IpAddr> = Vec::new();
        if self.but {
            let rest =
                all.iter().filter(|own| !own.ip.is_loopback() && !self.names.iter().any(|n| fits(n, own)));
            chosen.extend(rest.map(|own| own.ip));
        } else {
            for named in &self.names {
                chosen.extend(all.iter().filter(|own| fits(named, own)).map(|own| own.ip));
            }
        }
        let mut once = Vec::new();
        chosen.retain(|ip| {
            !once.contains(ip) && once.len() < MOST && {
                once.push(*ip);
                true
            }
        });
        chosen
    }

    /// The chosen addresses of this host; an error if there is none.
    fn chosen(&self, family: IpAddr) -> Result<Vec<IpAddr>, String> {
        let all =
            own().map_err(|e| format!("asking for this host's interfaces: {}", limits::explained(&e)))?;
        let chosen = self.choose(all, family);
        if chosen.is_empty() {
            return Err(format!(
                "{INTERFACE} is `{}`, and no address of this host fits; it has {}",
                self.text,
                shown()
            ));
        }
        Ok(chosen)
    }
}

/// An address of this host, and its interface.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Own {
    name: String,
    ip: IpAddr,
    is_up: bool,
}

impl fmt::Display for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.ip)
    }
}

/// The addresses of this host's interfaces, also of those that are down, but no link-local ones.
fn own() -> io::Result<Vec<Own>> {
    let own = |interface: Interface| {
        let ip = match &interface.addr {
            IfAddr::V4(v4) => IpAddr::V4(v4.ip),
            IfAddr::V6(v6) => IpAddr::V6(v6.ip),
        };
        Own { is_up: interface.is_oper_up(), name: interface.name, ip }
    };
    Ok(if_addrs::get_if_addrs()?.into_iter().map(own).collect())
}

/// All addresses of this host, for messages to people.
pub(super) fn shown() -> String {
    match own() {
        Ok(all) if all.is_empty() => "none".into(),
        Ok(all) => all.iter().map(Own::to_string).collect::<Vec<_>>().join(", "),
        Err(e) => format!("unknown ({e})"),
    }
}

/// How the names of interfaces begin that lead to containers and virtual machines of this host, and to nowhere else.
const WITHIN: [&str; 6] = ["docker", "virbr", "veth", "br-", "cni", "podman"];

/// The address from which this host reaches another one. Nothing is sent: the system only chooses a route.
fn toward(there: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if there.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let probe = UdpSocket::bind((any, 0))?;
    probe.connect(there)?;
    Ok(probe.local_addr()?.ip())
}

/// Addresses of this host at which others may reach it, as far as this host can know. First those from which it reaches the internet, then those of
/// its interfaces; interfaces that lead only to its own containers and virtual machines come last.
fn outward() -> Vec<IpAddr> {
    // Addresses that are reserved for documentation, so that nobody has them: the route to them is the one to the internet.
    let worlds =
        [SocketAddr::from(([192, 0, 2, 1], 9)), SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 9))];
    let ways = worlds.into_iter().filter_map(|there| toward(there).ok());
    let mut all = own().unwrap_or_default();
    all.retain(|own| own.is_up);
    all.sort_by_key(|own| (WITHIN.iter().any(|within| own.name.starts_with(within)), own.ip.is_ipv6()));
    let mut found: Vec<IpAddr> = Vec::new();
    for ip in ways.chain(all.into_iter().map(|own| own.ip)) {
        if !ip.is_loopback() && !ip.is_unspecified() && !found.contains(&ip) && found.len() < MOST {
            found.push(ip);
        }
    }
    found
}

/// The addresses at which other ranks reach this host, as the environment says, or else as far as can be known before they meet.
pub(super) fn reached_at() -> Result<Vec<IpAddr>, Error> {
    let get = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let port = get("MASTER_PORT").and_then(|port| port.trim().parse().ok()).unwrap_or(1);
    let known = get("MASTER_ADDR").and_then(|host| seen_from(host.trim(), port));
    let known = known.or_else(|| outward().first().copied());
    match Reach::from_env()?.interfaces {
        Some(interfaces) => {
            let chosen = interfaces.chosen(known.unwrap_or(Ipv4Addr::LOCALHOST.into()));
            chosen.map_err(|problem| Error::invalid("read the environment", problem))
        }
        None => Ok(known.into_iter().collect()),
    }
}

/// Where a rank's own listener may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    pub(crate) interfaces: Option<Interfaces>,
    pub(crate) ports: Option<RangeInclusive<u16>>,
}

/// Reads a range such as `20000-20999`, or one port.
pub(crate) fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.trim().split_once('-').unwrap_or((text.trim(), text.trim()));
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(format!("{PORTS} is `{text}`; expected the first port and the last, such as 20000-20999")),
    }
}

impl Reach {
    /// What the environment says. Used if nothing was said in code.
    pub(crate) fn from_env() -> Result<Reach, Error> {
        let get = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
        let invalid = |problem| Error::invalid("read the environment", problem);
        let interfaces = get(INTERFACE).map(|text| {
            text.parse().map_err(|e| {
                invalid(format!(
                    "{INTERFACE} is `{text}`; expected names of interfaces as NCCL_SOCKET_IFNAME has them, or subnets (`eth`, \
                     `=eth0,ib`, `10.1.0.0/16`, `^docker,lo`): {e}"
                ))
            })
        });
        let ports = get(PORTS).map(|text| ports(&text).map_err(invalid));
        Ok(Reach { interfaces: interfaces.transpose()?, ports: ports.transpose()? })
    }

    /// Opens a rank's own listener: at `known`, or at the interfaces that the user has named. Returns it with the addresses to be told to the other
    /// ranks, the best first. An unspecified `known` is told as it is: rank 0, which alone may have one, replaces it for each rank.
    ///
    /// `at_all`: a name led to `known`, a loopback address, at which other hosts do not reach this one: so its other addresses are told, too.
    pub(super) fn listen(
        &self,
        known: IpAddr,
        at_all: bool,
    ) -> Result<(tokio::net::TcpListener, Vec<SocketAddr>), String> {
        let told = match &self.interfaces {
            Some(interfaces) => interfaces.chosen(known)?,
            None if at_all => [known].into_iter().chain(outward()).take(MOST).collect(),
            None => vec![known],
        };
        let at = match &told[..] {
            [one] => *one,
            many if many.iter().all(IpAddr::is_ipv4) => Ipv4Addr::UNSPECIFIED.into(),
            _ => Ipv6Addr::UNSPECIFIED.into(),
        };
        let failed = |e: String| format!("opening this rank's own listener at {at}: {e}");
        let listener = self.open(at).map_err(failed)?;
        let system = |e: io::Error| failed(limits::explained(&e));
        let port = listener.local_addr().map_err(system)?.port();
        listener.set_nonblocking(true).map_err(system)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(system)?;
        Ok((listener, told.into_iter().map(|ip| SocketAddr::new(ip, port)).collect()))
    }

    /// A socket where rank 0 may listen, and its address, by which other hosts reach this one
    /// ([`Rendezvous::listen_for_ranks`](crate::Rendezvous::listen_for_ranks)).
    pub(super) fn listen_for_ranks(
        &self,
        near: Option<(&str, u16)>,
    ) -> Result<(TcpListener, SocketAddr), Error> {
        let known = near.and_then(|(host, port)| seen_from(host, port));
        let known = known.or_else(|| outward().first().copied()).unwrap_or(Ipv4Addr::LOCALHOST.into());
        let known = match &self.interfaces {
            None => known,
            Some(interfaces) => {
                let chosen = interfaces.chosen(known).map_err(|e| Error::invalid("listen_for_ranks", e))?;
                chosen.first().copied().unwrap_or(known)
            }
        };
        let doing = || format!("listen at {known} for the other ranks");
        let listener = self.open(known).map_err(|e| Error::system(doing(), e))?;
        let at = listener.local_addr().map_err(|e| Error::os(doing(), e))?;
        Ok((listener, at))
    }

    /// Opens a listener at a free port, of those that the user has named if there are any.
    fn open(&self, at: IpAddr) -> Result<TcpListener, String> {
        let Some(ports) = &self.ports else {
            return bind(SocketAddr::new(at, 0)).map_err(|e| limits::explained(&e));
        };
        let count = u32::from(ports.end() - ports.start()) + 1;
        // Ranks of one host start at the same time, so each begins at a random port.
        let first = u32::from_le_bytes(host::random().map_err(|e| e.to_string())?) % count;
        for i in 0..count {
            let port = ports.start() + ((u64::from(first) + u64::from(i)) % u64::from(count)) as u16;
            match bind(SocketAddr::new(at, port)) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                Err(e) => return Err(format!("port {port}: {}", limits::explained(&e))),
            }
        }
        Err(format!(
            "all ports of {PORTS}={}-{} are taken; each rank needs one of its host's, and rank 0 the one where ranks meet as well",
            ports.start(),
            ports.end()
        ))
    }
}

/// How many connections may wait until a listener takes them: enough for all ranks of a world at once. (The standard library asks for 128: where
/// more come at once, the system drops their first packets, and they come again a second or more later.)
const QUEUE: i32 = 4096;

/// Lengthens the queue of a listening socket, so that all ranks of a world may come at once.
pub(super) fn lengthen_queue(listener: &TcpListener) -> io::Result<()> {
    Ok(rustix::net::listen(listener, QUEUE)?)
}

/// A listener whose queue is long enough for all ranks of a world at once. At `[::]` it takes IPv4 as well.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let is_any = address.ip() == Ipv6Addr::UNSPECIFIED;
    let listener = if is_any { bind_to_all(address)? } else { TcpListener::bind(address)? };
    lengthen_queue(&listener)?;
    Ok(listener)
}

/// A socket bound to `[::]` that takes IPv4 as well once it listens, also where the system's setting `net.ipv6.bindv6only` gives new sockets IPv6 alone.
fn bind_to_all(address: SocketAddr) -> io::Result<TcpListener> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As the standard library does: a port whose last connections have just ended may be taken.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_ipv6_v6only(&socket, false)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket.into())
}

/// A listener at a fixed address, for this process's control thread.
pub(super) fn listen_at(address: SocketAddr) -> io::Result<tokio::net::TcpListener> {
    let listener = bind(address)?;
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}

/// The address of this host that is seen at `there`. None if `there` is a name that does not resolve, or leads only to loopback addresses: a host's
/// own name often leads to a loopback address on that host, and to another address elsewhere.
fn seen_from(there: &str, port: u16) -> Option<IpAddr> {
    let is_literal = is_literal(there);
    let found = (there, port.max(1)).to_socket_addrs().ok()?;
    found.filter_map(|there| toward(there).ok()).find(|ip| is_literal || !ip.is_loopback())
}

/// Whether this is an address or `localhost`, which mean the same on every host, and no other name.
pub(super) fn is_literal(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
#[path = "tests/addresses.rs"]
mod tests;
