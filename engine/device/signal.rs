//! Words of pinned host memory that streams write and wait for. The host reads in them how far a stream has come. And unlike an event, a word can be
//! waited for before the work that is to write it is on any stream.

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

/// One of a rank's words. All but [`Word::Input`] show the number of an operation, plus 1 ([`value`](super::links::starts::value)). Now and then an
/// operation has all of these written, also those that it does not need ([`REFRESH`](super::arrivals::REFRESH)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The rank's stream writes this behind its waits for an operation's inputs, if these inputs have no number of [`Word::Input`].
    Begun,
    /// The caller's stream writes this behind what it held at a call: the number that [`DeviceSignal::put_input`] has given to the call's inputs.
    Input,
    /// Rank 0's stream writes this behind each launch that folds an operation for all ranks.
    OverForAll,
    /// The stream of the rank named here writes this at the end of its work for an operation that no such launch folds.
    Over(usize),
}

/// The distance, in elements, from [`Word::Begun`] to [`Word::Input`], and from there to the end words. So they share no line of the CPU's caches.
const APART: usize = 32;
/// The element at which the *end words* begin: [`Word::OverForAll`] and all [`Word::Over`], one behind another, as the host reads them together.
const ENDS: usize = 2 * APART;

impl Word {
    /// The element of the rank's memory that is this word.
    fn at(self) -> usize {
        match self {
            Word::Begun => 0,
            Word::Input => APART,
            Word::OverForAll => ENDS,
            Word::Over(rank) => ENDS + 1 + rank,
        }
    }
}

/// The words of one rank, in pinned host memory. Each stream writes growing numbers, which wrap and are compared modulo 2^32. The rank's own stream
/// writes [`Word::Begun`], the caller's stream [`Word::Input`], the stream of rank r [`Word::Over(r)`](Word::Over), and rank 0's
/// [`Word::OverForAll`]. Any stream may wait for the words. The host reads and writes them without the driver.
pub(crate) struct DeviceSignal {
    memory: Arc<Words>,
    address: CuDevicePtr,
    /// The rank's own stream.
    writer: DeviceStream,
    /// The streams that write end words, each with its word: once [`is_written_by`](Self::is_written_by) has told them.
    others: OnceLock<Vec<(Word, DeviceStream)>>,
    /// For each end word, in their order: the largest number for which [`write`](Self::write) has made a write.
    furthest: Box<[AtomicU32]>,
    /// The last number of [`Word::Input`] whose write was put on a stream, and that stream.
    input: AtomicU32,
    last_input: Mutex<Weak<Line>>,
    uses: Mutex<Uses>,
}

/// The memory of the words. Hosts and devices use each word only as an atomic one: so no slice of the words may exist once one is in use.
struct Words {
    at: AtomicPtr<u32>,
    _memory: PinnedBuf<u32>,
}

/// The streams that use the words, apart from the ranks' own streams and from those that only write [`Word::Input`].
struct Uses {
    /// By the number of a stream ([`Line::id`]): the point behind its last use of the words.
    points: HashMap<u64, Option<DeviceEvent>>,
    /// When so many streams are noted, those that are done with the words are forgotten: streams come and go.
    limit: usize,
    /// The point behind some use could not be marked, so nobody can tell when that stream is done with the words: their memory stays for good.
    is_lost: bool,
}

/// The first [`Uses::limit`].
const STREAMS: usize = 16;
/// The driver takes lists of fewer than 256 words (`cuStreamBatchMemOp`).
const LIST: usize = 255;
/// The time between two looks of [`keep_until_shown`].
const LOOK: Duration = Duration::from_millis(10);
/// After so many looks in vain, [`keep_until_shown`] gives up.
const LOOKS: u32 = 1000;
const SIGNAL: &str = "signal what a stream has come to";

