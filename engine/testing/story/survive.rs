//! Stories of survivors: ranks die one after another at any moment, also while the others shrink, and those that are left go on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::stage::Stage;
use super::told::Ranks;
use crate::Comm;
use crate::testing::virtual_link::Timeline;
use crate::types::Rank;

/// Elements of each buffer: more than one frame carries inline.
const COUNT: usize = 500;

/// What the survivors of a story have in common.
#[derive(Default)]
struct Seen {
    /// By the name of a communicator: the ranks of the world that are its members, as the first of them has seen it.
    members: Mutex<BTreeMap<String, Vec<Rank>>>,
    /// How many ranks have taken enough sums in a communicator of `left` ranks.
    ended: AtomicUsize,
}

/// A rank takes sums until `left` ranks have taken a number of them together. After each failure it goes on with the survivors.
async fn goes_on(stage: Arc<Stage>, mut comm: Comm, rank: Rank, left: usize, seen: Arc<Seen>) {
    let mut members: Vec<Rank> = (0..comm.size()).collect();
    let mut taken = 0;
    while members.len() > left || taken < 10 {
        let sum: u64 = members.iter().map(|member| 1 << member).sum();
        match comm.all_reduce(vec![1u64 << rank; COUNT]).await {
            Ok(sums) => {
                assert!(sums.iter().all(|s| *s == sum), "rank {rank} of {members:?}: {}", sums[0]);
                taken += 1;
            }
            Err(failed) => {
                assert_eq!(failed.buf.map(|buf| buf.len()), Some(COUNT), "the buffer comes back");
                let (smaller, verdict) = comm.shrink().await.unwrap_or_else(|e| panic!("rank {rank}: {e}"));
                members = verdict.survivors.iter().map(|place| members[*place]).collect();
                stage.log(format!("rank {rank} goes on with {members:?} after: {}", failed.error));
                assert_eq!(members[smaller.rank()], rank);
                assert_eq!(members.len(), smaller.size());
                let mut all = seen.members.lock();
                let first = all.entry(smaller.name().to_owned()).or_insert_with(|| members.clone());
                assert_eq!(*first, members, "all members of {} know the same", smaller.name());
                (comm, taken) = (smaller, 0);
            }
        }
    }
    seen.ended.fetch_add(1, Ordering::Relaxed);
    // The rank keeps its communicator: to the others its leaving would be one more loss.
    stage.log(format!("rank {rank} is through"));
    std::future::pending::<()>().await;
    drop(comm);
}

/// Tells a story in which of `n` ranks all but `left` die. Returns the log, and whether those that are left came to their end.
fn tell(n: usize, left: usize, seed: u64) -> (Vec<String>, bool) {
    let (ranks, comms) = Ranks::new(n, seed);
    let (stage, seen) = (&ranks.stage, Arc::new(Seen::default()));
    for (rank, comm) in comms.into_iter().enumerate() {
        stage.spawn(rank, Box::pin(goes_on(stage.clone(), comm, rank, left, seen.clone())));
    }
    let mut alive: Vec<Rank> = (0..n).collect();
    while alive.len() > left {
        // Often so soon that the others are still shrinking after the death before, of which they hear 1 to 20 ms later.
        stage.run(Duration::from_micros(stage.draw(30_000)), || false);
        ranks.kill(alive.swap_remove(stage.draw(alive.len() as u64) as usize));
    }
    let is_over = stage.run(Duration::from_secs(20), || seen.ended.load(Ordering::Relaxed) == left);
    (stage.told(), is_over)
}

#[test]
fn survivors_go_on_together_whenever_others_die_until_one_is_left() {
    let seeds = match std::env::var("ALLSTREAM_TEST_FULL").as_deref() {
        Ok("all") => 400,
        Ok("1") => 100,
        _ => 24,
    };
    for seed in 0..seeds {
        let (n, left) = (2 + seed as usize % 7, 1 + seed as usize % 2);
        let (log, is_over) = tell(n.max(left + 1), left, seed);
        let end = log.len().saturating_sub(60);
        assert!(is_over, "seed {seed}:\n{}", log[end..].join("\n"));
    }
}

#[test]
fn a_seed_tells_the_same_story_of_survivors_twice() {
    let [first, again] = [3, 3].map(|seed| tell(5, 1, seed).0);
    assert_eq!(first, again);
}
