//! Memory in the order of streams, and events.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::Comm;
use allstream::cuda::{Device, DeviceBuf, DeviceStream, PinnedBuf};

use crate::support::{
    bound, calls, child, device, nothing_left, numbers, pass, ranks, report, set_delays, soon, until, up,
    values,
};

const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "5000")];
const TIGHT: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "5000"), ("ALLSTREAM_TEST_CUDA_MEMORY", "1M")];

/// One stream is late to fill a buffer with zeros, and the buffer is dropped before that. A new buffer of another stream must not get
/// these zeros.
fn late_zeros_hit_nobody(len: usize) {
    let (device, _) = device();
    for seed in 0..20 {
        set_delays(5000, seed);
        let [early, late] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
        // Work that delays the stream.
        for _ in 0..4 {
            drop(DeviceBuf::<u32>::zeroed(&early, 16).unwrap());
        }
        drop(DeviceBuf::<u32>::zeroed(&early, len).unwrap());
        let (_, buf) = soon(DeviceBuf::from_host(&late, numbers(len))).unwrap();
        early.synchronize().unwrap();
        let (_, back) = soon(buf.to_host(vec![0; len])).unwrap();
        assert_eq!(back, numbers(len), "seed {seed}");
    }
    assert_eq!(report().freed_in_use, 0);
}

#[test]
fn memory_is_not_used_again_before_its_stream_is_done() {
    child("order::memory_is_not_used_again_before_its_stream_is_done", SLOW, || late_zeros_hit_nobody(5000));
}

#[test]
fn where_memory_is_tight_the_other_stream_waits_and_the_host_does_not() {
    let test = "order::where_memory_is_tight_the_other_stream_waits_and_the_host_does_not";
    // 600 of 1024 KB: a second one only fits where the first was.
    child(test, TIGHT, || late_zeros_hit_nobody(150_000));
}

