//! The engine's locks under which nobody may call a device's driver: the lock of a pass (`run`), the memory lock, and the table's lock.
//!
//! In builds for tests each thread counts how many of these locks it holds, and the driver for tests can ask whether it holds any. In all
//! other builds they are parking_lot's mutexes and nothing else.

#[cfg(not(any(test, feature = "testing")))]
pub(crate) use parking_lot::{Mutex as EngineLock, MutexGuard as EngineGuard};

#[cfg(any(test, feature = "testing"))]
pub use counted::holds_engine_lock;
#[cfg(any(test, feature = "testing"))]
pub(crate) use counted::{EngineGuard, EngineLock};

#[cfg(any(test, feature = "testing"))]
mod counted {
    use std::cell::Cell;
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    use parking_lot::{Mutex, MutexGuard};

    thread_local! {
        /// How many of these locks this thread holds. It needs no destructor, so it can be asked while the thread ends.
        static HELD: Cell<usize> = const { Cell::new(0) };
    }

    /// Whether this thread holds one of the locks under which it may not call a driver.
    pub extern "C" fn holds_engine_lock() -> bool {
        HELD.get() > 0
    }

    #[derive(Default)]
    pub(crate) struct EngineLock<T>(Mutex<T>);

    impl<T> EngineLock<T> {
        pub(crate) fn new(value: T) -> Self {
            EngineLock(Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> EngineGuard<'_, T> {
            EngineGuard::new(self.0.lock())
        }

        pub(crate) fn try_lock(&self) -> Option<EngineGuard<'_, T>> {
            self.0.try_lock().map(EngineGuard::new)
        }

        pub(crate) fn try_lock_for(&self, limit: Duration) -> Option<EngineGuard<'_, T>> {
            self.0.try_lock_for(limit).map(EngineGuard::new)
        }
    }

    /// The lock counts as held until this guard is dropped. The guard stays on its thread, as parking_lot's guards do.
    pub(crate) struct EngineGuard<'a, T>(MutexGuard<'a, T>);

    impl<'a, T> EngineGuard<'a, T> {
        fn new(guard: MutexGuard<'a, T>) -> Self {
            HELD.set(HELD.get() + 1);
            EngineGuard(guard)
        }
    }

    impl<T> Deref for EngineGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.0
        }
    }

    impl<T> DerefMut for EngineGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.0
        }
    }

    impl<T> Drop for EngineGuard<'_, T> {
        fn drop(&mut self) {
            HELD.set(HELD.get() - 1);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_thread_holds_locks_until_the_last_guard_is_dropped_in_any_order() {
            let (one, other) = (EngineLock::new(1), EngineLock::<u32>::default());
            assert!(!holds_engine_lock());
            let first = one.lock();
            let mut second = other.try_lock().unwrap();
            *second += *first;
            assert!(one.try_lock().is_none() && one.try_lock_for(Duration::from_millis(1)).is_none());
            std::thread::scope(|scope| scope.spawn(|| assert!(!holds_engine_lock())).join().unwrap());
            drop(first);
            assert!(holds_engine_lock());
            drop(second);
            assert!(!holds_engine_lock() && *other.lock() == 1);
        }
    }
}
