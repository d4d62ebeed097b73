//! Communicators that the pool has no room for end on all their members, and their rings' memory is free again.

use std::time::{Duration, Instant};

use allstream::{Comm, Error};
use futures::executor::block_on;

use super::{LINKS, on_ranks, pool, works};
use crate::support::{self, join, link_env, role, spawn_ranks};

const RING_BYTES: usize = 128 + 16 * 256;
/// Rings from one member to another: for collectives, messages, and collectives that devices run.
const CHANNELS: usize = 3;

#[test]
fn an_eviction_is_announced_to_the_other_members() {
    for link in LINKS {
        on_ranks(4, link, move |rank, mut world| {
            let base = world.stats().pool.ring_bytes;
            // Only rank 2 keeps few idle communicators.
            if rank == 2 {
                world.set_pool_capacity(2);
            }
            let orders: [fn(usize) -> i64; 4] =
                [|r| r as i64, |r| -(r as i64), |r| (r as i64 + 1) % 4, |r| (r as i64 + 2) % 4];
            for key in orders {
                let mut child = block_on(world.split(0, key(rank))).unwrap();
                works(&mut child);
                drop(child);
            }
            pool(&world, "the two oldest end on all", |p| p.idle == 2 && p.evictions == 2);
            // And their memory comes back on all.
            let two = 2 * CHANNELS * 4 * RING_BYTES;
            pool(&world, "two blocks of rings are left", |p| p.ring_bytes == base + two);
            world.barrier().wait().unwrap();
            // The two youngest are there, the oldest is not.
            for (i, hits, misses) in [(3, 1, 4), (2, 2, 4), (0, 2, 5)] {
                let mut child = block_on(world.split(0, orders[i](rank))).unwrap();
                works(&mut child);
                let stats = world.stats().pool;
                assert_eq!((stats.hits, stats.misses), (hits, misses), "{link}: order {i}: {stats:?}");
                drop(child);
                world.barrier().wait().unwrap();
            }
        });
    }
}

#[test]
fn rings_stay_taken_while_another_member_may_write_to_them() {
    for link in ["local", "shm"] {
        on_ranks(3, link, |rank, mut world| {
            let base = world.stats().pool.ring_bytes;
            world.set_pool_capacity(0);
            let mut child = block_on(world.dup()).unwrap();
            works(&mut child);
            let held = (rank == 2).then_some(child);
            pool(&world, "two ranks have let go", |p| p.live == usize::from(rank == 2));
            let block = CHANNELS * 3 * RING_BYTES;
            for _ in 0..3 {
                // Once another group has come and gone, its members have heard all that the others announced about `child`.
                let pair = block_on(world.split_some((rank < 2).then_some(0), 0)).unwrap();
                pair.iter().for_each(|pair| assert_eq!(pair.size(), 2));
                drop(pair);
                pool(&world, "only the group that one rank holds has rings", |p| {
                    p.ring_bytes == base + block
                });
                world.barrier().wait().unwrap();
            }
            drop(held);
            pool(&world, "the rings come back", |p| p.ring_bytes == base);
            world.barrier().wait().unwrap();
        });
    }
}

#[test]
fn five_thousand_splits_of_the_same_members_need_one_block_of_rings() {
    for &link in if support::full() { &["local", "shm"][..] } else { &["shm"] } {
        on_ranks(2, link, |_, mut world| {
            let block = CHANNELS * 2 * RING_BYTES;
            let base = world.stats().pool.ring_bytes;
            for i in 0..5_000 {
                let mut child = block_on(world.dup()).unwrap();
                if i % 16 == 0 {
                    works(&mut child);
                }
                match i % 4 {
                    0 => block_on(child.close()).unwrap(),
                    _ => drop(child),
                }
                pool(&world, "it is idle", |p| p.idle == 1);
            }
            let stats = world.stats().pool;
            assert_eq!((stats.hits, stats.misses, stats.evictions), (4_999, 1, 0));
            assert_eq!(stats.ring_bytes, base + block);
            // One block in use, and one that each split offers in case no idle communicator fits.
            assert_eq!(stats.ring_peak, base + 2 * block);
            world.barrier().wait().unwrap();
        });
    }
}

#[test]
fn five_thousand_splits_of_changing_members_stay_within_the_region() {
    for &link in if support::full() { &["local", "shm", "mixed"][..] } else { &["mixed"] } {
        on_ranks(5, link, |rank, mut world| {
            let base = world.stats().pool.ring_bytes;
            world.set_pool_capacity(6);
            let mut x = 12345u64;
            for round in 0..5_000 {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let colors = x >> 20;
                let key = if x >> 60 & 1 == 0 { rank as i64 } else { -(rank as i64) };
                let color = colors >> (2 * rank) & 3;
                // A rank of color 3 gets no group in this round.
                let child = block_on(world.split_some((color != 3).then_some(color), key)).unwrap();
                let Some(mut child) = child else { continue };
                if round % 8 == 0 {
                    works(&mut child);
                }
                if round % 64 == 0 { block_on(child.close()).unwrap() } else { drop(child) }
            }
            let stats = world.stats().pool;
            assert!(stats.hits > 0 && stats.evictions > 100, "{stats:?}");
            let one = CHANNELS * 5 * RING_BYTES;
            assert!(stats.misses as usize * one / 4 > stats.ring_limit / 8, "{stats:?}");
            assert!(stats.ring_peak < stats.ring_limit / 8, "memory is used again: {stats:?}");
            world.barrier().wait().unwrap();
            world.set_pool_capacity(0);
            pool(&world, "all rings come back", |p| p.ring_bytes == base && p.live == 0);
            works(&mut world);
        });
    }
}

