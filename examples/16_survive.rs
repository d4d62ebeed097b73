//! Training that loses ranks and goes on.
//!
//! Teaches: when a call fails, the survivors [`shrink`](allstream::Comm::shrink) the communicator, take the state of their first rank,
//! and share the rows among fewer; they need no address, no token and no restart. All that a training loop needs in addition is
//! `survive`, and the line that calls it.
//!
//! `cargo run --release --example 16_survive` runs eight ranks as threads, five of which leave in the middle.
//! `allstream run -n 8 --on-failure keep -- target/release/examples/16_survive` runs them as processes: `kill -9` any of them. An
//! argument sets the number of epochs (default 150).

use std::thread;

use allstream::{Comm, Failed, Rendezvous};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const PIXELS: usize = 64;
const CLASSES: usize = 10;
const BATCH: usize = 128;

/// An 8x8 picture, and the digit that it shows.
type Digit = ([f32; PIXELS], usize);

/// The handwritten digits of `cli/data/`: those to train on, and every fifth to test with.
fn digits() -> (Vec<Digit>, Vec<Digit>) {
    let line = |line: &str| {
        let (label, image) = line.split_once(' ')?;
        let mut pixels = [0.0; PIXELS];
        for (pixel, c) in pixels.iter_mut().zip(image.chars()) {
            *pixel = c.to_digit(17)? as f32 / 16.0;
        }
        Some((pixels, label.parse().ok()?))
    };
    let all: Vec<Digit> = include_str!("../cli/data/digits.txt").lines().filter_map(line).collect();
    let part =
        |test| all.iter().enumerate().filter(move |(i, _)| (i % 5 == 0) == test).map(|(_, digit)| *digit);
    (part(false).collect(), part(true).collect())
}

/// How likely each class is for these pixels, by a linear model with a row of weights and a bias for each class.
fn classify(weights: &[f32], pixels: &[f32; PIXELS]) -> [f32; CLASSES] {
    let mut likely = [0.0; CLASSES];
    for (score, row) in likely.iter_mut().zip(weights.chunks_exact(PIXELS + 1)) {
        *score = (row[PIXELS] + row.iter().zip(pixels).map(|(w, x)| w * x).sum::<f32>()).exp();
    }
    let sum: f32 = likely.iter().sum();
    likely.map(|score| score / sum)
}

/// The gradient of the cross-entropy, summed over these digits.
fn gradient(weights: &[f32], digits: &[Digit]) -> Vec<f32> {
    let mut gradient = vec![0.0; weights.len()];
    for (pixels, label) in digits {
        let likely = classify(weights, pixels);
        for (class, row) in gradient.chunks_exact_mut(PIXELS + 1).enumerate() {
            let error = likely[class] - f32::from(u8::from(class == *label));
            row.iter_mut().zip(pixels.iter().chain([&1.0])).for_each(|(g, x)| *g += error * x);
        }
    }
    gradient
}

/// The share of these digits that the model reads right.
fn accuracy(weights: &[f32], digits: &[Digit]) -> f32 {
    let is_right = |(pixels, label): &&Digit| {
        let likely = classify(weights, pixels);
        likely.iter().all(|other| *other <= likely[*label])
    };
    digits.iter().filter(is_right).count() as f32 / digits.len() as f32
}

/// The survivors go on from the weights and the step of their first rank; the others may be a step behind that rank or ahead.
async fn survive(mut comm: Comm, weights: &mut Vec<f32>, step: &mut usize) -> Result<Comm> {
    loop {
        let (smaller, verdict) = comm.shrink().await?;
        comm = smaller;
        if comm.rank() == 0 {
            println!("step {step}: {} ranks go on without {:?}", comm.size(), verdict.lost);
        }
        // A copy is sent: if another rank is lost meanwhile, the copy may come back with neither the old values nor the new.
        let state = ([weights.clone()], [vec![*step as u64]]);
        if let Ok(([new], [at])) = comm.broadcast_list(state, 0).await {
            (*weights, *step) = (new, at[0] as usize);
            return Ok(comm);
        }
    }
}

async fn train(mut comm: Comm, epochs: usize, leaves_at: Option<usize>) -> Result<()> {
    let (digits, test) = digits();
    let (mut weights, mut step) = (vec![0.0; CLASSES * (PIXELS + 1)], 0);
    let batches = digits.len() / BATCH;
    while step < epochs * batches {
        if leaves_at == Some(step) {
            return Ok(());
        }
        let batch = &digits[step % batches * BATCH..][..BATCH];
        let (rank, size) = (comm.rank(), comm.size());
        let mine = &batch[rank * BATCH / size..(rank + 1) * BATCH / size];
        match comm.all_reduce(gradient(&weights, mine)).await {
            Ok(sum) => {
                weights.iter_mut().zip(&sum).for_each(|(w, g)| *w -= 0.5 * g / BATCH as f32);
                step += 1;
            }
            Err(Failed { .. }) => comm = survive(comm, &mut weights, &mut step).await?,
        }
        if rank == 0 && step % (10 * batches) == 0 {
            println!("epoch {}: {:.1} % right", step / batches, 100.0 * accuracy(&weights, &test));
        }
    }
    let (rank, size) = (comm.rank(), comm.size());
    println!("rank {rank} of {size}: {:.1} % right at the end", 100.0 * accuracy(&weights, &test));
    comm.close().await?;
    Ok(())
}

fn main() -> Result<()> {
    let epochs = std::env::args().nth(1).map_or(Ok(150), |epochs| epochs.parse())?;
    // Under a launcher this process is one rank; without one, all eight ranks are threads of this process.
    let comm = block_on(Comm::connect(Rendezvous::from_env_or_alone()?))?;
    if comm.size() > 1 {
        return block_on(train(comm, epochs, None));
    }
    let leaves = [Some(900), None, Some(400), None, Some(401), Some(700), None, Some(1300)];
    let spawn = |(comm, leaves_at)| thread::spawn(move || block_on(train(comm, epochs, leaves_at)));
    let threads: Vec<_> = Comm::local(8)?.into_iter().zip(leaves).map(spawn).collect();
    for thread in threads {
        thread.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}
