//! Words that streams write and wait for: order between what is on a stream and what will be, and what a rank's stream has come to.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
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
    /// The last operation whose inputs the rank's stream has come past, of those whose inputs no word of their own counts.
    Begun,
    /// The last input that the caller's stream has come past. What counts inputs is [`PeerDevice`](super::links::peer::PeerDevice).
    Input,
    /// The last operation, of those that one launch folds for all ranks, that the stream for these launches has come to the end of: rank 0's.
    OverForAll,
    /// The last operation that the stream of this rank has come to the end of, of those for which each rank's stream works.
    Over(usize),
}

/// [`Word::Begun`] and [`Word::Input`] have a line of the processor's caches each: they are so many elements apart. The words of ends follow one another
/// behind these, as the host reads them together.
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

/// Counters that only grow (they wrap, and are compared on a circle), in host memory that devices read and write: those of one rank. As a rule its own
/// stream writes them, and the streams of other ranks theirs of [`Word::Over`], and [`Word::OverForAll`]. Any stream may wait for them, and the host reads them, and may
/// write them, without the driver.
pub(crate) struct DeviceSignal {
    memory: Arc<PinnedBuf<u32>>,
    address: CuDevicePtr,
    /// The rank's own stream.
    writer: DeviceStream,
    /// The streams that write words of ends, each with its word, where they are known.
    others: OnceLock<Vec<(Word, DeviceStream)>>,
    /// The furthest that was put on a stream, of each word of ends, in their order.
    furthest: Box<[AtomicU32]>,
    /// The furthest that was put on a stream as [`Word::Input`].
    input: AtomicU32,
    /// The stream that it was put on.
    last_input: Mutex<Weak<Line>>,
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
/// How often words are looked at that wait to be given back.
const LOOK: Duration = Duration::from_millis(10);
/// And how many times.
const LOOKS: u32 = 1000;
const SIGNAL: &str = "signal what a stream has come to";

impl DeviceSignal {
    /// Words that begin at 0, those of a rank among so many, whose stream is `writer`.
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
            memory: Arc::new(memory),
            address,
            writer: writer.clone(),
            others: OnceLock::new(),
            furthest: (ENDS..Word::Over(ranks).at()).map(|_| AtomicU32::new(0)).collect(),
            input: AtomicU32::new(0),
            last_input: Mutex::default(),
            uses: Mutex::new(Uses { points: HashMap::new(), limit: STREAMS }),
        })
    }

    /// These streams each write the word beside them, one of ends, here.
    pub(crate) fn is_written_by(&self, others: impl Iterator<Item = (Word, DeviceStream)>) {
        let _ = self.others.set(others.collect());
    }
}

/// How long a stream may take to come to the end of what has failed, before the host releases those that wait for it.
const RELEASE: Duration = Duration::from_millis(500);

fn word(memory: &PinnedBuf<u32>, which: Word) -> &AtomicU32 {
    let at = memory.as_ptr().wrapping_add(which.at()).cast_mut();
    // SAFETY: one of the words of pinned memory, aligned, which lives as long as `memory`; after `new` everybody, devices too, uses each
    // as an atomic word only.
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

    /// For a stream that is to write the word. For a word of ends never less than was put before: operations that fail together are
    /// released in any order, and the last write must end the waits for all. One thread at a time calls this for a word of [`Word::Over`]: the one that carries out the commands of
    /// the rank that writes the word, or, once those commands are cut and none is under way, the one that ends the page's own communicator. For [`Word::OverForAll`]
    /// that first one is whoever carries out the command by which the last rank arrives ([`Arrivals`](super::arrivals::Arrivals)), or rank 0's commands between two such.
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
        stream.put_words("make a stream wait for a signal", &mut all)?;
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

    /// A stream that is no rank's writes a word when it comes here.
    pub(crate) fn put_on(&self, stream: &DeviceStream, which: Word, value: u32) -> Result<(), Error> {
        stream.put_words(SIGNAL, &mut [self.write(which, value)])?;
        self.used_by(stream)
    }

    /// Has a stream write the next number of [`Word::Input`], which is returned, when it comes here. Nothing is noted of the stream, as the words
    /// stay until they show the last of these numbers. `None`: another stream has still to write one, and numbers might not come in their order.
    pub(crate) fn put_input(&self, stream: &DeviceStream) -> Result<Option<u32>, Error> {
        let mut last = self.last_input.lock();
        // (A line that is remembered, even weakly, has its address for itself.)
        if last.as_ptr() != Arc::as_ptr(&stream.0) && !self.shows_all_inputs() {
            return Ok(None);
        }
        let value = self.input.load(Ordering::Acquire).wrapping_add(1);
        stream.put_words(SIGNAL, &mut [self.write(Word::Input, value)])?;
        raise(&self.input, value);
        *last = Arc::downgrade(&stream.0);
        Ok(Some(value))
    }

    /// Whether streams have come past all inputs that they were to write.
    fn shows_all_inputs(&self) -> bool {
        self.shows(Word::Input, self.input.load(Ordering::Acquire))
    }

    fn address(&self, which: Word) -> CuDevicePtr {
        self.address + (which.at() * size_of::<u32>()) as u64
    }

    /// The streams that write words of ends, with these, as far as they are known.
    fn writers(&self) -> impl Iterator<Item = (Word, &DeviceStream)> {
        let others = self.others.get().into_iter().flatten();
        others.map(|(which, stream)| (*which, stream))
    }

    /// Of what has failed: has all ranks' streams write their words of ends when they come here; and if one does not, because it may itself be held
    /// up by a stream that waits for the word, the host writes it after a while.
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

    /// The rank's device takes nothing more, so none of its streams will write what other ranks' streams wait for before they begin, on devices that are
    /// still there: the host does.
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
fn insist(behind: DeviceEvent, memory: Arc<PinnedBuf<u32>>, which: Word, value: u32) {
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

/// Drops them once the event is reached; where nobody can tell, never.
fn keep_until(event: DeviceEvent, memory: Arc<PinnedBuf<u32>>) {
    let then = move |outcome: Outcome| match outcome {
        Outcome::Unknown(_) => std::mem::forget(memory),
        _ => drop_later(memory),
    };
    waiter::watch(event, Box::new(then));
}

/// Drops them once the word shows this, if it does within so many looks. Otherwise they stay for good.
fn keep_until_shown(memory: Arc<PinnedBuf<u32>>, which: Word, value: u32, looks: u32) {
    later(LOOK, move || match is_further(value, word(&memory, which).load(Ordering::Acquire)) {
        true if looks == 0 => std::mem::forget(memory),
        true => keep_until_shown(memory, which, value, looks - 1),
        false => drop(memory),
    });
}

impl Drop for DeviceSignal {
    /// Streams may still come to the words: those stay until the streams have. The driver is asked by a thread that nobody waits for.
    fn drop(&mut self) {
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
            // The one for all ranks is one of theirs, too.
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
    /// Puts waits for words and writes of words here, in this order: with one call of the driver, if it takes lists.
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
                let count = all.len() as u32;
                // SAFETY: `self` keeps the stream; the driver reads so many elements within the call; each names a word of 32 bits that is
                // there until all streams are past it (`DeviceSignal::drop`, `SharedWords::drop`).
                return unsafe { cuda.stream_batch_mem_op(*stream, count, all.as_mut_ptr(), 0) };
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
