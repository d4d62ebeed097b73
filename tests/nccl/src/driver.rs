//! The two functions of the CUDA driver for tests that this library calls.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::OnceLock;

/// A range of device memory that a piece of work touches.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Place {
    pub(crate) at: u64,
    pub(crate) bytes: usize,
}

pub(crate) type Work = unsafe extern "C" fn(*mut c_void, *const *mut u8) -> u32;

type GetDevice = unsafe extern "C" fn(*mut c_int) -> u32;
type Put = unsafe extern "C" fn(u64, *const Place, usize, Option<Work>, *mut c_void) -> u32;

struct Driver {
    ctx_get_device: GetDevice,
    work: Put,
}

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let open = || {
        let file = CString::new(std::env::var("ALLSTREAM_CUDA_LIBRARY").ok()?).ok()?;
        // SAFETY: a path that ends in a null byte; the driver for tests has no initialisers.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is of a library that is never closed.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if address.is_null() { None } else { Some(address) }
        };
        let (device, work) = (symbol(c"cuCtxGetDevice")?, symbol(c"allstream_test_cuda_work")?);
        // SAFETY: the functions have these types: the first in cuda.h, the second in `door.rs` of the driver for tests.
        Some(unsafe {
            Driver {
                ctx_get_device: std::mem::transmute::<*mut c_void, GetDevice>(device),
                work: std::mem::transmute::<*mut c_void, Put>(work),
            }
        })
    };
    DRIVER.get_or_init(open).as_ref()
}

/// The device of the context that is current.
pub(crate) fn current_device() -> Option<c_int> {
    let (driver, mut device) = (driver()?, 0);
    // SAFETY: the pointer leads to room for a number.
    let answer = unsafe { (driver.ctx_get_device)(&raw mut device) };
    (answer == 0).then_some(device)
}

/// Puts work on a stream. Returns whether the driver has accepted it.
///
/// # Safety
/// `work` may be called with `argument` once, on another thread.
pub(crate) unsafe fn put(stream: u64, places: &[Place], work: Work, argument: *mut c_void) -> bool {
    let Some(driver) = driver() else { return false };
    // SAFETY: the pointer and the length are those of `places`; that `work` may be called is the caller's promise.
    unsafe { (driver.work)(stream, places.as_ptr(), places.len(), Some(work), argument) == 0 }
}
