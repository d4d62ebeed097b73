//! How worlds come together, and how they fail to.

use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::group::handshake::{self, Purpose, Token};
use crate::group::rdma::Prospect;
use crate::group::registration::{EndPort, RdmaEnd};
use crate::types::LinkClass;

fn says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
}

fn failure(end: Result<Member, Error>) -> Error {
    match end {
        Ok(member) => panic!("rank {} joined", member.mesh.rank()),
        Err(error) => error,
    }
}

#[tokio::test]
async fn worlds_of_all_sizes_form_over_both_families() {
    for (ip, size) in
        [("127.0.0.1", 2), ("127.0.0.1", 4), ("127.0.0.1", 8), ("::1", 3), ("::", 2), ("0.0.0.0", 3)]
    {
        let (mut places, at) = places(ip, size);
        let reach = if at.is_ipv4() { "127.0.0.1" } else { "[::1]" };
        for (rank, place) in places.iter_mut().enumerate().skip(1) {
            let there = format!("tcp://{reach}:{}", at.port());
            *place = Rendezvous::tcp(&there, rank, size).unwrap().token("t").timeout(LIMIT);
        }
        let members = world(places).await;
        for (rank, m) in members.iter().enumerate() {
            assert_eq!((m.mesh.rank(), m.mesh.size(), m.mesh.world()), (rank, size, members[0].mesh.world()));
            assert_eq!(m.mesh.peers().len(), size);
            for (other, peer) in m.mesh.peers().iter().enumerate() {
                assert_eq!(peer.is_none(), other == rank);
                if let Some(peer) = peer {
                    assert_eq!((peer.rank, peer.pid), (other, std::process::id()));
                    assert_eq!((peer.link.class, peer.fds.len()), (LinkClass::INPROC, 0));
                    assert!(peer.address.iter().all(|a| !a.ip().is_unspecified()), "{:?}", peer.address);
                }
            }
        }
        close_all(members).await;
    }
}

#[test]
fn one_rank_needs_nothing_and_any_executor_will_do() {
    let ears = Arc::new(Ears::default());
    let mesh =
        futures::executor::block_on(Mesh::join(Rendezvous::alone(), Vec::new(), |_| (), move |_| ears))
            .unwrap();
    assert_eq!((mesh.rank(), mesh.size(), mesh.peers().len()), (0, 1, 1));
    mesh.broadcast(Message::Heartbeat);
    futures::executor::block_on(mesh.close(None));
}

#[tokio::test]
async fn a_rank_that_has_joined_finds_that_all_others_know_the_world() {
    for _ in 0..20 {
        let (places, _) = places("127.0.0.1", 4);
        let (knowing, least) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(4)));
        let joining = places.into_iter().map(|place| {
            let (ears, least) = (Arc::new(Ears::default()), least.clone());
            let (named, seen) = (knowing.clone(), knowing.clone());
            let named = move |_| _ = named.fetch_add(1, Ordering::SeqCst);
            // A link may be opened from here on.
            let events = move |_: &Arc<Mesh>| -> Arc<dyn Events> {
                least.fetch_min(seen.load(Ordering::SeqCst), Ordering::SeqCst);
                ears
            };
            tokio::time::timeout(LIMIT, Mesh::join(place, Vec::new(), named, events))
        });
        let joined = futures::future::join_all(joining).await;
        let meshes: Vec<_> = joined.into_iter().map(|mesh| mesh.unwrap().unwrap()).collect();
        assert_eq!(least.load(Ordering::SeqCst), 4);
        futures::future::join_all(meshes.iter().map(|mesh| mesh.close(None))).await;
    }
}

#[tokio::test]
async fn ranks_may_come_before_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    drop(listener);
    let place = |rank| Rendezvous::tcp(&at.to_string(), rank, 2).unwrap().token("t").timeout(LIMIT);
    let early = tokio::spawn(join(place(1)));
    tokio::time::sleep(Duration::from_millis(300)).await;
    let first = join(place(0)).await.unwrap();
    close_all(vec![first, early.await.unwrap().unwrap()]).await;
}

