//! Collectives that are given to NCCL whole, with a library for tests in its place (`tests/nccl`): results, laws, and failures in NCCL.

mod messages;
mod node;
mod real;
mod sharing;
mod train;
mod varied;

use std::ffi::{c_int, c_void};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Algo, Comm, DType, Error, Failed, Kind, MissingState, ReduceOp, Work};
use test_support::cases::{self, Await, Case, Combine, Form, OnDevice, Oracle, What};

use crate::collectives::everything;
use crate::support::{
    NCCL as LIBRARY, calls, child, down, function_of, is_ours, nccl_library, nothing_left, ranks, report,
    set_delays, soon, up, values,
};

const LEN: usize = 3000;
const SHORT: Duration = Duration::from_millis(400);

/// Runs a test in a child process with so many devices, and with the NCCL for tests.
pub(crate) fn with_nccl(test: &str, devices: usize, more: &[(&str, &str)], body: impl FnOnce()) {
    let (devices, library) = (devices.to_string(), nccl_library().to_str().unwrap());
    let mut variables = vec![
        ("ALLSTREAM_TEST_CUDA_DEVICES", devices.as_str()),
        ("ALLSTREAM_TEST_CUDA_DELAY_US", "500"),
        (LIBRARY, library),
    ];
    variables.extend_from_slice(more);
    child(test, &variables, body);
}

/// The library's report on itself (`tests/nccl/src/knobs.rs`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Told {
    comms: u64,
    inits: u64,
    kernels: u64,
    mismatches: u64,
    misuses: u64,
}

fn function(name: &str) -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    function_of(LIBRARY, &HANDLE, name)
}

fn told() -> Told {
    let mut told = Told::default();
    // SAFETY: the library's `knobs.rs` declares the function and the report with these types.
    unsafe {
        let ask: unsafe extern "C" fn(*mut Told) -> c_int =
            std::mem::transmute(function("allstream_test_nccl_report"));
        assert_eq!(ask(&raw mut told), 0);
    }
    told
}

/// The kinds of trouble, as `What` in the library's `knobs.rs` numbers them.
const STAYS_IN_PROGRESS: c_int = 1;
const HANGS: c_int = 2;
const FAILS_LATE: c_int = 3;
const REFUSES: c_int = 4;
const REFUSES_INIT: c_int = 5;
const IS_DEAF: c_int = 6;

/// Has this go wrong on a rank at one of its calls, counted from 0, with this code. `what` is 0: nothing goes wrong from now on.
fn trouble(what: c_int, rank: c_int, call: u64, code: c_int) {
    // SAFETY: the library's `knobs.rs` declares the function with this type.
    let set: extern "C" fn(c_int, c_int, u64, c_int) -> c_int =
        unsafe { std::mem::transmute(function("allstream_test_nccl_trouble")) };
    assert_eq!(set(what, rank, call, code), 0);
}

/// Binds `comm` to its rank's device and to NCCL, and returns a stream of that device.
fn bound(comm: &mut Comm) -> DeviceStream {
    let device = Device::new(comm.rank()).unwrap();
    let path = soon(comm.bind_nccl(&device)).unwrap();
    assert_eq!(path, DevicePath::Nccl { library: "NCCL 2.27.3".into(), staged: None });
    DeviceStream::new(&device).unwrap()
}

fn failure<O>(work: Work<O, DeviceBuf<f32>>) -> (Error, Option<DeviceBuf<f32>>) {
    let Err(Failed { buf, error }) = soon(work) else { panic!("it did not fail") };
    (error, buf)
}

/// Nothing of the driver or of the library is left, and nothing was done that a real one forbids.
fn all_is_gone() {
    nothing_left("all ranks have ended");
    assert_eq!(report().freed_in_use, 0);
    let end = Instant::now() + Duration::from_secs(20);
    while told().comms > 0 {
        assert!(Instant::now() < end, "{:?}", told());
        std::thread::sleep(Duration::from_millis(1));
    }
    let Told { mismatches, misuses, .. } = told();
    assert_eq!((mismatches, misuses), (0, 0));
}

