//! How long small operations of one communicator take while another communicator of the same ranks runs large ones.
//!
//! `cargo bench --bench beside -- [BYTES [OPERATIONS]]`: 2 ranks of this process broadcast BYTES bytes (default 1 GiB) OPERATIONS times
//! (default 5) on one communicator. Meanwhile a second thread of each rank all-reduces one number at a time on another. A line for each rank:
//! `beside BYTES rank RANK operations COUNT median MICROSECONDS p99 MICROSECONDS worst MICROSECONDS broadcasts SECONDS`. A rank
//! drives one communicator at a time: if each thread has a core of its own, the worst time is about one pass of the other communicator;
//! otherwise the system's scheduler adds to it.

#![allow(missing_docs)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use allstream::Comm;
use futures::executor::block_on;

type Res<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Res<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let number = |at: usize, default: usize| args.get(at).map_or(Ok(default), |text| text.parse());
    let (bytes, operations) = (number(0, 1 << 30)?, number(1, 5)?);
    let start = Arc::new(Barrier::new(2));
    let ranks: Vec<_> = Comm::local(2)?
        .into_iter()
        .map(|comm| {
            let start = start.clone();
            thread::spawn(move || rank(comm, bytes, operations, &start))
        })
        .collect();
    for rank in ranks {
        println!("{}", rank.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}

/// Runs one rank. Each reduced number says whether the rank's broadcasts go on, so both ranks stop after the same reduction.
fn rank(mut big: Comm, bytes: usize, operations: usize, start: &Barrier) -> Res<String> {
    let mut small = block_on(big.dup())?;
    let is_over = Arc::new(AtomicBool::new(false));
    let mut buf = big.broadcast(vec![1u8; bytes], 0).wait()?;
    start.wait();
    let over = is_over.clone();
    let moving = thread::spawn(move || -> Res<(Comm, Duration)> {
        let begun = Instant::now();
        for _ in 0..operations {
            buf = big.broadcast(buf, 0).wait()?;
        }
        over.store(true, Ordering::Release);
        Ok((big, begun.elapsed()))
    });
    let mut waits = Vec::new();
    loop {
        let (begun, goes_on) = (Instant::now(), !is_over.load(Ordering::Acquire));
        let left = small.all_reduce(vec![i32::from(goes_on)]).wait()?;
        waits.push(begun.elapsed());
        if left == [0] {
            break;
        }
    }
    let (big, took) = moving.join().map_err(|_| "a thread panicked")??;
    waits.sort_unstable();
    let at = |part: f64| waits[((waits.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
    let line = format!(
        "beside {bytes} rank {} operations {} median {:.1} p99 {:.1} worst {:.1} broadcasts {:.3}",
        small.rank(),
        waits.len(),
        at(0.5),
        at(0.99),
        at(1.0),
        took.as_secs_f64()
    );
    drop((small, big));
    Ok(line)
}
