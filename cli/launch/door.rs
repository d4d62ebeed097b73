//! The listening socket where the ranks of a job meet. The launcher, or an agent, opens it, and rank 0 inherits it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// How many connections may wait until rank 0 takes them: enough for all ranks to connect at once. (The standard library asks for 128. If more
/// ranks connect at once, the system drops the first packets of the rest, who send them again a second or more later.)
const QUEUE: i32 = 4096;

/// Opens a port at this address. At `[::]` it takes IPv4 as well.
pub(super) fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let is_any = address.ip() == Ipv6Addr::UNSPECIFIED;
    let listener = if is_any { bind_to_all(address)? } else { TcpListener::bind(address)? };
    rustix::net::listen(&listener, QUEUE)?;
    Ok(listener)
}

/// A socket bound to `[::]` that takes IPv4 as well once it listens, also where the system's setting `net.ipv6.bindv6only` gives new sockets
/// IPv6 alone.
fn bind_to_all(address: SocketAddr) -> io::Result<TcpListener> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As the standard library does: a port whose last connections have just ended may be taken.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_ipv6_v6only(&socket, false)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket.into())
}

/// Opens rank 0's port at the address to which the other ranks connect. Opens it on all addresses if that address is not this host's own
/// (as behind address translation), or if the name resolves to a loopback address here, which no other host could reach.
pub(super) fn open_for(host: &str, port: u16) -> io::Result<TcpListener> {
    let literal = host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok();
    let found = (host, port).to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    let own = found.into_iter().filter(|address| literal || !address.ip().is_loopback());
    let any: [SocketAddr; 2] = [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    let mut last = None;
    for address in own.chain(any) {
        match open(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let problem = format!("port {port} is taken already; choose another with --port");
                return Err(io::Error::new(error.kind(), problem));
            }
            Err(error) => last = Some(error),
        }
    }
    let why = last.map(|error| format!(": {error}")).unwrap_or_default();
    Err(io::Error::other(format!("cannot listen at {host}, port {port}{why}")))
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_port_of_this_host_is_opened() {
        let first = open_for("127.0.0.1", 0).unwrap();
        let address = first.local_addr().unwrap();
        assert!(address.ip().is_loopback());
        let error = open_for("127.0.0.1", address.port()).unwrap_err().to_string();
        assert!(error.contains("--port"), "{error}");
        // An address that is reserved for documentation: no host has it.
        let any = open_for("192.0.2.77", 0).unwrap();
        let address = any.local_addr().unwrap();
        assert!(address.ip().is_unspecified());
        let there = SocketAddr::from((Ipv4Addr::LOCALHOST, address.port()));
        TcpStream::connect_timeout(&there, Duration::from_secs(10)).unwrap();
    }

    /// More than the standard library's queue of 128 has room for.
    #[test]
    fn several_hundred_ranks_may_come_before_rank_0_takes_the_first() {
        const RANKS: usize = 300;
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
        if most.trim().parse::<usize>().is_ok_and(|most| most < RANKS) {
            return eprintln!("skipped: net.core.somaxconn is {}, so no queue is longer", most.trim());
        }
        let listener = open((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let at = listener.local_addr().unwrap();
        let come = |_| TcpStream::connect_timeout(&at, Duration::from_secs(10));
        let all: Result<Vec<_>, _> = (0..RANKS).map(come).collect();
        assert_eq!(all.unwrap().len(), RANKS);
    }
}
