//! Communicators bound to devices, with ranks in several processes: they behave as those within one process do.

use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::{Comm, Error, Failed, ReduceOp, Rendezvous};

use crate::collectives::everything;
use crate::support::{
    DEADLINE, LIBRARY, calls, down, library, nothing_goes_through_the_host, nothing_left, pass, report, soon,
    until, up, values,
};

const TEST: &str = "ALLSTREAM_TEST_CUDA_CHILD";
const RANKS: &str = "ALLSTREAM_TEST_CUDA_RANKS";
const SIZE: &str = "ALLSTREAM_TEST_CUDA_SIZE";
const ADDRESS: &str = "ALLSTREAM_TEST_CUDA_ADDRESS";
const LISTENER: &str = "ALLSTREAM_TEST_CUDA_LISTENER";

/// Child processes, which are killed when this is dropped.
pub(crate) struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Processes {
    /// Waits until a process has ended, and returns how.
    pub(crate) fn end(&mut self, index: usize, what: &str) -> ExitStatus {
        let end = Instant::now() + 3 * DEADLINE;
        loop {
            if let Some(status) = self.0[index].try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "{what}: process {index} did not end in time");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn end_well(mut self, test: &str) {
        self.first_end_well(self.0.len(), test);
    }

    /// Checks that all processes but the last end well.
    pub(crate) fn survive(&mut self, test: &str) {
        self.first_end_well(self.0.len() - 1, test);
    }

    fn first_end_well(&mut self, count: usize, test: &str) {
        for index in 0..count {
            let status = self.end(index, test);
            assert!(status.success(), "{test}: process {index}: {status}");
        }
    }
}

/// Starts the test of this name again, with a process for each of these groups of ranks. In those processes it runs `body` for
/// each rank, and returns `None`.
pub(crate) fn processes(
    test: &str,
    groups: &[&[usize]],
    variables: &[(&str, &str)],
    body: impl Fn(Comm) + Sync,
) -> Option<Processes> {
    if std::env::var(TEST).as_deref() == Ok(test) {
        ranks(body);
        return None;
    }
    let size: usize = groups.iter().map(|group| group.len()).sum();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let start = |(index, group): (usize, &&[usize])| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let group: Vec<_> = group.iter().map(usize::to_string).collect();
        command
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env(RANKS, group.join(","))
            .env(SIZE, size.to_string())
            .env(ADDRESS, listener.local_addr().unwrap().to_string())
            .env(LISTENER, listener.as_raw_fd().to_string())
            .env("ALLSTREAM_TEST_CUDA_SEED", (index + 1).to_string())
            .env(LIBRARY, library())
            .envs(variables.iter().map(|(name, value)| (*name, value.replace("{}", &index.to_string()))));
        command.stdin(Stdio::null()).spawn().unwrap()
    };
    Some(Processes(groups.iter().enumerate().map(start).collect()))
}

/// The ranks of this process, a thread for each.
fn ranks(body: impl Fn(Comm) + Sync) {
    let variable = |name: &str| std::env::var(name).unwrap();
    let size: usize = variable(SIZE).parse().unwrap();
    let connect = |rank: usize| {
        let mut rendezvous = Rendezvous::tcp(&variable(ADDRESS), rank, size).unwrap().token("of this test");
        if rank == 0 {
            // SAFETY: the test left this descriptor open for its child processes; only rank 0 takes it, so a process takes it once.
            let listener = unsafe { TcpListener::from_raw_fd(variable(LISTENER).parse().unwrap()) };
            rendezvous = rendezvous.listener(listener);
        }
        soon(Comm::connect(rendezvous)).unwrap()
    };
    let ranks: Vec<usize> = variable(RANKS).split(',').map(|rank| rank.parse().unwrap()).collect();
    let all = Barrier::new(ranks.len());
    std::thread::scope(|scope| {
        for rank in ranks {
            let (connect, all, body) = (&connect, &all, &body);
            scope.spawn(move || {
                let comm = connect(rank);
                all.wait();
                body(comm);
            });
        }
    });
}

