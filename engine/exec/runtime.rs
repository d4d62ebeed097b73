//! [`Runtime`]: the clock that communicators read, what drives their endpoints, and what runs their tasks.
//!
//! Communicators measure deadlines, have endpoints driven and start tasks only through this trait. In a user's process it stands for the
//! system's clock, the progress thread and the control thread. In a story (a simulated run in unit tests, `testing/story/`) it stands for
//! one thread on which all ranks take turns, in virtual time.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::progress_thread::Driven;
use crate::error::Error;

/// A background task: a future that the runtime polls to its end.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(crate) trait Runtime: Send + Sync {
    /// The time by which deadlines are measured.
    fn now(&self) -> Instant;

    /// Whether a calling thread may wait, which means that it drives in a loop for a while and then sleeps. It may not where all ranks take
    /// turns on one thread: until the call returns, no other rank would move and no virtual time would pass.
    fn may_wait(&self) -> bool;

    /// Puts an endpoint on the list of those that are driven until they have nothing left to do. The caller knows that it is not there yet.
    fn enlist(&self, endpoint: Arc<dyn Driven>);

    /// Makes sure that enlisted endpoints are looked at soon.
    fn nudge(&self);

    /// Makes whoever drives enlisted endpoints look at them now.
    fn kick(&self);

    /// A waker that does the same as [`kick`](Self::kick).
    fn waker(&self) -> &Waker;

    /// Runs a task to its end, whether or not anybody waits for it. The task must never block.
    ///
    /// # Errors
    /// The thread that runs tasks cannot be started.
    fn spawn(&self, task: Task) -> Result<(), Error>;

    /// A future that ends after `pause`. Only a task of this runtime may await it.
    fn sleep(&self, pause: Duration) -> Task;
}
