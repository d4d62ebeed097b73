//! The driver's functions, one group of them after the other.

#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use support::*;

#[test]
fn devices_say_what_they_are() {
    let _driver = Driver::new(3);
    let mut count = 0;
    ok!(cuDeviceGetCount(&mut count));
    assert_eq!(count, 3);
    let mut uuids = Vec::new();
    for ordinal in 0..3 {
        let (mut device, mut uuid, mut major) = (-1, [0; 16], 0);
        ok!(cuDeviceGet(&mut device, ordinal));
        ok!(cuDeviceGetUuid_v2(&mut uuid, device));
        ok!(cuDeviceGetAttribute(&mut major, 75, device));
        assert_eq!(major, 9);
        assert!(!uuids.contains(&uuid));
        uuids.push(uuid);
    }
    let mut text = [0x55; 12];
    ok!(cuDeviceGetName(text.as_mut_ptr(), 8, 1));
    assert_eq!((text[7], text[8]), (0, 0x55), "a short place is not overrun, and its text ends");
    assert_eq!(code!(cuDeviceGet(&mut count, 3)), 101);
    assert_eq!(code!(cuDeviceGetAttribute(&mut count, 9999, 0)), 1);
    assert_eq!(code!(cuDeviceGetCount(std::ptr::null_mut())), 1);
}

#[test]
fn errors_have_names() {
    for (code, name) in
        [(0, c"CUDA_SUCCESS"), (2, c"CUDA_ERROR_OUT_OF_MEMORY"), (700, c"CUDA_ERROR_ILLEGAL_ADDRESS")]
    {
        let mut text = std::ptr::null();
        ok!(cuGetErrorName(code, &mut text));
        // SAFETY: the driver gave a text that lives for ever.
        assert_eq!(unsafe { CStr::from_ptr(text) }, name);
    }
    let mut text = c"x".as_ptr();
    assert_eq!(code!(cuGetErrorName(12345, &mut text)), 1);
    assert!(text.is_null());
}

#[test]
fn unknown_handles_are_refused() {
    let _driver = Driver::new(1);
    for handle in [3, 0x1234_5678, u64::MAX] {
        assert_eq!(code!(cuStreamSynchronize(handle)), 400);
        assert_eq!(code!(cuStreamDestroy_v2(handle)), 400);
        assert_eq!(code!(cuEventQuery(handle)), 400);
        assert_eq!(code!(cuEventRecord(handle, 0)), 400);
        assert_eq!(code!(cuMemFree_v2(handle)), 1);
        assert_eq!(code!(cuCtxSetCurrent(handle)), 201);
    }
    let stream = stream();
    ok!(cuStreamDestroy_v2(stream));
    assert_eq!(code!(cuStreamDestroy_v2(stream)), 400, "a handle does not come back");
}

#[test]
fn contexts_are_a_stack_of_the_thread() {
    let driver = Driver::new(2);
    let mut top = 0;
    ok!(cuCtxPushCurrent_v2(driver.contexts[1]));
    ok!(cuCtxGetCurrent(&mut top));
    assert_eq!(top, driver.contexts[1]);
    ok!(cuCtxPopCurrent_v2(&mut top));
    ok!(cuCtxGetCurrent(&mut top));
    assert_eq!(top, driver.contexts[0]);
    std::thread::spawn(|| assert_eq!(code!(cuCtxSynchronize()), 201)).join().unwrap();
}

#[test]
fn memory_is_counted_poisoned_and_bounded() {
    let driver = Driver::new(1);
    ok!(allstream_test_cuda_set_memory(1 << 20));
    let at = alloc(1000);
    assert!(download::<f32>(at, 250).iter().all(|value| value.is_nan()));
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    assert_eq!((free, total), ((1 << 20) - 1000, 1 << 20));
    assert_eq!(driver.report().allocated_bytes, 1000);
    let mut other = 0;
    assert_eq!(code!(cuMemAlloc_v2(&mut other, 1 << 20)), 2);
    assert_eq!(code!(cuMemcpyHtoD_v2(at + 999, [0_u8; 2].as_ptr().cast(), 2)), 1, "out of bounds");
    assert_eq!(code!(cuMemFree_v2(at + 8)), 1, "not its beginning");
    ok!(cuMemFree_v2(at));
    assert_eq!(code!(cuMemFree_v2(at)), 1);
    assert_eq!(code!(cuMemcpyHtoD_v2(at, [0_u8; 2].as_ptr().cast(), 2)), 1);
}

