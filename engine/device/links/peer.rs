//! Links between ranks of one process whose devices touch each other's memory: they share a device, or their devices are peers. Links
//! between processes ([`super::ipc`]) do the same with words in shared memory in place of events.
//!
//! The hosts' side is a ring of descriptors, as in [`crate::link::local`]: each descriptor lends a piece of the sender's device memory.
//! Where a step of a plan reads a frame, two events beside the frame's cell order the devices. The sender records `ready` on its stream before
//! it posts, and the receiver's stream waits for `ready` before it reads. The receiver records `done` before it releases, and the sender's
//! stream waits for `done` before it writes to the memory again. So "posted" and "released" mean *put on a stream*, and a rank's stream is
//! never made to wait for what is not on a stream yet: no host has to do anything for it to go on, whatever becomes of the ranks.
//!
//! A loan, which is to be folded ([`LinkTx::lend`]), has events only if peers must wait for the lender's own stream. Else words say when the
//! inputs of a whole operation are there ([`PeerDevice::wait_for_start`]), and when each rank's stream has come to the operation's end
//! ([`PeerDevice::over_for`]). That takes far fewer calls of the driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use allstream_sys::cuda::CuStreamMemOp;
use parking_lot::Mutex;

use crate::commands::Commands;
use crate::device::arrivals::{Arrivals, REFRESH};
use crate::device::current::keep;
use crate::device::inputs::Inputs;
use crate::device::links::starts::{Start, Starts, value};
use crate::device::queues::{Probe, stream_apart};
use crate::device::signal::{DeviceSignal, Word};
use crate::device::stream::{DeviceEvent, DeviceStream};
use crate::error::Error;
use crate::link::cells::{Descriptor, RawRing};
use crate::link::local::Doorbell;
use crate::link::ring::{CELLS, CLOSED, Consumer, Producer, RingMemory, publish};
use crate::link::waits::{Point, Wait, dawdle, kept, stop};
use crate::link::{Frame, Header, LinkRx, LinkTx, Loan, Place, Posted};
use crate::types::Rank;

/// The `location` of a loan's frame, whose payload lies beside the descriptor.
const BESIDE: u64 = u64::MAX;
/// The same for a loan that has events.
const BESIDE_AND_MARKED: u64 = u64::MAX - 1;

type Mark = Mutex<Option<DeviceEvent>>;

/// The events beside a ring: one of each kind for each cell.
#[derive(Default)]
struct Marks {
    ready: [Mark; CELLS as usize],
    done: [Mark; CELLS as usize],
}

/// Where the events of a frame are in [`Marks`].
fn at(frame: u64) -> usize {
    (frame % CELLS) as usize
}

/// A rank's device in a communicator, as all its peers in the process see it.
pub(crate) struct PeerDevice {
    /// Where this rank's own work for the communicator's collectives goes.
    pub(crate) stream: DeviceStream,
    /// The commands that put this work there; threads that may block carry them out.
    pub(crate) commands: Arc<Commands>,
    /// The stream for messages that a library moves, made with the first of them.
    messages: Mutex<Option<DeviceStream>>,
    /// The events of the links from this rank, by receiver.
    to: Vec<Marks>,
    /// This rank.
    rank: Rank,
    /// The words that say how far the streams of all ranks have come with this rank's operations. Streams wait for them, and hosts read them. Made
    /// when the communicator is bound, as getting memory for them may wait for the device. An error if they could not be made.
    pub(in crate::device) words: Result<DeviceSignal, Error>,
    starts: Starts,
    /// The last operation for which this rank's stream wrote all its words ([`refreshes`](Self::refreshes)).
    refreshed: AtomicU64,
    /// Whether peers wait for this rank's own stream before they touch what it lends for the operation that was begun last.
    lends_own_work: AtomicBool,
    /// How many operations have begun, and how many are over, as the driver has told the host: for when there are no words, or one does not come.
    told: [AtomicU64; 2],
    /// How many operations were given to the driver at least in part (`put`) and wholly (`put_over`), and how many this rank has called.
    put: AtomicU64,
    put_over: AtomicU64,
    called: AtomicU64,
    /// Makes sure that streams which wait for these words hold up no collective.
    probe: Mutex<Result<Probe, Error>>,
    /// Which streams this rank has its inputs on, and which wait for the communicator's operations.
    pub(crate) inputs: Inputs,
    /// Which operations one launch folds for all ranks. On rank 0 also what the ranks have brought to the next of them.
    pub(crate) arrivals: Arrivals,
}

