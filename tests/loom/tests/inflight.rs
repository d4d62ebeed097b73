//! Models of the table of operations in flight: the file `engine/exec/inflight.rs` itself, behind loom's mutex.
#![allow(missing_docs, dead_code)]

#[path = "../../../engine/exec/inflight.rs"]
mod table;

use std::sync::Arc as Plain;
use std::sync::atomic::{AtomicUsize as Count, Ordering as Order};
use std::task::{Wake, Waker};

use loom::sync::{Arc, Mutex};
use loom::thread;

use table::{Finished, Inflight, Key, Look};

/// A buffer that counts how often it was dropped.
struct Buffer(Plain<Count>);

impl Drop for Buffer {
    fn drop(&mut self) {
        self.0.fetch_add(1, Order::SeqCst);
    }
}

type Table = Arc<Mutex<Inflight<Buffer, &'static str>>>;

fn submitted() -> (Table, Key, Plain<Count>) {
    let drops = Plain::new(Count::new(0));
    let mut table = Inflight::with_capacity(2);
    let key = table.submit(Buffer(drops.clone()));
    (Arc::new(Mutex::new(table)), key, drops)
}

/// Counts how often it was woken.
#[derive(Default)]
struct Wakes(Count);

impl Wake for Wakes {
    fn wake(self: Plain<Self>) {
        self.0.fetch_add(1, Order::SeqCst);
    }
}

/// Like `Endpoint::finish` and then `run_completions`: drops the buffer and wakes the waker that the table returns, both outside its lock.
fn finish(table: &Table, key: Key, result: Result<(), &'static str>) {
    let (waker, held) = table.lock().unwrap().finish(key, result);
    drop(held);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Like `look` of an endpoint's table: wakers are cloned and dropped outside the lock.
fn look(table: &Table, key: Key, waker: Option<&Waker>) -> Option<Finished<Buffer, &'static str>> {
    let Some(waker) = waker else { return table.lock().unwrap().take(key) };
    let look = table.lock().unwrap().poll(key, waker);
    match look {
        Look::Finished(finished) => Some(finished),
        Look::Watched => None,
        Look::Unwatched => {
            let waker = waker.clone();
            let (finished, spare) = table.lock().unwrap().watch(key, waker);
            drop(spare);
            finished
        }
    }
}

/// Like `detach` of an endpoint's table.
fn detach(table: &Table, key: Key) {
    let (held, waker) = table.lock().unwrap().detach(key);
    drop((held, waker));
}

fn awaited(lose_the_waker: bool) {
    loom::model(move || {
        let (table, key, drops) = submitted();
        let engine = {
            let table = table.clone();
            thread::spawn(move || finish(&table, key, Ok(())))
        };
        let wakes = Plain::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let stored = (!lose_the_waker).then_some(&waker);
        let first = look(&table, key, stored);
        engine.join().unwrap();
        // A task that got no outcome would sleep now, so its waker must have been woken.
        let woken = wakes.0.load(Order::SeqCst);
        let (lost, finished) = (first.is_none() && woken == 0, first);
        let finished = finished.or_else(|| look(&table, key, None));
        let stale = look(&table, key, None).is_some();
        let running = table.lock().unwrap().running();
        drop(table);
        assert!(!lost, "a wake-up was lost");
        let (result, held) = finished.expect("finished");
        assert_eq!(result, Ok(()));
        assert_eq!(drops.load(Order::SeqCst), 0, "the buffer is with its owner");
        drop(held);
        assert_eq!(drops.load(Order::SeqCst), 1);
        assert!(!stale, "taken once");
        assert_eq!(running, 0);
    });
}

#[test]
fn whoever_awaits_is_woken_and_gets_the_buffer() {
    awaited(false);
}

#[test]
#[should_panic(expected = "a wake-up was lost")]
fn control_a_waker_that_is_not_stored_is_a_lost_wake_up() {
    awaited(true);
}

/// If a task polls twice, the waker of the second poll replaces that of the first.
#[test]
fn the_waker_of_the_last_poll_is_woken() {
    loom::model(|| {
        let (table, key, _) = submitted();
        assert!(look(&table, key, Some(Waker::noop())).is_none());
        let engine = {
            let table = table.clone();
            thread::spawn(move || finish(&table, key, Ok(())))
        };
        let wakes = Plain::new(Wakes::default());
        let pending = look(&table, key, Some(&Waker::from(wakes.clone()))).is_none();
        engine.join().unwrap();
        assert_eq!(wakes.0.load(Order::SeqCst), usize::from(pending));
    });
}