#[test]
fn pageable_memory_is_read_at_the_call_and_pinned_memory_later() {
    let _driver = Driver::new(1);
    let (stream, at) = (stream(), alloc(4));
    let mut pinned = std::ptr::null_mut::<c_void>();
    ok!(cuMemHostAlloc(&mut pinned, 8, 0));
    let gate = pinned as u64 + 4;
    // SAFETY: the driver gave eight aligned bytes. This test touches them only by atomics; the copy reads `words[0]` only after the gate is
    // open, and the test's last store to it comes before that.
    let words = unsafe { &*(pinned as *const [AtomicU32; 2]) };
    for is_pinned in [false, true] {
        let mut mine = 1_u32;
        words[0].store(1, Ordering::SeqCst);
        words[1].store(0, Ordering::SeqCst);
        ok!(cuStreamWaitValue32_v2(stream, gate, 1, 1));
        let source = if is_pinned { pinned.cast_const() } else { (&raw const mine).cast() };
        ok!(cuMemcpyHtoDAsync_v2(at, source, 4, stream));
        assert_eq!(code!(cuStreamQuery(stream)), 600);
        mine += 1;
        words[0].store(mine, Ordering::SeqCst);
        words[1].store(1, Ordering::SeqCst);
        assert_eq!(finish(stream), 0);
        assert_eq!(download::<u32>(at, 1), [if is_pinned { 2 } else { 1 }]);
    }
    ok!(cuMemFreeHost(pinned));
    ok!(cuMemFree_v2(at));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn registered_memory_is_known_once() {
    let driver = Driver::new(1);
    let mut mine = vec![7_u8; 10_000];
    let at: *mut c_void = mine.as_mut_ptr().cast();
    ok!(cuMemHostRegister_v2(at, 10_000, 0));
    assert_eq!(code!(cuMemHostRegister_v2(at, 1, 0)), 712);
    assert_eq!(driver.report().registered, 1);
    let (mut device, mut kind) = (0, 0_u32);
    ok!(cuMemHostGetDevicePointer_v2(&mut device, at, 0));
    ok!(cuPointerGetAttribute((&raw mut kind).cast(), 2, device));
    assert_eq!(kind, 1);
    ok!(cuMemHostUnregister(at));
    assert_eq!(code!(cuMemHostUnregister(at)), 713);
    assert_eq!(code!(cuPointerGetAttribute((&raw mut kind).cast(), 2, device)), 1);
}

#[test]
fn values_are_compared_as_the_manual_says() {
    let _driver = Driver::new(1);
    let (stream, at) = (stream(), upload(&[0_u64]));
    // (value in memory, value of the wait, how they are compared, whether the stream goes on); the word is the low half of the u64 there.
    let cases = [
        (5, 5, 0, true),
        (4, 5, 0, false),
        (2, 0xffff_ffff, 0, true),
        (5, 5, 1, true),
        (6, 5, 1, false),
        (6, 2, 2, true),
        (6, 1, 2, false),
        (0xffff_fff0, 0xf, 3, false),
        (0xffff_fff0, 0x7, 3, true),
    ];
    for (found, asked, how, goes_on) in cases {
        ok!(cuStreamWriteValue32_v2(stream, at, found, 0));
        ok!(cuStreamWaitValue32_v2(stream, at, asked, how | 1 << 30));
        if !goes_on {
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(code!(cuStreamQuery(stream)), 600, "{found} {asked} {how}");
            let open = if how == 3 { 0 } else { asked };
            let other = self::stream();
            ok!(cuStreamWriteValue32_v2(other, at, open, 0));
            assert_eq!(finish(other), 0);
            ok!(cuStreamDestroy_v2(other));
        }
        assert_eq!(finish(stream), 0, "{found} {asked} {how}");
    }
    ok!(cuStreamWriteValue64_v2(stream, at, 1 << 40, 0));
    ok!(cuStreamWaitValue64_v2(stream, at, 1 << 39, 0));
    assert_eq!(finish(stream), 0);
    assert_eq!(code!(cuStreamWaitValue32_v2(stream, at + 2, 0, 0)), 1, "unaligned");
    assert_eq!(code!(cuStreamWaitValue32_v2(stream, at, 0, 4)), 1);
    ok!(cuMemFree_v2(at));
    ok!(cuStreamDestroy_v2(stream));
}

unsafe extern "C" fn count_and_call(count: *mut c_void) {
    let code = code!(cuCtxSynchronize());
    // SAFETY: the test gave a counter that outlives the work.
    unsafe { &*count.cast::<AtomicU32>() }.fetch_add(code, Ordering::SeqCst);
}

#[test]
fn a_host_function_runs_in_order_and_may_not_call_back() {
    let _driver = Driver::new(1);
    let (stream, count) = (stream(), AtomicU32::new(0));
    ok!(cuLaunchHostFunc(stream, Some(count_and_call), (&raw const count).cast_mut().cast()));
    assert_eq!(finish(stream), 0);
    assert_eq!(count.load(Ordering::SeqCst), 800);
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn capture_is_seen() {
    let _driver = Driver::new(1);
    let (stream, at) = (stream(), upload(&[1_u32]));
    let (mut capturing, mut graph) = (0, 0);
    ok!(cuStreamBeginCapture_v2(stream, 0));
    ok!(cuStreamIsCapturing(stream, &mut capturing));
    assert_eq!(capturing, 1);
    ok!(cuMemsetD32Async(at, 9, 1, stream));
    ok!(cuStreamEndCapture(stream, &mut graph));
    ok!(cuGraphDestroy(graph));
    assert_eq!(download::<u32>(at, 1), [1], "what is captured does not run");
    ok!(cuStreamBeginCapture_v2(stream, 0));
    assert_eq!(code!(cuStreamSynchronize(stream)), 900);
    assert_eq!(code!(cuStreamEndCapture(stream, &mut graph)), 901);
    assert_eq!(finish(stream), 0);
    ok!(cuMemFree_v2(at));
    ok!(cuStreamDestroy_v2(stream));
}

/// A thread in the mode `asks` queries an event while another captures in the mode `captures`. Returns the code of the query and that of the
/// capture's end. A relaxed capture (2) is ended by the thread that asks, and the second value is then always 0.
fn query_beside_a_capture(captures: u32, asks: u32) -> (u32, u32) {
    let (stream, idle, mut event, mut graph) = (stream(), stream(), 0, 0);
    ok!(cuEventCreate(&mut event, 2));
    ok!(cuEventRecord(event, idle));
    assert_eq!(finish(idle), 0);
    ok!(cuStreamBeginCapture_v2(stream, captures));
    let asked = std::thread::spawn(move || {
        let mut mode = asks;
        ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, 0, "what every thread begins in");
        let answer = code!(cuEventQuery(event));
        let mut elsewhere = 0;
        let wrong = code!(cuStreamEndCapture(stream, &mut elsewhere));
        assert!(captures == 2 || wrong == 908, "another thread cannot end it: {wrong}");
        answer
    });
    let answer = asked.join().unwrap();
    let end = if captures == 2 { 0 } else { code!(cuStreamEndCapture(stream, &mut graph)) };
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuStreamDestroy_v2(idle));
    (answer, end)
}

