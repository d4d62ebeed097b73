//! Memory of other libraries in communicators whose ranks are in several processes: it is read where it lies, or copied on its device.

use std::sync::Arc;

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::{Comm, Error, Failed};

use crate::collectives::everything_in;
use crate::foreign::{By, LONG, Theirs, theirs, within};
use crate::ipc::{SLOW, SLOWER, bound, processes, usable};
use crate::support::{calls, down, fail, nothing_left, report, soon, until, up, values};

const LEN: usize = 3000;

/// The sums of the values of all ranks in a step.
fn sums(n: usize, step: usize, len: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..n).map(|rank| values(rank + step, len)).collect();
    (0..len).map(|i| all.iter().map(|values| values[i]).sum()).collect()
}

/// A process whose ranks have ended holds nothing of the driver, and no memory was freed while a device used it.
fn nothing_left_in_order() {
    nothing_left("all ranks of the process have ended");
    assert_eq!(report().freed_in_use, 0);
}

/// Runs an all_reduce, and checks that it copies nothing between host and device. (The barriers around it are not counted.)
fn is_on_devices(comm: &mut Comm, buf: DeviceBuf<f32>) -> DeviceBuf<f32> {
    let copies = || calls("cuMemcpyDtoHAsync_v2") + calls("cuMemcpyHtoDAsync_v2");
    soon(comm.barrier()).unwrap();
    let before = copies();
    soon(comm.barrier()).unwrap();
    let buf = soon(comm.all_reduce(buf)).unwrap();
    soon(comm.barrier()).unwrap();
    assert_eq!(copies(), before, "nothing goes through the host");
    soon(comm.barrier()).unwrap();
    buf
}

/// torch's allocator gets large pieces by `cudaMalloc` and cuts them up, so several buffers lie in one allocation. Its handle is asked for once,
/// and each other process opens it once.
#[test]
fn what_cuda_malloc_gave_is_read_where_it_lies() {
    let test = "ipc_foreign::what_cuda_malloc_gave_is_read_where_it_lies";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let rank = comm.rank();
        everything_in(&mut comm, &[0, 700], &|values| theirs(By::Alloc, &stream, values));
        let allocation = Arc::new(Theirs::new(By::Alloc, &stream, LONG));
        let mut named = (0, 0);
        for step in 0..4 {
            // Except in step 0, the buffer is not aligned for wide loads.
            let buf = within(&allocation, 4 * step + 65_536 * step, &stream, values(rank + step, LEN));
            let buf =
                if step == 3 { is_on_devices(&mut comm, buf) } else { soon(comm.all_reduce(buf)).unwrap() };
            assert!(down(buf) == sums(3, step, LEN), "step {step}");
            soon(comm.barrier()).unwrap();
            let now = (calls("cuIpcGetMemHandle"), calls("cuIpcOpenMemHandle"));
            if step > 0 {
                assert_eq!(now, named, "what is known is not named or opened again");
            }
            named = now;
            soon(comm.barrier()).unwrap();
        }
        assert_eq!(comm.device_copies(), None);
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1, 2]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}

/// The driver gives the address of freed memory again, also to shorter allocations. Each result must be that of the memory which is there
/// now, and what was freed is closed.
#[test]
fn an_allocation_that_takes_the_place_of_another_is_not_taken_for_it() {
    let test = "ipc_foreign::an_allocation_that_takes_the_place_of_another_is_not_taken_for_it";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let rank = comm.rank();
        let (mut first, mut mapped) = (None, 0);
        for (step, blocks) in [3, 3, 2, 2, 1].into_iter().enumerate() {
            let allocation = Arc::new(Theirs::new(By::Alloc, &stream, blocks * LONG));
            assert_eq!(
                *first.get_or_insert(allocation.at),
                allocation.at,
                "the driver gives the address again"
            );
            let buf = within(&allocation, 0, &stream, values(rank + step, LEN));
            assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2, step, LEN), "step {step}");
            soon(comm.barrier()).unwrap();
            let now = report().mapped_handles;
            assert!(
                step == 0 || now == mapped,
                "step {step}: {now} blocks of the other are open, {mapped} before"
            );
            mapped = now;
            until("its owner has it back", || Arc::strong_count(&allocation) == 1);
        }
        assert_eq!(comm.device_copies(), None);
        soon(comm.close()).unwrap();
    };
    let again = [SLOW[0], SLOW[1], ("ALLSTREAM_TEST_CUDA_REUSE", "1")];
    match processes(test, &[&[0], &[1]], &again, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}

/// Each rank may have another kind of memory: one has memory of the driver's pool, one has memory from `cudaMalloc`, one allstream's.
#[test]
fn memory_of_a_pool_is_copied_on_its_device_and_the_reason_is_told() {
    let test = "ipc_foreign::memory_of_a_pool_is_copied_on_its_device_and_the_reason_is_told";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let rank = comm.rank();
        let make = |values| match rank {
            0 => theirs(By::Pool, &stream, values),
            1 => theirs(By::Alloc, &stream, values),
            _ => up(&stream, values),
        };
        everything_in(&mut comm, &[700], &make);
        let before = comm.device_copies();
        assert_eq!(before.is_some(), rank == 0, "{before:?}");
        let buf = is_on_devices(&mut comm, make(values(rank, LEN)));
        assert!(down(buf) == sums(3, 0, LEN));
        let list =
            vec![make(values(rank, 10)), make(values(rank + 1, LEN)), up(&stream, values(rank + 2, 7))];
        let list = soon(comm.all_reduce_list(list)).unwrap();
        for (step, (buf, len)) in list.into_iter().zip([10, LEN, 7]).enumerate() {
            assert!(down(buf) == sums(3, step, len));
        }
        if let (Some(before), Some(after)) = (before, comm.device_copies()) {
            assert!(
                before.why.contains("cudaMallocAsync") && before.why.contains("PYTORCH_CUDA_ALLOC_CONF"),
                "{before:?}"
            );
            assert_eq!(
                (after.buffers - before.buffers, after.bytes - before.bytes),
                (3, (2 * LEN as u64 + 10) * 4)
            );
        }
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1], &[2]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}

