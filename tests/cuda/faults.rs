//! Driver calls that fail, one at a time: never a panic, a hang or a leak, and an error where there is no other way. Also contexts that break.

use std::future::IntoFuture;
use std::time::Duration;

use allstream::cuda::{Device, DeviceBuf, DeviceStream, ForeignMemory, PinnedBuf};
use allstream::{DType, Error, Failed};

use crate::support::{
    Report, calls, child, device, fail, function, is_child, nothing_left, numbers, pass, report, soon, until,
    up,
};

/// A program that makes all the calls in [`CALLED`].
fn program() -> Result<(), Error> {
    let device = Device::new(0)?;
    let streams = [DeviceStream::new(&device)?, DeviceStream::high_priority(&device)?];
    let mut pinned = PinnedBuf::zeroed(&device, 1000)?;
    for round in 0..3 {
        pinned.copy_from_slice(&numbers(1000));
        let (back, buf) = soon(DeviceBuf::from_host(&streams[0], pinned))?;
        pinned = back;
        pinned.fill(0);
        let [low, high] = buf.split_at(400).map_err(given_back)?;
        let buf = DeviceBuf::join([low, high.on(&streams[1]).map_err(given_back)?]).map_err(given_back)?;
        // One failure is no reason to lose a buffer.
        let (buf, back) = soon(buf.to_host(pinned)).map_err(given_back)?;
        pinned = back;
        assert_eq!(*pinned, numbers(1000), "round {round}");
        drop(buf);
        drop(DeviceBuf::<f32>::zeroed(&streams[round % 2], 3000)?);
        soon(streams[round % 2].record()?)?;
    }
    device.memory()?;
    device.trim()?;
    Ok(())
}

fn given_back<B>(failed: Failed<B>) -> Error {
    assert!(failed.buf.is_some(), "{}", failed.error);
    failed.error
}

/// Driver functions that the program calls, without those in [`LAST`], and whether it must get an error when a call of that function fails.
const CALLED: [(&str, bool); 24] = [
    ("cuDeviceGetCount", true),
    ("cuDeviceGet", true),
    ("cuDeviceGetName", true),
    ("cuDeviceGetUuid_v2", true),
    ("cuDevicePrimaryCtxRetain", true),
    ("cuCtxGetStreamPriorityRange", true),
    ("cuMemGetInfo_v2", true),
    ("cuMemAlloc_v2", true),
    ("cuMemHostAlloc", true),
    ("cuMemcpyHtoDAsync_v2", true),
    ("cuMemcpyDtoHAsync_v2", true),
    ("cuMemsetD8Async", true),
    // Also called where nobody needs the error or there is another way: in `Drop`, and by the thread that watches events.
    ("cuStreamIsCapturing", false),
    ("cuCtxPushCurrent_v2", false),
    ("cuCtxPopCurrent_v2", false),
    ("cuStreamCreateWithPriority", false),
    ("cuStreamWaitEvent", false),
    ("cuStreamSynchronize", false),
    ("cuEventCreate", false),
    ("cuEventRecord", false),
    ("cuEventQuery", false),
    ("cuEventSynchronize", false),
    ("cuLaunchHostFunc", false),
    ("cuCtxSynchronize", false),
];

/// Functions that give something back. What the driver does not take back stays lost.
const LAST: [&str; 5] = [
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuDevicePrimaryCtxRelease_v2",
];

fn round(name: &str, must_tell: bool, code: u32) {
    let before = calls(name);
    program().unwrap();
    nothing_left("nothing fails");
    let times = calls(name) - before;
    for nth in 1..=times {
        fail(Some(name), nth, code);
        let result = program();
        match &result {
            Ok(()) => assert!(!must_tell, "call {nth} of {name} failed, and the program did not hear"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("CUDA") && text.contains(&format!("({code})")), "{name}: {text}");
            }
        }
        fail(None, 0, 0);
        nothing_left(&format!("call {nth} of {name} failed, {result:?}"));
    }
}

#[test]
fn every_call_fails_in_turn() {
    child("faults::every_call_fails_in_turn", &[], || {
        for (name, must_tell) in CALLED {
            round(name, must_tell, 999);
        }
    });
}

