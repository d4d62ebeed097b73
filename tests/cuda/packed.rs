//! Small gradients on devices: one kernel packs them into one buffer, and another one copies them back.

use std::sync::Barrier;

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::train::{Buckets, Options, Param};
use allstream::{AnyBuf, Comm, Error};

use crate::support::{bound, calls, child, down, fail, nothing_left, ranks, set_delays, soon, up, values};

/// Lengths of the gradients: some are no multiples of a vector's length, one is empty, and one is too long to be packed.
const LENS: [usize; 6] = [3, 1001, 0, 500, 20_000, 1];
/// CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES.
const OUT_OF_RESOURCES: u32 = 701;

fn layout() -> [Param; LENS.len()] {
    LENS.map(|len| Param::of::<f32>(len).on_device())
}

fn mean(i: usize, n: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..n).map(|rank| values(rank + i, LENS[i])).collect();
    (0..LENS[i]).map(|k| all.iter().map(|values| values[k]).sum::<f32>() / n as f32).collect()
}

/// Gradients of zeros, which come late: until their stream gets there, their memory holds something else.
fn late_zeros(stream: &DeviceStream, lens: &[usize]) -> Vec<DeviceBuf<f32>> {
    drop(lens.iter().map(|len| up(stream, vec![-7.5f32; *len])).collect::<Vec<_>>());
    // If the test has set delays, this stream is far behind.
    for _ in 0..12 {
        drop(DeviceBuf::<u8>::zeroed(stream, 1).unwrap());
    }
    // The pool gives the same memory again to the same stream.
    lens.iter().map(|len| DeviceBuf::zeroed(stream, *len).unwrap()).collect()
}

#[test]
fn hundred_small_gradients_are_one_operation_of_the_devices() {
    child("packed::hundred_small_gradients_are_one_operation_of_the_devices", &[], || {
        let (copies, launches) = ("cuMemcpyDtoHAsync_v2", "cuLaunchKernel");
        let meet = &Barrier::new(2);
        // How many copies to the host, and how many launches, a step takes on all ranks together.
        let counted = |count: usize, len: usize| {
            ranks(2, |mut comm| {
                let stream = bound(&mut comm, 2);
                let layout = vec![Param::of::<f32>(len).on_device(); count];
                let mut buckets = soon(Buckets::new(&comm.share(), &layout)).unwrap();
                let step = |buckets: &mut Buckets<DeviceBuf<f32>>| {
                    let grads: Vec<_> =
                        (0..count).map(|i| up(&stream, values(comm.rank() + i, len))).collect();
                    meet.wait();
                    let before = [calls(copies), calls(launches)];
                    meet.wait();
                    for (i, grad) in grads.into_iter().enumerate() {
                        assert!(buckets.push(i, grad).unwrap().is_none());
                    }
                    let back: Vec<_> = soon(buckets.finish()).unwrap().collect();
                    meet.wait();
                    let after = [calls(copies), calls(launches)];
                    meet.wait();
                    for (i, grad) in back.into_iter().enumerate() {
                        let all = [values(i, len), values(i + 1, len)];
                        let expected: Vec<f32> = (0..len).map(|k| (all[0][k] + all[1][k]) / 2.0).collect();
                        assert!(down(grad) == expected, "parameter {i}");
                    }
                    [after[0] - before[0], after[1] - before[1]]
                };
                // The first step loads kernels, and learns the order of the gradients.
                step(&mut buckets);
                let counted = step(&mut buckets);
                soon(buckets.close()).unwrap();
                counted
            })
        };
        let (one, hundred) = (counted(1, 102_400), counted(100, 1024));
        assert_eq!([one[0][0], hundred[0][0]], [0, 0], "copies to the host, of all ranks");
        // Each rank launches one kernel more that packs, and one that copies back.
        assert_eq!(hundred[0][1], one[0][1] + 4, "launches, of all ranks");
    });
}

