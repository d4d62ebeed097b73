//! Collectives on memory of cudarc, which uses the same test driver: it opens `libcuda.so` from the loader's path.

use std::ffi::c_void;
use std::sync::Arc;

use allstream::cuda::{CudarcBuf, Device, DeviceBuf, DeviceStream, ForeignMemory};
use allstream::{Buf, Comm, DType, Failed};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, sys};

use crate::support::{child, function, library, nothing_left, report, set_delays, soon};

/// Runs the test in a process where cudarc finds the test driver.
fn with_cudarc(test: &str, delay: &str, body: impl FnOnce()) {
    let folder = library().parent().unwrap().to_str().unwrap();
    let variables = [
        ("LD_LIBRARY_PATH", folder),
        ("ALLSTREAM_TEST_CUDA_DELAY_US", delay),
        ("ALLSTREAM_TEST_CUDA_DEVICES", "2"),
    ];
    child(test, &variables, body);
}

fn ranks(run: impl Fn(Comm) + Sync) {
    let comms = Comm::local(2).unwrap();
    std::thread::scope(|scope| comms.into_iter().for_each(|comm| drop(scope.spawn(|| run(comm)))));
}

fn values(rank: usize) -> Vec<f32> {
    (0..5000).map(|i| (i % 13 + rank) as f32).collect()
}

fn refused<T: allstream::Element>(slice: CudaSlice<T>, part: &str) -> CudaSlice<T> {
    let Failed { buf, error } = CudarcBuf::new(slice).unwrap_err();
    assert!(error.to_string().contains(part), "{error}");
    buf.unwrap()
}

