//! Copies between host and device, and what happens to their buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use allstream::cuda::{Device, DeviceBuf, DeviceStream, ForeignMemory, PinnedBuf};
use allstream::{Comm, DType, Error, Failed, HostBuf};

use crate::support::{
    bound, child, device, fail, function, nothing_left, numbers, ranks, report, soon, until, up,
};

const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "3000")];

#[test]
fn copies_give_everything_back() {
    child("copies::copies_give_everything_back", SLOW, || {
        let (device, stream) = device();
        let pinned = PinnedBuf::from_slice(&device, &numbers(5000)).unwrap();
        let (pinned, buf) = soon(DeviceBuf::from_host(&stream, pinned)).unwrap();
        let (buf, back) = soon(buf.to_host(vec![0; 5000])).unwrap();
        assert_eq!(back, numbers(5000));
        let (host, buf) = buf.copy_from_host(HostBuf::from(&[7; 5000][..])).wait().unwrap();
        let (buf, pinned) = futures::executor::block_on(buf.to_host(pinned)).unwrap();
        assert_eq!(*pinned, *host);
        // If the lengths differ, both buffers come back, and the error names both lengths.
        let Failed { buf, error } = buf.to_host(vec![0; 4]).wait().unwrap_err();
        assert_eq!(error.to_string(), "to_host: the host buffer has 4 elements, the device's 5000");
        let (buf, four) = buf.unwrap();
        assert_eq!(four.len(), 4);
        let empty = DeviceBuf::<f32>::zeroed(&stream, 0).unwrap();
        let (empty, nothing) = empty.to_host(Vec::new()).wait().unwrap();
        assert!(empty.is_empty() && nothing.is_empty());
        // Pinned memory is host memory: collectives take it.
        let mut comm = Comm::local(1).unwrap().remove(0);
        let pinned = soon(comm.all_reduce(pinned)).unwrap();
        drop((buf, pinned, empty, stream, device));
        nothing_left("all was dropped");
    });
}