#[tokio::test]
async fn missing_ranks_are_named_by_everyone_who_came() {
    let (places, _) = places("127.0.0.1", 8);
    let here =
        places.into_iter().filter(|p| ![3, 5].contains(&p.rank())).map(|p| p.timeout(Duration::from_secs(1)));
    let begun = Instant::now();
    for end in join_all(here.collect()).await {
        says(&failure(end), &["ranks 3 and 5 of 8 did not come within 1s"]);
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_rank_whose_own_time_is_over_first_names_the_missing_too() {
    let (mut places, _) = places("127.0.0.1", 3);
    places.truncate(2);
    let short = places.pop().unwrap().timeout(Duration::from_millis(600));
    let host = tokio::spawn(join(places.pop().unwrap().timeout(Duration::from_secs(6))));
    says(&failure(join(short).await), &["registered with rank 0", "rank 2 of 3 did not come within 600ms"]);
    says(&failure(host.await.unwrap()), &["rank 2 of 3 did not come", "rank 1 (process", "went away again"]);
}

#[tokio::test]
async fn without_rank_0_the_address_and_the_last_error_are_said() {
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let place =
        Rendezvous::tcp(&at.to_string(), 1, 2).unwrap().token("t").timeout(Duration::from_millis(300));
    says(&failure(join(place.clone()).await), &[&at.to_string(), "on rank 1", "refused", "MASTER_ADDR"]);
    // One that listens and never answers.
    let _silent = TcpListener::bind(at).unwrap();
    says(&failure(join(place).await), &["on rank 1", "within 300ms"]);
    let nowhere = Rendezvous::tcp("tcp://no.such.host.invalid:1", 1, 2).unwrap().token("t");
    says(&failure(join(nowhere.timeout(Duration::from_millis(300))).await), &["no.such.host.invalid"]);
}

#[tokio::test]
async fn a_taken_port_and_a_missing_secret_are_said() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = Rendezvous::tcp(&taken.local_addr().unwrap().to_string(), 0, 2).unwrap();
    says(&failure(join(place.clone()).await), &["no secret"]);
    says(&failure(join(place.token("t")).await), &["listens at", "another port"]);
}

#[tokio::test]
async fn a_wrong_secret_is_refused_and_the_world_forms_all_the_same() {
    let (places, at) = places("127.0.0.1", 2);
    let mut places = places.into_iter();
    let host = tokio::spawn(join(places.next().unwrap()));
    let wrong = Rendezvous::tcp(&at.to_string(), 1, 2).unwrap().token("wrong").timeout(LIMIT);
    let begun = Instant::now();
    says(&failure(join(wrong).await), &["rank 0 refused", "ALLSTREAM_TOKEN"]);
    assert!(begun.elapsed() < LIMIT / 2, "refused at once, not at the deadline");
    let right = join(places.next().unwrap()).await.unwrap();
    close_all(vec![host.await.unwrap().unwrap(), right]).await;
}

#[tokio::test]
async fn garbage_at_every_listener_disturbs_nobody() {
    let (mut places, at) = places("127.0.0.1", 2);
    let host = tokio::spawn(join(places.remove(0)));
    let throw = |at: SocketAddr| {
        let mut held = Vec::new();
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"ALLS", &[0; 40], b""] {
            let mut socket = TcpStream::connect(at).unwrap();
            let _ = socket.write_all(bytes);
            held.push(socket);
        }
        held
    };
    let _held = throw(at);
    let guest = join(places.remove(0)).await.unwrap();
    let host = host.await.unwrap().unwrap();
    for peer in [&host, &guest].iter().flat_map(|m| m.mesh.peers()).flatten() {
        let _held = throw(peer.address[0]);
    }
    host.mesh.send(1, Message::Abort { comm: CommId(1), cause: aborted("x") });
    guest.ears.hear(|h| matches!(h, Heard::Message(0, Message::Abort { .. }))).await;
    let hello = DataHello { comm: CommId(0), from: 0, channel: 0 };
    host.mesh.connect_data(1, hello, Box::new(|end| drop(end.unwrap())));
    guest.ears.hear(|h| *h == Heard::Data(hello)).await;
    assert_eq!(host.ears.all(), []);
    close_all(vec![host, guest]).await;
}

