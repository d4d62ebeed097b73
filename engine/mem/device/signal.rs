//! A word that streams wait for and that another writes: order between what is on a stream and what will be.

use std::collections::HashMap;
use std::sync::Arc;

use allstream_sys::cuda::{CU_STREAM_WAIT_VALUE_GEQ, CuDevicePtr};

use super::pinned::PinnedBuf;
use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{self, Outcome};
use crate::error::Error;

/// A number that only grows, on a circle, in host memory that devices read and write.
pub(crate) struct DeviceSignal {
    word: Arc<PinnedBuf<u32>>,
    address: CuDevicePtr,
    /// By the number of a stream: the point behind what it last does with the word, which stands for all before it.
    uses: HashMap<u64, Option<DeviceEvent>>,
    /// At so many streams, those that are done with it are forgotten: streams come and go.
    limit: usize,
}

/// So many streams are remembered, at first.
const STREAMS: usize = 16;

impl DeviceSignal {
    /// Of this stream's device; it begins at 0.
    pub(crate) fn new(stream: &DeviceStream) -> Result<DeviceSignal, Error> {
        let context = &stream.0.context;
        let cuda = context.cuda;
        let has = cuda.has_stream_wait_value32()
            && cuda.has_stream_write_value32()
            && cuda.has_mem_host_get_device_pointer();
        if !has {
            let problem = "it has no cuStreamWaitValue32; update the NVIDIA driver, or await the operation";
            return Err(Error::Unavailable {
                what: "order with what is not on a stream yet".into(),
                problem: format!("{} is too old: {problem}", cuda.file()),
            });
        }
        let mut word = PinnedBuf::<u32>::zeroed(&stream.device(), 1)?;
        let at = word.as_mut_ptr();
        let address = context.call("make a signal", |cuda| {
            // SAFETY: pinned memory, for all devices, which `word` keeps.
            unsafe { cuda.mem_host_get_device_pointer(at.cast(), 0) }
        })?;
        Ok(DeviceSignal { word: Arc::new(word), address, uses: HashMap::new(), limit: STREAMS })
    }
}

impl DeviceSignal {
    fn used(&mut self, stream: &DeviceStream) -> Result<(), Error> {
        if self.uses.len() >= self.limit && !self.uses.contains_key(&stream.0.id) {
            let is_over = |event: &DeviceEvent| event.is_complete().unwrap_or(false);
            self.uses.retain(|_, event| event.as_ref().is_some_and(|event| !is_over(event)));
            self.limit = STREAMS.max(2 * self.uses.len());
        }
        stream.record_in(self.uses.entry(stream.0.id).or_default())
    }
}

impl Drop for DeviceSignal {
    fn drop(&mut self) {
        // Streams may still come to the word: it stays until they have.
        for event in self.uses.drain().filter_map(|(_, event)| event) {
            let word = self.word.clone();
            let then = move |outcome: Outcome| {
                if matches!(outcome, Outcome::Unknown(_)) {
                    std::mem::forget(word);
                }
            };
            waiter::watch(event, Box::new(then));
        }
    }
}

impl DeviceStream {
    /// Work put here after this call starts only once the word shows `value` or more.
    pub(crate) fn wait_signal(&self, signal: &mut DeviceSignal, value: u32) -> Result<(), Error> {
        self.0.context.call("make a stream wait for a signal", |cuda| {
            // SAFETY: `self` keeps the stream; the word is there until all streams are past it (`drop`).
            unsafe { cuda.stream_wait_value32(self.0.raw, signal.address, value, CU_STREAM_WAIT_VALUE_GEQ) }
        })?;
        signal.used(self)
    }

    /// Writes the word when the stream comes here.
    pub(crate) fn put_signal(&self, signal: &mut DeviceSignal, value: u32) -> Result<(), Error> {
        self.0.context.call("signal the end of an operation", |cuda| {
            // SAFETY: as in `wait_signal`.
            unsafe { cuda.stream_write_value32(self.0.raw, signal.address, value, 0) }
        })?;
        signal.used(self)
    }
}
