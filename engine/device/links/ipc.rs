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
//!
//! What is lent to be folded ([`LinkTx::lend`]) is written, too, by the stream of the peer. Two things follow. The peer gives its stream the kernel only when the
//! lender's word has come, which its host looks for: no stream waits for that word, so a rank that lets go writes to nobody's memory before that memory's owner is ready.
//! And where an operation fails, the lender has its memory back only when the peer's stream has said that it is past ([`PAST`]), or the peer's process has exited
//! ([`FarPeer::may_write`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use super::names::{NAME, read, written};
use super::peer::PeerDevice;
use super::words::{DONE, END, Inbox, Outbox, PAST, PAST_END, READY, mark};
use crate::device::blocks::Exported;
use crate::device::ipc::{Import, Opening, retire};
use crate::device::stream::DeviceStream;
use crate::error::Error;
use crate::link::cells::{Descriptor, RawRing, RingFlag};
use crate::link::exit::Exit;
use crate::link::local::Doorbell;
use crate::link::region::Region;
use crate::link::ring::{CELLS, CLOSED, Consumer, Producer, RingMemory, publish};
use crate::link::{Frame, Header, LinkRx, LinkTx, Loan, Place, Posted};
use crate::types::{DType, Rank};

/// What a rank gives to each rank in another process: where its inbox is in its region, and where a piece of its memory is.
pub(crate) const CARD: usize = 8 + NAME;

/// In a descriptor's `location`: the frame is a loan. The bytes of its memory are added, and beside the descriptor lie the names of its two ends. No offset in
/// a block is as large.
const LOAN: u64 = 1 << 63;

/// A ring's flag: what was lent is taken back.
const REVOKED: u32 = 1;
/// And what was read is not what was meant.
const LET_GO: u32 = 2;

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
    /// Whether its process has exited. None where the system cannot tell.
    exit: Option<Exit>,
    /// It was given memory to read, or to write.
    is_given: AtomicBool,
    /// How many loans were made to it.
    lent: AtomicU64,
    /// It lends us memory now; and its stream has come to where that may be touched.
    has_lent: AtomicBool,
    is_ready: AtomicBool,
    /// Keeps open what was opened to see whether it works.
    _probe: Arc<Import>,
}

impl FarPeer {
    /// Opens what a peer has told, which drew this number for its process, and whose region this is.
    pub(crate) fn new(
        stream: &DeviceStream,
        rank: Rank,
        process: u128,
        region: &Arc<Region>,
        exit: Option<Exit>,
        offer: &Offer,
        card: &[u8],
    ) -> Result<FarPeer, Error> {
        let short = || Error::protocol(rank, format!("{} bytes for a card", card.len()));
        let (at, name) = card.split_first_chunk::<8>().ok_or_else(short)?;
        let name = read(name.try_into().map_err(|_| short())?);
        let probe = Import::open(stream, process, &name)?;
        let outbox = Outbox::open(stream, rank, region.clone(), u64::from_le_bytes(*at))?;
        let (stream, inbox, outbox) = (stream.clone(), offer.inbox.clone(), Some(outbox));
        let (is_given, lent) = (AtomicBool::new(false), AtomicU64::new(0));
        let [has_lent, is_ready] = [false; 2].map(AtomicBool::new);
        let _probe = probe;
        Ok(FarPeer { rank, process, stream, inbox, outbox, exit, is_given, lent, has_lent, is_ready, _probe })
    }

    /// Tells the peer's stream, when ours comes here.
    fn put(&self, all: &[(usize, u32)]) -> Result<(), Error> {
        let gone = || Error::system("tell another process", "its words are gone (a bug)");
        self.outbox.as_ref().ok_or_else(gone)?.put(&self.stream, all)
    }

    /// Whether it touches nothing of ours any more, whatever it was given: its process has exited, or its stream is past all that it will ever do.
    fn is_past(&self) -> bool {
        self.exit.as_ref().is_some_and(Exit::has_come) || self.inbox.shows(PAST_END, 1)
    }

