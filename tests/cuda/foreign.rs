//! Memory that other libraries allocated, lent to the devices of other ranks.

use std::ffi::c_void;

use allstream::Error;
use allstream::cuda::{Device, DeviceBuf, DeviceStream, ForeignMemory};
use allstream::{Comm, DType};

use crate::support::{bound, calls, child, down, fail, function, in_context, ranks, report, soon, values};

const LEN: usize = 3000;
const TWO: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

/// Who allocates.
#[derive(Clone, Copy)]
enum By {
    /// `cuMemAllocAsync`, on the stream.
    Pool,
    /// `cuMemAlloc`, in a context that is not the device's primary one.
    OtherContext,
}

/// Memory of another library's, which is freed with it.
struct Theirs {
    at: u64,
    from: By,
    stream: DeviceStream,
    context: usize,
}

fn current(context: usize) -> usize {
    let mut before: *mut c_void = std::ptr::null_mut();
    // SAFETY: both are functions of these types in cuda.h; the context lives, or is none.
    unsafe {
        let get: unsafe extern "C" fn(*mut *mut c_void) -> u32 =
            std::mem::transmute(function("cuCtxGetCurrent"));
        let set: unsafe extern "C" fn(*mut c_void) -> u32 = std::mem::transmute(function("cuCtxSetCurrent"));
        assert_eq!(get(&raw mut before), 0);
        assert_eq!(set(context as *mut c_void), 0);
    }
    before as usize
}

impl Theirs {
    fn new(from: By, stream: &DeviceStream, bytes: usize) -> Theirs {
        let (mut at, mut context): (u64, *mut c_void) = (0, std::ptr::null_mut());
        // SAFETY: functions of these types in cuda.h; what they give is given back in `drop`.
        unsafe {
            match from {
                By::Pool => {
                    let allocate: unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> u32 =
                        std::mem::transmute(function("cuMemAllocAsync"));
                    let code = in_context(stream.device().ordinal(), || {
                        allocate(&raw mut at, bytes, stream.as_raw())
                    });
                    assert_eq!(code, 0);
                }
                By::OtherContext => {
                    let before = current(0);
                    let create: unsafe extern "C" fn(*mut *mut c_void, u32, i32) -> u32 =
                        std::mem::transmute(function("cuCtxCreate_v2"));
                    let allocate: unsafe extern "C" fn(*mut u64, usize) -> u32 =
                        std::mem::transmute(function("cuMemAlloc_v2"));
                    assert_eq!(create(&raw mut context, 0, stream.device().ordinal() as i32), 0);
                    assert_eq!(allocate(&raw mut at, bytes), 0);
                    current(before);
                }
            }
        }
        Theirs { at, from, stream: stream.clone(), context: context as usize }
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        // SAFETY: as in `new`; the buffer is gone, and its stream is done with it.
        unsafe {
            match self.from {
                By::Pool => {
                    let free: unsafe extern "C" fn(u64, *mut c_void) -> u32 =
                        std::mem::transmute(function("cuMemFreeAsync"));
                    let device = self.stream.device().ordinal();
                    assert_eq!(in_context(device, || free(self.at, self.stream.as_raw())), 0);
                }
                By::OtherContext => {
                    let destroy: unsafe extern "C" fn(*mut c_void) -> u32 =
                        std::mem::transmute(function("cuCtxDestroy_v2"));
                    assert_eq!(destroy(self.context as *mut c_void), 0);
                }
            }
        }
    }
}

/// A rank's values, in such memory.
fn theirs(comm: &Comm, from: By, stream: &DeviceStream) -> DeviceBuf<f32> {
    let theirs = Theirs::new(from, stream, LEN * 4);
    let memory = ForeignMemory { pointer: theirs.at, len: LEN, dtype: DType::F32 };
    // SAFETY: nobody else uses the memory, and it is filled before anyone reads it.
    let buf = unsafe { DeviceBuf::<f32>::from_foreign(memory, stream, theirs) };
    let buf = buf.map_err(|failed| failed.error).unwrap();
    soon(buf.copy_from_host(values(comm.rank(), LEN))).unwrap().1
}

fn sums(n: usize) -> Vec<f32> {
    (0..LEN).map(|i| (0..n).map(|rank| values(rank, LEN)[i]).sum()).collect()
}

/// The call is refused on all ranks, and everything works afterwards: no device has touched what it may not.
fn is_refused_and_nothing_is_lost(from: By, why: &str) {
    ranks(2, |mut comm| {
        let stream = bound(&mut comm, 2);
        let failed = soon(comm.all_reduce(theirs(&comm, from, &stream))).unwrap_err();
        let text = failed.error.to_string();
        let told = matches!(failed.error, Error::Invalid { .. });
        assert!(told && text.contains(why) && text.contains("copy it to a DeviceBuf"), "{text}");
        let (buf, host) = soon(failed.buf.expect("comes back").to_host(vec![0.0; LEN])).unwrap();
        assert!(host == values(comm.rank(), LEN));
        drop(buf);
        let ours = soon(DeviceBuf::from_host(&stream, values(comm.rank(), LEN))).unwrap().1;
        assert!(down(soon(comm.all_reduce(ours)).unwrap()) == sums(2));
        soon(comm.close()).unwrap();
    });
}

#[test]
fn memory_of_the_drivers_pool_is_opened_to_the_devices_of_the_other_ranks() {
    let name = "foreign::memory_of_the_drivers_pool_is_opened_to_the_devices_of_the_other_ranks";
    child(name, TWO, || {
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 2);
            for _ in 0..3 {
                let buf = theirs(&comm, By::Pool, &stream);
                assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2));
            }
            soon(comm.close()).unwrap();
        });
        assert_eq!(calls("cuMemPoolSetAccess"), 2, "each rank opens its pool to the other device, once");
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn ranks_of_one_device_open_nothing() {
    child("foreign::ranks_of_one_device_open_nothing", TWO, || {
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 1);
            let buf = theirs(&comm, By::Pool, &stream);
            assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2));
            soon(comm.close()).unwrap();
        });
        assert_eq!(calls("cuMemPoolSetAccess"), 0);
    });
}

#[test]
fn a_pool_that_cannot_be_opened_is_refused_at_the_call() {
    child("foreign::a_pool_that_cannot_be_opened_is_refused_at_the_call", TWO, || {
        fail(Some("cuMemPoolSetAccess"), 1, 801);
        fail(Some("cuMemPoolSetAccess"), 2, 801);
        is_refused_and_nothing_is_lost(By::Pool, "cuMemPoolSetAccess answered CUDA_ERROR_NOT_SUPPORTED");
    });
}

#[test]
fn memory_of_a_context_that_no_other_device_reaches_is_refused_at_the_call() {
    let name = "foreign::memory_of_a_context_that_no_other_device_reaches_is_refused_at_the_call";
    child(name, TWO, || {
        let _devices = [0, 1].map(|ordinal| Device::new(ordinal).unwrap());
        is_refused_and_nothing_is_lost(By::OtherContext, "not of the device's primary context");
    });
}
