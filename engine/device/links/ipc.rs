//! Links between ranks whose devices touch each other's memory, in two processes of one host.
//!
//! The same as [`super::peer`], with what processes can share: a cell says beside its descriptor which block of the sender's
//! the frame lies in, and what the driver opens it by. `location` is the offset in that block. In place of events there are
//! words that count frames ([`super::words`]): the stream of the one rank writes them, that of the other waits for them.
//!
//! What a process was to write when it died is never written, and a stream that waits for it would wait for ever. So a
//! rank that gives up and whose stream does not come to its end *lets go* ([`Far::let_go`]): it says so in all rings, and
//! its host writes the words that its own stream waits for. What any device reads from then on counts for nothing, and an
//! operation is only good if no rank has said so by its end ([`Far::check`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use super::peer::PeerDevice;
use super::words::{DONE, END, Inbox, Outbox, READY, mark};
use crate::device::blocks::Exported;
use crate::device::ipc::{Import, Opening, retire};
use crate::device::stream::DeviceStream;
use crate::error::Error;
use crate::link::cells::{Descriptor, RawRing, RingFlag};
use crate::link::local::Doorbell;
use crate::link::region::Region;
use crate::link::ring::{CELLS, CLOSED, Consumer, Producer, RingMemory, publish};
use crate::link::{Frame, Header, LinkRx, LinkTx, Place, Posted};
use crate::types::{DType, Rank};

/// Bytes of a driver's handle.
const HANDLE: usize = 64;
/// What a rank gives to each rank in another process: where its inbox is in its region, and where a piece of its memory is.
pub(crate) const CARD: usize = 8 + NAME;
/// A name of memory: number, offset, handle; where the whole block lies, and its length.
const NAME: usize = 16 + HANDLE + 16;

/// A ring's flag: what was lent is taken back.
const REVOKED: u32 = 1;
/// And what was read is not what was meant.
const LET_GO: u32 = 2;

fn written(name: &Exported) -> [u8; NAME] {
    let mut bytes = [0; NAME];
    bytes[..8].copy_from_slice(&name.number.to_le_bytes());
    bytes[8..16].copy_from_slice(&name.offset.to_le_bytes());
    bytes[16..16 + HANDLE].copy_from_slice(&name.handle);
    bytes[16 + HANDLE..][..8].copy_from_slice(&name.base.to_le_bytes());
    bytes[24 + HANDLE..].copy_from_slice(&name.bytes.to_le_bytes());
    bytes
}

fn read(bytes: &[u8; NAME]) -> Exported {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let mut handle = [0; HANDLE];
    handle.copy_from_slice(&bytes[16..16 + HANDLE]);
    let (base, bytes) = (word(16 + HANDLE), word(24 + HANDLE));
    Exported { number: word(0), offset: word(8), handle, base, bytes }
}

/// What a rank has made for one in another process; to be told to it.
pub(crate) struct Offer {
    inbox: Arc<Inbox>,
    pub(crate) card: Vec<u8>,
}

impl Offer {
    /// `probe`: some memory of the pool. `region`: our own.
    pub(crate) fn new(stream: &DeviceStream, region: &Arc<Region>, probe: &Exported) -> Result<Offer, Error> {
        let inbox = Arc::new(Inbox::new(stream, region)?);
        let mut card = inbox.offset().to_le_bytes().to_vec();
        card.extend_from_slice(&written(probe));
        Ok(Offer { inbox, card })
    }
}

/// A rank in another process, and the words that the streams of both wait for.
pub(crate) struct FarPeer {
    rank: Rank,
    process: u128,
    /// Ours, which writes and waits for the words.
    stream: DeviceStream,
    inbox: Arc<Inbox>,
    /// There until the end.
    outbox: Option<Outbox>,
    /// Keeps open what was opened to see whether it works.
    _probe: Arc<Import>,
}

impl FarPeer {
    /// Opens what a peer has told, which drew this number for its process, and whose region this is.
    pub(crate) fn new(
        stream: &DeviceStream,
        (rank, process, region): (Rank, u128, &Arc<Region>),
        offer: &Offer,
        card: &[u8],
    ) -> Result<FarPeer, Error> {
        let short = || Error::protocol(rank, format!("{} bytes for a card", card.len()));
        let (at, name) = card.split_first_chunk::<8>().ok_or_else(short)?;
        let name = read(name.try_into().map_err(|_| short())?);
        let probe = Import::open(stream, process, &name)?;
        let outbox = Outbox::open(stream, rank, region.clone(), u64::from_le_bytes(*at))?;
        let (stream, inbox, outbox) = (stream.clone(), offer.inbox.clone(), Some(outbox));
        Ok(FarPeer { rank, process, stream, inbox, outbox, _probe: probe })
    }

