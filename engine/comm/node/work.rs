//! [`NodeWork`]: an operation of all devices of a node, in flight.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::super::work::{Part, budget, taken};
use super::super::{Ordered, Work, first_error};
use super::Several;
use crate::error::{Error, Failed};
use crate::exec::{Together, poll_together, wait_together};
use crate::mem::HostStream;

/// What each device's part came to, where at least one part has failed: its result, or its error (with the buffer, if that can
/// be given back).
pub type Outcomes<S, O> = <S as Several>::Of<Result<O, Failed<<S as Several>::Item>>>;

/// What [`NodeWork::join`] returns.
type Joined<S, O> = Result<<S as Several>::Of<Ordered<O, <S as Several>::Item>>, Failed<Outcomes<S, O>>>;

/// An operation of all devices of a [`Node`](super::Node) that has been submitted: a future of the results of all parts, in the
/// shape (array or vector) in which the buffers came.
///
/// Like a [`Work`], it runs whether or not it is polled; dropping it lets it run on; and it needs no particular runtime.
/// One thread that awaits or waits drives all parts.
#[must_use = "the buffers come back through it: await it, `.wait()` for it, or drop it to let the operation run on"]
pub struct NodeWork<S: Several, O = <S as Several>::Item> {
    parts: Option<S::Of<Part<O, S::Item>>>,
    polls: u32,
}

impl<S: Several, O> fmt::Debug for NodeWork<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.parts.is_some() { "NodeWork" } else { "NodeWork(taken)" })
    }
}

impl<S: Several, O> Unpin for NodeWork<S, O> {}

impl<S: Several, O> NodeWork<S, O> {
    pub(super) fn new(works: S::Of<Work<O, S::Item>>) -> NodeWork<S, O> {
        NodeWork { parts: Some(S::map(works, Part::Running)), polls: 0 }
    }

    fn outcome(&mut self) -> Result<S::Of<O>, Failed<Outcomes<S, O>>> {
        let none = || Failed { buf: None, error: taken() };
        let mut outcomes: Outcomes<S, O> = S::map(self.parts.take().ok_or_else(none)?, Part::outcome);
        if let Some(error) = first_error(outcomes.as_mut()) {
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
            wait_together(parts.as_mut());
        }
        self.outcome()
    }
}

impl<S: Several<Item: Send + 'static>, O: Send + 'static> NodeWork<S, O> {
    /// Makes each device's stream wait for its device's part; the caller does not wait. `streams` has one stream for each
    /// device, in the order of the devices. Each result can be used by work on its stream, or be awaited.
    ///
    /// # Errors
    /// The call was refused. Or [`Error::Invalid`]: there is not one stream for each device, or a poll has already seen the
    /// end of a part. `join` then waits for the operation first, so that nothing is lost: what it came to is in `buf`.
    pub fn join<'s>(mut self, streams: impl IntoIterator<Item = &'s HostStream>) -> Joined<S, O> {
        let none = || Failed { buf: None, error: Error::invalid("join", "this operation was taken already") };
        let parts = self.parts.as_mut().ok_or_else(none)?.as_mut();
        let streams: Vec<&HostStream> = streams.into_iter().collect();
        let (found, devices) = (streams.len(), parts.len());
        let was_polled = parts.iter().any(|part| part.at().is_none());
        if was_polled || found != devices {
            let problem = match was_polled {
                true => "a poll has already seen the end of a part: await this operation, or join it before it is polled".into(),
                false => format!("{found} streams for {devices} devices: one for each is needed"),
            };
            let invalid = |all| Failed { buf: Some(S::map(all, Ok)), error: Error::invalid("join", problem) };
            return Err(self.wait().map_or_else(|failed| failed, invalid));
        }
        let (parts, mut streams) = (self.parts.take().ok_or_else(none)?, streams.into_iter());
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
            let (budget, again) = budget(me.polls);
            if !poll_together(parts.as_mut(), cx.waker(), budget, again) {
                me.polls += 1;
                return Poll::Pending;
            }
        }
        Poll::Ready(me.outcome())
    }
}
