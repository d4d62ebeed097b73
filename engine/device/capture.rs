//! Keeps our calls from breaking captures of streams into graphs, elsewhere in the process.
//!
//! While one thread captures in the mode *global*, as PyTorch does, the driver refuses calls that it holds to be unsafe (to
//! query an event, to allocate, to load a kernel) on all threads, and such a call breaks the capture. Our calls are not
//! part of what is captured, as copies and operations on a captured stream are refused. So a thread of ours is *relaxed* during
//! its calls (`cuThreadExchangeStreamCaptureMode`): then nothing is refused, and nothing is broken.

use std::marker::PhantomData;

use allstream_sys::cuda::{CU_STREAM_CAPTURE_MODE_RELAXED, CuResult, Cuda};

/// As long as this is there, this thread's calls break no capture. Its drop gives the thread its former mode back.
pub(super) struct Relaxed {
    /// The thread's former mode, if it is to be given back.
    before: Option<(&'static Cuda, u32)>,
    /// Keeps this value on its thread.
    _here: PhantomData<*const ()>,
}

/// Relaxes this thread. A driver that cannot do so is older than CUDA 10.1: there a capture concerns its own thread only.
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
            // (When the process ends and the driver is gone, no mode is left to give back.)
            && error.code != CuResult::DEINITIALIZED
        {
            tracing::warn!("the thread's mode of stream capture could not be set back: {error}");
        }
    }
}
