//! Links between ranks of one host: a ring of descriptors in the sender's region; the payload is lent.
//!
//! A short payload lies in the cell itself. Otherwise, in one process, the descriptor names the sender's own memory, which the receiver
//! reads in place; between processes it names a slot, or a user's buffer, in the sender's region.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::net::SendFlags;

use super::cells::{Descriptor, RawRing};
use super::exit::{Exit, Lease};
use super::layout::LINE;
use super::locks::EngineLock;
use super::region::Region;
use super::ring::{Consumer, Producer};
use super::waits::{Wait, kept};
use super::{
    Frame, Header, INLINE, Lends, LinkKind, LinkRx, LinkTx, Loan, Locality, Place, Posted, SLOT, Site,
};
use crate::error::Error;
use crate::types::{LinkClass, Rank};

const NOWHERE: u64 = u64::MAX;
/// Payloads of at most this many bytes go in the descriptor itself, and need no other cache line.
const TINY: usize = size_of::<u64>();

/// Wakes a rank's progress thread when it sleeps.
#[derive(Clone)]
pub(crate) struct Doorbell {
    region: Arc<Region>,
    fd: Arc<OwnedFd>,
}

impl Doorbell {
    pub(crate) fn new(region: Arc<Region>, fd: Arc<OwnedFd>) -> Doorbell {
        Doorbell { region, fd }
    }

