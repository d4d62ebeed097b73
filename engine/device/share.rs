//! Whether ranks in other processes can read and write another library's memory where it lies, without a copy.
//!
//! `cuIpcGetMemHandle` gives handles only for memory that `cuMemAlloc` gave, not for memory of the driver's pools (`cuMemAllocAsync`), nor for
//! memory that was mapped piece by piece (`cuMemMap`). What has no such handle is copied first (`copied.rs`).

use allstream_sys::cuda::{
    CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
};

use super::context::Context;
use super::lend::attribute;

/// In bytes. Shorter allocations may lie together in a block of the driver's, which a handle would share as a whole: "it is recommended to only
/// share allocations with a 2MiB aligned size" (CUDA Programming Guide, Interprocess Communication). To copy a short one costs little.
const SHORTEST: u64 = 2 << 20;

impl Context {
    /// Notes the allocation in which these bytes of another library's memory lie, so that other processes can open it. The caller's buffer
    /// keeps the memory until its operation is over.
    ///
    /// # Errors
    /// Why other processes cannot open it.
    pub(super) fn share(&self, at: u64, bytes: u64) -> Result<(), String> {
        let id = attribute(self, at, CU_POINTER_ATTRIBUTE_BUFFER_ID);
        if self.allocations.lock().has(at, bytes, id) {
            return Ok(());
        }
        if attribute(self, at, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) == 0 {
            return Err(match attribute(self, at, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) {
                0 => "it was not allocated by cudaMalloc, and only such memory has a handle for other processes (torch: \
                      PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)",
                _ => "it is of a pool of the driver's (cudaMallocAsync), which has no handle for other processes (torch: \
                      PYTORCH_CUDA_ALLOC_CONF=backend:native)",
            }
            .to_owned());
        }
        if id == 0 {
            return Err("the driver gives it no number (CU_POINTER_ATTRIBUTE_BUFFER_ID), so a later allocation at the \
                        same address could not be told from it"
                .to_owned());
        }
        let (mut base, mut length, mut handle) = (0, 0_usize, [0; 64]);
        let named = self.call("name another library's memory for other processes", |cuda| {
            // SAFETY: the caller's buffer keeps the memory at this address; `base` and `length` are room for both answers.
            unsafe { cuda.mem_get_address_range(&raw mut base, &raw mut length, at) }?;
            if length as u64 >= SHORTEST {
                // SAFETY: the allocation of that memory, which the buffer keeps, begins at `base`.
                handle = unsafe { cuda.ipc_get_mem_handle(base) }?.0;
            }
            Ok(())
        });
        named.map_err(|error| format!("the driver gives no handle for other processes: {error}"))?;
        let length = length as u64;
        if length < SHORTEST {
            return Err(format!(
                "its allocation of {length} bytes is shorter than 2 MiB, and may share a block of the driver's with others, which \
                 a handle would expose, too"
            ));
        }
        let end = at.checked_sub(base).and_then(|offset| offset.checked_add(bytes));
        if end.is_none_or(|end| end > length) {
            return Err("it reaches beyond the allocation in which it begins".to_owned());
        }
        let mut allocations = self.allocations.lock();
        // Another thread may have noted the allocation meanwhile.
        if !allocations.has(at, bytes, id) {
            allocations.put((base, length), id, handle);
        }
        drop(allocations);
        self.forget_freed();
        Ok(())
    }

    /// Forgets allocations that were freed.
    fn forget_freed(&self) {
        let known = self.allocations.lock().all();
        for (base, id) in known {
            if attribute(self, base, CU_POINTER_ATTRIBUTE_BUFFER_ID) != id {
                self.allocations.lock().forget(base, id);
            }
        }
    }
}
