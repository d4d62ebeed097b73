//! Large all_reduces between processes that are folded at once: each rank writes its part of the result to the memory of all ranks.

use std::time::Duration;

use allstream::cuda::{DeviceBuf, DeviceStream, PinnedBuf};
use allstream::testing::fold_between_processes_from;
use allstream::{Comm, Error, Failed, ReduceOp, Work};

use crate::collectives::{everything, everything_in};
use crate::foreign::{By, theirs};
use crate::ipc::{SLOW, bound, processes, usable};
use crate::support::{
    calls, down, moved, nothing_goes_through_the_host, nothing_left, pass, report, soon, until, up, values,
};

type Buf = DeviceBuf<f32>;

const LEN: usize = 3000;
const ALL: u64 = u64::MAX;
/// Every stream has a hardware queue of its own, so that only the order of work holds a stream up.
const QUEUES: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_QUEUES", "32"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

fn all_is_given_back() {
    nothing_left("all ranks of the process have ended");
    assert_eq!(report().freed_in_use, 0);
}

/// Binds the communicator, and runs one all_reduce that all ranks fold at once.
fn ready(comm: &mut Comm) -> DeviceStream {
    fold_between_processes_from(0);
    let (_device, stream) = bound(comm);
    let sum = soon(comm.all_reduce(up(&stream, values(comm.rank(), LEN)))).unwrap();
    assert!(down(sum) == sums());
    stream
}

fn sums() -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..3).map(|rank| values(rank, LEN)).collect();
    (0..LEN).map(|i| all.iter().map(|values| values[i]).sum()).collect()
}

/// Holds a stream up, until copies to devices pass again in this process.
fn hold_up(stream: &DeviceStream) {
    let host = PinnedBuf::<u32>::zeroed(&stream.device(), 16).unwrap();
    pass(true, 0);
    drop(DeviceBuf::zeroed(stream, 16).unwrap().copy_from_host(host));
}

/// Runs three ranks, each in a process of its own. All of them end well, except that the last one is killed if `dies`.
fn of_three(test: &str, dies: bool, body: fn(Comm)) {
    match processes(test, &[&[0], &[1], &[2]], QUEUES, body) {
        None => all_is_given_back(),
        Some(mut processes) if dies => processes.survive(test),
        Some(processes) => processes.end_well(test),
    }
}

/// How many kernels a rank launches in an all_reduce of `len` floats, and how many bytes these read and write.
fn cost(comm: &mut Comm, stream: &DeviceStream, len: usize) -> (u64, u64) {
    let buf = up(stream, values(comm.rank(), len));
    soon(comm.barrier()).unwrap();
    let before = (calls("cuLaunchKernel"), moved());
    let sum = soon(comm.all_reduce(buf)).unwrap();
    let after = (calls("cuLaunchKernel"), moved());
    let expected: f32 = (0..3).map(|rank| values(rank, len)[len - 1]).sum();
    assert_eq!(down(sum)[len - 1], expected);
    (after.0 - before.0, after.1 - before.1)
}

/// By steps, a rank reads its part of all n buffers, writes the sum, and copies the other ranks' sums: 3 - 1/n times the buffer. At once, it reads
/// its part of all buffers and writes the sum to all of them: twice the buffer.
#[test]
fn a_large_one_takes_one_kernel_and_two_passes_over_memory() {
    const LIMIT: usize = 96 << 10;
    let test = "ipc_folds::a_large_one_takes_one_kernel_and_two_passes_over_memory";
    of_three(test, false, |mut comm| {
        fold_between_processes_from(LIMIT);
        let (_device, stream) = bound(&mut comm);
        let (below, above) = (LIMIT / 4 - 1, LIMIT / 4);
        for _ in 0..2 {
            let (kernels, bytes) = cost(&mut comm, &stream, below);
            let passes = bytes as f64 / (4 * below) as f64;
            eprintln!("rank {}: by steps {kernels} kernels, {passes:.2} passes", comm.rank());
            assert!(kernels == 3 && (2.6..2.7).contains(&passes), "{kernels} kernels, {passes} passes");
            let (kernels, bytes) = cost(&mut comm, &stream, above);
            let passes = bytes as f64 / (4 * above) as f64;
            eprintln!("rank {}: at once {kernels} kernels, {passes:.2} passes", comm.rank());
            assert!(kernels == 1 && (1.99..2.01).contains(&passes), "{kernels} kernels, {passes} passes");
        }
        soon(comm.close()).unwrap();
    });
}

