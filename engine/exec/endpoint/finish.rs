//! How operations end, well or not.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::{Endpoint, Table};
use crate::error::{Error, Missing, MissingState, Operation};
use crate::exec::deadlines::grace;
use crate::exec::inflight::{Finished, Key, Look};
use crate::forked;
use crate::mem::ErasedBufs;
use crate::mem::device::Staged;
use crate::trace::log::LOG;
use crate::types::Signature;

/// An operation whose memory is to be taken back when all has moved.
#[derive(Clone)]
pub(super) struct Backing {
    key: Key,
    number: u64,
    signature: Signature,
    timeout: Duration,
    staged: Arc<Staged>,
}

/// How many wakers of users' this thread is in, each woken by the one before.
struct Depth;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

impl Depth {
    const MOST: u32 = 16;

    fn deeper() -> Option<Depth> {
        let depth = DEPTH.get();
        (depth < Depth::MOST).then(|| {
            DEPTH.set(depth + 1);
            Depth
        })
    }
}

impl Drop for Depth {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// What is somebody else's of an operation that has finished: whom to wake, and buffers that nobody will come for.
pub(super) struct Over {
    waker: Option<Waker>,
    held: Option<ErasedBufs>,
}

impl Table {
    /// Keeps what takes an operation's memory back; also gives it, where that memory comes in several stripes.
    pub(super) fn keep(
        &mut self,
        key: Key,
        (number, signature, timeout): (u64, Signature, Duration),
        staged: Option<Arc<Staged>>,
    ) -> Option<Arc<Staged>> {
        let staged = staged?;
        let backing = Backing { key, number, signature, timeout, staged: staged.clone() };
        self.staged.insert(key.number(), backing);
        staged.is_striped().then_some(staged)
    }

    /// What takes an operation's memory back.
    pub(super) fn staged_of(&self, key: Key) -> Option<Arc<Staged>> {
        self.staged.get(&key.number()).map(|backing| backing.staged.clone())
    }

    fn forget(&mut self, key: Key) -> Option<Backing> {
        if !self.backing.is_empty() {
            self.backing.retain(|(_, backing)| backing.key != key);
        }
        if self.staged.is_empty() { None } else { self.staged.remove(&key.number()) }
    }
}

impl Endpoint {
    /// Takes memory back, outside the locks: that calls a device's driver.
    #[cold]
    pub(super) fn do_last(self: &Arc<Self>) {
        let due = {
            let mut table = self.table.lock();
            self.is_due.store(false, Ordering::Relaxed);
            std::mem::take(&mut table.due)
        };
        for backing in due {
            let (endpoint, again, key) = (self.clone(), self.clone(), backing.key);
            let staged = backing.staged.clone();
            // From then on the device has until the deadline.
            let begun = move || again.table.lock().backing.push((Instant::now(), backing));
            let ended = move |result| {
                endpoint.finish(key, result);
                endpoint.hand_over();
            };
            staged.back(Box::new(begun), Box::new(ended));
        }
    }

    /// Ends what a device does not come to take back within the operation's time.
    pub(super) fn end_overdue_backing(self: &Arc<Self>, (now, awake): (Instant, Instant)) {
        let late = |(since, backing): &&(Instant, Backing)| {
            now - *since > backing.timeout && now - awake > grace(backing.timeout)
        };
        let late: Vec<Backing> = {
            let table = self.table.lock();
            table.backing.iter().filter(late).map(|(_, backing)| backing.clone()).collect()
        };
        for Backing { key, number, signature, timeout, staged, .. } in late {
            let still = self.table.lock().backing.iter().any(|(_, backing)| backing.key == key);
            if !still {
                continue;
            }
            let error = self.not_come(number, signature, timeout);
            self.fail(error.clone());
            if staged.is_settling() {
                std::mem::forget(self.table.lock().inflight.borrow(key));
            }
            self.finish(key, Err(error));
        }
    }

    /// This rank's device has not brought an operation's memory, or not taken it back.
    pub(super) fn not_come(&self, number: u64, signature: Signature, after: Duration) -> Error {
        let rank = self.config.rank;
        let operation = Operation { comm: self.config.name.clone(), number, signature };
        Error::Timeout {
            operation,
            rank,
            after,
            missing: vec![Missing { rank, state: MissingState::NotReady }],
        }
    }

