//! One thread that waits for operations of several ranks of its process: it drives all of them, in turn.
//!
//! It must not wait for one operation after another: the first needs what the other ranks have yet to send, and the progress thread
//! does not drive a rank that a thread of the user's drives.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::super::Progress;
use super::super::inflight::Key;
use super::super::progress_thread::parker;
use super::progress::{LOOK, SPIN};
use super::{Endpoint, Finished, orphaned};

/// One of the operations that the thread waits for.
pub(crate) trait Together {
    /// The endpoint on which it runs, and its key; `None` once it is finished.
    fn at(&self) -> Option<(&Arc<Endpoint>, Key)>;
    /// Takes in the outcome of the operation. From here on [`at`](Self::at) returns `None`.
    fn finished(&mut self, outcome: Finished);
}

fn running<P: Together>(parts: &[P]) -> impl Iterator<Item = (&Arc<Endpoint>, Key)> {
    parts.iter().filter_map(P::at)
}

/// What a turn came to.
enum Turn {
    Finished,
    Moved,
    Still,
}

/// Looks at each once, and drives those that are not finished. `after`: called for each that finishes.
fn turn<P: Together>(parts: &mut [P], waker: Option<&Waker>, after: impl Fn(&Endpoint)) -> Turn {
    let (mut left, mut moved) = (false, false);
    for part in parts {
        let Some((endpoint, key)) = part.at() else { continue };
        if let Some(refused) = orphaned() {
            after(endpoint);
            part.finished(refused);
            continue;
        }
        // The waker is stored before driving: whoever finishes the operation from here on wakes us.
        let mut outcome = endpoint.look(key, waker);
        if outcome.is_none() && endpoint.drive_once() == Progress::Advanced {
            moved = true;
            outcome = endpoint.look(key, waker);
        }
        match outcome {
            Some(outcome) => {
                after(endpoint);
                part.finished(outcome);
            }
            None => left = true,
        }
    }
    match (left, moved) {
        (false, _) => Turn::Finished,
        (true, true) => Turn::Moved,
        (true, false) => Turn::Still,
    }
}

/// Blocks until all are finished: drives them from this thread for a while, then leaves them to the progress thread.
pub(crate) fn wait_together<P: Together>(parts: &mut [P]) {
    for (endpoint, _) in running(parts) {
        endpoint.callers.enter();
        endpoint.callers.count_wait();
    }
    let leave = |endpoint: &Endpoint| endpoint.callers.leave();
    let (mut idle_since, mut passes) = (None, 0u32);
    loop {
        match turn(parts, None, leave) {
            Turn::Finished => return,
            Turn::Moved => {
                idle_since = None;
                continue;
            }
            Turn::Still => {}
        }
        if let Some((endpoint, _)) = running(parts).next() {
            endpoint.config.relax(&mut passes);
        }
        if passes.is_multiple_of(LOOK) && idle_since.get_or_insert_with(Instant::now).elapsed() > SPIN {
            break;
        }
    }
    running(parts).for_each(|(endpoint, _)| leave(endpoint));
    let waker = parker();
    while !poll_together(parts, &waker, Duration::ZERO, false) {
        std::thread::park();
    }
}

/// Drives the operations for a bounded time, and returns whether all are finished. If not, `again` has the waker woken at once, so that
/// the caller polls once more; otherwise the progress thread takes over.
pub(crate) fn poll_together<P: Together>(
    parts: &mut [P],
    waker: &Waker,
    budget: Duration,
    again: bool,
) -> bool {
    let (start, mut passes) = (Instant::now(), 0u32);
    running(parts).for_each(|(endpoint, _)| endpoint.callers.count_wait());
    loop {
        match turn(parts, Some(waker), |_| {}) {
            Turn::Finished => return true,
            Turn::Moved => {}
            Turn::Still => {
                if let Some((endpoint, _)) = running(parts).next() {
                    endpoint.config.relax(&mut passes);
                }
            }
        }
        if start.elapsed() >= budget {
            break;
        }
    }
    if again {
        waker.wake_by_ref();
        return false;
    }
    for (endpoint, _) in running(parts) {
        endpoint.leave_to_progress_thread();
    }
    false
}
