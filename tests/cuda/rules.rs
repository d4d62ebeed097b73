//! What a real driver is strict about, or slow at.

use std::time::Instant;

use allstream::cuda::{DeviceBuf, DeviceStream};
use allstream::{Algo, ReduceOp, f16};

use crate::support::{bound, calls, child, device, down, nothing_left, ranks, soon, up, values};

const TWO: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "5000")];
const TIGHT: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "5000"), ("ALLSTREAM_TEST_CUDA_MEMORY", "1M")];

#[test]
fn a_thread_without_a_context_waits_for_an_event() {
    child("rules::a_thread_without_a_context_waits_for_an_event", SLOW, || {
        let (_device, stream) = device();
        let buf = DeviceBuf::<u32>::zeroed(&stream, 1000).unwrap();
        let event = stream.record().unwrap();
        let waited = std::thread::spawn(move || {
            event.wait()?;
            event.is_complete()
        });
        assert!(waited.join().unwrap().unwrap());
        drop(buf);
    });
}

/// Events that only streams wait for must not be made with `CU_EVENT_BLOCKING_SYNC`: an interrupt at each of them would wake nobody.
#[test]
fn events_that_no_host_waits_for_do_not_wake_it() {
    child("rules::events_that_no_host_waits_for_do_not_wake_it", TWO, || {
        let spun = || calls("cuEventSynchronize, spinning");
        let blocking = || calls("cuEventCreate, blocking");
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 2);
            let mut buf = up(&stream, values(comm.rank(), 3000));
            for _ in 0..10 {
                buf = soon(comm.all_reduce(buf)).unwrap();
                let joined = comm.all_reduce(buf).join(&stream).unwrap();
                buf = joined.in_order().unwrap();
            }
            down(buf);
            soon(comm.close()).unwrap();
        });
        assert_eq!((blocking(), spun()), (0, 0), "streams wait, and futures hear of it by a call");
        let (_device, stream) = device();
        for _ in 0..3 {
            drop(DeviceBuf::<u32>::zeroed(&stream, 1000).unwrap());
            stream.record().unwrap().wait().unwrap();
        }
        assert_eq!((blocking(), spun()), (1, 0), "a host that waits sleeps, and the event is used again");
    });
}

#[test]
fn where_memory_is_tight_the_host_sleeps() {
    child("rules::where_memory_is_tight_the_host_sleeps", TIGHT, || {
        let (device, stream) = device();
        for _ in 0..5 {
            for _ in 0..3 {
                drop(DeviceBuf::<u32>::zeroed(&stream, 75_000).unwrap());
                let other = DeviceStream::new(&device).unwrap();
                drop(DeviceBuf::<u32>::zeroed(&other, 75_000).unwrap());
            }
            drop(DeviceBuf::<u32>::zeroed(&stream, 200_000).unwrap());
        }
        assert_eq!(calls("cuEventSynchronize, spinning"), 0);
    });
}

/// A join takes no longer when its stream already waits for many operations that peers have not called than when it waits for one.
#[test]
fn a_join_asks_for_nothing_that_earlier_ones_wait_for() {
    child("rules::a_join_asks_for_nothing_that_earlier_ones_wait_for", &[], || {
        const JOINS: usize = 100;
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            let mut buf = up(&stream, vec![1.0_f32; 10]);
            soon(comm.barrier()).unwrap();
            if comm.rank() == 1 {
                std::thread::sleep(std::time::Duration::from_millis(300));
            }
            let (before, start) = (calls("cuEventQuery"), Instant::now());
            for _ in 0..JOINS {
                buf = comm.all_reduce(buf).join(&stream).unwrap().in_order().unwrap();
            }
            if comm.rank() == 0 {
                let asked = calls("cuEventQuery") - before;
                println!("{JOINS} joins: {asked} queries, {:.1?}", start.elapsed());
                assert!(asked < 20 * JOINS as u64, "{asked} queries");
            }
            stream.synchronize().unwrap();
            soon(comm.close()).unwrap();
        });
        nothing_left("all was dropped");
    });
}

/// An `f16` cannot hold the sum of three of the largest numbers, but it can hold their mean, whatever is stored on the way.
#[test]
fn averages_of_f16_do_not_overflow_on_devices() {
    child("rules::averages_of_f16_do_not_overflow_on_devices", TWO, || {
        const LEN: usize = 3001;
        ranks(3, |mut comm| {
            let stream = bound(&mut comm, 2);
            for algo in [Algo::Ring, Algo::RecursiveDoubling, Algo::HalvingDoubling, Algo::Direct] {
                let of = |values: [f32; 3]| vec![f16::from_f32(values[comm.rank()]); LEN];
                let (large, small) = (up(&stream, of([65504.0; 3])), up(&stream, of([3.0, 6.0, 12.0])));
                let (input, output) = (up(&stream, of([65504.0; 3])), up(&stream, vec![f16::ONE; LEN]));
                let large = down(soon(comm.algo(algo).op(ReduceOp::Avg).all_reduce(large)).unwrap());
                assert!(large.iter().all(|x| x.to_f32() > 65000.0 && x.is_finite()), "{algo}: {}", large[0]);
                let small = down(soon(comm.algo(algo).op(ReduceOp::Avg).all_reduce(small)).unwrap());
                assert!(small == vec![f16::from_f32(7.0); LEN], "{algo}: {}", small[0]);
                let call = comm.algo(algo).op(ReduceOp::Avg).all_reduce_into(input, output);
                let (input, output) = soon(call).unwrap();
                assert!(down(output) == large && down(input) == vec![f16::MAX; LEN], "{algo}");
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}
