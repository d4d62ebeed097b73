//! Memory that runs out while other operations are under way: all ranks get an error, or one call is refused; the others go on.

use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use allstream::cuda::{DeviceBuf, DeviceStream, PinnedBuf};
use allstream::{Algo, Comm, Failed, ReduceOp};

use crate::ipc::processes;
use crate::support::{
    bound, child, device, down, fail, is_ours, nothing_left, pass, ranks, report, soon, up, values,
};

const LEN: usize = 30_000;
const DEADLINE: Duration = Duration::from_secs(15);
const SOON: Duration = Duration::from_secs(5);
const OUT_OF_MEMORY: u32 = 2;
/// An algorithm that needs memory for the other rank's data beside its own.
const ALGO: Algo = Algo::RecursiveDoubling;
/// So many hardware queues that a stream which waits for its input holds up no other.
const APART: (&str, &str) = ("ALLSTREAM_TEST_CUDA_QUEUES", "32");

fn sums(len: usize) -> Vec<f32> {
    values(0, len).iter().zip(values(1, len)).map(|(a, b)| a + b).collect()
}

/// Two ranks have an operation under way that waits for an input. Then they call one on another communicator, for which rank 1 cannot get all it needs:
/// `break_it` sees to that. Both ranks get the error and their buffers back; the first operation goes on.
fn runs_out(break_it: impl Fn(&DeviceStream) -> Vec<DeviceBuf<u8>> + Sync, parts: &[&str]) {
    let all = Barrier::new(2);
    ranks(2, |mut comm| {
        // (The call that fails uses `Max`, whose kernel is not loaded yet: the operations before it load the kernel for sums.)
        let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
        let mut other = soon(comm.dup()).unwrap();
        bound(&mut other, 2);
        let late = DeviceStream::new(&stream.device()).unwrap();
        let apart = DeviceStream::new(&stream.device()).unwrap();
        let [first, second] = [&stream, &apart].map(|stream| up(stream, values(rank, LEN)));
        drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
        let pinned = PinnedBuf::from_slice(&stream.device(), &[1u32]).unwrap();
        if all.wait().is_leader() {
            pass(true, 0);
        }
        all.wait();
        let input = DeviceBuf::from_host(&late, pinned);
        let goes_on = comm.timeout(DEADLINE).on(&late).all_reduce(first);
        let mut most = Vec::new();
        if rank == 1 {
            most = break_it(&stream);
        } else {
            all.wait();
        }
        let start = Instant::now();
        let work = other.timeout(DEADLINE).algo(ALGO).op(ReduceOp::Max).all_reduce(second);
        if rank == 1 {
            fail(None, 0, 0);
            all.wait();
        }
        let Failed { error, buf } = soon(work).unwrap_err();
        let text = error.to_string();
        for part in parts.iter().chain(&[
            "rank 1 (world rank 1): ",
            "CUDA device 1",
            "CUDA_ERROR_OUT_OF_MEMORY (2)",
            "Device::trim",
        ]) {
            assert!(text.contains(part), "{part:?} in: {text}");
        }
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        all.wait();
        pass(true, u64::MAX);
        is_ours(buf.unwrap());
        assert!(down(soon(goes_on).unwrap()) == sums(LEN), "the other operation goes on");
        drop((soon(input).unwrap(), most));
        // The communicator goes on, too.
        let mut third = soon(comm.dup()).unwrap();
        bound(&mut third, 2);
        let sum = soon(third.algo(ALGO).all_reduce(up(&stream, values(rank, LEN)))).unwrap();
        assert!(down(sum) == sums(LEN));
        soon(third.close()).unwrap();
        soon(comm.close()).unwrap();
    });
    nothing_left("all ranks have ended");
    assert_eq!(report().freed_in_use, 0);
}

#[test]
fn device_memory_that_runs_out_is_told_to_all_ranks() {
    let limit = [("ALLSTREAM_TEST_CUDA_MEMORY", "66M"), APART];
    child("exhausted::device_memory_that_runs_out_is_told_to_all_ranks", &limit, || {
        let take_all = |stream: &DeviceStream| {
            let sizes = (12..=26).rev().map(|bits| 1 << bits);
            let all =
                sizes.map(|bytes| std::iter::from_fn(move || DeviceBuf::<u8>::zeroed(stream, bytes).ok()));
            all.flatten().collect()
        };
        runs_out(take_all, &["get ", " bytes of memory"]);
    });
}

#[test]
fn no_memory_for_a_kernel_is_told_to_all_ranks() {
    child("exhausted::no_memory_for_a_kernel_is_told_to_all_ranks", &[APART], || {
        let no_kernels = |_: &DeviceStream| {
            (1..=4).for_each(|nth| fail(Some("cuModuleGetFunction"), nth, OUT_OF_MEMORY));
            Vec::new()
        };
        runs_out(no_kernels, &["load", "cuModuleGetFunction"]);
    });
}

