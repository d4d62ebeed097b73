//! Conformance on one CUDA device: every collective on device buffers by 1, 2, 4 and 8 ranks that share it, as threads
//! of one process and as processes, against the oracle of `tests/conformance/calls.rs`. And messages. Ranks are bound to the
//! device; once they are not, so that the host stages everything.
//!
//! By default on the driver for tests (`tests/cuda-driver`), which interprets kernels: sizes are small.
//! `ALLSTREAM_TEST_DRIVER=real` takes the driver that the machine has, with sizes up to some megabytes;
//! `ALLSTREAM_TEST_DRIVER=rehearsal` takes it likewise, with the small sizes. `cargo xtask gpu-pack` packs this program.

mod choice;
mod driver;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use allstream::Comm;
use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, Transfer};
use allstream::train::{Buckets, Param};
use futures::executor::block_on;

use cases::{Case, OnDevice, Oracle, Seen, agree};
use test_support as support;
use test_support::{cases, values};

use choice::Bound;
use driver::Driver;

/// For all cases of one world.
const WORLD: Duration = Duration::from_secs(120);
const LARGE_WORLD: Duration = Duration::from_secs(400);

/// A rank's place on the device: its buffers are in the order of this stream, beside the one of its collectives.
fn place(comm: &mut Comm, bound: Bound, threads: bool) -> Result<OnDevice, String> {
    let device = Device::new(0).map_err(|error| error.to_string())?;
    if bound == Bound::Yes {
        let path = block_on(comm.bind_device(&device)).map_err(|error| error.to_string())?;
        if threads && path != DevicePath::Peer {
            return Err(format!("threads on one device are {path:?}"));
        }
    }
    DeviceStream::new(&device).map(OnDevice).map_err(|error| error.to_string())
}

fn limit() -> Duration {
    if Driver::chosen().large() { LARGE_WORLD } else { WORLD }
}

/// Runs all cases on one rank; stops at the first that fails.
fn run_all(
    comm: &mut Comm,
    place: &OnDevice,
    cases: &[Case],
    oracle: &Oracle,
    at: &AtomicUsize,
) -> Result<Vec<Seen>, String> {
    let rank = comm.rank();
    let mut seen = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        at.store(i, Ordering::Relaxed);
        let result = cases::run_on_device(comm, case, oracle, i, place);
        seen.push(result.map_err(|error| format!("rank {rank}: case {i}, {case:?}: {error}"))?);
    }
    messages(comm, place).map_err(|error| format!("rank {rank}: messages: {error}"))?;
    buckets(comm, place).map_err(|error| format!("rank {rank}: gradient buckets: {error}"))?;
    Ok(seen)
}

/// Round the ring, at once and one after the other; lengths that go eagerly and that do not.
fn messages(comm: &mut Comm, OnDevice(stream): &OnDevice) -> Result<(), String> {
    fn done<O: Send + 'static, F: Send + 'static>(copy: Transfer<O, F>) -> Result<O, String> {
        copy.wait().map_err(|failed| failed.error.to_string())
    }
    let (n, rank) = (comm.size(), comm.rank());
    if n == 1 {
        return Ok(());
    }
    let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
    let say = |rank: usize, len: usize| (0..len).map(|i| (i * 31 + rank * 7) as u32).collect::<Vec<_>>();
    let lens: &[usize] =
        if Driver::chosen().large() { &[0, 1, 999, 1 << 20, 3_000_001] } else { &[0, 1, 999, 40_001] };
    for len in lens.iter().copied() {
        let buf = done(DeviceBuf::from_host(stream, say(rank, len)))?.1;
        let room = DeviceBuf::zeroed(stream, len).map_err(|error| error.to_string())?;
        let both = comm.timeout(choice::CALL).send_recv(buf, to, room, from);
        let (sent, got) = block_on(both).map_err(|failed| failed.error.to_string())?;
        // What was sent goes on as it is, what came goes back.
        for (buf, whose) in [(sent, rank), (got, from)] {
            let found = done(buf.to_host(vec![0; len]))?.1;
            if found != say(whose, len) {
                return Err(format!("{len} elements: not what rank {whose} has sent"));
            }
        }
    }
    Ok(())
}

