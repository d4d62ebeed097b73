//! The runtime of a user's process: the system's clock, the progress thread, the control thread.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::error::Error;
use crate::exec::{Driven, ProgressThread, Runtime, Task, progress_thread};
use crate::group::runtime;

/// The process's progress thread and its runtime. Starts the progress thread and the control thread if they are not running.
///
/// # Errors
/// The system cannot start a thread.
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
        // The timer is made when the task is first polled, on the control thread: no other thread has timers.
        Box::pin(async move { tokio::time::sleep(pause).await })
    }
}

/// How long a loop sleeps between two checks of a condition that no event reports, such as whether an operation is over.
pub(crate) const LOOK: Duration = Duration::from_micros(200);

/// Ticks of a runtime's clock, for a loop that is awaited on any executor.
pub(crate) struct Ticks(mpsc::Receiver<()>);

impl Ticks {
    /// A tick comes after each `pause`. While nobody takes it, at most one more is made. The ticks end when the returned value is dropped.
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

    /// Waits for the next tick, on any executor.
    pub(crate) async fn next(&mut self) -> Result<(), Error> {
        let ended = || Error::system("wait for the engine's clock", "the control thread no longer ticks");
        self.0.recv().await.ok_or_else(ended)
    }
}
