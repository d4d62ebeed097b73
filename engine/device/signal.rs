//! Words that streams write and wait for: order between what is on a stream and what will be, and what a rank's stream has come to.

use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use allstream_sys::cuda::{CuDevicePtr, CuStreamMemOp};
use parking_lot::Mutex;

use super::chores::{drop_later, later};
use super::context::Line;
use super::driver::is_loss;
use super::pinned::PinnedBuf;
use super::stream::{DeviceEvent, DeviceStream};
use super::waiter::{self, Outcome};
use crate::error::Error;

/// Which of the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The last operation whose inputs the rank's stream has come past, of those whose inputs have no number of [`Word::Input`].
    Begun,
    /// The last input that the caller's stream has come past, as [`DeviceSignal::put_input`] numbers inputs.
    Input,
    /// The last operation that rank 0's stream has come to the end of, of those that one launch on that stream folds for all ranks.
    OverForAll,
    /// The last operation that the stream of the rank named here has come to the end of, of those for which each rank's stream works.
    Over(usize),
}

/// [`Word::Begun`] and [`Word::Input`] have a line of the processor's caches each: they are so many elements apart. The words of ends follow
/// one another behind these, as the host reads them together.
const APART: usize = 32;
/// Where the words of ends begin.
const ENDS: usize = 2 * APART;

impl Word {
    /// Where it is, in elements.
    fn at(self) -> usize {
        match self {
            Word::Begun => 0,
            Word::Input => APART,
            Word::OverForAll => ENDS,
            Word::Over(rank) => ENDS + 1 + rank,
        }
    }
}

/// The words of one rank, in host memory that devices read and write: counters that only grow (they wrap, and are compared on a circle). The
/// rank's own stream writes [`Word::Begun`], the caller's stream [`Word::Input`], each rank's stream its own [`Word::Over`], and rank 0's
/// [`Word::OverForAll`]. Any stream may wait for them, and the host reads them, and may write them, without the driver.
pub(crate) struct DeviceSignal {
    memory: Arc<Words>,
    address: CuDevicePtr,
    /// The rank's own stream.
    writer: DeviceStream,
    /// The streams that write words of ends, each with its word, where they are known.
    others: OnceLock<Vec<(Word, DeviceStream)>>,
    /// For each word of ends, in their order: the largest number whose write was put on a stream.
    furthest: Box<[AtomicU32]>,
    /// The last number of [`Word::Input`] whose write was put on a stream.
    input: AtomicU32,
    /// The stream that it was put on.
    last_input: Mutex<Weak<Line>>,
    uses: Mutex<Uses>,
}

/// The memory of the words. Everybody, devices too, uses each of them as an atomic word only: so no slice of them may exist once one is in use.
struct Words {
    at: AtomicPtr<u32>,
    _memory: PinnedBuf<u32>,
}

/// The streams that use the words, beside the writer.
struct Uses {
    /// By the number of a stream: the point behind its last use of them, which stands for all before it.
    points: HashMap<u64, Option<DeviceEvent>>,
    /// When so many streams are noted, those that are done with the words are forgotten: streams come and go.
    limit: usize,
    /// The point behind some use could not be marked, so nobody can tell when that stream is done with the words: their memory stays for good.
    is_lost: bool,
}

/// The first such limit.
const STREAMS: usize = 16;
/// The driver takes lists of fewer than 256 words (`cuStreamBatchMemOp`).
const LIST: usize = 255;
/// How long it is from one look at words whose memory waits to be freed to the next.
const LOOK: Duration = Duration::from_millis(10);
/// How many times they are looked at.
const LOOKS: u32 = 1000;
const SIGNAL: &str = "signal what a stream has come to";