/// Steps of gradients, of which small ones are packed by a kernel: waited for by the host, then by the stream.
fn buckets(comm: &mut Comm, OnDevice(stream): &OnDevice) -> Result<(), String> {
    const LENS: [usize; 7] = [3, 1001, 0, 500, 20_000, 1, 4096];
    let layout = LENS.map(|len| Param::of::<f32>(len).on_device());
    let (n, rank) = (comm.size(), comm.rank());
    let said = |error: &dyn std::fmt::Display| error.to_string();
    // Whole numbers, whose mean is one, too.
    let value = |rank: usize, k: usize| (k % 100 + rank * 2) as f32 - (n - 1) as f32;
    let mut buckets = block_on(Buckets::new(&comm.share(), &layout)).map_err(|error| said(&error))?;
    for step in 0..4 {
        for (i, len) in LENS.into_iter().enumerate().rev() {
            let grad = (0..len).map(|k| value(rank, k)).collect::<Vec<f32>>();
            let grad = DeviceBuf::from_host(stream, grad).wait().map_err(|failed| said(&failed.error))?.1;
            buckets.push(i, grad).map_err(|failed| said(&failed.error))?;
        }
        let back: Vec<DeviceBuf<f32>> = if step % 2 == 0 {
            block_on(buckets.finish()).map_err(|failed| said(&failed.error))?.collect()
        } else {
            // All ranks have pushed before any of their streams waits: they share the device's hardware queues, so that a stream which
            // waits may hold up another rank's, on which that one's gradients come.
            block_on(comm.barrier()).map_err(|error| said(&error))?;
            let joined = buckets.join(stream).map_err(|failed| said(&failed.error))?;
            joined.in_order().map_err(|failed| said(&failed.error))?
        };
        for (i, grad) in back.into_iter().enumerate() {
            let found = grad.to_host(vec![0.0; LENS[i]]).wait().map_err(|failed| said(&failed.error))?.1;
            if let Some(k) = (0..LENS[i]).find(|k| found[*k] != (k % 100) as f32) {
                return Err(format!("step {step}, gradient {i}[{k}] is {}, expected {}", found[k], k % 100));
            }
        }
    }
    block_on(buckets.close()).map_err(|error| said(&error))
}

/// What the ranks saw must agree, case by case.
fn conclude(cases: &[Case], seen: Vec<Result<Vec<Seen>, String>>) {
    let failed: Vec<&str> = seen.iter().filter_map(|seen| seen.as_ref().err().map(String::as_str)).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let seen: Vec<Vec<Seen>> = seen.into_iter().flatten().collect();
    for (i, case) in cases.iter().enumerate() {
        let of_case: Vec<Seen> = seen.iter().map(|seen| seen[i]).collect();
        agree(&of_case).unwrap_or_else(|error| panic!("case {i}, {case:?}: {error}"));
    }
}

/// In this process: `n` ranks as threads.
fn be_threads(n: usize, bound: Bound) {
    let cases = Arc::new(choice::cases(n, &Driver::chosen(), bound));
    let at: Arc<Vec<AtomicUsize>> = Arc::new((0..n).map(|_| AtomicUsize::new(0)).collect());
    let oracle = Arc::new(Oracle::new(cases.len(), n));
    let (shared, progress) = (cases.clone(), at.clone());
    let comms = Comm::local(n).unwrap();
    let seen = support::on_threads(comms, limit(), move |rank, mut comm| {
        let place = place(&mut comm, bound, true)?;
        let seen = run_all(&mut comm, &place, &shared, &oracle, &progress[rank])?;
        support::close(comm)?;
        Ok(seen)
    });
    let at = || at.iter().map(|at| at.load(Ordering::Relaxed)).collect::<Vec<_>>();
    let seen = seen.into_iter().map(|seen: Result<Result<_, String>, String>| {
        seen.unwrap_or_else(|error| Err(format!("{error}; the ranks were at cases {:?}", at())))
    });
    conclude(&cases, seen.collect());
}

