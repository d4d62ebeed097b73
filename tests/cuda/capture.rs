//! Streams that are captured into graphs elsewhere in the process, as PyTorch does: nothing here breaks that, and it
//! breaks nothing here.

use std::ffi::c_void;

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream, PinnedBuf};
use allstream::{Algo, Comm, Failed};

use crate::ipc::processes;
use crate::nccl::with_nccl;

use crate::support::{
    bound, child, device, down, fail, function, in_context, nothing_left, numbers, ranks, report, soon,
    until, up, values,
};

const LEN: usize = 3000;
const TWO: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2"), ("ALLSTREAM_TEST_CUDA_DELAY_US", "300")];
/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
const GLOBAL: u32 = 0;

/// A capture of this stream, by this thread.
struct Capture(DeviceStream);

impl Capture {
    fn begin(stream: DeviceStream) -> Capture {
        // SAFETY: the function's type in cuda.h; the stream lives.
        unsafe {
            let begin: unsafe extern "C" fn(*mut c_void, u32) -> u32 =
                std::mem::transmute(function("cuStreamBeginCapture_v2"));
            assert_eq!(begin(stream.as_raw(), GLOBAL), 0);
        }
        Capture(stream)
    }

    /// What the driver says of it: 0, or 901 where it was broken.
    fn end(self) -> u32 {
        let mut graph: *mut c_void = std::ptr::null_mut();
        // SAFETY: the functions' types in cuda.h; the graph is destroyed once.
        unsafe {
            let end: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32 =
                std::mem::transmute(function("cuStreamEndCapture"));
            let code = end(self.0.as_raw(), &raw mut graph);
            if code == 0 {
                let destroy: unsafe extern "C" fn(*mut c_void) -> u32 =
                    std::mem::transmute(function("cuGraphDestroy"));
                assert_eq!(destroy(graph), 0);
            }
            code
        }
    }
}

fn sums() -> Vec<f32> {
    values(0, LEN).iter().zip(values(1, LEN)).map(|(a, b)| a + b).collect()
}

/// Makes every sort of call that asks the driver something, allocates, loads kernels or blocks.
fn work(mut comm: Comm) {
    let rank = comm.rank();
    // Through the host first.
    let stream = DeviceStream::new(&Device::new(rank).unwrap()).unwrap();
    assert!(down(soon(comm.all_reduce(up(&stream, values(rank, LEN)))).unwrap()) == sums());
    let stream = bound(&mut comm, 2);
    let device = stream.device();
    for algo in [Algo::Ring, Algo::RecursiveDoubling] {
        assert!(down(soon(comm.algo(algo).all_reduce(up(&stream, values(rank, LEN)))).unwrap()) == sums());
    }
    let joined = comm.all_reduce(up(&stream, values(rank, LEN))).join(&stream).unwrap();
    let buf = joined.in_order().unwrap();
    stream.record().unwrap().wait().unwrap();
    let event = stream.record().unwrap();
    while !event.is_complete().unwrap() {
        std::thread::yield_now();
    }
    assert!(soon(buf.to_host(PinnedBuf::<f32>::zeroed(&device, LEN).unwrap())).unwrap().1[..] == sums());
    drop(DeviceBuf::<u8>::zeroed(&stream, 70 << 20).unwrap());
    stream.synchronize().unwrap();
    device.trim().unwrap();
    device.memory().unwrap();
    soon(comm.close()).unwrap();
}

#[test]
fn a_capture_elsewhere_in_the_process_is_not_broken() {
    child("capture::a_capture_elsewhere_in_the_process_is_not_broken", TWO, || {
        let (device, stream) = device();
        in_context(0, || {
            let capture = Capture::begin(stream);
            ranks(2, work);
            // The very thread that captures may ask and copy, too.
            let other = DeviceStream::new(&device).unwrap();
            let buf = up(&other, numbers(LEN));
            other.record().unwrap().wait().unwrap();
            assert!(other.record().unwrap().is_complete().is_ok());
            assert!(down(buf) == numbers(LEN));
            assert_eq!(capture.end(), 0, "the capture is whole");
        });
        drop(device);
        nothing_left("all was dropped");
    });
}

