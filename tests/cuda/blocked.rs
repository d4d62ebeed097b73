//! A driver that blocks: a stream takes a limited number of pieces of work. A thread that puts more there waits for room, and
//! holds the context's lock meanwhile, so that no other call in that context goes on. Deadlines, aborts and host operations must go on.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DeviceStream, PinnedBuf};
use allstream::{Comm, Error, Failed};

use crate::support::{
    DEADLINE, bound, calls, child, device, down, function, in_context, nothing_left, pass, ranks, report,
    set_depth, soon, until, up, values,
};

const DEPTH: u64 = 64;

/// Has a thread that waits for room block every call in its context, not only calls that get memory. If the whole suite is run
/// with a certain lock, that lock is used.
fn whole_lock() -> &'static [(&'static str, &'static str)] {
    const LOCK: &str = "ALLSTREAM_TEST_CUDA_LOCK";
    if std::env::var_os(LOCK).is_some() { &[] } else { &[(LOCK, "context")] }
}
const LAUNCHES: usize = 200;

/// If all is well, no stream is full for longer than this.
const LONGEST: Duration = Duration::from_secs(8);

/// Limits streams to `DEPTH` pieces of work until this is dropped (also by a panic), but for [`LONGEST`] at most: after that, blocked
/// threads go on, and the test can report what is wrong.
struct Limited {
    _ended: Sender<()>,
}

impl Limited {
    fn new() -> Limited {
        set_depth(DEPTH);
        let (ended, hear) = channel();
        std::thread::spawn(move || {
            if hear.recv_timeout(LONGEST) == Err(RecvTimeoutError::Timeout) {
                eprintln!("a stream was full for {LONGEST:?}: somebody waits for the driver who should not");
                set_depth(0);
            }
        });
        Limited { _ended: ended }
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        set_depth(0);
    }
}

/// Puts small pieces of work on a stream, as programs do that launch their own kernels there.
fn launch(device: usize, stream: usize, at: u64) {
    let address = function("cuMemsetD8Async");
    // SAFETY: cuda.h declares the function with this type.
    let fill: unsafe extern "C" fn(u64, u8, usize, *mut c_void) -> u32 =
        unsafe { std::mem::transmute(address) };
    in_context(device, || {
        for _ in 0..LAUNCHES {
            // SAFETY: the stream, and the 16 bytes at `at`, live until all work that was put on the stream has ended.
            assert_eq!(unsafe { fill(at, 1, 16, stream as *mut c_void) }, 0);
        }
    });
}

/// Rank 0 of two joins its stream with an all_reduce that rank 1 never calls, and another thread puts more work there than the stream
/// takes. While that thread is blocked, both ranks run `meanwhile` on two other communicators, and rank 0 runs `end` on the bound one.
/// Returns rank 0's error, and how long after the call it came.
fn late_peer(
    devices: usize,
    timeout: Duration,
    meanwhile: impl Fn(&mut Comm, &mut Comm) + Sync,
    end: impl Fn(&Comm) + Sync,
) -> (Error, Duration) {
    let (told, hear) = channel();
    let (told, hear) = (&Mutex::new(told), &Mutex::new(hear));
    let mut ended = ranks(2, |mut parent| {
        let mut other = soon(parent.dup()).unwrap();
        let mut comm = soon(parent.dup()).unwrap();
        let compute = bound(&mut comm, devices);
        let (buf, scratch) = (up(&compute, values(comm.rank(), 100)), up(&compute, vec![0_u8; 16]));
        soon(parent.barrier()).unwrap();
        if comm.rank() == 1 {
            hear.lock().unwrap().recv_timeout(DEADLINE).unwrap();
            meanwhile(&mut parent, &mut other);
            until("rank 0 has given up", || comm.check().is_err());
            drop((comm, buf, scratch, compute));
            soon(other.close()).unwrap();
            soon(parent.close()).unwrap();
            return None;
        }
        let (stream, at) = (compute.as_raw() as usize, scratch.as_ptr());
        let ended = std::thread::scope(|scope| {
            let _limited = Limited::new();
            let blocked = calls("waiting for room");
            let begin = Instant::now();
            let ordered = comm.on(&compute).timeout(timeout).all_reduce(buf).join(&compute).unwrap();
            let launches = scope.spawn(move || launch(0, stream, at));
            until("a launch waits for room", || calls("waiting for room") > blocked);
            told.lock().unwrap().send(()).unwrap();
            meanwhile(&mut parent, &mut other);
            assert!(!launches.is_finished(), "what was done meanwhile took until the end of the operation");
            end(&comm);
            let Failed { buf, error } = soon(ordered).unwrap_err();
            let took = begin.elapsed();
            launches.join().unwrap();
            assert_eq!(down(buf.unwrap()), values(0, 100), "nothing was written");
            (error, took)
        });
        assert_eq!(down(scratch), [1; 16]);
        drop((comm, compute));
        soon(other.close()).unwrap();
        soon(parent.close()).unwrap();
        Some(ended)
    });
    nothing_left("all ranks have ended");
    assert_eq!(report().freed_in_use, 0);
    ended.remove(0).unwrap()
}

