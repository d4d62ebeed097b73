//! How a [`DeviceOp`] that has failed is given up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::DeviceOp;
use crate::error::Error;
use crate::link::exit::Lease;
use crate::link::waits::{Wait, kept};
use crate::trace::log::LOG;

impl DeviceOp {
    /// Notes that the operation has failed for this cause. Called before any stream that waits for the operation goes on. The first call counts.
    pub(crate) fn give_up(self: &Arc<Self>, cause: &Error) {
        let verdict = {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.failed, true) {
                return;
            }
            state.verdict.clone()
        };
        // Wakes those who wait until all of its work is on streams: they need not wait for that any more.
        self.binding.ours.inputs.wake(&self.binding.ours.commands);
        let leaving = &self.binding.leaving;
        if let Some(verdict) = verdict {
            verdict.settle(Err(cause.clone()));
            leaving.verdicts.lock().push(verdict);
        }
        leaving.operations.lock().push(Arc::downgrade(self));
        if leaving.has_begun.load(Ordering::Acquire) {
            // The operation was called after the communicator had failed, so none of its work is on a stream. `Binding::leave` may already
            // have released the operations that were called before; this command releases this one, too.
            let ours = self.binding.ours.clone();
            self.binding.ours.commands.put_always(move || drop(ours.release_all()));
        }
    }

    /// Gives the operation up. Returns whether a device may still touch its buffers all the same.
    pub(crate) fn cannot_give_up(self: &Arc<Self>, cause: &Error) -> bool {
        self.give_up(cause);
        // The check fails if this rank, or one in another process, has let its stream go on without waiting for the others: then the devices
        // of the others may still touch the buffers.
        let checked = self.check();
        let is_err = checked.is_err();
        if let Err(error) = checked {
            let what = "the buffers of a collective that failed on a device are not given back";
            LOG.warn(move || tracing::warn!("{what}: {error}"));
        }
        is_err || self.binding.leaving.ordered.get().is_some_and(Result::is_err)
    }

    /// Notes that somebody may still touch the failed operation's buffers: whoever has them must keep them until all these leases are over;
    /// `None`: for good.
    pub(crate) fn lose(&self, until: Option<Vec<Arc<Lease>>>) {
        self.state.lock().lost = Some(until);
    }

    /// What [`lose`](Self::lose) has noted. `None`: the buffers need not be kept.
    pub(crate) fn lost(&self) -> Option<Option<Vec<Arc<Lease>>>> {
        self.state.lock().lost.clone()
    }

    /// Makes the buffers' streams wait for the work that is still on the stream of any rank of this process, as that work may touch the
    /// buffers. No rank puts more work there: `Binding::cut` has seen to that.
    pub(super) fn order_after_all(&self) -> Result<(), Error> {
        for device in self.binding.all.iter().flatten().filter(|_| kept(Wait::GiveUp)) {
            let last = device.stream.point()?;
            // This rank's own stream waits, too: the operation's workspace goes back to the pool in the order of that stream.
            let ours = [self.stream()].into_iter().filter(|_| kept(Wait::GiveUpOurs));
            self.streams.iter().chain(ours).try_for_each(|stream| stream.wait_event(&last))?;
        }
        Ok(())
    }
}
