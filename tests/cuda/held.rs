//! Hazards that are too short to be met by chance: a copy that does not pass holds up a stream, or a rank is stopped at a point in
//! the code, and the others go on meanwhile. The name before a test's colon is the wait (`testing::Wait`) without which that test fails.

use std::future::Future;
use std::sync::Barrier;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use allstream::cuda::{DeviceBuf, DeviceStream, PinnedBuf};
use allstream::testing::{Point, is_stopped, stop_at};
use allstream::{Algo, Error, Failed, Work};

use crate::support::{
    DEADLINE, bound, calls, down, nothing_left, pass, ranks, report, set_delays, set_queues, until, up,
    values,
};

type Buf = DeviceBuf<f32>;

/// How long a test waits to see that something does not end too early.
const LONG: Duration = Duration::from_millis(200);
const ALL: u64 = u64::MAX;

/// Polls an operation until it ends or the time is over: the thread that would drive it otherwise may be the one that is stopped.
fn within(limit: Duration, work: &mut Work<Buf>) -> Option<Result<Buf, Failed<Buf>>> {
    let (mut task, end) = (Context::from_waker(Waker::noop()), Instant::now() + limit);
    loop {
        if let std::task::Poll::Ready(result) = std::pin::Pin::new(&mut *work).poll(&mut task) {
            return Some(result);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn end(mut work: Work<Buf>) -> Result<Buf, Failed<Buf>> {
    within(DEADLINE, &mut work).expect("ends in time")
}

fn failed(work: Work<Buf>) -> (Error, Buf) {
    let Failed { buf, error } = end(work).unwrap_err();
    let text = error.to_string();
    (error, buf.unwrap_or_else(|| panic!("no buffer: {text}")))
}

/// Holds a stream up, until copies to devices pass again.
fn hold_up(stream: &DeviceStream) {
    let host = PinnedBuf::<u32>::zeroed(&stream.device(), 16).unwrap();
    pass(true, 0);
    drop(DeviceBuf::zeroed(stream, 16).unwrap().copy_from_host(host));
}

/// `After`: the buffer's stream has not come to the call. Rank 1, from which no other rank reads, waits for its own stream alone; so where
/// only that stream is held up, nothing else hides a missing wait.
fn nothing_ends_before_its_input_is_there() {
    for is_root_held in [true, false] {
        let [called, looked] = [(); 2].map(|()| Barrier::new(2));
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 2);
            let buf = up(&stream, vec![2.0; 3000]);
            called.wait();
            if comm.rank() == 1 || is_root_held {
                hold_up(&stream);
            }
            // Copies may be held up from here on; a root that is not held up makes none.
            called.wait();
            let mut work = comm.broadcast(buf, 0);
            let is_early = within(LONG, &mut work).is_some();
            assert!(comm.rank() == 0 && !is_root_held || !is_early, "it ended, and its input is not there");
            looked.wait();
            pass(true, ALL);
            if !is_early {
                assert!(down(end(work).unwrap()).iter().all(|x| *x == 2.0));
            }
        });
    }
}

/// `MemoryLock`: a reader has seen a frame, and has not yet put its work on its stream.
fn no_buffer_comes_back_while_a_reader_is_at_it() {
    let called = Barrier::new(2);
    ranks(2, |mut comm| {
        let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
        let buf = up(&stream, values(rank, 3000));
        if rank == 1 {
            called.wait();
            return drop(end(comm.all_reduce(buf)));
        }
        stop_at(Some((Point::Read, 1)));
        let mut work = comm.all_reduce(buf);
        called.wait();
        until("the other rank looks", is_stopped);
        comm.abort("a test");
        assert!(within(LONG, &mut work).is_none(), "a buffer came back, and a peer is about to read it");
        stop_at(None);
        failed(work);
    });
}

