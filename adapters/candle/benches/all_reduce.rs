//! Compares the time of an all_reduce of a candle tensor with that of a `Vec`: 32 MB on 2 ranks by default, medians of rounds.
//!
//! Both are timed in place, and with a copy into new memory: `apply_op1`, which has a gradient, must leave its input as it is, and so needs
//! new memory. Where the system maps new memory page by page, the mapping takes longer than the copy and the all_reduce together.
//!
//! `cargo bench --bench all_reduce -- [ROUNDS [MB]]`

use std::time::{Duration, Instant};

use allstream::{Comm, SharedComm};
use allstream_candle::AllReduce;
use candle_core::{DType, Device, Tensor};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RANKS: usize = 2;
const WARM_UP: usize = 3;

/// What is timed in each round.
const SIDES: [&str; 4] = ["Vec, in place", "tensor, inplace_op1", "Vec, cloned", "tensor, apply_op1"];

/// Runs one rank; returns its times of each side.
fn rank(comm: SharedComm, elements: usize, rounds: usize) -> Result<[Vec<Duration>; 4]> {
    let mut values = vec![0f32; elements];
    let tensor = Tensor::zeros(elements, DType::F32, &Device::Cpu)?;
    let op = AllReduce::new(&comm);
    let mut times: [Vec<Duration>; 4] = Default::default();
    for round in 0..WARM_UP + rounds {
        for i in 0..SIDES.len() {
            // Each round begins with another side.
            let side = (i + round) % SIDES.len();
            comm.barrier().wait()?;
            let start = Instant::now();
            match side {
                0 => values = comm.all_reduce(values).wait()?,
                1 => tensor.inplace_op1(&op)?,
                2 => drop(comm.all_reduce(values.clone()).wait()?),
                _ => drop(tensor.apply_op1(op.clone())?),
            }
            if round >= WARM_UP {
                times[side].push(start.elapsed());
            }
        }
    }
    Ok(times)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn main() -> Result<()> {
    // Arguments that are not numbers are skipped, because cargo adds `--bench`.
    let mut numbers = std::env::args().skip(1).filter_map(|word| word.parse::<usize>().ok());
    let (rounds, megabytes) = (numbers.next().unwrap_or(41).max(1), numbers.next().unwrap_or(32).max(1));
    let elements = (megabytes << 20) / size_of::<f32>();
    let spawn = |comm: Comm| std::thread::spawn(move || rank(comm.share(), elements, rounds));
    let ranks: Vec<_> = Comm::local(RANKS)?.into_iter().map(spawn).collect();
    let mut first = None;
    for thread in ranks {
        let times = thread.join().map_err(|_| "a rank panicked")??;
        first.get_or_insert(times);
    }
    let medians = first.ok_or("there is no rank")?.map(median);
    println!("all_reduce of {megabytes} MB on {RANKS} ranks, medians of {rounds} rounds in turns");
    for (i, (side, time)) in SIDES.iter().zip(medians).enumerate() {
        // Each tensor is compared with the `Vec` of its form, in place or copied.
        let ratio = time.as_secs_f64() / medians[i / 2 * 2].as_secs_f64();
        println!("{side:<20} {:>8.3} ms  {ratio:.2}", time.as_secs_f64() * 1e3);
    }
    Ok(())
}