/// In this process: one rank of several.
fn be_rank() {
    let mut comm = support::join();
    let cases = choice::cases(comm.size(), &Driver::chosen(), Bound::Yes);
    let seen = place(&mut comm, Bound::Yes, false).and_then(|place| {
        run_all(&mut comm, &place, &cases, &Oracle::new(cases.len(), 1), &AtomicUsize::new(0))
    });
    let seen = seen.unwrap_or_else(|error| panic!("{error}"));
    support::close(comm).unwrap();
    // (libtest has begun a line.)
    println!();
    for seen in seen {
        match seen {
            Seen::Hash(hash) => println!("@ hash {hash}"),
            Seen::Stay(enter, leave) => println!("@ stay {enter} {leave}"),
            Seen::Nothing => println!("@ nothing"),
        }
    }
}

fn read(line: &str) -> Option<Seen> {
    let mut words = line.strip_prefix("@ ")?.split(' ');
    let number = |words: &mut std::str::Split<'_, char>| words.next()?.parse().ok();
    match words.next()? {
        "hash" => Some(Seen::Hash(number(&mut words)?)),
        "stay" => Some(Seen::Stay(number(&mut words)?, number(&mut words)?)),
        _ => Some(Seen::Nothing),
    }
}

/// A driver is chosen once for a process: ranks are in others than this one, which are this same program.
fn in_others(name: &str, processes: usize) -> Vec<support::Ended> {
    let envs = Driver::chosen().variables();
    let ranks = support::spawn_ranks(name, processes, limit(), |_| envs.clone());
    let ended = ranks.wait(limit() + Duration::from_secs(5));
    for rank in &ended {
        let Some(status) = rank.status else { panic!("{name} was not done in time:\n{}", rank.stderr) };
        assert!(rank.success(), "{name}, process {}: {status}\n{}{}", rank.rank, rank.stdout, rank.stderr);
    }
    ended
}

fn threads(name: &str, n: usize) {
    if support::role() {
        return be_threads(n, Bound::Yes);
    }
    in_others(name, 1);
}

fn staged(name: &str, n: usize) {
    if support::role() {
        return be_threads(n, Bound::No);
    }
    in_others(name, 1);
}

fn processes(name: &str, n: usize) {
    if support::role() {
        return be_rank();
    }
    let cases = choice::cases(n, &Driver::chosen(), Bound::Yes);
    let seen = in_others(name, n).into_iter().map(|rank| {
        let seen: Vec<Seen> = rank.stdout.lines().filter_map(read).collect();
        if seen.len() == cases.len() {
            Ok(seen)
        } else {
            Err(format!("rank {}: {} results of {}", rank.rank, seen.len(), cases.len()))
        }
    });
    conclude(&cases, seen.collect());
}

macro_rules! worlds {
    ($($name:ident: $how:ident $n:literal;)*) => {$(
        #[test]
        fn $name() {
            $how(stringify!($name), $n);
        }
    )*};
}

worlds! {
    one_thread: threads 1;
    two_threads: threads 2;
    four_threads: threads 4;
    eight_threads: threads 8;
    three_threads_staged: staged 3;
    one_process: processes 1;
    two_processes: processes 2;
    four_processes: processes 4;
    eight_processes: processes 8;
}

/// A short run, for tools that make everything slow: two ranks, threads of this very process.
#[test]
#[ignore = "for tools that watch one process: run with the driver in ALLSTREAM_CUDA_LIBRARY, or where there is one"]
fn short() {
    let cases: Vec<Case> = choice::cases(2, &Driver::Rehearsal, Bound::Yes).into_iter().step_by(7).collect();
    let oracle = Arc::new(Oracle::new(cases.len(), 2));
    let shared = Arc::new(cases.clone());
    let seen = support::on_threads(Comm::local(2).unwrap(), 3 * WORLD, move |_, mut comm| {
        let place = place(&mut comm, Bound::Yes, true)?;
        let seen = run_all(&mut comm, &place, &shared, &oracle, &AtomicUsize::new(0))?;
        support::close(comm)?;
        Ok(seen)
    });
    conclude(&cases, seen.into_iter().map(|seen| seen.and_then(|seen| seen)).collect());
}
