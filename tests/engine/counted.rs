//! A foreign buffer, for what becomes of those.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use allstream::HostMemory;

/// A buffer that counts how often it was dropped.
#[derive(Debug)]
pub(crate) struct Counted(pub(crate) Vec<f32>, pub(crate) Arc<AtomicUsize>);

impl Counted {
    pub(crate) fn new(values: Vec<f32>) -> (Counted, Arc<AtomicUsize>) {
        let drops = Arc::new(AtomicUsize::new(0));
        (Counted(values, drops.clone()), drops)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: as for the Vec inside, which nothing else reaches.
unsafe impl HostMemory for Counted {
    type Elem = f32;
    fn ptr(&self) -> *const f32 {
        self.0.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut f32 {
        self.0.as_mut_ptr()
    }
    fn count(&self) -> usize {
        self.0.len()
    }
}
