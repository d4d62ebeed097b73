//! [`NodeWork`]: an operation of all devices of a node, in flight.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::super::work::{EAGER_POLLS, POLL_BUDGET, Part, taken};
use super::super::{Ordered, Work};
use super::Several;
use crate::error::{Error, Failed};
use crate::exec::{Endpoint, Finished, Key, Together, poll_together, wait_together};
use crate::mem::HostStream;

/// What each device's part came to, where not all came to what was wanted: the result of those that did, and the error
/// (with the buffer, if it may be had) of those that did not.
pub type Outcomes<S, O> = <S as Several>::Of<Result<O, Failed<<S as Several>::Item>>>;

/// What each device's stream has, in order: see [`NodeWork::join`].
type Joined<S, O> = <S as Several>::Of<Ordered<O, <S as Several>::Item>>;

/// An operation of all devices of a [`Node`](super::Node) that has been submitted: a future of all parts, in the shape
/// in which the buffers came.
///
/// As a [`Work`]: it runs whether or not it is polled, dropping it lets it run on, and it needs no particular runtime.
/// One thread that awaits or waits drives all parts.
#[must_use = "the buffers come back through it: await it, `.wait()` for it, or drop it to let the operation run on"]
pub struct NodeWork<S: Several, O = <S as Several>::Item> {
    parts: Option<S::Of<Part<O, S::Item>>>,
    polls: u32,
}

impl<O, F> Part<O, F> {
    /// One device's part.
    pub(super) fn new(work: Work<O, F>) -> Part<O, F> {
        if work.at().is_some() { Part::Running(work) } else { Part::Done(work.wait()) }
    }

    pub(super) fn error(&self) -> Option<&Error> {
        match self {
            Part::Done(Err(failed)) => Some(&failed.error),
            _ => None,
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

impl<S: Several, O> fmt::Debug for NodeWork<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.parts.is_some() { "NodeWork" } else { "NodeWork(taken)" })
    }
}

impl<S: Several, O> Unpin for NodeWork<S, O> {}

/// The first error, if there is one.
fn first<O, F>(parts: &[Result<O, Failed<F>>]) -> Option<Error> {
    parts.iter().find_map(|part| part.as_ref().err().map(|failed| failed.error.clone()))
}

impl<S: Several, O> NodeWork<S, O> {
    pub(super) fn new(parts: S::Of<Part<O, S::Item>>) -> NodeWork<S, O> {
        NodeWork { parts: Some(parts), polls: 0 }
    }

    /// Nothing was submitted: everything comes back.
    pub(super) fn refused(bufs: S, error: &Error) -> NodeWork<S, O> {
        NodeWork::new(bufs.each(|buf| Part::Done(Err(Failed { buf: Some(buf), error: error.clone() }))))
    }

    fn outcome(&mut self) -> Result<S::Of<O>, Failed<Outcomes<S, O>>> {
        let none = || Failed { buf: None, error: taken() };
        let Some(parts) = self.parts.take() else { return Err(none()) };
        let mut outcomes: Outcomes<S, O> = S::map(parts, Part::outcome);
        if let Some(error) = first(S::slice(&mut outcomes)) {
            return Err(Failed { buf: Some(outcomes), error });
        }
        S::all(S::map(outcomes, Result::ok)).ok_or_else(none)
    }

    /// Blocks until all parts are finished, working on all of them meanwhile. Ends by the operation's deadline.
    ///
    /// # Errors
    /// As awaiting it.
    pub fn wait(mut self) -> Result<S::Of<O>, Failed<Outcomes<S, O>>> {
        if let Some(parts) = &mut self.parts {
            wait_together(S::slice(parts));
        }
        self.outcome()
    }

    /// Makes each device's stream wait for its part, not the caller: `streams` are one for each device, in order. Each
    /// result is for work on that stream, or to be awaited.
    ///
    /// # Errors
    /// Those that are known already; another number of streams than of devices, or an operation that was polled before
    /// (both after waiting for it, so that nothing is lost: what it came to is in `buf`).
    pub fn join<'s>(
        mut self,
        streams: impl IntoIterator<Item = &'s HostStream>,
    ) -> Result<Joined<S, O>, Failed<Outcomes<S, O>>>
    where
        O: Send + 'static,
        S::Item: Send + 'static,
    {
        let none = || Failed { buf: None, error: Error::invalid("join", "this operation was taken already") };
        let Some(mut parts) = self.parts.take() else { return Err(none()) };
        let streams: Vec<&HostStream> = streams.into_iter().collect();
        let slice = S::slice(&mut parts);
        let problem = if slice.iter().any(|part| part.at().is_none()) {
            Some("an operation that was polled already is awaited, or joined before".into())
        } else if streams.len() != slice.len() {
            Some(format!("{} streams for {} devices: one for each is needed", streams.len(), slice.len()))
        } else {
            None
        };
        if let Some(problem) = problem {
            wait_together(slice);
            let mut outcomes: Outcomes<S, O> = S::map(parts, Part::outcome);
            let error = first(S::slice(&mut outcomes)).unwrap_or_else(|| Error::invalid("join", problem));
            return Err(Failed { buf: Some(outcomes), error });
        }
        let mut streams = streams.into_iter();
        let joined = S::map(parts, |part| match (part, streams.next()) {
            (Part::Running(work), Some(stream)) => work.join(stream).ok(),
            _ => None,
        });
        S::all(joined).ok_or_else(none)
    }
}

impl<S: Several, O> Future for NodeWork<S, O> {
    type Output = Result<S::Of<O>, Failed<Outcomes<S, O>>>;

    /// Cancel safe: it may be dropped between polls, or polled by another task.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let me = &mut *self;
        if let Some(parts) = &mut me.parts {
            let budget = if me.polls <= EAGER_POLLS { POLL_BUDGET } else { Duration::ZERO };
            if !poll_together(S::slice(parts), cx.waker(), budget, me.polls < EAGER_POLLS) {
                me.polls += 1;
                return Poll::Pending;
            }
        }
        Poll::Ready(me.outcome())
    }
}
