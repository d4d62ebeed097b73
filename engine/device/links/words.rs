//! The words by which two ranks in two processes tell each other how far their streams have come.
//!
//! For each peer in another process, a rank takes a page of its own region: the rank's *inbox*, which is the peer's *outbox*. Of all streams
//! only the peer's writes to that page, and only this rank's waits for what is written there. So whatever becomes of the peer, this rank's
//! host can end every such wait of its own stream by stores to its own memory ([`Inbox::release`]).
//!
//! Frames are counted modulo 2^32. Both streams come to the frames in the order in which they were posted, so a word that counts a frame counts all
//! earlier frames, too.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::device::stream::DeviceStream;
use crate::device::words::SharedWords;
use crate::error::Error;
use crate::link::exit::Exit;
use crate::link::region::{PAGE, Region};
use crate::types::Rank;

/// This word says how many frames of the link from the peer may be read. (The constants are the words' offsets in the page, in bytes.)
pub(super) const READY: usize = 0;
/// How many frames of the link to the peer the peer's stream has read.
pub(super) const DONE: usize = 128;
/// 1: the peer takes no more frames, and its stream is past all that it had taken.
pub(super) const END: usize = 256;
/// 1: the peer writes nothing more here. Only hosts write and read this word.
const LEFT: usize = 384;
/// How many of the loans to the peer its stream has passed: it no longer touches their memory. No stream waits for this word or for
/// [`PAST_END`], so our host never writes them to end a wait, and both can be believed whatever has failed.
pub(super) const PAST: usize = 512;
/// 1: the peer's stream is past all its work on memory of ours, and gets no more such work from this communicator.
pub(super) const PAST_END: usize = 640;

/// Added to what a word shows, this ends all waits of a stream for that word: none of them is for a value so far ahead.
const AHEAD: u32 = 1 << 30;

/// The count that stands for this frame and all before it, as [`READY`] and [`DONE`] show it.
pub(super) fn mark(frame: u64) -> u32 {
    (frame as u32).wrapping_add(1)
}

/// Pages of dropped inboxes that the peer had not [left](LEFT) by then. [`OurPage::new`] gives back those that nobody writes to any more.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// A page of a region of ours that a peer may still write to.
struct Kept {
    region: Weak<Region>,
    offset: usize,
    /// Tells whether the peer's process has exited. `None` where the system cannot tell.
    exit: Option<Exit>,
}

impl Kept {
    /// Gives the page back if the peer has [left](LEFT) it, or has exited: then the peer writes nothing more. Returns whether the page need not be
    /// kept: it is given back, or its region is gone.
    fn is_given_back(&self) -> bool {
        let Some(region) = self.region.upgrade() else { return true };
        let has_left = region.word(self.offset + LEFT).load(Ordering::Acquire) != 0;
        let is_free = has_left || self.exit.as_ref().is_some_and(Exit::has_come);
        if is_free {
            region.give_pages(self.offset, PAGE);
        }
        is_free
    }
}

/// A page of our own region for an inbox. It is given back when this is dropped, or later if the peer may still write there.
struct OurPage {
    region: Arc<Region>,
    offset: usize,
    exit: Option<Exit>,
    /// Whether the peer may have been told of the page. From then on only the peer can say that it does not write there.
    is_told: AtomicBool,
}

impl OurPage {
    fn new(region: &Arc<Region>, exit: Option<Exit>) -> Result<OurPage, Error> {
        KEPT.lock().retain(|kept| !kept.is_given_back());
        let full = || Error::system("make words for another process", "this rank's shared memory is full");
        let offset = region.take_pages(PAGE).ok_or_else(full)?;
        Ok(OurPage { region: region.clone(), offset, exit, is_told: AtomicBool::new(false) })
    }
}

impl Drop for OurPage {
    fn drop(&mut self) {
        if !self.is_told.load(Ordering::Acquire) {
            return self.region.give_pages(self.offset, PAGE);
        }
        let kept = Kept { region: Arc::downgrade(&self.region), offset: self.offset, exit: self.exit.take() };
        if !kept.is_given_back() {
            KEPT.lock().push(kept);
        }
    }
}

/// A page of a peer's region that the peer has told us of. When this is dropped, also if the page was never opened, the peer sees that we write
/// nothing more there.
pub(super) struct TheirPage {
    region: Arc<Region>,
    offset: usize,
}

impl TheirPage {
    /// The inbox that rank `peer` has for us in its region.
    pub(super) fn new(peer: Rank, region: Arc<Region>, offset: u64) -> Result<TheirPage, Error> {
        let fits = offset.is_multiple_of(PAGE as u64) && region.contains(offset, PAGE);
        let offset = offset as usize;
        if !(fits && region.is_page(region.at(offset), PAGE)) {
            let problem = format!("no page for words begins at offset {offset} of its region");
            return Err(Error::protocol(peer, problem));
        }
        Ok(TheirPage { region, offset })
    }
}

impl Drop for TheirPage {
    fn drop(&mut self) {
        self.region.word(self.offset + LEFT).store(1, Ordering::Release);
    }
}