/// All collectives, in buffers of all lengths, with links of both kinds in one communicator.
#[test]
fn processes_that_fold_at_once_get_what_hosts_get() {
    let test = "ipc_folds::processes_that_fold_at_once_get_what_hosts_get";
    let body = |mut comm: Comm| {
        fold_between_processes_from(0);
        let (_device, stream) = bound(&mut comm);
        everything(&mut comm, &stream, &[0, 1, 2, 1000, 5000]);
        nothing_goes_through_the_host(&mut comm, &stream);
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0, 2], &[1]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => all_is_given_back(),
    }
}

/// Memory of other libraries is written where it lies, or is copied where it cannot be lent.
#[test]
fn memory_of_other_libraries_is_folded_at_once() {
    let test = "ipc_folds::memory_of_other_libraries_is_folded_at_once";
    let body = |mut comm: Comm| {
        fold_between_processes_from(0);
        let (_device, stream) = bound(&mut comm);
        everything_in(&mut comm, &[0, 700], &|values| theirs(By::Alloc, &stream, values));
        everything_in(&mut comm, &[3, 700], &|values| theirs(By::Pool, &stream, values));
        assert!(comm.device_copies().is_some(), "what the driver's pools gave cannot be lent");
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1, 2]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => all_is_given_back(),
    }
}

/// The result of each fold is the next one's input, in the order of streams.
#[test]
fn a_chain_of_folds_is_in_order_between_processes() {
    let test = "ipc_folds::a_chain_of_folds_is_in_order_between_processes";
    let body = |mut comm: Comm| {
        let stream = ready(&mut comm);
        let mut grads = up(&stream, values(comm.rank(), LEN));
        for _ in 0..20 {
            let work = comm.op(ReduceOp::Max).on(&stream).all_reduce(grads);
            grads = work.join(&stream).unwrap().in_order().unwrap();
            let work = comm.op(ReduceOp::Avg).on(&stream).all_reduce(grads);
            grads = work.join(&stream).unwrap().in_order().unwrap();
        }
        let all: Vec<Vec<f32>> = (0..3).map(|rank| values(rank, LEN)).collect();
        let greatest = |at: usize| all.iter().map(|values| values[at]).fold(f32::MIN, f32::max);
        let got = down(grads);
        assert!((0..LEN).all(|at| got[at] == greatest(at)));
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1, 2]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => all_is_given_back(),
    }
}

/// The time limit begins when a rank's own input is there. The timeout names the rank whose input is not. Nothing is written before all are there.
#[test]
fn law_4_a_rank_whose_input_is_late_is_named() {
    const LIMIT: Duration = Duration::from_millis(400);
    let test = "ipc_folds::law_4_a_rank_whose_input_is_late_is_named";
    of_three(test, false, |mut comm| {
        let mut other = soon(comm.dup()).unwrap();
        let stream = ready(&mut comm);
        let rank = comm.rank();
        // All inputs are late, for longer than the limit.
        let buf = up(&stream, values(rank, LEN));
        hold_up(&stream);
        soon(other.barrier()).unwrap();
        let work = comm.timeout(LIMIT).all_reduce(buf);
        std::thread::sleep(2 * LIMIT);
        soon(other.barrier()).unwrap();
        pass(true, ALL);
        assert!(down(soon(work).unwrap()) == sums());
        // Only rank 1's input is late.
        let (buf, before) = (up(&stream, values(rank, LEN)), calls("cuLaunchKernel"));
        if rank == 1 {
            hold_up(&stream);
        }
        soon(other.barrier()).unwrap();
        let error = soon(comm.timeout(LIMIT).all_reduce(buf)).unwrap_err().error;
        if rank != 1 {
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert!(matches!(&missing[..], [late] if late.rank == 1), "{error}");
            assert!(error.to_string().contains("its device has not come to it"), "{error}");
            assert_eq!(calls("cuLaunchKernel"), before, "no kernel is on a stream before all are ready");
        }
        soon(other.barrier()).unwrap();
        pass(true, ALL);
        drop(comm);
        soon(other.close()).unwrap();
    });
}

