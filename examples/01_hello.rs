//! Four ranks in one process, and one all-reduce.
//!
//! Teaches: [`Comm::local`] gives one communicator for each rank; every rank makes the same calls in the same order;
//! a collective takes its buffer by value and gives it back with the result; `.wait()` blocks, `.await` does not.
//!
//! `cargo run --release --example 01_hello`

use std::thread;

use allstream::{Comm, Error};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What each rank does.
fn rank(mut comm: Comm) -> std::result::Result<String, Error> {
    let mine = vec![comm.rank() as f32 + 1.0; 3];
    let before = format!("{mine:?}");
    // In place: `mine` goes in, and its memory comes out with the sum in it. If the call fails, `?` turns the failure,
    // which also has the buffer, into an `allstream::Error`.
    let sum = comm.all_reduce(mine).wait()?;
    Ok(format!("rank {} of {}: {before} -> {sum:?}", comm.rank(), comm.size()))
}

fn main() -> Result<()> {
    let comms = Comm::local(4)?;
    let threads: Vec<_> = comms.into_iter().map(|comm| thread::spawn(|| rank(comm))).collect();
    for thread in threads {
        println!("{}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
