//! The words by which two ranks in two processes tell each other how far their streams have come.
//!
//! For each peer in another process, a rank takes a page of its own region: the rank's *inbox*, which is the peer's *outbox*. Of all streams
//! only the peer's writes to that page, and only this rank's waits for what is written there. So whatever becomes of the peer, this rank's
//! host can end every such wait of its own stream by stores to its own memory ([`Inbox::release`]).
//!
//! Frames are counted modulo 2^32. Both streams come to the frames in the order in which they were posted, so a count covers all before it.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::device::stream::DeviceStream;
use crate::device::words::SharedWords;
use crate::error::Error;
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

/// Pages of inboxes that were dropped before the peer had [left](LEFT) them. [`Inbox::new`] gives back those that were left since.
static KEPT: Mutex<Vec<(Weak<Region>, usize)>> = Mutex::new(Vec::new());

/// Gives a page back if the peer has [left](LEFT) it. Returns whether the page need not be kept: it is given back, or its region is gone.
fn given_back(region: &Weak<Region>, offset: usize) -> bool {
    let Some(region) = region.upgrade() else { return true };
    let left = region.word(offset + LEFT).load(Ordering::Acquire) != 0;
    if left {
        region.give_pages(offset, PAGE);
    }
    left
}

/// Registers a page of the region's arena with the driver, as words for the device of `stream`.
fn register(region: &Arc<Region>, stream: &DeviceStream, offset: usize) -> Result<SharedWords, Error> {
    let at = NonNull::new(region.at(offset));
    let nowhere = || Error::system("register words that processes share", "there is no such page (a bug)");
    let at = at.filter(|at| region.is_page(at.as_ptr(), PAGE)).ok_or_else(nowhere)?;
    // SAFETY: one page (both callers pass a multiple of `PAGE`) of the mapping (`is_page`), which the result keeps. `Inbox::new` took it for
    // words alone, here or in a correct peer. One rank of this process knows it and registers it once; the driver refuses a second time.
    unsafe { SharedWords::register(stream, (at, PAGE), region.clone()) }
}

/// The page in which a peer's stream tells this rank how far it has come.
pub(super) struct Inbox {
    words: Option<SharedWords>,
    region: Arc<Region>,
    offset: usize,
    /// The words' offsets and the values that `release` writes to them, from its first call on.
    released: OnceLock<[(usize, u32); 3]>,
}

impl Inbox {
    /// Takes a page of our own region, and registers it with the driver for the device of `stream`.
    pub(super) fn new(stream: &DeviceStream, region: &Arc<Region>) -> Result<Inbox, Error> {
        KEPT.lock().retain(|(region, offset)| !given_back(region, *offset));
        let full = || Error::system("share a page with another process", "this rank's shared memory is full");
        let offset = region.take_pages(PAGE).ok_or_else(full)?;
        match register(region, stream, offset) {
            Ok(words) => {
                let (words, region) = (Some(words), region.clone());
                Ok(Inbox { words, region, offset, released: OnceLock::new() })
            }
            Err(error) => {
                region.give_pages(offset, PAGE);
                Err(error)
            }
        }
    }

    /// Where the page begins in our region, in bytes: the peer opens it there.
    pub(super) fn offset(&self) -> u64 {
        self.offset as u64
    }

    fn words(&self) -> Result<&SharedWords, Error> {
        self.words
            .as_ref()
            .ok_or_else(|| Error::system("wait for another process", "its words are gone (a bug)"))
    }

    /// Work put on the stream after this call starts only once the word shows `value` or more.
    pub(super) fn wait(&self, stream: &DeviceStream, word: usize, value: u32) -> Result<(), Error> {
        stream.wait_word(self.words()?, word, value)
    }

    /// Whether the word shows `value` or more, whether the peer's stream has written that or [`release`](Self::release).
    pub(super) fn shows(&self, word: usize, value: u32) -> bool {
        self.words.as_ref().is_some_and(|words| words.shows(word, value))
    }

    /// Ends all waits of our stream for [`READY`], [`DONE`] and [`END`]; nobody may put such a wait on the stream any more. To be called again
    /// as long as the stream still waits: the stream of a peer that lives may have written smaller values in between.
    pub(super) fn release(&self) {
        let word = |word: usize| self.region.word(self.offset + word);
        let ahead = |at: usize| (at, word(at).load(Ordering::Acquire).wrapping_add(AHEAD));
        for (at, value) in self.released.get_or_init(|| [ahead(READY), ahead(DONE), (END, 1)]) {
            word(*at).store(*value, Ordering::Release);
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // No stream of ours uses the page any more: `retire` has waited for those that did. The peer's stream still may.
        self.words = None;
        let region = Arc::downgrade(&self.region);
        if !given_back(&region, self.offset) {
            KEPT.lock().push((region, self.offset));
        }
    }
}

/// The page in which this rank's stream tells a peer how far it has come.
pub(super) struct Outbox {
    words: Option<SharedWords>,
    region: Arc<Region>,
    offset: usize,
}

impl Outbox {
    /// Opens the inbox that rank `peer` has for us in its region.
    pub(super) fn open(
        stream: &DeviceStream,
        peer: Rank,
        region: Arc<Region>,
        offset: u64,
    ) -> Result<Outbox, Error> {
        let fits = offset.is_multiple_of(PAGE as u64) && region.contains(offset, PAGE);
        let offset = offset as usize;
        if !(fits && region.is_page(region.at(offset), PAGE)) {
            let problem = format!("no page for words begins at offset {offset} of its region");
            return Err(Error::protocol(peer, problem));
        }
        let words = Some(register(&region, stream, offset)?);
        Ok(Outbox { words, region, offset })
    }

    /// Makes the stream write these words, each with its value, behind what it holds now.
    pub(super) fn put(&self, stream: &DeviceStream, all: &[(usize, u32)]) -> Result<(), Error> {
        let gone = || Error::system("tell another process", "its words are gone (a bug)");
        stream.put_shared(self.words.as_ref().ok_or_else(gone)?, all)
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.words = None;
        self.region.word(self.offset + LEFT).store(1, Ordering::Release);
    }
}
