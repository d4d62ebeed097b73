//! Waiting without the GIL, so that other Python threads run meanwhile and Ctrl-C ends the wait.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How often, at least, a waiting thread checks whether the user has interrupted it.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A waker that unparks the thread that calls this.
pub(crate) fn parker() -> Waker {
    Waker::from(Arc::new(Unpark(std::thread::current())))
}

/// Polls until the value is ready, and parks the thread between polls. `None`: the value was not ready by `end`.
pub(crate) fn poll_until<T>(end: Instant, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Option<T> {
    let waker = parker();
    loop {
        if let Poll::Ready(value) = poll(&mut Context::from_waker(&waker)) {
            return Some(value);
        }
        match end.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero()) {
            Some(rest) => std::thread::park_timeout(rest),
            None => return None,
        }
    }
}

/// Runs a future to its end, without the GIL. If a signal handler raises an exception, the future is dropped before its end.
///
/// # Errors
/// The exception that a signal handler has raised, such as `KeyboardInterrupt`.
pub(crate) fn block_on<F: Future<Output: Send> + Send>(py: Python<'_>, future: F) -> PyResult<F::Output> {
    let mut future = pin!(future);
    loop {
        let future = future.as_mut();
        let ended = py.detach(|| {
            let mut future = future;
            poll_until(Instant::now() + SLICE, |cx| future.as_mut().poll(cx))
        });
        match ended {
            Some(value) => return Ok(value),
            None => py.check_signals()?,
        }
    }
}
