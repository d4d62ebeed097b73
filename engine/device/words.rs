//! Words of host memory that streams of devices in several processes write and wait for.
//!
//! They lie in memory that processes share, and each process makes them known to its own devices
//! (`cuMemHostRegister`). A stream writes a word behind its earlier work (`cuStreamWriteValue32`, which orders what was
//! written before it), and a stream of another process waits for it (`cuStreamWaitValue32`). What makes them different
//! from events between processes: a wait for an event stands for what was recorded at the call, so nobody can end it
//! where that process has died, while a word is memory, and a plain store of the host ends every wait for it.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use allstream_sys::cuda::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CuDevicePtr, CuStreamMemOp,
};

use super::context::Context;
use super::stream::DeviceStream;
use crate::error::Error;

/// A page of words, known to the driver until this goes.
pub(crate) struct SharedWords {
    context: Arc<Context>,
    at: NonNull<u8>,
    bytes: usize,
    address: CuDevicePtr,
    /// What keeps the memory mapped.
    _mapping: Arc<dyn Any + Send + Sync>,
}

// SAFETY: memory that is only ever used as atomic words, which `_mapping` keeps; the driver may be called from any thread.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl Drop for SharedWords {
    fn drop(&mut self) {
        self.context.close("take back words that processes share", |cuda| {
            // SAFETY: registered in `register`, once. Whoever drops this has waited for the streams that use the words
            // (`retire`).
            unsafe { cuda.mem_host_unregister(self.at.as_ptr().cast()) }
        });
    }
}

impl SharedWords {
    /// Makes memory known to the device of `stream`.
    ///
    /// # Safety
    /// - `bytes` bytes at `at`, whole pages, stay mapped as long as `mapping` lives;
    /// - everybody uses them as atomic words of 32 bits only;
    /// - they are not known to the driver yet.
    pub(crate) unsafe fn register(
        stream: &DeviceStream,
        (at, bytes): (NonNull<u8>, usize),
        mapping: Arc<dyn Any + Send + Sync>,
    ) -> Result<SharedWords, Error> {
        let context = &stream.0.context;
        context.call("register words that processes share", |cuda| {
            let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
            // SAFETY: the caller's promise; unregistered with the result.
            unsafe { cuda.mem_host_register(at.as_ptr().cast(), bytes, flags) }?;
            let context = context.clone();
            let mut words = SharedWords { context, at, bytes, address: 0, _mapping: mapping };
            // SAFETY: just registered.
            words.address = unsafe { cuda.mem_host_get_device_pointer(at.as_ptr().cast(), 0) }?;
            Ok(words)
        })
    }

    /// The word that begins so many bytes from the start; one of those there are.
    fn offset(&self, at: usize) -> usize {
        debug_assert!(at.is_multiple_of(4) && at + 4 <= self.bytes);
        at.min(self.bytes - 4) & !3
    }

    /// The word, for the host.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: in the mapping (`offset`), which `self` keeps; aligned; and used by everybody as an atomic word.
        unsafe { &*self.at.as_ptr().add(self.offset(at)).cast::<AtomicU32>() }
    }

    /// Whether the word shows `value` or more, on a circle.
    pub(crate) fn shows(&self, at: usize, value: u32) -> bool {
        self.word(at).load(Ordering::Acquire).wrapping_sub(value).cast_signed() >= 0
    }
}

impl DeviceStream {
    /// Work put here after this call starts only once the word shows `value` or more, on a circle. Any store ends it.
    pub(crate) fn wait_word(&self, words: &SharedWords, at: usize, value: u32) -> Result<(), Error> {
        let wait = CuStreamMemOp::wait(words.address + words.offset(at) as u64, value);
        self.put_words("make a stream wait for another process", &mut [wait])
    }

    /// Writes these words, each with its value, when the stream comes here, behind everything that it wrote before.
    pub(crate) fn put_shared(&self, words: &SharedWords, all: &[(usize, u32)]) -> Result<(), Error> {
        let write = |(at, value): &(usize, u32)| {
            CuStreamMemOp::write(words.address + words.offset(*at) as u64, *value)
        };
        let mut all: Vec<_> = all.iter().map(write).collect();
        self.put_words("tell another process what a stream has come to", &mut all)
    }
}