/// If the driver gives no handle for one allocation, that one is copied, and later ones are not.
#[test]
fn memory_that_the_driver_gives_no_handle_for_is_copied() {
    let test = "ipc_foreign::memory_that_the_driver_gives_no_handle_for_is_copied";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let rank = comm.rank();
        assert!(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()) == sums(2, 0, LEN));
        let buf = theirs(By::Alloc, &stream, values(rank, LEN));
        fail(Some("cuIpcGetMemHandle"), 1, 801);
        assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2, 0, LEN));
        let why = comm.device_copies().unwrap().why;
        assert!(why.contains("cuIpcGetMemHandle") && why.contains("801"), "{why}");
        let buf = theirs(By::Alloc, &stream, values(rank, LEN));
        assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2, 0, LEN));
        assert_eq!(comm.device_copies().unwrap().buffers, 1);
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}

/// Short allocations share a block of the driver, and a handle would open all of that block.
#[test]
fn a_short_allocation_is_copied() {
    let test = "ipc_foreign::a_short_allocation_is_copied";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let short = Arc::new(Theirs::new(By::Alloc, &stream, LONG - 1));
        let buf = within(&short, 0, &stream, values(comm.rank(), LEN));
        assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2, 0, LEN));
        let copies = comm.device_copies().unwrap();
        assert!(
            copies.buffers == 1 && copies.why.contains("2097151 bytes is shorter than 2 MiB"),
            "{copies:?}"
        );
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}

/// If a rank has no memory for its copy, all ranks get an error before the deadline, and all buffers come back.
#[test]
fn a_copy_for_which_there_is_no_memory_is_an_error_on_all_ranks() {
    let test = "ipc_foreign::a_copy_for_which_there_is_no_memory_is_an_error_on_all_ranks";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let rank = comm.rank();
        assert!(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()) == sums(2, 0, LEN));
        // More than the pool's only block has room for, and than the device has left.
        let len = (8 << 20) / 4;
        let filler = (rank == 0).then(|| DeviceBuf::<u8>::zeroed(&stream, 60 << 20).unwrap());
        let mine = vec![rank as f32; len];
        let buf = if rank == 0 { theirs(By::Pool, &stream, mine) } else { up(&stream, mine) };
        let Failed { buf, error } = soon(comm.all_reduce(buf)).unwrap_err();
        assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}");
        assert!(down(buf.expect("comes back")).iter().all(|x| *x == rank as f32), "nothing was written");
        drop((filler, comm));
    };
    let small = [("ALLSTREAM_TEST_CUDA_MEMORY", "76M"), SLOW[1]];
    match processes(test, &[&[0], &[1]], &small, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}

/// When another process dies, a buffer that was copied comes back with the contents that it had.
#[test]
fn buffers_that_were_copied_come_back_from_a_failure_as_they_were() {
    let test = "ipc_foreign::buffers_that_were_copied_come_back_from_a_failure_as_they_were";
    let body = |mut comm: Comm| {
        let (device, stream) = bound(&mut comm);
        let rank = comm.rank();
        let make = |stream: &DeviceStream| match rank {
            0 => theirs(By::Pool, stream, values(rank, LEN)),
            _ => theirs(By::Alloc, stream, values(rank, LEN)),
        };
        assert!(down(soon(comm.all_reduce(make(&stream))).unwrap()) == sums(3, 0, LEN));
        if rank == 2 {
            // SAFETY: `raise` may be called at any time. This thread gets the signal, so it does not go on; the whole process ends.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        let Failed { buf, error } = soon(comm.all_reduce(make(&stream))).unwrap_err();
        assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
        if let Some(buf) = buf {
            assert_eq!(down(buf), values(rank, LEN), "nothing was written");
        }
        drop(comm);
        usable(&device, &stream);
    };
    let Some(mut processes) = processes(test, &[&[0], &[1], &[2]], SLOWER, body) else {
        return assert_eq!(report().freed_in_use, 0);
    };
    processes.survive(test);
    assert!(!processes.end(2, test).success());
}

/// A chain of collectives in the order of streams, without a wait on the host: each sees the result of the one before, also in copies.
#[test]
fn a_chain_of_collectives_on_copies_is_in_order() {
    let test = "ipc_foreign::a_chain_of_collectives_on_copies_is_in_order";
    let body = |mut comm: Comm| {
        let device = Device::new(comm.rank() % 2).unwrap();
        soon(comm.bind_device(&device)).unwrap();
        let stream = DeviceStream::new(&device).unwrap();
        let by = [By::Pool, By::Alloc][comm.rank() % 2];
        let mut grads = theirs(by, &stream, values(comm.rank(), LEN));
        for _ in 0..20 {
            let work = comm.on(&stream).scale(0.5).all_reduce(grads);
            grads = work.join(&stream).unwrap().in_order().unwrap();
            let work = comm.on(&stream).broadcast(grads, 1);
            grads = work.join(&stream).unwrap().in_order().unwrap();
        }
        // The first sum is the mean. Each later one halves and adds two equal buffers, so the mean stays.
        let mean: Vec<f32> = sums(2, 0, LEN).iter().map(|sum| sum / 2.0).collect();
        assert!(down(grads) == mean);
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left_in_order(),
    }
}
