//! Collectives and messages on device buffers that are staged through the host: they give the same results as on host buffers.
//! Also their order, their failures, and what happens to their buffers.

use std::time::Duration;

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::{Comm, Error, Event, Failed, HostStream, Message, ReduceOp};

use crate::support::{
    calls, child, device, down, fail, nothing_left, ranks, report, set_delays, soon, up, values,
};

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "2000"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
const N: usize = 3;

/// Makes one call on host buffers and once more on device buffers: every rank must end with the same values.
macro_rules! same {
    ($comm:expr, $make:expr, in $len:expr, |$call:ident, $buf:ident| $work:expr) => {{
        let rank = $comm.rank();
        let host = {
            let ($call, $buf) = ($comm.call(), values(rank, $len));
            soon($work).unwrap()
        };
        let there = {
            let ($call, $buf) = ($comm.call(), $make(values(rank, $len)));
            soon($work).unwrap()
        };
        assert_eq!(down(there), host, "rank {rank}: {}", stringify!($work));
    }};
    ($comm:expr, $make:expr, into ($from:expr, $to:expr), |$call:ident, $a:ident, $b:ident| $work:expr) => {{
        let rank = $comm.rank();
        let (input, output) = (values(rank, $from), vec![-1.5f32; $to]);
        let host = {
            let ($call, $a, $b) = ($comm.call(), input.clone(), output.clone());
            soon($work).unwrap()
        };
        let ($call, $a, $b) = ($comm.call(), $make(input), $make(output));
        let (a, b) = soon($work).unwrap();
        assert_eq!((down(a), down(b)), host, "rank {rank}: {}", stringify!($work));
    }};
}

/// Checks that every collective, in place and (but for `scan`) out of place, gives on device buffers what it gives on host buffers.
pub(crate) fn everything(comm: &mut Comm, stream: &DeviceStream, lens: &[usize]) {
    everything_in(comm, lens, &|values| up(stream, values));
}

/// The same, on device buffers that `make` makes.
pub(crate) fn everything_in(comm: &mut Comm, lens: &[usize], make: &dyn Fn(Vec<f32>) -> DeviceBuf<f32>) {
    let root = comm.rank() == 1;
    let all = |len: usize| if root { N * len } else { 0 };
    for &len in lens {
        same!(comm, make, in len, |c, b| c.all_reduce(b));
        same!(comm, make, in len, |c, b| c.op(ReduceOp::Max).reduce(b, 1));
        same!(comm, make, in len, |c, b| c.broadcast(b, 1));
        same!(comm, make, in N * len, |c, b| c.all_gather_in_place(b));
        same!(comm, make, in N * len, |c, b| c.reduce_scatter_in_place(b));
        same!(comm, make, in N * len, |c, b| c.all_to_all_in_place(b));
        same!(comm, make, in if root { N * len } else { len }, |c, b| c.gather_in_place(b, 1));
        same!(comm, make, in if root { N * len } else { len }, |c, b| c.scatter_in_place(b, 1));
        same!(comm, make, in len, |c, b| c.scan(b));
        same!(comm, make, in len, |c, b| c.exscan(b));
        same!(comm, make, in len, |c, b| c.scale(0.5).all_reduce(b));
        same!(comm, make, into(len, len), |c, a, b| c.op(ReduceOp::Avg).all_reduce_into(a, b));
        same!(comm, make, into(len, if root { len } else { 5 }), |c, a, b| c.reduce_into(a, b, 1));
        same!(comm, make, into(if root { len } else { 7 }, len), |c, a, b| c.broadcast_into(a, b, 1));
        same!(comm, make, into(len, N * len), |c, a, b| c.all_gather_into(a, b));
        same!(comm, make, into(N * len, len), |c, a, b| c.reduce_scatter_into(a, b));
        same!(comm, make, into(N * len, N * len), |c, a, b| c.all_to_all_into(a, b));
        same!(comm, make, into(len, all(len)), |c, a, b| c.gather_into(a, b, 1));
        same!(comm, make, into(all(len), len), |c, a, b| c.scatter_into(a, b, 1));
        same!(comm, make, into(len, len), |c, a, b| c.exscan_into(a, b));
        let counts = [len, 2, 0];
        same!(comm, make, into(counts[comm.rank()], len + 2), |c, a, b| c.all_gather_v_into(a, b, &counts));
    }
}

