//! A training loop: data parallelism in thirty lines.
//!
//! Teaches: every rank starts from the same weights (`broadcast`), computes gradients on its own part of the data, and
//! averages them with all others (`all_reduce`) before its step; losses are averaged in the same call; at the end
//! all ranks hold the same bits (`all_gather_bytes` proves it). `allstream demo` does the same with a neural network and real data.
//!
//! `cargo run --release --example 11_train`

use std::thread;

use allstream::{Comm, ReduceOp};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const STEPS: usize = 200;

/// The points of y = 2 x0 - 3 x1 + 0.5 that belong to a rank.
fn data(rank: usize) -> Vec<([f32; 2], f32)> {
    let x = |i: usize, k: usize| ((i * 37 + rank * 101 + k * 61) % 200) as f32 / 100.0 - 1.0;
    (0..256).map(|i| [x(i, 0), x(i, 1)]).map(|x| (x, 2.0 * x[0] - 3.0 * x[1] + 0.5)).collect()
}

async fn rank(mut comm: Comm) -> Result<String> {
    let data = data(comm.rank());
    // Only rank 0's weights are used.
    let mut weights = comm.broadcast(vec![comm.rank() as f32 * 9.0; 3], 0).await?;
    let mut loss = f32::NAN;
    for _ in 0..STEPS {
        let mut gradient = vec![0.0; 3];
        let mut error = 0.0;
        for (x, y) in &data {
            let off = weights[0] * x[0] + weights[1] * x[1] + weights[2] - y;
            error += off * off / data.len() as f32;
            for (g, part) in gradient.iter_mut().zip([x[0], x[1], 1.0]) {
                *g += 2.0 * off * part / data.len() as f32;
            }
        }
        let [gradient, mean] = comm.op(ReduceOp::Avg).all_reduce_list([gradient, vec![error]]).await?;
        weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= 0.3 * g);
        loss = mean[0];
    }
    let bits: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    let all = comm.all_gather_bytes(bits).await?;
    let same = all.iter().all(|b| *b == all[0]);
    let rank = comm.rank();
    comm.close().await?;
    Ok(format!("rank {rank}: weights {weights:.4?}, loss {loss:.1e}, the same bits on all ranks: {same}"))
}

fn main() -> Result<()> {
    let spawn = |comm| thread::spawn(move || block_on(rank(comm)));
    let threads: Vec<_> = Comm::local(4)?.into_iter().map(spawn).collect();
    for thread in threads {
        println!("{}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
