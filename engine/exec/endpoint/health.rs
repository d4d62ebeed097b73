//! Whether a communicator lives, and what ended it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

/// A communicator dies in two steps. First its cause is set, and stays: a second cause changes nothing. The thread that has set
/// the cause tells the other ranks and the flight recorder. Then it marks the communicator dead, and every operation fails
/// with the cause. So when a user sees the first failure, the other ranks have been told.
#[derive(Default)]
pub(crate) struct Health {
    cause: OnceLock<Error>,
    is_dead: AtomicBool,
    /// The communicator has ended, in peace or not: its runs and links were taken out ([`super::reuse`]).
    has_ended: AtomicBool,
    /// The user knows the cause.
    is_told: AtomicBool,
}

impl Health {
    /// The first step. Returns the cause to the thread that has set it; `None` if another thread was first.
    pub(super) fn begin_to_die(&self, cause: Error) -> Option<&Error> {
        self.cause.set(cause).ok()?;
        self.cause.get()
    }

    /// The second step.
    pub(super) fn die(&self) {
        self.is_dead.store(true, Ordering::Release);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Acquire)
    }

    /// The cause, once the communicator is dead.
    pub(crate) fn cause(&self) -> Option<&Error> {
        if self.is_dead() { self.cause.get() } else { None }
    }

    /// The cause, also between the two steps, when those who wait have not been woken yet.
    pub(crate) fn first_cause(&self) -> Option<&Error> {
        self.cause.get()
    }

    /// The error with which a communicator that has ended fails its operations.
    pub(super) fn failed_of(&self) -> Error {
        self.cause().cloned().unwrap_or(Error::Closed { call: "operation".into() })
    }

    /// The first cause, after the second step: if a thread is between the two steps, waits for that thread, which does not block
    /// there (`Control::abort`, `Control::dies`).
    pub(super) fn cause_when_dead(&self) -> Option<&Error> {
        let cause = self.cause.get()?;
        while !self.is_dead() {
            std::thread::yield_now();
        }
        Some(cause)
    }

    /// The user is told the cause. Returns whether the user was told before.
    pub(super) fn tell(&self) -> bool {
        self.is_told.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(call: &str) -> Error {
        Error::Closed { call: call.to_owned() }
    }

    #[test]
    fn the_first_cause_counts_and_is_shown_once_the_communicator_is_dead() {
        let health = Health::default();
        assert!(health.cause_when_dead().is_none(), "nothing has happened");
        assert!(health.begin_to_die(cause("first")).is_some());
        assert!(health.begin_to_die(cause("second")).is_none());
        assert!(health.cause().is_none(), "the other ranks are still to be told");
        assert_eq!(health.first_cause().map(Error::to_string), Some(cause("first").to_string()));
        health.die();
        assert_eq!(health.cause().map(Error::to_string), Some(cause("first").to_string()));
    }

    #[test]
    fn who_asks_between_the_two_steps_waits_for_the_second() {
        let health = Health::default();
        health.begin_to_die(cause("a test"));
        let asked = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                asked.wait();
                health.cause_when_dead().is_some() && health.is_dead()
            });
            asked.wait();
            health.die();
            assert!(waits.join().unwrap());
        });
    }
}