#[test]
fn a_full_region_ends_what_is_idle_and_says_so_when_nothing_is() {
    on_ranks(8, "local", |rank, mut world| {
        world.set_pool_capacity(10_000);
        let limit = world.stats().pool.ring_limit;
        let fit = limit / (CHANNELS * 8 * RING_BYTES);
        // Idle communicators, and then more new ones than fit beside them: the pool ends idle ones to make room.
        let mut held: Vec<Comm> = Vec::new();
        for _ in 0..fit / 2 {
            held.push(block_on(world.dup()).unwrap());
        }
        held.clear();
        pool(&world, "all are idle", |p| p.idle == fit / 2);
        world.barrier().wait().unwrap();
        for _ in 0..fit / 2 + 20 {
            held.push(block_on(world.split(0, -(rank as i64))).unwrap());
        }
        held.iter_mut().step_by(50).for_each(works);
        // With all communicators held, the group that does not fit is an error on every rank.
        let mut parent = block_on(world.dup()).unwrap();
        let error = loop {
            match block_on(parent.split(0, (rank as i64 + 3) % 8)) {
                Ok(child) => held.push(child),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("communicators of this size at a time"), "{error}");
        works(&mut parent);
        works(&mut world);
    });
}

#[test]
fn a_member_that_leaves_takes_its_idle_groups_with_it() {
    for link in LINKS {
        on_ranks(3, link, |rank, mut world| {
            let base = world.stats().pool.ring_bytes;
            let mut all = block_on(world.dup()).unwrap();
            works(&mut all);
            let mut pair = block_on(world.split(u64::from(rank == 2), 0)).unwrap();
            works(&mut pair);
            drop(all);
            if rank == 2 {
                drop(pair);
                drop(world);
                return;
            }
            pool(&world, "the idle group ends with its member", |p| p.idle == 0);
            let block = CHANNELS * 2 * RING_BYTES;
            pool(&world, "and its rings come back", |p| p.ring_bytes == base + block);
            works(&mut pair);
        });
    }
}

/// Runs the test `name` as three processes; checks that the ranks in `well` end well.
fn three(name: &str, link: &str, well: &[usize]) {
    const LIMIT: Duration = Duration::from_secs(60);
    let ended = spawn_ranks(name, 3, LIMIT, |rank| link_env(link, rank, 3)).wait(LIMIT);
    for end in ended.iter().filter(|end| well.contains(&end.rank)) {
        assert!(end.success(), "over {link}: {end:?}");
    }
}

#[test]
fn a_member_that_dies_takes_its_idle_groups_and_their_rings_with_it() {
    const NAME: &str = "groups::ends::a_member_that_dies_takes_its_idle_groups_and_their_rings_with_it";
    if !role() {
        return three(NAME, "shm", &[0, 2]);
    }
    let mut world = join();
    let rank = world.rank();
    let base = world.stats().pool.ring_bytes;
    let mut all = block_on(world.dup()).unwrap();
    works(&mut all);
    let mut pair = block_on(world.split(u64::from(rank == 1), 0)).unwrap();
    works(&mut pair);
    drop(all);
    pool(&world, "one is idle", |p| p.idle == 1);
    // The barrier may fail on other ranks: rank 1 may end it first, and dies then.
    drop(world.barrier().wait());
    if rank == 1 {
        // No goodbye.
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    pool(&world, "the idle group ends with its member", |p| p.idle == 0);
    let (trio, duo) = (CHANNELS * 3 * RING_BYTES, CHANNELS * 2 * RING_BYTES);
    // The others' communicators work, and do not use again the rings that the lost rank may still write to.
    works(&mut pair);
    let mut again = block_on(pair.dup()).unwrap();
    works(&mut again);
    assert_eq!(world.stats().pool.ring_bytes, base + trio + 2 * duo);
    let error = block_on(world.dup()).unwrap_err();
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    drop(again);
    block_on(pair.close()).unwrap();
}

#[test]
fn sockets_of_groups_that_have_ended_are_closed() {
    const NAME: &str = "groups::ends::sockets_of_groups_that_have_ended_are_closed";
    if !role() {
        return three(NAME, "tcp", &[0, 1, 2]);
    }
    let mut world = join();
    let rank = world.rank();
    world.set_pool_capacity(0);
    works(&mut world);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for round in 0..60 {
        let mut child = block_on(world.dup()).unwrap();
        works(&mut child);
        if round % 3 == rank {
            // Nobody receives this message.
            child.send(vec![1u8; 100], (rank + 1) % 3).wait().unwrap();
        }
        drop(child);
    }
    world.barrier().wait().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    // A few are the world's own links, opened meanwhile.
    while open() > before + 12 {
        assert!(Instant::now() < end, "{} descriptors, {before} before", open());
        std::thread::sleep(Duration::from_millis(1));
    }
    world.barrier().wait().unwrap();
    block_on(world.close()).unwrap();
}
