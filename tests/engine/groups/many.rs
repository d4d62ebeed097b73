//! A hundred groups over eight processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use allstream::{Algo, Comm};
use futures::executor::block_on;

use crate::support::{join, link_env, role, spawn_ranks};

const RANKS: usize = 8;
const GROUPS: usize = 100;
const LIMIT: Duration = Duration::from_secs(150);

/// Subsets of the eight ranks, in some order; the same on every rank.
fn subsets() -> Vec<Vec<usize>> {
    let mut x = 2026u64;
    let mut next = || {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (x >> 33) as usize
    };
    let mut subset = || {
        let mut ranks: Vec<usize> = (0..RANKS).collect();
        (1..RANKS).rev().for_each(|i| ranks.swap(i, next() % (i + 1)));
        ranks.truncate(1 + next() % RANKS);
        ranks
    };
    (0..GROUPS).map(|_| subset()).collect()
}

fn rank(mut world: Comm) {
    let begun = world.stats();
    let (watched, done) = (world.share(), Arc::new(AtomicBool::new(false)));
    let stop = done.clone();
    let watch = std::thread::spawn(move || {
        let mut most = 0;
        while !stop.load(Ordering::Acquire) {
            let stats = watched.stats();
            assert_eq!(stats.staging_limit, begun.staging_limit);
            most = most.max(stats.staging_bytes);
            std::thread::sleep(Duration::from_micros(200));
        }
        most
    });
    let me = world.rank();
    let subsets = subsets();
    let mut groups: Vec<(usize, Comm)> = Vec::new();
    for (i, ranks) in subsets.iter().enumerate() {
        groups.extend(block_on(world.subset(ranks)).unwrap().map(|comm| (i, comm)));
    }
    assert_eq!(world.stats().pool.live, groups.len());
    let begin = Instant::now();
    let say = |what: &str| println!("rank {me}: {what} after {:?}", begin.elapsed());
    say("made");
    // All at once: together far more than may be staged.
    let len = 60_000;
    let submit = |(i, comm): &mut (usize, Comm)| {
        (*i, comm.all_reduce((0..len).map(|k| (k + *i + me) as u64).collect::<Vec<_>>()))
    };
    let works: Vec<_> = groups.iter_mut().map(submit).collect();
    assert!(groups.len() * len * 8 > 2 * begun.staging_limit);
    for (i, work) in works {
        let (n, sum) = (subsets[i].len(), subsets[i].iter().sum::<usize>());
        let got = work.wait().unwrap();
        assert!(got.iter().enumerate().all(|(k, x)| *x == (n * (k + i) + sum) as u64), "group {i}");
    }
    say("all at once");
    // One after the other, each alone more than may be staged.
    let len = begun.staging_limit / 4 + 1000;
    for (i, comm) in groups.iter_mut().filter(|(i, _)| i % 4 == 0) {
        let algo = if *i % 8 == 0 { Algo::Ring } else { Algo::Auto };
        let algo = if comm.size() > 1 { algo } else { Algo::Auto };
        let got = comm.algo(algo).all_reduce(vec![me as u32 + 1; len]).wait().unwrap();
        let sum = subsets[*i].iter().map(|r| *r as u32 + 1).sum::<u32>();
        assert!(got.len() == len && got.iter().all(|x| *x == sum), "group {i}");
    }
    say("one after the other");
    world.barrier().wait().unwrap();
    drop(groups);
    world.barrier().wait().unwrap();
    done.store(true, Ordering::Release);
    let most = watch.join().unwrap();
    assert!(most > 0 && most <= begun.staging_limit, "{most} bytes staged at most");
    block_on(world.close()).unwrap();
}

#[test]
fn a_hundred_groups_over_eight_processes_stay_within_the_staging_cap() {
    const NAME: &str = "groups::many::a_hundred_groups_over_eight_processes_stay_within_the_staging_cap";
    if role() {
        return rank(join());
    }
    for link in ["shm", "mixed"] {
        let envs = |rank| {
            // Eight busy processes on few cores are slow: they must not be taken for lost.
            let patient = ("ALLSTREAM_HEARTBEAT_TIMEOUT".to_owned(), "60".to_owned());
            [link_env(link, rank, RANKS), vec![patient]].concat()
        };
        let ended = spawn_ranks(NAME, RANKS, LIMIT, envs).wait(LIMIT);
        for end in ended {
            assert!(
                end.success(),
                "over {link}, rank {}: {:?}\n{}{}",
                end.rank,
                end.status,
                end.stdout,
                end.stderr
            );
        }
    }
}