impl PeerDevice {
    /// For rank `rank` of a communicator that has `size` ranks, and a number `comm` that no other communicator of this process has.
    pub(crate) fn new(
        stream: DeviceStream,
        commands: Arc<Commands>,
        (rank, size): (Rank, usize),
        comm: u64,
    ) -> PeerDevice {
        commands.are_within(|all| keep(all));
        stream.make_ahead();
        let mut probe = Probe::new(&stream);
        if let Ok(probe) = &mut probe {
            probe.admit(&stream, comm);
        }
        PeerDevice {
            rank,
            words: DeviceSignal::new(&stream, size),
            starts: Starts::new(),
            refreshed: AtomicU64::new(0),
            lends_own_work: AtomicBool::new(false),
            probe: Mutex::new(probe),
            stream,
            commands,
            messages: Mutex::default(),
            to: (0..size).map(|_| Marks::default()).collect(),
            told: Default::default(),
            put: AtomicU64::new(0),
            put_over: AtomicU64::new(0),
            called: AtomicU64::new(0),
            inputs: Inputs::new(),
            arrivals: Arrivals::default(),
        }
    }

    /// The stream for messages that a library moves, made at the first call. `user`: the stream of the first message's buffer. NCCL keeps
    /// the `CUstream` that it was called with, so this stream's `CUstream` never changes.
    pub(crate) fn stream_for_messages(&self, user: &DeviceStream) -> Result<DeviceStream, Error> {
        if let Some(stream) = &*self.messages.lock() {
            return Ok(stream.clone());
        }
        // Not under the lock: the driver may wait for the device before it makes a stream. If there is one by then, that one is used.
        let stream = stream_apart(&self.probe, &self.stream, user)?;
        Ok(self.messages.lock().get_or_insert(stream).clone())
    }

