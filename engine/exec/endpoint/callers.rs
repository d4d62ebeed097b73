//! Which threads of the user's drive an endpoint themselves. The progress thread keeps out of their way.

use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Default)]
pub(super) struct Callers {
    /// Threads that block in a wait and drive meanwhile.
    driving: AtomicU32,
    /// Waits and polls so far: a thread that has just waited is likely to wait again.
    waits: AtomicU32,
    /// The value of `waits` when the progress thread last asked.
    seen: AtomicU32,
}

impl Callers {
    /// A thread waits for an operation, or polls one. If two threads do so at once, the count may grow by only one: all that
    /// matters is whether there was any.
    pub(super) fn count_wait(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// A thread begins to drive; it drives until it [leaves](Self::leave).
    pub(super) fn enter(&self) {
        self.driving.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn leave(&self) {
        self.driving.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether any thread drives now, or has waited or polled since this was last asked.
    pub(super) fn any_since_last_asked(&self) -> bool {
        let waits = self.waits.load(Ordering::Relaxed);
        self.driving.load(Ordering::Acquire) > 0 || self.seen.swap(waits, Ordering::Relaxed) != waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_thread_takes_over_one_look_after_the_last_wait() {
        let callers = Callers::default();
        assert!(!callers.any_since_last_asked());
        callers.count_wait();
        assert!(callers.any_since_last_asked(), "it has waited since");
        assert!(!callers.any_since_last_asked(), "and not again");
        callers.enter();
        assert!(callers.any_since_last_asked() && callers.any_since_last_asked(), "as long as it drives");
        callers.leave();
        assert!(!callers.any_since_last_asked());
    }
}
