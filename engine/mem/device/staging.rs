//! What operations on device memory are staged in: pinned memory of the host's ([`super::stripes`] has how).

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use allstream_sys::cuda::{CU_MEMHOSTALLOC_PORTABLE, Cuda, CudaError};

use super::context::Context;
use super::fate::Fate;
use super::stream::DeviceStream;
use crate::error::Error;

/// Where device memory is, and in whose order.
#[derive(Clone)]
pub(crate) struct DevicePlace {
    pub(crate) stream: DeviceStream,
    pub(crate) address: u64,
    /// Of a buffer that keeps it.
    pub(crate) fate: Option<Arc<Fate>>,
    /// Whether another library allocated it.
    pub(crate) foreign: bool,
}

impl std::fmt::Debug for DevicePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x} of {:?}", self.address, self.stream)
    }
}

impl DevicePlace {
    /// Why what is there means nothing.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.fate.as_ref().map_or(Ok(()), |fate| fate.check())
    }
}

/// A buffer that is staged.
pub(crate) struct Item {
    pub(crate) place: DevicePlace,
    pub(crate) bytes: usize,
    /// The operation reads it.
    pub(crate) fill: bool,
    /// The operation writes it.
    pub(crate) back: bool,
}

/// What is called when a staged operation is over: once, on any thread.
pub(crate) type Finish = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Pinned memory that is kept for the next operations, unless one block is larger: getting it takes the driver 0.1 ms and
/// more.
const KEPT: usize = 64 << 20;
const LEAST: usize = 64 << 10;
const MIB: usize = 1 << 20;

/// The length of a block for so many bytes. There are few, so that blocks are taken again: powers of two, and above 1 MiB
/// three more between two of them, so that at most a quarter is more than was asked for.
fn length(bytes: usize) -> usize {
    match bytes {
        0..=MIB => bytes.max(LEAST).next_power_of_two(),
        _ => bytes.checked_next_multiple_of(1 << ((bytes - 1).ilog2() - 2)).unwrap_or(bytes),
    }
}

/// Blocks that nobody uses.
#[derive(Default)]
pub(super) struct Pinned {
    /// Their addresses, by length. A length stays when its last block is taken: it will be back.
    blocks: BTreeMap<usize, Vec<usize>>,
    bytes: usize,
}

impl Pinned {
    /// One of at least so many bytes, and not of far more: its address and length.
    fn take(&mut self, wanted: usize) -> Option<(usize, usize)> {
        let fitting = self.blocks.range_mut(wanted..=wanted.saturating_mul(4));
        let (at, len) = fitting.into_iter().find_map(|(len, blocks)| Some((blocks.pop()?, *len)))?;
        self.bytes -= len;
        Some((at, len))
    }

    /// Keeps one, if that is not too much.
    fn put(&mut self, at: usize, len: usize) -> bool {
        let fits = self.bytes == 0 || self.bytes + len <= KEPT;
        if fits {
            self.blocks.entry(len).or_default().push(at);
            self.bytes += len;
        }
        fits
    }

    /// Gives all of them back to the driver; whether there were any.
    pub(super) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) -> bool {
        let any = std::mem::take(&mut self.bytes) > 0;
        for at in std::mem::take(&mut self.blocks).into_values().flatten() {
            // SAFETY: allocated by `Block::new`, whose owner gave it back.
            unsafe { cuda.mem_free_host(std::ptr::with_exposed_provenance_mut(at)) }.unwrap_or_else(report);
        }
        any
    }
}

/// Pinned memory of the host's, for one operation. It holds whatever was there: nobody reads of it what was not written.
pub(super) struct Block {
    start: NonNull<u8>,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: it owns its memory, and gives no reference to it: whoever copies to or from it holds it, and the executor orders
// them as it does with a user's buffer.
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
        let pin = || {
            context.call(&format!("pin {len} bytes of host memory to stage an operation"), |cuda| {
                // SAFETY: in a context; freed by `drop` here, or by `Pinned::close`.
                unsafe { cuda.mem_host_alloc(len, CU_MEMHOSTALLOC_PORTABLE) }
            })
        };
        // What is kept for others may be what is missing.
        let at = pin().or_else(|error| if context.unpin_idle() { pin() } else { Err(error) })?;
        let Some(start) = NonNull::new(at.cast::<u8>()) else {
            return Err(Error::system("pin host memory", "the driver gave no address"));
        };
        Ok(Block { start, len, context })
    }

    /// An address in it.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.context.pinned.lock().put(self.start.as_ptr().expose_provenance(), self.len) {
            return;
        }
        let _entered = self.context.enter();
        // SAFETY: allocated in `new`, and freed once. Whoever copies to or from it holds the block meanwhile.
        if let Err(error) = unsafe { self.context.cuda.mem_free_host(self.start.as_ptr().cast()) } {
            tracing::warn!(device = self.context.ordinal, "unpin host memory: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_blocks_have_few_lengths_and_waste_little() {
        let mut lengths: Vec<usize> = (1..=64 << 10).map(|kib| length(kib << 10)).collect();
        for (kib, len) in (1_usize..).zip(&lengths) {
            let bytes = kib << 10;
            let most = if bytes <= MIB { (2 * bytes).max(LEAST) } else { bytes + bytes / 4 };
            assert!((bytes..=most).contains(len), "{len} for {bytes}");
        }
        lengths.dedup();
        assert_eq!(lengths.len(), 5 + 4 * 6);
        assert_eq!((length(0), length(MIB), length(MIB + 1)), (LEAST, MIB, MIB + MIB / 4));
        assert_eq!(length(usize::MAX), usize::MAX);
    }

    #[test]
    fn pinned_blocks_are_kept_by_their_lengths() {
        let mut pinned = Pinned::default();
        assert!(pinned.put(1, 2 * KEPT) && !pinned.put(2, LEAST));
        assert_eq!((pinned.take(LEAST), pinned.take(KEPT)), (None, Some((1, 2 * KEPT))));
        assert!(pinned.put(1, MIB) && pinned.put(2, LEAST) && pinned.put(3, MIB));
        let taken = [LEAST, LEAST, MIB / 2, MIB].map(|wanted| pinned.take(wanted));
        assert_eq!(taken, [Some((2, LEAST)), None, Some((3, MIB)), Some((1, MIB))]);
        assert_eq!(pinned.bytes, 0);
    }
}
