//! Several ranks on one GPU: how data parallelism is developed and tested with one card.
//!
//! `cargo run --example 12_gpu`: four ranks, tasks of this process, share the devices that there are. Without a GPU it
//! says what is missing, and exits with code 0.

use std::sync::Arc;

use allstream::cuda::{Device, DeviceBuf, DeviceStream, device_count};
use allstream::{Comm, Error, ReduceOp};
use tokio::sync::Barrier;

const RANKS: usize = 4;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let devices = match device_count() {
        Ok(count) => count,
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    if devices == 0 {
        println!("there is no CUDA device here");
        return Ok(());
    }
    let all_have_called = Arc::new(Barrier::new(RANKS));
    let ranks = Comm::local(RANKS)?
        .into_iter()
        .map(|comm| tokio::spawn(rank(comm, devices, all_have_called.clone())));
    for rank in ranks.collect::<Vec<_>>() {
        println!("{}", rank.await??);
    }
    Ok(())
}

/// What one rank does: its "gradients" are made on a stream of its own, and averaged over all ranks.
async fn rank(mut comm: Comm, devices: usize, all_have_called: Arc<Barrier>) -> Result<String, Error> {
    let device = Device::new(comm.rank() % devices)?;
    let stream = DeviceStream::new(&device)?;
    // From here on collectives on device buffers run on the devices. If the devices cannot reach each other, `path` says
    // why on all ranks, and the buffers go through the host's memory.
    let path = comm.bind_device(&device).await?;
    let mine = vec![comm.rank() as f32; 1 << 20];
    let (host, grads) = DeviceBuf::from_host(&stream, mine).await?;
    // The all-reduce starts once the stream has come to this point. The buffer comes back when the device has the result.
    let mut grads = comm.op(ReduceOp::Avg).all_reduce(grads).await?;
    // And again, in the order of the stream: nobody waits for a result in between, and your kernels could go on the stream each time.
    for _ in 0..10 {
        let work = comm.op(ReduceOp::Avg).on(&stream).all_reduce(grads);
        // Ranks of one process that share a device must all have called before any of them joins: see `Work::join`.
        all_have_called.wait().await;
        grads = work.join(&stream)?.in_order()?;
    }
    let (_grads, host) = grads.to_host(host).await?;
    let text = format!("rank {} on {} ({path:?}): the mean is {}", comm.rank(), device.name(), host[0]);
    comm.close().await?;
    Ok(text)
}
