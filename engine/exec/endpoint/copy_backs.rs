//! Operations of which the results are still to be copied back to a device.
//!
//! An operation on device memory that runs on the host works on copies. When all of its data has moved, its results (or the rest of them, as a
//! long operation copies results back while its other data moves) are copied back, and only then is the operation finished. Starting that
//! copy calls the device's driver, which may block, so a command does it ([`Commands`](crate::commands::Commands)). From when the data has moved
//! until the copy is on its stream, the operation has its time limit once more; and once more from then until the copy has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::exec::carrier::Carrier;
use crate::exec::deadlines::DeadlineClock;
use crate::exec::inflight::Key;
use crate::types::{Map, Signature};

/// An operation whose results are still to be copied back, and what does that.
#[derive(Clone)]
pub(super) struct CopyBack<C = Arc<dyn Carrier>> {
    pub(super) key: Key,
    pub(super) number: u64,
    pub(super) signature: Signature,
    pub(super) timeout: Duration,
    pub(super) carrier: C,
}

/// All such operations of an endpoint. A thread that takes both this lock and the table's takes this one second.
pub(super) struct CopyBacks<C = Arc<dyn Carrier>> {
    state: Mutex<State<C>>,
    /// How many operations `moving` and `running` hold together. If it is 0, whoever finishes an operation or checks the deadlines does not take the
    /// lock: so operations on host memory, which have nothing to copy back, do not wait for it.
    known: AtomicUsize,
}

/// How far the copy of an operation is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No thread has begun to put it on its stream.
    Due,
    /// A thread is putting it on its stream.
    Starting,
    /// All of it is on its stream, and the buffers' streams wait for it.
    Started,
}

/// An operation whose results are to be copied back now, or are being copied.
struct Running<C> {
    operation: CopyBack<C>,
    stage: Stage,
    /// When the copy became due; once it is [`Started`](Stage::Started): when all of it was on its stream.
    since: Instant,
}

struct State<C> {
    /// Operations whose data still moves, by the numbers of their keys.
    moving: Map<u64, CopyBack<C>>,
    running: Vec<Running<C>>,
}

impl<C> Default for CopyBacks<C> {
    fn default() -> Self {
        let state = State { moving: Map::default(), running: Vec::new() };
        CopyBacks { state: Mutex::new(state), known: AtomicUsize::new(0) }
    }
}

impl<C> State<C> {
    fn find(&mut self, key: Key) -> Option<&mut Running<C>> {
        self.running.iter_mut().find(|running| running.operation.key == key)
    }
}