/// Streams have random delays: without a wait, work runs out of order sooner or later.
#[test]
fn gradients_of_several_streams_are_packed_and_come_back_in_their_order() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("packed::gradients_of_several_streams_are_packed_and_come_back_in_their_order", &variables, || {
        for seed in 0..9 {
            ranks(2, |mut comm| {
                let (stream, rank) = (bound(&mut comm, 2), comm.rank());
                // One stream for the gradients with even numbers, and one for those with odd ones. They are packed on the second stream: it is that of
                // the last gradient of the layout, which is the first in a bucket.
                let streams = [stream.clone(), DeviceStream::new(&stream.device()).unwrap()];
                let mut buckets = soon(Buckets::new(&comm.share(), &layout())).unwrap();
                let of = |i: usize| up(&streams[i % 2], values(rank + i, LENS[i]));
                set_delays(1500, seed);
                let odd = [of(1), of(3), of(5)];
                // Of the even ones rank 0 has zeros.
                let even = match rank {
                    0 => late_zeros(&streams[0], &[LENS[0], LENS[2], LENS[4]]),
                    _ => vec![of(0), of(2), of(4)],
                };
                let grads = even.into_iter().zip(odd).flat_map(|(even, odd)| [even, odd]);
                for (i, grad) in grads.enumerate() {
                    assert!(buckets.push(i, grad).unwrap().is_none());
                }
                // The step is waited for by the host, by the stream of the odd gradients, or by a third stream.
                let third = DeviceStream::new(&stream.device()).unwrap();
                let back: Vec<DeviceBuf<f32>> = match seed % 3 {
                    0 => soon(buckets.finish()).unwrap().collect(),
                    1 => buckets.join(&streams[1]).unwrap().in_order().unwrap(),
                    _ => soon(buckets.join(&third).unwrap()).unwrap(),
                };
                for (i, grad) in back.into_iter().enumerate() {
                    let half = || values(1 + i, LENS[i]).iter().map(|x| x / 2.0).collect();
                    let expected: Vec<f32> = if i % 2 == 0 { half() } else { mean(i, 2) };
                    assert!(down(grad) == expected, "seed {seed}, parameter {i}");
                }
                soon(buckets.close()).unwrap();
            });
            nothing_left("all ranks have ended");
        }
    });
}

