//! The memory in which operations on device memory are staged: pinned memory of the host ([`super::stripes`] says how).

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::chores::later;
use super::context::Context;
use super::pinned_cache::{REST, length};
use crate::error::Error;
use crate::mem::PINNED;

/// Pinned host memory for one operation. It is not initialised: nobody reads a part of it before that part was written.
pub(super) struct Block {
    start: NonNull<u8>,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: a block owns its memory, and gives no reference to it. Whoever copies to or from the memory holds the block, and the
// executor orders these copies as it does for a user's buffer.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Block, Error> {
        let context = context.clone();
        let len = length(bytes);
        let kept = context.pinned.lock().take(len);
        if let Some((at, len)) = kept
            && let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut(at))
        {
            return Ok(Block { start, len, context });
        }
        let at = context.pin(len, " to stage an operation")?;
        let Some(start) = NonNull::new(at.cast::<u8>()) else {
            return Err(Error::system("pin host memory", "the driver gave no address"));
        };
        PINNED.fetch_add(len, Ordering::Relaxed);
        Ok(Block { start, len, context })
    }

    /// The address at this offset.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Block {
    /// The thread that drops the last handle may be one that everybody waits for, so another thread calls the driver.
    fn drop(&mut self) {
        let (block, context) = ((self.start.as_ptr().expose_provenance(), self.len), self.context.clone());
        let mut pinned = context.pinned.lock();
        let (kept, is_much) = (pinned.put(block.0, block.1), pinned.is_much());
        drop(pinned);
        if !kept {
            later(Duration::ZERO, move || context.unpin([block]));
        } else if is_much {
            let context = Arc::downgrade(&context);
            later(REST, move || {
                if let Some(context) = context.upgrade() {
                    let rested = context.pinned.lock().take_rested();
                    context.unpin(rested);
                }
            });
        }
    }
}
