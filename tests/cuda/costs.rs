//! What operations on devices cost the host: how often the driver is called, and how soon an end is noticed.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, LazyLock};
use std::time::{Duration, Instant};

use allstream::Comm;
use allstream::cuda::{Device, DevicePath, DeviceStream, settle};
use futures::future::try_join_all;

use crate::support::{
    DEADLINE, all_calls, bound, calls, child, down, function, in_context, ranks, soon, until, up,
};

/// How often a rank calls each driver function for one in-place all_reduce of 4 KB, on average, in the steady state. Calls that enter and
/// leave a context count, too. The operations are awaited one by one, and all ranks begin each of them together.
fn calls_of_an_operation(n: usize, devices: usize) -> Vec<(String, f64)> {
    const OPERATIONS: u64 = 200;
    let all = Barrier::new(n);
    let mut counts = ranks(n, |mut comm| {
        let stream = bound(&mut comm, devices);
        let mut buf = up(&stream, vec![0f32; 1024]);
        let mut before = Vec::new();
        for i in 0..OPERATIONS + 50 {
            if i == 50 {
                all.wait();
                before = all_calls();
            }
            all.wait();
            buf = soon(comm.all_reduce(buf)).unwrap();
        }
        all.wait();
        let after = all_calls();
        all.wait();
        assert!(down(buf).iter().all(|x| *x == 0.0));
        soon(comm.close()).unwrap();
        let each = |count: u64| count as f64 / (OPERATIONS * n as u64) as f64;
        let both = before.into_iter().zip(after);
        let both = both.filter(|(before, after)| before.1 < after.1);
        both.map(|(before, after)| (before.0, each(after.1 - before.1))).collect::<Vec<_>>()
    });
    counts.swap_remove(0)
}

/// The driver calls are most of what a small operation costs. Where ranks share a device, the last one to call launches for all: each rank makes
/// four driver calls at its call, and the last one makes five more. Otherwise each rank makes nine.
#[test]
fn a_small_operation_makes_few_calls() {
    let two = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("costs::a_small_operation_makes_few_calls", two, || {
        for (n, devices) in [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2)] {
            let calls = calls_of_an_operation(n, devices);
            let all: f64 = calls.iter().map(|(_, count)| count * n as f64).sum();
            let most = if devices == 1 { 4 * n + 5 } else { 9 * n };
            eprintln!("{n} ranks on {devices} devices: {all:.2} calls of all ranks: a rank's {calls:.3?}");
            // (The margin is for busy machines: an operation may take so long that the engine asks the driver whether a stream has failed.)
            assert!(
                all < most as f64 + 0.5 * n as f64,
                "{all} calls of the driver, with {n} ranks on {devices} devices: {calls:.3?}"
            );
            let launches =
                calls.iter().find(|(name, _)| name == "cuLaunchKernel").map(|(_, count)| count * n as f64);
            let expected = if devices == 1 { 1 } else { n } as f64;
            assert!(
                launches.is_some_and(|launches| (launches - expected).abs() < 0.01),
                "launches of an operation, with {n} ranks on {devices} devices: {launches:?}"
            );
        }
    });
}

/// The time at which this was first asked for.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
/// Microseconds from [`BEGAN`] to the last end of a collective on any rank's stream.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// Keeps a stream busy for 5 ms.
unsafe extern "C" fn takes_long(_: *mut c_void) {
    std::thread::sleep(Duration::from_millis(5));
}

/// Notes the time at which a stream has come to this call.
unsafe extern "C" fn ends(_: *mut c_void) {
    ENDED.fetch_max(BEGAN.elapsed().as_micros() as u64, Ordering::SeqCst);
}

/// Has a stream of device 0 call a function on the host.
fn put(stream: &DeviceStream, call: unsafe extern "C" fn(*mut c_void)) {
    let address = function("cuLaunchHostFunc");
    // SAFETY: cuda.h declares the function with this type; the stream exists; `call` ignores its argument, and calls no driver.
    unsafe {
        type Call = unsafe extern "C" fn(*mut c_void);
        let launch: unsafe extern "C" fn(*mut c_void, Call, *mut c_void) -> u32 =
            std::mem::transmute(address);
        in_context(0, || assert_eq!(launch(stream.as_raw(), call, std::ptr::null_mut()), 0));
    }
}

/// The driver functions that ask whether something has ended, or have the driver call when it has.
const ASKED: [&str; 2] = ["cuEventQuery", "cuLaunchHostFunc"];

/// One thread awaits collectives of 8 ranks on one device, each of which takes 5 ms. Returns how late it sees their ends, in microseconds, and
/// how often the functions in [`ASKED`] were called. `aside`: the ranks do not use the buffers' streams; the ends are then not timed, and the
/// delays mean nothing.
fn ends_are_seen_after(aside: bool, operations: usize) -> (Vec<u64>, [u64; 2]) {
    const RANKS: usize = 8;
    let device = Device::new(0).unwrap();
    let streams: Vec<_> = (0..RANKS).map(|_| DeviceStream::new(&device).unwrap()).collect();
    let mut comms = Comm::local(RANKS).unwrap();
    let binds = comms.iter_mut().zip(&streams).map(async |(comm, stream)| match aside {
        true => comm.bind_device(&device).await,
        false => comm.bind_stream(stream).await,
    });
    assert!(soon(try_join_all(binds)).unwrap().iter().all(|path| *path == DevicePath::Peer));
    let mut bufs: Vec<_> = streams.iter().map(|stream| up(stream, vec![0f32; 1024])).collect();
    let (mut late, before) = (Vec::new(), ASKED.map(calls));
    for _ in 0..operations {
        put(&streams[0], takes_long);
        let works: Vec<_> = comms.iter_mut().zip(bufs).map(|(comm, buf)| comm.all_reduce(buf)).collect();
        until("all of it is on the streams", || works.iter().all(|work| work.is_enqueued()));
        if !aside {
            streams.iter().for_each(|stream| put(stream, ends));
        }
        // The time is taken within `soon`, which takes its runtime down before it returns.
        let (all, seen) = soon(async {
            let all = try_join_all(works).await;
            (all, BEGAN.elapsed().as_micros() as u64)
        });
        bufs = all.unwrap();
        late.push(seen.saturating_sub(ENDED.load(Ordering::SeqCst)));
    }
    let after = ASKED.map(calls);
    drop(bufs);
    soon(try_join_all(comms.into_iter().map(Comm::close))).unwrap();
    assert!(settle(DEADLINE), "what is left is asked for until it is over");
    late.sort_unstable();
    (late, [0, 1].map(|i| after[i] - before[i]))
}

/// The driver is neither asked for the ends of collectives nor told to call when they come.
#[test]
fn an_end_is_noticed_without_the_driver() {
    const OPERATIONS: usize = 60;
    child("costs::an_end_is_noticed_without_the_driver", &[], || {
        // Not counted: the first operations also finish what making a communicator has begun.
        ends_are_seen_after(true, 5);
        let (_, [queries, told]) = ends_are_seen_after(true, OPERATIONS);
        assert!(queries < OPERATIONS as u64 / 2, "cuEventQuery was called {queries} times");
        assert_eq!(told, OPERATIONS as u64, "cuLaunchHostFunc, by this test itself");
        let (late, _) = ends_are_seen_after(false, OPERATIONS);
        let at = |percent: usize| late[(late.len() - 1) * percent / 100];
        eprintln!("seen late by (us): median {}, p90 {}, p99 {}", at(50), at(90), at(99));
    });
}
