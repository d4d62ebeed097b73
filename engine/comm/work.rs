//! [`Work`]: an operation in flight.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::error::{Error, Failed, Outcome};
use crate::exec::{Endpoint, Finished, Key, Polled};
use crate::mem::Held;

/// A poll drives the operation for at most this long.
pub(super) const POLL_BUDGET: Duration = Duration::from_micros(20);
/// So many polls ask to be polled again at once, letting other tasks run in between; then the lane takes over. Small
/// operations so complete on the awaiting thread, without a switch.
pub(super) const EAGER_POLLS: u32 = 10;

/// Turns what the table held back into what the user gets.
pub(crate) type Restore<O, F> = fn(Outcome, Option<Held>) -> Result<O, Failed<F>>;

/// An operation that has been submitted: a future that gives the buffer back.
///
/// - It runs whether or not it is polled. Dropping it lets it run on: peers depend on this rank. A later error is
///   then found by the communicator's next call.
/// - It needs no particular runtime; [`Work::wait`] blocks instead.
/// - `O` comes back on success, `F` (the input, for calls that allocate their output) on failure.
#[must_use = "the buffer comes back through it: await it, `.wait()` for it, or drop it to let the operation run on"]
pub struct Work<O, F = O> {
    state: State<F>,
    restore: Restore<O, F>,
    polls: u32,
}

enum State<F> {
    Running(Arc<Endpoint>, Key),
    Refused(Failed<F>),
    Taken,
}

impl<O, F> fmt::Debug for Work<O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::Running(..) => f.write_str("Work(in flight)"),
            State::Refused(failed) => write!(f, "Work(refused: {})", failed.error),
            State::Taken => f.write_str("Work(taken)"),
        }
    }
}

impl<O, F> Unpin for Work<O, F> {}

impl<O, F> Work<O, F> {
    pub(crate) fn running(endpoint: Arc<Endpoint>, key: Key, restore: Restore<O, F>) -> Work<O, F> {
        Work { state: State::Running(endpoint, key), restore, polls: 0 }
    }

    /// Of what is not submitted yet: carries no more than how its result will be made.
    pub(super) fn waiting(restore: Restore<O, F>) -> Work<O, F> {
        Work { state: State::Taken, restore, polls: 0 }
    }

    pub(super) fn restore(&self) -> Restore<O, F> {
        self.restore
    }

    /// Where it runs, if it does.
    pub(super) fn at(&self) -> Option<(&Arc<Endpoint>, Key)> {
        match &self.state {
            State::Running(endpoint, key) => Some((endpoint, *key)),
            _ => None,
        }
    }

    /// What the table gave back, as the user gets it. There is nothing more to wait for.
    pub(super) fn settle(&mut self, (result, held): Finished<Held, Box<Error>>) -> Result<O, Failed<F>> {
        self.state = State::Taken;
        (self.restore)(result, held)
    }

    pub(crate) fn refused(failed: Failed<F>, restore: Restore<O, F>) -> Work<O, F> {
        Work { state: State::Refused(failed), restore, polls: 0 }
    }

    /// Blocks until the operation is finished, working on it meanwhile. Ends by the operation's deadline.
    ///
    /// # Errors
    /// As awaiting it.
    pub fn wait(mut self) -> Result<O, Failed<F>> {
        match std::mem::replace(&mut self.state, State::Taken) {
            State::Running(endpoint, key) => {
                let (result, held) = endpoint.wait(key);
                (self.restore)(result, held)
            }
            State::Refused(failed) => Err(failed),
            State::Taken => Err(taken()),
        }
    }

    /// Why it was refused, if it was. There is nothing more to wait for then.
    pub(super) fn refusal(&mut self) -> Option<Failed<F>> {
        match std::mem::replace(&mut self.state, State::Taken) {
            State::Refused(failed) => Some(failed),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Somebody else has the operation from here on.
    pub(super) fn let_go(&mut self) -> Restore<O, F> {
        self.state = State::Taken;
        self.restore
    }
}

pub(super) fn taken<F>() -> Failed<F> {
    Failed { buf: None, error: Error::invalid("await", "the result of this operation was taken already") }
}

impl<O, F> Future for Work<O, F> {
    type Output = Result<O, Failed<F>>;

    /// Cancel safe: a `Work` may be dropped between polls, or polled by another task.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let done = match std::mem::replace(&mut self.state, State::Taken) {
            State::Running(endpoint, key) => match endpoint.poll(
                key,
                cx.waker(),
                if self.polls <= EAGER_POLLS { POLL_BUDGET } else { Duration::ZERO },
                self.polls < EAGER_POLLS,
            ) {
                Polled::Pending => {
                    self.polls += 1;
                    self.state = State::Running(endpoint, key);
                    return Poll::Pending;
                }
                Polled::Ready((result, held)) => (self.restore)(result, held),
            },
            State::Refused(failed) => Err(failed),
            State::Taken => Err(taken()),
        };
        Poll::Ready(done)
    }
}

impl<O, F> Drop for Work<O, F> {
    fn drop(&mut self) {
        if let State::Running(endpoint, key) = &self.state {
            endpoint.detach(*key);
        }
    }
}