#[test]
fn nccl_gives_what_hosts_give() {
    with_nccl("nccl::nccl_gives_what_hosts_give", 3, &[], || {
        ranks(3, |mut comm| {
            let stream = bound(&mut comm);
            everything(&mut comm, &stream, &[0, 1, 1000]);
            soon(comm.close()).unwrap();
        });
        all_is_gone();
        assert!(told().kernels > 50, "{:?}", told());
    });
}

/// Before a stream waits for a rank that shares its device, has not called, and seems to have no stream yet, that rank gets a moment to make one. A
/// stream that the engine has made for NCCL is none on which a rank makes its input.
#[test]
fn streams_of_the_engine_do_not_count_as_streams_of_a_rank_that_has_none() {
    let test = "nccl::streams_of_the_engine_do_not_count_as_streams_of_a_rank_that_has_none";
    with_nccl(test, 1, &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")], || {
        let mut alone = Comm::local(1).unwrap().remove(0);
        drop(bound(&mut alone));
        let (told, hear) = std::sync::mpsc::channel();
        let (told, hear) = (std::sync::Mutex::new(told), std::sync::Mutex::new(hear));
        ranks(2, |mut comm| {
            let (rank, device) = (comm.rank(), Device::new(0).unwrap());
            assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
            if rank == 1 {
                hear.lock().unwrap().recv_timeout(Duration::from_secs(10)).unwrap();
            }
            let stream = DeviceStream::new(&device).unwrap();
            let (buf, called) = (up(&stream, values(rank, LEN)), Instant::now());
            let ordered = comm.on(&stream).all_reduce(buf).join(&stream).unwrap();
            if rank == 0 {
                assert!(called.elapsed() >= SHORT, "it joined after {:?}", called.elapsed());
                told.lock().unwrap().send(()).unwrap();
            }
            let sums: Vec<f32> = (0..LEN).map(|i| values(0, LEN)[i] + values(1, LEN)[i]).collect();
            assert!(down(soon(ordered).unwrap()) == sums);
            soon(comm.close()).unwrap();
        });
        soon(alone.close()).unwrap();
        all_is_gone();
    });
}

/// A list is one operation: NCCL takes it if it takes every entry.
#[test]
fn lists_go_to_nccl_as_one_or_not_at_all() {
    with_nccl("nccl::lists_go_to_nccl_as_one_or_not_at_all", 2, &[], || {
        let counts = ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let floats = || up(&stream, vec![1.5_f32; LEN]);
            let kernels = |comm: &mut Comm| {
                soon(comm.barrier()).unwrap();
                let kernels = told().kernels;
                soon(comm.barrier()).unwrap();
                kernels
            };
            let before = kernels(&mut comm);
            let list = ([floats()], [up(&stream, vec![rank as u64; 9])]);
            let ([a], [b]) = soon(comm.all_reduce_list(list)).unwrap();
            assert_eq!((down(a), down(b)), (vec![3.0; LEN], vec![1; 9]));
            let between = kernels(&mut comm);
            // NCCL has no 16-bit integers.
            let list = ([floats()], [up(&stream, vec![rank as u16; 9])]);
            let ([a], [b]) = soon(comm.all_reduce_list(list)).unwrap();
            assert_eq!((down(a), down(b)), (vec![3.0; LEN], vec![1; 9]));
            let after = kernels(&mut comm);
            soon(comm.close()).unwrap();
            [between - before, after - between]
        });
        assert_eq!(counts, [[2, 0]; 2]);
        all_is_gone();
    });
}

