//! The laws, where devices run the collectives: timeouts, aborts, ranks that leave, disagreements, dropped operations, many at a
//! time. `collectives.rs` tests them for staged collectives.

use std::time::Duration;

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::{Algo, Comm, Error, Failed, Work};
use futures::future::join_all;

use crate::support::{
    bound, child, down, fail, is_ours, nothing_left, pass, ranks, report, set_delays, soon, up, values,
};

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "2000"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
const LEN: usize = 3000;

/// Nothing of the driver is left, and no memory was freed that work on a device would still touch.
fn all_is_gone(what: &str) {
    nothing_left(what);
    assert_eq!(report().freed_in_use, 0, "{what}");
}

fn failure<O>(work: Work<O, DeviceBuf<f32>>) -> (Error, DeviceBuf<f32>) {
    let Err(Failed { buf, error }) = soon(work) else { panic!("it did not fail") };
    let text = error.to_string();
    (error, buf.unwrap_or_else(|| panic!("no buffer: {text}")))
}

/// Law 4: a rank that never calls, while the others are half through.
#[test]
fn law_4_a_missing_rank_is_a_timeout_with_its_name() {
    child("laws::law_4_a_missing_rank_is_a_timeout_with_its_name", SLOW, || {
        let all = [Algo::Ring, Algo::Direct, Algo::RecursiveDoubling, Algo::DoubleBinaryTree];
        for (seed, algo) in all.into_iter().enumerate() {
            set_delays(2000, seed as u64);
            let waits = std::sync::Barrier::new(3);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
                if rank < 2 {
                    let work = comm.timeout(Duration::from_millis(300)).algo(algo);
                    let (error, buf) = failure(work.all_reduce(up(&stream, values(rank, LEN))));
                    let text = error.to_string();
                    assert!(matches!(error, Error::Timeout { .. }) && text.contains("rank 2"), "{text}");
                    is_ours(buf);
                }
                waits.wait();
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// Law 4: an abort while kernels wait on streams, at any time.
#[test]
fn law_4_an_abort_gives_buffers_back_in_order() {
    child("laws::law_4_an_abort_gives_buffers_back_in_order", SLOW, || {
        for seed in 0..20_u64 {
            set_delays(3000, seed);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
                let algo = [Algo::Ring, Algo::HalvingDoubling, Algo::Direct, Algo::Mst][seed as usize % 4];
                let works: Vec<_> =
                    (0..3).map(|_| comm.algo(algo).all_reduce(up(&stream, values(rank, LEN)))).collect();
                if rank as u64 == seed % 3 {
                    std::thread::sleep(Duration::from_micros(seed * 100));
                    comm.abort("a test");
                }
                for work in works {
                    match soon(work) {
                        Ok(buf) => is_ours(buf),
                        Err(Failed { buf, error }) => {
                            assert!(matches!(error, Error::Aborted { .. }), "{error}");
                            is_ours(buf.unwrap());
                        }
                    }
                }
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// Operations that had not begun when the group was aborted keep the contents of their buffers. (The first one may have begun.)
#[test]
fn law_4_a_queued_operation_that_did_not_begin_keeps_its_contents() {
    child("laws::law_4_a_queued_operation_that_did_not_begin_keeps_its_contents", SLOW, || {
        let waits = std::sync::Barrier::new(2);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
            if rank == 1 {
                waits.wait();
                comm.abort("a test");
                return;
            }
            let works = [(); 3].map(|()| comm.all_reduce(up(&stream, values(rank, LEN))));
            waits.wait();
            for work in works.into_iter().skip(1) {
                let (error, buf) = failure(work);
                assert!(matches!(error, Error::Aborted { .. }), "{error}");
                assert!(down(buf) == values(rank, LEN), "nothing was written");
            }
        });
        all_is_gone("both ranks have ended");
    });
}

/// Law 4: a rank that leaves while the others wait for it.
#[test]
fn law_4_a_rank_that_leaves_is_named() {
    child("laws::law_4_a_rank_that_leaves_is_named", SLOW, || {
        for seed in 0..6 {
            set_delays(2000, seed);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
                for _ in 0..seed % 3 {
                    drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
                }
                if rank == 1 {
                    return; // it goes
                }
                let (error, buf) = failure(comm.algo(Algo::Ring).all_reduce(up(&stream, values(rank, LEN))));
                assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
                is_ours(buf);
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// Law 5: whatever two ranks disagree on, both get an error that says so, and their buffers back.
#[test]
fn law_5_disagreements_are_errors_on_both() {
    type Called = fn(&mut Comm, &DeviceStream, bool) -> (Error, bool);
    fn told<B>(failed: Result<B, Failed<B>>) -> (Error, bool) {
        let Err(Failed { buf, error }) = failed else { panic!("it did not fail") };
        (error, buf.is_some())
    }
    let all: [(&str, Called, [&str; 2]); 4] = [
        (
            "length",
            |comm, stream, first| {
                told(soon(comm.all_reduce(up(stream, vec![1f32; if first { 100 } else { 101 }]))))
            },
            ["100", "101"],
        ),
        (
            "collective",
            |comm, stream, first| {
                let buf = up(stream, vec![1f32; 64]);
                told(soon(if first { comm.all_reduce(buf) } else { comm.broadcast(buf, 0) }))
            },
            ["all_reduce", "broadcast"],
        ),
        (
            "type",
            |comm, stream, first| {
                if first {
                    return told(soon(comm.all_reduce(up(stream, vec![1f32; 64]))));
                }
                told(soon(comm.all_reduce(up(stream, vec![1f64; 64]))))
            },
            ["f32", "f64"],
        ),
        (
            "place",
            |comm, stream, first| {
                if first {
                    return told(soon(comm.all_reduce(up(stream, vec![1f32; 64]))));
                }
                told(soon(comm.all_reduce(vec![1f32; 64])))
            },
            ["on devices", "disagree"],
        ),
    ];
    child("laws::law_5_disagreements_are_errors_on_both", SLOW, || {
        for (what, call, words) in all {
            let told = ranks(2, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
                call(&mut comm, &stream, rank == 0)
            });
            for (error, has_buffer) in told {
                let text = error.to_string();
                println!("{what}: {text}");
                assert!(matches!(error, Error::Mismatch { .. }) && has_buffer, "{what}: {text}");
                assert!(words.iter().all(|word| text.contains(word)), "{what}: {text}");
            }
            all_is_gone(what);
        }
    });
}

/// Law 2: operations that nobody waits for, or that are forgotten, run on.
#[test]
fn law_2_operations_that_are_let_go_run_on() {
    child("laws::law_2_operations_that_are_let_go_run_on", SLOW, || {
        for seed in 0..5 {
            set_delays(1500, seed);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
                for i in 0..12 {
                    let algo = [Algo::Ring, Algo::OneShot, Algo::HalvingDoubling][i % 3];
                    let work = comm.algo(algo).all_reduce(up(&stream, values(rank, LEN)));
                    if (i + rank) % 2 == 0 {
                        drop(work);
                    } else if i == 5 {
                        // Nobody gets its buffer back while the communicator lives; after that, it goes with the communicator.
                        std::mem::forget(work);
                    } else {
                        drop(soon(work).unwrap());
                    }
                }
                let last = soon(comm.all_reduce(up(&stream, vec![1f32; 3]))).unwrap();
                assert_eq!(down(last), [3.0; 3]);
            });
        }
    });
}

#[test]
fn law_2_what_was_dropped_is_freed_in_order() {
    child("laws::law_2_what_was_dropped_is_freed_in_order", SLOW, || {
        for seed in 0..5 {
            set_delays(1500, seed);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
                for _ in 0..10 {
                    drop(comm.algo(Algo::Ring).all_reduce(up(&stream, values(rank, LEN))));
                }
                // With even seeds, the ranks close with all of that on their streams; with odd ones, they first await another operation.
                if seed % 2 == 0 {
                    soon(comm.close()).unwrap();
                } else {
                    drop(down(soon(comm.all_reduce(up(&stream, vec![1f32; 3]))).unwrap()));
                }
            });
            all_is_gone("all ranks have ended");
        }
    });
}

/// One rank calls more operations than may be on a stream at a time: all of them are done when the other rank comes.
#[test]
fn calls_far_ahead_of_the_other_rank_are_queued_and_done() {
    let fast = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("laws::calls_far_ahead_of_the_other_rank_are_queued_and_done", fast, || {
        let all = std::sync::Barrier::new(2);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
            if rank == 1 {
                all.wait();
            }
            let works: Vec<_> = (0..1200).map(|_| comm.all_reduce(up(&stream, vec![1u32; 4]))).collect();
            if rank == 0 {
                all.wait();
            }
            for result in soon(join_all(works)) {
                assert_eq!(down(result.unwrap()), [2; 4]);
            }
            soon(comm.close()).unwrap();
        });
        all_is_gone("both ranks have ended");
    });
}

/// Two communicators on the same devices, which two ranks use in opposite orders: neither waits for the other.
#[test]
fn communicators_may_be_used_in_opposite_orders() {
    child("laws::communicators_may_be_used_in_opposite_orders", SLOW, || {
        for seed in 0..10 {
            set_delays(1500, seed);
            ranks(2, |mut one| {
                let rank = one.rank();
                let mut other = soon(one.dup()).unwrap();
                // Both ranks on one device, every other time.
                let devices = if seed % 2 == 0 { 2 } else { 1 };
                let streams = [bound(&mut one, devices), bound(&mut other, devices)];
                for round in 0..4 {
                    let run = |comm: &mut Comm, k: usize| {
                        comm.algo(Algo::Ring).all_reduce(up(&streams[k], vec![(round + 1 + k) as u32; 2000]))
                    };
                    let works = if rank == 0 {
                        [run(&mut one, 0), run(&mut other, 1)]
                    } else {
                        let later = run(&mut other, 1);
                        [run(&mut one, 0), later]
                    };
                    for (k, work) in works.into_iter().enumerate() {
                        assert_eq!(down(soon(work).unwrap()), vec![2 * (round + 1 + k) as u32; 2000]);
                    }
                }
            });
            all_is_gone("both ranks have ended");
        }
    });
}

#[test]
fn many_operations_over_many_communicators_go_on_unpolled() {
    child("laws::many_operations_over_many_communicators_go_on_unpolled", SLOW, || {
        set_delays(300, 1);
        ranks(2, |mut world| {
            let rank = world.rank();
            let mut comms: Vec<Comm> = (0..16).map(|_| soon(world.dup()).unwrap()).collect();
            let streams: Vec<_> = comms.iter_mut().map(|comm| bound(comm, 2)).collect();
            let mut works = Vec::new();
            for round in 0..8_usize {
                // In another order on each rank.
                for turn in 0..16 {
                    let c = if rank == 0 { turn } else { 15 - turn };
                    let buf = up(&streams[c], vec![(c + round) as u64; 100]);
                    works.push((c + round, comms[c].all_reduce(buf)));
                }
            }
            assert_eq!(works.len(), 128);
            for (each, work) in works {
                assert_eq!(down(soon(work).unwrap()), [2 * each as u64; 100]);
            }
        });
        all_is_gone("both ranks have ended");
    });
}

#[test]
fn eight_ranks_run_on_one_thread() {
    child("laws::eight_ranks_run_on_one_thread", SLOW, || {
        set_delays(300, 2);
        let rank = |mut comm: Comm| async move {
            let rank = comm.rank();
            let device = Device::new(rank % 2).unwrap();
            assert_eq!(comm.bind_device(&device).await.unwrap(), DevicePath::Peer);
            let stream = DeviceStream::new(&device).unwrap();
            for algo in [Algo::Ring, Algo::OneShot, Algo::DoubleBinaryTree] {
                let (_, buf) = DeviceBuf::from_host(&stream, vec![rank as i32; 777]).await.unwrap();
                let buf = comm.algo(algo).all_reduce(buf).await.unwrap();
                assert_eq!(buf.to_host(vec![0; 777]).await.unwrap().1, [28; 777]);
            }
            comm.close().await.unwrap();
        };
        soon(join_all(Comm::local(8).unwrap().into_iter().map(rank)));
        all_is_gone("all ranks have ended");
    });
}

#[test]
fn what_cannot_be_is_refused_and_harms_nobody() {
    child("laws::what_cannot_be_is_refused_and_harms_nobody", SLOW, || {
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 2));
            // A second bind.
            let device = stream.device();
            let error = soon(comm.bind_device(&device)).unwrap_err();
            assert!(error.to_string().contains("bound already"), "{error}");
            // A buffer of another device.
            let elsewhere = DeviceStream::new(&Device::new(1 - rank).unwrap()).unwrap();
            let (error, buf) = failure(comm.all_reduce(up(&elsewhere, values(rank, 10))));
            assert!(error.to_string().contains("this rank is bound to"), "{error}");
            assert_eq!(down(buf), values(rank, 10));
            // Memory of both kinds in one call.
            let two = comm.all_reduce_into(up(&stream, values(rank, 10)), vec![0f32; 10]);
            let Err(Failed { buf: Some((a, b)), error }) = soon(two) else { panic!("it did not fail") };
            assert!(error.to_string().contains("another on the host"), "{error}");
            assert_eq!((down(a), b), (values(rank, 10), vec![0.0; 10]));
            // The communicator is as it was.
            assert_eq!(down(soon(comm.all_reduce(up(&stream, vec![3u8; 9]))).unwrap()), [6; 9]);
            assert_eq!(soon(comm.all_reduce(vec![3u8; 9])).unwrap(), [6; 9], "also on the host");
            soon(comm.close()).unwrap();
        });
        all_is_gone("both ranks have ended");
    });
}

