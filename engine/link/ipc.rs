//! Links between ranks whose devices touch each other's memory, in two processes of one host.
//!
//! The same as [`super::peer`], with what processes can share: the events beside the cells are made for it, and a cell says
//! beside its descriptor which block of the sender's the frame lies in, and what the driver opens it by. `location` is the
//! offset in that block.
//!
//! What a process was to record when it died is never reached, and a stream that waits for it would wait for ever. So a
//! rank that gives up and whose stream does not come to its end *lets go* ([`Far::let_go`]): it says so in all rings, and
//! records its peers' events itself. What any device reads from then on counts for nothing, and an operation is only good
//! if no rank has said so by its end ([`Far::check`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::local::{Bell, Descriptor, RawRing, RingFlag};
use super::peer::{PeerDevice, Place};
use super::ring::{CELLS, Consumer, Producer};
use super::{Frame, Header, LinkRx, LinkTx, Posted};
use crate::error::Error;
use crate::mem::device::{DeviceStream, Exported, Import, SharedEvent, retire};
use crate::types::{DType, Rank};

/// Bytes of a driver's handle.
const HANDLE: usize = 64;
const MARKS: usize = CELLS as usize;
/// What a rank gives to each rank in another process: the handles of its events, and where a piece of its memory is.
pub(crate) const CARD: usize = (2 * MARKS + 1) * HANDLE + NAME;
/// A name of memory: number, offset, handle.
const NAME: usize = 16 + HANDLE;

/// A ring's flag: what was lent is taken back.
const REVOKED: u32 = 1;
/// And what was read is not what was meant.
const LET_GO: u32 = 2;

fn written(name: &Exported) -> [u8; NAME] {
    let mut bytes = [0; NAME];
    bytes[..8].copy_from_slice(&name.number.to_le_bytes());
    bytes[8..16].copy_from_slice(&name.offset.to_le_bytes());
    bytes[16..].copy_from_slice(&name.handle);
    bytes
}

fn read(bytes: &[u8; NAME]) -> Exported {
    let (mut number, mut offset, mut handle) = ([0; 8], [0; 8], [0; HANDLE]);
    number.copy_from_slice(&bytes[..8]);
    offset.copy_from_slice(&bytes[8..16]);
    handle.copy_from_slice(&bytes[16..]);
    Exported { number: u64::from_le_bytes(number), offset: u64::from_le_bytes(offset), handle }
}

/// The events of one side of two links.
struct Marks {
    /// Of the link from there: a frame may be read.
    ready: Vec<SharedEvent>,
    /// Of the link to there: a frame has been read.
    done: Vec<SharedEvent>,
    /// Nothing more is read.
    end: SharedEvent,
}

/// What a rank has made for one in another process; to be told to it.
pub(crate) struct Offer {
    marks: Arc<Marks>,
    pub(crate) card: Vec<u8>,
}

impl Offer {
    /// `probe`: some memory of the pool.
    pub(crate) fn new(stream: &DeviceStream, probe: &Exported) -> Result<Offer, Error> {
        let mut card = Vec::with_capacity(CARD);
        let mut make = || {
            let (event, handle) = stream.shared_event()?;
            card.extend_from_slice(&handle);
            Ok(event)
        };
        let ready = (0..MARKS).map(|_| make()).collect::<Result<_, Error>>()?;
        let done = (0..MARKS).map(|_| make()).collect::<Result<_, Error>>()?;
        let marks = Arc::new(Marks { ready, done, end: make()? });
        card.extend_from_slice(&written(probe));
        Ok(Offer { marks, card })
    }
}

/// A rank in another process, and the events of the links with it.
pub(crate) struct FarPeer {
    rank: Rank,
    process: u128,
    ours: Arc<Marks>,
    theirs: Marks,
    /// Keeps open what was opened to see whether it works.
    _probe: Arc<Import>,
}