    /// For each of this rank's streams, the point behind all that is on it now.
    pub(crate) fn points(&self) -> Result<Vec<DeviceEvent>, Error> {
        let messages = self.messages.lock().clone();
        [Some(self.stream.clone()), messages].iter().flatten().map(DeviceStream::point).collect()
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// Tells this rank's words which streams write them: those of all ranks of the communicator in this process, this one included.
    /// `leader`: rank 0's device, if its stream also takes launches that fold for all ranks.
    pub(crate) fn is_among(&self, all: &[Option<Arc<PeerDevice>>], leader: Option<&PeerDevice>) {
        if let Ok(words) = &self.words {
            let each = all.iter().flatten().map(|device| (Word::Over(device.rank), device.stream.clone()));
            let for_all = leader.map(|leader| (Word::OverForAll, leader.stream.clone()));
            words.is_written_by(each.chain(for_all));
        }
    }

    /// Whether there are words, which say how far the stream has come.
    pub(crate) fn has_words(&self) -> bool {
        self.words.is_ok()
    }

    /// For a call whose buffers are on `stream`: makes `stream` write the word for the call's input behind what it holds now. `None`: there are
    /// no words, or another stream has still to write that word, so the word's numbers might not come in their order.
    pub(crate) fn put_input(&self, stream: &DeviceStream) -> Result<Option<Start>, Error> {
        let Ok(words) = &self.words else { return Ok(None) };
        Ok(words.put_input(stream)?.map(Start::Input))
    }

    /// Notes that this operation begins, and that `start` says when its inputs are there. `lends_own_work`: as in the field of that name.
    pub(crate) fn starts(&self, number: u64, start: Start, lends_own_work: bool) {
        self.lends_own_work.store(lends_own_work, Ordering::Release);
        self.starts.set(number, start);
    }

    /// The word that says when this operation's inputs are there, and what it shows then. `None`: as for [`Starts::get`].
    fn start(&self, number: u64) -> Option<(Word, u32)> {
        self.starts.get(number).map(Start::word)
    }

    /// Whether the inputs are there by now, as `start` says.
    pub(crate) fn shows(&self, start: Start) -> bool {
        let (which, value) = start.word();
        self.words.as_ref().is_ok_and(|words| words.shows(which, value))
    }

    /// The wait by which a stream waits for this rank's inputs of this operation. `None`: there are no words, or the operation is not known (a bug).
    pub(crate) fn wait_for_start(&self, number: u64) -> Option<CuStreamMemOp> {
        let (which, value) = self.start(number)?;
        Some(self.words.as_ref().ok()?.wait(which, value))
    }

    /// Called in a command: notes that the driver has taken the first work of this operation.
    pub(crate) fn takes(&self, number: u64) {
        self.put.fetch_max(number + 1, Ordering::AcqRel);
    }

    /// Called in a command, when the stream holds all waits for this operation's inputs. A word, or else the driver, is to tell when it is past them.
    pub(crate) fn begins(self: &Arc<Self>, number: u64) -> Result<(), Error> {
        match self.begun(number) {
            Some(write) => self.stream.put_words("begin a collective", &mut [write]),
            None => self.tell_when_here(Word::Begun, number),
        }
    }

    /// Called in a command, where there are no words: has the driver tell when the stream has come to the end of this operation.
    pub(crate) fn tell_when_over(self: &Arc<Self>, number: u64) -> Result<(), Error> {
        self.tell_when_here(Word::Over(self.rank), number)
    }

    /// The write by which our stream tells rank `whose`, in that rank's words, that it has done all its work for this operation. `None`: no words.
    pub(crate) fn over_for(&self, whose: &PeerDevice, number: u64) -> Option<CuStreamMemOp> {
        Some(whose.words.as_ref().ok()?.write(Word::Over(self.rank), value(number)))
    }

    /// Called in a command: notes that all of this operation is on the stream.
    pub(crate) fn has_put_over(&self, number: u64) {
        self.put_over.fetch_max(number + 1, Ordering::AcqRel);
    }

    /// Asked by the command that ends an operation: whether it is to write all words, also those that it need not write ([`REFRESH`]).
    pub(crate) fn refreshes(&self, number: u64) -> bool {
        let is_due = number.wrapping_sub(self.refreshed.load(Ordering::Relaxed)) >= REFRESH;
        if is_due {
            self.refreshed.store(number, Ordering::Relaxed);
        }
        is_due
    }

    /// The write by which our stream says that it is past its waits for this operation's inputs. `None`: there are no words.
    pub(crate) fn begun(&self, number: u64) -> Option<CuStreamMemOp> {
        Some(self.words.as_ref().ok()?.write(Word::Begun, value(number)))
    }

    /// Whether all of this operation is on the stream.
    pub(crate) fn is_put_over(&self, number: u64) -> bool {
        self.put_over.load(Ordering::Acquire) > number
    }

    fn tell_when_here(self: &Arc<Self>, which: Word, number: u64) -> Result<(), Error> {
        let device = self.clone();
        let tell = move |result: Result<(), Error>| {
            if result.is_ok() {
                device.tell(which, number);
            }
        };
        self.stream.point()?.then("run a collective", Box::new(tell));
        Ok(())
    }

    /// Notes that the stream has come as far with this operation as the word `which` would say, because the driver has told so.
    pub(crate) fn tell(&self, which: Word, number: u64) {
        self.told(which).fetch_max(number + 1, Ordering::AcqRel);
        if let Ok(words) = &self.words {
            // Other streams may wait for this word. Should the write of this rank's stream be missing, the host's lets them go on.
            words.set(which, value(number));
        }
        self.commands.wake();
    }

    /// Notes the end of this operation on the stream, of which the driver has told. The ranks `others`, which have lent this one memory, see it, too.
    pub(crate) fn tell_over<'a>(&self, others: impl Iterator<Item = &'a Arc<PeerDevice>>, number: u64) {
        self.tell(Word::Over(self.rank), number);
        for words in others.filter_map(|other| other.words.as_ref().ok()) {
            words.set(Word::Over(self.rank), value(number));
        }
    }