pub(crate) const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

/// Binds rank r to device r % 2: of three ranks, two share device 0.
pub(crate) fn bound(comm: &mut Comm) -> (Device, DeviceStream) {
    let device = Device::new(comm.rank() % 2).unwrap();
    assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
    let stream = DeviceStream::new(&device).unwrap();
    (device, stream)
}

fn run_everything(mut comm: Comm) {
    let (_device, stream) = bound(&mut comm);
    everything(&mut comm, &stream, &[0, 1, 1000, 5000]);
    nothing_goes_through_the_host(&mut comm, &stream);
    soon(comm.close()).unwrap();
}

fn all_in_order() {
    assert!(calls("cuLaunchKernel") > 50, "kernels do the work: {}", calls("cuLaunchKernel"));
    nothing_left("all ranks of the process have ended");
    assert_eq!(report().freed_in_use, 0);
}

#[test]
fn processes_get_what_hosts_get() {
    let test = "ipc::processes_get_what_hosts_get";
    match processes(test, &[&[0], &[1], &[2]], SLOW, run_everything) {
        Some(processes) => processes.end_well(test),
        None => all_in_order(),
    }
}

/// Links within a process and between processes in one communicator. Memory that two ranks of a process use is opened once.
#[test]
fn ranks_of_one_process_and_of_another() {
    let test = "ipc::ranks_of_one_process_and_of_another";
    match processes(test, &[&[0, 2], &[1]], SLOW, run_everything) {
        Some(processes) => processes.end_well(test),
        None => all_in_order(),
    }
}

pub(crate) const SLOWER: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "30000"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

fn failed(result: Result<DeviceBuf<f32>, Failed<DeviceBuf<f32>>>) -> Option<Error> {
    match result {
        Ok(sum) => {
            let all: f32 = (0..3).map(|rank| values(rank, 1)[0]).sum();
            assert_eq!(down(sum)[0], all, "what is good has come from all");
            None
        }
        Err(Failed { buf, error }) => {
            // A buffer that is given back can be used.
            buf.map(down);
            Some(error)
        }
    }
}

/// Checks that the process can go on with its device and its stream.
pub(crate) fn usable(device: &Device, stream: &DeviceStream) {
    assert_eq!(down(up(stream, vec![7u32; 5000])), [7; 5000]);
    device.trim().unwrap();
}

