//! What operations on device memory are staged in: pinned memory of the host's ([`super::stripes`] has how).

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

/// Blocks that nobody uses: address and length.
#[derive(Default)]
pub(super) struct Pinned {
    blocks: Vec<(usize, usize)>,
}

impl Pinned {
    /// One of at least so many bytes, and not of far more.
    fn take(&mut self, wanted: usize) -> Option<(usize, usize)> {
        let fits = |(_, len): &(usize, usize)| *len >= wanted && *len / 4 <= wanted;
        let at = self.blocks.iter().position(fits)?;
        Some(self.blocks.swap_remove(at))
    }

    fn bytes(&self) -> usize {
        self.blocks.iter().map(|(_, len)| len).sum()
    }

    /// Gives all of them back to the driver; whether there were any.
    pub(super) fn close(&mut self, cuda: &Cuda, report: &dyn Fn(CudaError)) -> bool {
        let any = !self.blocks.is_empty();
        for (at, _) in self.blocks.drain(..) {
            // SAFETY: allocated by `Block::new`, whose owner gave it back.
            unsafe { cuda.mem_free_host(std::ptr::with_exposed_provenance_mut(at)) }.unwrap_or_else(report);
        }
        any
    }
}

/// Pinned memory of the host's, for one operation.
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
        // Few lengths, so that blocks are taken again; large ones without much waste.
        let len = match bytes {
            0..MIB => bytes.max(LEAST).next_power_of_two(),
            _ => bytes.checked_next_multiple_of(MIB).unwrap_or(bytes),
        };
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
        // SAFETY: `len` bytes that are ours alone.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Ok(Block { start, len, context })
    }

    /// An address in it.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut pinned = self.context.pinned.lock();
        if pinned.blocks.is_empty() || pinned.bytes() + self.len <= KEPT {
            pinned.blocks.push((self.start.as_ptr().expose_provenance(), self.len));
            return;
        }
        drop(pinned);
        let _entered = self.context.enter();
        // SAFETY: allocated in `new`, and freed once. Whoever copies to or from it holds the block meanwhile.
        if let Err(error) = unsafe { self.context.cuda.mem_free_host(self.start.as_ptr().cast()) } {
            tracing::warn!(device = self.context.ordinal, "unpin host memory: {error}");
        }
    }
}