#[test]
fn where_only_all_that_is_pending_is_enough_it_is_waited_for() {
    child("order::where_only_all_that_is_pending_is_enough_it_is_waited_for", TIGHT, || {
        let (device, stream) = device();
        for _ in 0..10 {
            for _ in 0..3 {
                drop(DeviceBuf::<u32>::zeroed(&stream, 75_000).unwrap());
                let other = DeviceStream::new(&device).unwrap();
                drop(DeviceBuf::<u32>::zeroed(&other, 75_000).unwrap());
            }
            let (_, buf) = soon(DeviceBuf::from_host(&stream, numbers(200_000))).unwrap();
            assert_eq!(soon(buf.to_host(vec![0; 200_000])).unwrap().1, numbers(200_000));
        }
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn a_buffer_that_moves_to_another_stream_takes_its_order_along() {
    child("order::a_buffer_that_moves_to_another_stream_takes_its_order_along", SLOW, || {
        let (device, _) = device();
        for seed in 0..20 {
            set_delays(5000, seed);
            let [slow, other] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
            for _ in 0..4 {
                drop(DeviceBuf::<u32>::zeroed(&slow, 16).unwrap());
            }
            // Zeros that come late must not come after the numbers: moved whole, and as parts that are joined.
            let whole = DeviceBuf::<u32>::zeroed(&slow, 1000).unwrap().on(&other).unwrap();
            let [low, high] = DeviceBuf::<u32>::zeroed(&slow, 1000).unwrap().split_at(500).unwrap();
            let joined = DeviceBuf::join([high.on(&other).unwrap(), low]).unwrap();
            assert_eq!(joined.stream(), &other);
            for buf in [whole, joined] {
                let (_, buf) = soon(buf.copy_from_host(numbers(1000))).unwrap();
                slow.synchronize().unwrap();
                assert_eq!(soon(buf.to_host(vec![0; 1000])).unwrap().1, numbers(1000), "seed {seed}");
            }
        }
    });
}

/// Threads that share a device with little memory: buffers are made, moved between streams, cut, dropped early and late;
/// whatever is read back is what was written.
#[test]
fn nobody_sees_what_is_another_buffers() {
    let tight = [("ALLSTREAM_TEST_CUDA_DELAY_US", "300"), ("ALLSTREAM_TEST_CUDA_MEMORY", "2M")];
    child("order::nobody_sees_what_is_another_buffers", &tight, || {
        let (device, stream) = device();
        let thread = |seed: u32| {
            let device = device.clone();
            move || {
                let streams = [(); 3].map(|()| DeviceStream::new(&device).unwrap());
                let mut state = u64::from(seed) + 1;
                let mut draw = |n: usize| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as usize % n
                };
                for round in 0..400 {
                    // At most 4 threads * 4 buffers * 100 KB at a time.
                    let (len, fill) = (1 + draw(25_000), seed << 16 | round);
                    let stream = &streams[draw(3)];
                    match draw(4) {
                        0 => drop(DeviceBuf::<u32>::zeroed(stream, len).unwrap()),
                        1 => {
                            let pinned = PinnedBuf::from_slice(&device, &vec![fill; len]).unwrap();
                            drop(DeviceBuf::from_host(stream, pinned));
                        }
                        _ => {
                            let (host, buf) = soon(DeviceBuf::from_host(stream, vec![fill; len])).unwrap();
                            let [low, high] = buf.on(&streams[draw(3)]).unwrap().split_at(draw(len)).unwrap();
                            let high = high.on(&streams[draw(3)]).unwrap();
                            let parts = if draw(2) == 0 { [low, high] } else { [high, low] };
                            let buf = DeviceBuf::join(parts).unwrap();
                            let (_, back) = soon(buf.to_host(vec![0; len])).unwrap();
                            assert!(back == host, "round {round} of thread {seed}");
                        }
                    }
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|seed| drop(scope.spawn(thread(seed)))));
        drop((stream, device));
        nothing_left("all was dropped");
    });
}

#[test]
fn a_stream_uses_its_own_memory_again_at_once() {
    child("order::a_stream_uses_its_own_memory_again_at_once", SLOW, || {
        let (device, stream) = device();
        let mut addresses = Vec::new();
        for round in 0..50_u32 {
            let pinned = PinnedBuf::from_slice(&device, &[round; 1000]).unwrap();
            let copy = DeviceBuf::from_host(&stream, pinned);
            let zeros = DeviceBuf::<u32>::zeroed(&stream, 1000).unwrap();
            addresses.push(zeros.as_ptr());
            drop(zeros);
            if round % 10 == 0 {
                let (_, buf) = soon(copy).unwrap();
                assert_eq!(soon(buf.to_host(vec![0; 1000])).unwrap().1, [round; 1000]);
            }
        }
        assert_eq!(device.pool().blocks, 1);
        addresses.sort_unstable();
        addresses.dedup();
        assert!(addresses.len() < 50, "{} places for 50 buffers", addresses.len());
        drop((stream, device));
        nothing_left("all was dropped");
    });
}

#[test]
fn parts_are_in_flight_by_themselves_and_join_in_any_order() {
    child("order::parts_are_in_flight_by_themselves_and_join_in_any_order", SLOW, || {
        let (device, stream) = device();
        let (_, buf) = soon(DeviceBuf::from_host(&stream, numbers(1000))).unwrap();
        let at = buf.as_ptr();
        let parts = buf.split(&[300, 0, 500, 200]).unwrap();
        assert_eq!(parts.iter().map(DeviceBuf::offset).collect::<Vec<_>>(), [0, 300, 300, 800]);
        // Each part is overwritten, on a stream of its own, with values that are 1000 higher.
        let moved = parts.into_iter().map(|part| {
            let other = DeviceStream::new(&device).unwrap();
            let (from, len) = (part.offset() as u32, part.len() as u32);
            let host: Vec<u32> = (1000 + from..1000 + from + len).collect();
            part.on(&other).unwrap().copy_from_host(host)
        });
        let moved: Vec<_> = moved.collect();
        let mut parts: Vec<_> = moved.into_iter().map(|copy| soon(copy).unwrap().1).collect();
        parts.reverse();
        let missing = parts.remove(1);
        let failed = DeviceBuf::join(parts).unwrap_err();
        assert!(
            failed.error.to_string().contains("1000 elements 300..800 are in no part"),
            "{}",
            failed.error
        );
        let mut parts = failed.buf.unwrap();
        let stranger = DeviceBuf::<u32>::zeroed(&stream, 500).unwrap();
        parts.push(stranger);
        let failed = DeviceBuf::join(parts).unwrap_err();
        assert!(failed.error.to_string().contains("of another buffer"), "{}", failed.error);
        let parts = failed.buf.unwrap().into_iter().filter(|part| part.len() != 500).chain([missing]);
        let whole = DeviceBuf::join(parts).unwrap();
        assert_eq!((whole.as_ptr(), whole.len()), (at, 1000));
        let (whole, back) = soon(whole.to_host(vec![0; 1000])).unwrap();
        assert_eq!(back, (1000..2000).collect::<Vec<_>>());
        // One part dropped: the memory stays while the other is there.
        let [low, high] = whole.split_at(10).unwrap();
        drop(low);
        assert_eq!(soon(high.to_host(vec![0; 990])).unwrap().1, (1010..2000).collect::<Vec<_>>());
        let failed = DeviceBuf::<u32>::zeroed(&stream, 3).unwrap().split(&[1, 1]).unwrap_err();
        assert!(failed.buf.is_some() && failed.error.to_string().contains("add up to 2"));
    });
}

#[test]
fn events_are_awaited_asleep_and_collectives_start_after_them() {
    child("order::events_are_awaited_asleep_and_collectives_start_after_them", SLOW, || {
        let (device, stream) = device();
        let other = DeviceStream::high_priority(&device).unwrap();
        let pinned = PinnedBuf::from_slice(&device, &numbers(1000)).unwrap();
        let copy = DeviceBuf::from_host(&stream, pinned);
        let event = stream.record().unwrap();
        other.wait_event(&event).unwrap();
        let behind = other.record().unwrap();
        // More waits at a time than the engine has streams for waiting.
        let waits: Vec<_> = (0..40).map(|_| IntoFuture::into_future(behind.clone())).collect();
        for reached in soon(futures::future::join_all(waits)) {
            reached.unwrap();
        }
        assert!(event.is_complete().unwrap() && behind.is_complete().unwrap());
        event.wait().unwrap();
        let (pinned, buf) = soon(copy).unwrap();
        let zeros = buf.to_host(pinned);
        let after = stream.record().unwrap().on_host();
        let mut comm = Comm::local(1).unwrap().remove(0);
        let sum = soon(comm.after(after.clone()).all_reduce(vec![1.0_f32])).unwrap();
        assert!(after.is_complete() && sum == [1.0]);
        drop(soon(zeros).unwrap());
    });
}

#[test]
fn waiting_takes_no_time_of_a_processor() {
    let slow = [("ALLSTREAM_TEST_CUDA_DELAY_US", "300000")];
    child("order::waiting_takes_no_time_of_a_processor", &slow, || {
        fn spent() -> Duration {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the pointer is to `time`, which has room for the answer.
            assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) }, 0);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        }
        let (_device, stream) = device();
        let (begin, cpu) = (Instant::now(), spent());
        for _ in 0..8 {
            drop(DeviceBuf::<u32>::zeroed(&stream, 16).unwrap());
        }
        soon(stream.record().unwrap()).unwrap();
        let (took, cpu) = (begin.elapsed(), spent() - cpu);
        assert!(took < Duration::from_millis(50) || cpu * 5 < took, "{cpu:?} of {took:?}");
    });
}

