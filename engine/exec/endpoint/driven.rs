//! What the process's progress thread does with an endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::Endpoint;
use crate::exec::Progress;
use crate::exec::active::KEPT;
use crate::exec::progress_thread::{ASK, Driven};
use crate::link::region::Region;

/// After how many nanoseconds the progress thread must look at the endpoint again. 0: no time is set.
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

    /// If a thread of the user's drives the endpoint, the progress thread leaves the endpoint to it, and asks again in its next pass.
    fn is_driven(&self) -> bool {
        self.callers.any_since_last_asked()
    }

    fn rest(&self) -> bool {
        // If all communicators of the rank together keep no more than `KEPT`, this one does not either. The progress thread asks whenever the
        // endpoint has nothing left to do, and this check mostly saves it from taking the lock that callers need to drive.
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
