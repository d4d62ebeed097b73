//! [`PinnedBuf`]: host memory that the device copies to and from by itself.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::chores::later;
use super::context::Context;
use super::handle::Device;
use crate::error::Error;
use crate::mem::HostMemory;
use crate::types::Element;

/// Page-locked host memory, zeroed; derefs to a slice.
///
/// A [`Buf`](crate::Buf) like any other of the host's: all collectives take it. A copy between it and a device runs beside the
/// caller, at the full speed of the bus; other host memory is copied once more on the way. Pinned for all devices, and
/// cached as usual (not write-combined: it is read as fast as other memory).
///
/// Getting it takes the driver a while (0.1 ms and more): keep it.
pub struct PinnedBuf<T: Element> {
    start: NonNull<T>,
    len: usize,
    context: Arc<Context>,
}

impl<T: Element> PinnedBuf<T> {
    /// `len` elements of zero. `device`: whose context it is asked of; all of them can use it.
    ///
    /// # Errors
    /// [`Error::Cuda`]: there is no such memory.
    pub fn zeroed(device: &Device, len: usize) -> Result<PinnedBuf<T>, Error> {
        let context = device.0.clone();
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize)
        else {
            let problem = format!("{len} elements are more than any memory has");
            return Err(Error::invalid("PinnedBuf::zeroed", problem));
        };
        if bytes == 0 {
            return Ok(PinnedBuf { start: NonNull::dangling(), len, context });
        }
        let at = context.pin(bytes, "")?;
        let Some(start) = NonNull::new(at.cast::<T>()) else {
            return Err(Error::system("pin host memory", "the driver gave no address"));
        };
        // SAFETY: `bytes` bytes that are ours alone. For every element type zero is a value.
        unsafe { start.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(PinnedBuf { start, len, context })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`PinnedBuf::zeroed`].
    pub fn from_slice(device: &Device, values: &[T]) -> Result<PinnedBuf<T>, Error> {
        let mut buf = PinnedBuf::zeroed(device, values.len())?;
        buf.copy_from_slice(values);
        Ok(buf)
    }
}

impl<T: Element> Drop for PinnedBuf<T> {
    /// It may be dropped with an operation that nobody awaits, by the thread that finishes that: the driver, which may wait for the
    /// device, is called by another.
    fn drop(&mut self) {
        if self.len * size_of::<T>() == 0 {
            return;
        }
        let (at, context) = (self.start.as_ptr().expose_provenance(), self.context.clone());
        later(Duration::ZERO, move || {
            // Tried also where the context cannot be entered: the driver knows whose memory it is.
            let _entered = context.enter();
            // SAFETY: allocated in `zeroed`, and freed once. Whatever the device does with it holds the buffer meanwhile.
            let freed = unsafe { context.cuda.mem_free_host(std::ptr::with_exposed_provenance_mut(at)) };
            if let Err(error) = freed {
                tracing::warn!(device = context.ordinal, "unpin host memory: {error}");
            }
        });
    }
}

impl<T: Element> Deref for PinnedBuf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements, written in `zeroed`, aligned (the driver gives pages), owned alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for PinnedBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> fmt::Debug for PinnedBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuf<{}>({})", T::DTYPE.name(), self.len)
    }
}

// SAFETY: it owns its memory alone, like Box<[T]>; the driver frees it from any thread; Element is Send.
unsafe impl<T: Element> Send for PinnedBuf<T> {}
// SAFETY: `&PinnedBuf` only gives `&[T]`, and Element is Sync.
unsafe impl<T: Element> Sync for PinnedBuf<T> {}

// SAFETY: host memory that does not move with the value, initialised, aligned, and owned alone.
unsafe impl<T: Element> HostMemory for PinnedBuf<T> {
    type Elem = T;
    fn ptr(&self) -> *const T {
        self.start.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut T {
        self.start.as_ptr()
    }
    fn count(&self) -> usize {
        self.len
    }
    fn is_pinned(&self) -> bool {
        true
    }
}
