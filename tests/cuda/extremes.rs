//! Counts of device memory, and of ranks, at their extremes: an error, never a panic.

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};

use crate::support::{child, device, down, nothing_left, ranks, soon, up};

#[test]
fn device_memory_of_impossible_lengths_is_an_error() {
    child("extremes::device_memory_of_impossible_lengths_is_an_error", &[], || {
        let (device, stream) = device();
        for end in [usize::MAX, usize::MAX / 2, isize::MAX as usize, 1 << 61, 1 << 60] {
            for count in [end, end - 1, end / 4] {
                assert!(Device::new(count).is_err());
                assert!(DeviceBuf::<f32>::zeroed(&stream, count).is_err(), "{count}");
                assert!(DeviceBuf::<u8>::zeroed(&stream, count).is_err(), "{count}");
                assert!(PinnedBuf::<f64>::zeroed(&device, count).is_err(), "{count}");
                let four = || DeviceBuf::<f32>::zeroed(&stream, 4).unwrap();
                assert!(four().split_at(count).unwrap_err().buf.is_some());
                assert!(four().split(&[count, count]).unwrap_err().buf.is_some());
            }
        }
        for few in [0, 1] {
            assert_eq!(DeviceBuf::<f32>::zeroed(&stream, few).unwrap().len(), few);
            assert_eq!(PinnedBuf::<f32>::zeroed(&device, few).unwrap().len(), few);
        }
        drop((stream, device));
        nothing_left("all was dropped");
    });
}

/// The ranks that lend each other memory are noted in the bits of one word; larger groups do not lend.
#[test]
fn more_ranks_than_a_word_has_bits_share_a_device() {
    const RANKS: usize = 66;
    child("extremes::more_ranks_than_a_word_has_bits_share_a_device", &[], || {
        ranks(RANKS, |mut comm| {
            let device = Device::new(0).unwrap();
            assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
            let stream = DeviceStream::new(&device).unwrap();
            let sums = soon(comm.all_reduce(up(&stream, vec![1f32; 100]))).unwrap();
            assert_eq!(down(sums), [RANKS as f32; 100]);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
    });
}
