//! Operations that have finished, and whose users are still to be told.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use parking_lot::Mutex;

use crate::mem::ErasedBufs;

/// How many calls of `run` may be nested on one thread, as a waker may run completions, too. A deeper call does nothing, to spare the stack.
const DEPTH: u32 = 16;

thread_local! {
    static WAKERS: Cell<u32> = const { Cell::new(0) };
}

/// Counts one more nested call on this thread, until this is dropped.
struct Deeper;

impl Deeper {
    fn new() -> Option<Deeper> {
        let depth = WAKERS.get();
        (depth < DEPTH).then(|| {
            WAKERS.set(depth + 1);
            Deeper
        })
    }
}

impl Drop for Deeper {
    fn drop(&mut self) {
        WAKERS.set(WAKERS.get() - 1);
    }
}

/// The wakers of operations that have finished, and the buffers of operations whose handles users have dropped. Calling a waker or
/// dropping a buffer runs user code, which may call this very endpoint, or take long. So both wait here until a thread that holds
/// none of the engine's locks calls [`run`](Completions::run).
pub(super) struct Completions {
    list: Mutex<Vec<(Option<Waker>, Option<ErasedBufs>)>>,
    /// `false`: the list is empty. Changed under the list's lock.
    any: AtomicBool,
}

/// How [`Completions::run`] ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ran {
    /// The list was empty when this thread last looked.
    All,
    /// This thread is nested too deep already: another thread, or an outer call, has to do what is left.
    TooDeep,
}

impl Default for Completions {
    fn default() -> Self {
        // Room for as many entries as usually wait at once, so that `put` seldom allocates.
        Completions { list: Mutex::new(Vec::with_capacity(16)), any: AtomicBool::new(false) }
    }
}

impl Completions {
    pub(super) fn put(&self, waker: Option<Waker>, held: Option<ErasedBufs>) {
        if waker.is_some() || held.is_some() {
            let mut list = self.list.lock();
            list.push((waker, held));
            self.any.store(true, Ordering::Release);
        }
    }

    /// Empties the list: calls the wakers, and gives the buffers to `dispose`, which drops them now or later. The caller holds none of the engine's locks.
    pub(super) fn run(&self, dispose: impl Fn(ErasedBufs)) -> Ran {
        if !self.any.load(Ordering::Acquire) {
            return Ran::All;
        }
        let Some(_deeper) = Deeper::new() else { return Ran::TooDeep };
        while self.any.load(Ordering::Acquire) {
            let next = {
                let mut list = self.list.lock();
                let next = list.pop();
                self.any.store(!list.is_empty(), Ordering::Release);
                next
            };
            let Some((waker, held)) = next else { break };
            // Other operations depend on this thread, so a panic in user code, which the panic hook has reported, is not passed on.
            let _ = catch_unwind(AssertUnwindSafe(|| held.into_iter().for_each(&dispose)));
            if let Some(waker) = waker {
                let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
            }
        }
        Ran::All
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    use super::*;

    /// A waker that makes a chain: it puts itself on the list again and runs the list, as a waker does that polls.
    struct Chain {
        completions: Arc<Completions>,
        left: AtomicU32,
        refused: AtomicBool,
    }

    impl Wake for Chain {
        fn wake(self: Arc<Self>) {
            if self.left.fetch_sub(1, Ordering::Relaxed) > 1 {
                self.completions.put(Some(Waker::from(self.clone())), None);
                if self.completions.run(drop) == Ran::TooDeep {
                    self.refused.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    #[test]
    fn wakers_that_wake_each_other_use_no_more_stack_than_a_few_of_them_and_none_is_lost() {
        let completions = Arc::new(Completions::default());
        let (left, refused) = (AtomicU32::new(1000), AtomicBool::new(false));
        let chain = Arc::new(Chain { completions: completions.clone(), left, refused });
        completions.put(Some(Waker::from(chain.clone())), None);
        assert_eq!(completions.run(drop), Ran::All);
        assert!(chain.refused.load(Ordering::Relaxed), "the depth was reached");
        assert_eq!(
            chain.left.load(Ordering::Relaxed),
            0,
            "the outermost went on with what the innermost left"
        );
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            std::panic::panic_any("a waker of a test");
        }
    }

    #[test]
    fn a_waker_that_panics_keeps_none_of_the_others_from_being_woken() {
        let completions = Arc::new(Completions::default());
        let (left, refused) = (AtomicU32::new(1), AtomicBool::new(false));
        let counts = Arc::new(Chain { completions: completions.clone(), left, refused });
        completions.put(Some(Waker::from(counts.clone())), None);
        completions.put(Some(Waker::from(Arc::new(Panics))), None);
        assert_eq!(completions.run(drop), Ran::All);
        assert_eq!(counts.left.load(Ordering::Relaxed), 0);
    }
}
