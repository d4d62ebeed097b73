//! Links between ranks whose devices touch each other's memory, in two processes of one host.
//!
//! They work as those of [`super::peer`] do, with what processes can share. Beside its descriptor a cell names the block of the sender in
//! which the payload lies, with the handle by which the driver opens the block; the descriptor's `location` is the offset in that block. In
//! place of events there are words that count frames ([`super::words`]): the stream of one rank writes them, and the stream of the other rank
//! waits for them.
//!
//! When a process dies, the words that it has not written stay unwritten, and a stream that waits for one would wait for ever. So if a
//! communicator fails and a rank's stream does not come to its end, the rank *lets go* ([`Far::let_go`]): it says so in all its rings, and its
//! host writes the words that its own stream waits for. What any device reads from then on counts for nothing, and an operation is good only
//! if no rank has let go by its end ([`Far::check`]).
//!
//! Memory that is lent to be folded ([`LinkTx::lend`]) is also written by the peer's stream. Two rules follow. The peer's host looks for the
//! lender's word, and puts the kernel on its stream only when the word has come. No stream waits for that word, so a rank that has let go
//! writes to no memory whose owner is not ready. And if an operation fails, the lender gets its buffer back only when the peer's stream has
//! said that it is past the loan ([`PAST`]), or the peer's process has exited ([`FarPeer::may_write`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use super::names::{NAME, read, written};
use super::offer::{Offer, Offered};
use super::peer::PeerDevice;
use super::words::{DONE, END, Inbox, Outbox, PAST, PAST_END, READY, mark};
use crate::device::blocks::Exported;
use crate::device::ipc::{Import, Opening, retire};
use crate::device::stream::DeviceStream;
use crate::error::Error;
use crate::link::cells::{Descriptor, RawRing, RingFlag};
use crate::link::exit::Exit;
use crate::link::local::Doorbell;
use crate::link::ring::{CELLS, CLOSED, Consumer, Producer, RingMemory, publish};
use crate::link::{Frame, Header, LinkRx, LinkTx, Loan, Place, Posted};
use crate::types::{DType, Rank};

/// This bit of a descriptor's `location` says that the frame is a loan. The other bits are then the loan's length in bytes, and the names of
/// its input and output lie beside the descriptor. No offset in a block is as large as this bit.
const LOAN: u64 = 1 << 63;

/// A ring's flag: the sender has taken back what it lent.
const REVOKED: u32 = 1;
/// A ring's flag: the sender does not vouch for its memory any more ([`Far::distrust`]), so what was read from it may be wrong.
const LET_GO: u32 = 2;

/// A rank in another process, and the words that its stream and ours wait for.
pub(crate) struct FarPeer {
    rank: Rank,
    process: u128,
    /// Our stream, which writes words for the peer and waits for the peer's.
    stream: DeviceStream,
    inbox: Arc<Inbox>,
    /// `None` only while this is being dropped.
    outbox: Option<Outbox>,
    /// Tells whether its process has exited. `None` where the system cannot tell.
    exit: Option<Exit>,
    /// Whether it has been given memory to read or to write.
    is_given: AtomicBool,
    /// How many loans were made to it.
    lent: AtomicU64,
    /// `has_lent`: it lends us memory now. `is_ready`: its stream has come to the point from which we may touch that memory.
    has_lent: AtomicBool,
    is_ready: AtomicBool,
    /// Keeps open the memory of the peer that was opened to see whether opening works.
    _probe: Arc<Import>,
}

impl FarPeer {
    /// Opens what a peer has offered. `process`: the number that its process has drawn.
    pub(crate) fn new(
        stream: &DeviceStream,
        process: u128,
        exit: Option<Exit>,
        offer: &Offer,
        offered: Offered,
    ) -> Result<FarPeer, Error> {
        let Offered { rank, name, page } = offered;
        let probe = Import::open(stream, process, &name)?;
        let outbox = Outbox::open(stream, page)?;
        let (stream, inbox, outbox) = (stream.clone(), offer.inbox.clone(), Some(outbox));
        let (is_given, lent) = (AtomicBool::new(false), AtomicU64::new(0));
        let [has_lent, is_ready] = [false; 2].map(AtomicBool::new);
        let _probe = probe;
        Ok(FarPeer { rank, process, stream, inbox, outbox, exit, is_given, lent, has_lent, is_ready, _probe })
    }

