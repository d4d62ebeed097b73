//! Collectives in order with other work, without making the host wait.
//!
//! Teaches: a [`HostStream`] runs jobs in order on a thread of its own; `on(&stream)` starts a collective after what
//! the stream holds; `join(&stream)` makes the stream, not the host, wait for the result; the [`Ordered`] value that
//! comes back is for jobs on that stream, and becomes the host's when it is waited for or awaited.
//!
//! `cargo run --release --example 03_streams`

use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use allstream::{Comm, Failed, HostStream, Ordered};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// One step of a training loop. Rank 0 logs what happens.
fn step(mut comm: Comm, log: Sender<&'static str>) -> Result<f32> {
    let compute = HostStream::new("compute")?;
    let speaks = comm.rank() == 0;
    let say = |what: &'static str| {
        let log = log.clone();
        move || {
            if speaks {
                // The receiver outlives every rank.
                let _ = log.send(what);
            }
        }
    };

    let backward = say("stream: backward is done");
    compute.launch(move || {
        thread::sleep(Duration::from_millis(50));
        backward();
    });

    // Submitted now; starts when `compute` has done what was launched on it above.
    let work = comm.on(&compute).all_reduce(vec![1.0_f32; 1000]);
    say("host:   all-reduce is submitted")();

    // What is launched on `compute` from here on finds the gradients summed.
    let summed: Ordered<Vec<f32>> = work.join(&compute)?;
    let update = say("stream: update, with the summed gradients");
    let weights: Ordered<Vec<f32>, Vec<f32>> = summed.launch(&compute, move |gradients| {
        update();
        gradients.iter().map(|g| 1.0 - 0.1 * g).collect()
    });
    say("host:   free, after queueing the whole step")();

    // The host asks for the result only here.
    match weights.wait() {
        Ok(weights) => {
            say("host:   has the weights")();
            Ok(weights[0])
        }
        Err(Failed { error, .. }) => Err(error.into()),
    }
}

fn main() -> Result<()> {
    let (log, told) = channel();
    let spawn = |comm| {
        let log = log.clone();
        thread::spawn(move || step(comm, log))
    };
    let threads: Vec<_> = Comm::local(2)?.into_iter().map(spawn).collect();
    drop(log);
    for line in told {
        println!("{line}");
    }
    for (rank, thread) in threads.into_iter().enumerate() {
        let weight = thread.join().map_err(|_| "a rank panicked")??;
        println!("rank {rank}: weight {weight}");
    }
    Ok(())
}
