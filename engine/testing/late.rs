//! A link for tests whose receiving end writes by itself, as a network card does that was told where to put what comes:
//! what it was given to write to, it goes on writing to when [`LinkRx::receive_into`] has returned. The frames come through
//! pipes. Held back ([`hold_late_writes`]), it writes long after the operation has failed.

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

/// What the progress thread asks for news, as no descriptor tells of any.
struct Card {
    pipe: OwnedFd,
    /// Bytes that were there when it was last asked.
    seen: AtomicU64,
}

impl Poller for Card {
    fn poll(&self) -> bool {
        let here = ioctl_fionread(&self.pipe).unwrap_or(0);
        here != self.seen.swap(here, Ordering::SeqCst) && here > 0
    }
}

/// What is written by a card that was held back.
const LATE_BYTE: u8 = 0xee;

static HOLD: AtomicBool = AtomicBool::new(false);

/// From now on (`true`) what is received over links of the class `late` does not come, and is written, as bytes of 0xee, later:
/// when this is called with `false`.
pub fn hold_late_writes(on: bool) {
    HOLD.store(on, Ordering::SeqCst);
}

/// Memory that was given to the link.
struct Given {
    header: Header,
    /// What it was said to have received ends here...
    at: *mut u8,
    max: usize,
    /// ...and so many bytes behind that are written already.
    written: usize,
    /// Bytes of the frame before `at`.
    done: usize,
}

/// The receiving end.
struct LateRx {
    pipe: PipeRx,
    /// Asked for as long as this end is there.
    _card: Arc<Card>,
    posted: Option<Given>,
    /// Whether the card that was held back has written.
    held: Option<Arc<AtomicBool>>,
}

// SAFETY: `posted` is memory of an operation, whose owner keeps it until the link has written it or is revoked; nothing of it
// is tied to a thread.
unsafe impl Send for LateRx {}

impl LateRx {
    /// The card goes on.
    fn write(&mut self) -> Result<(), Error> {
        let Some(given) = self.posted.as_mut().filter(|given| given.written < given.max) else {
            return Ok(());
        };
        if self.pipe.peek(0)?.is_some() {
            let to = given.at.wrapping_add(given.written);
            // SAFETY: the rest of what `receive_into` was given, which stays the link's until it was said to have come.
            given.written += unsafe { self.pipe.receive_into(to, given.max - given.written, 1)? };
        }
        Ok(())
    }
}

/// A card that writes when it is let go.
fn write_late(at: *mut u8, bytes: usize) -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let (tell, at) = (over.clone(), at.expose_provenance());
    std::thread::spawn(move || {
        while HOLD.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: what `receive_into` was given; it is kept until `over` is said.
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

    fn is_byte_stream(&self) -> bool {
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
        // Told of now; what follows it is written meanwhile, and told of by the next call.
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
        // What is not held back writes when it is asked to: no more.
        self.posted = None;
        self.held.as_ref().is_none_or(|over| over.load(Ordering::SeqCst))
    }

    fn writes_until(&self) -> Option<IsOver> {
        let held = self.held.clone();
        Some(Box::new(move || held.as_ref().is_none_or(|over| over.load(Ordering::SeqCst))))
    }
}
