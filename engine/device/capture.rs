//! Captures of streams into graphs, elsewhere in the process.
//!
//! While one thread captures in the mode *global* (PyTorch's), calls that the driver holds to be unsafe are refused in all
//! threads, and break that capture: to ask for an event, to allocate, to load a kernel. What is called here is of no stream
//! that is captured (those are refused), so the threads that call are *relaxed* meanwhile
//! (`cuThreadExchangeStreamCaptureMode`): nothing is refused, and nothing broken.

use std::marker::PhantomData;

use allstream_sys::cuda::{CU_STREAM_CAPTURE_MODE_RELAXED, CuResult, Cuda};

/// As long as this is there, this thread's calls break no capture. Then the thread is as it was.
pub(super) struct Relaxed {
    /// What the thread was, where that is to come back.
    before: Option<(&'static Cuda, u32)>,
    /// The thread's.
    _here: PhantomData<*const ()>,
}

/// Relaxes this thread. A driver that cannot has captures in one thread only (before CUDA 10.1).
pub(super) fn relaxed(cuda: &'static Cuda) -> Relaxed {
    let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the driver reads and writes the mode within the call.
    let changed = cuda.has_thread_exchange_stream_capture_mode()
        && unsafe { cuda.thread_exchange_stream_capture_mode(&raw mut mode) }.is_ok();
    let before = (changed && mode != CU_STREAM_CAPTURE_MODE_RELAXED).then_some((cuda, mode));
    Relaxed { before, _here: PhantomData }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let Some((cuda, mut mode)) = self.before else { return };
        // SAFETY: as in `relaxed`, on the same thread.
        if let Err(error) = unsafe { cuda.thread_exchange_stream_capture_mode(&raw mut mode) }
            // (Where the process ends there is nothing to say.)
            && error.code != CuResult::DEINITIALIZED
        {
            tracing::warn!("{error}; this thread stays relaxed about captures");
        }
    }
}
