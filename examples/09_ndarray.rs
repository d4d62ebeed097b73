//! An array library's memory in collectives, without a copy.
//!
//! Teaches: with the feature `ndarray` an owned array is a buffer, and comes back with its shape. Here: a matrix that is all-reduced in
//! place; a matrix whose elements are not in standard order in memory, which is refused before anything is sent, and given back; and
//! a matrix cut into blocks of rows that are in flight independently.
//!
//! `cargo run --release --example 09_ndarray --features ndarray`

use std::thread;

use allstream::{Comm, ReduceOp, View, split};
use ndarray::{Array2, arr2, array};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The gradient of the mean squared error of the model `y = X w`, over this rank's rows of data.
fn gradient(x: &Array2<f32>, y: &Array2<f32>, w: &Array2<f32>) -> Array2<f32> {
    x.t().dot(&(x.dot(w) - y)) * (2.0 / x.nrows() as f32)
}

/// Gradient descent; each rank has some rows of the data.
fn fit(comm: &mut Comm) -> Result<Array2<f32>> {
    let truth = array![[1.0], [-2.0], [0.5]];
    // Rows that differ from rank to rank, and together determine the weights.
    let x = Array2::from_shape_fn((4, 3), |(row, column)| {
        ((row * 5 + column * 3 + comm.rank() * 7) % 11) as f32 / 11.0 - 0.5
    });
    let y = x.dot(&truth);
    let mut w = Array2::zeros((3, 1));
    for _ in 0..2000 {
        let mean = comm.op(ReduceOp::Avg).all_reduce(gradient(&x, &y, &w)).wait()?;
        w.scaled_add(-0.5, &mean);
    }
    Ok(w)
}

/// A transposed matrix is the same memory read in another order, which all_reduce refuses. A copy in standard order is summed instead.
fn transposed(comm: &mut Comm) -> Result<Array2<f32>> {
    let matrix = arr2(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).reversed_axes();
    let Err(refused) = comm.all_reduce(matrix).wait() else { return Err("it was not refused".into()) };
    let matrix = refused.buf.ok_or("it did not come back")?;
    Ok(comm.all_reduce(matrix.as_standard_layout().into_owned()).wait()?)
}

/// Each block of rows is in flight by itself. The blocks are views of one matrix, which is joined when all have come back.
fn rows(comm: &mut Comm) -> Result<Array2<f32>> {
    let (rows, columns) = (1000, 64);
    let matrix = Array2::from_shape_fn((rows, columns), |(row, _)| row as f32);
    let blocks = split(matrix, &[100 * columns, 700 * columns, 200 * columns])?;
    let works: Vec<_> = blocks.into_iter().map(|block| comm.all_reduce(block)).collect();
    let blocks = works.into_iter().map(|work| work.wait()).collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(View::join(blocks)?)
}

fn rank(mut comm: Comm) -> Result<String> {
    let (weights, transposed, rows) = (fit(&mut comm)?, transposed(&mut comm)?, rows(&mut comm)?);
    Ok(format!(
        "rank {}: weights {:.3}, summed transpose {:?}, last row's sum {}",
        comm.rank(),
        weights.t(),
        transposed.shape(),
        rows.row(999).sum()
    ))
}

fn main() -> Result<()> {
    let threads: Vec<_> = Comm::local(3)?.into_iter().map(|comm| thread::spawn(|| rank(comm))).collect();
    for thread in threads {
        println!("{}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