#[tokio::test]
async fn another_job_or_a_false_rank_is_refused_by_a_mesh_listener() {
    let members = world_of(2).await;
    let at = members[0].mesh.peers()[1].as_ref().unwrap().address[0];
    let world = members[0].mesh.world();
    let data = |from| DataHello { comm: CommId(0), from, channel: 0 };
    for (purpose, word) in [
        (Purpose::Control { world: [0; 16], from: 0, to: 1 }, "another world"),
        (Purpose::Data { world: [0; 16], to: 1, hello: data(0) }, "another world"),
        (Purpose::Data { world, to: 1, hello: data(1) }, "no peer"),
        (Purpose::Data { world, to: 1, hello: data(usize::MAX) }, "no peer"),
        (Purpose::Control { world, from: 0, to: 1 }, "awaits no"),
        (Purpose::Local { world, from: 0 }, "unix socket"),
    ] {
        let mut socket = tokio::net::TcpStream::connect(at).await.unwrap();
        let deadline = tokio::time::Instant::now() + LIMIT;
        let end = handshake::dial(&mut socket, &Token::new(b"t"), &purpose, deadline).await;
        assert!(
            matches!(&end, Err(handshake::Refusal::Denied(why)) if why.contains(word)),
            "{purpose:?}: {end:?}"
        );
    }
    close_all(members).await;
}

#[tokio::test]
async fn two_that_say_the_same_rank_are_both_named() {
    let (mut places, _) = places("127.0.0.1", 3);
    places[2] = places[1].clone();
    let pid = format!("process {}", std::process::id());
    for end in join_all(places).await {
        says(&failure(end), &["two processes say that they are rank 1", &pid]);
    }
}

#[tokio::test]
async fn sizes_and_links_that_disagree_are_both_named() {
    let (mut sizes, at) = places("127.0.0.1", 3);
    sizes[1] = Rendezvous::tcp(&at.to_string(), 1, 4).unwrap().token("t");
    sizes.truncate(2);
    for end in join_all(sizes).await {
        says(&failure(end), &["rank 1 (process", "says 4", "rank 0 says 3", "WORLD_SIZE"]);
    }
    let (mut links, _) = places("127.0.0.1", 2);
    links[1] = links[1].clone().link(LinkChoice::TCP);
    for end in join_all(links).await {
        says(&failure(end), &["rank 1 (process", "says tcp", "rank 0 says auto", "ALLSTREAM_LINK"]);
    }
}

#[tokio::test]
async fn a_rank_that_went_away_while_waiting_may_come_again() {
    let (mut places, _) = places("127.0.0.1", 2);
    let (host, guest) = (places.remove(0), places.remove(0));
    let mut three = Rendezvous::tcp(&guest.place(), 1, 3).unwrap().token("t").timeout(LIMIT);
    three.rank = 1;
    let host = Rendezvous { size: 3, ..host };
    let host = tokio::spawn(join(host));
    // Given up by its caller while it waits.
    let early = tokio::time::timeout(Duration::from_millis(300), join(three.clone())).await;
    assert!(early.is_err());
    let rest = world(vec![three.clone(), Rendezvous { rank: 2, ..three }]).await;
    let mut members = vec![host.await.unwrap().unwrap()];
    members.extend(rest);
    close_all(members).await;
}

