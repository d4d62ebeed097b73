//! [`DeviceOp`]s that have failed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::DeviceOp;
use crate::error::Error;
use crate::link::exit::Lease;
use crate::link::waits::{Wait, kept};
use crate::trace::log::LOG;

impl DeviceOp {
    /// It has failed, for this cause. Told before any stream goes on that waits for it.
    pub(crate) fn give_up(self: &Arc<Self>, cause: &Error) {
        let verdict = {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.failed, true) {
                return;
            }
            state.verdict.clone()
        };
        let leaving = &self.binding.leaving;
        if let Some(verdict) = verdict {
            verdict.settle(Err(cause.clone()));
            leaving.verdicts.lock().push(verdict);
        }
        leaving.operations.lock().push(Arc::downgrade(self));
        if leaving.has_begun.load(Ordering::Acquire) {
            // It was called meanwhile, and nothing of it is on a stream.
            let ours = self.binding.ours.clone();
            self.binding.ours.commands.put_always(move || drop(ours.release_all()));
        }
    }

    /// Gives it up. Whether a device may still touch its buffers all the same.
    pub(crate) fn cannot_give_up(self: &Arc<Self>, cause: &Error) -> bool {
        self.give_up(cause);
        // Where a rank went on without waiting for others, those may touch it yet.
        let checked = self.check();
        let is_err = checked.is_err();
        if let Err(error) = checked {
            let what = "the buffers of a collective that failed on a device are not given back";
            LOG.warn(move || tracing::warn!("{what}: {error}"));
        }
        is_err || self.binding.leaving.ordered.get().is_some_and(Result::is_err)
    }

    /// It has failed, and its buffers are not to be given back by whoever has them until all of these are over; `None`: never.
    pub(crate) fn lose(&self, until: Option<Vec<Arc<Lease>>>) {
        self.state.lock().lost = Some(until);
    }

    /// Whether its buffers are to be kept, and until when (see [`lose`](Self::lose)).
    pub(crate) fn lost(&self) -> Option<Option<Vec<Arc<Lease>>>> {
        self.state.lock().lost.clone()
    }

    /// Makes the buffers' streams wait for what is still on the stream of any rank of this process, as that may touch them. No rank puts more
    /// there.
    pub(super) fn order_after_all(&self) -> Result<(), Error> {
        for device in self.binding.all.iter().flatten().filter(|_| kept(Wait::GiveUp)) {
            let last = device.stream.point()?;
            // Ours waits, too: an operation's workspace goes back to the pool in its order.
            let ours = [self.stream()].into_iter().filter(|_| kept(Wait::GiveUpOurs));
            self.streams.iter().chain(ours).try_for_each(|stream| stream.wait_event(&last))?;
        }
        Ok(())
    }
}