    /// All of an operation has moved.
    pub(super) fn moved(&self, key: Key) {
        let mut table = self.table.lock();
        let Some(backing) = table.forget(key) else { return self.finish_in(table, key, Ok(())) };
        table.due.push(backing);
        self.is_due.store(true, Ordering::Relaxed);
    }

    /// Ends an operation. Its user hears of it in [`hand_over`](Self::hand_over).
    pub(super) fn finish(&self, key: Key, result: Result<(), Error>) {
        self.finish_in(self.table.lock(), key, result);
    }

    fn finish_in(&self, mut table: MutexGuard<'_, Table>, key: Key, result: Result<(), Error>) {
        // Of an operation that failed.
        let staged = table.forget(key);
        if !table.devices.is_empty() {
            table.devices.remove(&key.number());
        }
        let (waker, held) = table.inflight.finish(key, result.map_err(Box::new));
        if waker.is_some() || held.is_some() {
            table.over.push(Over { waker, held });
            self.is_over.store(true, Ordering::Release);
        }
        drop(table);
        drop(staged);
    }

    /// Wakes the users of operations that have finished, and drops the buffers that nobody will come for. Both is somebody
    /// else's code, which may come back to this very endpoint, or keep its thread for long: the caller holds none of our locks.
    pub(super) fn hand_over(self: &Arc<Self>) {
        if !self.is_over.load(Ordering::Acquire) {
            return;
        }
        let Some(_deeper) = Depth::deeper() else {
            // Wakers that poll what they wake, which finishes and wakes the next: the lane begins with a new stack.
            self.arm();
            return self.config.lane.kick();
        };
        while self.is_over.load(Ordering::Acquire) {
            let next = {
                let mut table = self.table.lock();
                let next = table.over.pop();
                self.is_over.store(!table.over.is_empty(), Ordering::Release);
                next
            };
            let Some(Over { waker, held }) = next else { return };
            // On a thread that others need: a panic in it (reported on stderr) ends here.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(held)));
            if let Some(waker) = waker {
                let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
            }
        }
    }

    /// Takes the outcome of an operation if there is one; otherwise `waker` is woken when there is.
    pub(super) fn look(&self, key: Key, waker: Option<&Waker>) -> Option<Finished<ErasedBufs, Box<Error>>> {
        let Some(waker) = waker else { return self.table.lock().inflight.take(key) };
        let look = self.table.lock().inflight.poll(key, waker);
        match look {
            Look::Finished(finished) => Some(finished),
            Look::Watched => None,
            Look::Unwatched => {
                // Cloned, and what it replaces dropped, outside the lock: both is somebody else's code.
                let waker = waker.clone();
                let (finished, spare) = self.table.lock().inflight.watch(key, waker);
                drop(spare);
                finished
            }
        }
    }

    /// Kills the communicator for a cause found here, and tells the others.
    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        // A child of a fork is no member: it ends nothing.
        if forked::is_forked() {
            return;
        }
        let mut error = error;
        if let Error::Mismatch { comm, .. } = &mut error {
            comm.clone_from(&self.config.name);
        }
        if self.cause.set(error).is_ok()
            && let Some(cause) = self.cause.get()
        {
            // Told before anyone here wakes: should this process end because of it, the others know the cause.
            self.config.control.abort(self, cause);
            self.wake_dead(cause);
            let (comm, rank, cause) = (self.config.name.clone(), self.config.rank, cause.clone());
            LOG.line(move || tracing::warn!(comm, rank, %cause, "communicator aborted"));
        }
    }

    /// Kills the communicator for a cause heard of.
    pub(crate) fn poison(self: &Arc<Self>, error: Error) {
        if self.cause.set(error).is_ok()
            && let Some(cause) = self.cause.get()
        {
            self.wake_dead(cause);
        }
    }

    /// Nothing here waits, for a file or a log either: those come after.
    fn wake_dead(self: &Arc<Self>, cause: &Error) {
        // Before anyone wakes: whoever leaves because of it finds that a recorder is still to be written.
        self.config.control.clone().dies(self, cause);
        self.poisoned.store(true, Ordering::Release);
        self.arm();
        self.config.lane.kick();
    }
}
