//! Ranks of one process that share a device: the last one to call an all_reduce launches it for all. The results, and what happens on the other ranks
//! when the last one does not launch.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::testing::{Wait, take_away};
use allstream::{Algo, Comm, Error, Failed, ReduceOp, Work};

use crate::support::{
    bound, calls, child, down, fail, function, is_child, is_ours, nothing_left, pass, ranks, report,
    set_delays, soon, until, up, values,
};
use crate::values::mix;

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
/// Each stream has a hardware queue of its own, so no join waits on the host because its stream might hold up another.
const APART: &[(&str, &str)] = &[("CUDA_DEVICE_MAX_CONNECTIONS", "64")];
/// Time limit of operations that are to end long before.
const LIMIT: Duration = Duration::from_secs(15);
/// A failure is reported by then.
const SOON: Duration = Duration::from_secs(5);
const LAUNCH: &str = "cuLaunchKernel";

fn all_is_gone(what: &str) {
    nothing_left(what);
    assert_eq!(report().freed_in_use, 0, "{what}");
}

fn sums(n: usize, len: usize) -> Vec<f32> {
    let all: Vec<_> = (0..n).map(|rank| values(rank, len)).collect();
    (0..len).map(|i| all.iter().map(|values| values[i]).sum()).collect()
}

/// All operations are called in a row, without a wait for the device between them. Some have fewer elements than there are ranks, and one has none.
/// Others are out of place, or averages, or some ranks scale their input first.
#[test]
fn eight_ranks_get_the_sums_of_all_lengths() {
    child("one_launch::eight_ranks_get_the_sums_of_all_lengths", SLOW, || {
        const N: usize = 8;
        for seed in 0..3 {
            set_delays(300, seed);
            let (all, before) = (Barrier::new(N), calls(LAUNCH));
            let lens = [1000, 3, 0, 70_001, 8, 1, 4096, 13];
            ranks(N, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
                let into = |len| DeviceBuf::<f32>::zeroed(&stream, len).unwrap();
                let bufs = lens.map(|len| (up(&stream, values(rank, len)), into(len)));
                all.wait();
                let works: Vec<Work<_, _>> = bufs
                    .into_iter()
                    .map(|(buf, into)| comm.algo(Algo::Direct).all_reduce_into(buf, into))
                    .collect();
                for (work, len) in works.into_iter().zip(lens) {
                    let (buf, sum) = soon(work).unwrap();
                    assert!(down(buf) == values(rank, len), "the input is as it was, of {len}");
                    assert!(down(sum) == sums(N, len), "{len} elements, seed {seed}");
                }
                all.wait();
                let launches = calls(LAUNCH) - before;
                assert_eq!(launches, lens.iter().filter(|len| **len > 0).count() as u64, "one for all ranks");
                all.wait();
                // Every other rank doubles what it has, on its own stream.
                let call = if rank % 2 == 0 { comm.scale(2.0) } else { comm.call() };
                let buf = soon(call.all_reduce(up(&stream, vec![rank as f32; 500]))).unwrap();
                assert_eq!(down(buf), [40.0; 500], "0, 1, 4, 3, 8, 5, 12, and 7");
                let scaled = comm.scale(0.5).all_reduce_into(up(&stream, vec![2.0_f32; 77]), into(77));
                let (buf, sum) = soon(scaled).unwrap();
                assert_eq!((down(buf), down(sum)), (vec![2.0; 77], vec![8.0; 77]));
                let mean = comm.op(ReduceOp::Avg).all_reduce(up(&stream, vec![rank as f32; 9]));
                assert_eq!(down(soon(mean).unwrap()), [3.5; 9]);
                let most = comm.op(ReduceOp::Max).all_reduce(up(&stream, vec![rank as i32; 9]));
                assert_eq!(down(soon(most).unwrap()), [7; 9]);
                soon(comm.close()).unwrap();
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// Every rank is the last to call once. By then the streams of all others wait for an operation that nobody has launched.
#[test]
fn streams_that_were_joined_early_go_on_with_the_last_ranks_launch() {
    child("one_launch::streams_that_were_joined_early_go_on_with_the_last_ranks_launch", APART, || {
        const N: usize = 4;
        let joined = AtomicUsize::new(0);
        ranks(N, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
            let mut grads = soon(comm.all_reduce(up(&stream, values(rank, 700)))).unwrap();
            for last in 0..N {
                if rank == last {
                    until("the others have joined", || {
                        joined.load(Ordering::SeqCst) == (last + 1) * (N - 1) + last
                    });
                    // The join before may return before its own launch is on the stream.
                    assert!(calls(LAUNCH) <= last as u64 + 1, "nobody has launched it");
                }
                let ordered = comm.timeout(LIMIT).on(&stream).all_reduce(grads).join(&stream).unwrap();
                joined.fetch_add(1, Ordering::SeqCst);
                grads = ordered.in_order().unwrap();
                until("the last one has joined", || joined.load(Ordering::SeqCst) >= (last + 1) * N);
            }
            let times = N.pow(N as u32) as f32;
            assert!(down(grads) == sums(N, 700).iter().map(|x| x * times).collect::<Vec<_>>());
            assert_eq!(calls(LAUNCH), N as u64 + 1, "one for each operation");
            soon(comm.close()).unwrap();
        });
        all_is_gone("all ranks have ended");
    });
}

/// Operations by steps run on each rank's own stream, and those of one launch on rank 0's. Each must see the result of the one before.
#[test]
fn operations_by_steps_follow_those_of_one_launch_in_order() {
    child("one_launch::operations_by_steps_follow_those_of_one_launch_in_order", SLOW, || {
        for seed in 0..6 {
            set_delays(800, seed);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
                let (mut grads, mut right) = (up(&stream, values(rank, 900)), sums(3, 900));
                right.iter_mut().for_each(|x| *x *= 3_f32.powi(7));
                for i in 0..8 {
                    let algo = [Algo::Direct, Algo::Ring, Algo::OneShot, Algo::HalvingDoubling][i % 4];
                    // Other operations beside it, on buffers that nobody waits for.
                    drop(comm.algo(algo).all_reduce(up(&stream, values(rank, 50))));
                    let work = comm.timeout(LIMIT).algo(algo).on(&stream).all_reduce(grads);
                    grads = match mix(&[seed, i as u64]).is_multiple_of(3) {
                        true => soon(work).unwrap(),
                        false => work.join(&stream).unwrap().in_order().unwrap(),
                    };
                    drop(comm.broadcast(up(&stream, values(rank, 60)), i % 3));
                }
                assert!(down(grads) == right, "seed {seed}");
                soon(comm.close()).unwrap();
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// Rank 0 alone, or every rank, is bound to a stream of its caller, on which other work may be.
#[test]
fn ranks_may_be_bound_to_streams_of_their_callers() {
    child("one_launch::ranks_may_be_bound_to_streams_of_their_callers", SLOW, || {
        for all_are in [false, true] {
            ranks(3, |mut comm| {
                let (rank, device) = (comm.rank(), Device::new(0).unwrap());
                let stream = DeviceStream::new(&device).unwrap();
                let path = match rank == 0 || all_are {
                    true => soon(comm.bind_stream(&stream)),
                    false => soon(comm.bind_device(&device)),
                };
                assert_eq!(path.unwrap(), DevicePath::Peer);
                let (mut grads, right) = (up(&stream, values(rank, 600)), sums(3, 600));
                for i in 0..6 {
                    let work = comm.timeout(LIMIT).all_reduce(grads);
                    grads = match i % 2 {
                        0 => soon(work).unwrap(),
                        _ => work.join(&stream).unwrap().in_order().unwrap(),
                    };
                }
                assert!(down(grads) == right.iter().map(|x| x * 243.0).collect::<Vec<_>>());
                soon(comm.close()).unwrap();
            });
        }
        all_is_gone("all ranks have ended");
    });
}

/// Two communicators whose ranks call in opposite orders: neither launch waits for the other.
#[test]
fn communicators_on_one_device_may_be_used_in_opposite_orders() {
    child("one_launch::communicators_on_one_device_may_be_used_in_opposite_orders", SLOW, || {
        ranks(2, |mut one| {
            let mut other = soon(one.dup()).unwrap();
            let (rank, streams) = (one.rank(), [bound(&mut one, 1), bound(&mut other, 1)]);
            for round in 0..10 {
                let input = |k: usize| up(&streams[k], vec![(round + 1 + k) as u32; 300]);
                let (first, second) = match rank {
                    0 => (one.timeout(LIMIT).all_reduce(input(0)), other.timeout(LIMIT).all_reduce(input(1))),
                    _ => {
                        let second = other.timeout(LIMIT).all_reduce(input(1));
                        (one.timeout(LIMIT).all_reduce(input(0)), second)
                    }
                };
                assert_eq!(down(soon(first).unwrap()), vec![2 * (round + 1) as u32; 300]);
                assert_eq!(down(soon(second).unwrap()), vec![2 * (round + 2) as u32; 300]);
            }
        });
        all_is_gone("both ranks have ended");
    });
}

/// What the last rank does instead of its call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Last {
    Aborts,
    Goes,
    NeverCalls,
    CallsAnother,
    /// It calls, and the driver refuses the launch.
    CannotLaunch,
}

/// All other ranks have called, one of them has joined its stream, and nothing is launched. Checks how the operation ends.
fn end_before_the_launch(last: Last) {
    const N: usize = 4;
    const LEN: usize = 500;
    let arrived = Barrier::new(N);
    let timeout = if last == Last::NeverCalls { Duration::from_millis(300) } else { LIMIT };
    ranks(N, |mut comm| {
        let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
        let buf = up(&stream, values(rank, LEN));
        let before = calls(LAUNCH);
        arrived.wait();
        if rank == N - 1 {
            arrived.wait();
            if last == Last::CannotLaunch {
                fail(Some(LAUNCH), 1, 701);
            }
            match last {
                Last::Aborts => comm.abort("a test"),
                Last::Goes => return,
                Last::NeverCalls => until("the others have given up", || comm.check().is_err()),
                Last::CallsAnother => {
                    let Failed { error, .. } =
                        soon(comm.all_reduce(up(&stream, values(rank, LEN + 1)))).unwrap_err();
                    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                }
                Last::CannotLaunch => {
                    let Failed { error, buf } = soon(comm.all_reduce(buf)).unwrap_err();
                    assert!(error.to_string().contains("(701)"), "{error}");
                    assert_eq!(down(buf.unwrap()), values(rank, LEN));
                }
            }
            return;
        }
        let work = comm.timeout(timeout).all_reduce(buf);
        let (mut work, mut joined) = (Some(work), None);
        if rank == 1 {
            joined = work.take().map(|work| work.join(&stream).unwrap());
        }
        arrived.wait();
        let start = Instant::now();
        let failed = match (work, joined) {
            (Some(work), _) => soon(work).unwrap_err(),
            (_, Some(joined)) => soon(joined).unwrap_err(),
            _ => unreachable!(),
        };
        let (text, buf) = (failed.error.to_string(), failed.buf);
        assert!(start.elapsed() < SOON, "{last:?}: {:?}", start.elapsed());
        match last {
            Last::Aborts => assert!(matches!(failed.error, Error::Aborted { by: 3, .. }), "{text}"),
            Last::Goes => assert!(matches!(failed.error, Error::PeerLost { rank: 3, .. }), "{text}"),
            Last::NeverCalls => {
                let names = |missing: &[allstream::Missing]| missing.iter().all(|missing| missing.rank == 3);
                assert!(matches!(&failed.error, Error::Timeout { missing, .. } if names(missing)), "{text}");
            }
            Last::CallsAnother => assert!(text.contains("500") && text.contains("501"), "{text}"),
            Last::CannotLaunch => assert!(text.contains("rank 3") && text.contains("(701)"), "{text}"),
        }
        let buf = buf.unwrap_or_else(|| panic!("{last:?}: no buffer: {text}"));
        if last != Last::CannotLaunch {
            assert_eq!(calls(LAUNCH), before, "{last:?}: nobody has launched it");
        }
        is_ours(buf);
        // Nothing waits for ever.
        stream.synchronize().unwrap();
    });
    fail(None, 0, 0);
    all_is_gone(&format!("{last:?}"));
}

#[test]
fn law_4_what_the_last_rank_does_instead_ends_the_operation_on_all() {
    child("one_launch::law_4_what_the_last_rank_does_instead_ends_the_operation_on_all", APART, || {
        for last in [Last::Aborts, Last::Goes, Last::NeverCalls, Last::CallsAnother, Last::CannotLaunch] {
            end_before_the_launch(last);
        }
    });
}

/// An abort at any time around the last call: whoever has its buffer back is the only one to use it.
#[test]
fn law_4_an_abort_beside_the_last_call_gives_buffers_back_in_order() {
    child("one_launch::law_4_an_abort_beside_the_last_call_gives_buffers_back_in_order", SLOW, || {
        for seed in 0..24_u64 {
            set_delays(1500, seed);
            let begin = Barrier::new(3);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
                let bufs = [(); 3].map(|()| up(&stream, values(rank, 2000)));
                begin.wait();
                if rank == 2 {
                    let until = Instant::now() + Duration::from_micros(20 * (mix(&[seed]) % 40));
                    while Instant::now() < until {
                        std::hint::spin_loop();
                    }
                }
                let works = bufs.map(|buf| comm.all_reduce(buf));
                if rank as u64 == seed % 3 {
                    comm.abort("a test");
                }
                for work in works {
                    match soon(work) {
                        Ok(buf) => is_ours(buf),
                        Err(Failed { buf, error }) => {
                            assert!(matches!(error, Error::Aborted { .. }), "{error}");
                            is_ours(buf.unwrap());
                        }
                    }
                }
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// The device is lost when all ranks but the last have called, or when all have called and rank 0's input is late.
#[test]
fn a_device_that_is_lost_before_or_behind_the_launch_ends_it_on_all() {
    child("one_launch::a_device_that_is_lost_before_or_behind_the_launch_ends_it_on_all", SLOW, || {
        for (device, is_launched) in [(0, false), (1, true)] {
            let all = Barrier::new(3);
            ranks(3, |mut comm| {
                let (rank, device) = (comm.rank(), Device::new(device).unwrap());
                assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
                let [stream, late] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
                drop(down(soon(comm.all_reduce(up(&stream, values(rank, 300)))).unwrap()));
                let buf = up(&stream, values(rank, 300));
                let pinned = PinnedBuf::from_slice(&device, &[1_u32]).unwrap();
                if all.wait().is_leader() {
                    pass(true, 0);
                }
                all.wait();
                let input = (rank == 0).then(|| DeviceBuf::from_host(&late, pinned));
                let early = (rank < 2 || is_launched).then_some(());
                let (mut work, mut buf) = (None, Some(buf));
                if early.is_some() {
                    let call = comm.timeout(LIMIT);
                    let call = if rank == 0 { call.on(&late) } else { call };
                    work = buf.take().map(|buf| call.all_reduce(buf));
                }
                if is_launched {
                    until("it is launched", || work.as_ref().is_some_and(Work::is_enqueued));
                }
                if all.wait().is_leader() {
                    // SAFETY: the test driver's `device.rs` declares the function with this type.
                    let lose: extern "C" fn(i32, u32) -> u32 =
                        unsafe { std::mem::transmute(function("allstream_test_cuda_break")) };
                    assert_eq!(lose(i32::from(is_launched), 719), 0);
                }
                all.wait();
                let start = Instant::now();
                let work = work.or_else(|| buf.take().map(|buf| comm.timeout(LIMIT).all_reduce(buf)));
                let error = soon(work.unwrap()).map(drop).unwrap_err().error;
                let text = error.to_string();
                assert!(text.contains("(719)") && text.contains("compute-sanitizer"), "rank {rank}: {text}");
                assert!(start.elapsed() < SOON, "rank {rank}: told after {:?}", start.elapsed());
                all.wait();
                pass(true, u64::MAX);
                drop(input.map(soon));
            });
            assert_eq!(report().freed_in_use, 0);
        }
    });
}

/// A name, the wait of the launch that is taken away, and the rank whose input is late. Without that wait, the operation ends too early.
const WAITS: [(&str, Option<Wait>, usize); 4] = [
    ("none", None, 0),
    ("none", None, 1),
    ("the last rank's", Some(Wait::After), 1),
    ("another's", Some(Wait::Ready), 0),
];

#[test]
fn the_launch_waits_for_the_inputs_of_all_ranks() {
    const CASE: &str = "ALLSTREAM_TEST_WAIT";
    let test = "one_launch::the_launch_waits_for_the_inputs_of_all_ranks";
    for case in 0..WAITS.len() {
        let case = case.to_string();
        child(test, &[(CASE, &*case), APART[0]], || {
            let case: usize = std::env::var(CASE).unwrap().parse().unwrap();
            let (which, wait, late) = WAITS[case];
            let [called, looked] = [(); 2].map(|()| Barrier::new(2));
            ranks(2, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
                let buf = up(&stream, values(rank, 400));
                let other = DeviceStream::new(&stream.device()).unwrap();
                let pinned = PinnedBuf::from_slice(&stream.device(), &[1_u32]).unwrap();
                if called.wait().is_leader() {
                    pass(true, 0);
                    take_away(wait);
                }
                called.wait();
                let input = (rank == late).then(|| DeviceBuf::from_host(&other, pinned));
                let call = |comm: &mut Comm, buf| match rank == late {
                    true => comm.on(&other).all_reduce(buf),
                    false => comm.all_reduce(buf),
                };
                let work = match rank {
                    0 => {
                        let work = call(&mut comm, buf);
                        called.wait();
                        work
                    }
                    _ => {
                        called.wait();
                        call(&mut comm, buf)
                    }
                };
                until("it is launched", || work.is_enqueued());
                if wait.is_none() {
                    // Long enough for a device that has nothing to wait for.
                    std::thread::sleep(Duration::from_millis(100));
                    assert!(!work.is_finished(), "it ended before rank {late}'s input was there");
                } else {
                    until(&format!("without {which} wait it ends too early"), || work.is_finished());
                }
                looked.wait();
                take_away(None);
                pass(true, u64::MAX);
                drop(input.map(soon));
                drop(soon(work));
            });
        });
        if is_child() {
            return;
        }
    }
}