    fn told(&self, which: Word) -> &AtomicU64 {
        &self.told[usize::from(matches!(which, Word::Over(_)))]
    }

    /// Whether the driver has told that the stream has come past the inputs of this operation.
    pub(crate) fn is_told_begun(&self, number: u64) -> bool {
        self.told(Word::Begun).load(Ordering::Acquire) > number
    }

    /// Whether the inputs of this operation, which has been begun, are there. This only reads memory, and does not call the driver.
    fn has_begun(&self, number: u64) -> bool {
        if self.is_told_begun(number) {
            return true;
        }
        let Ok(words) = &self.words else { return false };
        self.start(number).is_none_or(|(which, value)| words.shows(which, value))
    }

    /// Whether the stream of `other` has come to the end of this operation of ours. Does not call the driver.
    pub(crate) fn has_ended_by(&self, other: &PeerDevice, number: u64) -> bool {
        let which = Word::Over(other.rank);
        other.told(which).load(Ordering::Acquire) > number
            || self.words.as_ref().is_ok_and(|words| words.shows(which, value(number)))
    }

    /// Whether the driver was given this operation, at least in part.
    pub(crate) fn has_put(&self, number: u64) -> bool {
        self.put.load(Ordering::Acquire) > number
    }

    /// Whether this rank's inputs of the operation are what is missing: the driver was given the operation, but they are not there yet; or the driver
    /// is not given the operation before the streams of the inputs can go on ([`Inputs::is_held_back`]). Does not call the driver.
    pub(crate) fn is_late(&self, number: u64) -> bool {
        if self.has_put(number) { !self.has_begun(number) } else { self.inputs.is_held_back(number) }
    }

    /// Makes a stream wait until the streams of these ranks have come to the end of this operation of ours.
    pub(crate) fn await_ends<'a>(
        &self,
        stream: &DeviceStream,
        others: impl Iterator<Item = &'a Arc<PeerDevice>>,
        number: u64,
    ) -> Result<(), Error> {
        let words = self.words.as_ref().map_err(|error| error.clone())?;
        words.is_awaited_by(stream, others.map(|other| Word::Over(other.rank)), value(number))
    }

    /// Sees to it that these streams hold up no collective while they wait for words. After `true` they count as waiting, until
    /// [`DeviceStream::waits_now`] says up to which point they do. `false`: they may hold up what they wait for.
    pub(crate) fn make_way<'a>(
        &self,
        streams: impl Iterator<Item = &'a DeviceStream>,
        needs_copies: bool,
    ) -> bool {
        // Without words no stream can be made to wait: `await_ends` then returns the error.
        self.probe.lock().as_mut().map_or(true, |probe| probe.make_way(streams, needs_copies))
    }

    /// Finds out which of the callers' streams `others` go on while `waiting` waits.
    pub(crate) fn learn(&self, waiting: &DeviceStream, others: &[DeviceStream]) {
        if let Ok(probe) = &mut *self.probe.lock() {
            probe.learn(waiting, others);
        }
    }

    /// The number of the next operation on devices that this rank calls.
    pub(crate) fn next_call(&self) -> u64 {
        self.called.load(Ordering::Acquire)
    }

    /// Notes that this operation has been called.
    pub(crate) fn called(&self, number: u64) {
        self.called.fetch_max(number + 1, Ordering::AcqRel);
    }

    /// Called in a command, for a communicator that has failed: lets all streams that wait for its operations go on once the ranks' streams
    /// have done what they hold now, and in any case after a while.
    pub(crate) fn release_all(&self) -> Result<(), Error> {
        let called = self.called.load(Ordering::Acquire);
        match &self.words {
            Ok(words) if called > 0 => words.release(value(called - 1)),
            // Without words nobody could be made to wait.
            _ => Ok(()),
        }
    }

    /// Lets the same streams go on now, whatever is still on the ranks' streams. This only writes memory, and does not call the driver.
    pub(crate) fn release_all_now(&self) {
        let called = self.called.load(Ordering::Acquire);
        if let Ok(words) = &self.words
            && called > 0
        {
            words.release_now(value(called - 1));
        }
    }
}

