//! Words of host memory that streams of devices in several processes write and wait for.
//!
//! They lie in memory that processes share, and each process registers them with its own devices (`cuMemHostRegister`).
//! A stream writes a word after its earlier work (`cuStreamWriteValue32`, after everything that the stream wrote before),
//! and a stream of another process waits for the word (`cuStreamWaitValue32`). Events between processes would not do: a
//! wait for an event is a wait for what was recorded at the call, so nobody can end it once the process that recorded it
//! has died. A word is memory: the host can end every wait for it by a plain store of a large enough value.

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

/// A page of words, registered with the driver until this is dropped.
pub(crate) struct SharedWords {
    context: Arc<Context>,
    at: NonNull<u8>,
    bytes: usize,
    address: CuDevicePtr,
    /// Keeps the memory mapped.
    _mapping: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory at `at` is only ever used as atomic words, and `_mapping` keeps it mapped; any thread may call the driver.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl Drop for SharedWords {
    fn drop(&mut self) {
        self.context.close("unregister the words that processes share", |cuda| {
            // SAFETY: `register` has registered the memory, once. If streams of this process have used the words, whoever drops this
            // has waited until the streams are past that (`retire`).
            unsafe { cuda.mem_host_unregister(self.at.as_ptr().cast()) }
        });
    }
}

impl SharedWords {
    /// Registers memory with the driver, as words for the device of `stream`.
    ///
    /// # Safety
    /// - `bytes` bytes at `at`, whole pages, stay mapped as long as `mapping` lives;
    /// - everybody uses them as atomic words of 32 bits only;
    /// - they are not registered with the driver yet.
    pub(crate) unsafe fn register(
        stream: &DeviceStream,
        (at, bytes): (NonNull<u8>, usize),
        mapping: Arc<dyn Any + Send + Sync>,
    ) -> Result<SharedWords, Error> {
        let context = &stream.0.context;
        context.call("register words that processes share", |cuda| {
            let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
            // SAFETY: the caller's promise. `mapping` keeps the memory mapped until `drop` has unregistered it.
            unsafe { cuda.mem_host_register(at.as_ptr().cast(), bytes, flags) }?;
            let context = context.clone();
            let mut words = SharedWords { context, at, bytes, address: 0, _mapping: mapping };
            // SAFETY: the memory was just registered with `CU_MEMHOSTREGISTER_DEVICEMAP`, so it has an address for devices.
            words.address = unsafe { cuda.mem_host_get_device_pointer(at.as_ptr().cast(), 0) }?;
            Ok(words)
        })
    }

    /// Returns `at`, the offset of a word in bytes. If no word begins there, it is a bug: without debug assertions another word's offset comes back.
    fn offset(&self, at: usize) -> usize {
        debug_assert!(at.is_multiple_of(4) && at + 4 <= self.bytes);
        at.min(self.bytes - 4) & !3
    }

    /// The word that begins at byte `at`, for the host.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `offset` gives an aligned place in the mapping, which `self` keeps, and everybody uses its words as atomic words.
        unsafe { &*self.at.as_ptr().add(self.offset(at)).cast::<AtomicU32>() }
    }

    /// Whether the word shows `value` or more, modulo 2^32: whether `word - value` is not negative as an `i32`.
    pub(crate) fn shows(&self, at: usize, value: u32) -> bool {
        self.word(at).load(Ordering::Acquire).wrapping_sub(value).cast_signed() >= 0
    }
}

impl DeviceStream {
    /// Work put on this stream after this call starts only once the word [shows](SharedWords::shows) `value` or more, whoever stores that.
    pub(crate) fn wait_word(&self, words: &SharedWords, at: usize, value: u32) -> Result<(), Error> {
        let wait = CuStreamMemOp::wait(words.address + words.offset(at) as u64, value);
        self.put_words("make a stream wait for another process", &mut [wait])
    }

    /// Makes the stream write words, each named by its offset in bytes and with its value, after everything that the stream writes before.
    pub(crate) fn put_shared(&self, words: &SharedWords, all: &[(usize, u32)]) -> Result<(), Error> {
        let write = |(at, value): &(usize, u32)| {
            CuStreamMemOp::write(words.address + words.offset(*at) as u64, *value)
        };
        let mut all: Vec<_> = all.iter().map(write).collect();
        self.put_words("tell another process how far a stream is", &mut all)
    }
}