    /// Tells the peer's stream, when ours comes here.
    fn put(&self, word: usize, value: u32) -> Result<(), Error> {
        let gone = || Error::system("tell another process", "its words are gone (a bug)");
        self.outbox.as_ref().ok_or_else(gone)?.put(&self.stream, word, value)
    }

    /// Our stream waits for the peer's.
    fn wait(&self, word: usize, value: u32) -> Result<(), Error> {
        self.inbox.wait(&self.stream, word, value)
    }
}

impl Drop for FarPeer {
    fn drop(&mut self) {
        retire(&self.stream, (self.inbox.clone(), self.outbox.take()));
    }
}

/// The ranks in other processes.
pub(crate) struct Far {
    /// By rank; none where a rank is in this process.
    pub(crate) peers: Vec<Option<Arc<FarPeer>>>,
    /// Keeps the blocks that were lent.
    keep: Arc<()>,
    /// To and from all other ranks.
    to: Vec<RingFlag>,
    from: Vec<(Rank, RingFlag)>,
    let_go: AtomicBool,
}

/// Where the rings to and from a rank are.
pub(crate) type Places = (Rank, Place, Place);

impl Far {
    pub(crate) fn new(
        peers: Vec<Option<Arc<FarPeer>>>,
        keep: Arc<()>,
        places: Vec<Places>,
    ) -> Result<Far, Error> {
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for (rank, there, here) in places {
            to.push(RingFlag::new(there.region, there.ring)?);
            from.push((rank, RingFlag::new(here.region, here.ring)?));
        }
        Ok(Far { peers, keep, to, from, let_go: AtomicBool::new(false) })
    }

    /// A peer of another process may use blocks that were lent to it, for as long as it likes.
    pub(crate) fn leave_open(&self) {
        std::mem::forget(self.keep.clone());
    }

    /// Names memory for the peers. `None`: they cannot have it.
    pub(crate) fn export(
        &self,
        stream: &DeviceStream,
        at: u64,
        bytes: usize,
    ) -> Result<Option<Exported>, Error> {
        stream.export(&self.keep, at, bytes)
    }

    /// Sees to it that the peers can have memory; if they cannot: why.
    pub(crate) fn share(
        &self,
        stream: &DeviceStream,
        at: u64,
        bytes: usize,
    ) -> Result<Result<(), String>, Error> {
        stream.share(&self.keep, at, bytes)
    }

    /// What anybody reads of this rank's from here on, or has read and not finished with, counts for nothing.
    pub(crate) fn distrust(&self) {
        self.to.iter().for_each(|flag| flag.raise(LET_GO));
    }

    /// See the module: no stream of ours waits for a peer's any more. Nothing more is put there that does. To be called
    /// again as long as the stream has not come to its end: the device of a peer that lives may write a word once more.
    pub(crate) fn let_go(&self) {
        if !self.let_go.swap(true, Ordering::SeqCst) {
            self.distrust();
        }
        self.peers.iter().flatten().for_each(|peer| peer.inbox.release());
    }

    /// Whether what has come to its end did so in order. Asked once it has.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let by = self.from.iter().find(|(_, flag)| flag.is() >= LET_GO).map(|(rank, _)| *rank);
        if by.is_none() && !self.let_go.load(Ordering::SeqCst) {
            return Ok(());
        }
        let whose = by.map_or("this rank".to_owned(), |rank| format!("rank {rank}"));
        let problem =
            format!("{whose} gave up while the devices still worked on it, so its result is not to be used");
        Err(Error::system("finish a collective on devices", problem))
    }
}

/// The sending end.
pub(crate) struct FarTx {
    ring: Producer<RawRing>,
    doorbell: Doorbell,
    ours: Arc<PeerDevice>,
    far: Arc<Far>,
    peer: Arc<FarPeer>,
    /// Frames whose release our stream has been told of.
    seen: u64,
    /// Frames in the ring that have a payload: what is empty nobody reads, and no word counts it.
    full: [bool; CELLS as usize],
    /// How many frames the commands have posted so far.
    posted: Arc<AtomicU64>,
}

