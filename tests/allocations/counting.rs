//! The global allocator of this program, which counts allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

/// Held by each test that counts, so that these tests run one after another: the counts are those of the whole process.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Counting;

pub(crate) static ON: AtomicBool = AtomicBool::new(false);
pub(crate) static COUNT: AtomicUsize = AtomicUsize::new(0);
pub(crate) static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Set by `ALLOCATIONS_TRACE=1`: prints where the first six allocations that are counted come from.
pub(crate) static TRACE: AtomicBool = AtomicBool::new(false);
static TRACED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static TRACING: Cell<bool> = const { Cell::new(false) };
}

fn count(bytes: usize) {
    if !ON.load(Ordering::Relaxed) || TRACING.get() {
        return;
    }
    COUNT.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes, Ordering::Relaxed);
    if TRACE.load(Ordering::Relaxed) && TRACED.fetch_add(1, Ordering::Relaxed) < 6 {
        TRACING.set(true);
        let name = thread::current().name().map(str::to_owned);
        eprintln!("{bytes} bytes on {name:?}:\n{}", std::backtrace::Backtrace::force_capture());
        TRACING.set(false);
    }
}

// SAFETY: every call goes to the system's allocator with unchanged arguments. Counting allocates nothing. Tracing allocates,
// but `TRACING` keeps it from being entered from within itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
