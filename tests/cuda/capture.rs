//! Streams that are captured into graphs elsewhere in the process, as PyTorch does: nothing here breaks that, and it
//! breaks nothing here.

use std::ffi::c_void;

use allstream::cuda::{Device, DeviceBuf, DeviceStream, PinnedBuf};
use allstream::{Algo, Comm};

use crate::support::{
    bound, child, device, down, fail, function, in_context, nothing_left, numbers, ranks, soon, up, values,
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

/// All that asks, allocates, loads and blocks.
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
        for code in 900..=907 {
            ranks(2, |mut comm| {
                let stream = bound(&mut comm, 1);
                let buf = up(&stream, values(comm.rank(), LEN));
                soon(comm.barrier()).unwrap();
                if comm.rank() == 0 {
                    for nth in 1..=5 {
                        fail(Some("cuEventQuery"), nth, code);
                    }
                    if code < 907 {
                        fail(Some("cuEventSynchronize"), 1, code);
                    }
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