/// The gradients of a joined step go into the next one before it is known how the step ends. The steps they depend on must not double.
#[test]
fn gradients_that_go_from_step_to_step_in_order_depend_on_no_more_than_there_were_steps() {
    let test = "packed::gradients_that_go_from_step_to_step_in_order_depend_on_no_more_than_there_were_steps";
    child(test, &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")], || {
        const COUNT: usize = 40;
        set_delays(2000, 1);
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 2);
            let layout = [Param::of::<f32>(8).on_device(); COUNT];
            let mut buckets = soon(Buckets::new(&comm.share(), &layout)).unwrap();
            let mut grads: Vec<_> = (0..COUNT).map(|i| up(&stream, values(comm.rank() + i, 8))).collect();
            for _ in 0..12 {
                for (i, grad) in grads.into_iter().enumerate() {
                    buckets.push(i, grad).unwrap();
                }
                grads = buckets.join(&stream).unwrap().in_order().unwrap();
            }
            for (i, grad) in grads.into_iter().enumerate() {
                let both = values(i, 8).into_iter().zip(values(1 + i, 8));
                assert!(down(grad) == both.map(|(a, b)| (a + b) / 2.0).collect::<Vec<_>>(), "parameter {i}");
            }
            soon(buckets.close()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}

#[test]
fn each_rank_gets_its_part_of_what_is_packed_and_all_gather_the_weights() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "3")];
    child("packed::each_rank_gets_its_part_of_what_is_packed_and_all_gather_the_weights", &variables, || {
        ranks(3, |mut comm| {
            let (stream, rank) = (bound(&mut comm, 3), comm.rank());
            let options = Options::default().sharded();
            let mut buckets = soon(Buckets::with(&comm.share(), &layout(), options)).unwrap();
            for (i, len) in LENS.into_iter().enumerate() {
                buckets.push(i, up(&stream, values(rank + i, len))).unwrap();
            }
            let grads: Vec<DeviceBuf<f32>> = soon(buckets.finish()).unwrap().collect();
            let mut weights = Vec::new();
            for (i, grad) in grads.into_iter().enumerate() {
                let (owned, grad) = (buckets.owned(i), down(grad));
                assert!(grad[owned.clone()] == mean(i, 3)[owned.clone()], "parameter {i}");
                // The weights that a rank does not own do not matter.
                let ours = (0..LENS[i]).map(|k| if owned.contains(&k) { grad[k] } else { -1.0 });
                weights.push(up(&stream, ours.collect()));
            }
            for (i, weight) in soon(buckets.gather(weights)).unwrap().into_iter().enumerate() {
                assert!(down(weight) == mean(i, 3), "parameter {i}");
            }
            soon(buckets.close()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}

#[test]
fn of_a_bucket_that_no_kernel_packs_all_gradients_come_back_with_the_cause() {
    child("packed::of_a_bucket_that_no_kernel_packs_all_gradients_come_back_with_the_cause", &[], || {
        let meet = &Barrier::new(2);
        ranks(2, |mut comm| {
            let (stream, rank) = (bound(&mut comm, 1), comm.rank());
            let mut buckets = soon(Buckets::new(&comm.share(), &layout())).unwrap();
            let grads: Vec<_> = (0..LENS.len()).map(|i| up(&stream, values(rank + i, LENS[i]))).collect();
            if rank == 0 {
                fail(Some("cuLaunchKernel"), 1, OUT_OF_RESOURCES);
            }
            meet.wait();
            let push = |buckets: &mut Buckets<_>| {
                let pushed =
                    grads.into_iter().enumerate().try_for_each(|(i, grad)| buckets.push(i, grad).map(drop));
                pushed.map_err(|failed| failed.error)
            };
            // Rank 1 pushes only after rank 0's launch has failed, so that the call that fails is rank 0's.
            let error = if rank == 0 {
                push(&mut buckets).unwrap();
                meet.wait();
                let failed = soon(buckets.finish()).map(|_| ()).unwrap_err();
                let lens: Vec<_> =
                    failed.buf.unwrap().iter().map(|grad| grad.as_ref().unwrap().len()).collect();
                assert_eq!(lens, LENS);
                failed.error
            } else {
                meet.wait();
                push(&mut buckets)
                    .and_then(|()| soon(buckets.finish()).map(drop).map_err(Error::from))
                    .unwrap_err()
            };
            let expected = if rank == 0 { "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" } else { "rank 0" };
            assert!(error.to_string().contains(expected), "rank {rank}: {error}");
            // The communicator from which the buckets were made is not affected.
            soon(comm.barrier()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}

#[test]
fn all_gradients_of_a_rank_are_on_one_device() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("packed::all_gradients_of_a_rank_are_on_one_device", &variables, || {
        let mut comm: Comm = Comm::local(1).unwrap().remove(0);
        let streams = [0, 1].map(|device| DeviceStream::new(&Device::new(device).unwrap()).unwrap());
        let layout = [Param::of::<f32>(3).on_device(), Param::of::<f32>(3).on_device()];
        let mut buckets = soon(Buckets::<AnyBuf>::new(&comm.share(), &layout)).unwrap();
        let grad = |stream: &DeviceStream| AnyBuf::new(up(stream, vec![1.0f32, 2.0, 3.0]));
        buckets.push(1, grad(&streams[1])).unwrap();
        let failed = buckets.push(0, grad(&streams[0])).unwrap_err();
        assert!(failed.buf.is_some());
        let text = failed.error.to_string();
        let expected = ["the gradient of parameter 0 is on Device(0", "first was on Device(1", "NodeBuckets"];
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
        buckets.push(0, grad(&streams[1])).unwrap();
        assert_eq!(soon(buckets.finish()).unwrap().count(), 2);
        soon(buckets.close()).unwrap();
        soon(comm.barrier()).unwrap();
    });
}

/// Gradients on one device, joined with a stream of another: a kernel on that stream could not copy them back. The default streams of all devices have
/// the same handle, and are not the same stream.
#[test]
fn a_step_is_not_joined_with_a_stream_of_another_device() {
    let variables = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("packed::a_step_is_not_joined_with_a_stream_of_another_device", &variables, || {
        let mut comm: Comm = Comm::local(1).unwrap().remove(0);
        soon(comm.bind_device(&Device::new(0).unwrap())).unwrap();
        for is_default in [false, true] {
            let streams = [0, 1].map(|device| {
                let device = Device::new(device).unwrap();
                match is_default {
                    // SAFETY: the default stream is always there.
                    true => unsafe { DeviceStream::from_raw(&device, std::ptr::null_mut()) }.unwrap(),
                    false => DeviceStream::new(&device).unwrap(),
                }
            });
            let layout = [Param::of::<f32>(3).on_device(), Param::of::<f32>(20_000).on_device()];
            let mut buckets = soon(Buckets::new(&comm.share(), &layout)).unwrap();
            for (i, len) in [3, 20_000].into_iter().enumerate() {
                buckets.push(i, up(&streams[0], values(i, len))).unwrap();
            }
            let failed = buckets.join(&streams[1]).map(drop).unwrap_err();
            assert!(failed.buf.is_none(), "the step goes on");
            let text = failed.error.to_string();
            let expected =
                ["the gradients are on Device(0", "the stream is of Device(1", "join with a stream of"];
            assert!(expected.iter().all(|part| text.contains(part)), "{text}");
            let back = buckets.join(&streams[0]).unwrap().in_order().unwrap();
            for (i, (grad, len)) in back.into_iter().zip([3, 20_000]).enumerate() {
                assert!(down(grad) == values(i, len), "parameter {i}");
            }
            soon(buckets.close()).unwrap();
        }
        soon(comm.close()).unwrap();
        nothing_left("all was dropped");
    });
}
