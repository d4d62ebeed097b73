//! Copies from device memory to device memory.

use allstream::cuda::{Device, DeviceBuf, DeviceStream};
use allstream::{Error, Failed};

use crate::support::{
    calls, child, device, fail, function, in_context, nothing_left, numbers, report, set_delays, soon,
};

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "3000"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

fn up(stream: &DeviceStream, values: Vec<u32>) -> DeviceBuf<u32> {
    soon(DeviceBuf::from_host(stream, values)).unwrap().1
}

fn down(buf: DeviceBuf<u32>) -> Vec<u32> {
    let len = buf.len();
    soon(buf.to_host(vec![9; len])).unwrap().1
}

/// Both streams have unfinished work when a copy is asked for: that which fills the source or the target. The copy must follow it.
fn both_streams_come_first(devices: [usize; 2]) {
    for seed in 0..15 {
        set_delays(3000, seed);
        let streams = devices.map(|ordinal| {
            let stream = DeviceStream::new(&Device::new(ordinal).unwrap()).unwrap();
            for _ in 0..3 {
                drop(DeviceBuf::<u32>::zeroed(&stream, 16).unwrap());
            }
            stream
        });
        let [from, to] = &streams;
        let late = DeviceBuf::zeroed(from, 3000).unwrap();
        let (source, copy) = soon(up(to, numbers(3000)).copy_from(late)).unwrap();
        assert_eq!((source.stream(), copy.stream()), (from, to));
        assert!(down(copy) == [0; 3000] && down(source) == [0; 3000], "seed {seed}");

        let late = DeviceBuf::zeroed(to, 3000).unwrap();
        let (source, copy) = soon(late.copy_from(up(from, numbers(3000)))).unwrap();
        assert!(down(copy) == numbers(3000) && down(source) == numbers(3000), "seed {seed}");

        let (source, copy) = soon(DeviceBuf::<u32>::zeroed(from, 500).unwrap().copy_to(to)).unwrap();
        assert_eq!((copy.device().ordinal(), copy.stream()), (devices[1], to));
        assert!(down(copy) == [0; 500] && down(source) == [0; 500], "seed {seed}");

        // Copies between parts of buffers. Then copies that nobody awaits: their buffers live until the copies are done.
        let [_, high] = up(from, numbers(1000)).split_at(400).unwrap();
        let [low, rest] = up(to, vec![5; 1000]).split_at(600).unwrap();
        let (_, low) = soon(low.copy_from(high)).unwrap();
        let whole = down(DeviceBuf::join([low, rest]).unwrap());
        assert!(whole[..600] == numbers(1000)[400..] && whole[600..] == [5; 400]);
        drop(DeviceBuf::<u32>::zeroed(to, 3000).unwrap().copy_from(up(from, numbers(3000))));
        drop(up(from, numbers(3000)).copy_to(to));
    }
    nothing_left("all was dropped");
    assert_eq!(report().freed_in_use, 0);
}

#[test]
fn a_copy_follows_both_streams_on_one_device() {
    child("between::a_copy_follows_both_streams_on_one_device", SLOW, || both_streams_come_first([0, 0]));
}

#[test]
fn a_copy_follows_both_streams_between_devices() {
    child("between::a_copy_follows_both_streams_between_devices", SLOW, || both_streams_come_first([0, 1]));
}

#[test]
fn devices_that_do_not_reach_each_other_copy_all_the_same() {
    let apart = [SLOW[0], SLOW[1], ("ALLSTREAM_TEST_CUDA_NO_PEER", "0-1")];
    child("between::devices_that_do_not_reach_each_other_copy_all_the_same", &apart, || {
        both_streams_come_first([1, 0]);
    });
}

