//! What the process's progress thread does with an endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Endpoint;
use crate::exec::Progress;
use crate::exec::active::KEPT;
use crate::exec::progress_thread::Driven;
use crate::link::region::Region;

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

    fn is_asked(&self) -> bool {
        self.is_to_be_asked.load(Ordering::Relaxed)
    }

    fn is_oversubscribed(&self) -> bool {
        self.config.crowded
    }
}
