//! Groups: made, used, dropped and made again; by color, as a list of ranks, as a mesh, by name.

mod again;
mod ends;
mod full;
mod many;
mod shapes;

use std::time::{Duration, Instant};

use allstream::{Comm, PoolStats};

use crate::support;

const LIMIT: Duration = Duration::from_secs(120);
const LINKS: [&str; 4] = ["local", "shm", "tcp", "mixed"];

/// Runs `f` on a thread for each of `n` ranks.
fn on_ranks<R: Send + 'static>(
    n: usize,
    link: &str,
    f: impl Fn(usize, Comm) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let results = support::on_threads(support::worlds(n, link), LIMIT, f);
    results.into_iter().map(|r| r.unwrap_or_else(|e| panic!("over {link}: {e}"))).collect()
}

/// Waits until the pool is as said.
fn pool(world: &Comm, what: &str, is: impl Fn(PoolStats) -> bool) -> PoolStats {
    let end = Instant::now() + LIMIT / 4;
    loop {
        let stats = world.stats().pool;
        if is(stats) {
            return stats;
        }
        assert!(Instant::now() < end, "{what}: {stats:?}");
        std::thread::yield_now();
    }
}

/// One collective whose result depends on all ranks.
fn works(comm: &mut Comm) {
    let n = comm.size() as u64;
    let sum = comm.all_reduce(vec![comm.rank() as u64 + 1; 3]).wait().unwrap();
    assert_eq!(sum, [n * (n + 1) / 2; 3]);
}
