//! cudarc's memory, which candle and burn have theirs from, in collectives on one device: two ranks, threads of this process.

use std::time::Duration;

use allstream::Comm;
use allstream::cuda::{CudarcBuf, Device, DevicePath};
use cudarc::driver::{CudaContext, CudaSlice};
use futures::executor::block_on;

use crate::{ranks, support};

const LENS: [usize; 4] = [1, 1001, 65_536, 3_000_001];
const LIMIT: Duration = Duration::from_secs(40);

#[test]
#[ignore = "cudarc takes the driver from the loader's path: for a machine with a GPU"]
fn memory() {
    let ended = support::on_threads(Comm::local(2).unwrap(), LIMIT, rank_of_two);
    ranks::settle();
    for ended in ended {
        ended.unwrap().unwrap();
    }
}

fn rank_of_two(rank: usize, mut comm: Comm) -> Result<(), String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let device = Device::new(0).map_err(|error| said(&error))?;
    let path = block_on(comm.bind_device(&device)).map_err(|error| said(&error))?;
    if path != DevicePath::Peer {
        return Err(format!("cudarc's memory on one device goes {path:?}, expected by kernels there"));
    }
    let context = CudaContext::new(0).map_err(|error| said(&error))?;
    for stream in [context.default_stream(), context.new_stream().map_err(|error| said(&error))?] {
        for len in LENS {
            let values: Vec<f32> = (0..len).map(|i| (i % 100 + rank) as f32).collect();
            let slice = stream.clone_htod(&values).map_err(|error| said(&error))?;
            let mut buf = CudarcBuf::new(slice).map_err(|failed| said(&failed.error))?;
            for _ in 0..3 {
                buf = block_on(comm.all_reduce(buf)).map_err(|failed| said(&failed.error))?;
            }
            let slice: CudaSlice<f32> = buf.into_inner();
            let found = stream.clone_dtoh(&slice).map_err(|error| said(&error))?;
            // The first sum is of different values, the others of equal ones.
            let wrong = (0..len).find(|i| found[*i] != (2 * (i % 100) + 1) as f32 * 4.0);
            if let Some(i) = wrong {
                return Err(format!(
                    "element {i} of {len} is {}, expected {}",
                    found[i],
                    (2 * (i % 100) + 1) * 4
                ));
            }
        }
    }
    support::close(comm)
}
