//! Whether hosts are to talk by RDMA: what ranks say of themselves, and how all come to one choice. That messages get through is tried by tests of the
//! command, with the verbs library for tests.

use super::*;
use crate::group::host::Process;
use crate::group::rdma::{Prospect, WhyNot, mtus, why_not};
use crate::group::registration::{EndPort, RdmaEnd, Registration};
use crate::link::verbs::RDMA;
use crate::types::LinkClass;

fn port(layer: &str, mtu: u32) -> Result<EndPort, String> {
    Ok(EndPort { layer: layer.into(), mtu, shown: format!("card_0 port 1, {layer}") })
}

fn end(host: &str, port: Result<EndPort, String>) -> RdmaEnd {
    RdmaEnd { host: host.into(), port, is_wanted: false }
}

/// Ranks that say this as they register, each on a host of its own.
fn members(ends: Vec<Option<RdmaEnd>>) -> Vec<Registration> {
    let size = ends.len();
    let one = |(rank, rdma)| Registration {
        rank,
        size,
        addresses: Vec::new(),
        process: Process::this(Some(&format!("host {rank}"))).unwrap(),
        socket: None,
        link: LinkChoice::AUTO,
        rdma,
        unfit: None,
    };
    ends.into_iter().enumerate().map(one).collect()
}

#[track_caller]
fn says(ends: Vec<Option<RdmaEnd>>, news: bool, parts: &[&str]) {
    let WhyNot { why, is_news } = why_not(members(ends).iter()).expect("something is wrong");
    assert_eq!(is_news, news, "{why}");
    parts.iter().for_each(|part| assert!(why.contains(part), "{part}: {why}"));
}

#[test]
fn all_hosts_need_a_port_of_one_kind_and_the_first_that_has_none_is_named() {
    let roce = |host| Some(end(host, port("RoCE v2", 4096)));
    let none = |host, why: &str| Some(end(host, Err(why.into())));
    assert_eq!(why_not(members(vec![roce("a"), roce("b")]).iter()), None);
    let had =
        "rank 0 on host a has card_0 port 1, RoCE v2, and rank 1 on host b has no port to use: it is down";
    says(vec![roce("a"), none("b", "it is down")], true, &[had]);
    says(
        vec![none("a", "no library"), roce("b")],
        true,
        &["rank 1 on host b has card_0", "rank 0 on host a has no port"],
    );
    // Nobody has any, as on most machines: nothing to speak of, unless somebody has named a device.
    says(
        vec![none("a", "no library"), none("b", "no library")],
        false,
        &["rank 0 on host a has no port to use: no library"],
    );
    let wanted = Some(RdmaEnd { is_wanted: true, ..end("b", Err("there is no device x".into())) });
    says(vec![none("a", "no library"), wanted], true, &["rank 0 on host a has no port"]);
    let infiniband = Some(end("b", port("InfiniBand", 4096)));
    says(
        vec![roce("a"), infiniband],
        true,
        &[
            "ports of one kind",
            "rank 0 on host a has",
            "rank 1 on host b has card_0 port 1, InfiniBand",
            "ALLSTREAM_RDMA_DEVICE",
        ],
    );
    says(vec![roce("a"), None], true, &["rank 1 named no port"]);
}

#[test]
fn packets_that_differ_are_told_with_both_hosts() {
    let of = |host, mtu| Some(end(host, port("RoCE v2", mtu)));
    assert_eq!(mtus(members(vec![of("a", 1024), of("b", 1024)]).iter()), None);
    let text = mtus(members(vec![of("a", 4096), of("b", 1024), of("c", 4096)]).iter()).unwrap();
    assert!(text.contains("1024 bytes at rank 1 on host b, and 4096 at rank 0 on host a"), "{text}");
}

/// A world of three on two hosts, whose ranks say that they have ports, and cannot open them.
fn pretending() -> (Vec<Rendezvous>, SocketAddr) {
    let (places, at) = places("127.0.0.1", 3);
    let one = |(rank, place): (Rank, Rendezvous)| {
        let host = if rank == 0 { "a" } else { "b" };
        let mut place = place.host_id(format!("{host} of {at}"));
        place.rdma = Some(Prospect::pretended(end(host, port("RoCE v2", 4096))).unwrap());
        place
    };
    (places.into_iter().enumerate().map(one).collect(), at)
}

fn classes(member: &Member) -> Vec<Option<LinkClass>> {
    member.mesh.peers().iter().map(|peer| peer.as_ref().map(|peer| peer.link.class)).collect()
}

#[tokio::test]
async fn where_a_port_cannot_be_opened_all_ranks_take_tcp() {
    let members = world(pretending().0).await;
    let (tcp, near) = (Some(LinkClass::TCP), Some(LinkClass::INPROC));
    assert_eq!(classes(&members[0]), [None, tcp, tcp]);
    assert_eq!(classes(&members[1]), [tcp, None, near]);
    assert_eq!(classes(&members[2]), [tcp, near, None]);
    assert_ne!(RDMA.class, LinkClass::TCP);
    close_all(members).await;
}

#[tokio::test]
async fn who_waits_for_the_choice_hears_that_another_rank_gave_up() {
    let (mut places, _) = pretending();
    let last = tokio::spawn(join(places.pop().unwrap().timeout(LIMIT)));
    let others: Vec<_> = places.into_iter().map(|place| tokio::spawn(join(place.timeout(LIMIT)))).collect();
    // It is ended at some point on its way: before it has registered, while it connects, or when it has joined.
    tokio::time::sleep(Duration::from_millis(5)).await;
    last.abort();
    drop(last.await);
    let begun = Instant::now();
    for other in others {
        if let Ok(member) = tokio::time::timeout(LIMIT * 2, other).await.expect("an end").unwrap() {
            member.ears.hear(|heard| matches!(heard, Heard::Lost(2, _) | Heard::Goodbye(2, _))).await;
            close_all(vec![member]).await;
        }
    }
    assert!(begun.elapsed() < LIMIT + LIMIT / 2, "{:?}", begun.elapsed());
}