/// The sending end.
pub(crate) struct PeerTx {
    ring: Producer<RawRing>,
    doorbell: Doorbell,
    ours: Arc<PeerDevice>,
    to: Rank,
    /// The frames before this number are released, and our stream waits for the reader's stream where they had events.
    seen: u64,
    /// Which of the frames in the ring have events beside them.
    marked: [bool; CELLS as usize],
}

impl PeerTx {
    /// From our device to rank `to`.
    pub(crate) fn new(place: Place, ours: Arc<PeerDevice>, to: Rank) -> Result<PeerTx, Error> {
        let Place { region, ring, doorbell, .. } = place;
        let ring = Producer::new(RawRing::new(region, ring)?);
        Ok(PeerTx { ring, doorbell, ours, to, seen: 0, marked: [false; CELLS as usize] })
    }

    /// Appends a command that posts a frame; if `is_marked`, it first records `ready` on our stream. `beside`: a loan's two places and its length.
    fn post_behind(&mut self, descriptor: Descriptor, is_marked: bool, beside: Option<[u64; 3]>) {
        let (frame, memory, doorbell) =
            (self.ring.claim(), self.ring.memory().clone(), self.doorbell.clone());
        let (ours, to) = (self.ours.clone(), self.to);
        self.marked[at(frame)] = is_marked;
        self.ours.commands.put(move || {
            if is_marked {
                let mut ready = ours.to[to].ready[at(frame)].lock();
                ours.stream.record_in(&mut ready)?;
            }
            let beside = beside.as_ref().map_or(std::ptr::null(), |places| places.as_ptr().cast());
            publish(&memory, frame, (descriptor, beside));
            doorbell.ring();
            Ok(())
        });
    }
}

impl LinkTx for PeerTx {
    fn room(&mut self) -> Result<bool, Error> {
        Ok(self.ring.posted() - self.released()? < CELLS)
    }

    fn needs_slot(&self, _payload: *const u8, _len: usize) -> bool {
        false
    }

    // `payload` is a device's address: the host never reads there.
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        self.post_behind(Descriptor::new(&header, payload.addr() as u64), header.len > 0, None);
        Ok(Posted::Held)
    }

    /// Devices of one process touch each other's memory: `Comm::bind_device` has checked that.
    fn can_lend(&self, _: *const u8, _: usize) -> bool {
        true
    }

    // The loan's addresses are a device's, too.
    unsafe fn lend(&mut self, header: Header, loan: Loan) -> Result<(), Error> {
        let places = [loan.input.addr() as u64, loan.output.addr() as u64, loan.bytes as u64];
        let header = Header { len: Loan::FRAME as u32, ..header };
        let is_marked = self.ours.lends_own_work.load(Ordering::Acquire);
        let location = if is_marked { BESIDE_AND_MARKED } else { BESIDE };
        self.post_behind(Descriptor::new(&header, location), is_marked, Some(places));
        Ok(())
    }

    /// What is put on our stream after this call may write to the memory of the counted frames: our stream waits for the reader's stream first.
    fn released(&mut self) -> Result<u64, Error> {
        let released = self.ring.released();
        for frame in (self.seen..released).filter(|frame| self.marked[at(*frame)] && kept(Wait::Done)) {
            let (ours, to) = (self.ours.clone(), self.to);
            self.ours.commands.put(move || match &*ours.to[to].done[at(frame)].lock() {
                Some(done) => ours.stream.wait_event(done),
                None => Ok(()),
            });
        }
        self.seen = self.seen.max(released);
        Ok(released)
    }

    /// The reader takes no more frames. Whoever ends the communicator's operations on devices waits for what the reader has put on its stream
    /// or is about to put there (`Binding::is_touched`).
    fn revoke(&mut self) -> bool {
        self.ring.memory().revoked().fetch_max(1, Ordering::SeqCst);
        true
    }
}

