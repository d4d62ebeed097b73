//! Measures how long ranks take to compare their calls before they hand one to NCCL, and how much time a pool of NCCL communicators saves.
//! It uses the NCCL and the CUDA driver for tests, so nothing here is a time of a GPU or of NCCL. Ranks are threads of this process.
//!
//! `cargo bench --bench whole -- [RANKS ...]`

#![allow(missing_docs)]

use std::process::Command;
use std::sync::Barrier;
use std::time::Instant;

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::{Comm, Error};
use futures::executor::block_on;
use test_support::cuda;

const ROUNDS: usize = 1000;
/// Communicators that are made for each row of times.
const MADE: usize = 100;
/// Elements of a buffer: enough for messages of this length to go to NCCL.
const LEN: usize = 2048;

/// Nanoseconds of the monotonic clock, by which the NCCL for tests also tells its times.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// In microseconds: the median, and the 10th and 90th percentiles.
fn shown(mut times: Vec<u64>) -> String {
    times.sort_unstable();
    let at = |part: usize| times[times.len() * part / 10] as f64 / 1e3;
    format!("{:.1} | {:.1} to {:.1}", at(5), at(1), at(9))
}

/// What one rank measures: the name and the times of each row.
type Rows = Vec<(&'static str, Vec<u64>)>;

fn calls(comm: &mut Comm, start: &Barrier, stream: &DeviceStream) -> Result<Rows, Error> {
    let (rank, n) = (comm.rank(), comm.size());
    let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
    let buf = || DeviceBuf::<f32>::zeroed(stream, LEN);
    let (mut all, mut sent, mut got) = (buf()?, buf()?, buf()?);
    let mut rows = [
        ("a barrier, from the call to its end", Vec::new()),
        ("all_reduce, from the call until NCCL is called", Vec::new()),
        ("send_recv round the ring, from the call until NCCL is last called", Vec::new()),
    ];
    for _ in 0..ROUNDS {
        start.wait();
        let begun = now();
        comm.barrier().wait().map_err(|failed| failed.error)?;
        rows[0].1.push(now() - begun);
        start.wait();
        let begun = now();
        all = comm.all_reduce(all).wait().map_err(|failed| failed.error)?;
        rows[1].1.push(cuda::nccl_called(rank) - begun);
        start.wait();
        let begun = now();
        (sent, got) = comm.send_recv(sent, to, got, from).wait().map_err(|failed| failed.error)?;
        rows[2].1.push(cuda::nccl_called(rank) - begun);
    }
    Ok(rows.into())
}

fn pool(comm: &mut Comm, start: &Barrier, device: &Device) -> Result<Rows, Error> {
    let mut rows = [
        ("dup, taken up from the pool", Vec::new()),
        ("bind_nccl of that, a hit: its communicator of NCCL's is taken up, too", Vec::new()),
        ("bind_nccl, a miss: one is made", Vec::new()),
        ("bind_device", Vec::new()),
    ];
    for is_kept in [true, false] {
        comm.set_pool_capacity(if is_kept { 8 } else { 0 });
        for round in 0..=MADE {
            start.wait();
            let begun = Instant::now();
            let mut child = block_on(comm.dup())?;
            let made = begun.elapsed();
            start.wait();
            let begun = Instant::now();
            block_on(child.bind_nccl(device))?;
            let bound = begun.elapsed();
            // The first round does not count: the pool is still empty, so even with a pool it makes a communicator.
            if round > 0 {
                if is_kept {
                    rows[0].1.push(made.as_nanos() as u64);
                }
                rows[if is_kept { 1 } else { 2 }].1.push(bound.as_nanos() as u64);
            }
            block_on(child.close())?;
        }
    }
    for _ in 0..MADE {
        let mut child = block_on(comm.dup())?;
        start.wait();
        let begun = Instant::now();
        block_on(child.bind_device(device))?;
        rows[3].1.push(begun.elapsed().as_nanos() as u64);
        block_on(child.close())?;
    }
    Ok(rows.into())
}

fn one(mut comm: Comm, start: &Barrier) -> Result<Rows, Error> {
    let device = Device::new(comm.rank())?;
    block_on(comm.bind_nccl(&device))?;
    let stream = DeviceStream::new(&device)?;
    let mut rows = calls(&mut comm, start, &stream)?;
    rows.extend(pool(&mut comm, start, &device)?);
    block_on(comm.close())?;
    Ok(rows)
}

fn measure(n: usize) {
    let start = Barrier::new(n);
    let all: Vec<Rows> = std::thread::scope(|scope| {
        let comms = Comm::local(n).expect("a world of threads");
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| one(comm, &start))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic").expect("no error")).collect()
    });
    for (row, (what, _)) in all[0].iter().enumerate() {
        let times = all.iter().flat_map(|rows| rows[row].1.clone()).collect();
        println!("| {n} | {what} | {} |", shown(times));
    }
}

fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    if std::env::var_os(cuda::NCCL).is_some() {
        let ranks: Vec<usize> = arguments.map(|n| n.parse().expect("a number of ranks")).collect();
        let ranks = if ranks.is_empty() { vec![2, 4] } else { ranks };
        println!("| ranks | what | median, us | 10 % to 90 % |\n|---|---|---|---|");
        return ranks.into_iter().for_each(measure);
    }
    // A process chooses its driver and its NCCL only once, from the environment, so a new process is started with these.
    let program = std::env::current_exe().expect("this program has a name");
    let variables = [
        (cuda::LIBRARY, cuda::library().as_os_str()),
        (cuda::NCCL, cuda::nccl_library().as_os_str()),
        ("ALLSTREAM_TEST_CUDA_DEVICES", "8".as_ref()),
        ("ALLSTREAM_TEST_CUDA_DELAY_US", "0".as_ref()),
        ("ALLSTREAM_TEST_NCCL_DELAY_US", "0".as_ref()),
    ];
    let status = Command::new(program).args(arguments).envs(variables).status().expect("it starts");
    std::process::exit(status.code().unwrap_or(1));
}