    /// Makes our stream write these words to the peer, each with its value, behind what it holds now.
    fn put(&self, all: &[(usize, u32)]) -> Result<(), Error> {
        let gone = || Error::system("tell another process", "its words are gone (a bug)");
        self.outbox.as_ref().ok_or_else(gone)?.put(&self.stream, all)
    }

    /// Whether it touches nothing of ours any more: its process has exited, or its stream is past all work on memory that it was given.
    fn is_past(&self) -> bool {
        self.exit.as_ref().is_some_and(Exit::has_come) || self.inbox.shows(PAST_END, 1)
    }

    /// Whether it may still write to memory that it was lent. This looks only at words that our host never writes to end waits of our stream.
    fn may_write(&self) -> bool {
        let lent = self.lent.load(Ordering::Acquire);
        lent > 0 && !self.inbox.shows(PAST, lent as u32) && !self.is_past()
    }

    /// Makes our stream wait until this word, which the peer's stream writes, shows `value`.
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
    /// By rank; `None` for the ranks of this process.
    pub(crate) peers: Vec<Option<Arc<FarPeer>>>,
    /// As long as this lives, blocks that were lent are not given back to the driver.
    keep: Arc<()>,
    /// The flags of the rings to all other ranks, and of the rings from them.
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

    /// From here on blocks that were lent are never given back to the driver, as peers in other processes may still use them at any time.
    pub(crate) fn leave_open(&self) {
        std::mem::forget(self.keep.clone());
    }

    /// The name by which the peers open this memory. `None`: it has none.
    pub(crate) fn export(
        &self,
        stream: &DeviceStream,
        at: u64,
        bytes: usize,
    ) -> Result<Option<Exported>, Error> {
        stream.export(&self.keep, at, bytes)
    }

    /// Gives this memory a name for the peers. `Ok(Err(why))`: it can have none.
    pub(crate) fn share(
        &self,
        stream: &DeviceStream,
        at: u64,
        bytes: usize,
    ) -> Result<Result<(), String>, Error> {
        stream.share(&self.keep, at, bytes)
    }

    /// Tells all other ranks that what they read of this rank's memory from here on, or for operations that are not over, counts for nothing.
    pub(crate) fn distrust(&self) {
        self.to.iter().for_each(|flag| flag.raise(LET_GO));
    }

    /// Lets go (see the module): ends all waits of our stream for the peers' words. The caller sees to it that no more waits are put there,
    /// and calls this again while the stream has not come to its end: the stream of a peer that lives may write a smaller value over a word.
    pub(crate) fn let_go(&self) {
        if !self.let_go.swap(true, Ordering::SeqCst) {
            self.distrust();
        }
        self.peers.iter().flatten().for_each(|peer| peer.inbox.release());
    }

    /// Whether a peer lends memory that may not be touched yet. Nothing wakes this rank once the memory is ready, so whoever drives has to look.
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

    /// For a communicator that has failed: whether a peer may still touch what it was given to read or to write, even if our stream no longer
    /// waits for it.
    pub(crate) fn may_be_touched(&self) -> bool {
        let touches = |peer: &Arc<FarPeer>| peer.is_given.load(Ordering::Acquire) && !peer.is_past();
        self.peers.iter().flatten().any(touches)
    }

    /// Whether a peer may still write to memory that it was lent.
    pub(crate) fn may_be_written(&self) -> bool {
        self.peers.iter().flatten().any(|peer| peer.may_write())
    }

    /// Whether this rank has let its stream go on without waiting for its peers.
    pub(crate) fn has_let_go(&self) -> bool {
        self.let_go.load(Ordering::SeqCst)
    }

    /// Asked when an operation has come to its end on the streams. An error if this rank or another has let go: then the result may be wrong.
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
    /// The frames before this number are released, and our stream waits for the reader's stream where they had a payload.
    seen: u64,
    /// Which frames in the ring have a payload. No stream reads an empty frame, and none writes a word for it.
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

