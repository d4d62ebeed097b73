//! Operations on memory that is copied to the host first: how far what is there reaches, and how much is pinned for that.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of the host's memory that this process has pinned for such operations, in use or kept for the next.
pub(crate) static PINNED: AtomicUsize = AtomicUsize::new(0);

/// As [`PINNED`] has it now.
pub(crate) fn pinned_bytes() -> usize {
    PINNED.load(Ordering::Relaxed)
}

/// A point in an operation: all parts before one, and so many rounds of that (of a message: bytes).
pub(crate) type Reach = (usize, usize);

/// All of an operation.
pub(crate) const ALL: Reach = (usize::MAX, 0);

/// What is copied together, each way.
pub(crate) struct Stripe {
    /// Of each item by its number: bytes.
    pub(crate) pieces: Vec<(usize, Range<usize>)>,
    /// The operation can go as far as this once it is there, and is done with it from this on.
    pub(crate) reach: Reach,
}
