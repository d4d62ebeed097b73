//! Order between streams, with random delays, and what the driver refuses.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

mod support;

use support::*;

const COUNT: usize = 4096;
const ROUNDS: u32 = 40;

/// One stream fills memory, another copies it, and the host reads the copy: how often it reads wrong values. With a wait for the fill, never.
fn wrong_results(waits: bool, seed: u64) -> u32 {
    let _driver = Driver::new(1);
    ok!(allstream_test_cuda_set_delays(200, seed));
    let (first, second, done) = (stream(), stream(), event());
    let (a, b) = (alloc(COUNT * 4), alloc(COUNT * 4));
    let mut wrong = 0;
    for round in 0..ROUNDS {
        ok!(cuMemsetD32Async(a, round + 1, COUNT, first));
        ok!(cuEventRecord(done, first));
        if waits {
            ok!(cuStreamWaitEvent(second, done, 0));
        }
        ok!(cuMemcpyDtoDAsync_v2(b, a, COUNT * 4, second));
        assert_eq!((finish(second), finish(first)), (0, 0));
        wrong += u32::from(download::<u32>(b, COUNT) != vec![round + 1; COUNT]);
    }
    ok!(cuStreamDestroy_v2(first));
    ok!(cuStreamDestroy_v2(second));
    ok!(cuEventDestroy_v2(done));
    ok!(cuMemFree_v2(a));
    ok!(cuMemFree_v2(b));
    wrong
}

#[test]
fn a_missing_wait_is_found_and_a_wait_is_enough() {
    let without: Vec<u32> = (1..4).map(|seed| wrong_results(false, seed)).collect();
    println!("wrong without the wait, of {ROUNDS}: {without:?}");
    assert!(without.iter().all(|wrong| *wrong > 0), "{without:?}");
    for seed in 1..4 {
        assert_eq!(wrong_results(true, seed), 0, "seed {seed}");
    }
}

/// Unless it is told otherwise a context has 8 hardware queues, which streams take in turn.
#[test]
fn streams_that_share_a_hardware_queue_hold_each_other_up() {
    let _driver = Driver::new(1);
    let streams: Vec<u64> = (0..9).map(|_| stream()).collect();
    let gate = upload(&[0_u32; 9]);
    ok!(cuStreamWaitValue32_v2(streams[0], gate, 1, 0));
    for (index, other) in streams.iter().enumerate().skip(1) {
        ok!(cuStreamWriteValue32_v2(*other, gate + 4 * index as u64, 1, 0));
    }
    streams[1..8].iter().for_each(|other| assert_eq!(finish(*other), 0));
    std::thread::sleep(std::time::Duration::from_millis(5));
    assert_eq!(code!(cuStreamQuery(streams[8])), 600, "the first stream and the ninth share a queue");
    ok!(cuStreamWriteValue32_v2(streams[1], gate, 1, 0));
    streams.iter().for_each(|stream| assert_eq!(finish(*stream), 0));
    streams.iter().for_each(|stream| ok!(cuStreamDestroy_v2(*stream)));
    ok!(cuMemFree_v2(gate));
}

#[test]
fn an_event_without_a_record_holds_nobody_up() {
    let _driver = Driver::new(1);
    let (stream, event) = (stream(), event());
    ok!(cuStreamWaitEvent(stream, event, 0));
    ok!(cuEventQuery(event));
    ok!(cuEventSynchronize(event));
    assert_eq!(finish(stream), 0);
    let mut ms = 0.0;
    assert_eq!(code!(cuEventElapsedTime_v2(&mut ms, event, event)), 400, "made without timing");
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuEventDestroy_v2(event));
}

/// Stream 0 waits for blocking streams, and they wait for it; a stream that does not block is independent of both.
#[test]
fn stream_zero_is_ordered_with_blocking_streams() {
    let _driver = Driver::new(1);
    let mut blocking = 0;
    ok!(cuStreamCreate(&mut blocking, 0));
    let (free, gate, at) = (stream(), upload(&[0_u32]), upload(&[0_u32]));
    ok!(cuStreamWaitValue32_v2(blocking, gate, 1, 1));
    ok!(cuMemsetD32Async(at, 1, 1, blocking));
    ok!(cuMemsetD32Async(at, 2, 1, 0));
    ok!(cuStreamSynchronize(free));
    assert_eq!((code!(cuStreamQuery(0)), code!(cuStreamQuery(blocking))), (600, 600));
    ok!(cuStreamWriteValue32_v2(free, gate, 1, 0));
    assert_eq!((finish(0), finish(blocking), finish(free)), (0, 0, 0));
    assert_eq!(download::<u32>(at, 1), [2]);
    ok!(cuStreamDestroy_v2(blocking));
    ok!(cuStreamDestroy_v2(free));
    ok!(cuMemFree_v2(gate));
    ok!(cuMemFree_v2(at));
}

#[test]
fn memory_freed_while_work_is_to_use_it_is_found() {
    let driver = Driver::new(1);
    let (stream, gate, at) = (stream(), upload(&[0_u32]), upload(&[0_u32]));
    ok!(cuStreamWaitValue32_v2(stream, gate, 1, 1));
    ok!(cuMemsetD32Async(at, 1, 1, stream));
    ok!(cuMemFree_v2(at));
    assert_eq!(driver.report().freed_in_use, 1);
    let other = self::stream();
    ok!(cuStreamWriteValue32_v2(other, gate, 1, 0));
    assert_eq!(finish(stream), 700);
    assert_eq!(code!(cuCtxSynchronize()), 700, "it sticks");
    ok!(cuDevicePrimaryCtxReset_v2(0));
    ok!(cuCtxSetCurrent(retain(0)));
}

