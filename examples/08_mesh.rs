//! Two kinds of parallelism on one mesh of ranks.
//!
//! Teaches: `mesh` gives a world named axes, and a communicator along each. A layer's columns are spread along "tp", where
//! outputs are summed; its gradients are averaged along "dp". A list reduces many buffers, of several types, in one call.
//!
//! `cargo run --release --example 08_mesh`

use std::thread;

use allstream::{Comm, ReduceOp, bf16};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

async fn rank(mut world: Comm) -> Result<String> {
    let me = world.rank();
    // The last axis runs fastest: ranks 0 1 | 2 3 share a row of "tp", 0 2 | 1 3 a column of "dp".
    let mut mesh = world.mesh([("dp", 2), ("tp", 2)]).await?;
    let (dp, tp) = (mesh.coordinate("dp")?, mesh.coordinate("tp")?);

    // Each rank of "tp" holds one column of the layer, and its part of the input.
    let (weight, x) = (tp as f32 + 1.0, if dp == 0 { 1.0 } else { 10.0 });
    let y = mesh.axis("tp")?.all_reduce(vec![weight * x; 2]).await?;

    // The gradients of a whole model: two matrices in bf16 and a vector in f32, in one operation.
    let matrices = vec![vec![bf16::from_f32(x); 4], vec![bf16::ONE; 2]];
    let (matrices, [biases]) =
        mesh.axis("dp")?.op(ReduceOp::Avg).all_reduce_list((matrices, [vec![x; 3]])).await?;

    mesh.close().await?;
    world.close().await?;
    Ok(format!("rank {me} = (dp {dp}, tp {tp}): y = {y:?}; mean gradients {:?}, {biases:?}", matrices[0]))
}

fn main() -> Result<()> {
    let spawn = |comm| thread::spawn(move || block_on(rank(comm)));
    let threads: Vec<_> = Comm::local(4)?.into_iter().map(spawn).collect();
    for thread in threads {
        println!("{}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