#[test]
fn a_thread_that_is_not_relaxed_breaks_a_global_capture_of_another() {
    let _driver = Driver::new(1);
    assert_eq!(query_beside_a_capture(0, 0), (900, 901));
    for (captures, asks) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0)] {
        assert_eq!(query_beside_a_capture(captures, asks), (0, 0), "mode {asks} beside mode {captures}");
    }
}

#[test]
fn an_event_that_is_captured_cannot_be_asked() {
    let _driver = Driver::new(1);
    let (stream, mut event, mut graph, mut mode) = (stream(), 0, 0, 2);
    ok!(cuEventCreate(&mut event, 2));
    ok!(cuStreamBeginCapture_v2(stream, 2));
    ok!(cuEventRecord(event, stream));
    assert_eq!(code!(cuEventQuery(event)), 907);
    assert_eq!(code!(cuEventSynchronize(event)), 907);
    ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
    assert_eq!(code!(cuCtxSynchronize()), 900, "in any mode");
    ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
    assert_eq!(code!(cuStreamEndCapture(stream, &mut graph)), 901);
    ok!(cuEventRecord(event, stream));
    assert_eq!(finish(stream), 0);
    ok!(cuEventQuery(event));
    let mut context = 0;
    ok!(cuCtxPopCurrent_v2(&mut context));
    assert_eq!(code!(cuEventSynchronize(event)), 201, "without a current context");
    ok!(cuCtxPushCurrent_v2(context));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
}

/// A record of an event between processes that went into a graph, or that its stream has refused, is not queued: a wait for it would not end.
#[test]
fn a_record_that_is_not_queued_holds_up_nobody() {
    let _driver = Driver::new(1);
    let (stream, waiting, mut event, mut graph) = (stream(), self::stream(), 0, 0);
    ok!(cuEventCreate(&mut event, 6));
    ok!(cuStreamBeginCapture_v2(stream, 2));
    ok!(cuEventRecord(event, stream));
    assert_eq!(code!(cuStreamSynchronize(stream)), 900, "this breaks the capture");
    assert_eq!(code!(cuEventRecord(event, stream)), 901, "the capture is broken");
    assert_eq!(code!(cuStreamEndCapture(stream, &mut graph)), 901);
    ok!(cuStreamWaitEvent(waiting, event, 0));
    assert_eq!(finish(waiting), 0);
    ok!(cuEventRecord(event, stream));
    ok!(cuStreamWaitEvent(waiting, event, 0));
    assert_eq!((finish(stream), finish(waiting), code!(cuEventQuery(event))), (0, 0, 0));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(waiting));
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn the_nth_call_fails() {
    let _driver = Driver::new(1);
    let mut at = [0; 4];
    let before = code!(allstream_test_cuda_calls(c"cuMemAlloc".as_ptr()));
    ok!(allstream_test_cuda_fail(c"cuMemAlloc".as_ptr(), 2, 2));
    ok!(cuMemAlloc_v2(&mut at[0], 16));
    assert_eq!(code!(cuMemAlloc_v2(&mut at[1], 16)), 2);
    ok!(cuMemAlloc_v2(&mut at[2], 16));
    assert_eq!(code!(allstream_test_cuda_calls(c"cuMemAlloc".as_ptr())) - before, 3);
    ok!(cuMemFree_v2(at[0]));
    ok!(cuMemFree_v2(at[2]));
}
