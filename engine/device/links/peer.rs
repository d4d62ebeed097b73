//! Links between ranks whose devices touch each other's memory: the same device, or peers of one process. Those between
//! processes ([`super::ipc`]) do the same with memory and events that processes share.
//!
//! What travels between hosts is a ring of descriptors, as [`crate::link::local`]'s: each lends a piece of the sender's device
//! memory. What orders the devices are two events beside each cell. The sender records `ready` on its stream before it
//! posts, and the receiver's stream waits for that before it reads; the receiver records `done` before it releases, and the
//! sender's stream waits for that before it writes there again. So "posted" and "released" mean *put on a stream*, and
//! nothing is ever put on a stream that waits for what is not on one yet: a device never waits for a host, whatever
//! becomes of the ranks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::device::queues::Probe;
use crate::device::signal::DeviceSignal;
use crate::device::stream::{DeviceEvent, DeviceStream};
use crate::error::Error;
use crate::link::cells::{Descriptor, RawRing};
use crate::link::local::{Doorbell, MemoryLock};
use crate::link::ring::{CELLS, Consumer, Producer};
use crate::link::waits::{Point, Wait, dawdle, kept, stop};
use crate::link::{Frame, Header, LinkRx, LinkTx, Loan, Place, Posted};
use crate::types::Rank;

/// Where the payload of a loan's frame is: beside its descriptor.
const BESIDE: u64 = u64::MAX;

type Mark = Mutex<Option<DeviceEvent>>;

/// The events beside a ring, one for each cell.
#[derive(Default)]
struct Marks {
    ready: [Mark; CELLS as usize],
    done: [Mark; CELLS as usize],
}

/// A rank's device in a communicator, as all its peers in the process see it.
pub(crate) struct PeerDevice {
    /// Where all of this rank's work on the communicator goes.
    pub(crate) stream: DeviceStream,
    /// Where messages go that a library moves: made with the first.
    messages: Mutex<Option<DeviceStream>>,
    /// Of the links from this rank, by receiver.
    to: Vec<Marks>,
    /// Of a call that nobody could be told of at once.
    failed: Mutex<Option<Error>>,
    /// What this rank's operations wait for that are on the stream and not over, oldest first.
    inputs: Mutex<VecDeque<(u64, Vec<DeviceEvent>)>>,
    /// A word that counts operations, for streams to wait for. Made when it is bound: getting memory for it may wait for
    /// the device. The error where that cannot be.
    signal: Mutex<Result<DeviceSignal, Error>>,
    /// To see to it that streams which wait for that word hold up no collective.
    probe: Mutex<Result<Probe, Error>>,
}

impl PeerDevice {
    /// Of a rank of a communicator of so many ranks, and this number.
    pub(crate) fn new(stream: DeviceStream, size: usize, comm: u64) -> PeerDevice {
        stream.make_ahead();
        let mut probe = Probe::new(&stream);
        if let Ok(probe) = &mut probe {
            probe.admit(&stream, comm);
        }
        PeerDevice {
            signal: Mutex::new(DeviceSignal::new(&stream)),
            probe: Mutex::new(probe),
            stream,
            messages: Mutex::default(),
            to: (0..size).map(|_| Marks::default()).collect(),
            failed: Mutex::default(),
            inputs: Mutex::default(),
        }
    }

    /// The stream for messages that a library moves, the first of them to or from a buffer on `user`. NCCL is to find it where it was,
    /// so it is none that goes on as another.
    pub(crate) fn stream_for_messages(&self, user: &DeviceStream) -> Result<DeviceStream, Error> {
        let mut messages = self.messages.lock();
        if let Some(stream) = &*messages {
            return Ok(stream.clone());
        }
        let stream = match &mut *self.probe.lock() {
            Ok(probe) => probe.stream_apart(&self.stream, user),
            // Without words no stream can be asked.
            Err(_) => DeviceStream::high_priority(&self.stream.device()),
        };
        Ok(messages.insert(stream?).clone())
    }