#[tokio::test]
async fn links_decide_locality_or_are_refused() {
    for link in [LinkClass::INPROC, LinkClass::TCP] {
        let (places, _) = places("127.0.0.1", 2);
        let members = world(places.into_iter().map(|p| p.link(link.into())).collect()).await;
        for peer in members.iter().flat_map(|m| m.mesh.peers()).flatten() {
            assert_eq!(peer.link.class, link);
        }
        close_all(members).await;
    }
    for link in [LinkChoice::INPROC, LinkChoice::SHM] {
        let (places, _) = places("127.0.0.1", 2);
        let apart = places.into_iter().enumerate().map(|(i, p)| p.link(link).host_id(format!("host{i}")));
        for end in join_all(apart.collect()).await {
            says(&failure(end), &["needs all ranks in one", "host0", "host1", "ALLSTREAM_LINK"]);
        }
    }
    // The ports are made up: joining goes by what ranks say of their ports. Whether a rank really has one is found out before it joins.
    let over_rdma = |place: Rendezvous, layer: &str| {
        let host = format!("host of {}", place.rank);
        let shown = format!("card{} port 1 active, {layer}", place.rank);
        let port = Ok(EndPort { name: "card".into(), layer: layer.into(), mtu: 4096, shown });
        let rdma = Some(Prospect::pretended(RdmaEnd { host, port, is_expected: true }).unwrap());
        Rendezvous { rdma, ..place.link(LinkChoice::RDMA) }
    };
    for (layers, wanted) in [
        (
            ["InfiniBand", "RoCE v2"],
            &[
                "ports of one kind",
                "rank 0 on host host of 0 has card0",
                "rank 1 on host host of 1 has card1",
            ],
        ),
        (["", "RoCE v2"], &["the link is rdma", "rank 0 did not look for a port", "LOCAL_WORLD_SIZE"]),
    ] {
        let (places, _) = places("127.0.0.1", 2);
        let ends = places.into_iter().zip(layers).map(|(place, layer)| match layer {
            "" => place.link(LinkChoice::RDMA),
            layer => over_rdma(place, layer),
        });
        for end in join_all(ends.collect()).await {
            says(&failure(end), wanted);
        }
    }
    let (alike, _) = places("127.0.0.1", 2);
    let members = world(alike.into_iter().map(|place| over_rdma(place, "RoCE v2")).collect()).await;
    assert_eq!(members[0].mesh.peers()[1].as_ref().unwrap().link.class, LinkClass::RDMA);
    close_all(members).await;
    let (places, _) = places("127.0.0.1", 2);
    let members =
        world(places.into_iter().enumerate().map(|(i, p)| p.host_id(format!("host{i}"))).collect()).await;
    assert_eq!(members[0].mesh.peers()[1].as_ref().unwrap().link.class, LinkClass::TCP);
    close_all(members).await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn descriptors_reach_every_other_rank_and_work() {
    let (places, _) = places("127.0.0.1", 4);
    let joining = places.into_iter().map(|p| {
        let text = format!("memory of rank {}", p.rank());
        let memory = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(memory);
        file.write_all(text.as_bytes()).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        join_with(p.link(LinkChoice::SHM), vec![file.into(), event])
    });
    let members: Vec<_> = futures::future::join_all(joining).await.into_iter().map(Result::unwrap).collect();
    for peer in members.iter().flat_map(|m| m.mesh.peers()).flatten() {
        assert_eq!((peer.link.class, peer.fds.len()), (LinkClass::SHM, 2));
        let mut file = std::fs::File::from(peer.fds[0].try_clone().unwrap());
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("memory of rank {}", peer.rank));
        assert_eq!(rustix::io::write(&peer.fds[1], &1u64.to_ne_bytes()), Ok(8));
    }
    close_all(members).await;
}

#[tokio::test]
async fn too_many_descriptors_are_refused() {
    let fds = (0..5).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect();
    says(&failure(join_with(Rendezvous::alone(), fds).await), &["5 descriptors", "limit is 4"]);
}
