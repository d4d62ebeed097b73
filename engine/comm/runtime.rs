//! The runtime of a process of a user's: the system's clock, the progress thread, the control thread.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::error::Error;
use crate::exec::{Driven, ProgressThread, Runtime, Task, progress_thread};
use crate::group::runtime;

/// The threads are started if they were not.
///
/// # Errors
/// They cannot be.
pub(crate) fn process_runtime() -> Result<(Arc<ProgressThread>, Arc<dyn Runtime>), Error> {
    let progress_thread = progress_thread()?;
    runtime::handle()?;
    Ok((progress_thread.clone(), Arc::new(ProcessRuntime(progress_thread))))
}

struct ProcessRuntime(Arc<ProgressThread>);

impl Runtime for ProcessRuntime {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn enlist(&self, endpoint: Arc<dyn Driven>) {
        self.0.enlist(endpoint);
    }

    fn nudge(&self) {
        self.0.nudge();
    }

    fn kick(&self) {
        self.0.kick();
    }

    fn waker(&self) -> &Waker {
        self.0.waker()
    }

    fn spawn(&self, task: Task) -> Result<(), Error> {
        runtime::spawn(task).map(drop)
    }

    fn sleep(&self, pause: Duration) -> Task {
        // Made when it is first awaited: that is on the control thread, which has the timers.
        Box::pin(async move { tokio::time::sleep(pause).await })
    }
}

/// Ticks of a runtime's clock, for a loop that runs wherever it is awaited.
pub(crate) struct Ticks(mpsc::Receiver<()>);

impl Ticks {
    /// One after each `pause`, and never more than one to be taken at once. They end with what is returned.
    ///
    /// # Errors
    /// As [`Runtime::spawn`].
    pub(crate) fn new(runtime: &Arc<dyn Runtime>, pause: Duration) -> Result<Ticks, Error> {
        let (tell, told) = mpsc::channel(1);
        let clock = runtime.clone();
        runtime.spawn(Box::pin(async move {
            loop {
                clock.sleep(pause).await;
                if tell.send(()).await.is_err() {
                    return;
                }
            }
        }))?;
        Ok(Ticks(told))
    }

    /// Waits for the next one, on any executor.
    pub(crate) async fn next(&mut self) -> Result<(), Error> {
        let ended = || Error::system("wait for the engine's clock", "its clock has ended");
        self.0.recv().await.ok_or_else(ended)
    }
}