impl DeviceSignal {
    /// The words of a rank whose stream is `writer`, in a communicator of `ranks` ranks. They begin at 0.
    pub(crate) fn new(writer: &DeviceStream, ranks: usize) -> Result<DeviceSignal, Error> {
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
        let mut memory = PinnedBuf::<u32>::zeroed(&writer.device(), Word::Over(ranks).at())?;
        let at = memory.as_mut_ptr();
        let address = context.call("make a signal", |cuda| {
            // SAFETY: pinned memory, for all devices, which `memory` keeps.
            unsafe { cuda.mem_host_get_device_pointer(at.cast(), 0) }
        })?;
        Ok(DeviceSignal {
            memory: Arc::new(Words { at: AtomicPtr::new(at), _memory: memory }),
            address,
            writer: writer.clone(),
            others: OnceLock::new(),
            furthest: (ENDS..Word::Over(ranks).at()).map(|_| AtomicU32::new(0)).collect(),
            input: AtomicU32::new(0),
            last_input: Mutex::default(),
            uses: Mutex::new(Uses { points: HashMap::new(), limit: STREAMS, is_lost: false }),
        })
    }

    /// Notes which stream writes which of the words of ends.
    pub(crate) fn is_written_by(&self, others: impl Iterator<Item = (Word, DeviceStream)>) {
        let _ = self.others.set(others.collect());
    }
}

/// How long a stream may take to come to the end of what has failed, before the host releases those that wait for it.
const RELEASE: Duration = Duration::from_millis(500);

fn word(memory: &Words, which: Word) -> &AtomicU32 {
    let at = memory.at.load(Ordering::Relaxed).wrapping_add(which.at());
    // SAFETY: one of the words, aligned, in memory that lives as long as `memory`; it is used as an atomic word only ([`Words`]).
    unsafe { AtomicU32::from_ptr(at) }
}

fn is_further(value: u32, than: u32) -> bool {
    value.wrapping_sub(than).cast_signed() > 0
}

/// Writes a number that only grows, unless there is as much already.
fn raise(at: &AtomicU32, value: u32) {
    let further = |shown: u32| is_further(value, shown).then_some(value);
    let _ = at.fetch_update(Ordering::AcqRel, Ordering::Acquire, further);
}

impl DeviceSignal {
    /// Whether the word shows `value` or more.
    pub(crate) fn shows(&self, which: Word, value: u32) -> bool {
        !is_further(value, word(&self.memory, which).load(Ordering::Acquire))
    }

    /// The host writes the word now, unless it shows as much already.
    pub(crate) fn set(&self, which: Word, value: u32) {
        raise(word(&self.memory, which), value);
    }

    /// For a stream that is to wait until the word shows `value` or more. The caller sees to it that the words stay until then.
    pub(crate) fn wait(&self, which: Word, value: u32) -> CuStreamMemOp {
        CuStreamMemOp::wait(self.address(which), value)
    }

    /// For a stream that is to write the word. A word of ends gets no smaller number than was put before: operations that fail together are
    /// released in any order, and the last write must end the waits for all. For a word of ends only one thread at a time calls this. For
    /// [`Word::Over`] it is the one that carries out the commands of the rank whose stream writes the word; for [`Word::OverForAll`], the one
    /// that carries out the command by which the last rank arrives ([`Arrivals`](super::arrivals::Arrivals)), or, between two of these, rank
    /// 0's commands. Once these commands are cut and none is being carried out, it is the one that ends the communicator of these words.
    pub(crate) fn write(&self, which: Word, value: u32) -> CuStreamMemOp {
        let mut value = value;
        if let Some(furthest) = which.at().checked_sub(ENDS).map(|at| &self.furthest[at]) {
            raise(furthest, value);
            value = furthest.load(Ordering::Acquire);
        }
        CuStreamMemOp::write(self.address(which), value)
    }

    /// Work put on `stream` after this call starts only once each of these words shows `value` or more.
    pub(crate) fn is_awaited_by(
        &self,
        stream: &DeviceStream,
        words: impl Iterator<Item = Word>,
        value: u32,
    ) -> Result<(), Error> {
        let mut all: Vec<_> = words.map(|which| self.wait(which, value)).collect();
        self.used_by(stream, stream.put_words("make a stream wait for a signal", &mut all))
    }