/// Calls of every kind and form, and whether NCCL is to take them.
fn case_list(n: usize) -> Vec<(Case, bool)> {
    let ops = Combine::all();
    let mut all = Vec::new();
    let calls = Kind::ALL.into_iter().flat_map(|kind| Form::ALL.into_iter().map(move |form| (kind, form)));
    let suits = |kind: Kind, form: Form| {
        form.is_of(kind)
            && kind != Kind::Barrier
            && matches!(form, Form::InPlace | Form::Into | Form::InPlaceV | Form::IntoV)
    };
    for (kind, form) in calls.filter(|(kind, form)| suits(*kind, *form)) {
        for len in [0, 1, n + 1, 1000] {
            let turn = all.len() + 7 * n;
            let pairs = DType::ALL.into_iter().flat_map(|dtype| ops.iter().map(move |op| (dtype, *op)));
            let pairs: Vec<_> = pairs.filter(|(dtype, op)| op.supports(*dtype) && op.fits(kind)).collect();
            for (dtype, op) in [pairs[turn * 5 % pairs.len()], pairs[(turn * 11 + 3) % pairs.len()]] {
                let what = What::Collective(kind, Algo::Auto, form);
                let (root, seed, timeout) = (turn % n, turn as u64, Duration::from_secs(30));
                let end = [Await::Wait, Await::Poll, Await::Later][turn % 3];
                let case =
                    Case { what, len, dtype, op, root, special: false, end, seed, timeout, refused: false };
                let is_whole = match kind {
                    Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                        op == Combine::Op(ReduceOp::Sum) && dtype == DType::F32
                    }
                    kind => !kind.is_scan(),
                };
                // Where each rank knows its own counts alone, some may have nothing to move.
                let is_sure = match form.varies() {
                    true => len == 1000 && matches!(kind, Kind::AllGather | Kind::ReduceScatter),
                    false => len > 0,
                };
                all.push((case, is_whole && is_sure));
            }
        }
    }
    all
}

#[test]
fn what_goes_to_nccl_gives_what_the_oracle_says() {
    with_nccl("nccl::what_goes_to_nccl_gives_what_the_oracle_says", 4, &[], || {
        for n in [1, 2, 4] {
            let list = case_list(n);
            let (oracle, before) = (Oracle::new(list.len(), n), told().kernels);
            let results = ranks(n, |mut comm| -> Result<(), String> {
                let place = OnDevice(bound(&mut comm));
                for (i, (case, _)) in list.iter().enumerate() {
                    cases::run_on_device(&mut comm, case, &oracle, i, &place).map_err(|error| {
                        format!("rank {} of {n}, case {i}, {case:?}: {error}", comm.rank())
                    })?;
                }
                soon(comm.close()).map_err(|error| error.to_string())
            });
            results.into_iter().for_each(|result| result.unwrap());
            all_is_gone();
            // (A rank that is alone has nothing to give to NCCL in some of them.)
            let sure = if n == 1 { 0 } else { n as u64 }
                * list.iter().filter(|(_, is_sure)| *is_sure).count() as u64;
            let kernels = told().kernels - before;
            assert!(kernels > sure, "{kernels} kernels, {sure} at least");
        }
    });
}

/// Devices out of each other's reach, as on several hosts: NCCL takes what it can, and the rest is staged.
#[test]
fn where_devices_do_not_reach_each_other_the_rest_is_staged() {
    let apart = [("ALLSTREAM_TEST_CUDA_NO_PEER", "0-1,0-2,1-2")];
    // (The test library's kernels reach all memory, as NCCL reaches other devices by way of the host.)
    with_nccl("nccl::where_devices_do_not_reach_each_other_the_rest_is_staged", 3, &apart, || {
        ranks(3, |mut comm| {
            let device = Device::new(comm.rank()).unwrap();
            let path = soon(comm.bind_nccl(&device)).unwrap();
            assert!(
                matches!(&path, DevicePath::Nccl { staged: Some(why), .. } if why.contains("cannot reach")),
                "{path:?}"
            );
            let stream = DeviceStream::new(&device).unwrap();
            everything(&mut comm, &stream, &[1, 1000]);
            soon(comm.close()).unwrap();
        });
        all_is_gone();
        assert!(told().kernels > 20, "{:?}", told());
    });
}