/// If one rank cannot be bound, all ranks get an error, go on staged through the host, and can be bound later.
#[test]
fn a_rank_that_cannot_be_bound_leaves_all_as_they_were() {
    child("laws::a_rank_that_cannot_be_bound_leaves_all_as_they_were", SLOW, || {
        let waits = std::sync::Barrier::new(3);
        ranks(3, |mut comm| {
            let (rank, device) = (comm.rank(), Device::new(comm.rank() % 2).unwrap());
            let stream = DeviceStream::new(&device).unwrap();
            waits.wait();
            if rank == 0 {
                fail(Some("cuStreamCreateWithPriority"), 1, 2);
            }
            waits.wait();
            let error = soon(comm.bind_device(&device)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("could not be bound") || matches!(error, Error::Cuda { .. }), "{text}");
            assert_eq!(down(soon(comm.all_reduce(up(&stream, vec![1u8; 9]))).unwrap()), [3; 9]);
            assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
            assert_eq!(down(soon(comm.all_reduce(up(&stream, vec![1u8; 9]))).unwrap()), [3; 9]);
            soon(comm.close()).unwrap();
        });
        all_is_gone("all ranks have ended");
    });
}

#[test]
fn devices_that_cannot_reach_each_other_are_staged_and_told_why() {
    let apart = [("ALLSTREAM_TEST_CUDA_DEVICES", "2"), ("ALLSTREAM_TEST_CUDA_NO_PEER", "0-1")];
    child("laws::devices_that_cannot_reach_each_other_are_staged_and_told_why", &apart, || {
        ranks(3, |mut comm| {
            let (rank, device) = (comm.rank(), Device::new(comm.rank() % 2).unwrap());
            let stream = DeviceStream::new(&device).unwrap();
            let DevicePath::Staged { why } = soon(comm.bind_device(&device)).unwrap() else {
                panic!("there is no way")
            };
            assert!(why.contains("cannot reach") && why.contains("device"), "rank {rank}: {why}");
            assert_eq!(down(soon(comm.all_reduce(up(&stream, vec![1u8; 9]))).unwrap()), [3; 9]);
        });
        all_is_gone("all ranks have ended");
    });
}