    /// Called after publishing. Pairs with the sleeper's "set the flag, fence, look again".
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        let flag = self.region.doorbell_flag();
        if flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0 {
            // Never waits, whatever kind of descriptor a peer has given. If the socket is full, its owner wakes anyway.
            let _ = rustix::net::send(&*self.fd, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}

/// The doorbell of the rank at the other end of a link, which can be held for a while.
struct Bell {
    doorbell: Doorbell,
    /// `Some` while the bell is held: whether it is to be rung when it is let go.
    held: Option<bool>,
}

impl Bell {
    fn new(doorbell: Doorbell) -> Bell {
        Bell { doorbell, held: None }
    }

    fn ring(&mut self) {
        match &mut self.held {
            Some(due) => *due = true,
            None => self.doorbell.ring(),
        }
    }

    fn hold(&mut self) {
        self.held.get_or_insert(false);
    }

    fn let_go(&mut self) {
        if self.held.take() == Some(true) {
            self.doorbell.ring();
        }
    }
}

/// The lock that a rank holds while it uses memory lent by ranks of its process. A sender that gets the receiver's lock knows that the receiver is
/// not using the memory at that moment.
pub(crate) type MemoryLock = Arc<EngineLock<()>>;

/// Ranks of one process.
pub(crate) static INPROC: LinkKind = LinkKind {
    class: LinkClass::INPROC,
    joins: Locality::SameProcess,
    lends: Lends::Anything,
    max_frame_len: SLOT,
    probe: || Region::private().map(drop),
    open_tx: |site| {
        let Place { region, ring, doorbell, memory_lock } = site.place()?;
        Ok(Box::new(LocalTx::new(region, ring as usize, doorbell, memory_lock)?))
    },
    open_rx: |site| open_rx(site, true),
};

/// Processes of one host; or ranks of one process that are treated as if each had its own process.
pub(crate) static SHM: LinkKind = LinkKind {
    class: LinkClass::SHM,
    joins: Locality::SameHost,
    lends: Lends::Regions,
    max_frame_len: SLOT,
    probe: || Region::shared().map(drop),
    open_tx: |site| {
        let Place { region, ring, doorbell, .. } = site.place()?;
        let tx = LocalTx::new(region, ring as usize, doorbell, None)?;
        Ok(Box::new(tx.between_processes(site.exit())))
    },
    open_rx: |site| open_rx(site, false),
};

fn open_rx(site: &dyn Site, same_process: bool) -> Result<Box<dyn LinkRx>, Error> {
    let Place { region, ring, doorbell, .. } = site.place()?;
    Ok(Box::new(LocalRx::new(region, ring, doorbell, site.peer(), same_process)?))
}

/// The sending end on one host.
pub(crate) struct LocalTx {
    ring: Producer<RawRing>,
    bell: Bell,
    /// The memory lock of the receiver, if the receiver is in this process: then any memory can be lent.
    memory_lock: Option<MemoryLock>,
    /// The receiver's process, if it is another one.
    exit: Option<Exit>,
}

impl LocalTx {
    /// Sends over the ring at `offset` of our own `region`.
    pub(crate) fn new(
        region: Arc<Region>,
        offset: usize,
        doorbell: Doorbell,
        memory_lock: Option<MemoryLock>,
    ) -> Result<Self, Error> {
        let ring = Producer::new(RawRing::new(region, offset as u64)?);
        Ok(LocalTx { ring, bell: Bell::new(doorbell), memory_lock, exit: None })
    }

    /// The same link, to a peer in another process; `exit` tells whether that process has exited, if the system can tell.
    pub(crate) fn between_processes(self, exit: Option<Exit>) -> LocalTx {
        LocalTx { exit, ..self }
    }
}

impl LinkTx for LocalTx {
    fn room(&mut self) -> Result<bool, Error> {
        Ok(self.ring.room())
    }

    fn needs_slot(&self, payload: *const u8, len: usize) -> bool {
        self.memory_lock.is_none() && !self.ring.memory().region.is_page(payload, len)
    }

    fn touches(&self, at: *const u8, len: usize) -> bool {
        self.memory_lock.is_none() && self.ring.memory().region.is_page(at, len)
    }

    fn has_exited(&self) -> bool {
        self.exit.as_ref().is_some_and(Exit::has_come)
    }

    fn lease(&self) -> Option<Lease> {
        let ring = self.ring.memory();
        let at = ring.offset()?;
        Some(Lease::lent(&ring.region, at, self.ring.posted(), self.exit.clone()))
    }

    unsafe fn post(&mut self, header: Header, payload: *const u8) -> Result<Posted, Error> {
        let len = header.len as usize;
        let (inline, tiny) = (len <= INLINE, len <= TINY);
        let location = if tiny {
            let mut bytes = [0; TINY];
            if len > 0 {
                // SAFETY: `payload` is valid for `len` bytes (the caller's promise), which `bytes` has room for.
                unsafe { std::ptr::copy_nonoverlapping(payload, bytes.as_mut_ptr(), len) };
            }
            u64::from_ne_bytes(bytes)
        } else if inline {
            NOWHERE
        } else if self.memory_lock.is_some() {
            payload as u64
        } else {
            match self.ring.memory().region.offset_of(payload) {
                Some(offset) => offset,
                None => {
                    return Err(Error::system(
                        "send through shared memory",
                        "payload outside the region (a bug)",
                    ));
                }
            }
        };
        let descriptor = Descriptor::new(&header, location);
        self.ring.post((descriptor, if inline && !tiny { payload } else { std::ptr::null() }));
        self.bell.ring();
        Ok(if inline { Posted::Copied } else { Posted::Held })
    }

    fn hold_bell(&mut self) {
        self.bell.hold();
    }

    fn ring_bell(&mut self) {
        self.bell.let_go();
    }

    fn can_lend(&self, at: *const u8, len: usize) -> bool {
        self.memory_lock.is_some() || self.ring.memory().region.is_page(at, len)
    }

    fn can_lend_slots(&self) -> bool {
        true
    }

    unsafe fn lend(&mut self, header: Header, loan: Loan) -> Result<(), Error> {
        let (ends, elsewhere) = ([loan.input, loan.output.cast_const()], self.memory_lock.is_none());
        let region = &self.ring.memory().region;
        let place = |at: *const u8| if elsewhere { region.offset_of(at) } else { Some(at as u64) };
        let (Some(input), Some(output)) = (place(ends[0]), place(ends[1])) else {
            return Err(Error::system("lend memory to a peer", "it is outside the region (a bug)"));
        };
        let places = [input, output, loan.bytes as u64];
        let header = Header { len: size_of_val(&places) as u32, ..header };
        self.ring.post((Descriptor::new(&header, NOWHERE), places.as_ptr().cast()));
        self.bell.ring();
        Ok(())
    }

    fn has_hung_up(&self) -> bool {
        self.ring.is_closed()
    }

    fn released(&mut self) -> Result<u64, Error> {
        Ok(self.ring.released())
    }

    fn revoke(&mut self) -> bool {
        self.ring.memory().revoked().store(1, Ordering::SeqCst);
        // A peer in another process touches only our region, which it keeps mapped itself. A peer in this process may be reading our
        // caller's buffer right now: it does so only under its memory lock, and looks at the flag after taking that lock.
        !kept(Wait::MemoryLock)
            || self.memory_lock.as_ref().is_none_or(|memory_lock| memory_lock.try_lock().is_some())
    }
}

/// The receiving end on one host.
pub(crate) struct LocalRx {
    ring: Consumer<RawRing>,
    bell: Bell,
    peer: Rank,
    same_process: bool,
    head: Option<Frame>,
    hung_up: bool,
}

impl LocalRx {
    /// The ring at `offset` of the sender's `region`; `doorbell` wakes the sender, which may wait for room.
    pub(crate) fn new(
        region: Arc<Region>,
        offset: u64,
        doorbell: Doorbell,
        peer: Rank,
        same_process: bool,
    ) -> Result<Self, Error> {
        let ring = Consumer::new(RawRing::new(region, offset)?);
        Ok(LocalRx { ring, bell: Bell::new(doorbell), peer, same_process, head: None, hung_up: false })
    }
}

impl LinkRx for LocalRx {
    fn peek(&mut self, _useful: usize) -> Result<Option<Frame>, Error> {
        if self.hung_up {
            return Ok(None);
        }
        // Checked also for a frame that was shown before, as the sender may have taken its memory back since.
        if self.ring.memory().revoked().load(Ordering::SeqCst) != 0 {
            return Ok(None); // the sender took its memory back; its abort message says why
        }
        if let Some(frame) = self.head {
            return Ok(Some(frame));
        }
        let Some((d, inline)) = self.ring.peek() else { return Ok(None) };
        let ring = self.ring.memory();
        let len = d.len as usize;
        let data: *const u8 = match d.location {
            // In the descriptor: nobody writes the cell until its frame is released.
            _ if len <= TINY => inline.wrapping_sub(LINE - std::mem::offset_of!(Descriptor, location)),
            NOWHERE if len <= INLINE => inline,
            at if self.same_process => at as *const u8,
            at if len <= SLOT && ring.region.contains(at, len) => ring.region.at(at as usize),
            at => {
                let problem = format!("{len} bytes at offset {at} are not in its region");
                return Err(Error::protocol(self.peer, problem));
            }
        };
        let header = d.header();
        self.head = Some(Frame { header, data, ready: len, done: 0 });
        Ok(self.head)
    }

    fn hold_bell(&mut self) {
        self.bell.hold();
    }

    fn ring_bell(&mut self) {
        self.bell.let_go();
    }

    fn borrow(&self) -> Result<Loan, Error> {
        let wrong = |problem: String| Error::protocol(self.peer, problem);
        let Some(frame) = self.head.filter(|frame| frame.ready == Loan::FRAME) else {
            return Err(wrong("a loan that names no memory".into()));
        };
        // SAFETY: `Loan::FRAME` bytes can be read (`peek`). Each is read once, as a descriptor is: the peer may write there meanwhile, so
        // what is checked below must be what is used.
        let bytes_of = |at: usize| unsafe { frame.data.add(at).cast::<[u8; 8]>().read_volatile() };
        let [input, output, bytes] = [0, 8, 16].map(|at| u64::from_ne_bytes(bytes_of(at)));
        let bytes = bytes as usize;
        if self.same_process {
            return Ok(Loan { input: input as *const u8, output: output as *mut u8, bytes });
        }
        let region = &self.ring.memory().region;
        let outside = |at| wrong(format!("{bytes} bytes at offset {at}, lent, are not in its buffers"));
        Ok(Loan {
            input: region.lendable(input, bytes).ok_or_else(|| outside(input))?,
            output: region.lendable(output, bytes).ok_or_else(|| outside(output))?,
            bytes,
        })
    }

    fn hang_up(&mut self) {
        self.head = None;
        self.hung_up = true;
        self.ring.close();
        self.bell.let_go();
        self.bell.ring();
    }

    fn release(&mut self, bytes: usize) {
        let Some(frame) = &mut self.head else { return };
        if frame.advance(bytes) {
            self.head = None;
            self.ring.release();
            self.bell.ring();
        }
    }
}

// SAFETY: `head.data` points into the peer's region or its lent buffer, read only by whoever drives this link, under
// the protocol above; nothing in it is tied to a thread.
unsafe impl Send for LocalRx {}

#[cfg(test)]
mod tests {
    use super::super::layout::RING_BYTES;
    use super::super::region::SLOTS;
    use super::super::ring::CELLS;
    use super::*;
    use crate::types::Signature;

    fn pair(same_process: bool) -> (LocalTx, LocalRx, Arc<Region>) {
        let region = Arc::new(Region::shared().unwrap());
        let fd = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
        let doorbell = Doorbell::new(region.clone(), fd);
        let at = region.alloc(RING_BYTES).unwrap();
        let memory_lock = same_process.then(MemoryLock::default);
        let tx = LocalTx::new(region.clone(), at, doorbell.clone(), memory_lock).unwrap();
        let rx = LocalRx::new(region.clone(), at as u64, doorbell, 0, same_process).unwrap();
        (tx, rx, region)
    }

    fn header(op: u64, len: usize) -> Header {
        let signature =
            Signature { kind: 1, dtype: 2, op: 3, algo: 4, root: 5, count: 6, generation: 7, detail: 8 };
        Header { comm: 9, op, offset: 11, len: len as u32, message: 3, signature }
    }

    #[test]
    fn frames_arrive_in_order_and_credit_is_bounded() {
        let (mut tx, mut rx, _) = pair(false);
        // Payloads that lie in the descriptor, and payloads beside it.
        let length = |i: u64| [0, 1, 7, 8, 9, 64, INLINE - 1, INLINE][i as usize % 8];
        for round in 0..5u64 {
            for i in 0..CELLS {
                assert!(tx.room().unwrap());
                let payload = [(round * 16 + i) as u8; INLINE];
                // SAFETY: `payload` has `INLINE` bytes, at least the frame's length, and so few are copied at once.
                let posted = unsafe { tx.post(header(i, length(i)), payload.as_ptr()).unwrap() };
                assert_eq!(posted, Posted::Copied);
            }
            assert!(!tx.room().unwrap());
            for i in 0..CELLS {
                let frame = rx.peek(0).unwrap().unwrap();
                assert_eq!((frame.header, frame.ready), (header(i, length(i)), length(i)));
                // SAFETY: `ready` bytes can be read.
                let bytes = unsafe { std::slice::from_raw_parts(frame.data, frame.ready) };
                assert!(bytes.iter().all(|byte| *byte == (round * 16 + i) as u8), "{bytes:?}");
                if length(i) > 1 {
                    rx.release(1);
                    assert_eq!(rx.peek(0).unwrap().unwrap().done, 1);
                }
                rx.release(length(i) - usize::from(length(i) > 1));
            }
            assert!(rx.peek(0).unwrap().is_none());
            assert_eq!(tx.released().unwrap(), (round + 1) * CELLS);
        }
    }

    #[test]
    fn a_held_bell_rings_once_when_it_is_let_go_and_at_once_where_a_link_is_hung_up() {
        let (mut tx, mut rx, region) = pair(false);
        let sleeps = || region.doorbell_flag().store(1, Ordering::SeqCst);
        let is_woken = || region.doorbell_flag().load(Ordering::SeqCst) == 0;
        // SAFETY: a frame of no bytes: the payload is not read.
        let post = |tx: &mut LocalTx| unsafe { tx.post(header(0, 0), std::ptr::null()).unwrap() };
        sleeps();
        tx.hold_bell();
        tx.ring_bell();
        assert!(!is_woken(), "nothing was posted");
        tx.hold_bell();
        post(&mut tx);
        post(&mut tx);
        assert!(!is_woken() && rx.peek(0).unwrap().is_some(), "who looks sees it");
        tx.ring_bell();
        assert!(is_woken());
        sleeps();
        post(&mut tx);
        assert!(is_woken(), "not held any more");
        sleeps();
        rx.hold_bell();
        rx.release(0);
        assert!(!is_woken());
        rx.ring_bell();
        assert!(is_woken());
        sleeps();
        rx.hold_bell();
        rx.hang_up();
        assert!(is_woken());
    }

    #[test]
    fn same_process_lends_and_revokes() {
        let (mut tx, mut rx, _) = pair(true);
        let payload = vec![5u8; 100_000];
        // SAFETY: `payload` outlives the test's use of the link.
        assert_eq!(unsafe { tx.post(header(1, 100_000), payload.as_ptr()).unwrap() }, Posted::Held);
        assert_eq!(rx.peek(0).unwrap().unwrap().data, payload.as_ptr());
        rx.release(100_000);
        assert_eq!(tx.released().unwrap(), 1);
        // SAFETY: as above.
        unsafe { tx.post(header(2, 100_000), payload.as_ptr()).unwrap() };
        assert!(rx.peek(0).unwrap().is_some(), "seen, and not released when it is taken back");
        let memory_lock = tx.memory_lock.clone().unwrap();
        let reading = memory_lock.lock();
        assert!(!tx.revoke(), "the receiver may be reading");
        drop(reading);
        assert!(tx.revoke());
        assert!(rx.peek(0).unwrap().is_none(), "revoked memory is not read");
    }

    #[test]
    fn loans_name_the_sender_s_memory_and_are_taken_back() {
        let (mut tx, mut rx, _) = pair(true);
        let (input, mut output) = (vec![1u8; 300], vec![0u8; 300]);
        let loan = Loan { input: input.as_ptr(), output: output.as_mut_ptr(), bytes: 300 };
        assert!(tx.can_lend(loan.input, 300));
        // SAFETY: both outlive the test's use of the link.
        unsafe { tx.lend(header(1, 0), loan).unwrap() };
        let frame = rx.peek(0).unwrap().unwrap();
        assert_eq!(frame.header.op, 1);
        let seen = rx.borrow().unwrap();
        assert_eq!((seen.input, seen.output, seen.bytes), (loan.input, loan.output, 300));
        assert!(tx.revoke());
        assert!(rx.peek(0).unwrap().is_none(), "it may not be used any more");
        assert!(!tx.has_hung_up());
        rx.hang_up();
        assert!(
            tx.has_hung_up() && tx.released().unwrap() == 1,
            "given back, by one that may have done nothing"
        );
    }

    #[test]
    fn between_processes_loans_are_of_buffers_in_the_region() {
        let (mut tx, mut rx, region) = pair(false);
        let page = region.take_pages(8192).unwrap();
        let at = region.at(page);
        assert!(tx.can_lend(at, 8192) && !tx.can_lend(region.at(Region::slot_offset(0)), 8));
        assert!(!tx.can_lend([0u8; 8].as_ptr(), 8));
        let loan = Loan { input: at, output: at, bytes: 8192 };
        // SAFETY: inside the region, and nobody uses it.
        unsafe { tx.lend(header(1, 0), loan).unwrap() };
        assert!(tx.touches(at, 8192));
        let frame = rx.peek(0).unwrap().unwrap();
        assert_eq!(rx.borrow().unwrap().output, at);
        rx.release(frame.ready);
        // A slot is the region's own: it may stay with a peer when users' buffers must come back.
        let slot = region.at(Region::slot_offset(1));
        // SAFETY: as above.
        unsafe { tx.lend(header(1, 0), Loan { input: slot, output: slot, bytes: SLOT }).unwrap() };
        assert!(!tx.touches(slot, SLOT));
        let frame = rx.peek(0).unwrap().unwrap();
        assert_eq!(rx.borrow().unwrap().output, slot);
        rx.release(frame.ready);
        // What a peer that lies may name: the doorbell, a ring, what begins in the last slot and ends behind it, the region's end, what goes
        // beyond that end, an offset whose end wraps round.
        let end = crate::link::region::REGION_BYTES as u64;
        let last = Region::slot_offset(SLOTS as u16) as u64;
        for place in [0, last, last - 8191, end, end - 8191, u64::MAX - 100] {
            let descriptor = Descriptor::new(&header(2, 16), NOWHERE);
            tx.ring.post((descriptor, [page as u64, place, 8192].as_ptr().cast()));
            let frame = rx.peek(0).unwrap().unwrap();
            let error = rx.borrow().unwrap_err();
            assert!(matches!(error, Error::Protocol { .. }), "{place}: {error}");
            rx.release(frame.ready);
        }
        // A frame too short to name a loan.
        // SAFETY: copied: 8 bytes are inline.
        unsafe { tx.post(header(3, 8), 1u64.to_ne_bytes().as_ptr()).unwrap() };
        rx.peek(0).unwrap().unwrap();
        assert!(rx.borrow().is_err());
    }

    #[test]
    fn a_location_outside_the_region_is_an_error_not_a_fault() {
        let (mut tx, mut rx, region) = pair(false);
        let outside = [0u8; 4096];
        // SAFETY: refused before anything is posted.
        assert!(unsafe { tx.post(header(1, 4096), outside.as_ptr()) }.is_err());
        // SAFETY: inside the region.
        unsafe { tx.post(header(1, 4096), region.at(Region::slot_offset(0))).unwrap() };
        // A peer that lies about the payload's length.
        // SAFETY: our own cell, one thread.
        unsafe { (*tx.ring.memory().cell(0)).len = u32::MAX };
        assert!(matches!(rx.peek(0), Err(Error::Protocol { .. })));
    }
}
