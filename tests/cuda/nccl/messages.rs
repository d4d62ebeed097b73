//! Messages that NCCL moves: results in whatever order they are called, laws, and failures in NCCL.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DeviceStream, PinnedBuf};
use allstream::{Comm, DType, Error, MissingState, ReduceOp};
use test_support::cases::{self, Await, Case, Combine, OnDevice, Oracle, Talk, What};

use super::{
    HANGS, IS_DEAF, LEN, REFUSES, SHORT, STAYS_IN_PROGRESS, all_is_gone, bound, failure, told, trouble,
    with_nccl,
};
use crate::support::{DEADLINE, calls, down, is_ours, pass, ranks, soon, until, up, values};

#[test]
fn messages_give_what_was_sent() {
    with_nccl("nccl::messages::messages_give_what_was_sent", 3, &[], || {
        for n in [2, 3] {
            let mut list = Vec::new();
            for talk in [Talk::Shift, Talk::Batch, Talk::Both, Talk::Queue] {
                for (i, (len, dtype)) in
                    [(0, DType::F32), (9, DType::U8), (5000, DType::Bool), (2000, DType::F64)]
                        .into_iter()
                        .enumerate()
                {
                    let (op, end) = (Combine::Op(ReduceOp::Sum), [Await::Wait, Await::Poll][i % 2]);
                    let (seed, timeout) = (list.len() as u64, Duration::from_secs(30));
                    let what = What::Messages(talk);
                    list.push(Case {
                        what,
                        len,
                        dtype,
                        op,
                        root: 0,
                        special: false,
                        end,
                        seed,
                        timeout,
                        refused: false,
                    });
                }
            }
            let (oracle, before) = (Oracle::new(list.len(), n), told().kernels);
            let results = ranks(n, |mut comm| -> Result<(), String> {
                let place = OnDevice(bound(&mut comm));
                for (i, case) in list.iter().enumerate() {
                    cases::run_on_device(&mut comm, case, &oracle, i, &place).map_err(|error| {
                        format!("rank {} of {n}, case {i}, {case:?}: {error}", comm.rank())
                    })?;
                }
                soon(comm.close()).map_err(|error| error.to_string())
            });
            results.into_iter().for_each(|result| result.unwrap());
            all_is_gone();
            assert!(told().kernels - before > 16, "{:?}", told());
        }
    });
}

/// Messages that belong together, and can go at the same time, are one call of NCCL.
#[test]
fn an_exchange_is_one_kernel_where_it_can_be() {
    with_nccl("nccl::messages::an_exchange_is_one_kernel_where_it_can_be", 2, &[], || {
        let kernels = ranks(2, |mut comm| {
            let (rank, peer, stream) = (comm.rank(), 1 - comm.rank(), bound(&mut comm));
            for round in 0..20 {
                let (send, recv) = (up(&stream, values(rank + round, LEN)), up(&stream, vec![0.0; LEN]));
                let (_, got) = soon(comm.send_recv(send, peer, recv, peer)).unwrap();
                assert!(down(got) == values(peer + round, LEN), "round {round}");
            }
            soon(comm.barrier()).unwrap();
            told().kernels
        });
        // The messages have 80 ends: 40 kernels if each pair is one call, 80 if none is.
        assert!(kernels.iter().all(|kernels| (40..=80).contains(kernels)), "{kernels:?}");
        all_is_gone();
    });
}

