//! [`Work`]: an operation in flight.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::restore::given_back;
use crate::error::{Error, Failed, Outcome};
use crate::exec::{Endpoint, Finished, Key, Together};
use crate::forked;
use crate::mem::ErasedBufs;

/// A poll drives the operation for at most this long.
const POLL_BUDGET: Duration = Duration::from_micros(20);
/// The first `EAGER_POLLS` polls ask to be polled again at once, which lets other tasks run in between; then the progress thread takes over. So
/// small operations complete on the awaiting thread, without a switch of threads.
const EAGER_POLLS: u32 = 10;

/// How long a poll that follows `polls` others drives the operation, and whether it asks to be polled again at once.
pub(super) fn budget(polls: u32) -> (Duration, bool) {
    (if polls <= EAGER_POLLS { POLL_BUDGET } else { Duration::ZERO }, polls < EAGER_POLLS)
}

/// How an operation ended, and its buffers unless they are kept in quarantine.
pub(super) type Ended = Finished;

/// Turns an operation's outcome, and the buffers that the endpoint held for it, into what the user gets.
pub(crate) type Restore<O, F> = fn(Outcome, Option<ErasedBufs>) -> Result<O, Failed<F>>;

/// A submitted operation, without the types of its buffers, which [`Work`] adds. Dropping it lets the operation run on.
pub(super) struct Submitted(State);

enum State {
    Running {
        endpoint: Arc<Endpoint>,
        key: Key,
        /// How often the caller has polled the operation.
        polls: u32,
    },
    /// Nothing was submitted: the error, the buffers, and the communicator if it refused because it has died.
    Refused(Box<(Error, ErasedBufs, Option<Arc<Endpoint>>)>),
    /// The result was taken, or another value has the operation.
    Taken,
}

impl Submitted {
    pub(super) fn running(endpoint: Arc<Endpoint>, key: Key) -> Submitted {
        Submitted(State::Running { endpoint, key, polls: 0 })
    }

    #[cold]
    pub(super) fn refused(error: Error, held: ErasedBufs) -> Submitted {
        Submitted(State::Refused(Box::new((error, held, None))))
    }

    /// Like [`refused`](Self::refused), for an operation that the communicator refuses, perhaps because the communicator has died.
    #[cold]
    pub(super) fn refused_by(endpoint: &Arc<Endpoint>, error: Error, held: ErasedBufs) -> Submitted {
        let dead = endpoint.health.cause().map(|_| endpoint.clone());
        Submitted(State::Refused(Box::new((error, held, dead))))
    }

    /// For an operation that another value has, or that is not submitted yet.
    pub(super) fn elsewhere() -> Submitted {
        Submitted(State::Taken)
    }

    /// Its endpoint and its key there, if it was submitted and its result was not taken.
    pub(super) fn at(&self) -> Option<(&Arc<Endpoint>, Key)> {
        match &self.0 {
            State::Running { endpoint, key, .. } => Some((endpoint, *key)),
            _ => None,
        }
    }

    /// From here on another value has the operation, or its result was taken.
    pub(super) fn let_go(&mut self) {
        self.0 = State::Taken;
    }