#[test]
fn the_pools_memory_has_rules_of_its_own() {
    let driver = Driver::new(2);
    let (mut at, mut pool, mut token) = (0, 0, Token([0; 64]));
    ok!(cuCtxSetCurrent(driver.contexts[1]));
    ok!(cuMemAllocAsync(&mut at, 64, 0));
    assert_eq!(code!(cuIpcGetMemHandle(&mut token, at)), 1, "no handle for other processes");
    ok!(cuCtxSetCurrent(driver.contexts[0]));
    let to = upload(&[0_u8; 64]);
    ok!(cuCtxEnablePeerAccess(driver.contexts[1], 0));
    assert_eq!(code!(cuMemcpyAsync(to, at, 64, 0)), 1, "access between contexts is not for pools");
    ok!(cuDeviceGetDefaultMemPool(&mut pool, 1));
    ok!(cuMemPoolSetAccess(pool, &[1, 0, 3], 1));
    ok!(cuMemcpyAsync(to, at, 64, 0));
    ok!(cuCtxSynchronize());
    ok!(cuCtxDisablePeerAccess(driver.contexts[1]));
    ok!(cuMemFree_v2(to));
    ok!(cuCtxSetCurrent(driver.contexts[1]));
    ok!(cuMemFreeAsync(at, 0));
    assert_eq!(code!(cuMemFreeAsync(at, 0)), 1, "twice");
    ok!(cuCtxSynchronize());
}

#[test]
fn a_pair_without_access_copies_all_the_same() {
    // First of all, as it waits until no other test uses the driver: only then may the devices' access be changed.
    let driver = Driver::new(2);
    ok!(allstream_test_cuda_set_peers(0, 1, false));
    let mut can = 1;
    ok!(cuDeviceCanAccessPeer(&mut can, 0, 1));
    assert_eq!(can, 0);
    assert_eq!(code!(cuCtxEnablePeerAccess(driver.contexts[1], 0)), 217);
    ok!(cuCtxSetCurrent(driver.contexts[1]));
    let from = upload(&[5_u32, 6]);
    ok!(cuCtxSetCurrent(driver.contexts[0]));
    let (to, stream) = (upload(&[0_u32; 2]), stream());
    ok!(cuMemcpyPeerAsync(to, driver.contexts[0], from, driver.contexts[1], 8, stream));
    assert_eq!(finish(stream), 0);
    assert_eq!(download::<u32>(to, 2), [5, 6]);
    // Only streams of its own context can record an event; streams of every context can wait for it.
    let event = event();
    ok!(cuEventRecord(event, stream));
    ok!(cuCtxSetCurrent(driver.contexts[1]));
    let other = self::stream();
    assert_eq!(code!(cuEventRecord(event, other)), 400);
    ok!(cuStreamWaitEvent(other, event, 0));
    assert_eq!(finish(other), 0);
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuStreamDestroy_v2(other));
    ok!(cuEventDestroy_v2(event));
    ok!(cuMemFree_v2(to));
    ok!(cuMemFree_v2(from));
    ok!(allstream_test_cuda_set_peers(0, 1, true));
}

/// When a context fails, every wait for its work ends, and the other context goes on.
#[test]
fn a_broken_context_lets_go() {
    let driver = Driver::new(2);
    let (stream, gate, event) = (stream(), upload(&[0_u32]), event());
    ok!(cuStreamWaitValue32_v2(stream, gate, 1, 1));
    ok!(cuEventRecord(event, stream));
    ok!(cuCtxSetCurrent(driver.contexts[1]));
    let other = self::stream();
    ok!(cuStreamWaitEvent(other, event, 0));
    assert_eq!(code!(cuStreamQuery(other)), 600);
    ok!(allstream_test_cuda_break(0, 719));
    assert_eq!(finish(other), 0);
    assert_eq!(code!(cuEventSynchronize(event)), 719);
    assert_eq!(code!(cuMemsetD32Async(gate, 1, 1, stream)), 719);
    ok!(cuStreamDestroy_v2(other));
    ok!(cuDevicePrimaryCtxReset_v2(0));
    retain(0);
}

#[test]
fn many_threads_at_once() {
    let driver = Driver::new(2);
    ok!(allstream_test_cuda_set_delays(50, 3));
    std::thread::scope(|scope| {
        for thread in 0..8_u32 {
            let context = driver.contexts[thread as usize % 2];
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(context));
                let own = if thread < 4 { stream() } else { 2 };
                for round in 0..30 {
                    let (a, b) = (alloc(4096), alloc(4096));
                    ok!(cuMemsetD32Async(a, thread << 16 | round, 1024, own));
                    ok!(cuMemcpyDtoDAsync_v2(b, a, 4096, own));
                    let mut found = vec![0_u32; 1024];
                    ok!(cuMemcpyDtoHAsync_v2(found.as_mut_ptr().cast(), b, 4096, own));
                    assert_eq!(found, vec![thread << 16 | round; 1024]);
                    ok!(cuMemFree_v2(a));
                    ok!(cuMemFree_v2(b));
                }
                if own != 2 {
                    ok!(cuStreamDestroy_v2(own));
                }
            });
        }
    });
    assert_eq!(driver.report().freed_in_use, 0);
}