/// The driver may wait for all work on a device before it makes a stream, as it must for a rank's first message. Meanwhile another thread of the rank
/// has a stream wait for a collective that the other rank has yet to call.
#[test]
fn a_stream_can_join_while_the_driver_makes_the_stream_for_messages() {
    let test = "nccl::messages::a_stream_can_join_while_the_driver_makes_the_stream_for_messages";
    let more = [("ALLSTREAM_TEST_CUDA_WAITS", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];
    with_nccl(test, 2, &more, || {
        const MAKE: &str = "cuStreamCreateWithPriority";
        let (told, hear) = channel();
        let hear = Mutex::new(hear);
        let told = Mutex::new(told);
        ranks(2, |mut comm| {
            let (rank, mut plain) = (comm.rank(), soon(comm.dup()).unwrap());
            let stream = bound(&mut comm);
            let device = stream.device();
            soon(plain.bind_device(&device)).unwrap();
            let busy = DeviceStream::new(&device).unwrap();
            let held = DeviceBuf::<u32>::zeroed(&busy, 16).unwrap();
            let pinned = PinnedBuf::<u32>::zeroed(&device, 16).unwrap();
            // From here on the collective needs no more memory or code.
            let grads = soon(plain.all_reduce(up(&stream, values(rank, LEN)))).unwrap();
            let message = up(&stream, values(7, LEN));
            soon(plain.barrier()).unwrap();
            if rank == 1 {
                hear.lock().unwrap().recv_timeout(DEADLINE).unwrap();
                // Called first: rank 0's message may be filled by the stream that waits for this collective.
                let sums = plain.all_reduce(grads);
                let got = soon(comm.recv(message, 0)).unwrap();
                assert!(down(got) == values(7, LEN));
                drop(soon(sums).unwrap());
                return;
            }
            pass(true, 0);
            drop(held.copy_from_host(pinned));
            let (shared, before) = (comm.share(), calls(MAKE));
            std::thread::scope(|scope| {
                scope.spawn(move || drop(soon(shared.send(message, 1)).unwrap()));
                until("the driver is to make a stream", || calls(MAKE) > before);
                let (joins, joined) = channel();
                let plain = plain.share();
                let on = stream.clone();
                scope.spawn(move || {
                    let ordered = plain.on(&on).all_reduce(grads).join(&on).unwrap();
                    joins.send(()).unwrap();
                    drop(soon(ordered).unwrap());
                });
                let is_joined = joined.recv_timeout(DEADLINE / 4);
                pass(true, u64::MAX);
                told.lock().unwrap().send(()).unwrap();
                assert!(is_joined.is_ok(), "the join waited for the stream that the driver made");
            });
        });
        all_is_gone();
    });
}

/// As without NCCL: a message waits for no collective, nor a collective for a message, whoever calls which first.
#[test]
fn messages_and_collectives_may_be_called_in_any_order() {
    with_nccl("nccl::messages::messages_and_collectives_may_be_called_in_any_order", 2, &[], || {
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let message = |len| up(&stream, values(7, len));
            for round in 0..20 {
                let all = up(&stream, vec![1.0_f32; LEN]);
                let (buf, blank) = (message(LEN), up(&stream, vec![0.0_f32; LEN]));
                let all = if rank == round % 2 {
                    // The message is called behind the collective here, and has ended before the other rank calls the collective.
                    let all = comm.all_reduce(all);
                    let sent = comm.tag(3).send(buf, 1 - rank);
                    soon(sent).unwrap();
                    all
                } else {
                    let got = soon(comm.tag(3).recv(blank, 1 - rank)).unwrap();
                    assert!(down(got) == values(7, LEN));
                    comm.all_reduce(all)
                };
                assert_eq!(down(soon(all).unwrap()), vec![2.0; LEN]);
            }
            soon(comm.close()).unwrap();
        });
        all_is_gone();
    });
}

/// Everything at once on three communicators of the same devices. A device has room for one kernel at a time.
fn crowd(comm: Comm, rounds: u64) -> Result<(), Error> {
    let mut comm = comm;
    let (rank, n, stream) = (comm.rank(), comm.size(), bound(&mut comm));
    let mut comms = vec![soon(comm.dup())?, soon(comm.dup())?];
    comms.iter_mut().for_each(|other| drop(bound(other)));
    comms.push(comm);
    for round in 0..rounds {
        let (mut reduced, mut moved) = (Vec::new(), Vec::new());
        for (c, comm) in comms.iter_mut().enumerate() {
            let mut messages = |comm: &mut Comm| {
                // Each rank names its peers in another order.
                for step in 1..n {
                    let peer = (rank + if round.is_multiple_of(2) { step } else { n - step }) % n;
                    let blank = up(&stream, vec![0.0_f32; LEN]);
                    moved.push((
                        None,
                        comm.timeout(SHORT * 10).send(up(&stream, values(rank + c, LEN)), peer),
                    ));
                    moved.push((Some(peer + c), comm.timeout(SHORT * 10).recv(blank, peer)));
                }
            };
            // Some ranks call their messages first, and some the collective.
            let is_before = (rank + c + round as usize).is_multiple_of(2);
            if is_before {
                messages(comm);
            }
            reduced.push(comm.timeout(SHORT * 10).all_reduce(up(&stream, vec![1.0_f32; LEN])));
            if !is_before {
                messages(comm);
            }
        }
        for (from, work) in moved {
            let buf = soon(work).map_err(|failed| failed.error)?;
            if let Some(from) = from {
                assert!(down(buf) == values(from, LEN), "round {round}");
            }
        }
        for work in reduced {
            let buf = soon(work).map_err(|failed| failed.error)?;
            assert_eq!(down(buf), vec![n as f32; LEN], "round {round}");
        }
    }
    comms.into_iter().try_for_each(|comm| soon(comm.close()))
}

