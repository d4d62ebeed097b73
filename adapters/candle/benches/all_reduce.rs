//! What a candle tensor costs beside a `Vec`: an all_reduce of 32 MB on 2 ranks, both sides in turns, medians.
//!
//! `cargo bench --bench all_reduce -- [ROUNDS]`

use std::time::{Duration, Instant};

use allstream::{Comm, SharedComm};
use allstream_candle::AllReduce;
use candle_core::{DType, Device, Tensor};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RANKS: usize = 2;
const ELEMENTS: usize = 8 << 20;
const WARM_UP: usize = 3;

/// What is timed, in the order in which they take turns.
const SIDES: [&str; 3] = ["Vec, in place", "tensor, apply_op1", "tensor, inplace_op1"];

/// The times of each side on this rank.
fn rank(comm: SharedComm, rounds: usize) -> Result<[Vec<Duration>; 3]> {
    let mut values = vec![0f32; ELEMENTS];
    let tensor = Tensor::zeros(ELEMENTS, DType::F32, &Device::Cpu)?;
    let op = AllReduce::new(&comm);
    let mut times: [Vec<Duration>; 3] = Default::default();
    for round in 0..WARM_UP + rounds {
        for (side, times) in times.iter_mut().enumerate() {
            comm.barrier().wait()?;
            let start = Instant::now();
            match side {
                0 => values = comm.all_reduce(values).wait()?,
                1 => drop(tensor.apply_op1(op.clone())?),
                _ => tensor.inplace_op1(&op)?,
            }
            if round >= WARM_UP {
                times.push(start.elapsed());
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
    let rounds = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(41usize).max(1);
    let spawn = |comm: Comm| std::thread::spawn(move || rank(comm.share(), rounds));
    let ranks: Vec<_> = Comm::local(RANKS)?.into_iter().map(spawn).collect();
    let mut first = None;
    for thread in ranks {
        let times = thread.join().map_err(|_| "a rank panicked")??;
        first.get_or_insert(times);
    }
    let medians = first.ok_or("there is no rank")?.map(median);
    println!(
        "all_reduce of {} MB on {RANKS} ranks, medians of {rounds} rounds in turns",
        (ELEMENTS * 4) >> 20
    );
    for (side, time) in SIDES.iter().zip(medians) {
        let ratio = time.as_secs_f64() / medians[0].as_secs_f64();
        println!("{side:<20} {:>8.3} ms  {ratio:.2}", time.as_secs_f64() * 1e3);
    }
    Ok(())
}
