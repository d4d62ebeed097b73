//! A word that streams wait for and that another writes: order between what is on a stream and what will be.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use allstream_sys::cuda::{CU_STREAM_WAIT_VALUE_GEQ, CuDevicePtr};

use super::chores::drop_later;
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
    /// The furthest value that was put on a stream.
    furthest: u32,
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
        Ok(DeviceSignal { word: Arc::new(word), address, uses: HashMap::new(), furthest: 0, limit: STREAMS })
    }
}

/// How long a stream may take to come to the end of what has failed, before the host releases those that wait for it.
const RELEASE: Duration = Duration::from_millis(500);

fn word(memory: &PinnedBuf<u32>) -> &AtomicU32 {
    // SAFETY: a word of pinned memory, aligned, which lives as long as `memory`; after `new` everybody, devices too, uses it
    // as an atomic word only.
    unsafe { AtomicU32::from_ptr(memory.as_ptr().cast_mut()) }
}

/// The host writes the word, unless it shows as much already.
fn set(memory: &PinnedBuf<u32>, value: u32) {
    let further = |shown: u32| (value.wrapping_sub(shown).cast_signed() > 0).then_some(value);
    let _ = word(memory).fetch_update(Ordering::AcqRel, Ordering::Acquire, further);
}

impl DeviceSignal {
    /// Whether the word shows `value` or more.
    pub(crate) fn shows(&self, value: u32) -> bool {
        word(&self.word).load(Ordering::Acquire).wrapping_sub(value).cast_signed() >= 0
    }

    /// The host writes the word now.
    pub(crate) fn set(&self, value: u32) {
        set(&self.word, value);
    }

    /// Of what has failed: writes the word when `stream` comes here; and if it does not, because it may itself be held up by
    /// a stream that waits for the word, the host writes it after a while.
    pub(crate) fn release(&mut self, stream: &DeviceStream, value: u32) -> Result<(), Error> {
        let behind = stream.put_signal(self, value).and_then(|()| stream.record());
        insist(behind.inspect_err(|_| self.set(value))?, self.word.clone(), value);
        Ok(())
    }

    fn used(&mut self, stream: &DeviceStream) -> Result<(), Error> {
        if self.uses.len() >= self.limit && !self.uses.contains_key(&stream.0.id) {
            let is_over = |event: &DeviceEvent| event.is_complete().unwrap_or(false);
            self.uses.retain(|_, event| event.as_ref().is_some_and(|event| !is_over(event)));
            self.limit = STREAMS.max(2 * self.uses.len());
        }
        stream.record_in(self.uses.entry(stream.0.id).or_default())
    }
}

/// Writes the word now and then until the event is reached: what the stream had still to write may be less, and come in
/// between. The word stays until then; where nobody can tell, for ever.
fn insist(behind: DeviceEvent, word: Arc<PinnedBuf<u32>>, value: u32) {
    let later = behind.clone();
    let then = move |_: Outcome| {
        set(&word, value);
        match later.is_complete() {
            Ok(true) => drop_later(word),
            Ok(false) => insist(later, word, value),
            Err(_) => std::mem::forget(word),
        }
    };
    waiter::watch_until(behind, Some(Instant::now() + RELEASE), Box::new(then));
}

/// Drops it once the event is reached; where nobody can tell, never.
fn keep_until(event: DeviceEvent, word: Arc<PinnedBuf<u32>>) {
    let then = move |outcome: Outcome| match outcome {
        Outcome::Unknown(_) => std::mem::forget(word),
        _ => drop_later(word),
    };
    waiter::watch(event, Box::new(then));
}

impl Drop for DeviceSignal {
    fn drop(&mut self) {
        // Streams may still come to the word: it stays until they have.
        let uses = self.uses.drain().filter_map(|(_, event)| event);
        uses.for_each(|event| keep_until(event, self.word.clone()));
    }
}

impl DeviceStream {
    /// Work put here after this call starts only once the word shows `value` or more.
    pub(crate) fn wait_signal(&self, signal: &mut DeviceSignal, value: u32) -> Result<(), Error> {
        self.0.context.call("make a stream wait for a signal", |cuda| {
            // SAFETY: `self` keeps the stream; the word is there until all streams are past it (`drop`).
            unsafe {
                cuda.stream_wait_value32(*self.0.raw(), signal.address, value, CU_STREAM_WAIT_VALUE_GEQ)
            }
        })?;
        signal.used(self)
    }

    /// Writes the word when the stream comes here. Never less than was put before: operations that fail together are released in
    /// any order, and the word of the last one must end the waits for all.
    pub(crate) fn put_signal(&self, signal: &mut DeviceSignal, value: u32) -> Result<(), Error> {
        if value.wrapping_sub(signal.furthest).cast_signed() > 0 {
            signal.furthest = value;
        }
        let value = signal.furthest;
        self.0.context.call("signal the end of an operation", |cuda| {
            // SAFETY: as in `wait_signal`.
            unsafe { cuda.stream_write_value32(*self.0.raw(), signal.address, value, 0) }
        })?;
        signal.used(self)
    }
}
