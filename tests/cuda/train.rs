//! Gradient buckets of device memory.

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::train::{Buckets, Options, Param};
use allstream::{AnyBuf, Buf, Comm, Error};

use crate::support::{bound, child, down, nothing_left, ranks, soon, up, values};

/// Lengths of the gradients: small ones, which are packed, and large ones.
const LENS: [usize; 4] = [3, 20_000, 500, 40_000];

fn mean(i: usize, n: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..n).map(|rank| values(rank + i, LENS[i])).collect();
    (0..LENS[i]).map(|k| all.iter().map(|values| values[k]).sum::<f32>() / n as f32).collect()
}

#[test]
fn gradients_on_devices_come_back_there_with_their_means() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("train::gradients_on_devices_come_back_there_with_their_means", &variables, || {
        // Once bound to devices, which reduce the gradients, and once not bound: then these are staged.
        for is_bound in [true, false] {
            ranks(2, |mut comm| {
                let (stream, rank) = (bound_or_not(&mut comm, is_bound), comm.rank());
                let mut buckets = small_buckets(&comm);
                for order in [[3, 2, 1, 0], [0, 3, 1, 2], [1, 0, 2, 3]] {
                    for i in order {
                        let grad = up(&stream, values(rank + i, LENS[i]));
                        assert!(buckets.push(i, grad).unwrap().is_none());
                    }
                    let back: Vec<DeviceBuf<f32>> = soon(buckets.finish()).unwrap().collect();
                    for (i, grad) in back.into_iter().enumerate() {
                        assert!(down(grad) == mean(i, 2), "parameter {i}");
                    }
                }
                soon(buckets.close()).unwrap();
            });
            nothing_left("all ranks have ended");
        }
    });
}

/// A stream of this rank's device. Binds `comm` to that device if `is_bound`.
fn bound_or_not(comm: &mut Comm, is_bound: bool) -> DeviceStream {
    if is_bound { bound(comm, 2) } else { DeviceStream::new(&Device::new(comm.rank()).unwrap()).unwrap() }
}

/// Several buckets, of gradients of [`LENS`] on devices.
fn small_buckets(comm: &Comm) -> Buckets<DeviceBuf<f32>> {
    let layout = LENS.map(|len| Param::of::<f32>(len).on_device());
    let options = Options::default().first_bucket_bytes(1_000).bucket_bytes(100_000);
    soon(Buckets::with(&comm.share(), &layout, options)).unwrap()
}

#[test]
fn a_gradient_elsewhere_comes_back_and_places_share_no_bucket() {
    child("train::a_gradient_elsewhere_comes_back_and_places_share_no_bucket", &[], || {
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            let (rank, shared) = (comm.rank(), comm.share());
            let layout = [Param::of::<f32>(500).on_device(), Param::of::<f32>(3)];
            let mut buckets = soon(Buckets::<AnyBuf>::new(&shared, &layout)).unwrap();
            let on_device = || AnyBuf::new(up(&stream, values(rank, 500)));
            let failed = buckets.push(0, AnyBuf::new(values(rank, 500))).unwrap_err();
            let expected =
                "the gradient of parameter 0 is 500 x f32, and in the layout 500 x f32 on a device";
            assert!(failed.buf.is_some() && failed.error.to_string().contains(expected), "{}", failed.error);
            let failed = buckets.accumulate(0, on_device()).unwrap_err();
            assert!(
                failed.buf.is_some() && failed.error.to_string().contains("push the sum"),
                "{}",
                failed.error
            );
            assert!(buckets.push(1, AnyBuf::new(values(rank, 3))).unwrap().is_none());
            assert!(buckets.push(0, on_device()).unwrap().is_none());
            assert_eq!(soon(buckets.finish()).unwrap().count(), 2);
            assert_eq!(buckets.report().unwrap().buckets.len(), 2);
            soon(buckets.close()).unwrap();
        });
    });
}

