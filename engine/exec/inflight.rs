//! The table that owns buffers while operations are in flight.
//!
//! An entry is a state machine: an operation is submitted, the engine finishes it, and the user takes its outcome. A user
//! who drops the `Work` instead detaches the entry: the buffers are dropped at once if the operation has finished, and
//! else when the engine finishes it.
//! The owner wraps the table in a lock; `tests/loom` runs this very file under loom.
//!
//! A waker is somebody else's code, which may call this very table when the waker is cloned, dropped or woken. So no
//! function here does any of these: a waker comes in as a clone, and goes out to be dropped or woken outside the lock.

use std::task::Waker;

/// Names an entry; stale after the entry was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) index: u32,
    generation: u32,
}

impl Key {
    /// A number that no later operation has, though it may use the same entry.
    pub(crate) fn number(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

enum State<E> {
    Free,
    Running,
    Finished(Result<(), E>),
}

struct Entry<H, E> {
    generation: u32,
    state: State<E>,
    held: Option<H>,
    waker: Option<Waker>,
    detached: bool,
}

/// `H`: what is held (buffers); `E`: why an operation failed.
pub(crate) struct Inflight<H, E> {
    entries: Vec<Entry<H, E>>,
    free: Vec<u32>,
    running: usize,
}

/// A finished operation: how it ended, and what it held, unless that is kept in quarantine (`super::quarantine`).
pub(crate) type Finished<H, E> = (Result<(), E>, Option<H>);

/// What a poll found.
pub(crate) enum Look<H, E> {
    Finished(Finished<H, E>),
    /// Not finished; the waker will be woken.
    Watched,
    /// Not finished, and the waker will not be woken.
    Unwatched,
}

impl<H, E> Inflight<H, E> {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Inflight { entries: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity), running: 0 }
    }

    /// Operations that the engine has not finished.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Takes ownership of what an operation needs.
    pub(crate) fn submit(&mut self, held: H) -> Key {
        self.running += 1;
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.state = State::Running;
            entry.held = Some(held);
            return Key { index, generation: entry.generation };
        }
        let index = self.entries.len() as u32;
        self.entries.push(Entry {
            generation: 0,
            state: State::Running,
            held: Some(held),
            waker: None,
            detached: false,
        });
        Key { index, generation: 0 }
    }

    fn entry(&mut self, key: Key) -> Option<&mut Entry<H, E>> {
        self.entries.get_mut(key.index as usize).filter(|e| e.generation == key.generation)
    }

    /// Takes out what a running operation holds. The caller gives it back, or puts it in quarantine if the operation has failed.
    pub(crate) fn borrow(&mut self, key: Key) -> Option<H> {
        self.entry(key).filter(|e| matches!(e.state, State::Running))?.held.take()
    }

    /// Puts back what [`borrow`](Self::borrow) has taken out.
    pub(crate) fn give_back(&mut self, key: Key, held: H) {
        if let Some(entry) = self.entry(key) {
            entry.held = Some(held);
        }
    }

    /// Whether an operation is over, and its outcome has not been taken.
    pub(crate) fn is_finished(&mut self, key: Key) -> bool {
        self.entry(key).is_some_and(|entry| matches!(entry.state, State::Finished(_)))
    }

    fn recycle(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        debug_assert!(entry.waker.is_none(), "it went out before");
        entry.generation = entry.generation.wrapping_add(1);
        entry.state = State::Free;
        entry.detached = false;
        self.free.push(index);
    }

    /// The engine is done with the operation. Returns whom to wake, and the buffers to drop if nobody will come for
    /// them; do both outside the lock.
    pub(crate) fn finish(&mut self, key: Key, result: Result<(), E>) -> (Option<Waker>, Option<H>) {
        let Some(entry) = self.entry(key).filter(|e| matches!(e.state, State::Running)) else {
            return (None, None);
        };
        let (detached, waker) = (entry.detached, entry.waker.take());
        let mut held = None;
        if detached {
            held = entry.held.take();
        } else {
            entry.state = State::Finished(result);
        }
        self.running -= 1;
        if detached {
            self.recycle(key.index);
        }
        (waker, held)
    }

    /// Takes the outcome, if there is one.
    pub(crate) fn take(&mut self, key: Key) -> Option<Finished<H, E>> {
        let entry = self.entry(key)?;
        match std::mem::replace(&mut entry.state, State::Running) {
            State::Finished(result) => {
                let held = entry.held.take();
                self.recycle(key.index);
                Some((result, held))
            }
            state => {
                entry.state = state;
                None
            }
        }
    }

    /// Takes the outcome, if there is one; otherwise tells whether this waker will be woken when there is. If it will not,
    /// the caller gives a clone of it to [`watch`](Self::watch).
    pub(crate) fn poll(&mut self, key: Key, waker: &Waker) -> Look<H, E> {
        if let Some(finished) = self.take(key) {
            return Look::Finished(finished);
        }
        let Some(entry) = self.entry(key) else { return Look::Watched };
        // `will_wake` only compares addresses, and runs none of the waker's code.
        if entry.waker.as_ref().is_some_and(|w| w.will_wake(waker)) { Look::Watched } else { Look::Unwatched }
    }

    /// Takes the outcome if there is one; otherwise remembers whom to wake. Also returns the waker that is not needed, this
    /// one or the one before; drop it outside the lock.
    pub(crate) fn watch(&mut self, key: Key, waker: Waker) -> (Option<Finished<H, E>>, Option<Waker>) {
        if let Some(finished) = self.take(key) {
            return (Some(finished), Some(waker));
        }
        match self.entry(key) {
            Some(entry) => (None, entry.waker.replace(waker)),
            None => (None, Some(waker)),
        }
    }

    /// The user let go. Returns what was held if the operation had finished, and the waker, which nobody needs to wake any
    /// more; drop them outside the lock.
    pub(crate) fn detach(&mut self, key: Key) -> (Option<H>, Option<Waker>) {
        let Some(entry) = self.entry(key) else { return (None, None) };
        match entry.state {
            State::Running => {
                entry.detached = true;
                (None, entry.waker.take())
            }
            State::Finished(_) => {
                let held = entry.held.take();
                self.recycle(key.index);
                (held, None)
            }
            State::Free => (None, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Table = Inflight<Vec<u8>, &'static str>;

    #[test]
    fn finished_then_taken() {
        let mut table = Table::with_capacity(4);
        let key = table.submit(vec![1]);
        assert!(table.take(key).is_none());
        assert_eq!(table.running(), 1);
        assert!(table.finish(key, Ok(())).1.is_none());
        assert_eq!(table.running(), 0);
        assert_eq!(table.take(key), Some((Ok(()), Some(vec![1]))));
        assert!(table.take(key).is_none(), "a stale key finds nothing");
    }

    #[test]
    fn complete_after_drop_hands_the_buffer_to_the_engine() {
        let mut table = Table::with_capacity(4);
        let key = table.submit(vec![1]);
        assert!(table.detach(key).0.is_none(), "the buffer stays while the operation runs");
        assert_eq!(table.finish(key, Err("late")).1, Some(vec![1]));
        let next = table.submit(vec![2]);
        assert_eq!(next.index, key.index, "the entry is used again");
        assert!(table.detach(key).0.is_none(), "the old key does not reach it");
        assert_eq!(table.running(), 1);
    }

    #[test]
    fn drop_after_complete_frees_at_once() {
        let mut table = Table::with_capacity(4);
        let key = table.submit(vec![1]);
        table.finish(key, Ok(()));
        assert_eq!(table.detach(key).0, Some(vec![1]));
    }
}
