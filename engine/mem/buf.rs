//! [`Buf`]: memory that an operation owns while it is in flight; [`HostBuf`]: such memory of ours on the host.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{DeviceMemory, Fate, HostMemory, OwnedSlice, SliceOwner};
use crate::error::Error;
use crate::types::{DType, Element};

/// Memory that can be handed to an operation by value and comes back with its result: the host's, or a device's.
///
/// All [`HostMemory`] is one: implement that for an owner of host memory. [`DeviceBuf`](crate::cuda::DeviceBuf) is one,
/// too.
///
/// An operation owns its buffer, so none is given by reference. Gradients that are held in a struct are taken out and put
/// back:
///
/// ```
/// # struct Model { grads: Vec<f32> }
/// # fn main() -> Result<(), allstream::Error> {
/// # let mut comm = allstream::Comm::local(1)?.remove(0);
/// # let mut model = Model { grads: vec![0.5; 8] };
/// model.grads = comm.all_reduce(std::mem::take(&mut model.grads)).wait()?; // an empty Vec meanwhile, and after a failure
/// # assert_eq!(model.grads.len(), 8); Ok(()) }
/// ```
///
/// # Safety
///
/// What [`location`](Self::location) says holds, however often the value is moved, until it is dropped or changed through
/// `&mut self`; and as long as an operation, or an [`AnyBuf`](super::AnyBuf), owns the value, nobody else reads or writes the
/// memory; [`dtype`](Self::dtype) and [`len`](Self::len) say what is there. On the host,
/// `len()` elements are there as [`HostMemory`] says; on a device, they are valid for reads and writes by work that is
/// put on the stream of the location, after what is on it; and when the value comes back or is dropped after a failure,
/// copies of the engine's may still be on that stream: the memory is used again, or freed, in its order only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that an operation can own",
    label = "not a buffer",
    note = "a buffer is owned memory: Vec<T>, Box<[T]>, HostBuf<T>, DeviceBuf<T>, .. of an `Element` type, not a reference: hand it over \
            with std::mem::take(&mut self.grads), and take it back from the result",
    note = "where several buffers go into one call, each stands in a list: ([a], [b]) for buffers of different types, not (a, b)",
    note = "one number goes without a buffer: all_reduce_value(x), broadcast_value(x, root), all_gather_value(x)"
)]
pub unsafe trait Buf: Send + 'static {
    /// The element type; [`Untyped`](super::Untyped) where only the value knows.
    type Elem: 'static;
    /// Number of elements.
    fn len(&self) -> usize;
    /// The type of the elements, [`Elem`](Self::Elem)'s where that is an [`Element`].
    fn dtype(&self) -> DType;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Where the elements are.
    fn location(&mut self) -> Location;
}

/// Where a buffer's elements are.
#[derive(Clone, Debug)]
pub struct Location(pub(crate) Where);

#[derive(Clone, Debug)]
pub(crate) enum Where {
    Host(*mut u8),
    Device(DeviceMemory),
    /// Nowhere that an operation could use: why.
    Unfit(&'static str),
}

impl Location {
    /// On the host, from here on.
    pub fn host<T: Element>(start: *mut T) -> Location {
        Location(Where::Host(start.cast()))
    }
}

/// A buffer as calls see it: where it is, how many elements it has, and of what type.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct RawBuf {
    pub(crate) place: Location,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

impl RawBuf {
    pub(crate) fn of<B: Buf>(buf: &mut B) -> RawBuf {
        RawBuf { place: buf.location(), len: buf.len(), dtype: buf.dtype() }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Where it is on a device; `None` where it is on the host.
    pub(crate) fn device_memory(&self) -> Option<&DeviceMemory> {
        match &self.place.0 {
            Where::Host(_) | Where::Unfit(_) => None,
            Where::Device(memory) => Some(memory),
        }
    }

    /// Why it cannot be used as it is.
    pub(crate) fn unfit(&self) -> Option<&'static str> {
        match self.place.0 {
            Where::Unfit(why) => Some(why),
            _ => None,
        }
    }

