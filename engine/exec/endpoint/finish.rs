//! How operations end, well or not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::{Endpoint, Table};
use crate::error::Error;
use crate::exec::inflight::Key;

impl Endpoint {
    /// What operations need last, outside the locks: it calls a device's driver.
    #[cold]
    pub(super) fn do_last(self: &Arc<Self>) {
        let due = {
            let mut table = self.table.lock();
            self.is_due.store(false, Ordering::Relaxed);
            std::mem::take(&mut table.due)
        };
        for (key, last) in due {
            let endpoint = self.clone();
            last(Box::new(move |result| endpoint.ended(key, result)));
        }
    }

    /// It is over on the devices too.
    fn ended(&self, key: Key, result: Result<(), Error>) {
        let astray = || self.binding().is_some_and(|binding| binding.check().is_err());
        let Some(error) = result.as_ref().err().filter(|_| astray()) else { return self.finish(key, result) };
        // A rank went on without waiting for others, which may touch this yet: quarantine.
        if let Some(held) = self.table.lock().inflight.borrow(key) {
            std::mem::forget(held);
        }
        self.finish(key, Err(self.cause().unwrap_or_else(|| error.clone())));
    }

    /// All of an operation has moved.
    pub(super) fn moved(&self, key: Key) {
        let mut table = self.table.lock();
        let last = if table.lasts.is_empty() { None } else { table.lasts.remove(&key.number()) };
        let Some(last) = last else { return self.finish_in(table, key, Ok(())) };
        table.due.push((key, last));
        self.is_due.store(true, Ordering::Relaxed);
    }

    pub(super) fn finish(&self, key: Key, result: Result<(), Error>) {
        self.finish_in(self.table.lock(), key, result);
    }

    fn finish_in(&self, mut table: MutexGuard<'_, Table>, key: Key, result: Result<(), Error>) {
        // Of an operation that failed.
        let last = if table.lasts.is_empty() { None } else { table.lasts.remove(&key.number()) };
        let (waker, held) = table.inflight.finish(key, result);
        drop(table);
        drop(last);
        // Somebody else's code, on a thread that others need: a panic in it (reported on stderr) ends here.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(held)));
        if let Some(waker) = waker {
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Kills the communicator for a cause found here, and tells the others.
    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        let mut error = error;
        if let Error::Mismatch { comm, .. } = &mut error {
            comm.clone_from(&self.config.name);
        }
        if self.cause.set(error).is_ok() {
            // Told before anyone here wakes: should this process end because of it, the others know the cause.
            if let Some(cause) = self.cause.get() {
                self.config.control.abort(self, cause);
            }
            self.wake_dead();
        }
    }

    /// Kills the communicator for a cause heard of.
    pub(crate) fn poison(self: &Arc<Self>, error: Error) {
        if self.cause.set(error).is_ok() {
            self.wake_dead();
        }
    }

    fn wake_dead(self: &Arc<Self>) {
        self.poisoned.store(true, Ordering::Release);
        self.arm();
        self.config.lane.kick();
    }
}
