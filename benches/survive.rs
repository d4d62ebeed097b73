//! How long it takes from a rank's death until the survivors have finished an all-reduce: they hear of the death, shrink the
//! communicator, and take a sum. Each round starts a new world of processes and kills a random one while all of them reduce 1 MiB
//! again and again. The last survivor's time counts.
//!
//! `cargo bench --bench survive -- [ROUNDS]` (default 21)

#![allow(missing_docs)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use test_support::faults::{Link, Me, Plan, Random, block_on, now, say};

/// Elements of each buffer.
const COUNT: usize = 1 << 18;

/// A rank: takes sums until one fails, shrinks, and says when it has the survivors' first sum.
async fn rank(me: Me) {
    let mut comm = me.connect().await;
    let mut buf = vec![1f32; COUNT];
    for taken in 0.. {
        if taken == 20 {
            say("at_work", json!({}));
        }
        match comm.all_reduce(buf).await {
            Ok(sum) => buf = sum,
            Err(_) => break,
        }
    }
    let heard = now();
    let (mut comm, _) = comm.shrink().await.expect("survivors");
    let shrunk = now();
    comm.all_reduce(vec![1f32; COUNT]).await.expect("a sum of the survivors");
    say("sum", json!({ "heard": heard, "shrunk": shrunk }));
    let _ = comm.close().await;
}

/// Milliseconds from the kill until the last survivor had heard of it, had the new communicator, and had its first sum.
fn once(n: usize, link: Link, random: &mut Random) -> [f64; 3] {
    let mut job = Plan::new("survives", n, link).start();
    job.ranks.iter().for_each(|rank| drop(rank.hear("at_work")));
    std::thread::sleep(Duration::from_secs_f64(random.fraction() * 0.01));
    let victim = job.ranks.swap_remove((random.fraction() * n as f64) as usize);
    let killed = now();
    victim.signal(Signal::KILL);
    let said: Vec<_> = job.ranks.iter().map(|rank| rank.hear("sum")).collect();
    job.finish();
    ["heard", "shrunk", "t"].map(|what| {
        let times = said.iter().filter_map(|line| line[what].as_f64());
        (times.fold(0.0, f64::max) - killed) * 1e3
    })
}

fn main() {
    if let Some(me) = Me::from_env() {
        return block_on(rank(me));
    }
    let rounds = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(21);
    let mut random = Random::seeded();
    println!("milliseconds from the kill until the last survivor ..., median of {rounds} (the longest)");
    println!("{:>5} {:>5} {:>20} {:>20} {:>20}", "ranks", "link", "heard of it", "had shrunk", "had a sum");
    for n in [4, 8] {
        for (name, link) in [("shm", Link::Shm), ("tcp", Link::Tcp)] {
            let all: Vec<[f64; 3]> = (0..rounds).map(|_| once(n, link, &mut random)).collect();
            let cell = |column: usize| {
                let mut times: Vec<f64> = all.iter().map(|row| row[column]).collect();
                times.sort_by(f64::total_cmp);
                format!("{:.1} ({:.1})", times[times.len() / 2], times[times.len() - 1])
            };
            println!("{n:>5} {name:>5} {:>20} {:>20} {:>20}", cell(0), cell(1), cell(2));
        }
    }
}