/// What keeps a stream of somebody else's alive. If the thread that sees work on devices end is the one that drops it, it panics, and counts that.
struct Owner(#[allow(dead_code)] DeviceStream, Arc<AtomicUsize>);

impl Drop for Owner {
    fn drop(&mut self) {
        if std::thread::current().name() == Some("allstream-cuda") {
            self.1.fetch_add(1, Ordering::SeqCst);
            std::panic::panic_any("a drop of a test");
        }
    }
}

/// A collective takes so long that its stream is watched. Its caller then drops all handles of the buffer's stream, so that the thread that
/// watches often has the last one.
#[test]
fn a_panic_in_the_drop_of_a_streams_owner_keeps_nobody_from_hearing_of_the_end_of_work() {
    let test = "order::a_panic_in_the_drop_of_a_streams_owner_keeps_nobody_from_hearing_of_the_end_of_work";
    child(test, &[("ALLSTREAM_TEST_CUDA_QUEUES", "32")], || {
        let panicked = Arc::new(AtomicUsize::new(0));
        ranks(2, |mut comm| {
            let (rank, device) = (comm.rank(), bound(&mut comm, 1).device());
            for _ in 0..20 {
                let own = DeviceStream::new(&device).unwrap();
                let (raw, owner) = (own.as_raw(), Owner(own, panicked.clone()));
                // SAFETY: the stream is of this device, and exists until `owner` is dropped.
                let stream = unsafe { DeviceStream::from_raw_of(&device, raw, owner) }.unwrap();
                let (buf, held) = (up(&stream, values(rank, 100)), DeviceBuf::zeroed(&stream, 16).unwrap());
                let pinned = PinnedBuf::<u32>::zeroed(&device, 16).unwrap();
                soon(comm.barrier()).unwrap();
                pass(true, 0);
                drop(held.copy_from_host(pinned));
                let work = comm.all_reduce(buf);
                let before = calls("cuStreamQuery");
                until("the stream is watched", || calls("cuStreamQuery") >= before + 4);
                soon(comm.barrier()).unwrap();
                pass(true, u64::MAX);
                drop((soon(work).unwrap(), stream));
            }
            soon(comm.close()).unwrap();
        });
        assert!(panicked.load(Ordering::SeqCst) > 0, "the thread that watches has dropped an owner");
        let (_device, stream) = device();
        soon(stream.record().unwrap()).unwrap();
    });
}

/// The last handle of a device is in an event that is watched, and memory of the device is still in use when that event is reached: to close the device
/// takes long. Meanwhile other events are heard of.
#[test]
fn a_device_that_is_closed_by_its_last_event_holds_up_no_other_event() {
    let two = [("ALLSTREAM_TEST_CUDA_DEVICES", "2"), ("ALLSTREAM_TEST_CUDA_QUEUES", "32")];
    child("order::a_device_that_is_closed_by_its_last_event_holds_up_no_other_event", &two, || {
        const ALL: u64 = u64::MAX;
        let (closed, open) = (Device::new(0).unwrap(), Device::new(1).unwrap());
        let [memory, event] = [(); 2].map(|()| DeviceStream::new(&closed).unwrap());
        let [to_device, to_host, free] = [(); 3].map(|()| DeviceStream::new(&open).unwrap());
        let pinned = || PinnedBuf::from_slice(&open, &numbers(5000)).unwrap();
        let source = soon(DeviceBuf::from_host(&to_host, pinned())).unwrap().1;
        // Each of the closed device's streams waits for a copy of the other device that does not pass yet.
        pass(true, 0);
        pass(false, 0);
        let upload = DeviceBuf::from_host(&to_device, pinned());
        let download = source.to_host(pinned());
        memory.wait_event(&to_device.record().unwrap()).unwrap();
        drop(DeviceBuf::<u8>::zeroed(&memory, 1000).unwrap());
        event.wait_event(&to_host.record().unwrap()).unwrap();
        let last = event.record().unwrap().on_host();
        drop((memory, event, closed));
        pass(false, ALL);
        soon(last).unwrap();
        drop(soon(download).unwrap());
        let start = Instant::now();
        soon(free.record().unwrap()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_eq!(report().contexts, 2, "a device is being closed");
        pass(true, ALL);
        drop(soon(upload).unwrap());
        until("it is closed", || report().contexts == 1);
        drop((to_device, to_host, free, open));
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}