/// A killed process takes its work on the device with it, so what the streams of others wait for never comes.
#[test]
fn a_process_that_is_killed_is_an_error_and_nothing_hangs() {
    let test = "ipc::a_process_that_is_killed_is_an_error_and_nothing_hangs";
    let body = |mut comm: Comm| {
        let (device, stream) = bound(&mut comm);
        let rank = comm.rank();
        let works: Vec<_> = (0..6).map(|_| comm.all_reduce(up(&stream, values(rank, 3000)))).collect();
        let mut works = works.into_iter();
        assert!(failed(soon(works.next().unwrap())).is_none());
        if rank == 2 {
            // SAFETY: `raise` may be called at any time. This thread gets the signal, so it does not go on; the whole process ends.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        let errors: Vec<_> = works.filter_map(|work| failed(soon(work))).collect();
        let after = soon(comm.all_reduce(vec![1f32])).unwrap_err().error;
        let lost = |error: &Error| matches!(error, Error::PeerLost { rank: 2, .. } | Error::System { .. });
        assert!(matches!(after, Error::PeerLost { rank: 2, .. }), "{after}");
        assert!(errors.iter().all(lost), "{errors:?}");
        drop(comm);
        usable(&device, &stream);
    };
    let Some(mut processes) = processes(test, &[&[0], &[1], &[2]], SLOWER, body) else {
        return assert_eq!(report().freed_in_use, 0);
    };
    processes.survive(test);
    assert_eq!(processes.end(2, test).signal(), Some(libc::SIGKILL));
}

/// What a collective leaves is the next one's input, in the order of streams; no host waits in between.
#[test]
fn a_chain_of_collectives_is_in_order_between_processes() {
    let test = "ipc::a_chain_of_collectives_is_in_order_between_processes";
    let body = |mut comm: Comm| {
        let (_device, stream) = bound(&mut comm);
        let mut grads = up(&stream, values(comm.rank(), 3000));
        for _ in 0..40 {
            let work = comm.op(ReduceOp::Max).on(&stream).all_reduce(grads);
            grads = work.join(&stream).unwrap().in_order().unwrap();
            let work = comm.on(&stream).broadcast(grads, 1);
            grads = work.join(&stream).unwrap().in_order().unwrap();
        }
        let greatest = |at: usize| (0..3).map(|rank| values(rank, 3000)[at]).fold(f32::MIN, f32::max);
        let got = down(grads);
        assert!((0..3000).step_by(97).all(|at| got[at] == greatest(at)));
        soon(comm.close()).unwrap();
    };
    match processes(test, &[&[0], &[1, 2]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => {
            nothing_left("all ranks of the process have ended");
            assert_eq!(report().freed_in_use, 0);
        }
    }
}

/// If a process dies during a collective, streams that wait for the collective go on, and whoever awaits it gets the error.
#[test]
fn a_stream_that_waits_for_a_killed_process_is_released() {
    let test = "ipc::a_stream_that_waits_for_a_killed_process_is_released";
    let body = |mut comm: Comm| {
        let (device, stream) = bound(&mut comm);
        let rank = comm.rank();
        assert!(failed(soon(comm.all_reduce(up(&stream, values(rank, 3000))))).is_none());
        if rank == 2 {
            // This process dies while one more all_reduce is under way: the others may have part of it on their streams.
            let _work = comm.all_reduce(up(&stream, values(rank, 3000)));
            // SAFETY: `raise` may be called at any time. This thread gets the signal, so it does not go on; the whole process ends.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let grads = up(&stream, values(rank, 3000));
                comm.on(&stream).all_reduce(grads).join(&stream).map_err(|failed| failed.error)
            })
            .collect();
        soon(stream.record().unwrap()).unwrap();
        let lost = |error: &Error| matches!(error, Error::PeerLost { rank: 2, .. } | Error::System { .. });
        let ends: Vec<_> = waiting
            .into_iter()
            .map(|ordered| ordered.and_then(|ordered| soon(ordered).map_err(|failed| failed.error)))
            .collect();
        assert!(ends.iter().skip(1).all(|end| end.as_ref().is_err_and(lost)), "{ends:?}");
        drop(comm);
        usable(&device, &stream);
    };
    let Some(mut processes) = processes(test, &[&[0], &[1], &[2]], SLOWER, body) else {
        return assert_eq!(report().freed_in_use, 0);
    };
    processes.survive(test);
    assert_eq!(processes.end(2, test).signal(), Some(libc::SIGKILL));
}

/// A stopped process may go on later, so nobody gets the memory that was lent to it.
#[test]
fn a_process_that_is_stopped_is_an_error_and_nothing_hangs() {
    let test = "ipc::a_process_that_is_stopped_is_an_error_and_nothing_hangs";
    let body = |mut comm: Comm| {
        let (device, stream) = bound(&mut comm);
        let rank = comm.rank();
        assert!(failed(soon(comm.all_reduce(up(&stream, values(rank, 3000))))).is_none());
        if rank == 2 {
            // SAFETY: `raise` may be called at any time. This thread gets the signal, so it does not go on; the whole process stops.
            unsafe { libc::raise(libc::SIGSTOP) };
            return;
        }
        let work = comm.timeout(Duration::from_millis(300)).all_reduce(up(&stream, values(rank, 3000)));
        let ended = if rank == 0 {
            // The same for an operation that was joined with a stream.
            work.join(&stream).and_then(soon)
        } else {
            soon(work)
        };
        let Failed { buf, error } = ended.unwrap_err();
        assert!(buf.is_none(), "the stopped process may read it when it goes on");
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        drop(comm);
        usable(&device, &stream);
    };
    let Some(mut processes) = processes(test, &[&[0], &[1], &[2]], SLOW, body) else {
        return assert_eq!(report().freed_in_use, 0);
    };
    processes.survive(test);
}

/// The driver may wait for all that is on the device before it opens memory of another process. Meanwhile the rank's other
/// communicators go on.
#[test]
fn a_driver_that_takes_long_to_open_memory_holds_up_no_other_communicator() {
    /// A number of elements too large for what `filler`, below, leaves of the first block of the rank's device memory.
    const MANY: usize = 1_200_000;
    let test = "ipc::a_driver_that_takes_long_to_open_memory_holds_up_no_other_communicator";
    let body = |mut comm: Comm| {
        let mut other = soon(comm.dup()).unwrap();
        let (device, stream) = bound(&mut comm);
        let late = DeviceStream::new(&device).unwrap();
        let rank = comm.rank();
        // Both ranks have all that they need before a copy is held up: kernels, and buffers. `grads` is in a block of its own, which the
        // other process has not opened yet.
        let first = soon(comm.all_reduce(up(&stream, values(rank, 100)))).unwrap();
        let filler = DeviceBuf::<u8>::zeroed(&stream, 60 << 20).unwrap();
        let grads = up(&stream, values(rank, MANY));
        soon(other.barrier()).unwrap();
        let before = calls("cuIpcOpenMemHandle");
        pass(true, 0);
        let held = DeviceBuf::from_host(&late, PinnedBuf::from_slice(&device, &values(rank, 64)).unwrap());
        let work = comm.timeout(DEADLINE).all_reduce(grads);
        until("a block of the other process is being opened", || calls("cuIpcOpenMemHandle") > before);
        for _ in 0..10 {
            assert_eq!(soon(other.all_reduce(vec![rank as u64])).unwrap(), [1], "while the driver waits");
        }
        pass(true, u64::MAX);
        let sums: Vec<f32> = values(0, MANY).iter().zip(values(1, MANY)).map(|(a, b)| a + b).collect();
        assert!(down(soon(work).unwrap()) == sums);
        soon(held).unwrap();
        drop((first, filler));
        soon(comm.close()).unwrap();
        soon(other.close()).unwrap();
    };
    let waits = [("ALLSTREAM_TEST_CUDA_WAITS", "1"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    match processes(test, &[&[0], &[1]], &waits, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left("all ranks of the process have ended"),
    }
}

#[test]
fn an_abort_reaches_all_processes_and_buffers_come_back() {
    let test = "ipc::an_abort_reaches_all_processes_and_buffers_come_back";
    let body = |mut comm: Comm| {
        let (device, stream) = bound(&mut comm);
        let rank = comm.rank();
        let first = comm.all_reduce(up(&stream, values(rank, 3000)));
        if rank == 1 {
            // The others' second operation waits for this rank, which aborts.
            assert!(failed(soon(first)).is_none_or(|error| matches!(error, Error::Aborted { .. })));
            comm.abort("a test");
        } else {
            let second = comm.all_reduce(up(&stream, values(rank, 3000)));
            let allowed =
                |error: &Error| matches!(error, Error::Aborted { by: 1, .. } | Error::System { .. });
            assert!(failed(soon(first)).is_none_or(|error| allowed(&error)));
            let Failed { buf, error } = soon(second).unwrap_err();
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
            assert_eq!(down(buf.unwrap()), values(rank, 3000), "nothing was written");
        }
        // Ranks 0 and 2 have heard of the abort here. Rank 1 may still have to send it: its drop waits for that, for a second at most.
        drop(comm);
        usable(&device, &stream);
    };
    match processes(test, &[&[0], &[1], &[2]], SLOW, body) {
        Some(processes) => processes.end_well(test),
        None => {
            nothing_left("all ranks of the process have ended");
            assert_eq!(report().freed_in_use, 0);
        }
    }
}

/// Where devices cannot share, all ranks hear why, and go through the host.
#[test]
fn what_cannot_be_shared_is_staged_and_all_ranks_hear_why() {
    let test = "ipc::what_cannot_be_shared_is_staged_and_all_ranks_hear_why";
    let body = |mut comm: Comm| {
        let device = Device::new(comm.rank() % 2).unwrap();
        let path = soon(comm.bind_device(&device)).unwrap();
        let DevicePath::Staged { why } = path else { panic!("{path:?}") };
        assert!(why.contains("rank"), "{why}");
        let stream = DeviceStream::new(&device).unwrap();
        let rank = comm.rank();
        assert!(failed(soon(comm.all_reduce(up(&stream, values(rank, 3000))))).is_none());
        soon(comm.close()).unwrap();
    };
    let ways = [
        ("ALLSTREAM_TEST_CUDA_NO_PEER", "0-1"),
        ("ALLSTREAM_TEST_CUDA_FAIL", "cuMemHostRegister:2:2"),
        ("ALLSTREAM_TEST_CUDA_FAIL", "cuIpcOpenMemHandle:1:217"),
        ("ALLSTREAM_TEST_CUDA_FAIL", "cuIpcGetMemHandle:1:801"),
    ];
    for way in ways {
        match processes(test, &[&[0], &[1], &[2]], &[way, SLOW[1]], body) {
            Some(processes) => processes.end_well(test),
            None => return nothing_left("all ranks of the process have ended"),
        }
    }
}

/// Each process sees only its own device, and calls it 0. Their memory is shared all the same.
#[test]
fn devices_that_a_process_does_not_see_are_reached() {
    let test = "ipc::devices_that_a_process_does_not_see_are_reached";
    let body = |mut comm: Comm| {
        let device = Device::new(0).unwrap();
        assert_eq!(allstream::cuda::device_count().unwrap(), 1);
        assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
        let stream = DeviceStream::new(&device).unwrap();
        everything(&mut comm, &stream, &[0, 1, 1000]);
        nothing_goes_through_the_host(&mut comm, &stream);
        soon(comm.close()).unwrap();
    };
    let apart = [("ALLSTREAM_TEST_CUDA_DEVICES", "3"), ("ALLSTREAM_TEST_CUDA_VISIBLE", "{}")];
    match processes(test, &[&[0], &[1], &[2]], &apart, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left("all ranks of the process have ended"),
    }
}

/// Whether such devices can reach each other is found out when their memory is opened.
#[test]
fn devices_that_a_process_does_not_see_and_cannot_reach_are_staged() {
    let test = "ipc::devices_that_a_process_does_not_see_and_cannot_reach_are_staged";
    let body = |mut comm: Comm| {
        let device = Device::new(0).unwrap();
        let path = soon(comm.bind_device(&device)).unwrap();
        let DevicePath::Staged { why } = path else { panic!("{path:?}") };
        assert!(why.contains("rank"), "{why}");
        let stream = DeviceStream::new(&device).unwrap();
        let rank = comm.rank();
        assert!(failed(soon(comm.all_reduce(up(&stream, values(rank, 3000))))).is_none());
        soon(comm.close()).unwrap();
    };
    let apart = [("ALLSTREAM_TEST_CUDA_VISIBLE", "{}"), ("ALLSTREAM_TEST_CUDA_NO_PEER", "0-1")];
    match processes(test, &[&[0], &[1], &[2]], &apart, body) {
        Some(processes) => processes.end_well(test),
        None => nothing_left("all ranks of the process have ended"),
    }
}