#[test]
fn what_the_driver_will_not_take_back_is_lost_and_no_more() {
    for name in LAST {
        let variables = [("ALLSTREAM_TEST_CUDA_FAIL", format!("{name}:1:999"))];
        let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
        child("faults::what_the_driver_will_not_take_back_is_lost_and_no_more", &variables, || {
            program().unwrap();
            // One thing stays lost, with what belongs to it; the next program still gets all it needs.
            until("it settles", || report().host_allocations <= 1 && report().events <= 1);
            program().unwrap();
            until("it settles again, with one thing lost", || {
                let Report { streams, events, allocations, host_allocations, .. } = report();
                streams + events + allocations + host_allocations <= 1
            });
            assert_eq!(report().freed_in_use, 0);
        });
        if is_child() {
            return;
        }
    }
}

#[test]
fn a_context_that_breaks_ends_every_wait_and_keeps_what_the_device_may_touch() {
    let test = "faults::a_context_that_breaks_ends_every_wait_and_keeps_what_the_device_may_touch";
    child(test, &[("ALLSTREAM_TEST_CUDA_DELAY_US", "20000")], || {
        let (device, stream) = device();
        let mut pointer = 0_u64;
        // SAFETY: cuda.h declares the functions with these types; the context is the primary one, which `device` holds.
        unsafe {
            let retain: unsafe extern "C" fn(*mut u64, i32) -> u32 =
                std::mem::transmute(function("cuDevicePrimaryCtxRetain"));
            let set: unsafe extern "C" fn(u64) -> u32 = std::mem::transmute(function("cuCtxSetCurrent"));
            let alloc: unsafe extern "C" fn(*mut u64, usize) -> u32 =
                std::mem::transmute(function("cuMemAlloc_v2"));
            let mut context = 0;
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!((set(context), alloc(&raw mut pointer, 4000)), (0, 0));
        }
        let memory = ForeignMemory { pointer, len: 1000, dtype: DType::U32 };
        // SAFETY: this breaks the contract on purpose: the memory is freed below, while it is in use. The test driver makes an error
        // of that, as a real driver does of a kernel that goes astray; nothing else is accessed.
        let foreign = unsafe { DeviceBuf::<u32>::from_foreign(memory, &stream, ()) }.unwrap();
        for _ in 0..8 {
            drop(DeviceBuf::<u32>::zeroed(&stream, 16).unwrap());
        }
        let waits = IntoFuture::into_future(stream.record().unwrap());
        let pinned = PinnedBuf::<u32>::zeroed(&device, 1000).unwrap();
        let copy = foreign.to_host(pinned);
        // SAFETY: cuda.h declares the function with this type.
        unsafe {
            let free: unsafe extern "C" fn(u64) -> u32 = std::mem::transmute(function("cuMemFree_v2"));
            assert_eq!(free(pointer), 0);
        }
        let behind = IntoFuture::into_future(stream.record().unwrap());
        let _ = soon(waits);
        let Failed { buf, error } = soon(copy).unwrap_err();
        let text = error.to_string();
        assert!(buf.is_none() && text.contains("compute-sanitizer"), "{text}");
        assert!(soon(behind).is_err() && stream.synchronize().is_err() && device.memory().is_err());
        let Failed { buf, .. } = soon(DeviceBuf::from_host(&stream, numbers(10))).unwrap_err();
        // The buffer may be gone: after such a failure nobody knows whether the device still touches it.
        drop(buf);
        drop((stream, device));
    });
}

/// Once the context has failed, the driver calls nobody when work ends. The thread that watches events finds out by asking, even if it
/// had stopped asking, because for a while there was nothing to wait for.
#[test]
fn a_context_that_breaks_ends_a_wait_that_began_in_silence() {
    child("faults::a_context_that_breaks_ends_a_wait_that_began_in_silence", &[], || {
        let (device, stream) = device();
        drop(up(&stream, numbers(10)));
        // Longer than the thread that watches events goes on asking when there are none.
        std::thread::sleep(Duration::from_millis(500));
        pass(true, 0);
        let pinned = PinnedBuf::from_slice(&device, &numbers(1000)).unwrap();
        let copy = DeviceBuf::from_host(&stream, pinned);
        // SAFETY: the test driver's `device.rs` declares the function with this type.
        let fail: extern "C" fn(i32, u32) -> u32 =
            unsafe { std::mem::transmute(function("allstream_test_cuda_break")) };
        assert_eq!(fail(0, 719), 0);
        let Failed { error, .. } = soon(copy).unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
        pass(true, u64::MAX);
    });
}
