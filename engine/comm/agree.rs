//! [`Comm::agree`]: the survivors reach one verdict, over the control connections.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use super::calls::on_both;
use super::world::{Answer, Verdict};
use super::{Comm, SharedComm};
use crate::error::Error;
use crate::forked;
use crate::mem::Promise;

/// An agreement that this rank has called: await it on any runtime, or block in [`wait`](Agree::wait). Dropping it does not
/// withdraw this rank's vote.
#[must_use = "the verdict comes through it: await it or `.wait()` for it"]
pub struct Agree {
    verdict: Promise<Answer>,
    /// Keeps this rank in its world until the verdict has come.
    _comm: SharedComm,
}

impl fmt::Debug for Agree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agree({:?})", self.verdict.event())
    }
}

impl Agree {
    /// Blocks until the verdict is there, or the deadline has passed.
    ///
    /// # Errors
    /// The same as when it is awaited: see [`Comm::agree`].
    pub fn wait(self) -> Result<Verdict, Error> {
        forked::check()?;
        self.verdict.wait().unwrap_or_else(taken)
    }
}

fn taken() -> Answer {
    Err(Error::invalid("await", "the verdict of this agreement was taken already"))
}

impl Future for Agree {
    type Output = Result<Verdict, Error>;

    /// Cancel safe: it may be dropped between polls, or polled by another task.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match forked::check() {
            Ok(()) => self.verdict.poll(cx).map(|verdict| verdict.unwrap_or_else(taken)),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

on_both! {
    /// Gives all survivors one verdict: whether all of them passed `true`, and which ranks are lost. Like
    /// `MPIX_Comm_agree` of ULFM (MPI's extension for failures).
    ///
    /// It runs over the control connections, not over the data path, so it works on a communicator that is
    /// dead: aborted, timed out, or with lost ranks. It can be called any number of times. Every rank must call
    /// it equally often: its calls are numbered, separately from the collectives. A call votes at once,
    /// whether or not the returned future is polled, and a vote cannot be withdrawn.
    ///
    /// **Every rank that gets a verdict gets the same one**, even a rank that dies right afterwards. Any number of
    /// ranks may die at any moment of the agreement, and the others still get the verdict. A rank that was stopped for
    /// so long that the others declared it lost, and then wakes up, gets an error that says so. One case is not
    /// covered: if a group falls apart into two sides, and each has declared the other lost, each side gets its
    /// own verdict.
    ///
    /// The deadline is the communicator's (5 minutes, or `ALLSTREAM_TIMEOUT` seconds); see
    /// [`agree_within`](Self::agree_within).
    ///
    /// ```no_run
    /// # use allstream::{Comm, Error};
    /// # async fn save(_: &[f32]) -> bool { true }
    /// # async fn step(mut comm: Comm, grads: Vec<f32>) -> Result<(), Error> {
    /// let rank = comm.rank();
    /// let summed = comm.all_reduce(grads).await;
    /// // Some ranks may have the sum while others have an error: they find out together.
    /// let verdict = comm.agree(summed.is_ok()).await?;
    /// if verdict.flag && verdict.lost.is_empty() {
    ///     return Ok(()); // everybody has the sum
    /// }
    /// // The communicator is dead. The survivors go on together.
    /// let (smaller, _) = comm.shrink().await?;
    /// # drop((smaller, rank)); Ok(()) }
    /// ```
    ///
    /// It makes no communicator of the survivors: `shrink` does. A group that was split off *before* the failure, and has no
    /// lost rank among its members, works on.
    ///
    /// # Errors
    /// [`Error::NoVerdict`] at the deadline, naming the ranks that live and have not called or, if all have,
    /// those that do not answer; the agreement stays open, and ranks that wait longer may still get a verdict.
    /// [`Error::PeerLost`] with this rank's
    /// own number if the others have declared it lost; every later call then fails in the same way.
    /// [`Error::QueueFull`] when 64 agreements are open.
    pub fn agree(&self, flag: bool) -> Agree {
        let timeout = self.place().0.config.timeout;
        self.agree_within(flag, timeout)
    }

    /// [`agree`](Self::agree) with this deadline instead of the communicator's.
    pub fn agree_within(&self, flag: bool, timeout: Duration) -> Agree {
        let (endpoint, world) = self.place();
        Agree { verdict: world.agree(endpoint, None, flag, timeout), _comm: self.held() }
    }
}

impl Comm {
    fn held(&self) -> SharedComm {
        self.share()
    }
}

impl SharedComm {
    fn held(&self) -> SharedComm {
        self.clone()
    }
}