#[test]
fn collectives_take_slices_and_give_them_back() {
    with_cudarc("cudarc::collectives_take_slices_and_give_them_back", "2000", || {
        ranks(|mut comm| {
            let context = CudaContext::new(comm.rank()).unwrap();
            for stream in [context.default_stream(), context.new_stream().unwrap()] {
                let slice = stream.clone_htod(&values(comm.rank())).unwrap();
                let mut buf = CudarcBuf::new(slice).unwrap();
                assert_eq!(Buf::len(&buf), 5000);
                for _ in 0..2 {
                    buf = soon(comm.all_reduce(buf)).unwrap();
                }
                let slice: CudaSlice<f32> = buf.into_inner();
                let sum: Vec<f32> = (0..5000).map(|i| 2.0 * (values(0)[i] + values(1)[i])).collect();
                assert!(stream.clone_dtoh(&slice).unwrap() == sum);
                // In one list with a buffer of the host.
                let slice = CudarcBuf::try_from(stream.alloc_zeros::<f32>(4).unwrap()).unwrap();
                let list = (vec![vec![1.0_f32; 4]], [slice]);
                let (host, [slice]) = soon(comm.all_reduce_list(list)).unwrap();
                assert_eq!(host, [[2.0; 4]]);
                assert_eq!(stream.clone_dtoh(&slice.into_inner()).unwrap(), [0.0; 4]);
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("both ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Work that cudarc has put on other streams runs before our collective, and our collective before cudarc's later work there.
#[test]
fn other_streams_of_cudarcs_are_in_order() {
    with_cudarc("cudarc::other_streams_of_cudarcs_are_in_order", "3000", || {
        for seed in 0..15 {
            set_delays(3000, seed);
            ranks(|mut comm| {
                let context = CudaContext::new(0).unwrap();
                let [home, early, late] = [(); 3].map(|()| context.new_stream().unwrap());
                let mut slice = home.clone_htod(&values(0)).unwrap();
                let ones = home.clone_htod(&[1.0_f32; 5000]).unwrap();
                // Work that delays the stream.
                for _ in 0..3 {
                    drop(early.alloc_zeros::<u8>(16).unwrap());
                }
                early.memcpy_dtod(&ones, &mut slice).unwrap();
                let buf = soon(comm.all_reduce(CudarcBuf::new(slice).unwrap())).unwrap();
                let slice = buf.into_inner();
                assert!(late.clone_dtoh(&slice).unwrap() == [2.0; 5000], "seed {seed}");
                // The buffer is dropped in the middle of an operation, and freed after it.
                drop(comm.all_reduce(CudarcBuf::new(slice).unwrap()));
                soon(comm.barrier()).unwrap();
            });
        }
        nothing_left("both ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Work of ours that is left on the slice's stream when the slice is given back (after a failure, say) runs before cudarc's later work on
/// other streams.
#[test]
fn work_of_ours_comes_before_what_cudarc_does_next() {
    with_cudarc("cudarc::work_of_ours_comes_before_what_cudarc_does_next", "3000", || {
        let context = CudaContext::new(0).unwrap();
        let [home, late] = [(); 2].map(|()| context.new_stream().unwrap());
        let device = Device::new(0).unwrap();
        // SAFETY: `ours` is the stream of `home`, which outlives all work on it: `synchronize` below waits for that work.
        let ours = unsafe { DeviceStream::from_raw(&device, home.cu_stream().cast()) }.unwrap();
        for seed in 0..15 {
            set_delays(3000, seed);
            let slice = home.clone_htod(&values(0)).unwrap();
            let pointer = slice.device_ptr(&home).0;
            let buf = CudarcBuf::new(slice).unwrap();
            let memory = ForeignMemory { pointer, len: 5000, dtype: DType::F32 };
            // SAFETY: `alias` acts as an operation that has `buf`: `buf` keeps the memory, which nobody else uses until `buf` gives the slice back,
            // and all work of `alias` is put on the slice's stream before that.
            let alias = unsafe { DeviceBuf::<f32>::from_foreign(memory, &ours, ()) }.unwrap();
            for _ in 0..3 {
                drop(DeviceBuf::<u32>::zeroed(&ours, 16).unwrap());
            }
            drop(alias.copy_from(DeviceBuf::zeroed(&ours, 5000).unwrap()));
            let slice = buf.into_inner();
            assert!(late.clone_dtoh(&slice).unwrap() == [0.0; 5000], "seed {seed}");
            ours.synchronize().unwrap();
        }
    });
}

#[test]
fn a_slice_becomes_a_device_buffer() {
    with_cudarc("cudarc::a_slice_becomes_a_device_buffer", "2000", || {
        let context = CudaContext::new(0).unwrap();
        for _ in 0..10 {
            let slice = context.new_stream().unwrap().clone_htod(&values(3)).unwrap();
            // The slice has the only handle of its stream, so the buffer must keep the stream.
            let buf = CudarcBuf::new(slice).unwrap().into_device_buf().unwrap();
            let [low, high] = buf.split_at(1000).unwrap();
            let (high, low) = soon(DeviceBuf::zeroed(high.stream(), 4000).unwrap().copy_from(high))
                .map(|(high, copy)| (high, DeviceBuf::join([copy]).map(|copy| (copy, low))))
                .unwrap();
            let (copy, low) = low.unwrap();
            let back = soon(copy.to_host(vec![0.0; 4000])).unwrap().1;
            assert!(back == values(3)[1000..]);
            drop((high, low));
        }
        drop(context);
        nothing_left("all was dropped");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn a_slice_that_cannot_be_ordered_is_refused_and_comes_back() {
    with_cudarc("cudarc::a_slice_that_cannot_be_ordered_is_refused_and_comes_back", "0", || {
        let context = CudaContext::new(0).unwrap();
        let slice = context.per_thread_stream().clone_htod(&[1_u32; 8]).unwrap();
        let slice = refused(slice, "per-thread default stream");
        assert_eq!(context.per_thread_stream().clone_dtoh(&slice).unwrap(), [1; 8]);

        // A context of its own.
        let own = {
            let mut raw: *mut c_void = std::ptr::null_mut();
            // SAFETY: cuda.h declares the function with this type; cudarc becomes the only owner of the new context.
            unsafe {
                let create: unsafe extern "C" fn(*mut *mut c_void, u32, i32) -> u32 =
                    std::mem::transmute(function("cuCtxCreate_v2"));
                assert_eq!(create(&raw mut raw, 0, 0), 0);
                CudaContext::from_raw_context(0, context.cu_device(), raw.cast()).unwrap()
            }
        };
        let slice = refused(own.new_stream().unwrap().clone_htod(&[1_u32; 8]).unwrap(), "primary context");
        drop((slice, own));

        // An error that cudarc has kept for its next call is reported, once.
        let stream: Arc<CudaStream> = context.new_stream().unwrap();
        let slice = stream.clone_htod(&[1_u32; 8]).unwrap();
        context.record_err::<()>(Err(DriverError(sys::cudaError_enum::CUDA_ERROR_UNKNOWN)));
        let slice = refused(slice, "cudarc had kept this error");
        let slice = CudarcBuf::new(slice).unwrap().into_inner();
        assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1; 8]);
        drop((slice, stream, context));
    });
}
