//! Law 1: eager, and in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, Error, Failed, HostStream, Message};
use futures::executor::block_on;

use super::house::*;

#[test]
fn law_1_a_work_that_is_never_polled_completes() {
    for link in LINKS {
        let mut comms = within(LIMIT, move || world(3, link));
        let (mut one, mut two) = (comms.pop().unwrap(), comms.pop().unwrap());
        let mut zero = comms.pop().unwrap();
        within(LIMIT, move || {
            for (round, len) in [1usize, 40, 5_000, 300_000, 3].into_iter().enumerate() {
                // Let the progress thread fall asleep: the submission alone must wake it.
                thread::sleep(Duration::from_millis(if round % 2 == 0 { 40 } else { 0 }));
                let unpolled = zero.all_reduce(vec![1f32; len]);
                drop(one.all_reduce(vec![2f32; len]));
                let seen = two.all_reduce(vec![3f32; len]).wait().unwrap();
                assert_eq!(seen, vec![6f32; len], "{link:?}: peers see what was never polled");
                assert_eq!(unpolled.wait().unwrap(), seen);
            }
            // Nobody polls anything.
            let (buf, drops) = Watched::new(100_000, 1.0);
            drop(zero.all_reduce(buf));
            drop(one.all_reduce(vec![1f32; 100_000]));
            drop(two.all_reduce(vec![1f32; 100_000]));
            wait_until("the engine to let the buffer go", || drops.load(Ordering::SeqCst) == 1);
            close(vec![zero, one, two]);
        });
    }
}

