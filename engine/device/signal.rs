//! Words that streams write and wait for: order between what is on a stream and what will be, and what a rank's stream has come to.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use allstream_sys::cuda::{CU_STREAM_WAIT_VALUE_GEQ, CuDevicePtr};
use parking_lot::Mutex;

use super::chores::{drop_later, later};
use super::pinned::PinnedBuf;
use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{self, Outcome};
use crate::error::Error;

/// Which of the words.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Word {
    /// The last operation whose inputs the stream has come past.
    Begun,
    /// The last operation that the stream has come to the end of.
    Over,
}

/// Elements from one word to the next: each has a line of the processor's caches for itself.
const APART: usize = 32;

/// Two counters that only grow (they wrap, and are compared on a circle), in host memory that devices read and write. As a rule one stream
/// writes them; [`put_on`](DeviceSignal::put_on) lets another write [`Word::Over`]. Any stream may wait for that one, and the host reads both, and may write
/// them, without the driver.
pub(crate) struct DeviceSignal {
    memory: Arc<PinnedBuf<u32>>,
    address: CuDevicePtr,
    /// The stream that writes them.
    writer: DeviceStream,
    /// The furthest that was put on the stream as [`Word::Over`].
    furthest: AtomicU32,
    uses: Mutex<Uses>,
}

/// The streams that use the words, beside the writer.
struct Uses {
    /// By the number of a stream: the point behind its last use of them, which stands for all before it.
    points: HashMap<u64, Option<DeviceEvent>>,
    /// When so many streams are noted, those that are done with the words are forgotten: streams come and go.
    limit: usize,
}

/// The first such limit.
const STREAMS: usize = 16;

impl DeviceSignal {
    /// Words that begin at 0, which `writer` is to write.
    pub(crate) fn new(writer: &DeviceStream) -> Result<DeviceSignal, Error> {
        let context = &writer.0.context;
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
        let mut memory = PinnedBuf::<u32>::zeroed(&writer.device(), 2 * APART)?;
        let at = memory.as_mut_ptr();
        let address = context.call("make a signal", |cuda| {
            // SAFETY: pinned memory, for all devices, which `memory` keeps.
            unsafe { cuda.mem_host_get_device_pointer(at.cast(), 0) }
        })?;
        let uses = Mutex::new(Uses { points: HashMap::new(), limit: STREAMS });
        let (memory, writer, furthest) = (Arc::new(memory), writer.clone(), AtomicU32::new(0));
        Ok(DeviceSignal { memory, address, writer, furthest, uses })
    }
}

/// How long a stream may take to come to the end of what has failed, before the host releases those that wait for it.
const RELEASE: Duration = Duration::from_millis(500);

fn word(memory: &PinnedBuf<u32>, which: Word) -> &AtomicU32 {
    let at = memory.as_ptr().wrapping_add(which as usize * APART).cast_mut();
    // SAFETY: one of the words of pinned memory, aligned, which lives as long as `memory`; after `new` everybody, devices too, uses each
    // as an atomic word only.
    unsafe { AtomicU32::from_ptr(at) }
}

fn is_further(value: u32, than: u32) -> bool {
    value.wrapping_sub(than).cast_signed() > 0
}

/// The host writes a word, unless the word shows as much already.
fn set(memory: &PinnedBuf<u32>, which: Word, value: u32) {
    let further = |shown: u32| is_further(value, shown).then_some(value);
    let _ = word(memory, which).fetch_update(Ordering::AcqRel, Ordering::Acquire, further);
}

impl DeviceSignal {
    /// Whether the word shows `value` or more.
    pub(crate) fn shows(&self, which: Word, value: u32) -> bool {
        !is_further(value, word(&self.memory, which).load(Ordering::Acquire))
    }

    /// The host writes the word now.
    pub(crate) fn set(&self, which: Word, value: u32) {
        set(&self.memory, which, value);
    }

    /// Work put on `stream` after this call starts only once [`Word::Over`] shows `value` or more.
    pub(crate) fn is_awaited_by(&self, stream: &DeviceStream, value: u32) -> Result<(), Error> {
        stream.0.context.call("make a stream wait for a signal", |cuda| {
            let address = self.address(Word::Over);
            // SAFETY: `stream` keeps the driver's; the word is there until all streams are past it (`drop`).
            unsafe { cuda.stream_wait_value32(*stream.0.raw(), address, value, CU_STREAM_WAIT_VALUE_GEQ) }
        })?;
        self.used_by(stream)
    }

