//! Ranks that are processes, started by a launcher.
//!
//! Teaches: [`Rendezvous::from_env`] reads what `allstream run`, torchrun, Open MPI or Slurm put into the environment;
//! [`Comm::connect`] returns when all ranks are there; `close` says goodbye, and returns a failure that no call has
//! returned. The same program runs over shared memory or, with `ALLSTREAM_LINK=tcp`, over TCP.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- target/release/examples/02_launch
//! ```

use allstream::{Comm, Error, ReduceOp, Rendezvous};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let rendezvous = match Rendezvous::from_env() {
        Ok(rendezvous) => rendezvous,
        Err(Error::Invalid { problem, .. }) => return Err(format!("not started as a rank: {problem}").into()),
        Err(other) => return Err(other.into()),
    };
    let mut comm = Comm::connect(rendezvous).await?;

    let pids = comm.all_gather_value(std::process::id()).await?;
    println!("process {} is rank {} of {}", pids[comm.rank()], comm.rank(), comm.size());

    let largest = comm.op(ReduceOp::Max).all_reduce_value(std::process::id()).await?;
    if comm.rank() == 0 {
        println!("the maximum over ranks is the largest id: {}", pids.iter().max() == Some(&largest));
    }
    comm.close().await?;
    Ok(())
}
