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
/// So many polls ask to be polled again at once, letting other tasks run in between; then the progress thread takes over. Small
/// operations so complete on the awaiting thread, without a switch.
const EAGER_POLLS: u32 = 10;

/// How long the poll after so many others drives the operation, and whether it asks to be polled again at once.
pub(super) fn budget(polls: u32) -> (Duration, bool) {
    (if polls <= EAGER_POLLS { POLL_BUDGET } else { Duration::ZERO }, polls < EAGER_POLLS)
}

/// How an operation ended, and the buffers that it owned, where they can be had.
pub(super) type Ended = Finished;

/// Turns what the table held back into what the user gets.
pub(crate) type Restore<O, F> = fn(Outcome, Option<ErasedBufs>) -> Result<O, Failed<F>>;

/// An operation that was handed in, whatever types its buffers have: [`Work`] is its typed face. Dropping it lets the
/// operation run on.
pub(super) struct Submitted(State);

enum State {
    Running {
        endpoint: Arc<Endpoint>,
        key: Key,
        /// How often the caller has polled it.
        polls: u32,
    },
    /// Nothing was submitted: why, and the buffers; and by whom, where that is a communicator which has died.
    Refused(Box<(Error, ErasedBufs, Option<Arc<Endpoint>>)>),
    /// Its result was taken, or somebody else has it.
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

    /// The same, by the communicator, which may have died.
    #[cold]
    pub(super) fn refused_by(endpoint: &Arc<Endpoint>, error: Error, held: ErasedBufs) -> Submitted {
        let dead = endpoint.health.cause().map(|_| endpoint.clone());
        Submitted(State::Refused(Box::new((error, held, dead))))
    }

    /// Of what somebody else has, or is not submitted yet.
    pub(super) fn elsewhere() -> Submitted {
        Submitted(State::Taken)
    }

    /// Where it runs, if it does.
    pub(super) fn at(&self) -> Option<(&Arc<Endpoint>, Key)> {
        match &self.0 {
            State::Running { endpoint, key, .. } => Some((endpoint, *key)),
            _ => None,
        }
    }

    /// Somebody else has the operation from here on, or it has ended.
    pub(super) fn let_go(&mut self) {
        self.0 = State::Taken;
    }

    /// What it came to, if there is nothing to wait for: it was refused, or taken before.
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

    /// Why it was refused, if it was, and the buffers.
    pub(super) fn refusal(&mut self) -> Option<Ended> {
        if let State::Refused(_) = self.0 { self.ended() } else { None }
    }

    /// Blocks until it has ended, working on it meanwhile.
    pub(super) fn wait(&mut self) -> Ended {
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Running { endpoint, key, .. } => endpoint.wait(key),
            other => {
                self.0 = other;
                self.ended().unwrap_or_else(|| (Err(Box::new(taken())), None))
            }
        }
    }

    /// [`wait`](Self::wait) for so long at most; `None`: it is not over.
    fn wait_for(&mut self, most: Duration) -> Option<Ended> {
        let State::Running { endpoint, key, .. } = &self.0 else { return Some(self.wait()) };
        // An end that no clock reaches is none.
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
    /// The typed face of an operation whose buffers `restore` can give back.
    pub(super) fn new(submitted: Submitted, restore: Restore<O, F>) -> Work<O, F> {
        Work { submitted, restore }
    }

    pub(super) fn restore(&self) -> Restore<O, F> {
        self.restore
    }

    /// Where it runs, if it does.
    pub(super) fn at(&self) -> Option<(&Arc<Endpoint>, Key)> {
        self.submitted.at()
    }

    /// If it was refused: as if for this cause, where there is one.
    pub(super) fn with_cause(mut self, cause: Option<&Error>) -> Self {
        if let (State::Refused(refusal), Some(cause)) = (&mut self.submitted.0, cause) {
            refusal.0 = cause.clone();
        }
        self
    }

    /// What the table gave back, as the user gets it. There is nothing more to wait for.
    pub(super) fn settle(&mut self, (result, held): Ended) -> Result<O, Failed<F>> {
        self.submitted.let_go();
        (self.restore)(result, held)
    }

    /// Blocks until the operation is finished, working on it meanwhile. Ends by the operation's deadline.
    ///
    /// # Errors
    /// As awaiting it.
    pub fn wait(mut self) -> Result<O, Failed<F>> {
        let (result, held) = self.submitted.wait();
        (self.restore)(result, held)
    }

    /// [`wait`](Self::wait) for so long at most: then the operation goes on, and this `Work` comes back, to be waited for again, awaited or
    /// dropped. For loops that look at something else now and then, as whether the user has interrupted them.
    ///
    /// # Errors
    /// This `Work`, where the operation is not over by then; what the operation itself came to is inside the `Ok`.
    pub fn wait_for(mut self, most: Duration) -> Result<Result<O, Failed<F>>, Work<O, F>> {
        match self.submitted.wait_for(most) {
            Some((result, held)) => Ok((self.restore)(result, held)),
            None => Err(self),
        }
    }

    /// Why nothing was submitted, where the call was refused: waiting for it, or awaiting it, gives this error and the buffers.
    pub fn refused(&self) -> Option<&Error> {
        match &self.submitted.0 {
            State::Refused(refusal) => {
                refusal.2.as_ref().inspect(|endpoint| _ = endpoint.tell());
                Some(&refusal.0)
            }
            _ => None,
        }
    }

    /// Whether the operation is over: waiting for it, or awaiting it, would end at once. Works on it for a moment, and never waits.
    pub fn is_finished(&self) -> bool {
        self.submitted.at().is_none_or(|(endpoint, key)| forked::is_forked() || endpoint.is_finished(key))
    }

    /// Whether a device runs it, so that a device's stream can wait for it, and the caller need not: see [`join`](Self::join). Not, where it is over.
    pub fn runs_on_device(&self) -> bool {
        self.submitted.at().is_some_and(|(endpoint, key)| endpoint.submitted.carrier(key).is_some())
    }

    /// Whether all of an operation that a device runs is on the streams of the ranks that touch its buffers, as it is soon after all ranks have called it. Also, where it is over.
    pub fn is_enqueued(&self) -> bool {
        self.submitted.at().is_none_or(|(endpoint, key)| {
            endpoint
                .submitted
                .carrier(key)
                .is_none_or(|carrier| carrier.on_stream().is_some_and(|op| op.is_enqueued()))
        })
    }

    /// The caller computes now, and will not poll it for long: the progress thread goes on with it at once, and not when its nap ends.
    pub(crate) fn leave_to_progress_thread(&self) {
        if let Some((endpoint, _)) = self.submitted.at()
            && endpoint.submitted.running() > 0
        {
            endpoint.leave_to_progress_thread();
        }
    }

    /// Why it was refused, if it was. There is nothing more to wait for then.
    pub(super) fn refusal(&mut self) -> Option<Result<O, Failed<F>>> {
        self.submitted.refusal().map(|(result, held)| (self.restore)(result, held))
    }

    /// The operation without its type, and how its result is made.
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
    /// Of a call that cannot be submitted: what it was given comes back.
    pub(super) fn unsubmitted(given: F, error: Error) -> Work<O, F> {
        Work::new(Submitted::refused(error, ErasedBufs::new(given)), given_back)
    }
}

/// A work of several that are awaited together: what it came to is kept until all are finished.
pub(super) enum Part<O, F = O> {
    Running(Work<O, F>),
    Done(Result<O, Failed<F>>),
}

impl<O, F> Part<O, F> {
    /// Whether it is finished.
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