impl FarTx {
    pub(crate) fn new(
        place: Place,
        ours: Arc<PeerDevice>,
        far: Arc<Far>,
        peer: Arc<FarPeer>,
    ) -> Result<FarTx, Error> {
        let Place { region, ring, doorbell, .. } = place;
        let (ring, full) = (Producer::new(RawRing::new(region, ring)?), [false; CELLS as usize]);
        Ok(FarTx { ring, doorbell, ours, far, peer, seen: 0, full, posted: Arc::default() })
    }

    /// What the peer's word shows once it has read all frames from `seen` up to this one. `None`: there is nothing in them.
    fn done(&self, until: u64) -> Option<u32> {
        let last = (self.seen..until).rev().find(|frame| self.full[(frame % CELLS) as usize]);
        last.map(mark)
    }
}

impl LinkTx for FarTx {
    fn room(&mut self) -> Result<bool, Error> {
        Ok(self.ring.posted() - self.released()? < CELLS)
    }

    fn needs_slot(&self, _payload: *const u8, _len: usize) -> bool {
        false
    }

    // The payload is a device's address: nobody on the host follows it.
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let (frame, memory, doorbell) =
            (self.ring.claim(), self.ring.memory().clone(), self.doorbell.clone());
        let (ours, far, peer, posted) =
            (self.ours.clone(), self.far.clone(), self.peer.clone(), self.posted.clone());
        self.full[(frame % CELLS) as usize] = header.len > 0;
        let address = payload.addr() as u64;
        self.ours.commands.put(move || {
            let mut offset = 0;
            if header.len > 0 {
                let named = far.export(&ours.stream, address, header.len as usize)?;
                let stranger =
                    || Error::system("lend device memory", "it has no name for other processes (a bug)");
                let named = named.ok_or_else(stranger)?;
                offset = named.offset;
                memory.write_beside(frame, &written(&named));
                peer.put(READY, mark(frame))?;
            }
            publish(&memory, frame, (Descriptor::new(&header, offset), std::ptr::null()));
            posted.store(frame + 1, Ordering::Release);
            doorbell.ring();
            Ok(())
        });
        Ok(Posted::Held)
    }

    /// What is counted here, our stream may write again: it waits for the reader's.
    fn released(&mut self) -> Result<u64, Error> {
        let released = self.ring.released();
        if self.ring.memory().revoked().load(Ordering::SeqCst) != 0 {
            return Ok(released); // the end of the link: `is_read_elsewhere` is asked
        }
        if self.seen < released {
            let wait = match self.ring.is_closed() {
                // It has not read all of them, and what it has, before it said so.
                true => Some((END, 1)),
                false => self.done(released).map(|done| (DONE, done)),
            };
            if let Some((word, value)) = wait {
                let peer = self.peer.clone();
                self.ours.commands.put(move || peer.wait(word, value));
            }
            self.seen = released;
        }
        Ok(released)
    }

    /// Nothing more is put on the reader's stream; what is there already, `is_read_elsewhere` tells.
    fn revoke(&mut self) -> bool {
        self.ring.memory().revoked().fetch_max(REVOKED, Ordering::SeqCst);
        true
    }

    fn is_read_elsewhere(&mut self) -> bool {
        if self.ring.is_closed() {
            return !self.peer.inbox.shows(END, 1);
        }
        let posted = self.posted.load(Ordering::Acquire);
        let read = |done| self.peer.inbox.shows(DONE, done);
        self.ring.released() < posted || !self.done(posted).is_none_or(read)
    }
}

/// The receiving end.
pub(crate) struct FarRx {
    ring: Consumer<RawRing>,
    doorbell: Doorbell,
    ours: Arc<PeerDevice>,
    peer: Arc<FarPeer>,
    /// The peer's blocks, by number.
    imports: HashMap<u64, Opening>,
    /// Woken when one of them is open.
    waker: Waker,
    frames: u64,
    head: Option<Frame>,
    hung_up: bool,
}

// SAFETY: the frame's address is the device's: nobody on the host follows it. All else is Send.
unsafe impl Send for FarRx {}

impl FarRx {
    /// `waker`: of who drives, for when it may go on.
    pub(crate) fn new(
        place: Place,
        ours: Arc<PeerDevice>,
        peer: Arc<FarPeer>,
        waker: Waker,
    ) -> Result<FarRx, Error> {
        let Place { region, ring, doorbell, .. } = place;
        let ring = Consumer::new(RawRing::new(region, ring)?);
        let (imports, frames, head) = (HashMap::new(), 0, None);
        Ok(FarRx { ring, doorbell, ours, peer, imports, waker, frames, head, hung_up: false })
    }

