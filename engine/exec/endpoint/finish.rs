//! How operations end, well or not, and how a communicator dies.

use std::sync::Arc;
use std::task::Waker;

use super::completions::Ran;
use super::{Endpoint, Finished};
use crate::commands::is_in_command;
use crate::error::Error;
use crate::exec::inflight::Key;
use crate::forked;
use crate::trace::log::LOG;

impl Endpoint {
    /// All data of an operation has moved: it is finished, or its results are to be copied back first.
    pub(super) fn data_done(self: &Arc<Self>, key: Key) {
        if !self.copy_backs.moved(key, || self.config.now()) {
            return self.finish(key, Ok(()));
        }
        let endpoint = self.clone();
        self.commands.put_always(move || endpoint.copy_back(key));
    }

    /// A command: starts to copy the results of an operation back, unless it has ended meanwhile.
    fn copy_back(self: Arc<Self>, key: Key) {
        let Some(carrier) = self.copy_backs.starts(key) else { return };
        let endpoint = self.clone();
        let started = move || self.copy_backs.started(key, self.config.now());
        let ended = move |result| {
            endpoint.finish(key, result);
            if is_in_command() {
                return endpoint.leave_to_progress_thread();
            }
            endpoint.run_completions();
            endpoint.commands.issue();
        };
        carrier.copy_back(Box::new(started), Box::new(ended));
    }

    /// Ends an operation. Its user hears of it in [`run_completions`](Self::run_completions).
    pub(super) fn finish(&self, key: Key, result: Result<(), Error>) {
        // The copy is forgotten before the operation is finished, so that no look at the deadlines finds it overdue afterwards.
        let copy_back = self.copy_backs.finished(key);
        let mut table = self.submitted.lock();
        let carrier = match table.joinable.is_empty() {
            true => None,
            false => table.joinable.remove(&key.number()),
        };
        let result = result.map_err(|error| Box::new(error.of_rank(self.config.rank, &self.config.named())));
        let (waker, held) = table.inflight.finish(key, result);
        drop(table);
        self.completions.put(waker, held);
        carrier.into_iter().chain(copy_back).for_each(|carrier| self.commands.put_drop(carrier));
    }

    /// Wakes the users of operations that have finished, and drops the buffers of those whose user has let go of them. The caller holds none
    /// of the engine's locks.
    pub(super) fn run_completions(self: &Arc<Self>) {
        if self.completions.run(|held| self.commands.dispose(held)) == Ran::TooDeep {
            self.leave_to_progress_thread();
        }
    }

    /// Whether an operation is over. Drives the endpoint once before it looks.
    pub(crate) fn is_finished(self: &Arc<Self>, key: Key) -> bool {
        self.drive_once();
        self.submitted.lock().inflight.is_finished(key)
    }

    /// Takes the outcome of an operation if there is one; otherwise `waker` is woken when there is.
    pub(super) fn look(&self, key: Key, waker: Option<&Waker>) -> Option<Finished> {
        let finished = self.submitted.look(key, waker);
        if let Some((Err(_), _)) = &finished {
            self.tell();
        }
        finished
    }

    /// Kills the communicator for a cause that has come up on this rank, and tells the other ranks.
    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        // A child of a fork is no member: it ends nothing.
        if forked::is_forked() {
            return;
        }
        let mut error = error;
        if let Error::Mismatch { comm, .. } = &mut error {
            comm.clone_from(&self.config.name);
        }
        let error = error.of_rank(self.config.rank, &self.config.named());
        if let Some(cause) = self.health.begin_to_die(error) {
            // The other ranks are told before anyone here wakes: should this process end because of the failure, they know the cause.
            self.config.control.abort(self, cause);
            self.wake_dead(cause);
            let (comm, rank, cause) = (self.config.name.clone(), self.config.rank, cause.clone());
            LOG.warn(move || tracing::warn!(comm, rank, %cause, "communicator aborted"));
        }
    }

    /// Kills the communicator for a cause that has come over the control connections, and passes the cause on to all members: if this process
    /// ends because of the cause, each other rank hears the cause from this rank before it hears of that end.
    pub(crate) fn poison(self: &Arc<Self>, error: Error) {
        if let Some(cause) = self.health.begin_to_die(error.among(&self.config.named())) {
            self.config.control.abort(self, cause);
            self.wake_dead(cause);
        }
    }

    /// Marks the communicator as dead, and leaves it to the progress thread to fail its operations. Waits for nothing: other threads write
    /// the flight recorder's file and the log.
    fn wake_dead(self: &Arc<Self>, cause: &Error) {
        // The recorder's file is asked for before anyone wakes: a thread that then leaves the world finds that it is still to be written.
        self.config.control.clone().dies(self, cause);
        self.health.die();
        self.leave_to_progress_thread();
    }
}
