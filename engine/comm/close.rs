//! The end of a communicator, in peace.

use std::sync::Arc;
use std::time::Duration;

use super::calls::on_both;
use super::handle::{Handle, RECORDERS};
use super::runtime::Ticks;
use crate::error::Error;
use crate::forked;

/// How often `close` looks again.
const LOOK: Duration = Duration::from_micros(200);

/// How long `close` waits for the other ranks to close too.
const CLOSING: Duration = Duration::from_secs(2);

on_both! {
    /// Waits until everything submitted is finished and has left, and a bounded time (2 s) for the other ranks to close
    /// or leave too; checks that all made the same calls, also where none waited for another, and that every message that came here
    /// was received; says goodbye. What else holds the communicator, on this rank ([`Comm::share`](super::Comm::share)), is closed with it.
    ///
    /// A communicator that has died is closed as any other: what a call has returned already, here or of a lost rank on another communicator, is no
    /// error again. The other ranks are told of a loss whether it is one or not.
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
    // Each look drives the endpoint: kernels, users' functions and wakers run here. Only the clock is elsewhere.
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
    if let (Some(mesh), 1) = (&membership.mesh, Arc::strong_count(&membership)) {
        membership.world.leave();
        mesh.close(membership.world.loss()).await;
    }
    let end = world.runtime.now() + RECORDERS;
    while Arc::strong_count(&membership) == 1 && world.is_recording() && world.runtime.now() < end {
        ticks.next().await?;
    }
    result
}