    /// Where a frame of so many bytes is, here, once the block that it is in is open.
    fn locate(&mut self, location: u64, bytes: usize) -> Result<Option<u64>, Error> {
        let name = read(&self.ring.memory().read_beside(self.frames));
        let (stream, process, waker) = (&self.ours.stream, self.peer.process, &self.waker);
        let begin = || Opening::begin(stream, process, &name, waker.clone());
        if !self.imports.contains_key(&name.number) {
            self.imports
                .retain(|_, opening| opening.opened().ok().flatten().is_none_or(|import| import.is_open()));
        }
        let opening = self.imports.entry(name.number).or_insert_with(begin);
        let Some(import) = opening.opened()? else { return Ok(None) };
        import.at(location, bytes).map(Some).ok_or_else(|| {
            let whole = import.bytes();
            let problem = match import.is_open() {
                true => format!(
                    "{bytes} bytes at offset {location} are not in its device memory of {whole} bytes"
                ),
                false => {
                    "its device memory has taken the place of other memory, and is named again".to_owned()
                }
            };
            Error::protocol(self.peer.rank, problem)
        })
    }
}

impl LinkRx for FarRx {
    fn peek(&mut self, _useful: usize) -> Result<Option<Frame>, Error> {
        if self.hung_up || self.ring.memory().revoked().load(Ordering::SeqCst) != 0 {
            return Ok(None);
        }
        if self.head.is_some() {
            return Ok(self.head);
        }
        let Some((descriptor, _)) = self.ring.peek() else { return Ok(None) };
        let (header, mut at) = (descriptor.header(), 0);
        if header.len > 0 {
            // A kernel that reads where no element begins would be the end of our context.
            let unit = DType::from_u8(header.signature.dtype).map_or(1, |dtype| dtype.size() as u64);
            if !descriptor.location.is_multiple_of(unit) {
                let problem = format!("no element begins at offset {}", descriptor.location);
                return Err(Error::protocol(self.peer.rank, problem));
            }
            let Some(here) = self.locate(descriptor.location, header.len as usize)? else { return Ok(None) };
            at = here;
            let (peer, ready) = (self.peer.clone(), mark(self.frames));
            self.ours.commands.put(move || peer.wait(READY, ready));
        }
        let data = std::ptr::without_provenance(at as usize);
        self.head = Some(Frame { header, data, ready: header.len as usize, done: 0 });
        Ok(self.head)
    }

    fn release(&mut self, bytes: usize) {
        let Some(frame) = &mut self.head else { return };
        if !frame.advance(bytes) {
            return;
        }
        let (is_marked, peer, done) = (frame.header.len > 0, self.peer.clone(), mark(self.frames));
        self.head = None;
        self.frames += 1;
        let (count, memory, doorbell) = (self.ring.pass(), self.ring.memory().clone(), self.doorbell.clone());
        self.ours.commands.put(move || {
            if is_marked {
                // If this fails, the sender must not write there: it does not get the frame back, and all ranks hear why.
                peer.put(DONE, done)?;
            }
            memory.release(count);
            doorbell.ring();
            Ok(())
        });
    }

    /// Says that nothing more will be read; by the last word the sender sees when all has been.
    fn hang_up(&mut self) {
        (self.head, self.hung_up) = (None, true);
        let (peer, memory, doorbell) = (self.peer.clone(), self.ring.memory().clone(), self.doorbell.clone());
        self.ours.commands.put_always(move || {
            if peer.put(END, 1).is_ok() {
                memory.release(CLOSED);
                doorbell.ring();
            }
        });
    }
}

impl Drop for FarRx {
    fn drop(&mut self) {
        if !self.imports.is_empty() {
            retire(&self.ours.stream, std::mem::take(&mut self.imports));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_beside_a_descriptor_and_is_read_as_it_was_written() {
        let name = Exported {
            number: u64::MAX - 1,
            offset: 12,
            handle: std::array::from_fn(|i| i as u8),
            base: 1 << 40,
            bytes: 99,
        };
        let bytes = written(&name);
        assert!(bytes.len() <= crate::link::INLINE);
        assert_eq!(read(&bytes), name);
        assert_eq!(CARD, 8 + bytes.len());
    }
}
