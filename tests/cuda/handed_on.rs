//! Buffers that are handed on before their collective has ended: later work comes after it, and is refused if it has failed.

use std::time::Duration;

use allstream::cuda::{DeviceBuf, DeviceStream};
use allstream::{Comm, Error, Failed, dlpack};

use crate::support::{bound, child, down, nothing_left, ranks, report, set_delays, soon, up, values};

const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300")];

/// Calls that take references, for callers that do not own the buffers: the input stays as it is, and later work sees the result.
#[test]
fn references_are_reduced_in_the_order_of_their_streams() {
    child("handed_on::references_are_reduced_in_the_order_of_their_streams", SLOW, || {
        for seed in 0..5 {
            set_delays(500, seed);
            ranks(2, |mut comm| {
                let stream = bound(&mut comm, 1);
                let shared = comm.share();
                let input = up(&stream, values(comm.rank(), 3000));
                let mut sum = DeviceBuf::<f32>::zeroed(&stream, 3000).unwrap();
                let mut twice = DeviceBuf::<f32>::zeroed(&stream, 3000).unwrap();
                for _ in 0..8 {
                    shared.all_reduce_ordered(&input, &mut sum).unwrap();
                    shared.on(&stream).all_reduce_ordered(&sum, &mut twice).unwrap();
                }
                // Dropped before it is known whether the collective has ended.
                drop(sum);
                let once =
                    values(0, 3000).iter().zip(values(1, 3000)).map(|(a, b)| a + b).collect::<Vec<_>>();
                assert_eq!(down(twice), once.iter().map(|x| x + x).collect::<Vec<_>>(), "seed {seed}");
                assert_eq!(down(input), values(comm.rank(), 3000));
                comm.check().unwrap();
                drop(shared);
                soon(comm.close()).unwrap();
            });
        }
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Where the communicator is not bound to devices, the call waits for the result.
#[test]
fn references_are_reduced_by_the_host_too() {
    child("handed_on::references_are_reduced_by_the_host_too", SLOW, || {
        ranks(2, |mut comm| {
            let device = allstream::cuda::Device::new(0).unwrap();
            let stream = DeviceStream::new(&device).unwrap();
            let input = up(&stream, vec![comm.rank() as f32 + 1.0; 100]);
            let mut sum = DeviceBuf::<f32>::zeroed(&stream, 100).unwrap();
            comm.all_reduce_ordered(&input, &mut sum).unwrap();
            assert_eq!(down(sum), [3.0; 100]);
            let mut short = DeviceBuf::<f32>::zeroed(&stream, 10).unwrap();
            let error = comm.all_reduce_ordered(&input, &mut short).unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }), "{error}");
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}

fn cause<T>(result: Result<T, Failed<impl Sized>>) -> Error {
    match result {
        Ok(_) => panic!("what means nothing was given away"),
        Err(Failed { error, .. }) => error,
    }
}

/// At the deadline the stream goes on. What the buffer then holds is no result, and no call takes it for one.
#[test]
fn what_a_failed_collective_leaves_is_refused_with_the_cause() {
    child("handed_on::what_a_failed_collective_leaves_is_refused_with_the_cause", SLOW, || {
        let (told, hear) = std::sync::mpsc::channel::<()>();
        let hear = std::sync::Mutex::new(hear);
        let told = std::sync::Mutex::new(Some(told));
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            if comm.rank() == 1 {
                // Never calls, and stays until the other has seen everything.
                let _ = hear.lock().unwrap().recv_timeout(Duration::from_secs(60));
                return;
            }
            let _told = told.lock().unwrap().take();
            let late = |error: &Error| matches!(error, Error::Timeout { .. });
            let limited = comm.timeout(Duration::from_millis(200)).on(&stream);
            let work = limited.all_reduce(up(&stream, values(0, 3000)));
            let sum = work.join(&stream).unwrap().in_order().unwrap();
            let input = up(&stream, values(0, 3000));
            let other = DeviceBuf::<f32>::zeroed(&stream, 2000).unwrap();
            // Copies that are put behind the collective before it fails: they end after it, and give its error.
            let [low, high] = sum.split_at(1000).unwrap();
            let Failed { buf, error } = soon(low.to_host(vec![0.0; 1000])).unwrap_err();
            assert!(late(&error), "{error}");
            let (low, host) = buf.unwrap();
            let copied = cause(soon(other.copy_from(high)));
            assert!(late(&copied), "{copied}");
            // The failure is known now: the buffer is refused at once, also by other communicators and by `dlpack::export`.
            let mut two = Comm::local(2).unwrap();
            let mut alone = Comm::local(1).unwrap().remove(0);
            let Failed { buf, error } = soon(alone.all_reduce(low)).unwrap_err();
            assert!(late(&error), "{error}");
            let Failed { buf, error } = dlpack::export(buf.unwrap(), &[1000]).unwrap_err();
            assert!(late(&error), "{error}");
            let sent = cause(soon(two[0].send(buf.unwrap(), 1)));
            assert!(late(&sent), "{sent}");
            // Calls by reference and `check` give the same error.
            let mut output = DeviceBuf::<f32>::zeroed(&stream, 3000).unwrap();
            assert!(late(&comm.all_reduce_ordered(&input, &mut output).unwrap_err()));
            assert!(late(&comm.check().unwrap_err()));
            // New contents are good, and so is the input, which was only read.
            let good = up(&stream, host);
            let (_, good) = soon(good.copy_from_host(vec![7.0; 1000])).unwrap();
            assert_eq!(down(soon(alone.all_reduce(good)).unwrap()), [7.0; 1000]);
            assert_eq!(down(input), values(0, 3000));
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// A buffer that holds no result is good again once new contents are copied into it.
#[test]
fn a_buffer_is_good_again_once_it_is_overwritten() {
    child("handed_on::a_buffer_is_good_again_once_it_is_overwritten", SLOW, || {
        let both = std::sync::Barrier::new(2);
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            // Without this wait, the abort could reach rank 0 before its bind has ended.
            both.wait();
            if comm.rank() == 1 {
                return comm.abort("a test");
            }
            let joined = |comm: &mut Comm| {
                let work = comm.on(&stream).all_reduce(up(&stream, values(0, 300)));
                work.join(&stream).and_then(allstream::Ordered::in_order)
            };
            // The abort may come before the call.
            let Ok(sum) = joined(&mut comm) else { return };
            let Failed { buf, error } = soon(sum.to_host(vec![0.0; 300])).unwrap_err();
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
            let (sum, _) = buf.unwrap();
            let (_, sum) = soon(sum.copy_from_host(values(2, 300))).unwrap();
            let [low, high] = sum.split_at(100).unwrap();
            let sum = DeviceBuf::join([high, low]).unwrap();
            assert_eq!(down(sum), values(2, 300));
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}
