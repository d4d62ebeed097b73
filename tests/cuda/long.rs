//! Chunks that are longer than a frame can say, and more operations than a word can count.

use std::time::Duration;

use allstream::ReduceOp;
use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::testing::{called_before, frames_of};

use crate::collectives::everything;
use crate::support::{bound, child, down, nothing_left, pass, ranks, report, soon, up, values};

const TWO: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2"), ("ALLSTREAM_TEST_CUDA_DELAY_US", "300")];

/// The length of a frame is a number of 32 bits: beyond 4 GiB a chunk goes in several, here beyond 1000 bytes.
#[test]
fn chunks_that_no_frame_can_lend_go_in_slices() {
    child("long::chunks_that_no_frame_can_lend_go_in_slices", TWO, || {
        frames_of(1000);
        ranks(3, |mut comm| {
            let device = Device::new(comm.rank() % 2).unwrap();
            assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
            let stream = &DeviceStream::new(&device).unwrap();
            // Below it, at it, and above it, for chunks of a third.
            for len in [749, 750, 751, 5000] {
                let expected: Vec<f32> =
                    (0..len).map(|i| (0..3).map(|rank| values(rank, len)[i]).sum()).collect();
                let buf = up(stream, values(comm.rank(), len));
                assert!(down(soon(comm.all_reduce(buf)).unwrap()) == expected, "{len} elements");
                let (from, to) =
                    (up(stream, values(comm.rank(), len)), DeviceBuf::zeroed(stream, len).unwrap());
                let (_, to) = soon(comm.op(ReduceOp::Sum).all_reduce_into(from, to)).unwrap();
                assert!(down(to) == expected, "{len} elements");
            }
            everything(&mut comm, stream, &[0, 1, 250, 3000]);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Words of 32 bits say how far streams have come. Collectives on the host write none, however many come before one on devices.
#[test]
fn an_operation_after_very_many_on_the_host_ends_when_its_input_is_there() {
    let test = "long::an_operation_after_very_many_on_the_host_ends_when_its_input_is_there";
    child(test, &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")], || {
        called_before(1 << 31);
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            let buf = up(&stream, values(comm.rank(), 900));
            let held = DeviceBuf::<u32>::zeroed(&stream, 16).unwrap();
            let pinned = PinnedBuf::<u32>::zeroed(&stream.device(), 16).unwrap();
            soon(comm.barrier()).unwrap();
            pass(true, 0);
            drop(held.copy_from_host(pinned));
            let work = comm.all_reduce(buf);
            for _ in 0..100 {
                assert!(!work.is_finished(), "its input is not there");
                std::thread::sleep(Duration::from_millis(1));
            }
            soon(comm.barrier()).unwrap();
            pass(true, u64::MAX);
            let right: Vec<f32> = (0..900).map(|i| values(0, 900)[i] + values(1, 900)[i]).collect();
            assert!(down(soon(work).unwrap()) == right);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}