fn is_timeout_of_rank_1((error, took): (Error, Duration), timeout: Duration) {
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing[0].rank == 1), "{error}");
    assert!(timeout <= took && took < timeout + Duration::from_millis(500), "it ended after {took:?}");
}

/// Law 4 with a driver that blocks: at the deadline the stream goes on, and with it the thread that waits for room there.
#[test]
fn law_4_a_late_peer_ends_by_the_deadline_though_the_driver_blocks() {
    child("blocked::law_4_a_late_peer_ends_by_the_deadline_though_the_driver_blocks", whole_lock(), || {
        let timeout = Duration::from_secs(1);
        // First a device for each rank, then one for both: they share its context, so rank 1's driver calls wait, too.
        for devices in [2, 1] {
            is_timeout_of_rank_1(late_peer(devices, timeout, |_, _| (), |_| ()), timeout);
        }
    });
}

/// The bound communicator's sibling and their common parent go on: both work on host memory.
#[test]
fn host_operations_of_the_same_rank_go_on_while_the_driver_blocks() {
    child("blocked::host_operations_of_the_same_rank_go_on_while_the_driver_blocks", whole_lock(), || {
        let timeout = Duration::from_secs(1);
        let meanwhile = |parent: &mut Comm, other: &mut Comm| {
            let peer = 1 - parent.rank();
            let [mine, theirs] = [parent.rank() as u32 + 1, peer as u32 + 1];
            for len in [10, 50_000] {
                assert_eq!(soon(other.all_reduce(vec![mine; len])).unwrap(), vec![3; len]);
                assert_eq!(soon(parent.all_reduce(vec![mine; len])).unwrap(), vec![3; len]);
                let (_, got) = soon(parent.send_recv(vec![mine; len], peer, vec![9; len], peer)).unwrap();
                assert_eq!(got, vec![theirs; len]);
            }
            soon(parent.barrier()).unwrap();
        };
        for devices in [2, 1] {
            is_timeout_of_rank_1(late_peer(devices, timeout, meanwhile, |_| ()), timeout);
        }
    });
}

#[test]
fn an_abort_returns_at_once_though_the_driver_blocks() {
    child("blocked::an_abort_returns_at_once_though_the_driver_blocks", whole_lock(), || {
        let took = Mutex::new(Vec::new());
        let abort = |comm: &Comm| {
            let (told, hear) = channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let begin = Instant::now();
                    comm.abort("a test");
                    told.send(begin.elapsed())
                });
                took.lock().unwrap().push(hear.recv_timeout(DEADLINE).unwrap());
            });
        };
        // Once with a context that both ranks share. Only the fastest abort is judged: other programs may have the core.
        for devices in [2, 1, 2] {
            let (error, took) = late_peer(devices, Duration::from_secs(30), |_, _| (), abort);
            assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
            assert!(took < LONGEST / 2, "the operation ended {took:?} after its call");
        }
        let took = took.into_inner().unwrap();
        assert!(took.iter().min().unwrap() < &Duration::from_millis(50), "{took:?}");
    });
}

