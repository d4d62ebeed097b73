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
                        // The length of message `i` from `a` to `b`, which both ranks compute from the seed.
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
            // A refused call takes no number: the calls that follow still match.
            let sent = comm.send(Vec::<u64>::new(), peer);
            assert_eq!(comm.recv(Vec::<u64>::new(), peer).wait().unwrap(), Vec::<u64>::new());
            sent.wait().unwrap();
            // The valid messages of a batch with an invalid one are carried out, and all buffers come back.
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
                let called = format!(
                    "rank 1 called recv(u8 x {}, from rank 0, tag 0), rank 0 sent u8 x {len};",
                    len + 1
                );
                assert!(text.contains(&called), "{text}");
                assert!(failed.buf.is_some());
            });
        }
    }
}

#[test]
fn a_message_that_disagrees_is_named_with_what_else_is_pending() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            if comm.rank() == 1 {
                // What is sent first is there first.
                comm.send(vec![2u64; 3], 0).wait().unwrap();
                comm.tag(7).send(vec![1f32; 5], 0).wait().unwrap();
                comm.tag(9).send(vec![1f32; 8], 0).wait().unwrap();
                // The error may come before this barrier has ended on this rank.
                drop(comm.barrier().wait());
                return wait_until("the error to be heard", || comm.check().is_err());
            }
            comm.barrier().wait().unwrap();
            let failed = comm.tag(9).recv(vec![0f32; 9], 1).wait().unwrap_err();
            assert_eq!(failed.buf, Some(vec![0f32; 9]), "nothing was written to it");
            let Error::Mismatch { rank: 0, peer: 1, pending, .. } = &failed.error else { panic!("{failed}") };
            let pending: Vec<_> = pending.iter().map(|m| (m.root, m.count)).collect();
            assert_eq!(pending, [(0, 3), (7, 5)], "{link:?}: {failed}");
            let text = failed.to_string();
            let called = "rank 0 called recv(f32 x 9, from rank 1, tag 9), rank 1 sent f32 x 8; pending from rank 1: \
                          tag 0, u64 x 3; tag 7, f32 x 5;";
            assert!(text.contains(called), "{text}");
        });
    }
}

#[test]
fn a_message_that_does_not_come_is_named_with_what_is_there_instead() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let soon = std::time::Duration::from_millis(300);
            if comm.rank() == 1 {
                comm.send(vec![1f32; 8], 0).wait().unwrap();
                return wait_until("the deadline of the other", || comm.check().is_err());
            }
            let failed = comm.timeout(soon).tag(9).recv(vec![0f32; 8], 1).wait().unwrap_err();
            assert!(failed.buf.is_some());
            let text = failed.to_string();
            let begin = "recv(f32 x 8, from rank 1, tag 9) (#0 of communicator world) on rank 0 timed out after 300ms: ";
            assert!(text.starts_with(begin), "{link:?}: {text}");
            let instead = "rank 1 has not made the matching send of tag 9, or waits in another call; pending from it: \
                           tag 0, f32 x 8";
            assert!(text.contains(instead), "{link:?}: {text}");
        });
    }
}

#[test]
fn a_sender_that_has_left_is_named_with_what_it_has_sent_instead() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            if comm.rank() == 1 {
                return drop(comm.send(vec![1f32; 8], 0).wait().unwrap());
            }
            let failed = comm.timeout(LIMIT).tag(9).recv(vec![0f32; 8], 1).wait().unwrap_err();
            assert!(failed.buf.is_some());
            let text = failed.to_string();
            let left = "rank 1 was lost (it left the group while it was needed)";
            assert!(text.starts_with(left), "{link:?}: {text}");
            let waited = ": rank 0 waited in recv(f32 x 8, from rank 1, tag 9) (#0 of communicator world); pending from rank 1: tag 0, \
                          f32 x 8";
            assert!(text.contains(waited), "{link:?}: {text}");
        });
    }
}

/// Rank 0 waits for a message of the wrong tag, but rank 1 times out first, in a barrier: the error that all get still says in which
/// receive rank 0 waits.
#[test]
fn a_rank_that_waits_for_a_message_is_named_so_where_another_waits_for_that_rank() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let failed = match comm.rank() {
                0 => {
                    comm.timeout(LIMIT).tag(9).recv(vec![0f32; 8064], 1).wait().map(drop).map_err(Error::from)
                }
                1 => {
                    let _sent = comm.timeout(LIMIT).send(vec![1f32; 8064], 0);
                    comm.timeout(std::time::Duration::from_secs(1)).barrier().wait().map_err(Error::from)
                }
                _ => comm.timeout(LIMIT).barrier().wait().map_err(Error::from),
            };
            let text = failed.unwrap_err().to_string();
            let told = "rank 0 has not called it: it waits in recv(f32 x 8064, from rank 1, tag 9)";
            assert!(text.contains(told), "{link:?}: {text}");
        });
    }
}

#[test]
fn a_message_that_is_not_received_is_named_with_what_is_awaited_instead() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let failed = match comm.rank() {
                0 => comm.timeout(std::time::Duration::from_secs(1)).tag(9).send(vec![1f32; 8064], 1).wait(),
                _ => comm.recv(vec![0f32; 8], 0).wait(),
            };
            let text = failed.unwrap_err().to_string();
            let begin = "send(f32 x 8064, to rank 1, tag 9) (#0 of communicator world) on rank 0 timed out after 1s: ";
            assert!(text.starts_with(begin), "{link:?}: {text}");
            let instead = "rank 1 has not made the matching recv of tag 9, or waits in another call; nothing else is pending \
                           from it; it waits to receive from rank 0: tag 0, f32 x 8";
            assert!(text.contains(instead), "{link:?}: {text}");
        });
    }
}

#[test]
fn close_reports_messages_that_nobody_received() {
    for link in LINKS {
        // An eager message, and one that waits for its receive; rank 0 receives no message, or another one first.
        for (len, talks) in [(8usize, false), (8, true), (100_000, false)] {
            let comms = within(LIMIT, move || world(2, link));
            threads(comms, move |mut comm| {
                if comm.rank() == 1 {
                    let sent = comm.tag(3).send(vec![1u8; len], 0);
                    if talks {
                        comm.send(vec![1u8; 2], 0).wait().unwrap();
                    }
                    comm.barrier().wait().unwrap();
                    // This rank may hear of rank 0's error before it has closed, or not; if it does, it gets the same error.
                    let closed = block_on(comm.close());
                    drop(sent);
                    return if let Err(error) = closed {
                        assert!(error.to_string().contains("tag 3"), "{error}");
                    };
                }
                if talks {
                    comm.recv(vec![0u8; 2], 1).wait().unwrap();
                }
                comm.barrier().wait().unwrap();
                let text = block_on(comm.close()).unwrap_err().to_string();
                let told = format!(
                    "close: messages from rank 1 were not received by rank 0; pending from it: tag 3, u8 x {len}; each send \
                     needs a recv"
                );
                assert_eq!(text, told, "{link:?}");
            });
        }
    }
}