/// A rank's side of an operation, while the kernel of rank 2 is on its stream behind work that is held up.
struct Held {
    comm: Comm,
    other: Comm,
    stream: DeviceStream,
    work: Work<Buf>,
    at: u64,
}

/// Brings all ranks to where the kernel of rank 2 is on its stream, and will write to the buffers of the others.
fn held_on_rank_2(mut comm: Comm) -> Held {
    let mut other = soon(comm.dup()).unwrap();
    let stream = ready(&mut comm);
    let (rank, before) = (comm.rank(), calls("cuLaunchKernel"));
    let buf = up(&stream, values(rank, LEN));
    if rank == 2 {
        hold_up(&stream);
    }
    let at = buf.as_ptr();
    soon(other.barrier()).unwrap();
    let work = comm.all_reduce(buf);
    if rank == 2 {
        until("the kernel is on the stream", || calls("cuLaunchKernel") > before);
    }
    soon(other.barrier()).unwrap();
    Held { comm, other, stream, work, at }
}

/// Makes new buffers, and checks that none of them overlaps the one at this address.
fn none_is_at(at: u64, make: impl Fn() -> Buf) -> Vec<Buf> {
    let news: Vec<Buf> = (0..200).map(|_| make()).collect();
    let bytes = 4 * LEN as u64;
    assert!(news.iter().all(|new| new.as_ptr() + bytes <= at || at + bytes <= new.as_ptr()));
    news
}

/// Checks an operation that rank 0 has aborted before rank 2's kernel wrote to its buffer: the buffer does not come back.
fn is_kept_apart(comm: &Comm, Failed { buf, error }: Failed<Buf>) {
    assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
    assert!(buf.is_none(), "the kernel of rank 2 may still write there");
    assert_eq!(comm.stats().quarantined, 1);
}

/// Lets rank 2's kernel go on, and checks that it writes to no buffer made meanwhile. `is_past` waits until all streams are past the kernel.
fn nobody_has_what_is_written_late(
    (rank, other): (usize, &mut Comm),
    stream: &DeviceStream,
    at: u64,
    is_past: impl FnOnce(&mut Comm),
) {
    let make = || up(stream, vec![7.5; LEN]);
    let news = if rank == 2 { Vec::new() } else { none_is_at(at, make) };
    soon(other.barrier()).unwrap();
    pass(true, ALL);
    is_past(other);
    assert!(news.into_iter().all(|new| down(new) == [7.5; LEN]), "a kernel that came late wrote there");
    usable(&stream.device(), stream);
    soon(other.barrier()).unwrap();
}

/// A buffer that a peer's stream is yet to write to is given to nobody until that stream is past.
#[test]
fn law_3_an_abort_leaves_a_buffer_that_a_peer_writes_to_in_quarantine() {
    let test = "ipc_folds::law_3_an_abort_leaves_a_buffer_that_a_peer_writes_to_in_quarantine";
    of_three(test, false, |comm| {
        let Held { comm, mut other, stream, work, at } = held_on_rank_2(comm);
        if comm.rank() == 0 {
            comm.abort("a test");
        }
        is_kept_apart(&comm, soon(work).unwrap_err());
        let is_past = |_: &mut Comm| until("the streams of all are past", || comm.stats().quarantined == 0);
        nobody_has_what_is_written_late((comm.rank(), &mut other), &stream, at, is_past);
        drop(comm);
        soon(other.close()).unwrap();
    });
}

