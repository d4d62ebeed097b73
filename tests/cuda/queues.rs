//! Streams share the hardware queues of a device: one that waits may hold up another. The driver for tests has 8 queues, as
//! real ones do, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` says; most tests here give it one, or few.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::{Algo, Comm, ReduceOp};

use crate::support::{
    DEADLINE, LIBRARY, child, down, full, is_child, library, nothing_left, pass, ranks, report, set_queues,
    soon, until, up, values,
};

const ONE: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "1");
const SLOW: (&str, &str) = ("ALLSTREAM_TEST_CUDA_DELAY_US", "300");

fn bound(comm: &mut Comm) -> (Device, DeviceStream) {
    bound_to(comm, 1)
}

/// Binds a rank to one of so many devices.
fn bound_to(comm: &mut Comm, devices: usize) -> (Device, DeviceStream) {
    let device = Device::new(comm.rank() % devices).unwrap();
    assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
    let stream = DeviceStream::new(&device).unwrap();
    (device, stream)
}

/// A rank joins a stream with a collective before the other rank has called. If the stream waited, it would hold up the rank's own
/// stream, which shares its queue and runs the collective, and both would wait for ever.
fn joined_early(streams: usize, devices: usize) {
    let start = Instant::now();
    ranks(2, |mut comm| {
        let (device, compute) = bound_to(&mut comm, devices);
        let others: Vec<_> = (0..streams).map(|_| DeviceStream::new(&device).unwrap()).collect();
        let rank = comm.rank();
        let mut grads = up(&compute, values(rank, 700));
        let first: Vec<f32> = values(0, 700).iter().zip(values(1, 700)).map(|(a, b)| a + b).collect();
        for (round, stream) in others.iter().chain([&compute]).enumerate() {
            if rank == round % 2 {
                // Late, so that the other's call is not on any stream yet.
                std::thread::sleep(Duration::from_millis(10));
            }
            let ordered = comm.timeout(Duration::from_secs(5)).all_reduce(grads).join(stream).unwrap();
            grads = ordered.launch(&compute, |buf| buf).in_order().unwrap();
        }
        let times = (1 << streams) as f32;
        assert_eq!(down(grads), first.iter().map(|x| x * times).collect::<Vec<_>>());
        soon(comm.close()).unwrap();
    });
    nothing_left("all ranks have ended");
    assert_eq!(report().freed_in_use, 0);
    assert!(start.elapsed() < Duration::from_secs(4), "nobody waited for a deadline: {:?}", start.elapsed());
}

#[test]
fn a_stream_that_shares_the_only_queue_does_not_hold_up_what_it_is_joined_with() {
    let test = "queues::a_stream_that_shares_the_only_queue_does_not_hold_up_what_it_is_joined_with";
    child(test, &[SLOW, ONE], || joined_early(2, 1));
}

/// Some of the streams share a queue with the ranks' own, and some do not. Each rank has its own device: on a shared one, a waiting stream
/// of one rank could hold up the other rank, which no driver prevents (`law_4_the_deadline_ends_what_callers_streams_hold_up`).
#[test]
fn streams_that_share_some_of_few_queues_hold_up_no_collective() {
    let test = "queues::streams_that_share_some_of_few_queues_hold_up_no_collective";
    child(test, &[("CUDA_DEVICE_MAX_CONNECTIONS", "3")], || joined_early(5, 2));
}