/// Nobody can be asked while a capture forbids it; what is under way is not lost for that.
#[test]
fn an_error_of_a_capture_means_not_yet() {
    child("capture::an_error_of_a_capture_means_not_yet", &[], || {
        // 907 is of an event that was itself recorded into a graph: it is never reached.
        for code in 900..907 {
            ranks(2, |mut comm| {
                let stream = bound(&mut comm, 1);
                let buf = up(&stream, values(comm.rank(), LEN));
                soon(comm.barrier()).unwrap();
                if comm.rank() == 0 {
                    for nth in 1..=5 {
                        fail(Some("cuEventQuery"), nth, code);
                    }
                    fail(Some("cuEventSynchronize"), 1, code);
                }
                soon(comm.barrier()).unwrap();
                let buf = soon(comm.all_reduce(buf)).unwrap();
                stream.record().unwrap().wait().unwrap();
                let event = stream.record().unwrap();
                fail(Some("cuEventQuery"), 1, code);
                let asked = event.is_complete();
                assert!(asked.is_ok(), "{code}: {asked:?}");
                event.wait().unwrap();
                assert!(down(buf) == sums(), "{code}");
                soon(comm.close()).unwrap();
            });
            fail(None, 0, 0);
            nothing_left("all was dropped");
        }
    });
}

/// Ranks of several processes break no capture either; nor does NCCL (the next test).
#[test]
fn a_capture_elsewhere_is_not_broken_by_other_processes() {
    let test = "capture::a_capture_elsewhere_is_not_broken_by_other_processes";
    let held = processes(test, &[&[0], &[1]], &[], |comm| {
        let (_device, stream) = device();
        in_context(0, || {
            let capture = Capture::begin(stream);
            std::thread::scope(|scope| scope.spawn(|| work(comm)).join().unwrap());
            assert_eq!(capture.end(), 0, "the capture is whole");
        });
    });
    if let Some(held) = held {
        held.end_well(test);
    }
}

#[test]
fn a_capture_elsewhere_is_not_broken_by_nccl() {
    with_nccl("capture::a_capture_elsewhere_is_not_broken_by_nccl", 2, &[], || {
        let (_device, stream) = device();
        in_context(0, || {
            let capture = Capture::begin(stream);
            ranks(2, |mut comm| {
                let (rank, device) = (comm.rank(), Device::new(comm.rank()).unwrap());
                assert!(matches!(soon(comm.bind_nccl(&device)).unwrap(), DevicePath::Nccl { .. }));
                let stream = DeviceStream::new(&device).unwrap();
                for _ in 0..3 {
                    let joined = comm.all_reduce(up(&stream, values(rank, LEN))).join(&stream).unwrap();
                    assert!(down(joined.in_order().unwrap()) == sums());
                }
                soon(comm.close()).unwrap();
            });
            assert_eq!(capture.end(), 0, "the capture is whole");
        });
    });
}

/// What has to do with a stream that is captured is refused to the rank that calls, whose capture goes on; the other rank waits until it calls again.
#[test]
fn a_captured_stream_takes_no_operations() {
    child("capture::a_captured_stream_takes_no_operations", TWO, || {
        for is_bound in [true, false] {
            ranks(2, |mut comm| {
                let rank = comm.rank();
                let device = Device::new(rank).unwrap();
                if is_bound {
                    bound(&mut comm, 2);
                }
                let [stream, other] = [(); 2].map(|()| DeviceStream::new(&device).unwrap());
                let [buf, elsewhere] = [&stream, &other].map(|stream| up(stream, values(rank, LEN)));
                let buf = match rank {
                    0 => buf,
                    _ => in_context(1, || {
                        let capture = Capture::begin(stream.clone());
                        let told = |error: &allstream::Error| {
                            let text = error.to_string();
                            assert!(text.contains("captured into a graph"), "{text}");
                            assert!(text.contains("before or after the capture"), "{text}");
                        };
                        let Failed { error, buf: back } = soon(comm.all_reduce(buf)).unwrap_err();
                        told(&error);
                        // The same call, that is to start after another stream's work, too.
                        let Failed { error, buf: back } =
                            soon(comm.on(&other).all_reduce(back.unwrap())).unwrap_err();
                        told(&error);
                        let buf = back.unwrap();
                        // To start after what is captured.
                        let Failed { error, buf: back } =
                            soon(comm.on(&stream).all_reduce(elsewhere)).unwrap_err();
                        told(&error);
                        drop(back.unwrap());
                        assert!(comm.check().is_ok());
                        assert_eq!(capture.end(), 0, "the capture is whole");
                        buf
                    }),
                };
                assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums());
                // Here the captured stream is the one that is to wait for an operation.
                let work = comm.all_reduce(up(&other, values(rank, LEN)));
                if rank == 1 {
                    in_context(1, || {
                        let capture = Capture::begin(stream.clone());
                        // The host waits, and nothing comes into the graph.
                        let sum = work.join(&stream).unwrap().in_order().unwrap();
                        assert_eq!(capture.end(), 0, "the capture is whole");
                        assert!(down(sum) == sums());
                    });
                } else {
                    assert!(down(soon(work).unwrap()) == sums());
                }
                soon(comm.close()).unwrap();
            });
        }
        nothing_left("all was dropped");
    });
}