/// Rank 0's device buffer of bools has a byte that is 2, and rank 1 gets that byte by a broadcast.
#[test]
fn a_bool_of_a_device_that_is_neither_true_nor_false_never_reaches_the_host() {
    child("copies::a_bool_of_a_device_that_is_neither_true_nor_false_never_reaches_the_host", SLOW, || {
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            // The second is copied in several slices.
            for (len, wrong) in [(5, 3), (9 << 20, (8 << 20) + 1)] {
                let told = |error: Error| {
                    let expected = format!("element {wrong} of a buffer of bools is 2, neither 0 nor 1");
                    assert!(error.to_string().contains(&expected), "{error}");
                };
                let mut bytes = vec![1_u8; len];
                bytes[wrong] += u8::from(comm.rank() == 0);
                let bytes = up(&stream, bytes);
                let memory = ForeignMemory { pointer: bytes.as_ptr(), len, dtype: DType::Bool };
                // SAFETY: the memory is that of `bytes`, which the new buffer keeps. One byte is no bool on purpose: the test checks that
                // it never becomes a `bool` on the host.
                let bools = unsafe { DeviceBuf::<bool>::from_foreign(memory, &stream, bytes) }.unwrap();
                let bools = soon(comm.broadcast(bools, 0)).unwrap();
                let expected: Vec<bool> = (0..len).map(|i| i != wrong).collect();
                let Failed { buf, error } = soon(bools.to_host(vec![true; len])).unwrap_err();
                told(error);
                let (bools, host) = buf.unwrap();
                assert!(host == expected, "it is false, and the others are what they were");
                let pinned = PinnedBuf::<bool>::zeroed(&stream.device(), len).unwrap();
                let Failed { buf, error } = soon(bools.to_host(pinned)).unwrap_err();
                told(error);
                let (bools, pinned) = buf.unwrap();
                assert!(*pinned == *expected);
                let (_, bools) = soon(bools.copy_from_host(pinned)).unwrap();
                let (_, host) = soon(bools.to_host(host)).unwrap();
                assert!(host == expected, "written anew, it is as good as any");
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Memory that is not pinned goes in slices of 4 MiB, two at a time.
#[test]
fn long_copies_go_in_slices_and_end_as_one() {
    child("copies::long_copies_go_in_slices_and_end_as_one", &[], || {
        let len = (9 << 18) + 5;
        let (device, stream) = device();
        let (host, mut buf) = soon(DeviceBuf::from_host(&stream, numbers(len))).unwrap();
        let mut back = vec![0; len];
        (buf, back) = soon(buf.to_host(back)).unwrap();
        assert!(back == host);
        // Any one of these calls fails: there is one error, and both buffers come back.
        for copy in ["cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventQuery"] {
            for nth in 1..=3 {
                fail(Some(copy), nth, 1);
                match soon(buf.to_host(back)) {
                    Ok(both) => (buf, back) = both,
                    Err(Failed { buf: both, error }) => {
                        (buf, back) = both.unwrap();
                        let text = error.to_string();
                        assert!(
                            text.contains("copy to the host")
                                || text.contains("event")
                                || text.contains("mark"),
                            "{text}"
                        );
                        assert!(text.contains(copy), "{text}");
                    }
                }
                fail(None, 0, 0);
            }
        }
        back.fill(0);
        (buf, back) = soon(buf.to_host(back)).unwrap();
        assert!(back == host);
        // Nobody waits for these.
        drop(DeviceBuf::from_host(&stream, host));
        drop(buf.to_host(back));
        drop((stream, device));
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn a_copy_that_nobody_waits_for_keeps_its_buffers() {
    child("copies::a_copy_that_nobody_waits_for_keeps_its_buffers", SLOW, || {
        let (device, stream) = device();
        for _ in 0..20 {
            let pinned = PinnedBuf::from_slice(&device, &numbers(1000)).unwrap();
            drop(DeviceBuf::from_host(&stream, pinned));
        }
        drop((stream, device));
        nothing_left("the copies are done");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn memory_that_runs_out_gives_the_host_buffer_back() {
    let limit = ("ALLSTREAM_TEST_CUDA_MEMORY", "4M");
    child("copies::memory_that_runs_out_gives_the_host_buffer_back", &[limit], || {
        let (device, stream) = device();
        let Failed { buf, error } = soon(DeviceBuf::from_host(&stream, numbers(2 << 20))).unwrap_err();
        assert_eq!(buf.unwrap(), numbers(2 << 20));
        let text = error.to_string();
        assert!(text.contains("get 8388608 bytes of memory on CUDA device 0: cuMemAlloc"), "{text}");
        assert!(text.contains("OUT_OF_MEMORY (2)") && text.contains("Device::trim"), "{text}");
        assert!(DeviceBuf::<f64>::zeroed(&stream, usize::MAX / 2).is_err());
        // Memory that was given back can be had again, and blocks that are not used make room for larger ones.
        for len in [100, 1 << 19, 1000, 3 << 18, 10] {
            let buf = DeviceBuf::<u32>::zeroed(&stream, len).unwrap();
            assert!(device.pool().used >= 4 * len as u64);
            drop(buf);
            stream.synchronize().unwrap();
        }
        device.trim().unwrap();
        let pool = device.pool();
        assert_eq!((pool.used, pool.pending, pool.reserved, pool.lost, pool.blocks), (0, 0, 0, 0, 0));
    });
}

#[test]
fn foreign_memory_is_looked_at_and_its_owner_dropped_in_order() {
    child("copies::foreign_memory_is_looked_at_and_its_owner_dropped_in_order", SLOW, || {
        struct Owner {
            pointer: u64,
            context: u64,
            /// Keeps the context.
            _device: Device,
            gone: Arc<AtomicBool>,
        }
        impl Drop for Owner {
            fn drop(&mut self) {
                // SAFETY: cuda.h declares the functions with these types; the memory was allocated below, and is freed once, in its context.
                let answer = unsafe {
                    let set: unsafe extern "C" fn(u64) -> u32 =
                        std::mem::transmute(function("cuCtxSetCurrent"));
                    assert_eq!(set(self.context), 0);
                    let free: unsafe extern "C" fn(u64) -> u32 =
                        std::mem::transmute(function("cuMemFree_v2"));
                    free(self.pointer)
                };
                assert_eq!(answer, 0);
                self.gone.store(true, Ordering::SeqCst);
            }
        }
        let (device, stream) = device();
        // The address of a pooled buffer is one that the driver knows.
        let pooled = DeviceBuf::<u32>::zeroed(&stream, 100).unwrap();
        let memory = ForeignMemory { pointer: pooled.as_ptr(), len: 100, dtype: DType::U32 };
        let other = DeviceStream::new(&Device::new(1).unwrap()).unwrap();
        let told = |memory: ForeignMemory, stream: &DeviceStream| {
            // SAFETY: every memory that is passed here is refused, so nobody uses it.
            unsafe { DeviceBuf::<u32>::from_foreign(memory, stream, ()) }.unwrap_err().error.to_string()
        };
        assert!(told(ForeignMemory { dtype: DType::F32, ..memory }, &stream).contains("holds f32"));
        assert!(
            told(ForeignMemory { pointer: memory.pointer + 2, ..memory }, &stream).contains("no address")
        );
        assert!(told(ForeignMemory { len: usize::MAX, ..memory }, &stream).contains("more than any memory"));
        assert!(told(memory, &other).contains("is on device 0, the stream is of device 1"));
        let host = numbers(100);
        let pointer = host.as_ptr() as u64;
        let text = told(ForeignMemory { pointer, ..memory }, &stream);
        assert!(text.contains("does not know the address"), "{text}");
        let pinned = PinnedBuf::<u32>::zeroed(&device, 100).unwrap();
        let pointer = pinned.as_ptr() as u64;
        assert!(told(ForeignMemory { pointer, ..memory }, &stream).contains("memory of the host"));
        drop((pooled, pinned, other));

        let (mut pointer, mut context) = (0_u64, 0_u64);
        // SAFETY: cuda.h declares the functions with these types; the context is the primary one, which `device` holds.
        unsafe {
            let retain: unsafe extern "C" fn(*mut u64, i32) -> u32 =
                std::mem::transmute(function("cuDevicePrimaryCtxRetain"));
            let release: unsafe extern "C" fn(i32) -> u32 =
                std::mem::transmute(function("cuDevicePrimaryCtxRelease_v2"));
            let set: unsafe extern "C" fn(u64) -> u32 = std::mem::transmute(function("cuCtxSetCurrent"));
            let alloc: unsafe extern "C" fn(*mut u64, usize) -> u32 =
                std::mem::transmute(function("cuMemAlloc_v2"));
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!((set(context), alloc(&raw mut pointer, 400), release(0), set(0)), (0, 0, 0, 0));
        }
        let gone = Arc::new(AtomicBool::new(false));
        let memory = ForeignMemory { pointer, ..memory };
        let owner = Owner { pointer, context, _device: device.clone(), gone: gone.clone() };
        // SAFETY: only this test has these 400 bytes of the device, which `owner` frees; they are written before they are read.
        let buf = unsafe { DeviceBuf::<u32>::from_foreign(memory, &stream, owner) }.unwrap();
        let (_, buf) = soon(buf.copy_from_host(numbers(100))).unwrap();
        let [low, high] = buf.split_at(40).unwrap();
        let second = DeviceStream::high_priority(&device).unwrap();
        drop(low.on(&second).unwrap());
        let (high, back) = soon(high.to_host(vec![0; 60])).unwrap();
        assert_eq!(back, numbers(100)[40..]);
        assert!(!gone.load(Ordering::SeqCst));
        drop(high);
        until("the owner is dropped", || gone.load(Ordering::SeqCst));
        assert_eq!(report().freed_in_use, 0);
        drop((stream, second, device));
        nothing_left("all was dropped");
    });
}

#[test]
fn the_per_thread_stream_is_refused() {
    child("copies::the_per_thread_stream_is_refused", &[], || {
        let (device, stream) = device();
        // SAFETY: the per-thread stream is refused, so nobody uses it.
        let refused = unsafe { DeviceStream::from_raw(&device, std::ptr::without_provenance_mut(2)) };
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("on every thread") && text.contains("new_cuda_with_stream"), "{text}");
        // SAFETY: the default stream is always there; and `stream` outlives what is on `same`.
        let (default, same) = unsafe {
            let default = DeviceStream::from_raw(&device, std::ptr::null_mut()).unwrap();
            (default, DeviceStream::from_raw(&device, stream.as_raw()).unwrap())
        };
        for stream in [default, same] {
            let (_, buf) = soon(DeviceBuf::from_host(&stream, numbers(10))).unwrap();
            assert_eq!(soon(buf.to_host(vec![0; 10])).unwrap().1, numbers(10));
        }
    });
}