    /// The outcome, if there is nothing to wait for because the operation was refused or its result was taken before.
    fn ended(&mut self) -> Option<Ended> {
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Refused(refusal) => {
                let (error, held, dead) = *refusal;
                dead.inspect(|endpoint| _ = endpoint.tell());
                Some((Err(Box::new(error)), Some(held)))
            }
            State::Taken => Some((Err(Box::new(taken())), None)),
            running => {
                self.0 = running;
                None
            }
        }
    }

    /// The error and the buffers, if the operation was refused.
    pub(super) fn refusal(&mut self) -> Option<Ended> {
        if let State::Refused(_) = self.0 { self.ended() } else { None }
    }

    /// Blocks until the operation has ended, and drives it meanwhile.
    pub(super) fn wait(&mut self) -> Ended {
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Running { endpoint, key, .. } => endpoint.wait(key),
            other => {
                self.0 = other;
                self.ended().unwrap_or_else(|| (Err(Box::new(taken())), None))
            }
        }
    }

    /// [`wait`](Self::wait) for so long at most. `None`: the operation is not over.
    fn wait_for(&mut self, most: Duration) -> Option<Ended> {
        let State::Running { endpoint, key, .. } = &self.0 else { return Some(self.wait()) };
        // If the sum is beyond what an `Instant` can hold, the wait has no limit.
        let ended = endpoint.wait_until(*key, Instant::now().checked_add(most))?;
        self.let_go();
        Some(ended)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Ended> {
        let State::Running { endpoint, key, polls } = &mut self.0 else { return Poll::Ready(self.wait()) };
        let (budget, again) = budget(*polls);
        match endpoint.poll(*key, cx.waker(), budget, again) {
            Poll::Pending => {
                *polls += 1;
                Poll::Pending
            }
            Poll::Ready(ended) => {
                self.let_go();
                Poll::Ready(ended)
            }
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        if let State::Running { endpoint, key, .. } = &self.0 {
            endpoint.submitted.detach(*key);
        }
    }
}

/// An operation that has been submitted: a future that gives the buffer back.
///
/// - It runs whether or not it is polled. Dropping it lets it run on: peers depend on this rank. A later error is
///   then found by the communicator's next call.
/// - It needs no particular runtime; [`Work::wait`] blocks instead.
/// - `O` comes back on success, `F` (the input, for calls that allocate their output) on failure.
#[must_use = "the buffer comes back through it: await it, `.wait()` for it, or drop it to let the operation run on"]
pub struct Work<O, F = O> {
    submitted: Submitted,
    restore: Restore<O, F>,
}

impl<O, F> fmt::Debug for Work<O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.submitted.0 {
            State::Running { .. } => f.write_str("Work(in flight)"),
            State::Refused(refusal) => write!(f, "Work(refused: {})", refusal.0),
            State::Taken => f.write_str("Work(taken)"),
        }
    }
}

impl<O, F> Unpin for Work<O, F> {}

impl<O, F> Work<O, F> {
    /// Gives an operation the types of its buffers: `restore` turns them back into the user's.
    pub(super) fn new(submitted: Submitted, restore: Restore<O, F>) -> Work<O, F> {
        Work { submitted, restore }
    }

    pub(super) fn restore(&self) -> Restore<O, F> {
        self.restore
    }

    /// As [`Submitted::at`].
    pub(super) fn at(&self) -> Option<(&Arc<Endpoint>, Key)> {
        self.submitted.at()
    }

    /// If the operation was refused, replaces the error by `cause`, if there is one.
    pub(super) fn with_cause(mut self, cause: Option<&Error>) -> Self {
        if let (State::Refused(refusal), Some(cause)) = (&mut self.submitted.0, cause) {
            refusal.0 = cause.clone();
        }
        self
    }

    /// Turns the outcome and the buffers that the endpoint has given back into what the user gets. From here on there is nothing to wait for.
    pub(super) fn settle(&mut self, (result, held): Ended) -> Result<O, Failed<F>> {
        self.submitted.let_go();
        (self.restore)(result, held)
    }

    /// Blocks until the operation is finished, and drives it meanwhile. Ends at the operation's deadline at the latest.
    ///
    /// # Errors
    /// As awaiting it.
    pub fn wait(mut self) -> Result<O, Failed<F>> {
        let (result, held) = self.submitted.wait();
        (self.restore)(result, held)
    }

    /// [`wait`](Self::wait) for so long at most: then the operation goes on, and this `Work` comes back, to be waited for again, awaited or
    /// dropped. For loops that check something else now and then, such as whether the user has interrupted the program.
    ///
    /// # Errors
    /// This `Work`, if the operation is not over by then. The operation's own outcome, be it an error, is inside the `Ok`.
    pub fn wait_for(mut self, most: Duration) -> Result<Result<O, Failed<F>>, Work<O, F>> {
        match self.submitted.wait_for(most) {
            Some((result, held)) => Ok((self.restore)(result, held)),
            None => Err(self),
        }
    }