#[test]
fn what_cannot_be_copied_comes_back() {
    let tight = [("ALLSTREAM_TEST_CUDA_MEMORY", "4M")];
    child("between::what_cannot_be_copied_comes_back", &tight, || {
        let (device, stream) = device();
        let other = DeviceStream::new(&device).unwrap();
        let Failed { buf, error } =
            soon(up(&stream, numbers(5)).copy_from(up(&other, numbers(4)))).unwrap_err();
        assert_eq!(error.to_string(), "copy_from: the source has 4 elements, the target 5");
        let (four, five) = buf.unwrap();
        assert_eq!((down(four), down(five)), (numbers(4), numbers(5)));
        let none = DeviceBuf::<u32>::zeroed(&stream, 0).unwrap();
        let (none, also) = soon(none.copy_to(&other)).unwrap();
        assert!(soon(none.copy_from(also)).is_ok());

        // The buffer takes 3 of 4 MB: there is no room for a copy of it.
        let Failed { buf, error } = soon(up(&stream, numbers(3 << 18)).copy_to(&other)).unwrap_err();
        assert!(error.to_string().contains("OUT_OF_MEMORY (2)"), "{error}");
        assert!(down(buf.unwrap()) == numbers(3 << 18));

        // First the source's stream is being captured, then the target's.
        for captured in [&stream, &other] {
            let (from, to) = (up(&stream, numbers(8)), up(&other, numbers(8)));
            // SAFETY: cuda.h declares the function with this type, and the stream exists.
            unsafe {
                let begin: unsafe extern "C" fn(*mut std::ffi::c_void, u32) -> u32 =
                    std::mem::transmute(function("cuStreamBeginCapture_v2"));
                assert_eq!(in_context(0, || begin(captured.as_raw(), 2)), 0);
            }
            let Failed { buf, error } = soon(to.copy_from(from)).unwrap_err();
            assert!(error.to_string().contains("captured into a graph"), "{error}");
            // SAFETY: as above; the graph is never launched, and is destroyed once.
            unsafe {
                let end: unsafe extern "C" fn(*mut std::ffi::c_void, *mut u64) -> u32 =
                    std::mem::transmute(function("cuStreamEndCapture"));
                let mut graph = 0;
                assert_eq!(in_context(0, || end(captured.as_raw(), &raw mut graph)), 0);
                let destroy: unsafe extern "C" fn(u64) -> u32 =
                    std::mem::transmute(function("cuGraphDestroy"));
                assert_eq!(in_context(0, || destroy(graph)), 0);
            }
            let (from, to) = buf.unwrap();
            assert!(soon(to.copy_from(from)).is_ok());
        }
        drop((stream, other, device));
        nothing_left("all was dropped");
    });
}

/// When the driver refuses a copy, the caller gets an error with both buffers, and nothing is lost or leaked.
#[test]
fn a_copy_that_the_driver_refuses_gives_both_back() {
    fn program() -> Result<(), Error> {
        let streams = [0, 1].map(|ordinal| DeviceStream::new(&Device::new(ordinal).unwrap()).unwrap());
        let given_back = |failed: Failed<_>| {
            assert!(failed.buf.is_some(), "{}", failed.error);
            failed.error
        };
        for to in &streams {
            let target = up(to, vec![1; 1000]);
            let source = up(&streams[0], numbers(1000));
            let copy = soon(target.copy_from(source)).map_err(given_back);
            assert_eq!(down(copy?.1), numbers(1000));
        }
        Ok(())
    }
    let devices = [("ALLSTREAM_TEST_CUDA_DEVICES", "2")];
    child("between::a_copy_that_the_driver_refuses_gives_both_back", &devices, || {
        for name in ["cuMemcpyDtoDAsync_v2", "cuMemcpyPeerAsync"] {
            let before = calls(name);
            program().unwrap();
            nothing_left("nothing fails");
            assert_eq!(calls(name) - before, 1, "{name}");
            fail(Some(name), 1, 999);
            let error = program().unwrap_err().to_string();
            assert!(error.contains("copy between device buffers on CUDA device"), "{error}");
            fail(None, 0, 0);
            nothing_left(name);
        }
    });
}