    /// What has become of the collectives on it, where it is a device's.
    pub(crate) fn fate(&self) -> Option<&Arc<Fate>> {
        self.device_memory()?.fate.as_ref()
    }
}

// SAFETY: `HostMemory` promises all of it.
unsafe impl<M: HostMemory> Buf for M {
    type Elem = M::Elem;
    fn len(&self) -> usize {
        self.count()
    }
    fn dtype(&self) -> DType {
        M::Elem::DTYPE
    }
    fn location(&mut self) -> Location {
        match self.unfit() {
            None => Location::host(self.ptr_mut()),
            Some(why) => Location(Where::Unfit(why)),
        }
    }
}

/// Host memory aligned to 64 bytes, zeroed; derefs to a slice.
pub type HostBuf<T> = OwnedSlice<T, Heap>;

/// What owns the memory of a [`HostBuf`]: the allocator gave it, in lines of 64 bytes.
pub struct Heap {
    _lines: Vec<Line>,
}

#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

impl SliceOwner for Heap {
    fn describe(&self, dtype: DType, len: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuf<{dtype}>({len})")
    }
}

impl<T: Element> HostBuf<T> {
    /// `len` elements of zero.
    ///
    /// Where there is no memory for them the process is aborted, by the allocator's handler, as by `Vec`;
    /// [`try_zeroed`](Self::try_zeroed) says so instead.
    pub fn zeroed(len: usize) -> HostBuf<T> {
        Self::allocate(len)
            .unwrap_or_else(|| handle_alloc_error(Layout::array::<T>(len).unwrap_or(Layout::new::<T>())))
    }

    /// The same, for a length that may be anything.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no memory for so many elements.
    pub fn try_zeroed(len: usize) -> Result<HostBuf<T>, Error> {
        Self::allocate(len).ok_or_else(|| {
            let problem = format!("{len} x {} are more than this process can have memory for", T::DTYPE);
            Error::invalid("HostBuf::try_zeroed", problem)
        })
    }

    fn allocate(len: usize) -> Option<HostBuf<T>> {
        let lines = len.checked_mul(size_of::<T>())?.div_ceil(size_of::<Line>());
        // SAFETY: bytes may be zero.
        let mut lines: Vec<Line> = unsafe { zeroed(lines) }?;
        let start = lines.as_mut_ptr().cast();
        // SAFETY: `len` elements fit the lines, which are aligned for every Element and do not move with their vector; they are zero,
        // and every Element is valid when zero.
        Some(unsafe { OwnedSlice::new(start, len, Heap { _lines: lines }) })
    }
}

/// A vector of so many zeroes; `None`: there is no memory for them. Where the system gives zeroed pages nothing is written
/// here, so what it costs does not grow with the length.
pub(crate) fn zeroes<T: Element>(len: usize) -> Option<Vec<T>> {
    // SAFETY: every Element is valid when zero.
    unsafe { zeroed(len) }
}

/// As [`zeroes`].
///
/// # Safety
/// A `T` all of whose bytes are zero is valid.
unsafe fn zeroed<T>(len: usize) -> Option<Vec<T>> {
    let layout = Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout's size is not zero.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: the global allocator gave it, with the layout that a vector of this capacity has; it is nobody else's, and
    // all `len` elements are initialised, as the caller promises.
    Some(unsafe { Vec::from_raw_parts(start.as_ptr().cast(), len, len) })
}

impl<T: Element> From<&[T]> for HostBuf<T> {
    fn from(values: &[T]) -> HostBuf<T> {
        let mut buf = HostBuf::zeroed(values.len());
        buf.copy_from_slice(values);
        buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_buf_is_aligned_zeroed_and_survives_a_move() {
        let mut buf = HostBuf::<f64>::zeroed(1001);
        assert!(buf.iter().all(|x| *x == 0.0));
        buf[1000] = 2.5;
        let at = buf.ptr();
        let moved = buf;
        assert_eq!(moved.ptr(), at);
        assert_eq!(moved.ptr() as usize % 64, 0);
        assert_eq!(moved[1000], 2.5);
        assert_eq!(HostBuf::<u8>::zeroed(0).len(), 0);
    }
}
