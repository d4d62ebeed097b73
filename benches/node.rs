//! All-reduce among the devices of one process: one thread that waits for all devices (a [`Node`]), compared with a thread for
//! each device ([`Comm::local`]). f32, sum, in place, back to back; the median over rounds.
//!
//! `cargo bench --bench node -- [DEVICES]` (default 2)

#![allow(missing_docs)]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use allstream::{Comm, Error, Node};
use futures::executor::block_on;

const BYTES: [usize; 5] = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20];
const ROUNDS: usize = 15;

type Res<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// How many calls a round has.
fn calls(bytes: usize) -> u32 {
    if bytes > 100_000 { 20 } else { 500 }
}

/// This thread calls for all devices. Returns the microseconds of a call.
fn one_thread(node: &mut Node, bytes: usize, asynchronous: bool) -> Result<f64, Error> {
    let mut bufs = vec![vec![0.0_f32; bytes / 4]; node.devices()];
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        for _ in 0..calls(bytes) {
            let work = node.all_reduce(bufs);
            bufs = if asynchronous { block_on(work)? } else { work.wait()? };
        }
        times.push(begun.elapsed() / calls(bytes));
    }
    Ok(median(times))
}

/// Each device has a thread of its own. Returns the microseconds of a call, as the first thread timed it.
fn a_thread_each(comms: &mut [Comm], bytes: usize) -> Res<f64> {
    let start = Barrier::new(comms.len());
    let run = |comm: &mut Comm| -> Result<f64, Error> {
        let (mut buf, mut times) = (vec![0.0_f32; bytes / 4], Vec::new());
        for _ in 0..ROUNDS {
            start.wait();
            let begun = Instant::now();
            for _ in 0..calls(bytes) {
                buf = comm.all_reduce(buf).wait()?;
            }
            times.push(begun.elapsed() / calls(bytes));
        }
        Ok(median(times))
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = comms.iter_mut().map(|comm| scope.spawn(move || run(comm))).collect();
        let mut first = None;
        for thread in threads {
            let time = thread.join().map_err(|_| "a rank panicked")??;
            first.get_or_insert(time);
        }
        Ok(first.unwrap_or_default())
    })
}

fn main() -> Res<()> {
    let devices = std::env::args().skip(1).find(|a| a != "--bench").map_or(Ok(2), |a| a.parse())?;
    let (mut node, mut comms) = (Node::local(devices)?, Comm::local(devices)?);
    println!(
        "| bytes | a thread each, wait, us | one thread, wait, us | one thread, await, us | wait / each |"
    );
    println!("|---|---|---|---|---|");
    for bytes in BYTES {
        let each = a_thread_each(&mut comms, bytes)?;
        let (wait, poll) = (one_thread(&mut node, bytes, false)?, one_thread(&mut node, bytes, true)?);
        println!("| {bytes} | {each:.1} | {wait:.1} | {poll:.1} | {:.2} |", wait / each);
    }
    Ok(())
}
