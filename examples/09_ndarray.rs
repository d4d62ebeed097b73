//! An array library's memory in collectives, without a copy.
//!
//! Teaches: [`HostMemory`] is a trait that any owner of memory can implement, and makes it a `Buf`; its contract is
//! written on it, and an `unsafe impl` says why it holds. Here: a matrix of `ndarray`, all-reduced where it lies; a matrix whose memory is not its
//! elements in order is refused before anything is sent; and a matrix cut into blocks of rows that are in flight
//! independently.
//!
//! `cargo run --release --example 09_ndarray`

use std::thread;

use allstream::{Comm, HostMemory, ReduceOp, View, split};
use ndarray::{Array2, arr2, array};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A matrix that owns its elements, in memory row by row without gaps.
struct Dense(Array2<f32>);

impl Dense {
    /// The matrix back where its memory is not so: transposed, say, or every second column of a larger one.
    fn new(matrix: Array2<f32>) -> std::result::Result<Dense, Array2<f32>> {
        if matrix.is_standard_layout() { Ok(Dense(matrix)) } else { Err(matrix) }
    }
}

// SAFETY: point by point of the contract:
// - Same answer: the elements of an `Array2` are on the heap and stay there when it moves. Nothing but `&mut self` can
//   change its shape, and the field is private to this file, which never does.
// - Valid, initialised, aligned: in standard layout, checked by `new`, the `len()` elements from `as_ptr()` on are the
//   array's own, in one piece; safe code makes arrays of initialised elements only.
// - Unique: an `Array2` is an array with *owned* storage. Views of it borrow it, so none lives when it is moved into an
//   operation. (An `ArcArray` shares its storage, and must not implement `HostMemory`.)
// - It may be dropped on any thread: `Array2<f32>` is `Send`.
unsafe impl HostMemory for Dense {
    type Elem = f32;
    fn ptr(&self) -> *const f32 {
        self.0.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut f32 {
        self.0.as_mut_ptr()
    }
    fn count(&self) -> usize {
        self.0.len()
    }
}

/// `y = X w`: the gradient of the squared error over this rank's rows of data.
fn gradient(x: &Array2<f32>, y: &Array2<f32>, w: &Array2<f32>) -> Array2<f32> {
    x.t().dot(&(x.dot(w) - y)) * (2.0 / x.nrows() as f32)
}

/// Gradient descent, the data spread over the ranks.
fn fit(comm: &mut Comm) -> Result<Array2<f32>> {
    let truth = array![[1.0], [-2.0], [0.5]];
    // Rows that differ from rank to rank, and together determine the weights.
    let x = Array2::from_shape_fn((4, 3), |(row, column)| {
        ((row * 5 + column * 3 + comm.rank() * 7) % 11) as f32 / 11.0 - 0.5
    });
    let y = x.dot(&truth);
    let mut w = Array2::zeros((3, 1));
    for _ in 0..2000 {
        let gradient = Dense::new(gradient(&x, &y, &w)).map_err(|_| "a product is not in standard layout")?;
        let Dense(mean) = comm.op(ReduceOp::Avg).all_reduce(gradient).wait()?;
        w.scaled_add(-0.5, &mean);
    }
    Ok(w)
}

/// A transposed matrix is the same memory read in another order: what the ranks sum must first be in the same one.
fn transposed(comm: &mut Comm) -> Result<Array2<f32>> {
    let matrix = arr2(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).reversed_axes();
    let copied = |matrix: Array2<f32>| Dense::new(matrix.as_standard_layout().into_owned());
    let dense = Dense::new(matrix).or_else(copied).map_err(|_| "a copy is not in standard layout")?;
    Ok(comm.all_reduce(dense).wait()?.0)
}

/// Blocks of rows in flight one by one: views of one matrix, which comes back when all have.
fn rows(comm: &mut Comm) -> Result<Array2<f32>> {
    let (rows, columns) = (1000, 64);
    let matrix = Array2::from_shape_fn((rows, columns), |(row, _)| row as f32);
    let matrix = Dense::new(matrix).map_err(|_| "a new matrix is not in standard layout")?;
    let blocks = split(matrix, &[100 * columns, 700 * columns, 200 * columns])?;
    let works: Vec<_> = blocks.into_iter().map(|block| comm.all_reduce(block)).collect();
    let blocks = works.into_iter().map(|work| work.wait()).collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(View::join(blocks)?.0)
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
