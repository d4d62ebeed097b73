//! Programs that would hang with other libraries, and that end here: laws 1, 4 and 10.

use std::time::{Duration, Instant};

use allstream::{Comm, Error, Message, MissingState};
use serde_json::json;

use crate::harness::{self, Link, Me, Plan, SOON, among_others, say};

const SIXTY_FOUR_MB: usize = 16 << 20;

/// Both ranks send 64 MB before they receive: first they await the send (which cannot work), then they only submit it, then both in a batch.
async fn send_three_ways(world: &mut Comm) {
    let (me, peer) = (world.rank(), 1 - world.rank());
    let mut comm = world.dup().await.unwrap();
    let begun = Instant::now();
    // Long enough that both ranks have called `send` by then: each first has to fill 64 MB.
    let deadline = Duration::from_secs(3);
    let sent = comm.timeout(deadline).send(vec![me as f32; SIXTY_FOUR_MB], peer).await;
    let failed = sent.unwrap_err();
    let took = begun.elapsed();
    assert!(took < deadline + SOON, "{took:?}");
    assert!(failed.buf.is_some_and(|b| b.len() == SIXTY_FOUR_MB));
    let Error::Timeout { rank, missing, .. } = &failed.error else { panic!("{}", failed.error) };
    let [one] = &missing[..] else { panic!("{}", failed.error) };
    // Both ranks get the error of the rank whose deadline came first. It names the other rank as the missing one.
    assert_eq!(one.rank, 1 - rank, "{}", failed.error);
    let MissingState::NotMatched { direction, tag: 0, pending, .. } = &one.state else {
        panic!("{}", failed.error)
    };
    assert_eq!(direction, "recv");
    let text = failed.error.to_string();
    let begin = format!("send(f32 x {SIXTY_FOUR_MB}, to rank {} (world rank {0}), tag 0)", one.rank);
    assert!(text.starts_with(&begin) && text.contains("has not made the matching recv"), "{text}");
    // As both ranks have sent, the error also says which message waits to be received.
    assert_eq!(
        pending.iter().map(|m| (m.root, m.count)).collect::<Vec<_>>(),
        [(0, SIXTY_FOUR_MB as u64)],
        "{text}"
    );
    println!("rank {me} after {took:?}: {text}");
    drop(comm);

    let begun = Instant::now();
    let send = world.send(vec![me as f32; SIXTY_FOUR_MB], peer);
    let recv = world.recv(vec![-1f32; SIXTY_FOUR_MB], peer);
    let sent = send.await.unwrap();
    let got = recv.await.unwrap();
    assert!(got.iter().all(|x| *x == peer as f32));
    println!("rank {me}: both submitted: {:?}", begun.elapsed());

    let begun = Instant::now();
    let messages =
        [Message::Send { buf: sent, to: peer, tag: 3 }, Message::Recv { buf: got, from: peer, tag: 3 }];
    let both = world.batch(messages).await.unwrap();
    assert!(both[1].iter().all(|x| *x == peer as f32));
    println!("rank {me}: as a batch: {:?}", begun.elapsed());
}

pub(crate) async fn sends_first(me: Me) {
    let mut world = me.connect().await;
    send_three_ways(&mut world).await;
    world.close().await.unwrap();
    say("well", json!({}));
}

#[test]
fn two_large_sends_that_are_awaited_first_end_with_an_explanation() {
    let _turn = among_others();
    harness::on_threads(harness::world(Link::Local, 2), |mut world| async move {
        send_three_ways(&mut world).await
    });
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("sends_first", 2, link).start();
        job.ranks.iter().for_each(|r| drop(r.hear("well")));
        job.finish();
    }
}

/// Two communicators used in opposite orders.
pub(crate) async fn opposite(me: Me) {
    let mut world = me.connect().await;
    let mut comms = [world.dup().await.unwrap(), world.dup().await.unwrap()];
    for round in 0..3 {
        let begun = Instant::now();
        let order = if me.rank == 0 { [0, 1] } else { [1, 0] };
        let mut works = [None, None];
        for c in order {
            works[c] = Some(comms[c].all_reduce(vec![(c + 1) as f32; 2 << 20]));
        }
        for c in order {
            let sum = works[c].take().unwrap().await.unwrap();
            assert!(sum.iter().all(|x| *x == 2.0 * (c + 1) as f32), "round {round}, communicator {c}");
        }
        say("round", json!({ "ms": begun.elapsed().as_millis() as u64 }));
    }
    for comm in comms {
        comm.close().await.unwrap();
    }
    world.close().await.unwrap();
}

#[test]
fn two_communicators_used_in_opposite_orders_complete() {
    let _turn = among_others();
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("opposite", 2, link).start();
        for _ in 0..3 {
            let ms: Vec<_> = job.ranks.iter().map(|r| r.hear("round")["ms"].as_u64().unwrap()).collect();
            println!("{link:?}: {ms:?} ms");
        }
        job.finish();
    }
}

/// 16 communicators with 8 operations each, none of them polled before all are submitted.
pub(crate) async fn many(me: Me) {
    let mut world = me.connect().await;
    let mut comms = Vec::new();
    for _ in 0..16 {
        comms.push(world.dup().await.unwrap());
    }
    world.barrier().await.unwrap();
    let begun = Instant::now();
    let mut works = Vec::new();
    for i in 0..8 {
        // Each rank begins with another communicator.
        for c in 0..16 {
            let c = (c + 5 * me.rank) % 16;
            works.push((c, i, comms[c].all_reduce(vec![(c * 8 + i) as f32; 64 << 10])));
        }
    }
    assert_eq!(works.len(), 128);
    // None of the operations has been polled yet, and the engine has started no further threads for them.
    let engine = harness::engine_threads();
    assert!(engine.len() <= 2, "{engine:?}");
    for (c, i, work) in works.into_iter().rev() {
        let sum = work.await.unwrap();
        assert!(sum.iter().all(|x| *x == 3.0 * (c * 8 + i) as f32), "communicator {c}, operation {i}");
    }
    say("well", json!({ "ms": begun.elapsed().as_millis() as u64, "threads": harness::engine_threads() }));
    for comm in comms {
        comm.close().await.unwrap();
    }
    world.close().await.unwrap();
}

#[test]
fn a_hundred_and_twenty_eight_unpolled_operations_complete_on_two_threads() {
    let _turn = among_others();
    for link in [Link::Shm, Link::Tcp] {
        let job = Plan::new("many", 3, link).start();
        for rank in &job.ranks {
            let said = rank.hear("well");
            println!("{link:?}: rank {}: {} ms, threads {}", rank.rank, said["ms"], said["threads"]);
            assert!(said["threads"].as_array().unwrap().len() <= 2, "{said}");
        }
        job.finish();
    }
}

#[test]
fn operations_that_nobody_polls_complete() {
    let _turn = among_others();
    for link in [Link::Local, Link::Shm, Link::Tcp] {
        harness::on_threads(harness::world(link, 2), |mut comm| async move {
            let mut works: Vec<_> = (0..8).map(|i| comm.all_reduce(vec![i as f32; 64 << 10])).collect();
            let last = works.pop().unwrap();
            drop(works);
            // No `Work` is polled: the engine alone drives the operations that `close` waits for.
            let begun = Instant::now();
            drop(last);
            comm.close().await.unwrap();
            assert!(begun.elapsed() < SOON);
        });
    }
}