    /// Notes that the words are to stay until this stream has come past what was put there now. `put`: whether all of it could be put there; after
    /// an error some of it may be there.
    fn used_by(&self, stream: &DeviceStream, put: Result<(), Error>) -> Result<(), Error> {
        let mut uses = self.uses.lock();
        let Uses { points, limit, is_lost } = &mut *uses;
        if points.len() >= *limit && !points.contains_key(&stream.0.id) {
            let is_over = |event: &DeviceEvent| event.is_complete().unwrap_or(false);
            points.retain(|_, event| event.as_ref().is_some_and(|event| !is_over(event)));
            *limit = STREAMS.max(2 * points.len());
        }
        let marked = stream.record_in(points.entry(stream.0.id).or_default());
        *is_lost |= marked.is_err();
        put.and(marked)
    }

    /// Has a stream that is no rank's own write a word behind what it holds now.
    pub(crate) fn put_on(&self, stream: &DeviceStream, which: Word, value: u32) -> Result<(), Error> {
        self.used_by(stream, stream.put_words(SIGNAL, &mut [self.write(which, value)]))
    }

    /// Has a stream write the next number of [`Word::Input`] behind what it holds now, and returns that number. The stream is not among the
    /// noted uses, as the words stay until they show the last number. `None`: another stream has still to write one, so the order might break.
    pub(crate) fn put_input(&self, stream: &DeviceStream) -> Result<Option<u32>, Error> {
        let mut last = self.last_input.lock();
        // (While a `Weak` refers to a line, no other line can have its address.)
        if last.as_ptr() != Arc::as_ptr(&stream.0) && !self.shows_all_inputs() {
            return Ok(None);
        }
        let value = self.input.load(Ordering::Acquire).wrapping_add(1);
        stream.put_words(SIGNAL, &mut [self.write(Word::Input, value)])?;
        raise(&self.input, value);
        *last = Arc::downgrade(&stream.0);
        Ok(Some(value))
    }

    /// Whether the word shows the last of the numbers of [`Word::Input`] that streams were to write.
    fn shows_all_inputs(&self) -> bool {
        self.shows(Word::Input, self.input.load(Ordering::Acquire))
    }

    fn address(&self, which: Word) -> CuDevicePtr {
        self.address + (which.at() * size_of::<u32>()) as u64
    }

    /// The streams that write words of ends, each with its word; none if they are not known yet.
    fn writers(&self) -> impl Iterator<Item = (Word, &DeviceStream)> {
        let others = self.others.get().into_iter().flatten();
        others.map(|(which, stream)| (*which, stream))
    }

    /// After a failure: has all ranks' streams write their words of ends behind what they hold now. If one has not come there after a while (it
    /// may itself be held up by a stream that waits for the word), the host writes the word.
    pub(crate) fn release(&self, value: u32) -> Result<(), Error> {
        let mut result = Ok(());
        for (which, stream) in self.writers() {
            let behind = stream.put_words(SIGNAL, &mut [self.write(which, value)]);
            match behind.and_then(|()| stream.record()) {
                Ok(behind) => insist(behind, self.memory.clone(), which, value),
                Err(error) => {
                    self.set(which, value);
                    if *stream == self.writer && is_loss(&error) {
                        self.release_inputs(value);
                    }
                    result = Err(error);
                }
            }
        }
        result
    }

    /// The rank's device takes nothing more, so its streams will not write the words that other ranks' streams, on devices that still work, wait
    /// for before they begin: the host writes these.
    fn release_inputs(&self, value: u32) {
        self.set(Word::Begun, value);
        self.set(Word::Input, self.input.load(Ordering::Acquire));
    }

    /// The host ends all waits for operations up to this one now.
    pub(crate) fn release_now(&self, value: u32) {
        self.writers().for_each(|(which, _)| self.set(which, value));
    }
}

/// Writes the word again and again, [`RELEASE`] apart, until the stream has come to the event: a write that is still on the stream may put a
/// smaller number there. The words stay until then; where nobody can tell, for ever.
fn insist(behind: DeviceEvent, memory: Arc<Words>, which: Word, value: u32) {
    let later = behind.clone();
    let then = move |_: Outcome| {
        raise(word(&memory, which), value);
        match later.is_complete() {
            Ok(true) => drop_later(memory),
            Ok(false) => insist(later, memory, which, value),
            Err(_) => std::mem::forget(memory),
        }
    };
    waiter::watch_until(behind, Some(Instant::now() + RELEASE), Box::new(then));
}

