//! A collective of a node's devices allocates nothing once everything is warm, with arrays of buffers: a counting
//! allocator over all threads of this process.
//!
//! One test in a process of its own: whatever is allocated while it counts, is counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use allstream::{Error, Node};
use futures::executor::block_on;

struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn count() {
    if ON.load(Ordering::Relaxed) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
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

#[test]
fn no_collective_of_devices_allocates_in_steady_state() {
    let mut node = Node::local(2).unwrap();
    let mut small = [vec![1.0_f32; 3], vec![1.0; 3]];
    let mut large = [vec![1.0_f32; 100_000], vec![1.0; 100_000]];
    let mut pair = [(vec![1_u8; 10], vec![0_u8; 20]), (vec![2; 10], vec![0; 20])];
    let mut round = |node: &mut Node| -> Result<(), Error> {
        small = node.timeout(Duration::from_secs(30)).all_reduce(std::mem::take(&mut small)).wait()?;
        large = block_on(node.broadcast(std::mem::take(&mut large), (0, 1)))?;
        pair = node.all_gather_into(std::mem::take(&mut pair)).wait()?;
        Ok(())
    };
    // Something else of this process may allocate once, late: one quiet window is enough.
    for _ in 0..5 {
        for on in [false, true] {
            COUNT.store(0, Ordering::Relaxed);
            ON.store(on, Ordering::Relaxed);
            (0..500).for_each(|_| round(&mut node).unwrap());
            ON.store(false, Ordering::Relaxed);
        }
        if COUNT.load(Ordering::Relaxed) == 0 {
            return;
        }
    }
    panic!("{} allocations in 500 rounds of 3 calls", COUNT.load(Ordering::Relaxed));
}