/// Law 5.
#[test]
fn law_5_a_disagreement_is_an_error_before_nccl_is_given_anything() {
    with_nccl("nccl::law_5_a_disagreement_is_an_error_before_nccl_is_given_anything", 2, &[], || {
        type Called = fn(&mut Comm, &DeviceStream) -> Work<DeviceBuf<f32>>;
        let calls: [(&str, Called); 3] = [
            ("lengths", |comm, stream| comm.all_reduce(up(stream, vec![1.0; LEN + comm.rank()]))),
            ("collectives", |comm, stream| match comm.rank() {
                0 => comm.all_reduce(up(stream, vec![1.0; LEN])),
                _ => comm.broadcast(up(stream, vec![1.0; LEN]), 0),
            }),
            ("who carries it out", |comm, stream| match comm.rank() {
                0 => comm.all_reduce(up(stream, vec![1.0; LEN])),
                _ => comm.algo(Algo::Direct).all_reduce(up(stream, vec![1.0; LEN])),
            }),
        ];
        for (what, call) in calls {
            ranks(2, |mut comm| {
                let stream = bound(&mut comm);
                let (error, buf) = failure(call(&mut comm, &stream));
                assert!(matches!(error, Error::Mismatch { .. }), "{what}: {error}");
                assert!(down(buf.unwrap()).iter().all(|x| *x == 1.0), "{what}: the buffer is as it was");
            });
            all_is_gone();
        }
        assert_eq!(told().kernels, 0);
    });
}

/// Law 4: the timeout comes before NCCL is given anything.
#[test]
fn law_4_a_rank_that_does_not_call_is_named() {
    with_nccl("nccl::law_4_a_rank_that_does_not_call_is_named", 3, &[], || {
        let waits = std::sync::Barrier::new(3);
        ranks(3, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            if rank < 2 {
                let (error, buf) = failure(comm.timeout(SHORT).all_reduce(up(&stream, values(rank, LEN))));
                let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                assert_eq!(missing.iter().map(|one| one.rank).collect::<Vec<_>>(), [2], "{error}");
                assert!(down(buf.unwrap()) == values(rank, LEN), "nothing was written");
            }
            waits.wait();
        });
        all_is_gone();
        assert_eq!(told().kernels, 0);
    });
}

/// Law 4: NCCL hangs before its kernel is on the stream, or on the device.
#[test]
fn law_4_a_hang_is_a_timeout_and_the_abort_gives_buffers_back() {
    with_nccl("nccl::law_4_a_hang_is_a_timeout_and_the_abort_gives_buffers_back", 3, &[], || {
        for what in [STAYS_IN_PROGRESS, HANGS] {
            trouble(what, 1, 2, 0);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm));
                for _ in 0..2 {
                    drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
                }
                let begun = Instant::now();
                let hangs = comm.timeout(SHORT).all_reduce(up(&stream, values(rank, LEN)));
                let behind = comm.timeout(SHORT).all_reduce(up(&stream, values(rank, LEN)));
                let ordinary = comm.timeout(SHORT).scan(up(&stream, values(rank, LEN)));
                let (error, buf) = failure(hangs);
                let Error::Timeout { missing, rank: noticed, .. } = &error else { panic!("{error}") };
                let named = missing.iter().filter(|one| matches!(one.state, MissingState::NotEnded { .. }));
                assert_eq!(named.map(|one| one.rank).collect::<Vec<_>>(), [*noticed], "{error}");
                assert!(error.to_string().contains("NCCL 2.27.3"), "{error}");
                is_ours(buf.unwrap());
                is_ours(failure(behind).1.unwrap());
                is_ours(failure(ordinary).1.unwrap());
                assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            });
            trouble(0, 0, 0, 0);
            all_is_gone();
        }
    });
}

/// Law 3: a kernel that NCCL's abort does not end may touch the buffers for ever.
#[test]
fn law_3_what_an_abort_does_not_end_keeps_the_buffer() {
    with_nccl("nccl::law_3_what_an_abort_does_not_end_keeps_the_buffer", 2, &[], || {
        trouble(HANGS, 1, 0, 0);
        trouble(IS_DEAF, 1, 0, 0);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let begun = Instant::now();
            let (error, buf) = failure(comm.timeout(SHORT).all_reduce(up(&stream, values(rank, LEN))));
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            // Both ranks are of this process: the other's kernels may touch this one's buffer.
            assert!(buf.is_none(), "rank {rank}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            // Dropping these would wait for the device.
            std::mem::forget((comm, stream));
        });
        std::process::exit(0);
    });
}

