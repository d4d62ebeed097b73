//! Gradient buckets of device memory.

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::train::{Buckets, Options, Param};
use allstream::{AnyBuf, Comm, Error};

use crate::support::{bound, child, down, nothing_left, ranks, soon, up, values};

/// Small and large: on a device none is packed.
const LENS: [usize; 4] = [3, 20_000, 500, 40_000];

fn mean(i: usize, n: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..n).map(|rank| values(rank + i, LENS[i])).collect();
    (0..LENS[i]).map(|k| all.iter().map(|values| values[k]).sum::<f32>() / n as f32).collect()
}

#[test]
fn gradients_on_devices_come_back_there_with_their_means() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("train::gradients_on_devices_come_back_there_with_their_means", &variables, || {
        // Bound to devices, which reduce them, and not, where they are staged.
        for is_bound in [true, false] {
            ranks(2, |mut comm| {
                let stream = bound_or_not(&mut comm, is_bound);
                let (rank, shared) = (comm.rank(), comm.share());
                let layout = LENS.map(|len| Param::of::<f32>(len).on_device());
                let options = Options::default().first_bucket_bytes(1_000).bucket_bytes(100_000);
                let mut buckets = soon(Buckets::with(&shared, &layout, options)).unwrap();
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

/// A stream of this rank's device, to which `comm` is bound, or not.
fn bound_or_not(comm: &mut Comm, is_bound: bool) -> DeviceStream {
    if is_bound { bound(comm, 2) } else { DeviceStream::new(&Device::new(comm.rank()).unwrap()).unwrap() }
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
            let mut memory = Some(on_device());
            let failed = soon(buckets.finish_some(|_, _| memory.take().unwrap())).map(|_| ()).unwrap_err();
            assert!(matches!(failed.error, Error::Invalid { .. }), "{}", failed.error);
            assert!(failed.error.to_string().contains("push zeros"), "{}", failed.error);
            assert!(buckets.push(0, on_device()).unwrap().is_none());
            assert_eq!(soon(buckets.finish()).unwrap().count(), 2);
            assert_eq!(buckets.report().unwrap().buckets.len(), 2);
            soon(buckets.close()).unwrap();
        });
    });
}
