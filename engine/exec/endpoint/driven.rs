//! What the process's progress thread does with an endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::Endpoint;
use crate::exec::Progress;
use crate::exec::active::KEPT;
use crate::exec::progress_thread::{ASK, Driven};
use crate::link::region::Region;

/// How soon the progress thread is to look again, in nanoseconds. 0: when somebody wakes it.
#[derive(Default)]
pub(super) struct LookAgain(AtomicU32);

impl LookAgain {
    pub(super) fn set(&self, soon: Option<Duration>) {
        let soon = soon.map_or(0, |soon| soon.subsec_nanos());
        if self.0.load(Ordering::Relaxed) != soon {
            self.0.store(soon, Ordering::Relaxed);
        }
    }

    fn get(&self) -> Option<Duration> {
        let soon = self.0.load(Ordering::Relaxed);
        (soon > 0).then(|| Duration::from_nanos(soon.into()))
    }
}

impl Driven for Endpoint {
    fn drive_once(self: Arc<Self>) -> Progress {
        self.try_drive(true)
    }

    fn drive_and_check(self: Arc<Self>) -> Progress {
        self.try_drive(false)
    }

    /// The progress thread keeps out of the way of a thread that drives, and looks again a nap later.
    fn is_driven(&self) -> bool {
        self.callers.any_since_last_asked()
    }

    fn rest(&self) -> bool {
        // This communicator keeps no more than it may if all of the rank's together do not. So the progress thread, which asks after each
        // operation, seldom takes the lock that callers drive under.
        if self.config.region.scratch() <= KEPT {
            return false;
        }
        let Some(mut run) = self.run.try_lock() else { return true };
        if run.active.is_rested() {
            run.active.give_memory_back();
        }
        run.active.keeps_much()
    }

    fn enlisted(&self) -> &AtomicBool {
        &self.enlisted
    }

    fn region(&self) -> &Arc<Region> {
        &self.config.region
    }

    fn is_asked(&self) -> Option<Duration> {
        let asked = self.is_asked.load(Ordering::Relaxed).then_some(ASK);
        asked.into_iter().chain(self.look_again.get()).min()
    }

    fn is_oversubscribed(&self) -> bool {
        self.config.crowded
    }
}