    /// The error, if the call was refused and so nothing was submitted. Waiting for this `Work`, or awaiting it, gives the error and the buffers.
    pub fn refused(&self) -> Option<&Error> {
        match &self.submitted.0 {
            State::Refused(refusal) => {
                refusal.2.as_ref().inspect(|endpoint| _ = endpoint.tell());
                Some(&refusal.0)
            }
            _ => None,
        }
    }

    /// Whether the operation is over: waiting for it, or awaiting it, would end at once. Drives it for a moment, and never waits.
    pub fn is_finished(&self) -> bool {
        self.submitted.at().is_none_or(|(endpoint, key)| forked::is_forked() || endpoint.is_finished(key))
    }

    /// Whether a device runs the operation, so that a stream can wait for it instead of the caller: see [`join`](Self::join). `false` once the
    /// operation is over.
    pub fn runs_on_device(&self) -> bool {
        self.submitted.at().is_some_and(|(endpoint, key)| endpoint.submitted.carrier(key).is_some())
    }

    /// Whether all work of an operation that devices run is on the streams of the ranks that touch its buffers. This becomes `true` soon after
    /// all ranks have called the operation. `true` also once the operation is over, and for one that no device runs.
    pub fn is_enqueued(&self) -> bool {
        self.submitted.at().is_none_or(|(endpoint, key)| {
            endpoint
                .submitted
                .carrier(key)
                .is_none_or(|carrier| carrier.on_stream().is_some_and(|op| op.is_enqueued()))
        })
    }

    /// The caller is going to compute, and will not poll for long: the progress thread goes on with the operation now, not when its nap ends.
    pub(crate) fn leave_to_progress_thread(&self) {
        if let Some((endpoint, _)) = self.submitted.at()
            && endpoint.submitted.running() > 0
        {
            endpoint.leave_to_progress_thread();
        }
    }

    /// What the user gets, if the operation was refused. Then there is nothing more to wait for.
    pub(super) fn refusal(&mut self) -> Option<Result<O, Failed<F>>> {
        self.submitted.refusal().map(|(result, held)| (self.restore)(result, held))
    }

    /// The operation without the types of its buffers, and the function that restores these.
    pub(super) fn into_parts(self) -> (Submitted, Restore<O, F>) {
        (self.submitted, self.restore)
    }
}

pub(super) fn taken() -> Error {
    Error::invalid("await", "the result of this operation was taken already")
}

impl<O, F> Future for Work<O, F> {
    type Output = Result<O, Failed<F>>;

    /// Cancel safe: a `Work` may be dropped between polls, or polled by another task.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let restore = self.restore;
        self.submitted.poll(cx).map(|(result, held)| restore(result, held))
    }
}

impl<O, F: Send + 'static> Work<O, F> {
    /// For a call that cannot be submitted: gives back the error and what the call was given.
    pub(super) fn unsubmitted(given: F, error: Error) -> Work<O, F> {
        Work::new(Submitted::refused(error, ErasedBufs::new(given)), given_back)
    }
}

/// One of several works that are awaited together. Its result is kept until all are finished.
pub(super) enum Part<O, F = O> {
    Running(Work<O, F>),
    Done(Result<O, Failed<F>>),
}

impl<O, F> Part<O, F> {
    /// Polls the work. Returns whether it is finished.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        if let Part::Running(work) = self {
            match Pin::new(work).poll(cx) {
                Poll::Ready(result) => *self = Part::Done(result),
                Poll::Pending => return false,
            }
        }
        true
    }

    /// Blocks until it is finished.
    pub(super) fn outcome(self) -> Result<O, Failed<F>> {
        match self {
            Part::Running(work) => work.wait(),
            Part::Done(result) => result,
        }
    }
}

impl<O, F> Together for Part<O, F> {
    fn at(&self) -> Option<(&Arc<Endpoint>, Key)> {
        match self {
            Part::Running(work) => work.at(),
            Part::Done(_) => None,
        }
    }

    fn finished(&mut self, outcome: Finished) {
        if let Part::Running(work) = self {
            *self = Part::Done(work.settle(outcome));
        }
    }
}
