use std::net::TcpStream;
use std::time::Duration;

use super::*;
use crate::group::Rendezvous;

fn own_of(names: &[(&str, &str)]) -> Vec<Own> {
    names
        .iter()
        .map(|(name, ip)| Own { name: (*name).into(), ip: ip.parse().unwrap(), is_up: true })
        .collect()
}

#[test]
fn interfaces_are_named_as_nccl_names_them_and_by_subnets() {
    let all = own_of(&[
        ("lo", "127.0.0.1"),
        ("docker0", "172.17.0.1"),
        ("eth0", "fd00::5"),
        ("eth0", "10.1.0.5"),
        ("eth01", "10.2.0.5"),
        ("ib0", "192.168.7.5"),
    ]);
    for (text, wanted) in [
        ("eth", &["10.1.0.5", "10.2.0.5", "fd00::5"][..]),
        ("=eth0", &["10.1.0.5", "fd00::5"]),
        ("ib0,=eth0", &["192.168.7.5", "10.1.0.5", "fd00::5"]),
        ("10.2.0.0/16", &["10.2.0.5"]),
        ("192.168.0.0/16, 10.0.0.0/8", &["192.168.7.5", "10.1.0.5", "10.2.0.5"]),
        ("10.1.0.5", &["10.1.0.5"]),
        ("fd00::/8", &["fd00::5"]),
        ("0.0.0.0/0", &["127.0.0.1", "172.17.0.1", "10.1.0.5", "10.2.0.5", "192.168.7.5"]),
        ("^docker0", &["10.1.0.5", "10.2.0.5", "192.168.7.5", "fd00::5"]),
        ("^docker,=eth0,^192.168.0.0/16", &["10.2.0.5"]),
        ("lo", &["127.0.0.1"]),
        ("wlan", &[]),
    ] {
        let interfaces: Interfaces = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        let chosen = interfaces.choose(all.clone(), Ipv4Addr::LOCALHOST.into());
        assert_eq!(
            chosen,
            wanted.iter().map(|ip| ip.parse::<IpAddr>().unwrap()).collect::<Vec<_>>(),
            "{text}"
        );
    }
    // Addresses of the family by which the ranks meet come first.
    let six = "=eth0".parse::<Interfaces>().unwrap().choose(all, Ipv6Addr::LOCALHOST.into());
    assert_eq!(six[0], "fd00::5".parse::<IpAddr>().unwrap());
    for bad in ["", "^", "eth0,,eth1", "=", "10.0.0.0/33", "10.0.0/8", "eth0,^lo", "fd00::/129"] {
        assert!(bad.parse::<Interfaces>().is_err(), "{bad}");
    }
}

#[tokio::test]
async fn a_listener_is_at_a_port_of_those_that_may_be_taken_and_where_the_user_says() {
    for bad in ["", "0-5", "7-6", "a-b", "1-70000", "1-2-3"] {
        assert!(ports(bad).unwrap_err().contains("ALLSTREAM_PORTS"), "{bad}");
    }
    assert_eq!((ports("20000-20999"), ports(" 7 ")), (Ok(20000..=20999), Ok(7..=7)));
    let local: IpAddr = Ipv4Addr::LOCALHOST.into();
    // Three ports of which one is taken: two listeners find one each, the third says that there is none.
    let (taken, range) = loop {
        let taken = TcpListener::bind((local, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let free = |port| TcpListener::bind((local, port)).is_ok();
        if port < 65000 && free(port + 1) && free(port + 2) {
            break (taken, port..=port + 2);
        }
    };
    let reach = Reach { ports: Some(range.clone()), interfaces: None };
    let (first, at) = reach.listen(local, false).unwrap();
    let (second, _) = reach.listen(local, false).unwrap();
    assert!(range.contains(&at[0].port()) && at[0].ip() == local && at.len() == 1, "{at:?}");
    assert_ne!(first.local_addr().unwrap(), second.local_addr().unwrap());
    let full = reach.listen(local, false).unwrap_err();
    assert!(full.contains("taken") && full.contains("ALLSTREAM_PORTS"), "{full}");
    drop(taken);

    let nowhere = Reach { ports: None, interfaces: Some("no-such-interface".parse().unwrap()) };
    let error = nowhere.listen(local, false).unwrap_err();
    assert!(
        error.contains("no-such-interface") && error.contains("127.0.0.1"),
        "it says what there is: {error}"
    );
    let here = Reach { ports: None, interfaces: Some("127.0.0.0/8".parse().unwrap()) };
    assert_eq!(here.listen("10.9.9.9".parse().unwrap(), false).unwrap().1[0].ip(), local);
    // The name of a host often leads to a loopback address on that host: then its other addresses, if any, are told, too.
    let (_, told) = Reach::default().listen(local, true).unwrap();
    assert_eq!(told[0].ip(), local);
    assert!(told[1..].iter().all(|at| !at.ip().is_loopback() && at.port() == told[0].port()), "{told:?}");
    assert_eq!(told.len() > 1, !outward().is_empty());
}

#[test]
fn a_listener_for_rank_0_is_where_other_hosts_reach_it() {
    let ip = |near| Rendezvous::listen_for_ranks(near).unwrap().1.ip();
    assert_eq!(ip(Some(("127.0.0.1", 1))), Ipv4Addr::LOCALHOST, "whoever says so means this host");
    let outward = outward().first().copied();
    assert_eq!(ip(None), outward.unwrap_or(Ipv4Addr::LOCALHOST.into()));
    // Nobody knows that name: as if it had not been said.
    assert_eq!(ip(Some(("no.such.host.invalid", 1))), ip(None));
    if let Some(own) = outward {
        assert_eq!(ip(Some((&own.to_string(), 1))), own, "this host's own address");
    }
    let (listener, at) = Rendezvous::listen_for_ranks(None).unwrap();
    assert_eq!(listener.local_addr().unwrap(), at);
}

/// More ranks than the standard library's queue of 128 has room for come before rank 0 takes the first of them, and none is kept waiting.
#[test]
fn as_many_ranks_may_come_at_once_as_a_world_has() {
    const RANKS: usize = 300;
    let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
    if most.trim().parse::<usize>().is_ok_and(|most| most < RANKS) {
        return eprintln!("skipped: net.core.somaxconn is {}, so no queue is longer", most.trim());
    }
    let given = TcpListener::bind("127.0.0.1:0").unwrap();
    lengthen_queue(&given).unwrap();
    for listener in [bind("127.0.0.1:0".parse().unwrap()).unwrap(), given] {
        let at = listener.local_addr().unwrap();
        let come = |_| TcpStream::connect_timeout(&at, Duration::from_secs(10));
        let all: Result<Vec<_>, _> = (0..RANKS).map(come).collect();
        assert_eq!(all.unwrap().len(), RANKS);
    }
}

/// Where the system's setting `net.ipv6.bindv6only` is 1, `[::]` would otherwise take IPv6 alone.
#[test]
fn all_addresses_are_those_of_ipv4_too() {
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    let listener = match bind(any) {
        Ok(listener) => listener,
        Err(why) => return eprintln!("skipped: no IPv6 here: {why}"),
    };
    let port = listener.local_addr().unwrap().port();
    let there = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&there, Duration::from_secs(10)).unwrap();
    let taken = bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
}