impl FarPeer {
    /// Opens what a peer has told, which drew this number for its process.
    pub(crate) fn new(
        stream: &DeviceStream,
        (rank, process): (Rank, u128),
        offer: &Offer,
        card: &[u8],
    ) -> Result<FarPeer, Error> {
        let short = || Error::Protocol { peer: rank, problem: format!("{} bytes for a card", card.len()) };
        let (handles, rest) = card.as_chunks::<HANDLE>();
        let name = card.last_chunk::<NAME>().filter(|_| card.len() == CARD && rest.len() == NAME % HANDLE);
        let name = read(name.ok_or_else(short)?);
        let mut handles = handles.iter();
        let mut open = || stream.open_event(*handles.next().ok_or_else(short)?);
        let ready = (0..MARKS).map(|_| open()).collect::<Result<_, Error>>()?;
        let done = (0..MARKS).map(|_| open()).collect::<Result<_, Error>>()?;
        let theirs = Marks { ready, done, end: open()? };
        let probe = Import::open(stream, process, &name)?;
        Ok(FarPeer { rank, process, ours: offer.marks.clone(), theirs, _probe: probe })
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

    /// What anybody reads of this rank's from here on, or has read and not finished with, counts for nothing.
    pub(crate) fn distrust(&self) {
        self.to.iter().for_each(|flag| flag.raise(LET_GO));
    }

    /// See the module: no stream of ours waits for a peer's any more.
    pub(crate) fn let_go(&self, stream: &DeviceStream) -> Result<(), Error> {
        if self.let_go.load(Ordering::SeqCst) {
            return Ok(());
        }
        let idle = DeviceStream::high_priority(&stream.device())?;
        self.let_go.store(true, Ordering::SeqCst);
        self.distrust();
        let marks = self.peers.iter().flatten().map(|peer| &peer.theirs);
        let events = marks.flat_map(|marks| marks.ready.iter().chain(&marks.done));
        // All of them, whatever the driver says of one.
        let mut result = Ok(());
        for event in events {
            result = result.and(idle.record_shared(event));
        }
        result
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
    bell: Bell,
    ours: Arc<PeerDevice>,
    far: Arc<Far>,
    peer: Arc<FarPeer>,
    /// Frames whose release our stream has been told of.
    seen: u64,
}

impl FarTx {
    pub(crate) fn new(
        place: Place,
        ours: Arc<PeerDevice>,
        far: Arc<Far>,
        peer: Arc<FarPeer>,
    ) -> Result<FarTx, Error> {
        let Place { region, ring, bell, .. } = place;
        Ok(FarTx { ring: Producer::new(RawRing::new(region, ring)?), bell, ours, far, peer, seen: 0 })
    }

    fn done(&self, frame: u64) -> &SharedEvent {
        &self.peer.theirs.done[(frame % CELLS) as usize]
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
        let (frame, mut offset) = (self.ring.posted(), 0);
        if header.len > 0 {
            let named = self.far.export(&self.ours.stream, payload.addr() as u64, header.len as usize)?;
            let stranger = || Error::system("lend device memory", "it is not of the pool (a bug)");
            let named = named.ok_or_else(stranger)?;
            offset = named.offset;
            self.ring.memory().write_beside(frame, &written(&named));
            self.ours.stream.record_shared(&self.peer.ours.ready[(frame % CELLS) as usize])?;
        }
        self.ring.post((Descriptor::new(&header, offset), std::ptr::null()));
        self.bell.ring();
        Ok(Posted::Held)
    }

    /// What is counted here, our stream may write again: it waits for the reader's.
    fn released(&mut self) -> Result<u64, Error> {
        let released = self.ring.released();
        if self.ring.memory().revoked().load(Ordering::SeqCst) != 0 {
            return Ok(released); // the end of the link: `is_read_elsewhere` is asked
        }
        // A peer that has closed the ring has recorded what it has read.
        while self.seen < released {
            // Of a frame of nothing, it stands for an earlier one.
            self.ours.stream.wait_shared(self.done(self.seen))?;
            self.seen += 1;
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
            return !self.peer.theirs.end.is_reached();
        }
        let posted = self.ring.posted();
        self.ring.released() < posted || (self.seen..posted).any(|frame| !self.done(frame).is_reached())
    }
}

/// The receiving end.
pub(crate) struct FarRx {
    ring: Consumer<RawRing>,
    bell: Bell,
    ours: Arc<PeerDevice>,
    peer: Arc<FarPeer>,
    /// The peer's blocks, by number.
    imports: HashMap<u64, Arc<Import>>,
    frames: u64,
    head: Option<Frame>,
    hung_up: bool,
}

// SAFETY: the frame's address is the device's: nobody on the host follows it. All else is Send.
unsafe impl Send for FarRx {}

impl FarRx {
    pub(crate) fn new(place: Place, ours: Arc<PeerDevice>, peer: Arc<FarPeer>) -> Result<FarRx, Error> {
        let Place { region, ring, bell, .. } = place;
        let ring = Consumer::new(RawRing::new(region, ring)?);
        Ok(FarRx { ring, bell, ours, peer, imports: HashMap::new(), frames: 0, head: None, hung_up: false })
    }

    /// Where a frame of so many bytes is, here.
    fn locate(&mut self, location: u64, bytes: usize) -> Result<u64, Error> {
        let name = read(&self.ring.memory().read_beside(self.frames));
        let import = match self.imports.get(&name.number) {
            Some(import) => import.clone(),
            None => {
                let import = Import::open(&self.ours.stream, self.peer.process, &name)?;
                self.imports.insert(name.number, import.clone());
                import
            }
        };
        import.at(location, bytes).ok_or_else(|| {
            let whole = import.bytes();
            let problem =
                format!("{bytes} bytes at offset {location} are not in its device memory of {whole} bytes");
            Error::Protocol { peer: self.peer.rank, problem }
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
                return Err(Error::Protocol { peer: self.peer.rank, problem });
            }
            at = self.locate(descriptor.location, header.len as usize)?;
            let ready = &self.peer.theirs.ready[(self.frames % CELLS) as usize];
            self.ours.stream.wait_shared(ready)?;
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
        let done = &self.peer.ours.done[(self.frames % CELLS) as usize];
        if frame.header.len > 0
            && let Err(error) = self.ours.stream.record_shared(done)
        {
            // The sender must not write there: it does not get the frame back, and all ranks hear why.
            self.ours.fail(error);
            return;
        }
        self.head = None;
        self.frames += 1;
        self.ring.release();
        self.bell.ring();
    }

    /// Says that nothing more will be read; the sender asks `end` when all has been.
    fn hang_up(&mut self) {
        (self.head, self.hung_up) = (None, true);
        if self.ours.stream.record_shared(&self.peer.ours.end).is_ok() {
            self.ring.close();
            self.bell.ring();
        }
    }
}

impl Drop for FarRx {
    fn drop(&mut self) {
        retire(&self.ours.stream, self.imports.drain().map(|(_, import)| import).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_beside_a_descriptor_and_is_read_as_it_was_written() {
        let name = Exported { number: u64::MAX - 1, offset: 12, handle: std::array::from_fn(|i| i as u8) };
        let bytes = written(&name);
        assert!(bytes.len() <= crate::link::INLINE);
        assert_eq!(read(&bytes), name);
        assert_eq!(CARD, (2 * MARKS + 1) * HANDLE + bytes.len());
    }
}
