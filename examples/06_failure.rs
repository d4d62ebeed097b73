//! What failures look like.
//!
//! Teaches: if ranks make different calls, or a rank leaves, or a rank does not come, every rank that is concerned gets
//! an error within its deadline; the error names the rank, the operation, what was expected and what was found; the buffer
//! comes back in [`Failed::buf`] (its contents unspecified); the communicator is dead afterwards and says why.
//!
//! A failure also makes each rank write its flight recorder, to `ALLSTREAM_TRACE_DIR` or to `allstream-UID` (the user's
//! number) in the directory for temporary files; `allstream trace DIRECTORY` lays the recorders side by side.
//!
//! `cargo run --release --example 06_failure`

use std::thread;
use std::time::Duration;

use allstream::{Comm, Error, Failed, Work};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Waits for an operation, and says how it ended on this rank.
fn tell(rank: usize, work: Work<Vec<f32>>) -> String {
    match work.wait() {
        Ok(_) => format!("rank {rank}: finished"),
        Err(Failed { buf, error }) => {
            let kind = match &error {
                Error::Mismatch { .. } => "mismatch",
                Error::PeerLost { .. } => "lost",
                Error::Timeout { .. } => "timeout",
                _ => "other",
            };
            let buf = buf.map_or("kept".into(), |b| format!("{} elements back", b.len()));
            format!("rank {rank}: [{kind}] {error} (buffer: {buf})")
        }
    }
}

/// Runs three ranks, and prints what they say in rank order.
fn scene(title: &str, rank: fn(Comm) -> Option<String>) -> Result<()> {
    println!("{title}");
    let threads: Vec<_> = Comm::local(3)?.into_iter().map(|comm| thread::spawn(move || rank(comm))).collect();
    for thread in threads {
        if let Some(said) = thread.join().map_err(|_| "a rank panicked")? {
            println!("  {said}");
        }
    }
    Ok(())
}

/// Rank 1 has one element more than the others.
fn mismatch(mut comm: Comm) -> Option<String> {
    let rank = comm.rank();
    let work = comm.all_reduce(vec![1.0_f32; 1000 + usize::from(rank == 1)]);
    let first = tell(rank, work);
    // Later calls fail at once, with the same cause.
    let later = comm.barrier().wait().is_err() && comm.check().is_err();
    Some(format!("{first}; later calls fail too: {later}"))
}

/// Rank 2 leaves where the others need it.
fn lost(mut comm: Comm) -> Option<String> {
    let rank = comm.rank();
    if rank == 2 {
        return None; // drops the communicator: a goodbye
    }
    let work = comm.all_reduce(vec![1.0_f32; 1000]);
    Some(tell(rank, work))
}

/// Rank 0 is busy elsewhere.
fn late(mut comm: Comm) -> Option<String> {
    let rank = comm.rank();
    if rank == 0 {
        thread::sleep(Duration::from_secs(2));
    }
    let work = comm.timeout(Duration::from_secs(1)).all_reduce(vec![1.0_f32; 1000]);
    Some(tell(rank, work))
}

fn main() -> Result<()> {
    scene("ranks call different things:", mismatch)?;
    scene("a rank leaves:", lost)?;
    scene("a rank does not come:", late)
}
