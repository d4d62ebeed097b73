//! Whether other devices of this process can touch memory that another library allocated.
//!
//! `cuCtxEnablePeerAccess` opens to another device what `cuMemAlloc` gives in a context. It does not open memory of the driver's
//! pools (`cuMemAllocAsync`, by which cudarc allocates, and torch if it is told to): each pool has its own list of devices that
//! may touch its memory (`cuMemPoolSetAccess`). Nor does it open memory that was mapped piece by piece (`cuMemMap`: torch's
//! expandable segments), whose owner opens each piece. A kernel that touches memory which its device may not touch destroys its
//! context, so the driver is asked before anything is lent. What cannot be lent is copied first (`copied.rs`).

use std::ffi::c_int;

use allstream_sys::cuda::{
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_LOCATION_TYPE_DEVICE, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
    CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CuMemAccessDesc, CuMemLocation, CuMemoryPool, CudaError,
};

use super::context::Context;
use super::place::DevicePlace;
use super::stream::DeviceStream;

/// An attribute of an address, as the driver tells it: a number or a handle of at most 8 bytes. 0: the driver
/// could not tell, or its answer is "no" or "none".
pub(super) fn attribute(context: &Context, at: u64, which: c_int) -> u64 {
    let mut answer = 0_u64;
    let asked = context.enter().and_then(|_entered| {
        // SAFETY: the driver takes any address; every attribute that callers ask for (in this file and `share.rs`) has at most 8 bytes.
        unsafe { context.cuda.pointer_get_attribute((&raw mut answer).cast(), which, at) }
    });
    asked.map_or(0, |()| answer)
}

/// Lets the device of `other` touch all memory of a pool, also what will be allocated later. Does nothing if that device may already.
fn open_pool(context: &Context, pool: CuMemoryPool, other: &Context) -> Result<(), CudaError> {
    let location = CuMemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: other.device };
    let _entered = context.enter()?;
    // SAFETY: the pool exists: the memory to be lent was allocated from it, and is not freed during this call. The driver reads the
    // location within the call.
    let access = unsafe { context.cuda.mem_pool_get_access(pool, &raw const location) }?;
    if access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE {
        return Ok(());
    }
    let access = CuMemAccessDesc { location, flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: as above; one description, read within the call.
    unsafe { context.cuda.mem_pool_set_access(pool, &raw const access, 1) }
}

impl DevicePlace {
    /// Makes sure that the devices of these streams, none of which is our device, can touch this memory.
    ///
    /// # Errors
    /// Why they cannot.
    pub(crate) fn lend_to(&self, others: &[DeviceStream]) -> Result<(), String> {
        if others.is_empty() {
            return Ok(());
        }
        let context = &self.stream.0.context;
        let pool = attribute(context, self.address, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE);
        if pool != 0 {
            let pool = CuMemoryPool(std::ptr::with_exposed_provenance_mut(pool as usize));
            return others.iter().map(|other| &other.0.context).try_for_each(|other| {
                open_pool(context, pool, other).map_err(|error| {
                    let what = "the memory is of a pool of the driver's (cuMemAllocAsync)";
                    self.refused(what, other, &format!("and cannot be opened to it: {error}"))
                })
            });
        }
        let legacy = attribute(context, self.address, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) != 0;
        let owner = attribute(context, self.address, CU_POINTER_ATTRIBUTE_CONTEXT);
        if legacy && owner == context.raw().0.addr() as u64 {
            return Ok(()); // open since the devices were bound
        }
        for other in others.iter().map(|other| &other.0.context) {
            let access = attribute(other, self.address, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
            if access != u64::from(CU_MEM_ACCESS_FLAGS_PROT_READWRITE.unsigned_abs()) {
                let what =
                    "the memory is not of the device's primary context, or mapped for some devices only";
                return Err(self.refused(what, other, "and its owner has not opened it to that device"));
            }
        }
        Ok(())
    }

    fn refused(&self, what: &str, other: &Context, why: &str) -> String {
        let (ours, theirs) = (self.stream.0.context.ordinal, other.ordinal);
        format!(
            "device {theirs} of another rank cannot touch it where it lies, on device {ours}: {what}, {why}"
        )
    }
}
