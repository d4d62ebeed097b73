//! Messages.

use allstream::{Error, Message};
use futures::executor::block_on;

use super::house::*;

#[test]
fn messages_of_different_tags_match_out_of_order() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            for len in [1usize, 50, 4096, 4097, 200_000] {
                if comm.rank() == 0 {
                    let works: Vec<_> =
                        (0..6u32).map(|tag| comm.tag(tag).send(vec![tag as u8; len], 1)).collect();
                    // Two of one tag are matched in order.
                    let again = comm.tag(0).send(vec![100u8; len], 1);
                    works.into_iter().chain([again]).for_each(|w| drop(w.wait().unwrap()));
                } else {
                    for tag in [5u32, 0, 3, 4, 1, 2] {
                        let got = comm.tag(tag).recv(vec![0u8; len], 0).wait().unwrap();
                        assert_eq!(got, vec![tag as u8; len], "{link:?}");
                    }
                    assert_eq!(comm.tag(0).recv(vec![0u8; len], 0).wait().unwrap(), vec![100u8; len]);
                }
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_beyond_the_credit_arrive_in_order() {
    const MANY: usize = 300;
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            if comm.rank() == 0 {
                let works: Vec<_> = (0..MANY).map(|i| comm.send(vec![i as u32; 1 + i % 40], 1)).collect();
                comm.barrier().wait().unwrap();
                for (i, work) in works.into_iter().enumerate() {
                    assert_eq!(
                        work.wait().unwrap(),
                        vec![i as u32; 1 + i % 40],
                        "what was sent comes back as it was"
                    );
                }
            } else {
                // Nothing is posted until the other has called all of its sends.
                comm.barrier().wait().unwrap();
                for i in 0..MANY {
                    let got = comm.recv(vec![0u32; 1 + i % 40], 0).wait().unwrap();
                    assert_eq!(got, vec![i as u32; 1 + i % 40], "{link:?}, message {i}");
                }
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_large_and_small_pass_in_both_directions() {
    let seed = seed();
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            for round in 0..6u64 {
                let mut batch = Vec::new();
                let mut expected = Vec::new();
                for peer in (0..n).filter(|p| *p != rank) {
                    for i in 0..12u8 {
                        // The length of a message from a to b, by what both know.
                        let len = |a: usize, b: usize| {
                            let mut rng =
                                Rng(seed ^ round << 32 ^ (a * 64 + b * 8) as u64 ^ u64::from(i) << 20);
                            [0, 1, 100, 4096, 5000, 130_000, 500_000][rng.below(7)] + rng.below(3)
                        };
                        let tag = u32::from(i % 3);
                        let buf = vec![i ^ rank as u8; len(rank, peer)];
                        expected.push(buf.clone());
                        batch.push(Message::Send { buf, to: peer, tag });
                        let buf = vec![0xee; len(peer, rank)];
                        expected.push(vec![i ^ peer as u8; buf.len()]);
                        batch.push(Message::Recv { buf, from: peer, tag });
                    }
                }
                let done =
                    if round % 2 == 0 { comm.batch(batch).wait() } else { block_on(comm.batch(batch)) };
                assert!(done.unwrap() == expected, "{link:?}, round {round}");
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_that_cannot_be_are_refused_and_empty_ones_arrive() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            let to_self = comm.send(vec![1u8; 3], rank).wait().unwrap_err();
            assert_eq!(to_self.buf, Some(vec![1u8; 3]));
            let text = to_self.error.to_string();
            assert!(text.contains("send") && text.contains("this rank"), "{text}");
            let nobody = comm.recv(vec![1u8; 3], 9).wait().unwrap_err();
            assert_eq!(nobody.buf, Some(vec![1u8; 3]));
            let text = nobody.error.to_string();
            assert!(
                text.contains("rank 9") && text.contains("group of 2") && text.contains("0..=1"),
                "{text}"
            );
            // Refusals take no number: what follows still matches.
            let sent = comm.send(Vec::<u64>::new(), peer);
            assert_eq!(comm.recv(Vec::<u64>::new(), peer).wait().unwrap(), Vec::<u64>::new());
            sent.wait().unwrap();
            // A batch with a bad one in it gives the others back.
            let bad = comm
                .batch([
                    Message::Send { buf: vec![4u8], to: peer, tag: 0 },
                    Message::Recv { buf: vec![0u8], from: peer, tag: 0 },
                    Message::Send { buf: vec![9u8], to: rank, tag: 0 },
                ])
                .wait()
                .unwrap_err();
            assert_eq!(bad.buf.unwrap(), [Some(vec![4]), Some(vec![4]), Some(vec![9])]);
            works(&mut comm);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn messages_that_disagree_are_an_error_on_both_sides() {
    for link in LINKS {
        for len in [100usize, 100_000] {
            let comms = within(LIMIT, move || world(2, link));
            threads(comms, move |mut comm| {
                let result = match comm.rank() {
                    0 => comm.send(vec![1u8; len], 1).wait().and_then(|b| comm.recv(b, 1).wait()),
                    _ => comm.recv(vec![1u8; len + 1], 0).wait(),
                };
                let failed = result.unwrap_err();
                let text = failed.error.to_string();
                assert!(matches!(failed.error, Error::Mismatch { .. }), "{link:?}: {text}");
                assert!(
                    text.contains(&format!("u8 x {len}")) && text.contains(&format!("u8 x {}", len + 1)),
                    "{text}"
                );
                assert!(failed.buf.is_some());
            });
        }
    }
}