    /// What the word `DONE` shows once the peer's stream has read the frames from `seen` up to, and without, `until`. `None`: all are empty.
    fn done(&self, until: u64) -> Option<u32> {
        let last = (self.seen..until).rev().find(|frame| self.full[(frame % CELLS) as usize]);
        last.map(mark)
    }

    /// Appends a command that posts a frame behind what this rank's stream then holds. `location`: only for a loan ([`LOAN`]). `given`: the two
    /// addresses that the peer is given (equal if the frame is no loan), and how many bytes lie at each. Names go beside the descriptor.
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

    // `payload` is a device's address: the host never reads there.
    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        self.post_behind(header, None, ([payload.addr() as u64; 2], header.len as usize));
        Ok(Posted::Held)
    }

    /// Whatever is lent has a name, or is a copy that has one (`Binding::cannot_lend`).
    fn can_lend(&self, _: *const u8, _: usize) -> bool {
        true
    }

    // The loan's addresses are a device's, too.
    unsafe fn lend(&mut self, header: Header, loan: Loan) -> Result<(), Error> {
        let header = Header { len: Loan::FRAME as u32, ..header };
        let ends = [loan.input.addr() as u64, loan.output.addr() as u64];
        self.post_behind(header, Some(LOAN + loan.bytes as u64), (ends, loan.bytes));
        Ok(())
    }

    fn has_hung_up(&self) -> bool {
        self.ring.is_closed()
    }

    /// What is put on our stream after this call may write to the memory of the counted frames: our stream waits for the reader's stream first.
    fn released(&mut self) -> Result<u64, Error> {
        let released = self.ring.released();
        if self.ring.memory().revoked().load(Ordering::SeqCst) != 0 {
            return Ok(released); // this end has revoked the link: from here on `is_read_elsewhere` is asked instead
        }
        if self.seen < released {
            let wait = match self.ring.is_closed() {
                // The reader has hung up. It may not have read all frames; its stream writes END behind all that it has read.
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

    /// The reader takes no more frames. `is_read_elsewhere` tells whether its stream may still use those that it has taken.
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
    /// The peer's blocks that are open or being opened here, by their numbers.
    imports: HashMap<u64, Opening>,
    /// Woken when one of these blocks is open.
    waker: Waker,
    frames: u64,
    /// How many of the `frames` that were released so far were loans.
    loans: u64,
    head: Option<Frame>,
    /// What the next frame lends, once its addresses in this process are known.
    loan: Option<Loan>,
    hung_up: bool,
}

// SAFETY: the addresses in `head` and `loan` are a device's, which the host never follows and which are tied to no thread. All else is Send.
unsafe impl Send for FarRx {}

impl FarRx {
    /// `waker` wakes whoever drives this rank, when a block is open.
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

    /// The address here of the `bytes` bytes at `location` in the named block, which are elements of type `dtype`. `None`: the block is not open yet.
    fn locate(
        &mut self,
        name: Exported,
        location: u64,
        bytes: usize,
        dtype: u8,
    ) -> Result<Option<u64>, Error> {
        // A kernel that reads at a misaligned address would make our CUDA context unusable.
        let unit = DType::from_u8(dtype).map_or(1, |dtype| dtype.size() as u64);
        if !location.is_multiple_of(unit) {
            let problem = format!("its device memory is misaligned: no element begins at offset {location}");
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
                false => "it names device memory that it has given back".to_owned(),
            };
            Error::protocol(self.peer.rank, problem)
        })
    }

    /// Looks at the next frame, a loan of `bytes` bytes. `None`: the memory may not be touched yet, or its blocks are not open yet.
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
        // The word may come from this rank's own host, which writes it to end waits of its stream. But then the rank has let go before.
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
            if header.message & 0xffff != Loan::MESSAGE {
                return Err(Error::protocol(self.peer.rank, "a loan of device memory in place of a message"));
            }
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
                // If this fails, the sender must not write to the memory: it does not get the frame back, and the communicator fails.
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

    /// Says that no more frames are taken. By the words END and PAST_END the sender sees when this rank's stream is past all that it was given.
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