impl DeviceSignal {
    /// Makes the words of a rank whose stream is `writer`, for `ranks` ranks; all show 0. An error: the driver is too old, or cannot pin memory.
    pub(crate) fn new(writer: &DeviceStream, ranks: usize) -> Result<DeviceSignal, Error> {
        let context = &writer.0.context;
        let cuda = context.cuda;
        let has = cuda.has_stream_wait_value32()
            && cuda.has_stream_write_value32()
            && cuda.has_mem_host_get_device_pointer();
        if !has {
            let problem = "it has no cuStreamWaitValue32; update the NVIDIA driver, or await the operation";
            return Err(Error::Unavailable {
                what: "a stream's wait for work that is not on a stream yet".into(),
                problem: format!("{} is too old: {problem}", cuda.file()),
            });
        }
        let mut memory = PinnedBuf::<u32>::zeroed(&writer.device(), Word::Over(ranks).at())?;
        let at = memory.as_mut_ptr();
        let address = context.call("make a signal", |cuda| {
            // SAFETY: `at` is the start of memory that the driver has pinned and mapped for all devices (`Context::pin`), and `memory` keeps it.
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

    /// Notes which stream writes which end word. Only the first call counts.
    pub(crate) fn is_written_by(&self, others: impl Iterator<Item = (Word, DeviceStream)>) {
        let _ = self.others.set(others.collect());
    }
}

/// After a failure: how long a stream may take to come to its write of an end word, before the host writes the word.
const RELEASE: Duration = Duration::from_millis(500);

fn word(memory: &Words, which: Word) -> &AtomicU32 {
    let at = memory.at.load(Ordering::Relaxed).wrapping_add(which.at());
    // SAFETY: `new` has made room for the words of all ranks, and callers name only ranks of the communicator: so this is an aligned word in pinned
    // memory, which `memory` keeps for as long as the result lives. Everybody uses it as an atomic word only ([`Words`]).
    unsafe { AtomicU32::from_ptr(at) }
}

fn is_further(value: u32, than: u32) -> bool {
    value.wrapping_sub(than).cast_signed() > 0
}

/// Stores `value`, unless the word shows as much or more already.
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

    /// The operation by which a stream waits until the word shows `value` or more. The caller sees to it that the words exist until then.
    pub(crate) fn wait(&self, which: Word, value: u32) -> CuStreamMemOp {
        CuStreamMemOp::wait(self.address(which), value)
    }

    /// The operation by which a stream writes the word. The number is `value`, or for an end word the largest that was given for the word so far:
    /// operations that fail together are released in any order, and the last write must end the waits for all. For the same reason one thread at a
    /// time makes writes of an end word and puts them on the stream. For [`Word::Over`] it carries out the commands of the rank whose stream writes
    /// the word; for [`Word::OverForAll`], the command by which the last rank arrives ([`Arrivals`](super::arrivals::Arrivals)) or, between two of
    /// these, rank 0's commands. After a failure `Binding::leave` has the words written when no such command is being carried out any more.
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

    /// Notes that the words must exist until this stream is past all that it holds now. `put` is the result of putting work with these words on the
    /// stream; after an error some of it may be there.
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

    /// Makes a stream write a word behind what it holds now, and notes that the stream uses the words.
    pub(crate) fn put_on(&self, stream: &DeviceStream, which: Word, value: u32) -> Result<(), Error> {
        self.used_by(stream, stream.put_words(SIGNAL, &mut [self.write(which, value)]))
    }

    /// Makes a stream write the next number of [`Word::Input`] behind what it holds now, and returns that number. This use is not noted, as the words
    /// are kept until they show the last number. `None`: another stream has yet to write its number, so the numbers might come in a wrong order.
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

    /// Whether [`Word::Input`] shows the last number that a stream was told to write there.
    fn shows_all_inputs(&self) -> bool {
        self.shows(Word::Input, self.input.load(Ordering::Acquire))
    }

    fn address(&self, which: Word) -> CuDevicePtr {
        self.address + (which.at() * size_of::<u32>()) as u64
    }

    /// The streams that write end words, each with its word; none if they are not known yet.
    fn writers(&self) -> impl Iterator<Item = (Word, &DeviceStream)> {
        let others = self.others.get().into_iter().flatten();
        others.map(|(which, stream)| (*which, stream))
    }

    /// After a failure: makes all ranks' streams write their end words behind what they hold now. If a stream has not come there after [`RELEASE`] (a
    /// stream that waits for the word may hold it up), the host writes the word. If the driver refuses the write, the host writes the word at once.
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

    /// The rank's device is lost, so neither the rank's stream nor the caller's will write the words that tell of this rank's inputs. The streams of
    /// other ranks, whose devices still work, wait for these words: the host writes them.
    fn release_inputs(&self, value: u32) {
        self.set(Word::Begun, value);
        self.set(Word::Input, self.input.load(Ordering::Acquire));
    }

    /// The host writes the end words now, which ends all waits for the ends of operations up to this one.
    pub(crate) fn release_now(&self, value: u32) {
        self.writers().for_each(|(which, _)| self.set(which, value));
    }
}

/// Makes the host write the word every [`RELEASE`] until the stream has come to the event, as a write that is still on the stream may put a smaller
/// number there. The memory is kept until then, or for good if nobody can tell.
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

/// Drops the words' memory once all work before the event is over; if nobody can tell whether it is, never.
fn keep_until(event: DeviceEvent, memory: Arc<Words>) {
    let then = move |outcome: Outcome| match outcome {
        Outcome::Unknown(_) => std::mem::forget(memory),
        _ => drop_later(memory),
    };
    waiter::watch(event, Box::new(then));
}

/// Drops the words' memory once the word shows this value. If it does not after this many more looks, the memory stays for good.
fn keep_until_shown(memory: Arc<Words>, which: Word, value: u32, looks: u32) {
    later(LOOK, move || match is_further(value, word(&memory, which).load(Ordering::Acquire)) {
        true if looks == 0 => std::mem::forget(memory),
        true => keep_until_shown(memory, which, value, looks - 1),
        false => drop(memory),
    });
}

impl Drop for DeviceSignal {
    /// Streams may still use the words, so the memory is kept until they are past that. The chores thread asks the driver, which may block.
    fn drop(&mut self) {
        if self.uses.get_mut().is_lost {
            std::mem::forget(self.memory.clone());
        }
        let mut input = None;
        if !self.shows_all_inputs() {
            input = self.last_input.get_mut().upgrade().map(DeviceStream);
            if input.is_none() {
                // Nobody has a handle of that stream any more, but the driver still does the work on it.
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
                    // No event can be recorded there, so this thread waits for the stream; if that fails, too, the memory stays for good.
                    Err(_) if writer.synchronize().is_ok() => drop(memory),
                    Err(_) => std::mem::forget(memory),
                }
            }
        });
    }
}

impl DeviceStream {
    /// Puts these waits for words and writes of words on the stream, in the order of the list: with few calls of the driver, if it takes lists.
    /// After an error some of them, from the first one on, may be on the stream.
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
                    let count = list.len() as u32;
                    // SAFETY: `self` keeps the stream; the driver reads `count` elements within the call; each names a word of 32 bits. The words
                    // exist until all streams are past them: see the drop of `DeviceSignal`, and `retire` for `SharedWords`.
                    unsafe { cuda.stream_batch_mem_op(*stream, count, list.as_mut_ptr(), 0) }
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