/// The same for an operation that a stream waits for: its buffer belongs to whoever has joined it.
#[test]
fn law_3_an_abort_leaves_a_joined_buffer_that_a_peer_writes_to_in_quarantine() {
    let test = "ipc_folds::law_3_an_abort_leaves_a_joined_buffer_that_a_peer_writes_to_in_quarantine";
    of_three(test, false, |comm| {
        let Held { comm, mut other, stream, work, at } = held_on_rank_2(comm);
        let joined = work.join(&stream).unwrap();
        soon(other.barrier()).unwrap();
        if comm.rank() == 0 {
            comm.abort("a test");
        }
        is_kept_apart(&comm, soon(joined).unwrap_err());
        let is_past = |_: &mut Comm| until("the streams of all are past", || comm.stats().quarantined == 0);
        nobody_has_what_is_written_late((comm.rank(), &mut other), &stream, at, is_past);
        drop(comm);
        soon(other.close()).unwrap();
    });
}

/// The same for a joined operation whose buffer was dropped while the operation was under way.
#[test]
fn law_3_a_joined_buffer_that_was_dropped_is_given_to_nobody_while_a_peer_may_write_to_it() {
    let test =
        "ipc_folds::law_3_a_joined_buffer_that_was_dropped_is_given_to_nobody_while_a_peer_may_write_to_it";
    of_three(test, false, |comm| {
        let Held { comm, mut other, stream, work, at } = held_on_rank_2(comm);
        drop(work.join(&stream).unwrap());
        soon(other.barrier()).unwrap();
        if comm.rank() == 0 {
            comm.abort("a test");
        }
        until("all have heard", || comm.check().is_err());
        let is_past = |other: &mut Comm| {
            stream.synchronize().unwrap();
            soon(other.barrier()).unwrap();
        };
        nobody_has_what_is_written_late((comm.rank(), &mut other), &stream, at, is_past);
        drop(comm);
        soon(other.close()).unwrap();
    });
}

/// A process that has exited writes nothing any more.
#[test]
fn law_3_a_buffer_comes_back_when_the_process_that_was_to_write_to_it_is_killed() {
    let test = "ipc_folds::law_3_a_buffer_comes_back_when_the_process_that_was_to_write_to_it_is_killed";
    of_three(test, true, |comm| {
        let Held { comm, stream, work, .. } = held_on_rank_2(comm);
        if comm.rank() == 2 {
            // SAFETY: `raise` may be called at any time. This thread gets the signal, so it does not go on; the whole process ends.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        let Failed { buf, error } = soon(work).unwrap_err();
        assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
        drop(down(buf.expect("nobody writes there any more")));
        drop(comm);
        usable(&stream.device(), &stream);
    });
}

/// The same while the survivors' own streams are held up: their buffers come back to the pool when these streams have gone on.
#[test]
fn law_3_a_process_is_killed_while_the_streams_of_its_peers_are_held_up() {
    let test = "ipc_folds::law_3_a_process_is_killed_while_the_streams_of_its_peers_are_held_up";
    of_three(test, true, |mut comm| {
        let mut other = soon(comm.dup()).unwrap();
        let stream = ready(&mut comm);
        let rank = comm.rank();
        let buf = up(&stream, values(rank, LEN));
        if rank != 2 {
            hold_up(&stream);
        }
        let at = buf.as_ptr();
        let work = comm.all_reduce(buf);
        soon(other.barrier()).unwrap();
        if rank == 2 {
            // SAFETY: `raise` may be called at any time. This thread gets the signal, so it does not go on; the whole process ends.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        let Failed { buf, error } = soon(work).unwrap_err();
        assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
        assert!(buf.is_none(), "this rank's own stream has yet to come to it");
        assert_eq!(comm.stats().quarantined, 1);
        let another = DeviceStream::new(&stream.device()).unwrap();
        drop(none_is_at(at, || Buf::zeroed(&another, LEN).unwrap()));
        pass(true, ALL);
        until("the stream has gone on", || comm.stats().quarantined == 0);
        drop((comm, other));
        usable(&stream.device(), &stream);
    });
}