/// The driver blocks in the first call that it gets for a collective, as the rank's stream is full. Its inputs are not known to be there, so that
/// the time limit counts only because the driver has not taken the collective.
#[test]
fn law_4_a_driver_that_blocks_before_it_has_taken_a_collective_ends_by_the_deadline() {
    child(
        "blocked::law_4_a_driver_that_blocks_before_it_has_taken_a_collective_ends_by_the_deadline",
        &[],
        || {
            let (device, ours) = device();
            let [one, other] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
            let mut comm = Comm::local(1).unwrap().remove(0);
            soon(comm.bind_stream(&ours)).unwrap();
            // The inputs of a buffer on each of two streams have no word of a caller's stream: the rank's stream waits for both.
            let into = || DeviceBuf::<f32>::zeroed(&other, 100).unwrap();
            let (buf, sum) = soon(comm.all_reduce_into(up(&one, values(0, 100)), into())).unwrap();
            let (scratch, held) = (up(&ours, vec![0_u8; 16]), DeviceBuf::<u32>::zeroed(&ours, 16).unwrap());
            let host = PinnedBuf::<u32>::zeroed(&device, 16).unwrap();
            let (stream, at, timeout) = (ours.as_raw() as usize, scratch.as_ptr(), Duration::from_secs(1));
            let (shared, blocked) = (comm.share(), calls("waiting for room"));
            pass(true, 0);
            let copy = held.copy_from_host(host);
            std::thread::scope(|scope| {
                let _limited = Limited::new();
                scope.spawn(move || launch(0, stream, at));
                until("the stream is full", || calls("waiting for room") > blocked);
                let call = scope.spawn(move || soon(shared.timeout(timeout).all_reduce_into(buf, sum)));
                let ended = Instant::now() + DEADLINE / 2;
                while comm.check().is_ok() && Instant::now() < ended {
                    std::thread::sleep(Duration::from_millis(1));
                }
                pass(true, u64::MAX);
                set_depth(0);
                let error = comm.check().unwrap_err();
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
                assert!(error.to_string().contains("does not answer"), "{error}");
                assert!(call.join().unwrap().is_err());
            });
            drop((soon(copy).unwrap(), comm, scratch, ours, one, other, device));
            nothing_left("all was dropped");
        },
    );
}

/// Makes the call twice: once it is awaited, and once joined with the stream.
macro_rules! both {
    ($comm:expr, $stream:expr, |$call:ident| $work:expr) => {{
        let $call = $comm.call();
        drop(soon($work).unwrap());
        let $call = $comm.on($stream);
        drop(soon($work.join($stream).unwrap()).unwrap());
    }};
}

/// Every collective in place, and all but `scan` out of place.
fn basics(comm: &mut Comm, stream: &DeviceStream, len: usize) {
    let (n, is_root) = (comm.size(), comm.rank() == 1);
    let buf = |len: usize| up(stream, vec![1.0_f32; len]);
    let all = || buf(n * len);
    let at_root = || if is_root { buf(n * len) } else { buf(len) };
    let one = || buf(len);
    both!(comm, stream, |c| c.all_reduce(one()));
    both!(comm, stream, |c| c.reduce(one(), 1));
    both!(comm, stream, |c| c.broadcast(one(), 1));
    both!(comm, stream, |c| c.all_gather_in_place(all()));
    both!(comm, stream, |c| c.reduce_scatter_in_place(all()));
    both!(comm, stream, |c| c.all_to_all_in_place(all()));
    both!(comm, stream, |c| c.gather_in_place(at_root(), 1));
    both!(comm, stream, |c| c.scatter_in_place(at_root(), 1));
    both!(comm, stream, |c| c.scan(one()));
    both!(comm, stream, |c| c.exscan(one()));
    both!(comm, stream, |c| c.all_reduce_into(one(), one()));
    both!(comm, stream, |c| c.reduce_into(one(), one(), 1));
    both!(comm, stream, |c| c.broadcast_into(one(), one(), 1));
    both!(comm, stream, |c| c.all_gather_into(one(), all()));
    both!(comm, stream, |c| c.reduce_scatter_into(all(), one()));
    both!(comm, stream, |c| c.all_to_all_into(all(), all()));
    both!(comm, stream, |c| c.gather_into(one(), at_root(), 1));
    both!(comm, stream, |c| c.scatter_into(at_root(), one(), 1));
    both!(comm, stream, |c| c.exscan_into(one(), one()));
    let (next, last) = ((comm.rank() + 1) % n, (comm.rank() + n - 1) % n);
    drop(soon(comm.send_recv(one(), next, one(), last)).unwrap());
    soon(comm.barrier()).unwrap();
}

