//! How a communicator is closed.

use std::sync::Arc;
use std::time::Duration;

use super::calls::on_both;
use super::handle::{Handle, RECORDERS};
use super::runtime::{LOOK, Ticks};
use crate::error::Error;
use crate::forked;

/// How long `close` waits for the other ranks to close too.
const CLOSING: Duration = Duration::from_secs(2);

on_both! {
    /// Waits until all submitted operations have finished and their data has been sent, then for up to 2 s until the other ranks close, too, or leave
    /// the world. Checks that all ranks made the same calls, also where no rank waited for another, and that every message that came to this rank was
    /// received. With the world's last handle this rank says goodbye. All other handles of this communicator on this rank
    /// ([`Comm::share`](super::Comm::share)) are closed, too.
    ///
    /// A communicator that has died is closed as any other. A cause that a call has returned already is not returned again, nor is a lost rank that a
    /// call on another communicator has named. In any case this rank's goodbye tells the other ranks of the first
    /// lost rank.
    ///
    /// # Errors
    /// The cause for which the communicator is dead, if no call has returned it; [`Error::Mismatch`] or [`Error::Invalid`] for an operation that
    /// ranks do not agree on; [`Error::Invalid`] that names messages which were sent to this rank and which it did not receive.
    pub async fn close(self) -> Result<(), Error> {
        close(self.0).await
    }
}

async fn close(handle: Arc<Handle>) -> Result<(), Error> {
    forked::check()?;
    let endpoint = handle.endpoint.clone();
    let calls = endpoint.submitted.close();
    let world = handle.membership.world.clone();
    // `is_quiet` drives the endpoint, so kernels, users' functions and wakers run in this task. Only the clock runs on another thread.
    let mut ticks = Ticks::new(&world.runtime, LOOK)?;
    while endpoint.health.cause().is_none() && !endpoint.is_quiet() {
        ticks.next().await?;
    }
    world.closing(&endpoint, calls);
    let end = world.runtime.now() + CLOSING;
    while endpoint.health.cause().is_none()
        && !endpoint.peers.all_close(endpoint.config.rank)
        && world.runtime.now() < end
    {
        ticks.next().await?;
    }
    if let Some(error) = endpoint.leftover() {
        endpoint.fail(error);
    }
    let result = endpoint.died_untold().map_or(Ok(()), Err);
    let membership = handle.membership.clone();
    drop(handle);
    // Of the last communicators that close at the same time, exactly one gets the membership, and says goodbye without blocking its thread.
    let Some(membership) = Arc::into_inner(membership) else { return result };
    if let Some(mesh) = &membership.mesh {
        world.leave();
        mesh.close(world.loss()).await;
    }
    let end = world.runtime.now() + RECORDERS;
    while world.is_recording() && world.runtime.now() < end {
        ticks.next().await?;
    }
    result
}
