//! Whether hosts are to talk by RDMA: what ranks say of themselves, and how all come to one choice. That messages get through is shown
//! by tests of the command (`cli/tests`), with the verbs library for tests.

use tokio::io::AsyncWriteExt;

use super::giving_up::{failure, pair_with, register, registration};
use super::*;
use crate::group::rdma::{Prospect, WhyNot, condense, mtus, why_not};
use crate::group::registration::{EndPort, News, RdmaEnd, Registration};
use crate::group::wire;
use crate::types::LinkClass;

fn port(layer: &str, mtu: u32) -> Result<EndPort, String> {
    let name = "card_0 port 1";
    Ok(EndPort { name: name.into(), layer: layer.into(), mtu, shown: format!("{name}, {layer}") })
}

fn end(host: &str, port: Result<EndPort, String>) -> RdmaEnd {
    let is_expected = port.is_ok();
    RdmaEnd { host: host.into(), port, is_expected }
}

/// Ranks that say this as they register, each on a host of its own.
fn members(ends: Vec<Option<RdmaEnd>>) -> Vec<Registration> {
    let size = ends.len();
    let one = |(rank, rdma)| Registration { rdma, ..registration(rank, size, Vec::new()) };
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
    // No rank has a port, as on most machines: that is no news, unless a host has a card.
    says(
        vec![none("a", "no library"), none("b", "no library")],
        false,
        &["rank 0 on host a has no port to use: no library"],
    );
    let has_card = Some(RdmaEnd { is_expected: true, ..end("b", Err("there is no device x".into())) });
    says(vec![none("a", "no library"), has_card], true, &["rank 0 on host a has no port"]);
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
    says(vec![roce("a"), None], true, &["rank 1 did not look for a port", "LOCAL_WORLD_SIZE"]);
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
    close_all(members).await;
}

/// A rank on a host of its own that says it has a port, registers, and connects to ranks 0 and 1, but does not say that it is connected
/// to all. When the result is dropped, the connection by which the rank registered is closed first: so rank 0 takes the rank for dead. Its
/// connections to ranks 0 and 1 are closed after that.
async fn not_connected_yet(at: SocketAddr) -> impl Sized {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rdma = Some(end("c", port("RoCE v2", 4096)));
    let (news, alive) = register(at, Registration { rdma, ..registration(2, 3, vec![nobody]) }).await;
    let News::Formed(table) = news else { panic!("{news:?}") };
    let mut pairs = Vec::new();
    for to in [0, 1] {
        let mut stream = pair_with(to, &table).await;
        // Its part of the trial: its port cannot be opened.
        let step: Result<Vec<u8>, String> = Err("rank 2: none".into());
        stream.write_all(&wire::encode(&step).unwrap()).await.unwrap();
        pairs.push(stream);
    }
    (alive, pairs)
}

/// Two ranks that try RDMA, each on a host of its own, and wait for a third.
fn two_of_three() -> ([tokio::task::JoinHandle<Result<Member, Error>>; 2], SocketAddr) {
    let (mut places, at) = pretending();
    places.pop();
    let mut joining = places.into_iter().map(|place| tokio::spawn(join(place.timeout(LIMIT))));
    ([joining.next().unwrap(), joining.next().unwrap()], at)
}

#[tokio::test]
async fn who_waits_for_the_choice_hears_that_another_rank_gave_up() {
    let (joining, at) = two_of_three();
    let third = not_connected_yet(at).await;
    // Ranks 0 and 1 are connected to all by now, or will be soon: then they wait for the choice alone.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(joining.iter().all(|rank| !rank.is_finished()), "they wait for rank 2");
    let died = Instant::now();
    drop(third);
    for rank in joining {
        let text = failure(rank.await.unwrap());
        assert!(text.contains("rank 2 gave up connecting to the others: it ended"), "{text}");
    }
    assert!(died.elapsed() < LIMIT / 5, "{:?}", died.elapsed());
}

#[tokio::test]
async fn who_waits_for_the_choice_hears_of_the_end_of_rank_0() {
    let ([first, second], at) = two_of_three();
    let _third = not_connected_yet(at).await;
    let died = Instant::now();
    first.abort();
    let text = failure(second.await.unwrap());
    assert!(text.contains("rank 0"), "{text}");
    assert!(died.elapsed() < LIMIT / 5, "{:?}", died.elapsed());
}

#[test]
fn the_table_keeps_one_reason_and_one_port_of_each_kind() {
    let none = |host| Some(end(host, Err("a long reason".into())));
    let has = |host, layer| Some(end(host, port(layer, 4096)));
    let ends = vec![none("a"), has("b", "RoCE v2"), none("c"), has("d", "RoCE v2"), has("e", "InfiniBand")];
    let mut condensed = members(ends.clone());
    condense(&mut condensed);
    assert_eq!(why_not(condensed.iter()), why_not(members(ends).iter()));
    let long = |of: &&Registration| match &of.rdma.as_ref().unwrap().port {
        Ok(port) => !port.shown.is_empty(),
        Err(why) => !why.is_empty(),
    };
    assert_eq!(condensed.iter().filter(long).map(|of| of.rank).collect::<Vec<_>>(), [0, 1, 4]);
}
