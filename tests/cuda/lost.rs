//! Devices that are lost while collectives are under way: all ranks get an error that says whose device it is, what the driver answered, and
//! what to do, long before any deadline. Nobody gets memory that the device may still touch.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::testing::fold_between_processes_from;
use allstream::{Algo, Comm, Error, Failed};

use crate::ipc::processes;
use crate::nccl::with_nccl;
use crate::support::{child, down, full, function, is_child, is_ours, pass, ranks, report, soon, up, values};

const LEN: usize = 3000;
/// Time limit of operations.
const DEADLINE: Duration = Duration::from_secs(15);
/// All ranks have got their errors by then.
const SOON: Duration = Duration::from_secs(5);
/// Driver codes of a device that is lost, and a part of the advice in the error.
const CODES: [(u32, &str); 5] = [
    (46, "compute mode"),
    (719, "compute-sanitizer"),
    (214, "reset the device"),
    (700, "compute-sanitizer"),
    (999, "Xid"),
];

/// A device of this process answers everything with this code from now on.
fn lose(device: usize, code: u32) {
    // SAFETY: the test driver's `device.rs` declares the function with this type.
    let fail: extern "C" fn(i32, u32) -> u32 =
        unsafe { std::mem::transmute(function("allstream_test_cuda_break")) };
    assert_eq!(fail(device as i32, code), 0);
}

/// When the device is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// With operations on it that wait for an input.
    Held,
    /// The same, and streams have been joined with one of them.
    Joined,
    /// With operations that run.
    Running,
    /// Before the calls of its rank.
    Before,
}

/// Checks that an error says which rank's device is lost, which device, what the driver answered, and what to do.
fn says_it(error: &Error, rank: usize, device: usize, (code, advice): (u32, &str)) {
    let text = error.to_string();
    for part in
        [&format!("rank {rank}: "), &format!("on CUDA device {device}: cu"), &format!(" ({code}): "), advice]
    {
        assert!(text.contains(part), "{part:?} in: {text}");
    }
    assert!(error.record().is_some(), "it says where the flight recorder is: {text}");
}

/// Ranks 0 and 2 are on the device `kept`, rank 1 is on `lost`, which is lost.
fn ranks_lose(when: When, [kept, lost]: [usize; 2], why: (u32, &str), all_held: &Barrier) {
    let all = Barrier::new(3);
    let holds = matches!(when, When::Held | When::Joined);
    ranks(3, |mut comm| {
        let rank = comm.rank();
        let device = Device::new([kept, lost][rank % 2]).unwrap();
        assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
        let [stream, late] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
        drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
        let bufs = [(); 3].map(|()| up(&stream, values(rank, LEN)));
        let pinned = PinnedBuf::from_slice(&device, &[1u32]).unwrap();
        if all_held.wait().is_leader() {
            pass(true, 0);
        }
        if when == When::Before && all.wait().is_leader() {
            lose(lost, why.0);
        }
        all_held.wait();
        let start = Instant::now();
        let input = holds.then(|| DeviceBuf::from_host(&late, pinned));
        let mut works = Vec::new();
        for (algo, buf) in [Algo::Auto, Algo::Ring, Algo::Direct].into_iter().zip(bufs) {
            let call = comm.timeout(DEADLINE).algo(algo);
            works.push(if holds { call.on(&late) } else { call }.all_reduce(buf));
        }
        let joined = (when == When::Joined).then(|| works.pop().unwrap().join(&stream).unwrap());
        if when != When::Before && all.wait().is_leader() {
            lose(lost, why.0);
        }
        let mut came_back = Vec::new();
        let mut told = |failed: Failed<_>| {
            assert!(start.elapsed() < SOON, "{when:?}, rank {rank}: told after {:?}", start.elapsed());
            says_it(&failed.error, 1, lost, why);
            came_back.push(failed.buf);
        };
        for work in works {
            match soon(work) {
                Ok(_) => assert_eq!(when, When::Running, "rank {rank}"),
                Err(failed) => told(failed),
            }
        }
        if let Some(joined) = joined {
            told(soon(joined).unwrap_err());
        }
        // What comes later is refused with the cause.
        let Failed { error, buf } = soon(comm.all_reduce(vec![1.0_f32; 3])).unwrap_err();
        says_it(&error, 1, lost, why);
        assert_eq!(buf.unwrap(), [1.0; 3]);
        assert!(start.elapsed() < SOON, "{when:?}, rank {rank}: {:?}", start.elapsed());
        if when == When::Before && rank == 1 {
            assert!(came_back.iter().all(Option::is_some), "nothing of it is on a device");
        }
        soon(comm.close()).unwrap();
        if all_held.wait().is_leader() {
            pass(true, u64::MAX);
        }
        drop(input.map(soon));
        if rank != 1 {
            came_back.into_iter().flatten().for_each(is_ours);
            // No stream of the device that is kept waits for ever.
            stream.synchronize().unwrap();
        }
    });
}

/// Four communicators at a time, each with a device of its own that is lost.
#[test]
fn all_ranks_are_told_whose_device_is_lost() {
    let test = "lost::all_ranks_are_told_whose_device_is_lost";
    for turn in 0..if full() { CODES.len() } else { 1 } {
        let variables = [
            ("ALLSTREAM_TEST_CUDA_DEVICES", "8".to_owned()),
            ("ALLSTREAM_TEST_CUDA_DELAY_US", "300".to_owned()),
            ("ALLSTREAM_TEST_TURN", turn.to_string()),
        ];
        let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
        child(test, &variables, || {
            let turn: usize = std::env::var("ALLSTREAM_TEST_TURN").unwrap().parse().unwrap();
            let all_held = Barrier::new(12);
            std::thread::scope(|scope| {
                let all = [When::Running, When::Held, When::Before, When::Joined].into_iter().enumerate();
                for (which, when) in all {
                    let (all_held, why) = (&all_held, CODES[(turn + which) % CODES.len()]);
                    scope.spawn(move || ranks_lose(when, [2 * which, 2 * which + 1], why, all_held));
                }
            });
            assert_eq!(report().freed_in_use, 0);
        });
        if is_child() {
            return;
        }
    }
}