/// The receiving end.
pub(crate) struct PeerRx {
    ring: Consumer<RawRing>,
    doorbell: Doorbell,
    ours: Arc<PeerDevice>,
    theirs: Arc<PeerDevice>,
    rank: Rank,
    frames: u64,
    head: Option<Frame>,
    /// Whether there are events beside `head`.
    is_marked: bool,
    hung_up: bool,
}

// SAFETY: the address in `head` is a device's, which the host never follows and which is tied to no thread. All else is Send.
unsafe impl Send for PeerRx {}

impl PeerRx {
    /// From the device `theirs` to `ours`, which is that of `rank`.
    pub(crate) fn new(
        place: Place,
        ours: Arc<PeerDevice>,
        theirs: Arc<PeerDevice>,
        rank: Rank,
    ) -> Result<PeerRx, Error> {
        let Place { region, ring, doorbell, .. } = place;
        let ring = Consumer::new(RawRing::new(region, ring)?);
        let (frames, head, is_marked, hung_up) = (0, None, false, false);
        Ok(PeerRx { ring, doorbell, ours, theirs, rank, frames, head, is_marked, hung_up })
    }
}

impl LinkRx for PeerRx {
    fn peek(&mut self, _useful: usize) -> Result<Option<Frame>, Error> {
        let revoked = self.ring.memory().revoked().load(Ordering::SeqCst) != 0 && kept(Wait::Revoked);
        if self.hung_up || revoked {
            return Ok(None);
        }
        if self.head.is_some() {
            return Ok(self.head);
        }
        let Some((descriptor, _)) = self.ring.peek() else { return Ok(None) };
        let header = descriptor.header();
        self.is_marked = header.len > 0 && descriptor.location != BESIDE;
        if self.is_marked {
            let (ours, theirs, rank, frame) =
                (self.ours.clone(), self.theirs.clone(), self.rank, self.frames);
            self.ours.commands.put(move || match &*theirs.to[rank].ready[at(frame)].lock() {
                Some(ready) if kept(Wait::Ready) => ours.stream.wait_event(ready),
                _ => Ok(()),
            });
        }
        let data = std::ptr::without_provenance(descriptor.location as usize);
        dawdle();
        stop(Point::Read, self.rank);
        self.head = Some(Frame { header, data, ready: header.len as usize, done: 0 });
        Ok(self.head)
    }

    fn borrow(&self) -> Result<Loan, Error> {
        if self.head.is_none_or(|frame| frame.ready != Loan::FRAME) {
            return Err(Error::system("use memory that a peer's device lends", "nothing is lent (a bug)"));
        }
        let bytes: [u8; Loan::FRAME] = self.ring.memory().read_beside(self.frames);
        let word = |i: usize| u64::from_ne_bytes(std::array::from_fn(|k| bytes[8 * i + k])) as usize;
        let input = std::ptr::without_provenance(word(0));
        Ok(Loan { input, output: std::ptr::without_provenance_mut(word(1)), bytes: word(2) })
    }

    fn release(&mut self, bytes: usize) {
        let Some(frame) = &mut self.head else { return };
        if !frame.advance(bytes) {
            return;
        }
        let is_marked = self.is_marked;
        self.head = None;
        let (ours, theirs, rank, frame) = (self.ours.clone(), self.theirs.clone(), self.rank, self.frames);
        self.frames += 1;
        let (count, memory, doorbell) = (self.ring.pass(), self.ring.memory().clone(), self.doorbell.clone());
        self.ours.commands.put(move || {
            if is_marked {
                // If this fails, the sender must not write to the memory: it does not get the frame back, and the communicator fails.
                ours.stream.record_in(&mut theirs.to[rank].done[at(frame)].lock())?;
            }
            memory.release(count);
            doorbell.ring();
            Ok(())
        });
    }

    fn hang_up(&mut self) {
        self.head = None;
        self.hung_up = true;
        // By a command, so that it comes behind the releases that were appended before.
        let (memory, doorbell) = (self.ring.memory().clone(), self.doorbell.clone());
        self.ours.commands.put_always(move || {
            memory.release(CLOSED);
            doorbell.ring();
        });
    }
}