/// Law 3: NCCL gives an error when the kernel has ended, or at the call.
#[test]
fn law_3_an_error_of_nccl_s_names_the_rank_and_gives_buffers_back() {
    with_nccl("nccl::law_3_an_error_of_nccl_s_names_the_rank_and_gives_buffers_back", 3, &[], || {
        for what in [FAILS_LATE, REFUSES] {
            trouble(what, 1, 1, 6);
            ranks(3, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm));
                drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
                let next = comm.all_reduce(up(&stream, values(rank, LEN)));
                let last = comm.all_reduce(up(&stream, values(rank, LEN)));
                match soon(next) {
                    Ok(buf) => assert!(rank != 1, "{:?}", down(buf).first()),
                    Err(Failed { buf, error }) => {
                        assert!(matches!(error, Error::Library { rank: 1, .. }), "{error}");
                        assert!(error.to_string().contains("ncclRemoteError (6)"), "{error}");
                        is_ours(buf.unwrap());
                    }
                }
                let (error, buf) = failure(last);
                assert!(matches!(error, Error::Library { rank: 1, .. }), "{error}");
                is_ours(buf.unwrap());
            });
            trouble(0, 0, 0, 0);
            all_is_gone();
        }
    });
}

/// Laws 1, 2 and 4: a stream waits for NCCL's work, and no thread does; operations that are dropped run on; and an abort releases the
/// stream, whose buffer then holds no result.
#[test]
fn streams_wait_for_nccl_and_an_abort_releases_them() {
    with_nccl("nccl::streams_wait_for_nccl_and_an_abort_releases_them", 2, &[], || {
        for seed in 0..6 {
            set_delays(2000, seed);
            let hangs = seed >= 3;
            if hangs {
                trouble(HANGS, (seed % 2) as c_int, 5, 0);
            }
            ranks(2, |mut comm| {
                let (rank, stream) = (comm.rank(), bound(&mut comm));
                let device = Device::new(rank).unwrap();
                let compute = DeviceStream::new(&device).unwrap();
                let mut buf = up(&stream, vec![1.0_f32; LEN]);
                for _ in 0..4 {
                    drop(comm.all_reduce(up(&stream, values(rank, LEN))));
                    let joined = comm.op(ReduceOp::Sum).all_reduce(buf).join(&compute).unwrap();
                    buf = joined.in_order().unwrap();
                    if hangs {
                        break;
                    }
                }
                if !hangs {
                    assert!(down(buf).iter().all(|x| *x == 16.0));
                    return soon(comm.close()).unwrap();
                }
                for _ in 0..3 {
                    drop(comm.all_reduce(up(&stream, values(rank, LEN))));
                }
                // The sixth call hangs.
                let joined = comm.timeout(SHORT).all_reduce(buf).join(&compute).unwrap();
                let Failed { error, .. } = soon(joined).unwrap_err();
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
                compute.synchronize().unwrap();
                assert!(comm.check().is_err());
            });
            trouble(0, 0, 0, 0);
            all_is_gone();
        }
    });
}

/// Three communicators on the same devices, each of which has room for one kernel at a time. Their operations are under way together.
#[test]
fn launches_of_several_communicators_keep_one_order() {
    with_nccl("nccl::launches_of_several_communicators_keep_one_order", 2, &[], || {
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let mut others = [soon(comm.dup()).unwrap(), soon(comm.dup()).unwrap()];
            others.iter_mut().for_each(|other| drop(bound(other)));
            for round in 0..40 {
                // All buffers are made before the first call, so that nothing is between the calls.
                let [a, b] = [(); 2].map(|()| up(&stream, values(rank, LEN)));
                let c = up(&stream, values(rank, 10));
                let [first, second] = &mut others;
                let work = [first.all_reduce(a), second.all_reduce(b)];
                let own = comm.broadcast(c, round % 2);
                // Awaited in another order than they were called in.
                assert!(down(soon(own).unwrap()) == values(round % 2, 10));
                for work in work.into_iter().rev() {
                    let wanted =
                        values(0, LEN).iter().zip(values(1, LEN)).map(|(a, b)| a + b).collect::<Vec<_>>();
                    assert!(down(soon(work).unwrap()) == wanted, "round {round}");
                }
            }
            for other in others {
                soon(other.close()).unwrap();
            }
            soon(comm.close()).unwrap();
        });
        all_is_gone();
    });
}