#[test]
fn devices_launch_messages_and_collectives_in_one_order() {
    with_nccl("nccl::messages::devices_launch_messages_and_collectives_in_one_order", 3, &[], || {
        ranks(3, |comm| crowd(comm, 15).unwrap());
        all_is_gone();
    });
}

/// Shows that the test above would notice a wrong order: without the engine's order of launches, devices hang.
#[cfg(feature = "testing")]
#[test]
fn messages_in_any_order_hang_devices() {
    with_nccl("nccl::messages::messages_in_any_order_hang_devices", 3, &[], || {
        allstream::testing::launch_in_any_order(true);
        let hung = ranks(3, |comm| crowd(comm, 100).is_err());
        assert_eq!(hung, [true; 3]);
        std::process::exit(0);
    });
}

/// Law 5.
#[test]
fn law_5_ends_that_disagree_are_an_error_before_nccl_is_given_anything() {
    let test = "nccl::messages::law_5_ends_that_disagree_are_an_error_before_nccl_is_given_anything";
    with_nccl(test, 2, &[], || {
        for what in ["lengths", "memory of a host"] {
            ranks(2, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm));
                let buf = || up(&stream, vec![rank as f32; LEN]);
                let error = match (rank, what) {
                    (0, _) => {
                        let (error, buf) = failure(comm.tag(4).send(buf(), 1));
                        assert!(down(buf.unwrap()).iter().all(|x| *x == 0.0), "{what}: it is as it was");
                        error
                    }
                    (_, "lengths") => {
                        let (error, buf) = failure(comm.tag(4).recv(up(&stream, vec![1.0; LEN + 1]), 0));
                        assert!(down(buf.unwrap()).iter().all(|x| *x == 1.0), "{what}: it is as it was");
                        error
                    }
                    _ => soon(comm.tag(4).recv(vec![1.0_f32; LEN], 0)).unwrap_err().error,
                };
                let text = error.to_string();
                assert!(matches!(error, Error::Mismatch { .. }) && text.contains("whole"), "{what}: {text}");
            });
            all_is_gone();
        }
        assert_eq!(told().kernels, 0);
    });
}

/// Law 4: the timeout comes before NCCL is given anything.
#[test]
fn law_4_a_peer_that_does_not_call_is_named() {
    with_nccl("nccl::messages::law_4_a_peer_that_does_not_call_is_named", 2, &[], || {
        for is_sent in [true, false] {
            let waits = std::sync::Barrier::new(2);
            ranks(2, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm));
                if rank == 0 {
                    let buf = up(&stream, values(0, LEN));
                    let call = comm.timeout(SHORT);
                    let (error, buf) = failure(if is_sent { call.send(buf, 1) } else { call.recv(buf, 1) });
                    let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                    let [one] = &missing[..] else { panic!("{error}") };
                    assert!(one.rank == 1 && matches!(one.state, MissingState::NotMatched { .. }), "{error}");
                    assert!(down(buf.unwrap()) == values(0, LEN), "nothing was written");
                }
                waits.wait();
            });
            all_is_gone();
        }
        assert_eq!(told().kernels, 0);
    });
}

