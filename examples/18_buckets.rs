//! Gradient buckets: communication behind the backward pass.
//!
//! Teaches: a training loop pushes each gradient to [`Buckets`](allstream::train::Buckets) as the backward pass makes it, and has the mean
//! of all ranks at the end; [`report`](allstream::train::Buckets::report) says how much of the communication the loop waited for.
//! [docs/training.md](../docs/training.md) goes on from here.
//!
//! `allstream run -n 2 -- target/release/examples/18_buckets` (with `compress`, gradients travel in 16 bits). Run by itself, it is one rank.

use allstream::train::{Buckets, Options, Param};
use allstream::{Comm, DType, Rendezvous};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const LAYERS: usize = 8;
const WIDTH: usize = 512;
const BATCH: usize = 16;
const STEPS: usize = 30;

/// `out += a * b`, of `rows x inner` and `inner x columns` numbers.
fn multiply(a: &[f32], b: &[f32], out: &mut [f32], inner: usize, columns: usize) {
    for (row, out) in a.chunks(inner).zip(out.chunks_mut(columns)) {
        for (a, b) in row.iter().zip(b.chunks(columns)) {
            out.iter_mut().zip(b).for_each(|(out, b)| *out += a * b);
        }
    }
}

fn transposed(a: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| a.iter().skip(column).step_by(columns).copied()).collect()
}

/// A pseudorandom number from -0.5 to 0.5.
fn noise(seed: usize, i: usize) -> f32 {
    let mut bits = (seed << 20 | i) as u32;
    for _ in 0..2 {
        bits = (bits ^ bits >> 15).wrapping_mul(0x2c1b_3c6d);
    }
    (bits >> 8) as f32 / (1 << 24) as f32 - 0.5
}

/// The input, then the activations of each layer.
fn forward(weights: &[Vec<f32>], input: Vec<f32>) -> Vec<Vec<f32>> {
    let mut all = vec![input];
    for weights in weights {
        let mut out = vec![0.0; BATCH * WIDTH];
        multiply(&all[all.len() - 1], weights, &mut out, WIDTH, WIDTH);
        out.iter_mut().for_each(|x| *x = x.tanh());
        all.push(out);
    }
    all
}

async fn train(comm: Comm, options: Options) -> Result<()> {
    let (rank, shared) = (comm.rank(), comm.share());
    // All ranks begin with the same weights. Each has a batch of its own, and the network learns to map it to zero.
    let mut weights: Vec<Vec<f32>> =
        (0..LAYERS).map(|k| (0..WIDTH * WIDTH).map(|i| noise(k, i) * 0.15).collect()).collect();
    let input: Vec<f32> = (0..BATCH * WIDTH).map(|i| noise(100 + rank, i)).collect();

    let loss =
        |weights: &[Vec<f32>]| forward(weights, input.clone())[LAYERS].iter().map(|y| y * y).sum::<f32>();
    let before = loss(&weights);
    let mut buckets = Buckets::with(&shared, &[Param::of::<f32>(WIDTH * WIDTH); LAYERS], options).await?;
    for _ in 0..STEPS {
        let all = forward(&weights, input.clone());
        let mut delta: Vec<f32> = all[LAYERS].clone();
        for layer in (0..LAYERS).rev() {
            delta.iter_mut().zip(&all[layer + 1]).for_each(|(d, y)| *d *= 1.0 - y * y);
            let mut grad = vec![0.0; WIDTH * WIDTH];
            multiply(&transposed(&all[layer], WIDTH), &delta, &mut grad, BATCH, WIDTH);
            buckets.push(layer, grad)?; // on its way while the gradient of the layer before is computed
            let mut next = vec![0.0; BATCH * WIDTH];
            multiply(&delta, &transposed(&weights[layer], WIDTH), &mut next, WIDTH, WIDTH);
            delta = next;
        }
        for (weights, grad) in weights.iter_mut().zip(buckets.finish().await?) {
            weights.iter_mut().zip(&grad).for_each(|(w, g)| *w -= 0.003 * g);
        }
    }
    println!("rank {rank}: loss {before:.2} before, {:.2} after {STEPS} steps", loss(&weights));
    if let (0, Some(report)) = (rank, buckets.report()) {
        print!("{report}");
    }
    if std::env::args().any(|argument| argument == "record") {
        println!("{}", shared.record()?.display());
    }
    buckets.close().await?;
    drop(shared);
    comm.close().await?;
    Ok(())
}

fn main() -> Result<()> {
    let options = Options::default().first_bucket_bytes(1).bucket_bytes(1); // a bucket for each layer
    let compress = std::env::args().any(|argument| argument == "compress");
    let options = if compress { options.compress(DType::BF16) } else { options };
    block_on(async { train(Comm::connect(Rendezvous::from_env_or_alone()?).await?, options).await })
}
