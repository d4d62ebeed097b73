//! Collectives on devices, joined with streams of devices: order without the host, and deadlines.

use std::time::Duration;

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::{Comm, Error, Failed};

use crate::support::{
    calls, child, down, fail, nothing_left, pass, ranks, report, set_delays, soon, until, up, values,
};

const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300")];

/// Binds a rank to device 0, and returns a stream for its computations.
fn bound(comm: &mut Comm) -> DeviceStream {
    let device = Device::new(0).unwrap();
    assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
    DeviceStream::new(&device).unwrap()
}

/// No host waits in between: what a collective leaves is the next one's input, in the order of streams.
#[test]
fn a_chain_of_collectives_is_in_order_without_the_host() {
    child("joined::a_chain_of_collectives_is_in_order_without_the_host", SLOW, || {
        for seed in 0..10 {
            set_delays(500, seed);
            ranks(2, |mut comm| {
                let compute = bound(&mut comm);
                let mut grads = up(&compute, values(comm.rank(), 3000));
                let mut expected =
                    values(0, 3000).iter().zip(values(1, 3000)).map(|(a, b)| a + b).collect::<Vec<_>>();
                for _ in 0..8 {
                    let work = comm.on(&compute).all_reduce(grads);
                    grads = work.join(&compute).unwrap().in_order().unwrap();
                }
                expected.iter_mut().for_each(|x| *x *= 128.0);
                assert_eq!(down(grads), expected, "seed {seed}");
                soon(comm.close()).unwrap();
            });
        }
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The ranks are bound to the streams that they join: no stream waits for itself, and the order is the same.
#[test]
fn a_chain_on_the_very_stream_that_the_ranks_are_bound_to() {
    child("joined::a_chain_on_the_very_stream_that_the_ranks_are_bound_to", SLOW, || {
        ranks(2, |mut comm| {
            let stream = DeviceStream::new(&Device::new(0).unwrap()).unwrap();
            assert_eq!(soon(comm.bind_stream(&stream)).unwrap(), DevicePath::Peer);
            let mut grads = up(&stream, vec![1.0f32; 3000]);
            for _ in 0..20 {
                let ordered = comm.all_reduce(grads).join(&stream).unwrap();
                grads = ordered.in_order().unwrap();
            }
            assert_eq!(down(grads), vec![(1 << 20) as f32; 3000]);
            // An operation that fails while its caller waits in `join`.
            if comm.rank() == 0 {
                let buf = up(&stream, vec![1.0f32; 10]);
                let joined = comm.timeout(Duration::from_millis(100)).all_reduce(buf).join(&stream);
                let error = joined.map(|_| ()).unwrap_err().error;
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
            } else {
                until("the other rank has given up", || comm.check().is_err());
            }
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The peer comes late: the stream waits for what is not there yet, and the host does not.
#[test]
fn a_stream_waits_for_a_collective_whose_peers_have_not_called() {
    child("joined::a_stream_waits_for_a_collective_whose_peers_have_not_called", SLOW, || {
        let (told, hear) = std::sync::mpsc::channel();
        let (told, hear) = (&std::sync::Mutex::new(told), &std::sync::Mutex::new(hear));
        ranks(2, |mut comm| {
            let compute = bound(&mut comm);
            let mut grads = up(&compute, vec![comm.rank() as f32 + 1.0; 500]);
            if comm.rank() == 1 {
                // Rank 1 calls only when rank 0's stream waits.
                hear.lock().unwrap().recv_timeout(Duration::from_secs(10)).unwrap();
            }
            for _ in 0..3 {
                let ordered = comm.on(&compute).all_reduce(grads).join(&compute).unwrap();
                grads = ordered.launch(&compute, |buf| buf).in_order().unwrap();
            }
            let point = compute.record().unwrap();
            if comm.rank() == 0 {
                assert!(!point.is_complete().unwrap(), "nobody has called but this rank");
                told.lock().unwrap().send(()).unwrap();
            }
            assert_eq!(down(grads), [12.0; 500]);
            soon(comm.close()).unwrap();
        });
        assert!(calls("cuStreamWaitValue32_v2") > 0);
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The driver refuses to make another stream wait: the host waits instead, and nothing is lost.
#[test]
fn a_stream_that_cannot_wait_is_waited_for_by_the_host() {
    child("joined::a_stream_that_cannot_wait_is_waited_for_by_the_host", SLOW, || {
        ranks(2, |mut comm| {
            let compute = bound(&mut comm);
            let second = DeviceStream::new(&compute.device()).unwrap();
            let ordered = comm.all_reduce(up(&compute, vec![1.5f32; 500])).join(&compute).unwrap();
            soon(comm.barrier()).unwrap();
            let ordered = if comm.rank() == 0 {
                fail(Some("cuStreamWaitEvent"), 1, 999);
                let ordered = ordered.launch(&second, |buf| buf);
                fail(None, 0, 0);
                ordered
            } else {
                ordered
            };
            assert_eq!(down(soon(ordered).unwrap()), [3.0; 500]);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Law 4: a stream that waits goes on at the deadline, and whoever awaits the operation gets the error.
#[test]
fn law_4_a_stream_is_released_by_the_deadline() {
    child("joined::law_4_a_stream_is_released_by_the_deadline", SLOW, || {
        let mut comms = Comm::local(2).unwrap();
        let mut second = comms.pop().unwrap();
        let mut first = comms.pop().unwrap();
        let other = std::thread::spawn(move || (bound(&mut second), second));
        let compute = bound(&mut first);
        // (The other rank has its streams by now: one that it made later might be held up.)
        let (theirs, second) = other.join().unwrap();
        let deadline = Duration::from_millis(150);
        let buf = up(&compute, values(0, 100));
        let ordered = first.timeout(deadline).all_reduce(buf).join(&compute).unwrap();
        let point = compute.record().unwrap();
        soon(point).unwrap();
        let Failed { buf, error } = soon(ordered).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing[0].rank == 1), "{error}");
        assert_eq!(down(buf.unwrap()), values(0, 100), "nothing was written");
        assert!(first.check().is_err());
        drop((first, second, compute, theirs));
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Law 4: the peer has called, and its device never gets to the operation.
#[test]
fn law_4_a_device_that_does_not_come_to_it_is_named() {
    child("joined::law_4_a_device_that_does_not_come_to_it_is_named", SLOW, || {
        let errors = ranks(2, |mut comm| {
            let compute = bound(&mut comm);
            let rank = comm.rank();
            let buf = up(&compute, values(rank, 100));
            // Rank 1's stream is held up by a collective that only rank 1 calls, on a duplicate of the communicator.
            let mut pair = soon(comm.dup()).unwrap();
            soon(pair.bind_device(&Device::new(0).unwrap())).unwrap();
            let holding = (rank == 1).then(|| {
                let own = up(&compute, vec![0f32; 4]);
                pair.timeout(Duration::from_secs(3)).all_reduce(own).join(&compute).unwrap()
            });
            let result = soon(comm.on(&compute).timeout(Duration::from_millis(200)).all_reduce(buf));
            let error = result.map(drop).unwrap_err().error;
            drop((holding, pair));
            error
        });
        for error in errors {
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert!(missing.iter().all(|missing| missing.rank == 1), "{error}");
            assert!(error.to_string().contains("its device has not come to it"), "{error}");
        }
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// In the driver, a copy to memory that is not pinned would block its thread until the other rank has called; but the task of that rank
/// runs on the same thread.
#[test]
fn ranks_of_one_thread_copy_to_any_memory_behind_a_collective() {
    child("joined::ranks_of_one_thread_copy_to_any_memory_behind_a_collective", SLOW, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let rank = |mut comm: Comm| async move {
                let device = Device::new(0).unwrap();
                comm.bind_device(&device).await.unwrap();
                let stream = DeviceStream::new(&device).unwrap();
                let mine = values(comm.rank(), 70_000);
                let (host, grads) = DeviceBuf::from_host(&stream, mine).await.unwrap();
                let work = comm.on(&stream).all_reduce(grads);
                let grads = work.join(&stream).unwrap().in_order().unwrap();
                let (grads, host) = grads.to_host(host).await.unwrap();
                let (_, again) = grads.copy_from_host(host).await.unwrap();
                let (_, again) = again.to_host(vec![0.0; 70_000]).await.unwrap();
                let expected: Vec<f32> =
                    values(0, 70_000).iter().zip(values(1, 70_000)).map(|(a, b)| a + b).collect();
                assert_eq!(again, expected);
                comm.close().await.unwrap();
            };
            let ranks = futures::future::join_all(Comm::local(2).unwrap().into_iter().map(rank));
            tokio::time::timeout(Duration::from_secs(30), ranks).await.unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Law 4: an abort that comes while a stream is made to wait leaves no stream waiting.
#[test]
fn law_4_a_join_beside_an_abort_leaves_no_stream_waiting() {
    child("joined::law_4_a_join_beside_an_abort_leaves_no_stream_waiting", &[], || {
        let begin = std::sync::Barrier::new(2);
        for round in 0..50 {
            ranks(2, |mut comm| {
                let compute = bound(&mut comm);
                let buf = up(&compute, values(comm.rank(), 100));
                begin.wait();
                if comm.rank() == 1 {
                    let start = std::time::Instant::now();
                    while start.elapsed() < Duration::from_micros(3 * round) {
                        std::hint::spin_loop();
                    }
                    return comm.abort("a test");
                }
                let joined = comm.all_reduce(buf).join(&compute);
                soon(compute.record().unwrap()).unwrap();
                let error = match joined {
                    Ok(ordered) => soon(ordered).map(drop).unwrap_err().error,
                    Err(failed) => failed.error,
                };
                assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
            });
        }
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The legacy default stream by either of its names: as the buffers' stream, as the one that operations start after, as the one that
/// is joined, and as a rank's own.
#[test]
fn the_default_stream_is_one_like_others() {
    child("joined::the_default_stream_is_one_like_others", SLOW, || {
        for (name, is_own) in [(0, false), (1, false), (0, true)] {
            ranks(2, |mut comm| {
                let device = Device::new(comm.rank()).unwrap();
                let raw = std::ptr::without_provenance_mut(name);
                // SAFETY: the default stream is always there.
                let default = unsafe { DeviceStream::from_raw(&device, raw) }.unwrap();
                let path = match is_own {
                    true => soon(comm.bind_stream(&default)),
                    false => soon(comm.bind_device(&device)),
                };
                assert_eq!(path.unwrap(), DevicePath::Peer);
                let mut buf = up(&default, vec![1.0_f32; 500]);
                for _ in 0..3 {
                    let call = comm.timeout(Duration::from_secs(10)).on(&default);
                    buf = call.all_reduce(buf).join(&default).unwrap().in_order().unwrap();
                }
                buf = soon(comm.timeout(Duration::from_secs(10)).all_reduce(buf)).unwrap();
                assert_eq!(down(buf), [16.0; 500]);
                soon(comm.close()).unwrap();
            });
        }
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The driver takes the waits for a collective, but no mark behind them, so nobody can tell when the stream is past them: the words that it waits for
/// stay, also when the communicator is gone.
#[test]
fn words_stay_for_a_stream_that_could_not_be_marked_behind_its_wait() {
    let test = "joined::words_stay_for_a_stream_that_could_not_be_marked_behind_its_wait";
    // Each stream has a queue of its own, whatever the other tests run with: a join that another stream could hold up would wait on the host.
    child(test, &[("ALLSTREAM_TEST_CUDA_QUEUES", "32")], || {
        let mut comms = Comm::local(2).unwrap();
        let mut second = comms.pop().unwrap();
        let mut first = comms.pop().unwrap();
        let other = std::thread::spawn(move || (bound(&mut second), second));
        let own = bound(&mut first);
        let (theirs, mut second) = other.join().unwrap();
        let device = own.device();
        let waiting = DeviceStream::new(&device).unwrap();
        // Of this collective the words know a point in each of the two streams.
        let [a, b] = [(), ()].map(|()| up(&own, values(0, 64)));
        let [c, d] = [(), ()].map(|()| up(&theirs, values(1, 64)));
        let work = second.all_reduce(c);
        let ordered = first.all_reduce(a).join(&waiting).unwrap();
        drop((soon(work).unwrap(), soon(ordered).unwrap()));
        own.synchronize().unwrap();
        waiting.synchronize().unwrap();
        pass(true, 0);
        let late = DeviceBuf::from_host(&waiting, PinnedBuf::from_slice(&device, &values(0, 64)).unwrap());
        let (theirs, ours) = (second.all_reduce(d), first.all_reduce(b));
        // The first mark is that of the buffer's stream.
        const INVALID_VALUE: u32 = 1;
        fail(Some("cuEventRecord"), 2, INVALID_VALUE);
        let ordered = ours.join(&waiting).unwrap();
        fail(None, 0, 0);
        drop((soon(theirs).unwrap(), soon(ordered).unwrap()));
        drop((first, second));
        // What is given back goes through several threads.
        for _ in 0..40 {
            device.trim().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        pass(true, u64::MAX);
        soon(late).unwrap();
        waiting.synchronize().unwrap();
        assert_eq!(report().freed_in_use, 0);
    });
}
