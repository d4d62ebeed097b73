//! Whether this process was forked from one that used the engine.
//!
//! Threads do not survive a fork, and the child shares with its parent what the engine works on: sockets, descriptors that wake threads, memory that
//! peers see. So every call in the child fails with an error that names the fork. When the child drops values that it has inherited, they only close
//! the child's own copies of descriptors, and touch nothing else.
//!
//! Each call checks this by one load from a page that the system zeroes in a forked child.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::Error;

struct Mark {
    /// A word that is 1 in the process that made it, and 0 in its forked children. `None`: the system has no memory that a fork clears.
    page: Option<&'static AtomicU32>,
    /// The id of the process that made this mark, compared where there is no page.
    process: u32,
}

static MARK: OnceLock<Mark> = OnceLock::new();

const PAGE: usize = 4096;

/// Makes a word that is 1 here, and that a fork clears in the child.
fn page() -> Option<&'static AtomicU32> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address that the kernel chooses touches no existing memory.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE, access, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: this is the whole mapping from above, of which nobody else knows. The advice changes only what a forked child sees there.
    if unsafe { madvise(at, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: the whole mapping from above; nothing refers to it.
        let _ = unsafe { munmap(at, PAGE) };
        return None;
    }
    // SAFETY: mapped for as long as the process lives, aligned to a page, zeroed, and only ever used as an atomic word.
    let word = unsafe { &*at.cast::<AtomicU32>() };
    word.store(1, Ordering::Relaxed);
    Some(word)
}

/// Whether this process was forked from one that used the engine.
pub(crate) fn is_forked() -> bool {
    match MARK.get() {
        None => false,
        Some(Mark { page: Some(page), .. }) => page.load(Ordering::Relaxed) == 0,
        Some(Mark { page: None, process }) => *process != std::process::id(),
    }
}

/// Remembers that this process uses the engine from here on.
///
/// # Errors
/// [`Error::Unavailable`] in a forked child of a process that used the engine.
pub(crate) fn begin() -> Result<(), Error> {
    MARK.get_or_init(|| Mark { page: page(), process: std::process::id() });
    check()
}

/// # Errors
/// [`Error::Unavailable`] in a forked child of a process that used the engine.
pub(crate) fn check() -> Result<(), Error> {
    if is_forked() { Err(refusal()) } else { Ok(()) }
}

/// The error of every call in a forked child of a process that used the engine.
#[cold]
pub(crate) fn refusal() -> Error {
    Error::Unavailable {
        what: "allstream in this process".into(),
        problem: "it was forked from one that used allstream, and threads do not survive a fork; start processes with exec \
                  (spawn, not fork), or fork before the first use"
            .into(),
    }
}