/// Laws 3 and 4: NCCL hangs before its kernel is on the stream, or on the device, or refuses; operations behind it come back as well.
#[test]
fn laws_3_and_4_what_goes_wrong_in_nccl_ends_and_gives_buffers_back() {
    let test = "nccl::messages::laws_3_and_4_what_goes_wrong_in_nccl_ends_and_gives_buffers_back";
    with_nccl(test, 2, &[], || {
        for what in [STAYS_IN_PROGRESS, HANGS, REFUSES] {
            trouble(what, 1, 0, 5);
            ranks(2, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm));
                let begun = Instant::now();
                let mut message = |tag| {
                    let (call, buf) = (comm.tag(tag).timeout(SHORT), up(&stream, values(rank, LEN)));
                    if rank == 0 { call.send(buf, 1) } else { call.recv(buf, 0) }
                };
                let all = [message(0), message(1)];
                let behind = comm.timeout(SHORT * 10).all_reduce(up(&stream, values(rank, LEN)));
                for work in all.into_iter().chain([behind]) {
                    let (error, buf) = failure(work);
                    let text = error.to_string();
                    match what {
                        REFUSES => assert!(matches!(error, Error::Library { rank: 1, .. }), "{text}"),
                        _ => assert!(
                            matches!(error, Error::Timeout { .. }) && text.contains("NCCL 2.27.3"),
                            "{text}"
                        ),
                    }
                    is_ours(buf.unwrap());
                }
                assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            });
            trouble(0, 0, 0, 0);
            all_is_gone();
        }
    });
}

/// Law 3: a kernel that NCCL's abort does not end may touch its buffers for ever; a buffer that NCCL was not given comes back.
#[test]
fn law_3_what_an_abort_does_not_end_keeps_the_buffer() {
    with_nccl("nccl::messages::law_3_what_an_abort_does_not_end_keeps_the_buffer", 2, &[], || {
        trouble(HANGS, 1, 0, 0);
        trouble(IS_DEAF, 1, 0, 0);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let unmatched = comm.tag(9).timeout(SHORT * 5).send(up(&stream, values(rank, LEN)), 1 - rank);
            let (call, buf) = (comm.timeout(SHORT), up(&stream, values(rank, LEN)));
            let (error, buf) = failure(if rank == 0 { call.send(buf, 1) } else { call.recv(buf, 0) });
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert!(buf.is_none(), "rank {rank}");
            assert!(failure(unmatched).1.is_some(), "rank {rank}");
            // Dropping these would wait for the device.
            std::mem::forget((comm, stream));
        });
        std::process::exit(0);
    });
}

/// Laws 1 and 2: messages that are dropped run on; an abort ends those that wait; messages go beside collectives that run by plans.
#[test]
fn messages_that_nobody_waits_for_run_on_and_an_abort_ends_them() {
    let test = "nccl::messages::messages_that_nobody_waits_for_run_on_and_an_abort_ends_them";
    with_nccl(test, 2, &[], || {
        let both_wait = std::sync::Barrier::new(2);
        ranks(2, |mut comm| {
            let (rank, peer, stream) = (comm.rank(), 1 - comm.rank(), bound(&mut comm));
            let buf = || up(&stream, values(rank, LEN));
            for _ in 0..10 {
                drop(comm.send(buf(), peer));
                let scan = comm.scan(buf());
                drop(comm.recv(buf(), peer));
                drop(soon(scan).unwrap());
            }
            let (sent, got) = soon(comm.send_recv(buf(), peer, buf(), peer)).unwrap();
            assert!(down(sent) == values(rank, LEN) && down(got) == values(peer, LEN));
            let waits = comm.tag(8).recv(buf(), peer);
            // (Not a barrier of the communicator: the abort could reach the other rank before that has ended.)
            both_wait.wait();
            if rank == 0 {
                comm.abort("a test");
            }
            let (error, buf) = failure(waits);
            assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
            is_ours(buf.unwrap());
        });
        all_is_gone();
    });
}

/// A buffer on another device is refused at the call.
#[test]
fn a_buffer_elsewhere_is_refused_and_comes_back() {
    with_nccl("nccl::messages::a_buffer_elsewhere_is_refused_and_comes_back", 3, &[], || {
        ranks(2, |mut comm| {
            bound(&mut comm);
            let elsewhere = DeviceStream::new(&Device::new(2).unwrap()).unwrap();
            let buf: DeviceBuf<f32> = up(&elsewhere, values(0, LEN));
            let (error, buf) = failure(comm.send(buf, 1 - comm.rank()));
            let text = error.to_string();
            assert!(
                matches!(error, Error::Invalid { .. }) && text.contains("this rank is bound to"),
                "{text}"
            );
            assert!(down(buf.unwrap()) == values(0, LEN));
            soon(comm.close()).unwrap();
        });
        all_is_gone();
    });
}