/// Shows that the test above would notice a wrong order: without the engine's order of launches, devices hang.
#[cfg(feature = "testing")]
#[test]
fn launches_in_any_order_hang_devices() {
    with_nccl("nccl::launches_in_any_order_hang_devices", 2, &[], || {
        allstream::testing::launch_in_any_order(true);
        let hung = ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let mut other = soon(comm.dup()).unwrap();
            drop(bound(&mut other));
            for round in 0..200 {
                // Both buffers are made before the first call, so that nothing is between the calls.
                let [a, b] = [(); 2].map(|()| up(&stream, values(rank, LEN)));
                let both = [(&mut comm, a), (&mut other, b)];
                let both = both.map(|(comm, buf)| comm.timeout(SHORT).all_reduce(buf));
                if both.map(soon).iter().any(Result::is_err) {
                    return Some(round);
                }
            }
            None
        });
        assert!(hung.iter().all(Option::is_some), "{hung:?}");
        all_is_gone();
    });
}

#[test]
fn ranks_that_call_in_different_orders_are_told_both_calls_and_no_device_hangs() {
    let test = "nccl::ranks_that_call_in_different_orders_are_told_both_calls_and_no_device_hangs";
    with_nccl(test, 2, &[], || {
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let mut other = soon(comm.dup()).unwrap();
            drop(bound(&mut other));
            let buf = || up(&stream, vec![1.0_f32; LEN]);
            let (a, b) = if rank == 0 {
                let a = comm.timeout(SHORT).all_reduce(buf());
                (a, other.timeout(SHORT).broadcast(buf(), 0))
            } else {
                let b = other.timeout(SHORT).broadcast(buf(), 0);
                (comm.timeout(SHORT).all_reduce(buf()), b)
            };
            for work in [a, b] {
                let (error, buf) = failure(work);
                let text = error.to_string();
                assert!(matches!(error, Error::Timeout { .. }), "{text}");
                assert!(text.contains("all_reduce") && text.contains("broadcast"), "both are named: {text}");
                is_ours(buf.unwrap());
            }
        });
        all_is_gone();
        assert_eq!(told().kernels, 0);
    });
}