/// A driver that blocks under a lock would hold up every thread that needs the lock: other communicators, deadlines, aborts.
#[test]
fn no_driver_is_called_under_the_engines_locks() {
    child("blocked::no_driver_is_called_under_the_engines_locks", whole_lock(), || {
        // Bound communicators work on devices; others stage what they send on the host.
        for (n, is_bound) in [(2, true), (4, true), (2, false), (4, false)] {
            ranks(n, |mut comm| {
                let stream = if is_bound {
                    bound(&mut comm, 2)
                } else {
                    DeviceStream::new(&Device::new(comm.rank() % 2).unwrap()).unwrap()
                };
                [0, 1, 1000, 70_000].iter().for_each(|len| basics(&mut comm, &stream, *len));
                soon(comm.close()).unwrap();
            });
        }
        nothing_left("all ranks have ended");
        let (calls, names) = crate::support::calls_under_locks();
        assert_eq!(calls, 0, "calls of the driver under the engine's locks: {names}");
    });
}

/// The results of a staged operation go back when the stream of its output has come past the call; by then the stream is full again. Whoever puts the
/// copies there waits for room, and that is not the thread that sees events: meanwhile events of another device are heard of.
#[test]
fn results_for_a_stream_that_is_full_hold_up_no_event() {
    let variables = [("ALLSTREAM_TEST_CUDA_LOCK", "memory"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("blocked::results_for_a_stream_that_is_full_hold_up_no_event", &variables, || {
        const ALL: u64 = u64::MAX;
        let mut comm = Comm::local(1).unwrap().remove(0);
        let [device, other] = [0, 1].map(|device| Device::new(device).unwrap());
        let [inputs, full] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
        let elsewhere = DeviceStream::new(&other).unwrap();
        let (input, output) = (up(&inputs, values(0, 100)), up(&full, vec![0_f32; 100]));
        let scratch = up(&full, vec![0_u8; 16]);
        let pinned = || PinnedBuf::from_slice(&device, &values(0, 100)).unwrap();
        pass(true, 0);
        let before_the_call = DeviceBuf::from_host(&full, pinned());
        let work = comm.timeout(2 * DEADLINE).all_gather_into(input, output);
        let behind_it = DeviceBuf::from_host(&full, pinned());
        // The data of this operation moves only when that of the one before has moved.
        soon(comm.barrier()).unwrap();
        let (stream, at) = (full.as_raw() as usize, scratch.as_ptr());
        std::thread::scope(|scope| {
            let _limited = Limited::new();
            let (crowded, copies) = (calls("waiting for room"), calls("cuMemcpyHtoDAsync_v2"));
            let launches = scope.spawn(move || launch(0, stream, at));
            until("a launch waits for room", || calls("waiting for room") > crowded);
            pass(true, 1);
            until("the results go back", || calls("cuMemcpyHtoDAsync_v2") > copies);
            let begin = Instant::now();
            soon(elsewhere.record().unwrap()).unwrap();
            assert!(begin.elapsed() < LONGEST / 2, "heard of after {:?}", begin.elapsed());
            assert!(!launches.is_finished(), "the stream is full");
            pass(true, ALL);
            launches.join().unwrap();
        });
        assert_eq!(down(soon(work).unwrap().1), values(0, 100));
        drop((soon(before_the_call).unwrap(), soon(behind_it).unwrap()));
        assert_eq!(down(scratch), [1; 16]);
        soon(comm.close()).unwrap();
        drop((inputs, full, elsewhere, device, other));
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}
