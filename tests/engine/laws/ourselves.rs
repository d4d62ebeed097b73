//! Messages of a rank to itself.

use std::time::{Duration, Instant};

use allstream::{Comm, Error, HostStream, Message, Node};
use futures::executor::block_on;

use super::house::*;

#[test]
fn a_ring_of_any_size_passes_on_also_of_one_rank() {
    for link in LINKS {
        for n in [1usize, 2, 3] {
            let comms = within(LIMIT, move || world(n, link));
            threads(comms, move |mut comm| {
                let (left, right) = ((comm.rank() + n - 1) % n, (comm.rank() + 1) % n);
                for len in [0usize, 1, 4096, 4097, 600_000] {
                    let mine = vec![comm.rank() as u32 + 7; len];
                    let both = comm.send_recv(mine.clone(), right, vec![0u32; len], left).wait().unwrap();
                    assert_eq!(
                        both,
                        (mine.clone(), vec![left as u32 + 7; len]),
                        "{link:?}, {n} ranks, {len}"
                    );
                    let both = block_on(comm.send_recv(mine.clone(), right, vec![0u32; len], left)).unwrap();
                    assert!(both == (mine, vec![left as u32 + 7; len]));
                }
                block_on(comm.close()).unwrap();
            });
        }
    }
}

#[test]
fn a_batch_has_messages_to_this_rank_beside_those_to_others() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            let send = |to, tag, value: u8| Message::Send { buf: vec![value; 9000], to, tag };
            let recv = |from, tag| Message::Recv { buf: vec![0u8; 9000], from, tag };
            // A tag's send may come before or after its receive; two pairs of one tag match in order; other tags are separate.
            let batch = [
                recv(rank, 5),
                send(rank, 4, 40),
                send(peer, 4, 90),
                send(rank, 5, 50),
                recv(rank, 4),
                recv(peer, 4),
                send(rank, 5, 51),
                recv(rank, 5),
            ];
            let got: Vec<u8> = comm.batch(batch).wait().unwrap().iter().map(|buf| buf[8999]).collect();
            assert_eq!(got, [50, 40, 90, 50, 40, 90, 51, 51], "{link:?}");
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn a_half_alone_is_refused_says_what_to_do_and_leaves_nothing_behind() {
    let mut comm = Comm::local(2).unwrap().remove(0);
    let told = |error: &Error, words: [&str; 3]| {
        let text = error.to_string();
        assert!(matches!(error, Error::Invalid { .. }) && words.iter().all(|w| text.contains(w)), "{text}");
    };
    let sent = comm.send(vec![1u8; 3], 0).wait().unwrap_err();
    told(&sent.error, ["this rank", "send_recv", "batch"]);
    assert_eq!(sent.buf, Some(vec![1; 3]));
    let received = comm.tag(3).recv(vec![1u8; 3], 0).wait().unwrap_err();
    told(&received.error, ["this rank", "send_recv", "the send of the same tag"]);
    // The other half goes to another rank: neither is submitted.
    let begun = Instant::now();
    let halves = comm.send_recv(vec![1u8], 0, vec![2u8], 1).wait().unwrap_err();
    told(&halves.error, ["send", "this rank", "batch"]);
    assert_eq!(halves.buf.unwrap(), (Some(vec![1]), Some(vec![2])));
    assert!(comm.send_recv(vec![1u8], 1, vec![2u8], 0).wait().is_err());
    let differ = comm.send_recv(vec![1u8; 3], 0, vec![1u8; 4], 0).wait().unwrap_err();
    told(&differ.error, ["3 x u8", "4 x u8", "itself"]);
    let differ = comm.send_recv(vec![1u8; 4], 0, vec![1f32; 4], 0).wait().unwrap_err();
    told(&differ.error, ["4 x u8", "4 x f32", "itself"]);
    assert_eq!(differ.buf.unwrap(), (Some(vec![1; 4]), Some(vec![1.0; 4])));
    // Of the two sends of tag 2, one has its receive; the one of tag 1 has none.
    let send = |tag, value: u8| Message::Send { buf: vec![value], to: 0, tag };
    let failed = comm
        .batch([send(1, 1), send(2, 2), Message::Recv { buf: vec![0], from: 0, tag: 2 }, send(2, 3)])
        .wait()
        .unwrap_err();
    told(&failed.error, ["send", "this rank", "the recv of the same tag"]);
    assert_eq!(failed.buf.unwrap(), [1u8, 2, 2, 3].map(|value| Some(vec![value])));
    // A node's device is a rank as any other.
    let mut node = Node::local(2).unwrap();
    let sent = node.send(1, vec![1u8], (0, 1)).wait().unwrap_err();
    told(&sent.error, ["rank 1 is this rank", "send_recv", "batch"]);
    let copied = node.comm(1).unwrap().send_recv(vec![4u8], 1, vec![0u8], 1).wait().unwrap();
    assert_eq!(copied.1, [4]);
    assert!(begun.elapsed() < SOON, "nobody waits for what cannot come");
    assert_eq!(comm.stats().in_flight, 0);
}

#[test]
fn a_message_to_this_rank_waits_for_what_it_is_to_follow() {
    let mut comm = Comm::local(1).unwrap().remove(0);
    let stream = HostStream::new("producer").unwrap();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    stream.launch(move || wait.recv().unwrap());
    let mut works = comm.on(&stream).send_recv(vec![9u8; 100], 0, vec![0u8; 100], 0);
    assert!(poll_once(&mut works).is_pending());
    go.send(()).unwrap();
    assert_eq!(within(LIMIT, move || block_on(works)).unwrap().1, vec![9u8; 100]);
    // Other operations of the rank go on beside a long message.
    let long = comm.send_recv(vec![1u8; 8 << 20], 0, vec![0u8; 8 << 20], 0);
    assert_eq!(comm.all_reduce(vec![3u8]).wait().unwrap(), [3]);
    assert!(long.wait().unwrap().1.iter().all(|byte| *byte == 1));
}

#[test]
fn threads_that_share_a_communicator_get_their_own_halves() {
    let comm = Comm::local(1).unwrap().remove(0).share();
    within(LIMIT, move || {
        exchange_from_four_threads(&comm);
        assert_eq!(comm.timeout(Duration::from_secs(5)).all_reduce(vec![1u8]).wait().unwrap(), [1]);
    });
}

fn exchange_from_four_threads(comm: &allstream::SharedComm) {
    std::thread::scope(|scope| {
        for id in 0..4usize {
            scope.spawn(move || {
                for round in 0..200 {
                    // Lengths differ by thread, so another thread's half would not fit.
                    let mine = vec![(id * 50 + round % 50) as u8; 100 + id];
                    let (_, got) = comm.send_recv(mine.clone(), 0, vec![0u8; 100 + id], 0).wait().unwrap();
                    assert_eq!(got, mine);
                }
            });
        }
    });
}
