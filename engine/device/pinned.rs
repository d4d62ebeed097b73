//! [`PinnedBuf`]: host memory that the device copies to and from by itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use allstream_sys::cuda::Cuda;

use super::chores::later;
use super::context::Context;
use super::devices::Device;
use crate::error::Error;
use crate::mem::{OwnedSlice, SliceOwner};
use crate::types::{DType, Element};

/// Page-locked host memory, zeroed; derefs to a slice.
///
/// A [`Buf`](crate::Buf) like any other of the host's: all collectives take it. A copy between it and a device runs beside the
/// caller, at the full speed of the bus; other host memory is copied once more on the way. Pinned for all devices, and
/// cached as usual (not write-combined: it is read as fast as other memory).
///
/// The driver takes a while to pin memory (0.1 ms and more): keep a buffer, and use it again.
pub type PinnedBuf<T> = OwnedSlice<T, Pinned>;

/// What owns the memory of a [`PinnedBuf`].
pub struct Pinned {
    /// The address, by which the memory is given back to the driver; `None` if there are no elements.
    start: Option<usize>,
    context: Arc<Context>,
}

impl SliceOwner for Pinned {
    fn describe(&self, dtype: DType, len: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuf<{dtype}>({len})")
    }
    fn is_pinned(&self) -> bool {
        true
    }
}

impl<T: Element> PinnedBuf<T> {
    /// `len` elements of zero. The context of `device` allocates the memory; all devices can use it.
    ///
    /// # Errors
    /// [`Error::Cuda`]: the driver cannot pin so much memory. [`Error::Invalid`]: `len` elements are too many for a buffer.
    pub fn zeroed(device: &Device, len: usize) -> Result<PinnedBuf<T>, Error> {
        let context = device.0.clone();
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize)
        else {
            let problem = format!("{len} elements are too many for a buffer");
            return Err(Error::invalid("PinnedBuf::zeroed", problem));
        };
        let start = if bytes == 0 { std::ptr::null_mut() } else { context.pin(bytes, "")?.cast::<u8>() };
        if bytes > 0 {
            if start.is_null() {
                return Err(Error::system("pin host memory", "the driver gave no address"));
            }
            // SAFETY: the driver gave `bytes` bytes at `start`, which nobody else uses.
            unsafe { start.write_bytes(0, bytes) };
        }
        let owner = Pinned { start: (bytes > 0).then(|| start.expose_provenance()), context };
        // SAFETY: `len` elements in pages that the driver gave (none, if `len` is 0): aligned for every Element, and there until `owner` gives them
        // back. All bytes are zero, which is a value of every Element, and nobody else uses them.
        Ok(unsafe { OwnedSlice::new(start.cast(), len, owner) })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// [`Error::Cuda`]: the driver cannot pin so much memory.
    pub fn from_slice(device: &Device, values: &[T]) -> Result<PinnedBuf<T>, Error> {
        let mut buf = PinnedBuf::zeroed(device, values.len())?;
        buf.copy_from_slice(values);
        Ok(buf)
    }
}

impl Drop for Pinned {
    /// The thread that drops this may be one that finishes an operation which nobody awaits. The driver may wait for the device before it frees
    /// the memory, so another thread calls it.
    fn drop(&mut self) {
        let (Some(at), context) = (self.start, self.context.clone()) else { return };
        later(Duration::ZERO, move || {
            // SAFETY: allocated in `zeroed`, and freed once. Whatever has a device use the memory owns the buffer until the device is done with it.
            let free = |cuda: &Cuda| unsafe { cuda.mem_free_host(std::ptr::with_exposed_provenance_mut(at)) };
            context.close("unpin host memory", free);
        });
    }
}
