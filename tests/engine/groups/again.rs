//! Idle communicators are taken up again: which, when, and when not.

use allstream::{Comm, Error};
use futures::executor::block_on;

use super::{LINKS, on_ranks, pool, works};

/// Waits until every rank holds `idle` idle communicators.
fn settled(world: &mut Comm, idle: usize) {
    pool(world, "idle communicators", |p| p.idle == idle);
    world.barrier().wait().unwrap();
}

#[test]
fn a_split_takes_up_the_idle_communicator_of_the_same_members() {
    for link in LINKS {
        on_ranks(4, link, |rank, mut world| {
            let color = (rank % 2) as u64;
            let mut names = Vec::new();
            for round in 0..6u64 {
                let mut half = block_on(world.split(color, 0)).unwrap();
                names.push(half.name().to_owned());
                for len in [1usize, 100_000] {
                    let all = half.all_gather(vec![10 * rank as u64 + round]);
                    let sum = half.all_reduce(vec![round + rank as u64; len]);
                    assert_eq!(all.wait().unwrap(), [10 * color + round, 10 * (color + 2) + round]);
                    assert_eq!(sum.wait().unwrap(), vec![2 * round + 2 * color + 2; len]);
                }
                if round % 2 == 0 {
                    block_on(half.close()).unwrap()
                } else {
                    drop(half)
                }
                settled(&mut world, 1);
                let stats = world.stats().pool;
                assert_eq!((stats.hits, stats.misses, stats.evictions, stats.live), (round, 1, 0, 0));
            }
            names.dedup();
            assert_eq!(names.len(), 6, "each is a communicator of its own: {names:?}");
            block_on(world.close()).unwrap();
        });
    }
}

#[test]
fn several_of_the_same_members_are_taken_up_in_any_order_of_dropping() {
    for link in ["local", "shm"] {
        on_ranks(3, link, |rank, mut world| {
            let mut made: Vec<Comm> = (0..3).map(|_| block_on(world.dup()).unwrap()).collect();
            made.iter_mut().for_each(works);
            // Each rank drops them in an order of its own.
            made.rotate_left(rank);
            drop(made);
            settled(&mut world, 3);
            let mut again: Vec<Comm> = (0..4).map(|_| block_on(world.dup()).unwrap()).collect();
            again.iter_mut().for_each(works);
            let stats = world.stats().pool;
            assert_eq!((stats.hits, stats.misses, stats.idle, stats.live), (3, 4, 0, 4));
            // The same ranks in another order are another group.
            drop(again);
            settled(&mut world, 4);
            let mut turned = block_on(world.split(0, -(rank as i64))).unwrap();
            works(&mut turned);
            assert_eq!(world.stats().pool.misses, 5);
        });
    }
}

#[test]
fn work_in_flight_is_served_before_the_communicator_is_idle() {
    for link in LINKS {
        on_ranks(3, link, |rank, mut world| {
            for round in 0..4u64 {
                let mut child = block_on(world.dup()).unwrap();
                let kept = child.all_reduce(vec![rank as u64 + round; 200_000]);
                drop(child.all_reduce(vec![1f32; 300_000]));
                drop(child);
                settled(&mut world, 1);
                let mut next = block_on(world.dup()).unwrap();
                works(&mut next);
                // The result of the earlier generation is still there.
                assert_eq!(kept.wait().unwrap(), vec![3 + 3 * round; 200_000]);
                assert_eq!(world.stats().pool.misses, 1, "round {round}");
                drop(next);
                settled(&mut world, 1);
            }
        });
    }
}

#[test]
fn messages_and_their_credits_go_on_in_the_next_generation() {
    for link in LINKS {
        on_ranks(2, link, |rank, mut world| {
            for round in 0..8u32 {
                let mut child = block_on(world.dup()).unwrap();
                // More messages than half the 32 credits, in one direction, then back: credits are on their way at the end.
                let count = 17 + round;
                for from in [0, 1] {
                    let works: Vec<_> = (0..count)
                        .map(|i| match rank == from {
                            true => child.tag(i % 3).send(vec![1000 * round + i; 5], 1 - rank),
                            false => child.tag(i % 3).recv(vec![0; 5], from),
                        })
                        .collect();
                    for (i, work) in works.into_iter().enumerate() {
                        assert_eq!(work.wait().unwrap(), [1000 * round + i as u32; 5], "round {round}");
                    }
                }
                works(&mut child);
                drop(child);
                settled(&mut world, 1);
            }
            assert_eq!(world.stats().pool.misses, 1);
        });
    }
}

