//! Where time, turns and tasks come from.
//!
//! The engine asks no clock and starts no task but through this seam. In a process of a user's it is the system's clock, the
//! progress thread and the control thread. In a story ([`crate::comm`]'s tests) it is one thread in which all ranks take
//! turns, in virtual time.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::progress_thread::Driven;
use crate::error::Error;

/// Something that runs beside everybody.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(crate) trait Runtime: Send + Sync {
    /// The time by which deadlines are measured.
    fn now(&self) -> Instant;

    /// Whether threads may wait: drive in a loop for a while, and then sleep. Not where all ranks take turns on one thread: there
    /// nothing would move, and no time would pass, until they return.
    fn may_wait(&self) -> bool;

    /// Has an endpoint driven until nothing of its is left to do. It is not on the list yet.
    fn enlist(&self, endpoint: Arc<dyn Driven>);

    /// Makes sure that enlisted endpoints are looked at soon.
    fn nudge(&self);

    /// Makes whoever drives enlisted endpoints look at them now.
    fn kick(&self);

    /// The same, for those who tell by a waker.
    fn waker(&self) -> &Waker;

    /// Runs a task to its end, whoever listens. It must never block.
    ///
    /// # Errors
    /// The thread that runs tasks cannot be started.
    fn spawn(&self, task: Task) -> Result<(), Error>;

    /// Ends after so long. To be awaited in a task of this runtime.
    fn sleep(&self, pause: Duration) -> Task;
}