    /// Notes that the words are to stay until this stream has come past what was put there now.
    fn used_by(&self, stream: &DeviceStream) -> Result<(), Error> {
        let mut uses = self.uses.lock();
        let Uses { points, limit } = &mut *uses;
        if points.len() >= *limit && !points.contains_key(&stream.0.id) {
            let is_over = |event: &DeviceEvent| event.is_complete().unwrap_or(false);
            points.retain(|_, event| event.as_ref().is_some_and(|event| !is_over(event)));
            *limit = STREAMS.max(2 * points.len());
        }
        stream.record_in(points.entry(stream.0.id).or_default())
    }

    /// Puts a write of the word on the writer's stream. For [`Word::Over`] never less than was put before: operations that fail together are
    /// released in any order, and the last write must end the waits for all. One thread at a time calls this.
    pub(crate) fn put(&self, which: Word, value: u32) -> Result<(), Error> {
        let mut value = value;
        if matches!(which, Word::Over) {
            if is_further(value, self.furthest.load(Ordering::Relaxed)) {
                self.furthest.store(value, Ordering::Relaxed);
            }
            value = self.furthest.load(Ordering::Relaxed);
        }
        self.write(&self.writer, which, value)
    }

    /// Another stream writes [`Word::Over`] when it comes here.
    pub(crate) fn put_on(&self, stream: &DeviceStream, value: u32) -> Result<(), Error> {
        self.write(stream, Word::Over, value)?;
        self.used_by(stream)
    }

    fn write(&self, stream: &DeviceStream, which: Word, value: u32) -> Result<(), Error> {
        stream.0.context.call("signal what a stream has come to", |cuda| {
            // SAFETY: `stream` keeps the driver's; the words are there until all streams are past them (`drop`).
            unsafe { cuda.stream_write_value32(*stream.0.raw(), self.address(which), value, 0) }
        })
    }

    fn address(&self, which: Word) -> CuDevicePtr {
        self.address + (which as usize * APART * size_of::<u32>()) as u64
    }

    /// Of what has failed: writes [`Word::Over`] when the writer comes here; and if it does not, because it may itself be held up by
    /// a stream that waits for the word, the host writes it after a while.
    pub(crate) fn release(&self, value: u32) -> Result<(), Error> {
        let behind = self.put(Word::Over, value).and_then(|()| self.writer.record());
        insist(behind.inspect_err(|_| self.set(Word::Over, value))?, self.memory.clone(), value);
        Ok(())
    }
}

/// Writes the word again and again, [`RELEASE`] apart, until the stream has come to the event: a write that is still on the stream may put a
/// smaller number there. The words stay until then; where nobody can tell, for ever.
fn insist(behind: DeviceEvent, memory: Arc<PinnedBuf<u32>>, value: u32) {
    let later = behind.clone();
    let then = move |_: Outcome| {
        set(&memory, Word::Over, value);
        match later.is_complete() {
            Ok(true) => drop_later(memory),
            Ok(false) => insist(later, memory, value),
            Err(_) => std::mem::forget(memory),
        }
    };
    waiter::watch_until(behind, Some(Instant::now() + RELEASE), Box::new(then));
}

/// Drops them once the event is reached; where nobody can tell, never.
fn keep_until(event: DeviceEvent, memory: Arc<PinnedBuf<u32>>) {
    let then = move |outcome: Outcome| match outcome {
        Outcome::Unknown(_) => std::mem::forget(memory),
        _ => drop_later(memory),
    };
    waiter::watch(event, Box::new(then));
}

impl Drop for DeviceSignal {
    /// Streams may still come to the words: those stay until the streams have. The driver is asked by a thread that nobody waits for.
    fn drop(&mut self) {
        let points: Vec<_> = self.uses.get_mut().points.drain().filter_map(|(_, event)| event).collect();
        let (memory, writer) = (self.memory.clone(), self.writer.clone());
        later(Duration::ZERO, move || {
            points.into_iter().for_each(|event| keep_until(event, memory.clone()));
            match writer.point() {
                Ok(event) => keep_until(event, memory),
                // No mark can be put there, so this thread waits; and where that fails, too, the words stay for good.
                Err(_) if writer.synchronize().is_ok() => drop(memory),
                Err(_) => std::mem::forget(memory),
            }
        });
    }
}