/// `Revoked`: a reader looks for frames after their sender has got its buffer back.
fn nobody_reads_what_was_taken_back() {
    let called = Barrier::new(2);
    ranks(2, |mut comm| {
        let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
        let buf = up(&stream, values(rank, 3000));
        if rank == 1 {
            called.wait();
            let _ = end(comm.all_reduce(buf));
            stream.synchronize().expect("the device did nothing that it must not");
            let same = down(up(&stream, values(1, 3000)));
            assert!(same == values(1, 3000));
            return;
        }
        let work = comm.all_reduce(buf);
        stop_at(Some((Point::MemoryLock, 1)));
        called.wait();
        until("the other rank is about to look", is_stopped);
        comm.abort("a test");
        drop(failed(work));
        stream.synchronize().unwrap();
        stream.device().trim().unwrap();
        stop_at(None);
    });
}

/// `GiveUpOurs`: a rank's operation fails before the rank hears that a peer reads its workspace, and the peer's stream reads it late.
fn a_hand_stays_while_a_peer_is_yet_to_read_it() {
    const N: usize = 4;
    let (ready, [posted, aborted]) = (Barrier::new(N), [(); 2].map(|()| Barrier::new(2)));
    let before = calls("cuLaunchKernel");
    ranks(N, |mut comm| {
        let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
        let buf = up(&stream, values(rank, 3000));
        let call = |comm: &mut allstream::Comm, buf| comm.algo(Algo::Binomial).reduce(buf, 0);
        ready.wait();
        match rank {
            0 => {
                posted.wait();
                hold_up(&stream);
                let mut work = call(&mut comm, buf);
                // Rank 2's kernel, and the root's.
                until("all is on the root's stream", || {
                    assert!(
                        within(Duration::ZERO, &mut work).is_none(),
                        "it ended, and its stream is held up"
                    );
                    calls("cuLaunchKernel") == before + 2
                });
                comm.abort("a test");
                aborted.wait();
                let buf = end(work).unwrap_or_else(|failed| failed.buf.unwrap());
                let right = |i: usize| (0..N).map(|rank| values(rank, 3000)[i]).sum::<f32>();
                let right: Vec<f32> = (0..3000).map(right).collect();
                assert!(down(buf) == right, "what was on the stream read something else");
            }
            2 => {
                let mut work = call(&mut comm, buf);
                let combined = || calls("cuLaunchKernel") > before;
                until("its part is on its stream", || {
                    within(Duration::ZERO, &mut work).is_some() || combined()
                });
                stop_at(Some((Point::Drive, 2)));
                std::thread::scope(|scope| {
                    // The thread that drives the operation stays at that point: this one, or the progress thread.
                    let ends = scope.spawn(|| end(work));
                    until("it is stopped", is_stopped);
                    posted.wait();
                    aborted.wait();
                    until("it has heard", || comm.check().is_err());
                    stop_at(None);
                    drop(ends.join().unwrap());
                });
                // Nothing of this rank is on a stream any more. The buffers below take all that is free in the pool's block.
                std::thread::sleep(LONG);
                let other = DeviceStream::new(&stream.device()).unwrap();
                let large: Vec<_> = (0..60).map(|_| Buf::zeroed(&other, 1 << 18).unwrap()).collect();
                let small: Vec<_> = (0..1000).map(|_| Buf::zeroed(&other, 3000).unwrap()).collect();
                other.synchronize().unwrap();
                pass(true, ALL);
                drop((large, small));
            }
            _ => drop(end(call(&mut comm, buf))),
        }
    });
}

/// Runs all tests of this file. Every stream has a hardware queue of its own, so that only the order of work holds it up: a stream that
/// shares a queue with one that is held up cannot go on, and these tests would wait for it.
pub(crate) fn all() {
    set_delays(0, 1);
    set_queues(32);
    let tests: [fn(); 4] = [
        nothing_ends_before_its_input_is_there,
        no_buffer_comes_back_while_a_reader_is_at_it,
        nobody_reads_what_was_taken_back,
        a_hand_stays_while_a_peer_is_yet_to_read_it,
    ];
    for test in tests {
        test();
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0, "memory was freed that a device still touched");
    }
    set_queues(0);
}
