//! The one control thread of the process, and how futures of any executor use it.

use std::future::Future;
use std::sync::OnceLock;
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};

use crate::commands::never_block_here;
use crate::error::Error;
use crate::forked;

/// The control thread's name.
pub(crate) const THREAD: &str = "allstream-ctl";

struct Control {
    handle: Handle,
    thread: ThreadId,
}

static CONTROL: OnceLock<Control> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());

fn control() -> Result<&'static Control, Error> {
    forked::begin()?;
    if let Some(control) = CONTROL.get() {
        return Ok(control);
    }
    // A failed start is not remembered: the next call tries again.
    let _one = STARTING.lock();
    if let Some(control) = CONTROL.get() {
        return Ok(control);
    }
    let started = start()?;
    Ok(CONTROL.get_or_init(|| started))
}

fn start() -> Result<Control, Error> {
    let doing = || format!("starting the control thread `{THREAD}`");
    // Only the resolution of host names uses blocking threads.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .thread_name("allstream-dns")
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_secs(1))
        .build()
        .map_err(|e| Error::os(doing(), e))?;
    let handle = runtime.handle().clone();
    let thread = std::thread::Builder::new()
        .name(THREAD.into())
        .spawn(move || {
            never_block_here();
            runtime.block_on(std::future::pending::<()>());
        })
        .map_err(|e| Error::system(doing(), e))?;
    Ok(Control { handle, thread: thread.thread().id() })
}

/// The control runtime, started if it was not.
pub(crate) fn handle() -> Result<Handle, Error> {
    Ok(control()?.handle.clone())
}

/// Runs a future on the control thread to its end, even if the handle is dropped. The future must never block.
pub(crate) fn spawn<F>(future: F) -> Result<JoinHandle<F::Output>, Error>
where
    F: Future<Output: Send> + Send + 'static,
{
    Ok(control()?.handle.spawn(future))
}

/// Whether the caller is the control thread, which must not wait for itself.
pub(crate) fn is_control_thread() -> bool {
    CONTROL.get().is_some_and(|c| c.thread == std::thread::current().id())
}

/// Runs a future on the control thread and awaits it from any executor. Dropping the returned future stops it.
pub(crate) async fn run<T, F>(future: F) -> Result<T, Error>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    struct Stop(AbortHandle);
    impl Drop for Stop {
        fn drop(&mut self) {
            // In a forked child the task is the parent's.
            if !forked::is_forked() {
                self.0.abort();
            }
        }
    }
    let (tell, told) = oneshot::channel();
    let task = spawn(async move {
        let _ = tell.send(future.await);
    })?;
    let _stop = Stop(task.abort_handle());
    told.await.unwrap_or_else(|_| {
        Err(Error::system(
            format!("working on the control thread `{THREAD}`"),
            "the task panicked; see the log",
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serves_an_executor_that_is_not_tokio() {
        let name = futures::executor::block_on(run(async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(is_control_thread());
            Ok(std::thread::current().name().map(str::to_owned))
        }));
        assert_eq!(name, Ok(Some(THREAD.to_owned())));
        assert!(!is_control_thread());
    }

    #[test]
    fn a_panic_is_an_error_and_the_thread_lives_on() {
        let end = futures::executor::block_on(run::<(), _>(async { panic!("on purpose") }));
        assert!(matches!(end, Err(Error::System { .. })), "{end:?}");
        assert_eq!(futures::executor::block_on(run(async { Ok(1) })), Ok(1));
    }

    #[test]
    fn dropping_the_future_stops_it() {
        let (held, gone) = std::sync::mpsc::channel::<()>();
        let mut waiting = Box::pin(run::<(), _>(async move {
            let _held = held;
            std::future::pending().await
        }));
        assert!(futures::executor::block_on(futures::future::poll_immediate(&mut waiting)).is_none());
        drop(waiting);
        let end = gone.recv_timeout(Duration::from_secs(10));
        assert_eq!(end, Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    }
}
