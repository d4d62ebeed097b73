//! Memory that other libraries allocated, lent to the devices of other ranks.

use std::ffi::c_void;
use std::sync::Arc;

use allstream::DType;
use allstream::cuda::{Device, DeviceBuf, DeviceStream, ForeignMemory};

use crate::collectives::everything_in;
use crate::support::{bound, calls, child, down, fail, function, in_context, ranks, report, soon, values};

const LEN: usize = 3000;
const TWO: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

/// How the memory is allocated.
#[derive(Clone, Copy)]
pub(crate) enum By {
    /// `cuMemAlloc`.
    Alloc,
    /// `cuMemAllocAsync`, on the stream.
    Pool,
    /// `cuMemAlloc`, in a context that is not the device's primary one.
    OtherContext,
}

/// Memory of another library, which is freed when this is dropped.
pub(crate) struct Theirs {
    pub(crate) at: u64,
    from: By,
    stream: DeviceStream,
    context: usize,
}

fn current(context: usize) -> usize {
    let mut before: *mut c_void = std::ptr::null_mut();
    // SAFETY: cuda.h declares both functions with these types; the context is alive, or 0 for none.
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
    pub(crate) fn new(from: By, stream: &DeviceStream, bytes: usize) -> Theirs {
        let (mut at, mut context): (u64, *mut c_void) = (0, std::ptr::null_mut());
        // SAFETY: cuda.h declares the functions with these types; what they allocate is freed in `drop`.
        unsafe {
            match from {
                By::Alloc => {
                    let allocate: unsafe extern "C" fn(*mut u64, usize) -> u32 =
                        std::mem::transmute(function("cuMemAlloc_v2"));
                    let code = in_context(stream.device().ordinal(), || allocate(&raw mut at, bytes));
                    assert_eq!(code, 0);
                }
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
        // SAFETY: as in `new`; no buffer uses the memory any more, and all work on it has ended.
        unsafe {
            match self.from {
                By::Alloc => {
                    let free: unsafe extern "C" fn(u64) -> u32 =
                        std::mem::transmute(function("cuMemFree_v2"));
                    let device = self.stream.device().ordinal();
                    assert_eq!(in_context(device, || free(self.at)), 0);
                }
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

/// A buffer of these values within `theirs`, which it keeps alive: it begins at this byte.
pub(crate) fn within(
    theirs: &Arc<Theirs>,
    byte: usize,
    stream: &DeviceStream,
    values: Vec<f32>,
) -> DeviceBuf<f32> {
    let memory = ForeignMemory { pointer: theirs.at + byte as u64, len: values.len(), dtype: DType::F32 };
    // SAFETY: nobody else uses these bytes of the memory, and they are filled before anyone reads them.
    let buf = unsafe { DeviceBuf::<f32>::from_foreign(memory, stream, theirs.clone()) };
    let buf = buf.map_err(|failed| failed.error).unwrap();
    soon(buf.copy_from_host(values)).unwrap().1
}

/// The shortest allocation that can be lent to other processes, in bytes; torch's are no shorter.
pub(crate) const LONG: usize = 2 << 20;

/// A buffer of these values in an allocation of its own.
pub(crate) fn theirs(from: By, stream: &DeviceStream, values: Vec<f32>) -> DeviceBuf<f32> {
    within(&Arc::new(Theirs::new(from, stream, LONG.max(values.len() * 4))), 0, stream, values)
}

fn sums(n: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..n).map(|rank| values(rank, LEN)).collect();
    (0..LEN).map(|i| all.iter().map(|values| values[i]).sum()).collect()
}

/// Memory that other ranks' devices cannot reach is copied: all collectives work on copies, and `device_copies` says why.
fn is_copied(from: By, why: &str) {
    ranks(3, |mut comm| {
        let stream = bound(&mut comm, 2);
        let make = |values| theirs(from, &stream, values);
        everything_in(&mut comm, &[700], &make);
        let copies = comm.device_copies().expect("it was copied");
        assert!(copies.buffers > 20 && copies.bytes > 20 * 4 && copies.why.contains(why), "{copies:?}");
        let ours = soon(DeviceBuf::from_host(&stream, values(comm.rank(), LEN))).unwrap().1;
        assert!(down(soon(comm.all_reduce(ours)).unwrap()) == sums(3));
        assert_eq!(comm.device_copies(), Some(copies), "what can be read where it lies is not copied");
        soon(comm.close()).unwrap();
    });
    assert_eq!(report().freed_in_use, 0);
}

#[test]
fn memory_of_the_drivers_pool_is_opened_to_the_devices_of_the_other_ranks() {
    let name = "foreign::memory_of_the_drivers_pool_is_opened_to_the_devices_of_the_other_ranks";
    child(name, TWO, || {
        ranks(2, |mut comm| {
            let stream = bound(&mut comm, 2);
            for _ in 0..3 {
                let buf = theirs(By::Pool, &stream, values(comm.rank(), LEN));
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
            let buf = theirs(By::Pool, &stream, values(comm.rank(), LEN));
            assert!(down(soon(comm.all_reduce(buf)).unwrap()) == sums(2));
            soon(comm.close()).unwrap();
        });
        assert_eq!(calls("cuMemPoolSetAccess"), 0);
    });
}

#[test]
fn memory_of_a_pool_that_cannot_be_opened_is_copied() {
    child("foreign::memory_of_a_pool_that_cannot_be_opened_is_copied", TWO, || {
        // Every call of it fails.
        (1..=2000).for_each(|nth| fail(Some("cuMemPoolSetAccess"), nth, 801));
        is_copied(By::Pool, "cuMemPoolSetAccess answered");
    });
}

#[test]
fn memory_of_a_context_that_no_other_device_reaches_is_copied() {
    child("foreign::memory_of_a_context_that_no_other_device_reaches_is_copied", TWO, || {
        let _devices = [0, 1].map(|ordinal| Device::new(ordinal).unwrap());
        is_copied(By::OtherContext, "not of the device's primary context");
    });
}