/// Drops the words' memory once the event is reached; if nobody can tell whether it is, never.
fn keep_until(event: DeviceEvent, memory: Arc<Words>) {
    let then = move |outcome: Outcome| match outcome {
        Outcome::Unknown(_) => std::mem::forget(memory),
        _ => drop_later(memory),
    };
    waiter::watch(event, Box::new(then));
}

/// Drops the words' memory once the word shows this value, if it does within so many looks. Otherwise it stays for good.
fn keep_until_shown(memory: Arc<Words>, which: Word, value: u32, looks: u32) {
    later(LOOK, move || match is_further(value, word(&memory, which).load(Ordering::Acquire)) {
        true if looks == 0 => std::mem::forget(memory),
        true => keep_until_shown(memory, which, value, looks - 1),
        false => drop(memory),
    });
}

impl Drop for DeviceSignal {
    /// Streams may still use the words, so these stay until the streams have come past that. A thread that nobody waits for asks the driver.
    fn drop(&mut self) {
        if self.uses.get_mut().is_lost {
            std::mem::forget(self.memory.clone());
        }
        let mut input = None;
        if !self.shows_all_inputs() {
            input = self.last_input.get_mut().upgrade().map(DeviceStream);
            if input.is_none() {
                // The stream is gone for the program, and its work goes on.
                keep_until_shown(self.memory.clone(), Word::Input, *self.input.get_mut(), LOOKS);
            }
        }
        let points: Vec<_> = self.uses.get_mut().points.drain().filter_map(|(_, event)| event).collect();
        let mut writers = vec![self.writer.clone()];
        for (_, stream) in self.writers() {
            // The stream that writes `OverForAll` also writes an `Over`.
            if !writers.contains(stream) {
                writers.push(stream.clone());
            }
        }
        writers.extend(input);
        let memory = self.memory.clone();
        later(Duration::ZERO, move || {
            points.into_iter().for_each(|event| keep_until(event, memory.clone()));
            for writer in writers {
                let memory = memory.clone();
                match writer.point() {
                    Ok(event) => keep_until(event, memory),
                    // No mark can be put there, so this thread waits; and where that fails, too, the words stay for good.
                    Err(_) if writer.synchronize().is_ok() => drop(memory),
                    Err(_) => std::mem::forget(memory),
                }
            }
        });
    }
}

impl DeviceStream {
    /// Puts these waits for words and writes of words on the stream, in the order of the list: with few calls of the driver, if it takes lists.
    /// After an error the first of them may be on the stream.
    pub(crate) fn put_words(&self, doing: &str, all: &mut [CuStreamMemOp]) -> Result<(), Error> {
        if all.is_empty() {
            return Ok(());
        }
        if self.0.context.flushes {
            all.iter_mut().for_each(CuStreamMemOp::flush);
        }
        self.0.context.call_plainly(doing, |cuda| {
            let stream = self.0.raw();
            if all.len() > 1 && cuda.has_stream_batch_mem_op() {
                return all.chunks_mut(LIST).try_for_each(|list| {
                    // SAFETY: `self` keeps the stream; the driver reads so many elements within the call; each names a word of 32 bits that
                    // is there until all streams are past it (`DeviceSignal::drop`, `SharedWords::drop`).
                    unsafe { cuda.stream_batch_mem_op(*stream, list.len() as u32, list.as_mut_ptr(), 0) }
                });
            }
            all.iter().try_for_each(|op| {
                let (at, value) = (op.address(), op.value());
                match op.is_wait() {
                    // SAFETY: as above.
                    true => unsafe { cuda.stream_wait_value32(*stream, at, value, op.flags()) },
                    // SAFETY: as above.
                    false => unsafe { cuda.stream_write_value32(*stream, at, value, op.flags()) },
                }
            })
        })
    }
}
