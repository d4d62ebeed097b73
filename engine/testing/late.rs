//! A link for tests whose receiving end works like a network card: after [`LinkRx::receive_into`] has returned, it goes on
//! writing to the memory that the call was given. The frames come through pipes. With [`hold_late_writes`] a test makes the
//! link write long after the operation has failed.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::ioctl_fionread;

use super::pipe::{PIPE, PipeRx};
use crate::error::Error;
use crate::link::exit::IsOver;
use crate::link::{Frame, Header, Lends, LinkKind, LinkRx, Locality, Poller, SLOT};
use crate::types::LinkClass;

pub(crate) static LATE: LinkKind = LinkKind {
    class: LinkClass::named("late"),
    joins: Locality::SameProcess,
    lends: Lends::Nothing,
    max_frame_len: SLOT,
    probe: || Ok(()),
    open_tx: |site| (PIPE.open_tx)(site),
    open_rx: |site| {
        let pipe = PipeRx::open(site)?;
        let card = Arc::new(Card { pipe: pipe.descriptor()?, seen: AtomicU64::new(0) });
        site.reactor().ask(Arc::<Card>::downgrade(&card));
        Ok(Box::new(LateRx { pipe, _card: card, posted: None, held: None }))
    },
};

/// The card: the progress thread asks it for news, as no descriptor wakes that thread.
struct Card {
    pipe: OwnedFd,
    /// Bytes that were in the pipe when the card was last asked.
    seen: AtomicU64,
}

impl Poller for Card {
    fn poll(&self) -> bool {
        let here = ioctl_fionread(&self.pipe).unwrap_or(0);
        here != self.seen.swap(here, Ordering::SeqCst) && here > 0
    }
}

/// The byte that a held-back card writes.
const LATE_BYTE: u8 = 0xee;

static HOLD: AtomicBool = AtomicBool::new(false);

/// With `true`: from now on nothing arrives over links of the class `late`; their cards are held back. With `false`: the
/// held-back cards write bytes of 0xee instead.
pub fn hold_late_writes(on: bool) {
    HOLD.store(on, Ordering::SeqCst);
}

/// Memory that was given to the link.
struct Given {
    header: Header,
    /// Where the bytes that `receive_into` has reported end, and the rest begins.
    at: *mut u8,
    max: usize,
    /// Bytes from `at` on that are written, but not reported yet.
    written: usize,
    /// Bytes of the frame before `at`.
    done: usize,
}

/// The receiving end.
struct LateRx {
    pipe: PipeRx,
    /// The reactor holds a weak reference: it asks the card as long as this end exists.
    _card: Arc<Card>,
    posted: Option<Given>,
    /// The flag of a held-back card, if there is one: whether it has written.
    held: Option<Arc<AtomicBool>>,
}

// SAFETY: `posted` is memory of an operation, whose owner keeps it until the link has written it or is revoked; nothing of it
// is tied to a thread.
unsafe impl Send for LateRx {}

impl LateRx {
    /// Lets the card write to the memory that it was given, if bytes have come.
    fn write(&mut self) -> Result<(), Error> {
        let Some(given) = self.posted.as_mut().filter(|given| given.written < given.max) else {
            return Ok(());
        };
        if self.pipe.peek(0)?.is_some() {
            let to = given.at.wrapping_add(given.written);
            // SAFETY: the rest of what `receive_into` was given: it stays the link's until its bytes are reported.
            given.written += unsafe { self.pipe.receive_into(to, given.max - given.written, 1)? };
        }
        Ok(())
    }
}

/// Starts a thread that plays a held-back card: it writes when cards are held back no longer. The flag that this returns is set when it has written.
fn write_late(at: *mut u8, bytes: usize) -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let (tell, at) = (over.clone(), at.expose_provenance());
    std::thread::spawn(move || {
        while HOLD.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: what `receive_into` was given; its owner keeps it until `over` is set.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).write_bytes(LATE_BYTE, bytes) };
        tell.store(true, Ordering::SeqCst);
    });
    over
}

impl LinkRx for LateRx {
    fn peek(&mut self, useful: usize) -> Result<Option<Frame>, Error> {
        self.write()?;
        let Some(Given { header, done, .. }) = &self.posted else { return self.pipe.peek(useful) };
        assert_eq!(useful, 0, "what comes next is on its way to memory that was given");
        Ok(Some(Frame { header: *header, data: std::ptr::null(), ready: 0, done: *done }))
    }

    fn release(&mut self, bytes: usize) {
        assert!(self.posted.is_none());
        self.pipe.release(bytes);
    }

    fn is_byte_stream(&mut self) -> bool {
        true
    }

    unsafe fn receive_into(&mut self, dst: *mut u8, max: usize, unit: usize) -> Result<usize, Error> {
        if HOLD.load(Ordering::SeqCst) && self.posted.is_none() {
            self.held.get_or_insert_with(|| write_late(dst, max));
        }
        if self.held.is_some() {
            return Ok(0);
        }
        match &mut self.posted {
            Some(given) => {
                assert_eq!((given.at, given.max.max(max)), (dst, max), "it goes on where it has ended");
                given.max = max.min(given.header.len as usize - given.done);
            }
            None => {
                let Some(Frame { header, done, .. }) = self.pipe.peek(0)? else { return Ok(0) };
                let max = max.min(header.len as usize - done);
                self.posted = Some(Given { header, at: dst, max, written: 0, done });
            }
        }
        let Some(given) = &mut self.posted else { return Ok(0) };
        // This call reports the whole units that are written; the next one reports what is written from now on.
        let told = given.written - given.written % unit;
        (given.at, given.max) = (given.at.wrapping_add(told), given.max - told);
        (given.written, given.done) = (given.written - told, given.done + told);
        if given.max == 0 {
            self.posted = None;
        }
        self.write()?;
        Ok(told)
    }

    fn revoke(&mut self) -> bool {
        // A card that is not held back writes within calls of this end only, and has nothing to write to any more.
        self.posted = None;
        self.held.as_ref().is_none_or(|over| over.load(Ordering::SeqCst))
    }

    fn writes_until(&self) -> Option<IsOver> {
        let held = self.held.clone();
        Some(Box::new(move || held.as_ref().is_none_or(|over| over.load(Ordering::SeqCst))))
    }
}