/// A rank without a gradient gives memory for it, whose contents do not matter.
#[test]
fn a_rank_that_has_no_gradient_on_its_device_reduces_zeros() {
    child("train::a_rank_that_has_no_gradient_on_its_device_reduces_zeros", &[], || {
        ranks(2, |mut comm| {
            let (stream, rank) = (bound(&mut comm, 2), comm.rank());
            let layout = LENS.map(|len| Param::of::<f32>(len).on_device());
            let mut buckets = soon(Buckets::new(&comm.share(), &layout)).unwrap();
            for (i, len) in LENS.into_iter().enumerate().filter(|(i, _)| i % 2 == rank && *i != 2) {
                buckets.push(i, up(&stream, values(i, len))).unwrap();
            }
            let mut memory = LENS.map(|len| Some(up(&stream, vec![f32::NAN; len])));
            let back: Vec<_> = soon(buckets.finish_some(|i, _| memory[i].take().unwrap())).unwrap().collect();
            for (i, grad) in back.into_iter().enumerate() {
                let half: Vec<f32> = values(i, LENS[i]).iter().map(|x| x / 2.0).collect();
                // No rank has a gradient for parameter 2.
                assert!(grad.map(down) == (i != 2).then_some(half), "parameter {i}");
            }
            soon(buckets.close()).unwrap();
        });
    });
}

/// The streams of devices wait for buckets, and steps follow each other without the host.
#[test]
fn joined_steps_follow_each_other_in_the_order_of_the_device() {
    // Slow streams, and a driver that waits for all of the device before it gives memory or loads a kernel.
    let variables = [
        ("ALLSTREAM_TEST_CUDA_DEVICES", "2"),
        ("ALLSTREAM_TEST_CUDA_DELAY_US", "300"),
        ("ALLSTREAM_TEST_CUDA_WAITS", "1"),
    ];
    child("train::joined_steps_follow_each_other_in_the_order_of_the_device", &variables, || {
        for is_bound in [true, false] {
            ranks(2, |mut comm| {
                let (stream, rank) = (bound_or_not(&mut comm, is_bound), comm.rank());
                let mut buckets = small_buckets(&comm);
                let mut grads: Vec<DeviceBuf<f32>> =
                    (0..LENS.len()).map(|i| up(&stream, values(rank + i, LENS[i]))).collect();
                // A mean of means is the same mean.
                for _ in 0..4 {
                    for (i, grad) in grads.into_iter().enumerate().rev() {
                        assert!(buckets.push(i, grad).unwrap().is_none());
                    }
                    grads = buckets.join(&stream).unwrap().in_order().unwrap();
                }
                for (i, grad) in grads.iter().enumerate() {
                    assert_eq!(grad.len(), LENS[i]);
                }
                for (i, grad) in grads.into_iter().enumerate() {
                    assert!(down(grad) == mean(i, 2), "parameter {i}");
                }
                // A step that the host awaits.
                for (i, len) in LENS.into_iter().enumerate() {
                    buckets.push(i, up(&stream, values(rank + i, len))).unwrap();
                }
                let grads = soon(buckets.join(&stream).unwrap()).unwrap();
                for (i, grad) in grads.into_iter().enumerate() {
                    assert!(down(grad) == mean(i, 2), "parameter {i}");
                }
                soon(buckets.close()).unwrap();
            });
            nothing_left("all ranks have ended");
        }
    });
}

#[test]
fn of_a_joined_step_that_fails_all_gradients_come_back() {
    child("train::of_a_joined_step_that_fails_all_gradients_come_back", &[], || {
        let joined = &std::sync::Barrier::new(2);
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            let (rank, shared) = (comm.rank(), comm.share());
            // One bucket on the host, and two on the device.
            let layout =
                [Param::of::<f32>(500).on_device(), Param::of::<f32>(3), Param::of::<f32>(700).on_device()];
            let options = Options::default().first_bucket_bytes(1).bucket_bytes(1);
            let mut buckets = soon(Buckets::<AnyBuf>::with(&shared, &layout, options)).unwrap();
            let push = |buckets: &mut Buckets<AnyBuf>| {
                buckets.push(2, AnyBuf::new(up(&stream, values(rank, 700)))).unwrap();
                buckets.push(1, AnyBuf::new(values(rank, 3))).unwrap();
                buckets.push(0, AnyBuf::new(up(&stream, values(rank, 500)))).unwrap();
            };
            push(&mut buckets);
            assert_eq!(soon(buckets.finish()).unwrap().count(), 3);
            joined.wait();
            if rank == 1 {
                drop(buckets);
                return;
            }
            push(&mut buckets);
            let failed = match buckets.join(&stream) {
                Ok(joined) => soon(joined).unwrap_err(),
                Err(failed) => failed,
            };
            assert!(matches!(failed.error, Error::PeerLost { rank: 1, .. }), "{}", failed.error);
            let lens: Vec<_> =
                failed.buf.unwrap().iter().map(|grad| grad.as_ref().map(|grad| grad.len())).collect();
            assert_eq!(lens, [Some(500), Some(3), Some(700)]);
        });
        nothing_left("all ranks have ended");
    });
}