    /// Where its streams are filled to.
    pub(crate) fn points(&self) -> Result<Vec<DeviceEvent>, Error> {
        let messages = self.messages.lock().clone();
        [Some(self.stream.clone()), messages].iter().flatten().map(DeviceStream::point).collect()
    }

    /// An operation is put on the stream, behind these.
    pub(crate) fn begins(&self, number: u64, inputs: Vec<DeviceEvent>) {
        self.inputs.lock().push_back((number, inputs));
    }

    /// This operation is over, and so are those before it.
    pub(crate) fn ended(&self, number: u64) {
        let mut inputs = self.inputs.lock();
        while inputs.front().is_some_and(|(first, _)| *first <= number) {
            inputs.pop_front();
        }
    }

    /// Whether this rank's input of an operation is not there yet.
    pub(crate) fn is_late(&self, number: u64) -> bool {
        let inputs = self.inputs.lock();
        let known = inputs.iter().find(|(known, _)| *known == number);
        known.is_some_and(|(_, inputs)| inputs.iter().any(|event| !event.is_complete().unwrap_or(true)))
    }

    /// Makes a stream wait until this operation is signalled.
    pub(crate) fn await_signal(&self, stream: &DeviceStream, number: u64) -> Result<(), Error> {
        let mut signal = self.signal.lock();
        stream.wait_signal(signal.as_mut().map_err(|error| error.clone())?, value(number))
    }

    /// Sees to it that these streams may wait so and hold up no collective: then it counts as if they did until they are said
    /// to ([`DeviceStream::waits_now`]). `false`: they may hold up what they wait for.
    pub(crate) fn make_way<'a>(&self, streams: impl Iterator<Item = &'a DeviceStream>) -> bool {
        // Without words no stream can be made to wait: who tries is told why.
        self.probe.lock().as_mut().map_or(true, |probe| probe.make_way(streams))
    }

    /// Signals an operation behind what the stream holds. They are signalled in their order.
    pub(crate) fn signal(&self, number: u64) -> Result<(), Error> {
        match &mut *self.signal.lock() {
            Ok(signal) => self.stream.put_signal(signal, value(number)),
            // Nobody could be made to wait for it.
            Err(_) => Ok(()),
        }
    }

    /// Signals an operation that is over, from the host. The stream has written the words of all before it by then, and can
    /// only write the same again.
    pub(crate) fn show(&self, number: u64) {
        if let Ok(signal) = &*self.signal.lock() {
            signal.set(value(number));
        }
    }

    /// Signals an operation that has failed, behind what the stream holds; and in any case after a while.
    pub(crate) fn release(&self, number: u64) -> Result<(), Error> {
        match &mut *self.signal.lock() {
            Ok(signal) => signal.release(&self.stream, value(number)),
            Err(_) => Ok(()),
        }
    }

    /// Something has failed of which nobody can be told at once.
    pub(super) fn fail(&self, error: Error) {
        self.failed.lock().get_or_insert(error);
    }

    /// What has failed since this was last asked.
    pub(crate) fn take_failure(&self) -> Result<(), Error> {
        self.failed.lock().take().map_or(Ok(()), Err)
    }
}

/// What the word shows from this operation on; compared as numbers on a circle.
fn value(number: u64) -> u32 {
    (number as u32).wrapping_add(1)
}

/// The sending end.
pub(crate) struct PeerTx {
    ring: Producer<RawRing>,
    doorbell: Doorbell,
    memory_lock: Option<MemoryLock>,
    ours: Arc<PeerDevice>,
    to: Rank,
    /// Frames whose release our stream has been told of.
    seen: u64,
}

impl PeerTx {
    /// From our device to rank `to`.
    pub(crate) fn new(place: Place, ours: Arc<PeerDevice>, to: Rank) -> Result<PeerTx, Error> {
        let Place { region, ring, doorbell, memory_lock } = place;
        Ok(PeerTx {
            ring: Producer::new(RawRing::new(region, ring)?),
            doorbell,
            memory_lock,
            ours,
            to,
            seen: 0,
        })
    }