/// If NCCL cannot be bound, all ranks get an error, and the communicator goes on as before.
#[test]
fn what_cannot_be_bound_is_said_to_all_and_the_communicator_goes_on() {
    with_nccl(
        "nccl::what_cannot_be_bound_is_said_to_all_and_the_communicator_goes_on",
        2,
        &[("ALLSTREAM_TIMEOUT", "5")],
        || {
            ranks(2, |mut comm| {
                let rank = comm.rank();
                let (first, own) = (Device::new(0).unwrap(), Device::new(rank).unwrap());
                let error = soon(comm.bind_nccl(&first)).unwrap_err().to_string();
                assert!(error.contains("rank 0 and rank 1 have one device"), "{error}");
                let error = match rank {
                    0 => soon(comm.bind_nccl(&own)),
                    _ => soon(comm.bind_device(&own)),
                };
                let error = error.unwrap_err().to_string();
                assert!(error.contains("rank 0 asks for NCCL, and rank 1 does not"), "{error}");
                if rank == 0 {
                    trouble(REFUSES_INIT, 1, 0, 2);
                }
                soon(comm.barrier()).unwrap();
                let error = soon(comm.bind_nccl(&own)).unwrap_err();
                match rank {
                    0 => assert!(
                        matches!(&error, Error::Library { problem, .. } if problem.contains("not ready")),
                        "{error}"
                    ),
                    _ => assert!(error.to_string().contains("ncclSystemError (2)"), "{error}"),
                }
                if rank == 0 {
                    trouble(0, 0, 0, 0);
                }
                soon(comm.barrier()).unwrap();
                let stream = bound(&mut comm);
                drop(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
                soon(comm.close()).unwrap();
            });
            all_is_gone();
        },
    );
}

/// A communicator of the same members and devices takes up NCCL's communicator of one that was closed.
#[test]
fn the_pool_keeps_what_nccl_has_made() {
    with_nccl("nccl::the_pool_keeps_what_nccl_has_made", 2, &[], || {
        ranks(2, |mut comm| {
            let rank = comm.rank();
            let mut first = 0;
            for round in 0..4 {
                let mut child = soon(comm.dup()).unwrap();
                let stream = bound(&mut child);
                drop(down(soon(child.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
                soon(child.close()).unwrap();
                soon(comm.barrier()).unwrap();
                match round {
                    0 => first = told().inits,
                    _ => assert_eq!(told().inits, first, "round {round}"),
                }
                soon(comm.barrier()).unwrap();
            }
            // One that is aborted is not kept.
            let mut child = soon(comm.dup()).unwrap();
            bound(&mut child);
            // Without this barrier, the abort could reach the other rank before its bind has ended.
            soon(comm.barrier()).unwrap();
            if rank == 0 {
                child.abort("a test");
            }
            while child.check().is_ok() {
                std::thread::yield_now();
            }
            drop(child);
            soon(comm.barrier()).unwrap();
            let mut child = soon(comm.dup()).unwrap();
            let stream = bound(&mut child);
            assert_eq!(told().inits, first + 2);
            drop(down(soon(child.all_reduce(up(&stream, values(rank, LEN)))).unwrap()));
            soon(child.close()).unwrap();
            soon(comm.close()).unwrap();
        });
        all_is_gone();
    });
}

/// The memory for the copies of all buffers of a list is got at the call. Later, when NCCL gets the call, the driver is asked for none: it might wait
/// for all that is on the device.
#[test]
fn memory_for_the_copies_of_a_list_is_got_at_the_call() {
    /// Each copy takes 512 bytes of the pool.
    const COUNT: usize = 200;
    with_nccl("nccl::memory_for_the_copies_of_a_list_is_got_at_the_call", 2, &[], || {
        let all = &Barrier::new(2);
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), bound(&mut comm));
            let device = stream.device();
            let list = || (0..COUNT).map(|i| up(&stream, values(rank + i, 1))).collect::<Vec<_>>();
            // This loads the kernels.
            drop(soon(comm.scale(0.5).reduce_list(list(), 0)).unwrap());
            let (bufs, mut filling) = (list(), Vec::new());
            stream.synchronize().unwrap();
            device.trim().unwrap();
            let unused = || {
                let pool = device.pool();
                (pool.reserved - pool.used - pool.pending) as usize
            };
            // What is left is less than the copies of rank 1 take.
            while unused() > 32 << 10 {
                let half = 1 << (unused().ilog2() - 1);
                filling.push(DeviceBuf::<u8>::zeroed(&stream, half).unwrap());
            }
            all.wait();
            let before = calls("cuMemAlloc_v2");
            all.wait();
            let allocated = || calls("cuMemAlloc_v2") - before;
            // Rank 0 has the results, and its inputs are scaled where they lie.
            let back = if rank == 1 {
                let work = comm.scale(0.5).reduce_list(bufs, 0);
                assert!(allocated() > 0, "the call gets the memory");
                let at_call = allocated();
                all.wait();
                let back = soon(work).unwrap();
                assert_eq!(allocated(), at_call, "the memory was got at the call");
                back
            } else {
                all.wait();
                soon(comm.scale(0.5).reduce_list(bufs, 0)).unwrap()
            };
            for (i, buf) in back.into_iter().enumerate() {
                let sum = values(i, 1)[0] * 0.5 + values(1 + i, 1)[0] * 0.5;
                assert_eq!(down(buf), [if rank == 0 { sum } else { values(1 + i, 1)[0] }], "buffer {i}");
            }
            all.wait();
            drop(filling);
            soon(comm.close()).unwrap();
        });
        all_is_gone();
    });
}
