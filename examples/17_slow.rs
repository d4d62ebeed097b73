//! What slowness looks like from outside.
//!
//! Teaches: a step takes too long because of a late rank or a slow network; [`record`](allstream::Comm::record), called on each rank, writes
//! what that rank did last, and `allstream trace --times` tells a late rank from a slow network ([docs/slow.md](../docs/slow.md)).
//!
//! In `allstream run -n 4 -- target/release/examples/17_slow late` one rank computes longer than the others; without `late` none does.

use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, Rendezvous};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const STEPS: u32 = 300;

async fn steps(mut comm: Comm, has_late: bool) -> Result<()> {
    let is_late = has_late && comm.rank() == comm.size() / 2;
    let computing = Duration::from_millis(if is_late { 9 } else { 5 });
    let mut gradients = vec![1.0_f32; 1 << 18];
    let begun = Instant::now();
    for _ in 0..STEPS {
        thread::sleep(computing);
        gradients = comm.all_reduce(gradients).await?;
        gradients.fill(1.0);
    }
    if comm.rank() == 0 {
        println!("a step takes {:.1?}, of which computing is {computing:?}", begun.elapsed() / STEPS);
    }
    println!("{}", comm.record()?.display());
    comm.close().await?;
    Ok(())
}

fn main() -> Result<()> {
    let has_late = std::env::args().any(|argument| argument == "late");
    block_on(async { steps(Comm::connect(Rendezvous::from_env_or_alone()?).await?, has_late).await })
}