    /// Whether it may still write to memory that it was lent. Nothing that this rank does to end its own waits changes that.
    fn may_write(&self) -> bool {
        let lent = self.lent.load(Ordering::Acquire);
        lent > 0 && !self.inbox.shows(PAST, lent as u32) && !self.is_past()
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

/// Where the rings to a rank and from it are.
pub(crate) struct FarRings {
    pub(crate) rank: Rank,
    pub(crate) to: Place,
    pub(crate) from: Place,
}

impl Far {
    pub(crate) fn new(
        peers: Vec<Option<Arc<FarPeer>>>,
        keep: Arc<()>,
        rings: Vec<FarRings>,
    ) -> Result<Far, Error> {
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for ring in rings {
            to.push(RingFlag::new(ring.to.region, ring.to.ring)?);
            from.push((ring.rank, RingFlag::new(ring.from.region, ring.from.ring)?));
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

    /// Whether a peer lends memory that may not be touched yet: nobody tells when it may, so that somebody has to look.
    pub(crate) fn is_unready(&self) -> bool {
        self.unready().next().is_some()
    }

    /// The ranks that have called the operation in work, and lend memory for it that is not ready.
    pub(crate) fn unready(&self) -> impl Iterator<Item = Rank> {
        let waits = |peer: &&Arc<FarPeer>| {
            peer.has_lent.load(Ordering::Acquire) && !peer.is_ready.load(Ordering::Acquire)
        };
        self.peers.iter().flatten().filter(waits).map(|peer| peer.rank)
    }

    /// Whether all ranks in other processes lend memory for the operation in work: they have called it.
    pub(crate) fn all_have_lent(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.has_lent.load(Ordering::Acquire))
    }

    /// Of a communicator that has failed: whether a peer may still touch what it was given to read or to write, in the order of streams or out of it.
    pub(crate) fn may_be_touched(&self) -> bool {
        let touches = |peer: &Arc<FarPeer>| peer.is_given.load(Ordering::Acquire) && !peer.is_past();
        self.peers.iter().flatten().any(touches)
    }

    /// Whether a peer may still write to memory that it was lent.
    pub(crate) fn may_be_written(&self) -> bool {
        self.peers.iter().flatten().any(|peer| peer.may_write())
    }

    /// Whether this rank's stream was let go on without its peers.
    pub(crate) fn has_let_go(&self) -> bool {
        self.let_go.load(Ordering::SeqCst)
    }

    /// Whether what has come to its end did so in order. Asked once it has.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let by = self.from.iter().find(|(_, flag)| flag.is() >= LET_GO).map(|(rank, _)| *rank);
        if by.is_none() && !self.has_let_go() {
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

    /// Posts a frame behind what this rank's stream holds then. `given`: what the peer is given, and of how many bytes each; what is written beside the descriptor
    /// are the names of these.
    fn post_behind(&mut self, header: Header, location: Option<u64>, given: ([u64; 2], usize)) {
        let (frame, memory, doorbell) =
            (self.ring.claim(), self.ring.memory().clone(), self.doorbell.clone());
        let (ours, far, peer, posted) =
            (self.ours.clone(), self.far.clone(), self.peer.clone(), self.posted.clone());
        self.full[(frame % CELLS) as usize] = header.len > 0;
        self.ours.commands.put(move || {
            let (addresses, bytes) = given;
            let mut offset = 0;
            if bytes > 0 {
                let stranger =
                    || Error::system("lend device memory", "it has no name for other processes (a bug)");
                let name = |address| far.export(&ours.stream, address, bytes)?.ok_or_else(stranger);
                let first = name(addresses[0])?;
                offset = first.offset;
                if location.is_some() {
                    let second = if addresses[1] == addresses[0] { first } else { name(addresses[1])? };
                    memory.write_beside(frame, [written(&first), written(&second)].as_flattened());
                } else {
                    memory.write_beside(frame, &written(&first));
                }
            }
            if header.len > 0 {
                peer.is_given.store(true, Ordering::Release);
                peer.put(&[(READY, mark(frame))])?;
            }
            if location.is_some() {
                peer.lent.fetch_add(1, Ordering::AcqRel);
            }
            let descriptor = Descriptor::new(&header, location.unwrap_or(offset));
            publish(&memory, frame, (descriptor, std::ptr::null()));
            posted.store(frame + 1, Ordering::Release);
            doorbell.ring();
            Ok(())
        });
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
        self.post_behind(header, None, ([payload.addr() as u64; 2], header.len as usize));
        Ok(Posted::Held)
    }

    /// Whatever is lent has a name, or is a copy that has one (`Binding::cannot_lend`).
    fn can_lend(&self, _: *const u8, _: usize) -> bool {
        true
    }

    // The loan's ends are a device's addresses, too.
    unsafe fn lend(&mut self, header: Header, loan: Loan) -> Result<(), Error> {
        let header = Header { len: Loan::FRAME as u32, ..header };
        let ends = [loan.input.addr() as u64, loan.output.addr() as u64];
        self.post_behind(header, Some(LOAN + loan.bytes as u64), (ends, loan.bytes));
        Ok(())
    }

    fn has_hung_up(&self) -> bool {
        self.ring.is_closed()
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
        if self.peer.is_past() {
            return false;
        }
        if self.peer.may_write() {
            return true;
        }
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
    far: Arc<Far>,
    peer: Arc<FarPeer>,
    /// The peer's blocks, by number.
    imports: HashMap<u64, Opening>,
    /// Woken when one of them is open.
    waker: Waker,
    frames: u64,
    /// How many of them were loans.
    loans: u64,
    head: Option<Frame>,
    /// What the frame after those that were read lends, once it is known where that is.
    loan: Option<Loan>,
    hung_up: bool,
}

// SAFETY: the frame's address is the device's: nobody on the host follows it. All else is Send.
unsafe impl Send for FarRx {}

impl FarRx {
    /// `waker`: of who drives, for when it may go on.
    pub(crate) fn new(
        place: Place,
        ours: Arc<PeerDevice>,
        (far, peer): (Arc<Far>, Arc<FarPeer>),
        waker: Waker,
    ) -> Result<FarRx, Error> {
        let Place { region, ring, doorbell, .. } = place;
        let ring = Consumer::new(RawRing::new(region, ring)?);
        let (imports, frames, loans, head, loan) = (HashMap::new(), 0, 0, None, None);
        Ok(FarRx {
            ring,
            doorbell,
            ours,
            far,
            peer,
            imports,
            waker,
            frames,
            loans,
            head,
            loan,
            hung_up: false,
        })
    }

    /// Where so many bytes at `location` of a block are, here, once the block is open. They are of elements of this type.
    fn locate(
        &mut self,
        name: Exported,
        location: u64,
        bytes: usize,
        dtype: u8,
    ) -> Result<Option<u64>, Error> {
        // A kernel that reads where no element begins would be the end of our context.
        let unit = DType::from_u8(dtype).map_or(1, |dtype| dtype.size() as u64);
        if !location.is_multiple_of(unit) {
            let problem = format!("no element begins at offset {location}");
            return Err(Error::protocol(self.peer.rank, problem));
        }
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

    /// Looks at the loan of so many bytes that is next. `None`: it may not be touched yet, or it is not known yet where it is.
    fn look_at_loan(&mut self, bytes: usize, dtype: u8) -> Result<Option<Loan>, Error> {
        if self.loan.is_none() {
            let mut ends = [0; 2];
            if bytes > 0 {
                let names: [u8; 2 * NAME] = self.ring.memory().read_beside(self.frames);
                for (end, name) in ends.iter_mut().zip(names.as_chunks::<NAME>().0) {
                    let name = read(name);
                    let Some(here) = self.locate(name, name.offset, bytes, dtype)? else { return Ok(None) };
                    *end = here;
                }
            }
            let [input, output] = ends.map(|end| end as usize);
            let output = std::ptr::without_provenance_mut(output);
            self.loan = Some(Loan { input: std::ptr::without_provenance(input), output, bytes });
            self.peer.has_lent.store(true, Ordering::Release);
        }
        // The word may be one that this rank's host wrote to end the waits of its own stream. Then it has let go before that.
        if !self.peer.inbox.shows(READY, mark(self.frames)) || self.far.has_let_go() {
            return Ok(None);
        }
        self.peer.is_ready.store(true, Ordering::Release);
        Ok(self.loan)
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
        let (len, dtype) = (header.len as usize, header.signature.dtype);
        if descriptor.location & LOAN != 0 && len == Loan::FRAME {
            if self.look_at_loan((descriptor.location & !LOAN) as usize, dtype)?.is_none() {
                return Ok(None);
            }
        } else if len > 0 {
            let name = read(&self.ring.memory().read_beside(self.frames));
            let Some(here) = self.locate(name, descriptor.location, len, dtype)? else { return Ok(None) };
            at = here;
            let (peer, ready) = (self.peer.clone(), mark(self.frames));
            self.ours.commands.put(move || peer.wait(READY, ready));
        }
        let data = std::ptr::without_provenance(at as usize);
        self.head = Some(Frame { header, data, ready: header.len as usize, done: 0 });
        Ok(self.head)
    }

    fn borrow(&self) -> Result<Loan, Error> {
        let missing = || Error::system("use memory that another process lends", "nothing is lent (a bug)");
        self.loan.ok_or_else(missing)
    }

    fn release(&mut self, bytes: usize) {
        let Some(frame) = &mut self.head else { return };
        if !frame.advance(bytes) {
            return;
        }
        let (is_marked, peer, done) = (frame.header.len > 0, self.peer.clone(), mark(self.frames));
        self.head = None;
        let past = self.loan.take().map(|_| {
            self.loans += 1;
            self.peer.has_lent.store(false, Ordering::Release);
            self.peer.is_ready.store(false, Ordering::Release);
            self.loans as u32
        });
        self.frames += 1;
        let (count, memory, doorbell) = (self.ring.pass(), self.ring.memory().clone(), self.doorbell.clone());
        self.ours.commands.put(move || {
            if is_marked {
                // If this fails, the sender must not write there: it does not get the frame back, and all ranks hear why.
                match past {
                    Some(past) => peer.put(&[(DONE, done), (PAST, past)])?,
                    None => peer.put(&[(DONE, done)])?,
                }
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
            if peer.put(&[(END, 1), (PAST_END, 1)]).is_ok() {
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
