//! Memory of the host that devices can reach: page-locked, or registered.

use std::ffi::c_void;

use crate::abi::{Address, Out};
use crate::codes::{Code, Done};
use crate::context::working;
use crate::entry::call;
use crate::space::{self, Kind, Memory, find};

/// Portable, mapped, write-combined.
const ALLOC_FLAGS: u32 = 7;
/// Portable, mapped, of a device's registers, read-only.
const REGISTER_FLAGS: u32 = 15;

fn allocate(out: &Out<Address>, size: usize, flags: u32) -> Done {
    if flags & !ALLOC_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(Memory::on_host(size, flags, &*working()?)?.base)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostAlloc(out: Out<Address>, size: usize, flags: u32) -> Code {
    call("cuMemHostAlloc", || allocate(&out, size, flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocHost_v2(out: Out<Address>, size: usize) -> Code {
    call("cuMemAllocHost_v2", || allocate(&out, size, 0))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeHost(at: Address) -> Code {
    call("cuMemFreeHost", || {
        working()?;
        let memory = space::beginning(at).filter(|memory| memory.kind == Kind::Host);
        memory.ok_or(Code::INVALID_VALUE)?.end()
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, size: usize, flags: u32) -> Code {
    call("cuMemHostRegister_v2", || {
        let context = working()?;
        if at.is_null() || size == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if space::overlaps(at as Address, size) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        Memory::registered(at as usize, size, flags, &context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostUnregister(at: *mut c_void) -> Code {
    call("cuMemHostUnregister", || {
        working()?;
        let memory = space::beginning(at as Address).filter(|memory| memory.kind == Kind::Registered);
        memory.ok_or(Code::HOST_MEMORY_NOT_REGISTERED)?.end()
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    out: Out<Address>,
    at: *mut c_void,
    flags: u32,
) -> Code {
    call("cuMemHostGetDevicePointer_v2", || {
        let memory = find(at as Address, 1).filter(|memory| memory.on_the_host() && memory.is_mapped());
        if flags != 0 || memory.is_none() {
            return Err(Code::INVALID_VALUE);
        }
        // One space of addresses.
        out.set(at as Address)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostGetFlags(out: Out<u32>, at: *mut c_void) -> Code {
    call("cuMemHostGetFlags", || {
        let memory = find(at as Address, 1).filter(|memory| memory.kind == Kind::Host);
        out.set(memory.ok_or(Code::INVALID_VALUE)?.flags)
    })
}