    fn mark(&self, frame: u64, of: fn(&Marks) -> &[Mark; CELLS as usize]) -> &Mark {
        &of(&self.ours.to[self.to])[(frame % CELLS) as usize]
    }
}

impl LinkTx for PeerTx {
    fn room(&mut self) -> Result<bool, Error> {
        Ok(self.ring.posted() - self.released()? < CELLS)
    }

    fn needs_slot(&self, _payload: *const u8, _len: usize) -> bool {
        false
    }

    // The payload is a device's address: nobody on the host follows it.
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        if header.len > 0 {
            let mut ready = self.mark(self.ring.posted(), |marks| &marks.ready).lock();
            self.ours.stream.record_in(&mut ready)?;
        }
        self.ring.post((Descriptor::new(&header, payload.addr() as u64), std::ptr::null()));
        self.doorbell.ring();
        Ok(Posted::Held)
    }

    /// Devices of one process touch each other's memory: `Comm::bind_device` has seen to that.
    fn can_lend(&self, _: *const u8, _: usize) -> bool {
        true
    }

    // The loan's ends are a device's addresses, too.
    unsafe fn lend(&mut self, header: Header, loan: Loan) -> Result<(), Error> {
        let frame = self.ring.posted();
        self.ours.stream.record_in(&mut self.mark(frame, |marks| &marks.ready).lock())?;
        let places = [loan.input.addr() as u64, loan.output.addr() as u64, loan.bytes as u64];
        let header = Header { len: Loan::FRAME as u32, ..header };
        self.ring.post((Descriptor::new(&header, BESIDE), places.as_ptr().cast()));
        self.doorbell.ring();
        Ok(())
    }

    /// What is counted here, our stream may write again: it waits for the reader's.
    fn released(&mut self) -> Result<u64, Error> {
        let released = self.ring.released();
        while self.seen < released {
            if let Some(done) = &*self.mark(self.seen, |marks| &marks.done).lock()
                && kept(Wait::Done)
            {
                self.ours.stream.wait_event(done)?;
            }
            self.seen += 1;
        }
        Ok(released)
    }

    /// Nothing more is put on the reader's stream; what is there already, its end tells.
    fn revoke(&mut self) -> bool {
        self.ring.memory().revoked().fetch_max(1, Ordering::SeqCst);
        !kept(Wait::MemoryLock)
            || self.memory_lock.as_ref().is_none_or(|memory_lock| memory_lock.try_lock().is_some())
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
    hung_up: bool,
}

// SAFETY: the frame's address is the device's: nobody on the host follows it. All else is Send.
unsafe impl Send for PeerRx {}

impl PeerRx {
    /// From the device `theirs` to ours, that of `rank`.
    pub(crate) fn new(
        place: Place,
        ours: Arc<PeerDevice>,
        theirs: Arc<PeerDevice>,
        rank: Rank,
    ) -> Result<PeerRx, Error> {
        let Place { region, ring, doorbell, .. } = place;
        let ring = Consumer::new(RawRing::new(region, ring)?);
        Ok(PeerRx { ring, doorbell, ours, theirs, rank, frames: 0, head: None, hung_up: false })
    }

    fn marks(&self) -> (&Mark, &Mark) {
        let (marks, at) = (&self.theirs.to[self.rank], (self.frames % CELLS) as usize);
        (&marks.ready[at], &marks.done[at])
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
        if header.len > 0
            && let Some(ready) = &*self.marks().0.lock()
            && kept(Wait::Ready)
        {
            self.ours.stream.wait_event(ready)?;
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
        if frame.header.len > 0
            && let Err(error) = self.ours.stream.record_in(&mut self.marks().1.lock())
        {
            // The sender must not write there: it does not get the frame back, and all ranks hear why.
            self.ours.fail(error);
            return;
        }
        self.head = None;
        self.frames += 1;
        self.ring.release();
        self.doorbell.ring();
    }

    fn hang_up(&mut self) {
        self.head = None;
        self.hung_up = true;
        self.ring.close();
        self.doorbell.ring();
    }
}