/// A graph may use the memory of a buffer that was dropped while its stream was captured, so nobody gets that memory before the device's context ends:
/// another library may keep the context when we close the device. Closing it waits for no event of the capture, as those are never reached.
#[test]
fn memory_that_is_dropped_within_a_capture_is_kept_until_the_context_ends() {
    child("capture::memory_that_is_dropped_within_a_capture_is_kept_until_the_context_ends", &[], || {
        let opened = device();
        in_context(0, move || {
            let (device, stream) = opened;
            let dropped = up(&stream, numbers(LEN));
            let other = DeviceStream::new(&device).unwrap();
            let at = dropped.as_ptr();
            stream.synchronize().unwrap();
            let capture = Capture::begin(stream.clone());
            drop(dropped);
            for error in [
                DeviceBuf::<f32>::zeroed(&stream, LEN).unwrap_err(),
                soon(DeviceBuf::from_host(&stream, numbers(LEN))).unwrap_err().error,
                soon(up(&other, numbers(LEN)).copy_to(&stream)).unwrap_err().error,
            ] {
                assert!(error.to_string().contains("before or after the capture"), "{error}");
            }
            assert_eq!(capture.end(), 0, "the capture is whole");
            assert_ne!(up(&stream, numbers(LEN)).as_ptr(), at);
            // In a block that no graph knows: it is given back.
            let large = DeviceBuf::<u8>::zeroed(&stream, 70 << 20).unwrap();
            assert_eq!(report().allocations, 2);
            drop((large, other));
            drop((device, stream));
            let is_closed = || report().streams == 0 && report().events == 0 && report().allocations < 2;
            until("the device is closed", is_closed);
            assert_eq!(report().allocations, 1, "the block that a graph may use");
        });
        nothing_left("the context has ended");
    });
}

/// The default stream has to do with all streams that were not made non-blocking: while one of these is captured, the driver takes nothing for it.
#[test]
fn the_default_stream_while_a_blocking_one_is_captured() {
    child("capture::the_default_stream_while_a_blocking_one_is_captured", TWO, || {
        ranks(2, |mut comm| {
            let rank = comm.rank();
            let device = bound(&mut comm, 2).device();
            // SAFETY: the default stream is always there.
            let default = unsafe { DeviceStream::from_raw(&device, std::ptr::null_mut()) }.unwrap();
            let buf = up(&default, values(rank, LEN));
            let buf = match rank {
                0 => buf,
                _ => in_context(1, || {
                    let mut raw: *mut c_void = std::ptr::null_mut();
                    // SAFETY: the functions' types in cuda.h; the stream is destroyed once, when it is no longer used.
                    unsafe {
                        let create: unsafe extern "C" fn(*mut *mut c_void, u32) -> u32 =
                            std::mem::transmute(function("cuStreamCreate"));
                        let destroy: unsafe extern "C" fn(*mut c_void) -> u32 =
                            std::mem::transmute(function("cuStreamDestroy_v2"));
                        assert_eq!(create(&raw mut raw, 0), 0);
                        let capture = Capture::begin(DeviceStream::from_raw(&device, raw).unwrap());
                        let Failed { error, buf: back } = soon(comm.all_reduce(buf)).unwrap_err();

                        assert!(error.to_string().contains("before or after the capture"), "{error}");

                        assert_eq!(capture.end(), 0, "the capture is whole");
                        assert_eq!(destroy(raw), 0);
                        back.unwrap()
                    }
                }),
            };
            assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums());
            soon(comm.close()).unwrap();
        });
        nothing_left("all was dropped");
    });
}