#[test]
fn law_1_submission_order_is_matching_order() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let rank = comm.rank();
            let works: Vec<_> =
                (0..60usize).map(|i| comm.all_reduce(vec![(i * (rank + 1)) as u64; 1 + i * i])).collect();
            // Awaited in another order on every rank.
            let mut order: Vec<_> = works.into_iter().enumerate().collect();
            order.rotate_left(17 * rank);
            if rank % 2 == 1 {
                order.reverse();
            }
            for (i, work) in order {
                assert_eq!(work.wait().unwrap(), vec![(i * 6) as u64; 1 + i * i], "{link:?}, operation {i}");
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_an_operation_on_a_stream_starts_after_what_the_stream_holds() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let stream = HostStream::new("compute").unwrap();
            for round in 0..10u64 {
                let ready = Arc::new(AtomicBool::new(false));
                let mut input = vec![0f32; 2000];
                // The job writes the very memory that is reduced: through a pointer, as a kernel would.
                struct At(*mut f32);
                // SAFETY: only the job uses the pointer, and only before the operation reads the buffer, which is what this test checks.
                unsafe impl Send for At {}
                let (at, done, value) = (At(input.as_mut_ptr()), ready.clone(), round as f32 + 1.0);
                stream.launch(move || {
                    let at = at;
                    thread::sleep(Duration::from_millis(5));
                    // SAFETY: the operation owns the vector of 2000 elements, and does not start before this job has ended.
                    (0..2000).for_each(|i| unsafe { at.0.add(i).write(value) });
                    done.store(true, Ordering::SeqCst);
                });
                let work = comm.on(&stream).all_reduce(input);
                let sum = work.wait().unwrap();
                assert!(
                    ready.load(Ordering::SeqCst),
                    "{link:?}: it finished before the stream had come to it"
                );
                assert_eq!(sum, vec![2.0 * (round as f32 + 1.0); 2000]);
            }
            // Messages likewise.
            let peer = 1 - comm.rank();
            let ready = Arc::new(AtomicBool::new(false));
            let done = ready.clone();
            stream.launch(move || {
                thread::sleep(Duration::from_millis(20));
                done.store(true, Ordering::SeqCst);
            });
            let gated = comm.on(&stream).send(vec![7u8; 100], peer);
            let got = comm.recv(vec![0u8; 100], peer).wait().unwrap();
            gated.wait().unwrap();
            assert!(ready.load(Ordering::SeqCst));
            assert_eq!(got, vec![7u8; 100]);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_a_gated_operation_blocks_no_other_communicator() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let mut other = block_on(comm.dup()).unwrap();
            let stream = HostStream::new("slow").unwrap();
            let (open, memory_lock) = channel::<()>();
            stream.launch(move || memory_lock.recv_timeout(LIMIT).unwrap());
            let mut gated = comm.on(&stream).all_reduce(vec![1f32; 50_000]);
            let behind = comm.all_reduce(vec![2f32; 10]);
            for len in [1usize, 1000, 200_000] {
                assert_eq!(other.all_reduce(vec![1u32; len]).wait().unwrap(), vec![2u32; len]);
            }
            // Messages of the same communicator do not wait for its collectives either.
            let peer = 1 - comm.rank();
            let batch = comm.batch([
                Message::Send { buf: vec![3u8; 100_000], to: peer, tag: 0 },
                Message::Recv { buf: vec![0u8; 100_000], from: peer, tag: 0 },
            ]);
            assert_eq!(batch.wait().unwrap()[1], vec![3u8; 100_000]);
            assert!(poll_once(&mut gated).is_pending(), "{link:?}: its stream has not come to it");
            other.barrier().wait().unwrap();
            open.send(()).unwrap();
            assert_eq!(gated.wait().unwrap(), vec![2f32; 50_000]);
            assert_eq!(behind.wait().unwrap(), vec![4f32; 10]);
            block_on(other.close()).unwrap();
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_join_makes_the_stream_wait_and_not_the_host() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let stream = HostStream::new("update").unwrap();
            let rank = comm.rank();
            let (go, memory_lock) = channel::<()>();
            let hold = HostStream::new("hold").unwrap();
            hold.launch(move || memory_lock.recv_timeout(LIMIT).unwrap());
            let work = comm.on(&hold).all_reduce(vec![1f64; 30_000]);
            let start = Instant::now();
            let order = Arc::new(AtomicUsize::new(0));
            let (first, second) = (order.clone(), order.clone());
            let summed = work.join(&stream).unwrap();
            let halved = summed.launch(&stream, move |mut v: Vec<f64>| {
                assert_eq!(first.fetch_add(1, Ordering::SeqCst), 0);
                v.iter_mut().for_each(|x| *x /= 2.0);
                v
            });
            stream.launch(move || assert_eq!(second.fetch_add(1, Ordering::SeqCst), 1));
            let point = stream.record();
            assert!(start.elapsed() < SOON, "the host was not blocked");
            assert!(!point.is_complete() && !halved.event().is_complete());
            go.send(()).unwrap();
            assert_eq!(block_on(halved).unwrap(), vec![1f64; 30_000]);
            point.wait().unwrap();
            assert_eq!(order.load(Ordering::SeqCst), 2);
            assert!(!stream.is_failed());
            // Joining a refused operation fails at once and gives the buffer back.
            let refused = comm.broadcast(vec![0u8; 3], 9).join(&stream).unwrap_err();
            assert_eq!(refused.buf, Some(vec![0u8; 3]));
            // A joined value that nobody waits for, and one that is waited for without a job.
            drop(comm.all_reduce(vec![rank as i32; 10]).join(&stream).unwrap());
            let plain = comm.all_reduce(vec![rank as i32; 10]).join(&stream).unwrap();
            assert_eq!(plain.wait().unwrap(), vec![1; 10]);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn law_1_a_panicking_stream_fails_the_operation_on_all_ranks() {
    quiet_panics();
    for link in LINKS {
        for message in [false, true] {
            let comms = within(LIMIT, move || world(3, link));
            let errors = threads(comms, move |mut comm| {
                let rank = comm.rank();
                let stream = HostStream::new("compute").unwrap();
                let result = if rank == 1 {
                    stream.launch(|| panic!("planted"));
                    let call = comm.on(&stream);
                    if message {
                        call.send(vec![1f32; 5], 0).wait()
                    } else {
                        call.all_reduce(vec![1f32; 5]).wait()
                    }
                } else if message && rank == 0 {
                    comm.recv(vec![1f32; 5], 1).wait()
                } else {
                    comm.all_reduce(vec![1f32; 5]).wait()
                };
                let Failed { buf, error } = result.unwrap_err();
                assert_eq!(buf.map(|b| b.len()), Some(5), "{link:?}: the buffer comes back");
                let later = comm.all_reduce(vec![1f32; 5]).wait().unwrap_err();
                assert_eq!(later.error, comm.check().unwrap_err(), "later calls say the same");
                error
            });
            for error in errors {
                let text = error.to_string();
                assert!(text.contains("panicked") && text.contains("stream"), "{link:?}, {message}: {text}");
            }
        }
    }
}

#[test]
fn law_1_a_failed_operation_fails_the_stream_that_joined_it() {
    let comms = Comm::local(2).unwrap();
    threads(comms, |mut comm| {
        let stream = HostStream::new("update").unwrap();
        let work = comm.all_reduce(vec![1f32; 10 + comm.rank()]);
        let ran = Arc::new(AtomicBool::new(false));
        let mark = ran.clone();
        let joined = work.join(&stream).unwrap().launch(&stream, move |v: Vec<f32>| {
            mark.store(true, Ordering::SeqCst);
            v
        });
        let failed = joined.wait().unwrap_err();
        assert!(matches!(failed.error, Error::Mismatch { .. }), "{failed:?}");
        assert!(failed.buf.is_some());
        assert!(!ran.load(Ordering::SeqCst), "no job ran on data that never came");
        assert!(stream.synchronize().is_err() && stream.is_failed());
    });
}

#[test]
fn law_1_no_job_runs_on_a_stream_that_has_failed_and_its_error_is_the_cause() {
    quiet_panics();
    let comms = Comm::local(2).unwrap();
    threads(comms, |mut comm| {
        let mut good = block_on(comm.dup()).unwrap();
        // A value that came well, and a stream on which a job has panicked.
        let stream = HostStream::new("update").unwrap();
        let sum = good.all_reduce(vec![1f32; 10]).join(&HostStream::new("other").unwrap()).unwrap();
        stream.launch(|| panic!("planted"));
        let ran = Arc::new(AtomicBool::new(false));
        let mark = ran.clone();
        let launched = sum.launch(&stream, move |_: Vec<f32>| mark.store(true, Ordering::SeqCst));
        let text = launched.wait().unwrap_err().error.to_string();
        assert!(text.contains("did not run") && text.contains("panicked"), "{text}");
        assert!(!ran.load(Ordering::SeqCst), "a job ran behind one that had failed");
        // The same behind an operation that failed: the stream, and what is launched there, tell that operation's error.
        let stream = HostStream::new("update").unwrap();
        let work = comm.all_reduce(vec![1f32; 10 + comm.rank()]);
        let failed = work.join(&stream).unwrap();
        let sum = good.all_reduce(vec![1f32; 10]).join(&stream).unwrap();
        let mark = ran.clone();
        let launched = sum.launch(&stream, move |_: Vec<f32>| mark.store(true, Ordering::SeqCst));
        let error = launched.wait().unwrap_err().error;
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert!(!ran.load(Ordering::SeqCst), "a job ran on a stream that had failed");
        assert_eq!(stream.synchronize().unwrap_err(), failed.wait().unwrap_err().error);
        // Values that are only joined come back all the same.
        let sum = good.all_reduce(vec![1f32; 10]).join(&stream).unwrap();
        assert_eq!(sum.wait().unwrap(), vec![2f32; 10]);
    });
}