impl<C: Clone> CopyBacks<C> {
    fn change<R>(&self, change: impl FnOnce(&mut State<C>) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state);
        self.known.store(state.moving.len() + state.running.len(), Ordering::Release);
        result
    }

    /// An operation is submitted.
    pub(super) fn submitted(&self, operation: CopyBack<C>) {
        self.change(|state| state.moving.insert(operation.key.number(), operation));
    }

    /// All data of an operation has moved. Returns whether its results are to be copied back; if not, the operation is finished.
    pub(super) fn moved(&self, key: Key, now: impl FnOnce() -> Instant) -> bool {
        self.known.load(Ordering::Acquire) > 0
            && self.change(|state| {
                let Some(operation) = state.moving.remove(&key.number()) else { return false };
                state.running.push(Running { operation, stage: Stage::Due, since: now() });
                true
            })
    }

    /// Notes that the copy of an operation is being started, and returns the carrier that starts it. `None`: the operation has ended.
    pub(super) fn starts(&self, key: Key) -> Option<C> {
        self.change(|state| {
            let running = state.find(key)?;
            running.stage = Stage::Starting;
            Some(running.operation.carrier.clone())
        })
    }

    /// The copy of an operation is on its stream: from here on the device has as long as the operation may take.
    pub(super) fn started(&self, key: Key, now: Instant) {
        self.change(|state| {
            if let Some(running) = state.find(key) {
                (running.stage, running.since) = (Stage::Started, now);
            }
        });
    }

    /// An operation is finished, well or not: forgets it. Returns its carrier, which is to be dropped outside all locks.
    pub(super) fn finished(&self, key: Key) -> Option<C> {
        if self.known.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.change(|state| {
            let place = state.running.iter().position(|running| running.operation.key == key);
            let running = place.map(|at| state.running.swap_remove(at).operation);
            running.or_else(|| state.moving.remove(&key.number())).map(|operation| operation.carrier)
        })
    }

    /// The carrier of an operation whose data still moves.
    pub(super) fn carrier_of(&self, key: Key) -> Option<C> {
        self.state.lock().moving.get(&key.number()).map(|operation| operation.carrier.clone())
    }

    /// Gives a copy up: if it has not been started, it never will be. Returns whether a thread is putting it on a stream right now. `None`: there is
    /// no such copy.
    pub(super) fn give_up(&self, key: Key) -> Option<bool> {
        self.change(|state| {
            let place = state.running.iter().position(|running| running.operation.key == key)?;
            Some(state.running.swap_remove(place).stage == Stage::Starting)
        })
    }

    /// The operations whose copies back have taken longer than the time limit.
    pub(super) fn overdue(&self, now: Instant, clock: &DeadlineClock) -> Vec<CopyBack<C>> {
        if self.known.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let state = self.state.lock();
        let late = state
            .running
            .iter()
            .filter(|running| clock.is_overdue(now, running.since, running.operation.timeout));
        late.map(|running| running.operation.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::inflight::Inflight;

    fn operation(table: &mut Inflight<(), ()>) -> CopyBack<()> {
        let (number, signature, timeout) = (0, Signature::default(), Duration::from_secs(1));
        CopyBack { key: table.submit(()), number, signature, timeout, carrier: () }
    }

    #[test]
    fn results_are_copied_back_once_and_only_when_all_has_moved() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let (first, other) = (operation(&mut table), table.submit(()));
        all.submitted(first.clone());
        assert!(!all.moved(other, Instant::now), "an operation on host memory is finished when it has moved");
        assert!(all.starts(first.key).is_none(), "the data still moves");
        assert!(all.moved(first.key, Instant::now) && !all.moved(first.key, Instant::now));
        assert!(all.starts(first.key).is_some());
    }

    #[test]
    fn a_device_that_does_not_copy_back_within_the_time_of_the_operation_is_late() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let (first, start) = (operation(&mut table), Instant::now());
        all.submitted(first.clone());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(all.moved(first.key, || start));
        let clock = DeadlineClock::new(start);
        let late = |seconds| all.overdue(after(seconds), &clock).len();
        assert_eq!((late(1), late(2)), (0, 1), "nobody starts it");
        assert!(all.starts(first.key).is_some());
        assert_eq!(late(2), 1, "the driver blocks");
        all.started(first.key, after(1));
        assert_eq!((late(2), late(3)), (0, 1));
        assert!(all.finished(first.key).is_some());
        assert_eq!(late(3), 0, "finished is forgotten");
    }

    #[test]
    fn what_is_given_up_is_not_started_and_who_gives_up_knows_whether_it_was_being_started() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let (first, second) = (operation(&mut table), operation(&mut table));
        for operation in [&first, &second] {
            all.submitted(operation.clone());
            assert!(all.moved(operation.key, Instant::now));
        }
        assert_eq!((all.give_up(first.key), all.give_up(first.key)), (Some(false), None));
        assert!(all.starts(first.key).is_none(), "it has ended");
        assert!(all.starts(second.key).is_some());
        assert_eq!(all.give_up(second.key), Some(true));
    }

    #[test]
    fn an_operation_that_has_ended_is_forgotten_and_its_results_are_not_copied_back() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let (first, second) = (operation(&mut table), operation(&mut table));
        all.submitted(first.clone());
        assert!(all.finished(first.key).is_some() && all.finished(first.key).is_none());
        assert!(!all.moved(first.key, Instant::now));
        all.submitted(second.clone());
        assert!(all.moved(second.key, Instant::now) && all.finished(second.key).is_some());
        assert!(all.starts(second.key).is_none());
    }
}