/// The same for staged operations: a copy does not end.
#[test]
fn a_device_that_is_lost_under_a_copy_of_a_staged_operation_is_named() {
    let test = "lost::a_device_that_is_lost_under_a_copy_of_a_staged_operation_is_named";
    child(test, &[("ALLSTREAM_TEST_CUDA_DEVICES", "3")], || {
        for (lost, when) in [(1, When::Held), (2, When::Before)] {
            let (all, why) = (Barrier::new(2), CODES[lost]);
            ranks(2, |mut comm| {
                let rank = comm.rank();
                let device = Device::new(if rank == 1 { lost } else { 0 }).unwrap();
                let stream = DeviceStream::new(&device).unwrap();
                let buf = up(&stream, values(rank, LEN));
                if rank == 1 && when == When::Held {
                    pass(false, 0);
                }
                if rank == 1 && when == When::Before {
                    lose(lost, why.0);
                }
                all.wait();
                let start = Instant::now();
                let work = comm.timeout(DEADLINE).all_reduce(buf);
                if rank == 1 && when == When::Held {
                    lose(lost, why.0);
                }
                let Failed { error, buf } = soon(work).unwrap_err();
                says_it(&error, 1, lost, why);
                assert!(start.elapsed() < SOON, "rank {rank}: {:?}", start.elapsed());
                pass(false, u64::MAX);
                if rank == 0 {
                    is_ours(buf.unwrap());
                }
            });
        }
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn another_process_is_told_whose_device_is_lost() {
    let test = "lost::another_process_is_told_whose_device_is_lost";
    if let Some(held) = processes(test, &[&[0], &[1]], &[], is_lost_between_processes) {
        held.end_well(test);
    }
}

/// The same for an operation that all ranks are to fold at once: it waits for all inputs before any of its work is on a stream.
#[test]
fn another_process_is_told_whose_device_is_lost_before_a_fold() {
    let test = "lost::another_process_is_told_whose_device_is_lost_before_a_fold";
    let held = processes(test, &[&[0], &[1]], &[], |comm| {
        fold_between_processes_from(0);
        is_lost_between_processes(comm);
    });
    if let Some(held) = held {
        held.end_well(test);
    }
}

fn is_lost_between_processes(mut comm: Comm) {
    let rank = comm.rank();
    let device = Device::new(rank).unwrap();
    assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
    let mut other = soon(comm.dup()).unwrap();
    let [stream, late] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
    drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
    let buf = up(&stream, values(rank, LEN));
    let pinned = PinnedBuf::from_slice(&device, &[1u32]).unwrap();
    pass(true, 0);
    let input = DeviceBuf::from_host(&late, pinned);
    let start = Instant::now();
    let work = comm.timeout(DEADLINE).on(&late).all_reduce(buf);
    soon(other.barrier()).unwrap();
    if rank == 1 {
        lose(1, CODES[1].0);
    }
    let Failed { error, buf } = soon(work).unwrap_err();
    says_it(&error, 1, 1, CODES[1]);
    assert!(start.elapsed() < SOON, "rank {rank}: {:?}", start.elapsed());
    pass(true, u64::MAX);
    drop(soon(input));
    if rank == 0 {
        buf.into_iter().for_each(is_ours);
        stream.synchronize().unwrap();
    }
    drop((comm, other));
    assert_eq!(report().freed_in_use, 0);
}

#[test]
fn a_device_that_is_lost_under_nccl_is_named() {
    with_nccl("lost::a_device_that_is_lost_under_nccl_is_named", 4, &[], || {
        for (turn, when) in [When::Held, When::Before].into_iter().enumerate() {
            let (all, lost, why) = (Barrier::new(2), 2 * turn + 1, CODES[turn]);
            ranks(2, |mut comm| {
                let rank = comm.rank();
                let device = Device::new(2 * turn + rank).unwrap();
                assert!(matches!(soon(comm.bind_nccl(&device)).unwrap(), DevicePath::Nccl { .. }));
                let [stream, late] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
                drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
                let buf = up(&stream, values(rank, LEN));
                let pinned = PinnedBuf::from_slice(&device, &[1u32]).unwrap();
                if all.wait().is_leader() {
                    pass(true, 0);
                    if when == When::Before {
                        lose(lost, why.0);
                    }
                }
                all.wait();
                let start = Instant::now();
                let input = DeviceBuf::from_host(&late, pinned);
                let work = comm.timeout(DEADLINE).on(&late).all_reduce(buf);
                if all.wait().is_leader() && when == When::Held {
                    lose(lost, why.0);
                }
                let Failed { error, .. } = soon(work).unwrap_err();
                says_it(&error, 1, lost, why);
                assert!(start.elapsed() < SOON, "rank {rank}: {:?}", start.elapsed());
                all.wait();
                pass(true, u64::MAX);
                drop(soon(input));
                // Dropping these may wait for the device.
                std::mem::forget((comm, stream));
            });
        }
        assert_eq!(report().freed_in_use, 0);
        std::process::exit(0);
    });
}