#[test]
fn device_buffers_get_what_host_buffers_get() {
    child("collectives::device_buffers_get_what_host_buffers_get", SLOW, || {
        ranks(N, |mut comm| {
            // Two devices: one has two ranks.
            let device = Device::new(comm.rank() % 2).unwrap();
            let stream = &DeviceStream::new(&device).unwrap();
            everything(&mut comm, stream, &[0, 1, 1000, 100_000]);
            let new = soon(comm.all_gather(up(stream, vec![comm.rank() as u16; 4]))).unwrap();
            assert_eq!(new, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], "a new vector is of the host");
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn lists_and_messages_take_device_buffers() {
    child("collectives::lists_and_messages_take_device_buffers", SLOW, || {
        ranks(2, |mut comm| {
            let device = Device::new(comm.rank()).unwrap();
            let stream = &DeviceStream::new(&device).unwrap();
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            // Several types, and memory of both kinds in one operation.
            let list = (vec![up(stream, vec![1u8; 3]), up(stream, vec![2; 70_000])], [vec![rank as f64; 5]]);
            let (bytes, [floats]) = soon(comm.all_reduce_list(list)).unwrap();
            let bytes: Vec<_> = bytes.into_iter().map(down).collect();
            assert_eq!((bytes, floats), (vec![vec![2; 3], vec![4; 70_000]], vec![1.0; 5]));

            for len in [1, 300, 200_000] {
                let (send, recv) = (up(stream, values(rank, len)), up(stream, vec![0.0; len]));
                let (sent, received) = soon(comm.send_recv(send, peer, recv, peer)).unwrap();
                assert_eq!((down(sent), down(received)), (values(rank, len), values(peer, len)));
            }
            // From a device to a host, and back.
            if rank == 0 {
                let sent = soon(comm.send(up(stream, vec![9i64; 40]), 1)).unwrap();
                let back = soon(comm.recv(sent, 1)).unwrap();
                assert_eq!(down(back), [-9; 40]);
            } else {
                let mut got = soon(comm.recv(vec![0i64; 40], 0)).unwrap();
                got.iter_mut().for_each(|x| *x = -*x);
                soon(comm.send(got, 0)).unwrap();
            }
            let many = (0..8u32).map(|tag| match rank {
                0 => Message::Send { buf: up(stream, vec![tag; 10]), to: 1, tag },
                _ => Message::Recv { buf: up(stream, vec![0; 10]), from: 0, tag },
            });
            let many = soon(comm.batch(many.collect::<Vec<_>>())).unwrap();
            many.into_iter().zip(0..).for_each(|(buf, tag)| assert_eq!(down(buf), [tag; 10]));
            soon(comm.close()).unwrap();
        });
        nothing_left("both ranks have ended");
    });
}

/// Ranks with and without a GPU make one group.
#[test]
fn device_and_host_ranks_make_one_group() {
    child("collectives::device_and_host_ranks_make_one_group", SLOW, || {
        let sums = ranks(4, |mut comm| {
            let rank = comm.rank();
            if rank % 2 == 0 {
                let (_device, stream) = device();
                down(soon(comm.all_reduce(up(&stream, values(rank, 50_000)))).unwrap())
            } else {
                soon(comm.all_reduce(values(rank, 50_000))).unwrap()
            }
        });
        assert!(sums.iter().all(|sum| *sum == sums[0]));
        let first: f32 = (0..4).map(|rank| values(rank, 1)[0]).sum();
        assert_eq!(sums[0][0], first);
        nothing_left("all ranks have ended");
    });
}

/// Law 1: an operation starts after the work that its buffer's stream holds at the call. That work is slow here, and nothing is awaited.
#[test]
fn law_1_an_operation_follows_the_stream_of_its_buffer() {
    child("collectives::law_1_an_operation_follows_the_stream_of_its_buffer", SLOW, || {
        for seed in 0..20 {
            set_delays(3000, seed);
            ranks(2, |mut comm| {
                let (_device, stream) = device();
                let dirty = up(&stream, vec![0xAAAA_AAAAu32; 5000]);
                drop(dirty);
                // The pool gives the same memory again, and the stream may fill it only after this thread has made the calls.
                let works: Vec<_> = (0..4)
                    .map(|_| comm.all_reduce(DeviceBuf::<u32>::zeroed(&stream, 5000).unwrap()))
                    .collect();
                for work in works {
                    assert!(down(soon(work).unwrap()).iter().all(|x| *x == 0), "seed {seed}");
                }
            });
        }
        nothing_left("all ranks have ended");
    });
}

/// Laws 2 and 3: operations that nobody awaits still run to their end, and all memory is freed.
#[test]
fn law_2_a_dropped_operation_on_device_memory_runs_on() {
    child("collectives::law_2_a_dropped_operation_on_device_memory_runs_on", SLOW, || {
        ranks(2, |mut comm| {
            let (_device, stream) = device();
            for _ in 0..10 {
                drop(comm.all_reduce(up(&stream, vec![1f32; 20_000])));
            }
            let last = soon(comm.all_reduce(up(&stream, vec![1f32; 3]))).unwrap();
            assert_eq!(down(last), [2.0; 3]);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Law 4: if a peer does not call, or aborts, the operation ends in time with an error that holds the buffer.
#[test]
fn law_4_a_missing_peer_and_an_abort_end_operations_on_device_memory() {
    child("collectives::law_4_a_missing_peer_and_an_abort_end_operations_on_device_memory", SLOW, || {
        let mut comms = Comm::local(2).unwrap();
        let (_device, stream) = device();
        let buf = up(&stream, values(0, 30_000));
        let Failed { buf, error } =
            soon(comms[0].timeout(Duration::from_millis(100)).all_reduce(buf)).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert_eq!(down(buf.unwrap()), values(0, 30_000), "nothing was written");

        let mut comms = Comm::local(2).unwrap();
        let work = comms[0].all_reduce(up(&stream, values(0, 30_000)));
        comms[1].abort("a test");
        let Failed { buf, error } = soon(work).unwrap_err();
        assert!(matches!(error, Error::Aborted { .. }), "{error}");
        assert_eq!(down(buf.unwrap()), values(0, 30_000));
        drop((comms, stream, _device));
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn law_5_a_disagreement_on_device_memory_is_an_error_on_both() {
    child("collectives::law_5_a_disagreement_on_device_memory_is_an_error_on_both", SLOW, || {
        let errors = ranks(2, |mut comm| {
            let (_device, stream) = device();
            let len = 100 + comm.rank();
            let Failed { buf, error } = soon(comm.all_reduce(up(&stream, vec![1f32; len]))).unwrap_err();
            assert!(buf.is_some());
            error.to_string()
        });
        assert!(errors.iter().all(|error| error.contains("100") && error.contains("101")), "{errors:?}");
        nothing_left("both ranks have ended");
    });
}

#[test]
fn what_cannot_be_is_refused_with_the_buffer() {
    child("collectives::what_cannot_be_is_refused_with_the_buffer", &[], || {
        let (_device, stream) = device();
        let mut comm = Comm::local(1).unwrap().remove(0);
        let host = HostStream::new("a test").unwrap();
        let refused = |failed: Failed<DeviceBuf<f32>>| {
            assert!(failed.error.to_string().contains("after what its own stream holds"), "{}", failed.error);
            failed.buf.unwrap()
        };
        let buf = up(&stream, vec![1f32; 8]);
        let buf = refused(soon(comm.on(&host).all_reduce(buf)).unwrap_err());
        let event: Event = host.record();
        let buf = refused(soon(comm.after(event).all_reduce(buf)).unwrap_err());
        assert_eq!(down(soon(comm.all_reduce(buf)).unwrap()), [1.0; 8], "the communicator is as it was");
        drop((comm, stream, _device));
        nothing_left("all was dropped");
    });
}

/// Each driver call that staging makes fails once: there may be an error, but no hang, and nothing is lost or leaked.
#[test]
fn every_call_of_staging_fails_in_turn() {
    const CALLED: [&str; 9] = [
        "cuMemHostAlloc",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamIsCapturing",
        "cuCtxPushCurrent_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuLaunchHostFunc",
    ];
    fn program() -> Result<(), Error> {
        let results = ranks(2, |mut comm| -> Result<(), Error> {
            // A rank that gives up aborts, so that the other one ends, too.
            let run = |comm: &mut Comm| -> Result<(), Error> {
                let device = Device::new(0)?;
                let stream = DeviceStream::new(&device)?;
                let mut buf = soon(DeviceBuf::from_host(&stream, vec![1f32; 1000]))?.1;
                for _ in 0..2 {
                    let work = comm.timeout(Duration::from_secs(5)).all_reduce(buf);
                    buf = soon(work).map_err(|failed| failed.error)?;
                }
                let (_, host) = soon(buf.to_host(vec![0f32; 1000]))?;
                assert_eq!(host, [4.0; 1000]);
                Ok(())
            };
            let result = run(&mut comm);
            if result.is_err() {
                comm.abort("a rank gave up");
            }
            result
        });
        results.into_iter().collect()
    }
    child("collectives::every_call_of_staging_fails_in_turn", &[], || {
        for name in CALLED {
            let before = calls(name);
            program().unwrap();
            nothing_left("nothing fails");
            for nth in 1..=calls(name) - before {
                fail(Some(name), nth, 999);
                let result = program();
                fail(None, 0, 0);
                nothing_left(&format!("call {nth} of {name} failed, {result:?}"));
            }
        }
    });
}