/// Several operations wait for an input for longer than their time limit: the time of each begins when its input is there.
#[test]
fn law_4_a_time_limit_begins_when_the_inputs_are_there() {
    const CALLS: usize = 20;
    const LIMIT: Duration = Duration::from_millis(100);
    child("laws::law_4_a_time_limit_begins_when_the_inputs_are_there", &[], || {
        let all = std::sync::Barrier::new(2);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm, 1));
            let late = DeviceStream::new(&stream.device()).unwrap();
            let bufs: Vec<_> = (0..CALLS).map(|_| up(&stream, vec![1u32; 4])).collect();
            let pinned = PinnedBuf::from_slice(&stream.device(), &[1u32]).unwrap();
            all.wait();
            if rank == 0 {
                pass(true, 0);
            }
            all.wait();
            let input = DeviceBuf::from_host(&late, pinned);
            let calls = bufs.into_iter().map(|buf| comm.timeout(LIMIT).on(&late).all_reduce(buf));
            let works: Vec<_> = calls.collect();
            // No input comes for longer than the limit.
            std::thread::sleep(4 * LIMIT);
            all.wait();
            if rank == 0 {
                pass(true, u64::MAX);
            }
            for result in soon(join_all(works)) {
                assert_eq!(down(result.unwrap()), [2; 4]);
            }
            drop(soon(input).unwrap());
            soon(comm.close()).unwrap();
        });
        all_is_gone("both ranks have ended");
    });
}
