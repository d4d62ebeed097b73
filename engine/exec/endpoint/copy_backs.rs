//! Operations of which the results are still to be copied back to a device.
//!
//! An operation on device memory that runs on the host works on copies. When all of its data has moved, its results are copied
//! back, and only then is it finished. Starting the copy calls the device's driver, so a thread that holds none of the
//! engine's locks does that: the operation is *due* until then, and *running* from the moment when the copy is on its stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::Staged;
use crate::exec::deadlines::DeadlineClock;
use crate::exec::inflight::Key;
use crate::types::{Map, Signature};

/// Such an operation, and what copies its results back.
#[derive(Clone)]
pub(super) struct CopyBack<S = Arc<Staged>> {
    pub(super) key: Key,
    pub(super) number: u64,
    pub(super) signature: Signature,
    pub(super) timeout: Duration,
    pub(super) staged: S,
}

/// Those of an endpoint. Its lock is taken after the table's, if both are.
pub(super) struct CopyBacks<S = Arc<Staged>> {
    state: Mutex<State<S>>,
    /// How many there are in all three states. Operations on host memory, which have nothing to copy back, look here alone.
    known: AtomicUsize,
    /// Some are due.
    any_due: AtomicBool,
}

struct State<S> {
    /// Their data still moves.
    moving: Map<u64, CopyBack<S>>,
    due: Vec<CopyBack<S>>,
    /// Since when.
    running: Vec<(Instant, CopyBack<S>)>,
}

impl<S> Default for CopyBacks<S> {
    fn default() -> Self {
        let state = State { moving: Map::default(), due: Vec::new(), running: Vec::new() };
        CopyBacks { state: Mutex::new(state), known: AtomicUsize::new(0), any_due: AtomicBool::new(false) }
    }
}

impl<S> State<S> {
    fn count(&self) -> usize {
        self.moving.len() + self.due.len() + self.running.len()
    }
}

impl CopyBacks {
    /// Notes an operation on device memory, whose results are to be copied back when all has moved. Gives what brings its
    /// memory, where that comes in several stripes.
    pub(super) fn noted(
        &self,
        key: Key,
        (number, signature, timeout): (u64, Signature, Duration),
        staged: Arc<Staged>,
    ) -> Option<Arc<Staged>> {
        self.submitted(CopyBack { key, number, signature, timeout, staged: staged.clone() });
        staged.is_striped().then_some(staged)
    }
}

impl<S: Clone> CopyBacks<S> {
    fn change<R>(&self, change: impl FnOnce(&mut State<S>) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state);
        self.known.store(state.count(), Ordering::Release);
        self.any_due.store(!state.due.is_empty(), Ordering::Relaxed);
        result
    }

    /// An operation is submitted.
    pub(super) fn submitted(&self, operation: CopyBack<S>) {
        self.change(|state| state.moving.insert(operation.key.number(), operation));
    }

    /// All data of an operation has moved. Whether its results are to be copied back; otherwise it is finished.
    pub(super) fn moved(&self, key: Key) -> bool {
        self.known.load(Ordering::Acquire) > 0
            && self.change(|state| {
                let operation = state.moving.remove(&key.number());
                let any = operation.is_some();
                state.due.extend(operation);
                any
            })
    }

    /// An operation is finished, well or not: forgets it. What comes back is to be dropped outside all locks.
    pub(super) fn finished(&self, key: Key) -> Option<CopyBack<S>> {
        if self.known.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.change(|state| {
            let place = state.running.iter().position(|(_, operation)| operation.key == key);
            let running = place.map(|at| state.running.swap_remove(at).1);
            running.or_else(|| state.moving.remove(&key.number()))
        })
    }

    /// Those whose copy is to be started now, by the caller.
    pub(super) fn take_due(&self) -> Vec<CopyBack<S>> {
        if !self.any_due.load(Ordering::Relaxed) {
            return Vec::new();
        }
        self.change(|state| std::mem::take(&mut state.due))
    }

    /// The copy of an operation is on its stream: from here on the device has as long as the operation may take.
    pub(super) fn started(&self, operation: CopyBack<S>, now: Instant) {
        self.change(|state| state.running.push((now, operation)));
    }

    /// What copies the results of an operation back whose data still moves.
    pub(super) fn staged_of(&self, key: Key) -> Option<S> {
        self.state.lock().moving.get(&key.number()).map(|operation| operation.staged.clone())
    }

    pub(super) fn is_running(&self, key: Key) -> bool {
        self.state.lock().running.iter().any(|(_, operation)| operation.key == key)
    }

    /// Those that take longer than their operation may.
    pub(super) fn overdue(&self, now: Instant, clock: &DeadlineClock) -> Vec<CopyBack<S>> {
        if self.known.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let state = self.state.lock();
        let late = state
            .running
            .iter()
            .filter(|(since, operation)| clock.is_overdue(now, *since, operation.timeout));
        late.map(|(_, operation)| operation.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::inflight::Inflight;

    fn operation(table: &mut Inflight<(), ()>) -> CopyBack<()> {
        let (number, signature, timeout) = (0, Signature::default(), Duration::from_secs(1));
        CopyBack { key: table.submit(()), number, signature, timeout, staged: () }
    }

    #[test]
    fn results_are_copied_back_once_and_only_when_all_has_moved() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let (first, other) = (operation(&mut table), table.submit(()));
        all.submitted(first.clone());
        assert!(!all.moved(other), "an operation on host memory is finished when it has moved");
        assert!(all.take_due().is_empty(), "the data still moves");
        assert!(all.moved(first.key));
        let due = all.take_due();
        assert!(due.len() == 1 && due[0].key == first.key && all.take_due().is_empty());
    }

    #[test]
    fn a_device_that_does_not_copy_back_within_the_time_of_the_operation_is_late() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let (first, start) = (operation(&mut table), Instant::now());
        all.submitted(first.clone());
        assert!(all.moved(first.key));
        let clock = DeadlineClock::new(start);
        let late = |seconds| all.overdue(start + Duration::from_secs(seconds), &clock).len();
        all.take_due().into_iter().for_each(|operation| all.started(operation, start));
        assert_eq!((late(1), late(2), all.is_running(first.key)), (0, 1, true));
        assert!(all.finished(first.key).is_some_and(|found| found.key == first.key));
        assert_eq!((late(2), all.is_running(first.key)), (0, false), "finished is forgotten");
    }

    #[test]
    fn an_operation_that_fails_before_its_data_has_moved_is_forgotten() {
        let (all, mut table) = (CopyBacks::default(), Inflight::with_capacity(2));
        let first = operation(&mut table);
        all.submitted(first.clone());
        assert!(all.finished(first.key).is_some() && all.finished(first.key).is_none());
        assert!(!all.moved(first.key) && all.take_due().is_empty());
    }
}