#[test]
fn a_detached_buffer_is_dropped_once_whoever_comes_last() {
    loom::model(|| {
        let (table, key, drops) = submitted();
        let engine = {
            let table = table.clone();
            thread::spawn(move || finish(&table, key, Err("late")))
        };
        let user = {
            let table = table.clone();
            thread::spawn(move || detach(&table, key))
        };
        // Meanwhile another operation is submitted, which reuses the entry if it is free already.
        let again = Plain::new(Count::new(0));
        let next = table.lock().unwrap().submit(Buffer(again.clone()));
        engine.join().unwrap();
        user.join().unwrap();
        assert_eq!(drops.load(Order::SeqCst), 1);
        assert_eq!(again.load(Order::SeqCst), 0, "the stale key does not reach the next operation");
        assert_eq!(table.lock().unwrap().running(), 1);
        finish(&table, next, Ok(()));
        assert!(look(&table, next, None).is_some());
    });
}

/// A user polls once and then detaches the operation, while the engine finishes it.
#[test]
fn polled_then_dropped_frees_once() {
    loom::model(|| {
        let (table, key, drops) = submitted();
        let engine = {
            let table = table.clone();
            thread::spawn(move || finish(&table, key, Ok(())))
        };
        let polled = look(&table, key, Some(Waker::noop()));
        let taken = polled.is_some();
        drop(polled);
        if !taken {
            detach(&table, key);
        }
        engine.join().unwrap();
        assert_eq!(drops.load(Order::SeqCst), 1);
        assert_eq!(table.lock().unwrap().running(), 0);
    });
}

/// A waker whose task owns another operation of the same table: when the waker is dropped, it detaches that operation.
struct Owner(std::sync::Mutex<Option<(Table, Key)>>);

impl Owner {
    fn waker(table: &Table, key: Key) -> Waker {
        Waker::from(Plain::new(Owner(std::sync::Mutex::new(Some((table.clone(), key))))))
    }
}

impl Wake for Owner {
    fn wake(self: Plain<Self>) {}
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some((table, key)) = self.0.get_mut().unwrap().take() {
            detach(&table, key);
        }
    }
}

/// When a waker that owns another operation is dropped, it locks the table again. It may be dropped because its own operation is detached, because a
/// later poll replaces it, or because its operation has finished. Dropping it under the lock would be a deadlock, which loom finds.
#[test]
fn a_waker_that_owns_another_operation_may_go_at_any_moment() {
    for polled_again in [false, true] {
        loom::model(move || {
            let (table, first, drops) = submitted();
            let second = table.lock().unwrap().submit(Buffer(drops.clone()));
            let engine = {
                let table = table.clone();
                thread::spawn(move || {
                    finish(&table, first, Ok(()));
                    finish(&table, second, Ok(()));
                })
            };
            let waker = Owner::waker(&table, second);
            let mut taken = look(&table, first, Some(&waker));
            drop(waker);
            if polled_again && taken.is_none() {
                taken = look(&table, first, Some(Waker::noop()));
            }
            if taken.is_none() {
                detach(&table, first);
            }
            drop(taken);
            engine.join().unwrap();
            assert_eq!(drops.load(Order::SeqCst), 2, "both are over, and nobody has them");
            assert_eq!(table.lock().unwrap().running(), 0);
        });
    }
}

/// Shows that the model above can fail: a waker that is dropped while the lock is held finds the table locked.
#[test]
#[should_panic(expected = "under the lock")]
fn control_a_waker_dropped_under_the_lock_finds_it_held() {
    struct Tries(Plain<Count>, Table);
    impl Wake for Tries {
        fn wake(self: Plain<Self>) {}
    }
    impl Drop for Tries {
        fn drop(&mut self) {
            self.0.fetch_add(usize::from(self.1.try_lock().is_err()), Order::SeqCst);
        }
    }
    loom::model(|| {
        let (table, key, _) = submitted();
        let held = Plain::new(Count::new(0));
        let waker = Waker::from(Plain::new(Tries(held.clone(), table.clone())));
        assert!(look(&table, key, Some(&waker)).is_none());
        drop(waker);
        let mut locked = table.lock().unwrap();
        let (_, waker) = locked.detach(key);
        drop(waker);
        drop(locked);
        assert_eq!(held.load(Order::SeqCst), 0, "dropped under the lock");
    });
}

/// Here the engine reads whether the operation was detached, releases the lock, and only then marks it finished. A detach
/// in between is missed, and nobody frees the buffer.
#[test]
#[should_panic(expected = "freed")]
fn control_a_finish_that_does_not_look_at_detached_leaks() {
    loom::model(|| {
        let drops = Plain::new(Count::new(0));
        let state = Arc::new(Mutex::new((Some(Buffer(drops.clone())), false, false)));
        let engine = {
            let state = state.clone();
            thread::spawn(move || {
                let detached = state.lock().unwrap().1;
                let held = if detached { state.lock().unwrap().0.take() } else { None };
                state.lock().unwrap().2 = true;
                drop(held);
            })
        };
        let held = {
            let mut state = state.lock().unwrap();
            state.1 = true;
            if state.2 { state.0.take() } else { None }
        };
        drop(held);
        engine.join().unwrap();
        let drops_seen = drops.load(Order::SeqCst);
        drop(state);
        assert_eq!(drops_seen, 1, "freed exactly once");
    });
}
