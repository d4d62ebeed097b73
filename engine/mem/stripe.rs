//! *Staged* operations, whose device memory is copied to the host and back in stripes: how far one can go, and how much memory is pinned.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of the host's memory that this process has pinned for staged operations, in use or kept for the next ones.
pub(crate) static PINNED: AtomicUsize = AtomicUsize::new(0);

/// The value of [`PINNED`] now.
pub(crate) fn pinned_bytes() -> usize {
    PINNED.load(Ordering::Relaxed)
}

/// How far an operation has come or may go, as `(part, rounds)`: all parts before that one, and so many rounds of that one (for a message: bytes).
pub(crate) type Reach = (usize, usize);

/// All of an operation.
pub(crate) const ALL: Reach = (usize::MAX, 0);

/// The pieces of staged buffers that are copied to the host together, and later back together.
pub(crate) struct Stripe {
    /// Of each piece: the number of the staged buffer, and which of its bytes.
    pub(crate) pieces: Vec<(usize, Range<usize>)>,
    /// How far the operation may go once this stripe and those before it are on the host. When the operation has come this far, it needs
    /// none of these stripes any more, and they can be copied back.
    pub(crate) reach: Reach,
}