/// Each piece of work takes a stream up to 6 ms here, as it may on a busy host. The engine must not take such a stream for one that
/// is held up: a join returns before the other rank has called.
#[test]
fn a_slow_device_is_not_taken_for_one_whose_streams_share_a_queue() {
    let test = "queues::a_slow_device_is_not_taken_for_one_whose_streams_share_a_queue";
    child(test, &[("ALLSTREAM_TEST_CUDA_DELAY_US", "6000"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8")], || {
        let joined = AtomicUsize::new(0);
        ranks(2, |mut comm| {
            let (_, compute) = bound(&mut comm);
            let rank = comm.rank();
            for round in 0..4 {
                let grads = up(&compute, values(rank, 700));
                if rank == round % 2 {
                    until("the other rank has joined", || joined.load(Ordering::Acquire) > round);
                }
                let call = comm.timeout(Duration::from_secs(5));
                let ordered = call.all_reduce(grads).join(&compute).unwrap();
                if rank != round % 2 {
                    joined.store(round + 1, Ordering::Release);
                }
                down(ordered.in_order().unwrap());
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}

/// Callers' streams share a queue: the stream of one rank waits for a collective, and holds up the stream that brings the other rank's
/// input to it. All ranks have called, so no rank is missing; the deadline ends the collective all the same.
#[test]
fn law_4_the_deadline_ends_what_callers_streams_hold_up() {
    let test = "queues::law_4_the_deadline_ends_what_callers_streams_hold_up";
    child(test, &[("CUDA_DEVICE_MAX_CONNECTIONS", "3")], || {
        for _ in 0..6 {
            let start = Instant::now();
            ranks(2, |mut comm| {
                let (device, compute) = bound(&mut comm);
                let others: Vec<_> = (0..5).map(|_| DeviceStream::new(&device).unwrap()).collect();
                let mut grads = up(&compute, values(comm.rank(), 700));
                for stream in &others {
                    let work = comm.timeout(Duration::from_millis(300)).all_reduce(grads);
                    let joined = work.join(stream).and_then(|sum| sum.launch(&compute, |buf| buf).in_order());
                    let Ok(sum) = joined else { return };
                    grads = sum;
                }
                // A collective that failed is reported here at the latest.
                drop(soon(grads.to_host(vec![0.0; 700])));
                soon(compute.record().unwrap()).unwrap();
            });
            nothing_left("all ranks have ended");
            assert!(start.elapsed() < Duration::from_secs(12), "ended after {:?}", start.elapsed());
        }
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The rank's own stream is held up by an input that does not come, so it cannot mark the failed operations as over: the host does
/// that.
#[test]
fn law_4_a_stream_is_released_though_the_ranks_own_is_held_up() {
    let test = "queues::law_4_a_stream_is_released_though_the_ranks_own_is_held_up";
    // As many queues as there are streams, so that only the order of work holds a stream up.
    child(test, &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")], || {
        let mut comms = Comm::local(2).unwrap();
        let mut second = comms.pop().unwrap();
        let mut first = comms.pop().unwrap();
        let other = std::thread::spawn(move || (bound(&mut second).1, second));
        let (device, late) = bound(&mut first);
        let (theirs, mut second) = other.join().unwrap();
        let [waiting, own] = [(), ()].map(|()| DeviceStream::new(&device).unwrap());
        // The first operation ends well, so the engine knows that the two streams do not hold each other up.
        let ordered = first.all_reduce(up(&own, values(0, 64))).join(&waiting).unwrap();
        soon(second.all_reduce(up(&theirs, values(1, 64)))).unwrap();
        soon(ordered).unwrap();
        let [a, b] = [(), ()].map(|()| up(&own, values(0, 64)));
        let c = up(&theirs, values(1, 64));
        pass(true, 0);
        let input = DeviceBuf::from_host(&late, PinnedBuf::from_slice(&device, &values(0, 64)).unwrap());
        // Both ranks have called the first of them, so the rank's own stream waits for `late`.
        let before = (first.on(&late).all_reduce(a), second.all_reduce(c));
        let ordered = first.all_reduce(b).join(&waiting).unwrap();
        let point = waiting.record().unwrap();
        assert!(!point.is_complete().unwrap());
        let start = Instant::now();
        second.abort("a test");
        until("the other rank has heard", || first.check().is_err());
        soon(point).unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "released after {:?}", start.elapsed());
        pass(true, u64::MAX);
        assert!(soon(ordered).is_err());
        soon(input).unwrap();
        drop((before, second, first));
    });
}

/// Driver calls that may wait for all work on the device do so here: those that load kernels, make streams, get memory or give it
/// back. While a stream waits for a collective, no thread that the collective needs makes such a call.
#[test]
fn a_driver_that_waits_for_the_device_holds_up_no_collective() {
    let test = "queues::a_driver_that_waits_for_the_device_holds_up_no_collective";
    child(test, &[("ALLSTREAM_TEST_CUDA_WAITS", "1")], || {
        let start = Instant::now();
        ranks(2, |mut comm| {
            let compute = crate::support::bound(&mut comm, 2);
            let rank = comm.rank();
            // So much that the pool has no room for the workspace of the steps.
            let most = DeviceBuf::<u8>::zeroed(&compute, (64 << 20) - (248 << 10)).unwrap();
            let [mut grads, more] = [(), ()].map(|()| up(&compute, values(rank, 30_000)));
            let counts = up(&compute, vec![rank as i32 + 1; 100]);
            if rank == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            let call = comm.algo(Algo::Ring).on(&compute).timeout(Duration::from_secs(5));
            grads = call.all_reduce(grads).join(&compute).unwrap().in_order().unwrap();
            let most_of_all = comm.op(ReduceOp::Max).on(&compute).all_reduce(counts).join(&compute).unwrap();
            drop((most, more));
            assert_eq!(down(most_of_all.in_order().unwrap()), [2; 100]);
            let sums: Vec<f32> =
                values(0, 30_000).iter().zip(values(1, 30_000)).map(|(a, b)| a + b).collect();
            assert!(down(grads) == sums);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
        assert!(
            start.elapsed() < Duration::from_secs(4),
            "nobody waited for a deadline: {:?}",
            start.elapsed()
        );
    });
}

/// Binds the ranks of two communicators to the device on this thread, so that the driver makes the streams in this order: those of the first
/// communicator, so many more, and those of the second.
fn two_bound(device: &Device, more: usize) -> ([Vec<Comm>; 2], Vec<DeviceStream>) {
    let bind = || {
        let each = Comm::local(2).unwrap().into_iter().map(|mut comm| async move {
            assert_eq!(comm.bind_device(device).await.unwrap(), DevicePath::Peer);
            comm
        });
        soon(futures::future::join_all(each))
    };
    let first = bind();
    let between = (0..more).map(|_| DeviceStream::new(device).unwrap()).collect();
    ([first, bind()], between)
}

/// Rank 1 joins a stream with an operation that rank 0 has yet to call. Then it calls, on a second communicator, one on buffers of that stream
/// and of another one. So rank 1's own stream of the second communicator waits for both streams, and with them for the first operation: it must not
/// hold up the stream on which rank 0 then launches that one, whichever queues they have.
#[test]
fn a_ranks_own_stream_that_waits_behind_a_join_holds_up_no_other_communicator() {
    const QUEUES: u32 = 8;
    const LIMIT: Duration = Duration::from_secs(4);
    child("queues::a_ranks_own_stream_that_waits_behind_a_join_holds_up_no_other_communicator", &[], || {
        set_queues(QUEUES);
        for more in 0..QUEUES as usize {
            let device = Device::new(0).unwrap();
            let ([mut first, mut second], between) = two_bound(&device, more);
            let [zero, one, apart] = [(); 3].map(|()| DeviceStream::new(&device).unwrap());
            let input = |rank: usize, stream: &DeviceStream| up(stream, values(rank, 300));
            let (inputs, into) = ([input(0, &zero), input(1, &one)], [(); 2].map(|()| input(0, &apart)));
            let ([of_zero, of_one], [into_zero, into_one]) = (inputs, into);
            let joined = first[1].on(&one).timeout(LIMIT).all_reduce(of_one).join(&one).unwrap();
            let ours = second[1].timeout(LIMIT).all_reduce_into(
                joined.in_order().unwrap_or_else(|f| panic!("{more}: {}", f.error)),
                into_one,
            );
            let sum = first[0].on(&zero).timeout(LIMIT).all_reduce(of_zero);
            let sum = soon(sum).unwrap_or_else(|failed| panic!("{more} streams between: {}", failed.error));
            let theirs = second[0].timeout(LIMIT).all_reduce_into(sum, into_zero);
            let twice = (0..300).map(|i| 2.0 * (values(0, 300)[i] + values(1, 300)[i])).collect::<Vec<_>>();
            for work in [ours, theirs] {
                let (_, got) = soon(work).unwrap_or_else(|failed| panic!("{more}: {}", failed.error));
                assert_eq!(down(got), twice, "{more} streams between");
            }
            drop((first, second, between, zero, one, apart, device));
            nothing_left("all ranks have ended");
        }
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Rank 1 joins a stream with an operation that rank 0 calls only after a barrier on a second communicator. Before that barrier, rank 1 calls an
/// operation on what the stream has: the barrier must not wait until all ranks have called what was joined.
#[test]
fn an_operation_behind_a_join_is_not_put_off_until_the_deadline() {
    const LIMIT: Duration = Duration::from_secs(10);
    let test = "queues::an_operation_behind_a_join_is_not_put_off_until_the_deadline";
    child(test, &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")], || {
        let device = Device::new(0).unwrap();
        let ([mut first, mut second], _) = two_bound(&device, 0);
        let [zero, one, apart] = [(); 3].map(|()| DeviceStream::new(&device).unwrap());
        let joined =
            first[1].on(&one).timeout(LIMIT).all_reduce(up(&one, vec![2_f32; 300])).join(&one).unwrap();
        let ours = second[1].timeout(LIMIT).all_reduce(joined.in_order().unwrap());
        let theirs = second[0].timeout(LIMIT).all_reduce(up(&apart, vec![1_f32; 300]));
        let barriers = [1, 0].map(|rank: usize| second[rank].timeout(LIMIT).barrier());
        let start = Instant::now();
        soon(futures::future::join_all(barriers)).into_iter().for_each(|met| met.unwrap());
        assert!(start.elapsed() < LIMIT / 2, "the barrier took {:?}", start.elapsed());
        let sum = soon(first[0].on(&zero).timeout(LIMIT).all_reduce(up(&zero, vec![3_f32; 300]))).unwrap();
        assert_eq!(down(sum), [5.0; 300]);
        for work in [ours, theirs] {
            assert_eq!(down(soon(work).unwrap()), [6.0; 300]);
        }
        drop((first, second, zero, one, apart, device));
        nothing_left("all ranks have ended");
    });
}

/// Tests in which streams must not share queues otherwise than the tests arrange, or in which the driver blocks at one call that they choose.
const ARRANGED: [&str; 4] = [
    "blocked::law_4_a_driver_that_blocks_before_it_has_taken_a_collective_ends_by_the_deadline",
    "nccl::messages::a_stream_can_join_while_the_driver_makes_the_stream_for_messages",
    "nccl::streams_of_the_engine_do_not_count_as_streams_of_a_rank_that_has_none",
    "order::a_device_that_is_closed_by_its_last_event_holds_up_no_other_event",
];

/// Tests that cannot pass with one queue. ADR 0015 says why, under the names of these tests.
const NOT_WITH_ONE: [&str; 17] = [
    "blocked::an_abort_returns_at_once_though_the_driver_blocks",
    "blocked::host_operations_of_the_same_rank_go_on_while_the_driver_blocks",
    "blocked::law_4_a_late_peer_ends_by_the_deadline_though_the_driver_blocks",
    "handed_on::what_a_failed_collective_leaves_is_refused_with_the_cause",
    "ipc_folds::law_3_a_joined_buffer_that_was_dropped_is_given_to_nobody_while_a_peer_may_write_to_it",
    "ipc_folds::law_3_an_abort_leaves_a_joined_buffer_that_a_peer_writes_to_in_quarantine",
    "joined::a_stream_waits_for_a_collective_whose_peers_have_not_called",
    "joined::law_4_a_device_that_does_not_come_to_it_is_named",
    "joined::law_4_a_stream_is_released_by_the_deadline",
    "joined::ranks_of_one_thread_copy_to_any_memory_behind_a_collective",
    "one_launch::law_4_what_the_last_rank_does_instead_ends_the_operation_on_all",
    "one_launch::streams_that_were_joined_early_go_on_with_the_last_ranks_launch",
    "rules::a_join_asks_for_nothing_that_earlier_ones_wait_for",
    "stripes::a_message_goes_on_as_it_comes",
    "stripes::a_receive_does_not_wait_for_its_stream",
    "stripes::law_4_a_device_that_does_not_copy_is_named",
    "stripes::what_has_come_is_reduced_and_goes_back_before_the_rest_has_come",
];

/// Tests that are not run again with other queues: those that choose their queues themselves, two that take a wait away to see that this is
/// noticed (a shared queue may hold up what no wait does), and one that counts driver calls (more where streams hold each other up).
const NOT_AGAIN: [&str; 6] = [
    "costs::a_small_operation_makes_few_calls",
    "queues::",
    "dealt::",
    "hazards::",
    "nccl::sharing::ranks_share_a_device_where_nccl_has_leave_and_is_new_enough",
    "one_launch::the_launch_waits_for_the_inputs_of_all_ranks",
];

/// Runs the tests that depend most on the order of streams again in a process whose streams share one queue. With
/// `ALLSTREAM_TEST_FULL=all` it runs all tests but those in [`NOT_AGAIN`] and [`NOT_WITH_ONE`].
#[test]
fn the_same_tests_pass_with_one_queue() {
    if is_child() {
        return;
    }
    const AGAIN: [&str; 8] = [
        "joined::a_chain_of_collectives_is_in_order_without_the_host",
        "joined::law_4_a_join_beside_an_abort_leaves_no_stream_waiting",
        "ipc::processes_get_what_hosts_get",
        "ipc::a_chain_of_collectives_is_in_order_between_processes",
        "ipc::a_stream_that_waits_for_a_killed_process_is_released",
        "laws::communicators_may_be_used_in_opposite_orders",
        "nccl::law_4_a_hang_is_a_timeout_and_the_abort_gives_buffers_back",
        "order::a_buffer_that_moves_to_another_stream_takes_its_order_along",
    ];
    match test_support::everything() {
        true => {
            again("one queue", &[ONE], without_some(&NOT_AGAIN));
        }
        false => again("one queue", &[ONE], AGAIN.iter().copied().chain(["--exact"]).collect()),
    }
}

/// Runs all tests but those in [`NOT_AGAIN`] and [`NOT_WITH_ONE`] with few queues that are dealt at random, a limit of work on a stream, and a
/// lock that a call holds while it waits for room. The tests that depend most on the order of streams also run with half of the queues reserved
/// for the highest priority, and with `ALLSTREAM_TEST_FULL=all` with each of the other settings alone.
#[test]
fn the_same_tests_pass_however_queues_are_dealt_and_filled() {
    if is_child() || !full() {
        return;
    }
    let [queues, seed, deal] = ["QUEUES", "SEED", "DEAL"].map(|name| format!("ALLSTREAM_TEST_CUDA_{name}"));
    let [depth, lock] = ["DEPTH", "LOCK"].map(|name| format!("ALLSTREAM_TEST_CUDA_{name}"));
    let by_seed = vec![(&*queues, "3"), (&*seed, "17"), (&*deal, "seed")];
    let apart = vec![(&*queues, "8"), (&*seed, "5"), (&*deal, "apart")];
    let filled = vec![(&*depth, "1000"), (&*lock, "context")];
    let tests = ["joined::", "handed_on::", "order::", "held::", "ipc::processes_get_what_hosts_get"];
    let one_by_one = [
        ("queues for the highest priority", &apart),
        ("queues dealt by a seed", &by_seed),
        ("a depth of 1000", &filled),
    ];
    for (what, variables) in one_by_one.into_iter().take(if test_support::everything() { 3 } else { 1 }) {
        again(what, variables, [&tests, &*without_some(&[])].concat());
    }
    let together = [by_seed, filled].concat();
    again("queues dealt by a seed and a depth of 1000", &together, without_some(&NOT_AGAIN));
}

/// Arguments by which these tests, and those in [`NOT_WITH_ONE`] and [`ARRANGED`], are not run.
fn without_some<'a>(tests: &[&'a str]) -> Vec<&'a str> {
    NOT_WITH_ONE.iter().chain(&ARRANGED).chain(tests).flat_map(|test| ["--skip", *test]).collect()
}

/// Runs tests of this program once more, in a process with these variables.
fn again(what: &str, variables: &[(&str, &str)], tests: Vec<&str>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(tests).arg("--test-threads=2").envs(variables.iter().copied());
    command.env(LIBRARY, library()).env_remove("ALLSTREAM_TEST_FULL");
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + if full() { 25 * DEADLINE } else { 6 * DEADLINE };
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            panic!("tests did not end in time with {what}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "with {what}: {status}");
}
