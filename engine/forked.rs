//! Whether this process was forked from one that used the engine.
//!
//! Threads do not survive a fork, and the child shares with its parent what the engine works on: sockets, descriptors that
//! wake, memory that peers see. So a child refuses every call, by name, and what it inherited does nothing when it is
//! dropped: it closes descriptors of its own, and touches nothing else.
//!
//! The look is made at each call. It is one load: of a page that the system gives to a child empty.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::Error;

struct Mark {
    /// Not 0 in the process that made it, 0 in its children. None where the system has no such memory.
    page: Option<&'static AtomicU32>,
    /// The process that made it.
    process: u32,
}

static MARK: OnceLock<Mark> = OnceLock::new();

const PAGE: usize = 4096;

/// A word that a fork clears.
fn page() -> Option<&'static AtomicU32> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address that the kernel chooses touches no existing memory.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE, access, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the page above, whole, which nobody else knows; the advice changes only what a child sees of it.
    if unsafe { madvise(at, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: as above; nothing refers to it.
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
/// [`Error::Unavailable`] in a child of such a process.
pub(crate) fn begin() -> Result<(), Error> {
    MARK.get_or_init(|| Mark { page: page(), process: std::process::id() });
    check()
}

/// # Errors
/// [`Error::Unavailable`] in a child of a process that used the engine.
pub(crate) fn check() -> Result<(), Error> {
    if is_forked() { Err(refusal()) } else { Ok(()) }
}

/// What is said in such a child.
#[cold]
pub(crate) fn refusal() -> Error {
    Error::Unavailable {
        what: "allstream in this process".into(),
        problem: "it was forked from one that used allstream, and threads do not survive a fork; start processes with exec \
                  (spawn, not fork), or fork before the first use"
            .into(),
    }
}
