//! The words by which the streams of two ranks in two processes wait for each other.
//!
//! A rank has a page of its own region for each rank in another process: its *inbox*. Of all streams, only the peer's writes
//! there, and only this rank's waits there. So, whatever becomes of the peer, a store of this rank's host to its own memory
//! ends every wait of its own stream ([`Inbox::release`]). The same page is the peer's *outbox*.
//!
//! Words count frames, on a circle: both streams come to frames in the order of their ring.

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
/// How many frames of the link to the peer it has read.
pub(super) const DONE: usize = 128;
/// 1: the peer reads nothing more, and has read all that it had begun to read.
pub(super) const END: usize = 256;
/// 1: the peer writes nothing more here. Only hosts write and read this word.
const LEFT: usize = 384;
/// How many loans to the peer its stream has passed: it touches their memory no more. No stream waits for this word or for [`PAST_END`], and our host
/// writes neither. So both can be believed whatever has failed.
pub(super) const PAST: usize = 512;
/// 1: the peer's stream is past all that it was ever lent, and is given no more work of the communicator's.
pub(super) const PAST_END: usize = 640;

/// Added to a word, this ends all waits of a stream for it: none of them is for a value so far ahead of what the word shows.
const AHEAD: u32 = 1 << 30;

/// What a word shows once a stream has come past this frame.
pub(super) fn mark(frame: u64) -> u32 {
    (frame as u32).wrapping_add(1)
}

/// Pages that the peer had not left when this rank was done with them. They are given back once it has.
static KEPT: Mutex<Vec<(Weak<Region>, usize)>> = Mutex::new(Vec::new());

/// Whether a page need not be kept any longer: it is given back, or its region is gone.
fn given_back(region: &Weak<Region>, offset: usize) -> bool {
    let Some(region) = region.upgrade() else { return true };
    let left = region.word(offset + LEFT).load(Ordering::Acquire) != 0;
    if left {
        region.give_pages(offset, PAGE);
    }
    left
}

/// Registers a page of the region's arena with a device, as words for its streams.
fn register(region: &Arc<Region>, stream: &DeviceStream, offset: usize) -> Result<SharedWords, Error> {
    let at = NonNull::new(region.at(offset));
    let nowhere = || Error::system("register words that processes share", "there is no such page (a bug)");
    let at = at.filter(|at| region.is_page(at.as_ptr(), PAGE)).ok_or_else(nowhere)?;
    // SAFETY: a whole page of the mapping, which `region` keeps. The callers have taken it for words, or were told of it by a
    // peer that has; each page is known to one rank in a process, and so is registered once.
    unsafe { SharedWords::register(stream, (at, PAGE), region.clone()) }
}

/// What a peer tells this rank's stream.
pub(super) struct Inbox {
    words: Option<SharedWords>,
    region: Arc<Region>,
    offset: usize,
    /// What `release` writes, once it has been called.
    released: OnceLock<[(usize, u32); 3]>,
}

impl Inbox {
    /// Takes a page of our own region, for the device of `stream`.
    pub(super) fn new(stream: &DeviceStream, region: &Arc<Region>) -> Result<Inbox, Error> {
        KEPT.lock().retain(|(region, offset)| !given_back(region, *offset));
        let full = || Error::system("make words for another process", "this rank's region is full");
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

    /// Where it is in our region, for the peer.
    pub(super) fn offset(&self) -> u64 {
        self.offset as u64
    }

    fn words(&self) -> Result<&SharedWords, Error> {
        self.words
            .as_ref()
            .ok_or_else(|| Error::system("wait for another process", "its words are gone (a bug)"))
    }

    /// Work put on the stream after this call starts only once the word shows this.
    pub(super) fn wait(&self, stream: &DeviceStream, word: usize, value: u32) -> Result<(), Error> {
        stream.wait_word(self.words()?, word, value)
    }

    /// Whether the word shows this, or the waits for it were ended.
    pub(super) fn shows(&self, word: usize, value: u32) -> bool {
        self.words.as_ref().is_some_and(|words| words.shows(word, value))
    }

    /// Ends all waits for these words. The stream must not be made to wait for them any more. May be called again, as a
    /// peer that lives may have written smaller values in between.
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
        // From here on no device of ours uses the page; the peer's device still may.
        self.words = None;
        let region = Arc::downgrade(&self.region);
        if !given_back(&region, self.offset) {
            KEPT.lock().push((region, self.offset));
        }
    }
}

/// What this rank's stream tells a peer.
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

    /// Writes the words, each with its value, when the stream comes here.
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