/// One rank's call is refused. It calls again when there is pinned memory, and the other rank waits meanwhile.
#[test]
fn pinned_memory_that_runs_out_is_a_refusal() {
    child("exhausted::pinned_memory_that_runs_out_is_a_refusal", &[], || {
        let all = Barrier::new(2);
        ranks(2, |mut comm: Comm| {
            let (rank, (_device, stream)) = (comm.rank(), device());
            // Longer than any pinned memory that is kept for later operations.
            let mut buf = DeviceBuf::<f32>::zeroed(&stream, 10 * LEN).unwrap();
            if rank == 1 {
                all.wait();
                (1..=3).for_each(|nth| fail(Some("cuMemHostAlloc"), nth, OUT_OF_MEMORY));
                let Failed { error, buf: back } = soon(comm.timeout(DEADLINE).all_reduce(buf)).unwrap_err();
                fail(None, 0, 0);
                let text = error.to_string();
                assert!(text.contains("pin ") && text.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{text}");
                assert!(text.contains("raise its limit of locked memory"), "{text}");
                assert!(comm.check().is_ok());
                buf = back.unwrap();
            }
            let work = comm.timeout(DEADLINE).all_reduce(buf);
            if rank == 0 {
                all.wait();
            }
            assert!(down(soon(work).unwrap()) == vec![0.0; 10 * LEN]);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// A memory block of another process cannot be opened. It is first needed in the middle of an operation.
#[test]
fn no_room_for_another_process_s_memory_is_told_to_both() {
    let test = "exhausted::no_room_for_another_process_s_memory_is_told_to_both";
    let held = processes(test, &[&[0], &[1]], &[], |mut comm| {
        let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
        drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
        // There is little room left in the block that both know, so the next buffer is in another.
        let most: Vec<_> = (0..70).map(|_| DeviceBuf::<u8>::zeroed(&stream, 1 << 20).unwrap()).collect();
        let buf = DeviceBuf::<f32>::zeroed(&stream, 300_000).unwrap();
        soon(comm.barrier()).unwrap();
        if rank == 1 {
            (1..=3).for_each(|nth| fail(Some("cuIpcOpenMemHandle"), nth, OUT_OF_MEMORY));
        }
        let start = Instant::now();
        let Failed { error, buf } = soon(comm.timeout(DEADLINE).all_reduce(buf)).unwrap_err();
        let text = error.to_string();
        for part in [
            "rank 1: ",
            "CUDA device 1",
            "cuIpcOpenMemHandle",
            "CUDA_ERROR_OUT_OF_MEMORY (2)",
            "Device::trim",
        ] {
            assert!(text.contains(part), "{part:?} in: {text}");
        }
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        buf.into_iter().for_each(is_ours);
        drop((most, comm));
        assert_eq!(report().freed_in_use, 0);
    });
    if let Some(held) = held {
        held.end_well(test);
    }
}

/// What rank 0 has dropped comes free only when rank 1 has called an operation, and before that call rank 1 needs memory, too. Neither waits for ever:
/// both are told, and when rank 1 has called, there is memory again.
#[test]
fn ranks_that_wait_for_each_other_s_memory_are_told() {
    let variables = [("ALLSTREAM_TEST_CUDA_MEMORY", "66M"), APART];
    child("exhausted::ranks_that_wait_for_each_other_s_memory_are_told", &variables, || {
        const PART: usize = 30 << 20;
        let all = Barrier::new(2);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
            let buf = up(&stream, values(rank, 100));
            all.wait();
            let (ordered, buf) = if rank == 0 {
                // Neither of the two is enough for what is asked for later, and both together are.
                let parts = [(); 2].map(|()| DeviceBuf::<u8>::zeroed(&stream, PART).unwrap());
                let ordered = comm.on(&stream).timeout(10 * DEADLINE).all_reduce(buf).join(&stream).unwrap();
                drop(parts);
                (Some(ordered), None)
            } else {
                (None, Some(buf))
            };
            all.wait();
            let other = DeviceStream::new(&stream.device()).unwrap();
            let (tell, told) = channel();
            let asking = other.clone();
            std::thread::spawn(move || tell.send(DeviceBuf::<u8>::zeroed(&asking, 2 * PART).map(drop)));
            let error = told.recv_timeout(DEADLINE).expect("nobody waits for ever").unwrap_err();
            let text = error.to_string();
            for part in [
                "get 62914560 bytes",
                "CUDA_ERROR_OUT_OF_MEMORY (2)",
                "let all ranks call it",
                "Device::trim",
            ] {
                assert!(text.contains(part), "{part:?} in: {text}");
            }
            all.wait();
            let sum = match (ordered, buf) {
                (Some(ordered), _) => soon(ordered).unwrap(),
                (_, buf) => soon(comm.timeout(10 * DEADLINE).all_reduce(buf.unwrap())).unwrap(),
            };
            assert!(down(sum) == sums(100));
            all.wait();
            if rank == 0 {
                drop(DeviceBuf::<u8>::zeroed(&other, 2 * PART).unwrap());
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}