/// Registers a page of the region's arena with the driver, as words for the device of `stream`.
fn register(region: &Arc<Region>, stream: &DeviceStream, offset: usize) -> Result<SharedWords, Error> {
    let at = NonNull::new(region.at(offset));
    let nowhere = || Error::system("register words that processes share", "there is no such page (a bug)");
    let at = at.filter(|at| region.is_page(at.as_ptr(), PAGE)).ok_or_else(nowhere)?;
    // SAFETY: the page lies in the mapping (`is_page`), which the result keeps. `OurPage::new` has taken it for words alone, or a peer that did
    // so has told `TheirPage::new` of it. One rank of this process knows the page and registers it once; the driver refuses a second time.
    unsafe { SharedWords::register(stream, (at, PAGE), region.clone()) }
}

/// The page in which a peer's stream tells this rank how far it has come.
pub(super) struct Inbox {
    // Dropped before the page is given back. No stream of ours uses the words any more then: `retire` has waited for those that did.
    words: SharedWords,
    page: OurPage,
    /// What `release` writes, once it has been called.
    released: OnceLock<[(usize, u32); 3]>,
}

impl Inbox {
    /// Takes a page of our own region, and registers it with the driver for the device of `stream`. `exit`: of the peer's process.
    pub(super) fn new(
        stream: &DeviceStream,
        region: &Arc<Region>,
        exit: Option<Exit>,
    ) -> Result<Inbox, Error> {
        let page = OurPage::new(region, exit)?;
        let words = register(region, stream, page.offset)?;
        Ok(Inbox { words, page, released: OnceLock::new() })
    }

    /// Where the page begins in our region, in bytes: the peer opens it there.
    pub(super) fn offset(&self) -> u64 {
        self.page.offset as u64
    }

    /// Called before the peer is told where the page begins.
    pub(super) fn is_told(&self) {
        self.page.is_told.store(true, Ordering::Release);
    }

    /// Work put on the stream after this call starts only once the word shows `value` or more.
    pub(super) fn wait(&self, stream: &DeviceStream, word: usize, value: u32) -> Result<(), Error> {
        stream.wait_word(&self.words, word, value)
    }

    /// Whether the word shows `value` or more, which the peer's stream or [`release`](Self::release) may have written.
    pub(super) fn shows(&self, word: usize, value: u32) -> bool {
        self.words.shows(word, value)
    }

    /// Ends all waits of our stream for [`READY`], [`DONE`] and [`END`]; nobody may put such a wait on the stream any more. To be called again
    /// as long as the stream still waits: the stream of a peer that lives may have written smaller values in between.
    pub(super) fn release(&self) {
        let word = |word: usize| self.page.region.word(self.page.offset + word);
        let ahead = |at: usize| (at, word(at).load(Ordering::Acquire).wrapping_add(AHEAD));
        for (at, value) in self.released.get_or_init(|| [ahead(READY), ahead(DONE), (END, 1)]) {
            word(*at).store(*value, Ordering::Release);
        }
    }
}

/// The page in which this rank's stream tells a peer how far it has come.
pub(super) struct Outbox {
    // Dropped before the peer sees that we write nothing more.
    words: SharedWords,
    _page: TheirPage,
}

impl Outbox {
    /// Registers the page with the driver for the device of `stream`.
    pub(super) fn open(stream: &DeviceStream, page: TheirPage) -> Result<Outbox, Error> {
        let words = register(&page.region, stream, page.offset)?;
        Ok(Outbox { words, _page: page })
    }

    /// Makes the stream write these words, each with its value, behind what it holds now.
    pub(super) fn put(&self, stream: &DeviceStream, all: &[(usize, u32)]) -> Result<(), Error> {
        stream.put_shared(&self.words, all)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn told(region: &Arc<Region>, exit: Option<Exit>) -> OurPage {
        let page = OurPage::new(region, exit).unwrap();
        page.is_told.store(true, Ordering::Release);
        page
    }

    /// Whether the page that begins there is free by the time when the next one is taken: the lowest free page is taken first.
    fn is_free(region: &Arc<Region>, offset: usize) -> bool {
        OurPage::new(region, None).unwrap().offset == offset
    }

    #[test]
    fn a_page_that_no_peer_was_told_of_is_given_back_at_once() {
        let region = Arc::new(Region::shared().unwrap());
        let page = OurPage::new(&region, None).unwrap();
        let offset = page.offset;
        drop(page);
        assert!(is_free(&region, offset));
    }

    #[test]
    fn a_page_is_kept_until_the_peer_has_left_it_though_it_never_opened_it() {
        let region = Arc::new(Region::shared().unwrap());
        let page = told(&region, None);
        let offset = page.offset;
        let theirs = TheirPage::new(1, region.clone(), offset as u64).unwrap();
        drop(page);
        assert!(!is_free(&region, offset), "the peer may still write there");
        drop(theirs);
        assert!(is_free(&region, offset));
    }

    #[test]
    fn a_page_is_kept_until_the_peer_has_exited() {
        let region = Arc::new(Region::shared().unwrap());
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let exit = Exit::of(pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap());
        let page = told(&region, Some(exit.clone()));
        let offset = page.offset;
        drop(page);
        assert!(!is_free(&region, offset), "the peer lives, and may still write there");
        child.kill().unwrap();
        child.wait().unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        while !exit.has_come() {
            assert!(Instant::now() < end);
            std::thread::yield_now();
        }
        assert!(is_free(&region, offset));
    }
}
