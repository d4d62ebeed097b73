//! Communicators bound to devices: collectives that run there.

use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Algo, Comm, Error};

use crate::collectives::everything;
use crate::support::{
    calls, child, child_within, fail, full, nothing_goes_through_the_host, nothing_left, ranks, report, soon,
};

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

#[test]
fn devices_get_what_hosts_get() {
    child("devices::devices_get_what_hosts_get", SLOW, || {
        ranks(3, |mut comm| {
            // Two devices: one has two ranks.
            let device = Device::new(comm.rank() % 2).unwrap();
            // A shared handle can be bound as well as the communicator.
            let path = match comm.rank() {
                0 => soon(comm.share().bind_device(&device)),
                _ => soon(comm.bind_device(&device)),
            };
            assert_eq!(path.unwrap(), DevicePath::Peer);
            let stream = &DeviceStream::new(&device).unwrap();
            everything(&mut comm, stream, &[0, 1, 1000, 5000]);
            nothing_goes_through_the_host(&mut comm, stream);
            soon(comm.close()).unwrap();
        });
        assert!(calls("cuLaunchKernel") > 100, "kernels do the work: {}", calls("cuLaunchKernel"));
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Driver functions that [`program`] calls to bind, to copy and to reduce. Left out: those that wait for words in memory or write
/// them, and those that give something back (`faults.rs` tests the latter).
const CALLED: [&str; 19] = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuDeviceCanAccessPeer",
    "cuCtxEnablePeerAccess",
    "cuStreamIsCapturing",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuLaunchHostFunc",
    "cuMemAlloc_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
];

/// A program on two devices. All ranks end soon after one has failed: nobody waits for a deadline.
fn program() -> Result<(), Error> {
    fn run(comm: &mut Comm) -> Result<(), Error> {
        let device = Device::new(comm.rank())?;
        assert_eq!(soon(comm.bind_device(&device))?, DevicePath::Peer);
        let stream = DeviceStream::new(&device)?;
        let mut buf = soon(DeviceBuf::from_host(&stream, vec![1f32; 1000]))?.1;
        for algo in [Algo::Ring, Algo::RecursiveDoubling] {
            let work = comm.timeout(Duration::from_secs(8)).algo(algo).scale(0.5).all_reduce(buf);
            buf = soon(work).map_err(|failed| failed.error)?;
        }
        let (_, host) = soon(buf.to_host(vec![0f32; 1000]))?;
        assert!(host == [1.0; 1000], "rank {}: {:?}", comm.rank(), &host[..4]);
        Ok(())
    }
    let results = ranks(2, |mut comm| -> Result<(), Error> {
        let result = run(&mut comm);
        match &result {
            Ok(()) => soon(comm.close())?,
            // A rank that gives up aborts, so that the other one ends, too.
            Err(_) => comm.abort("a rank gave up"),
        }
        result
    });
    results.into_iter().collect()
}

/// Calls of each function in `CALLED`, spread over the program, fail one at a time: there may be an error, but no hang, and nothing is lost or
/// leaked.
#[test]
fn every_call_of_a_bound_communicator_fails_in_turn() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    let limit = Duration::from_secs(if full() { 600 } else { 120 });
    child_within("devices::every_call_of_a_bound_communicator_fails_in_turn", &variables, limit, || {
        for name in CALLED {
            let before = calls(name);
            program().unwrap();
            nothing_left("nothing fails");
            let (times, start) = (calls(name) - before, Instant::now());
            let (mut told, mut tried) = (0, 0);
            // All of the calls, or 24 (96 in a full run) at most, which are spread out.
            let step = times.div_ceil(if full() { 96 } else { 24 }).max(1);
            for nth in (1..=times).step_by(step as usize) {
                fail(Some(name), nth, 999);
                let result = program();
                fail(None, 0, 0);
                let what = format!("call {nth} of {times} of {name} failed, {result:?}");
                assert!(!matches!(result, Err(Error::Timeout { .. })), "it is told at once: {what}");
                nothing_left(&what);
                (told, tried) = (told + u32::from(result.is_err()), tried + 1);
            }
            println!("{name}: {tried} of {times}, {told} told, {:.1?}", start.elapsed());
            assert!(times > 0, "{name} is not called");
        }
    });
}