#[test]
fn a_credit_that_comes_after_its_receiver_has_let_go_counts_in_the_next_generation() {
    for link in LINKS {
        on_ranks(2, link, |rank, mut world| {
            for round in 0..6u32 {
                let mut child = block_on(world.dup()).unwrap();
                // As many as a ring holds, and half the 32 credits: at so many the receiver sends credits back.
                let values = 0..16u32;
                if rank == 0 {
                    for i in values {
                        child.send(vec![100 * round + i; 3], 1).wait().unwrap();
                    }
                    drop(child);
                    pool(&world, "the sender is done", |p| p.idle == 1);
                    world.send(vec![1u8], 1).wait().unwrap();
                } else {
                    // Received only now that the sender has let go of its handle: nobody there reads the credits that go back.
                    world.recv(vec![0u8], 0).wait().unwrap();
                    for i in values {
                        assert_eq!(child.recv(vec![0; 3], 0).wait().unwrap(), [100 * round + i; 3]);
                    }
                    drop(child);
                }
                settled(&mut world, 1);
            }
            assert_eq!((world.stats().pool.hits, world.stats().pool.misses), (5, 1));
        });
    }
}

#[test]
fn a_message_that_nobody_received_is_not_found_by_the_next_group() {
    for link in LINKS {
        on_ranks(2, link, |rank, mut world| {
            for _ in 0..3 {
                let mut child = block_on(world.dup()).unwrap();
                works(&mut child);
                if rank == 0 {
                    child.send(vec![666u32; 5], 1).wait().unwrap();
                }
                drop(child);
                pool(&world, "idle", |p| p.idle == 1);
                world.barrier().wait().unwrap();
                let mut next = block_on(world.dup()).unwrap();
                let work = match rank {
                    0 => next.send(vec![1u32; 5], 1),
                    _ => next.recv(vec![0u32; 5], 0),
                };
                assert_eq!(work.wait().unwrap(), [1; 5]);
                let stats = world.stats().pool;
                assert_eq!(stats.hits, 0, "{stats:?}");
                world.barrier().wait().unwrap();
                next.abort("the test is done with it");
                drop(next);
                pool(&world, "nothing idle", |p| p.idle == 0);
                world.barrier().wait().unwrap();
            }
        });
    }
}

#[test]
fn ranks_that_made_different_calls_do_not_take_it_up_and_close_still_compares_calls() {
    for link in LINKS {
        on_ranks(2, link, |rank, mut world| {
            // The communicator is taken up once, so that the calls compared below are those of its second generation.
            let mut first = block_on(world.dup()).unwrap();
            (0..5).for_each(|_| works(&mut first));
            drop(first);
            settled(&mut world, 1);
            let mut child = block_on(world.dup()).unwrap();
            works(&mut child);
            assert_eq!(world.stats().pool.hits, 1);
            // Small enough for its root not to wait for the other rank.
            if rank == 0 {
                child.broadcast(vec![5u8], 0).wait().unwrap();
            }
            drop(child);
            settled(&mut world, 1);
            let mut child = block_on(world.dup()).unwrap();
            assert_eq!((world.stats().pool.hits, world.stats().pool.misses), (1, 2));
            works(&mut child);
            drop(child);
            settled(&mut world, 1);

            let mut child = block_on(world.dup()).unwrap();
            assert_eq!(world.stats().pool.hits, 2);
            works(&mut child);
            if rank == 0 {
                child.broadcast(vec![5u8], 0).wait().unwrap();
            }
            let error = block_on(child.close()).unwrap_err();
            assert!(matches!(error, Error::Invalid { .. } | Error::Mismatch { .. }), "{error}");
            pool(&world, "what failed is not kept", |p| p.idle == 0);
            works(&mut world);
        });
    }
}

#[test]
fn a_poisoned_communicator_never_returns() {
    for link in LINKS {
        on_ranks(3, link, |rank, mut world| {
            for round in 0..3 {
                let mut child = block_on(world.dup()).unwrap();
                works(&mut child);
                world.barrier().wait().unwrap();
                if rank == round {
                    child.abort("planted");
                }
                // Some ranks hear of the abort before they drop `child`, some after.
                drop(child);
                world.barrier().wait().unwrap();
                let mut next = block_on(world.dup()).unwrap();
                works(&mut next);
                assert_eq!(world.stats().pool.hits, 0, "round {round}");
                world.barrier().wait().unwrap();
                next.abort("not to be taken up either");
                drop(next);
                world.barrier().wait().unwrap();
                pool(&world, "all have ended", |p| p.idle == 0 && p.live == 0);
            }
        });
    }
}

#[test]
fn splitting_what_is_dead_says_why() {
    on_ranks(3, "shm", |rank, mut world| {
        let mut child = block_on(world.dup()).unwrap();
        if rank == 1 {
            child.abort("planted");
        }
        let error = block_on(child.split(0, 0)).unwrap_err();
        assert!(matches!(&error, Error::Aborted { by: 1, reason, .. } if reason == "planted"), "{error}");
        let error = block_on(child.subset(&[0])).unwrap_err();
        assert!(matches!(&error, Error::Aborted { by: 1, reason, .. } if reason == "planted"), "{error}");
        works(&mut world);
    });
}
