//! Communicators inside a model.
//!
//! Teaches: `split` cuts a group into smaller ones (here four ranks into pairs, for tensor and for data parallelism); a
//! [`SharedComm`] is called through `&self`, so a model can hold it and its methods need no `&mut`; communicators are
//! independent of each other.
//!
//! `cargo run --release --example 07_shared`

use std::thread;

use allstream::{Comm, Error, ReduceOp, SharedComm};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A layer `y = W x`, whose columns are spread over the ranks of one group and which is copied in the other.
struct Layer {
    /// Ranks that hold the other columns.
    columns: SharedComm,
    /// Ranks that hold the same columns, and see other data.
    copies: SharedComm,
    /// `rows x my columns`, row by row.
    weights: Vec<f32>,
    rows: usize,
}

impl Layer {
    /// Takes this rank's part of the input, and returns the whole output, the same on all ranks of `columns`.
    async fn forward(&self, x: &[f32]) -> std::result::Result<Vec<f32>, Error> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum();
        let part: Vec<f32> = self.weights.chunks_exact(x.len()).map(dot).collect();
        debug_assert_eq!(part.len(), self.rows);
        Ok(self.columns.all_reduce(part).await?)
    }

    /// The gradient of this rank's weights, averaged over the copies.
    async fn average(&self, gradient: Vec<f32>) -> std::result::Result<Vec<f32>, Error> {
        Ok(self.copies.op(ReduceOp::Avg).all_reduce(gradient).await?)
    }
}

async fn rank(mut world: Comm) -> Result<String> {
    let me = world.rank();
    // Ranks 0 and 1 hold the columns of one copy, 2 and 3 those of another. Ranks 0 and 2 hold the same column, and so do 1 and 3.
    let columns = world.split((me / 2) as u64, me as i64).await?;
    let copies = world.split((me % 2) as u64, me as i64).await?;
    let names = (columns.name().to_owned(), copies.name().to_owned());

    let rows = 2;
    // Column c of W is all c + 1; each rank holds one column.
    let weights = vec![columns.rank() as f32 + 1.0; rows];
    let layer = Layer { columns: columns.share(), copies: copies.share(), weights, rows };

    // Copy 0 sees x = (1, 1), copy 1 sees x = (10, 10).
    let x = if copies.rank() == 0 { 1.0 } else { 10.0 };
    let y = layer.forward(&[x]).await?;
    let gradient = layer.average(vec![x; rows]).await?;
    Ok(format!("rank {me}: in {} y = {y:?}; in {} mean gradient = {gradient:?}", names.0, names.1))
}

fn main() -> Result<()> {
    let spawn = |comm| thread::spawn(move || block_on(rank(comm)));
    let threads: Vec<_> = Comm::local(4)?.into_iter().map(spawn).collect();
    for thread in threads {
        println!("{}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
