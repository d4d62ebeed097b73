//! [`Buf`]: memory that an operation owns while the operation is in flight; [`HostBuf`]: allstream's own `Buf` in the host's memory.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{DeviceMemory, Fate, HostMemory, OwnedSlice, SliceOwner};
use crate::error::Error;
use crate::types::{DType, Element};

/// Memory that can be handed to an operation by value and comes back with its result: the host's, or a device's.
///
/// Every [`HostMemory`] is a `Buf`: implement `HostMemory` for an owner of host memory of your own. [`DeviceBuf`](crate::cuda::DeviceBuf)
/// is a `Buf`, too.
///
/// An operation owns its buffer, so no call takes a buffer by reference. Take gradients that a struct holds out of the struct, and put
/// the result back:
///
/// ```
/// # struct Model { grads: Vec<f32> }
/// # fn main() -> Result<(), allstream::Error> {
/// # let mut comm = allstream::Comm::local(1)?.remove(0);
/// # let mut model = Model { grads: vec![0.5; 8] };
/// model.grads = comm.all_reduce(std::mem::take(&mut model.grads)).wait()?; // meanwhile, and after a failure, `grads` is an empty Vec
/// # assert_eq!(model.grads.len(), 8); Ok(()) }
/// ```
///
/// # Safety
///
/// - What [`location`](Self::location) says holds, however often the value is moved, until it is dropped or changed through
///   `&mut self`. The memory has [`len`](Self::len) elements of type [`dtype`](Self::dtype).
/// - As long as an operation, or an [`AnyBuf`](super::AnyBuf), owns the value, nobody else reads or writes the memory.
/// - On the host, the elements are valid as [`HostMemory`] asks.
/// - On a device, the elements are valid for reads and writes by work that is put on the location's stream behind all that is on that
///   stream already.
/// - When the value comes back, or is dropped after a failure, copies that the engine made may still be on that stream. So the
///   implementation uses the device's memory again, and frees it, only in the order of that stream.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that an operation can own",
    label = "not a buffer",
    note = "a buffer is owned memory: Vec<T>, Box<[T]>, HostBuf<T>, DeviceBuf<T>, .. of an `Element` type, not a reference: hand it over \
            with std::mem::take(&mut self.grads), and take it back from the result",
    note = "where several buffers go into one call, each stands in a list: ([a], [b]) for buffers of different types, not (a, b)",
    note = "one number goes without a buffer: all_reduce_value(x), broadcast_value(x, root), all_gather_value(x)"
)]
pub unsafe trait Buf: Send + 'static {
    /// The element type; [`Untyped`](super::Untyped) where only [`dtype`](Self::dtype) can tell it.
    type Elem: 'static;
    /// Number of elements.
    fn len(&self) -> usize;
    /// The type of the elements: that of [`Elem`](Self::Elem), where `Elem` is an [`Element`].
    fn dtype(&self) -> DType;
    /// Whether there are no elements.
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
    /// No operation can use the memory, for this reason.
    Unfit(&'static str),
}

impl Location {
    /// In the host's memory, from `start` on.
    pub fn host<T: Element>(start: *mut T) -> Location {
        Location(Where::Host(start.cast()))
    }
}

/// A buffer as calls see it: where its elements are, how many they are, and of which type.
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

    /// The memory, if it is a device's.
    pub(crate) fn device_memory(&self) -> Option<&DeviceMemory> {
        match &self.place.0 {
            Where::Host(_) | Where::Unfit(_) => None,
            Where::Device(memory) => Some(memory),
        }
    }

    /// Why no operation can use the buffer as it is; `None`: operations can.
    pub(crate) fn unfit(&self) -> Option<&'static str> {
        match self.place.0 {
            Where::Unfit(why) => Some(why),
            _ => None,
        }
    }

    /// The operations that a device's buffer depends on. `None` on the host, and where the buffer keeps no list of them.
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
    /// If there is no memory for them, the allocator's handler aborts the process, as it does for `Vec`;
    /// [`try_zeroed`](Self::try_zeroed) returns an error instead.
    pub fn zeroed(len: usize) -> HostBuf<T> {
        Self::allocate(len)
            .unwrap_or_else(|| handle_alloc_error(Layout::array::<T>(len).unwrap_or(Layout::new::<T>())))
    }

    /// As [`zeroed`](Self::zeroed), but does not abort where there is no memory for `len` elements.
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
        // SAFETY: a `Line` is bytes, which may all be zero.
        let mut lines: Vec<Line> = unsafe { zeroed(lines) }?;
        let start = lines.as_mut_ptr().cast();
        // SAFETY: `len` elements fit the lines, which are aligned for every Element and do not move with their vector; they are zero,
        // and every Element is valid when zero.
        Some(unsafe { OwnedSlice::new(start, len, Heap { _lines: lines }) })
    }
}

/// A vector of `len` zeroes; `None`: there is no memory for them. Where the allocator gets zeroed pages from the system, nobody writes
/// the zeroes, and the call takes no longer for a larger `len`.
pub(crate) fn zeroes<T: Element>(len: usize) -> Option<Vec<T>> {
    // SAFETY: every Element is valid when zero.
    unsafe { zeroed(len) }
}

/// As [`zeroes`], for types that need not be elements.
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
    // SAFETY: the global allocator gave `start`, with the layout of a vector of capacity `len`. Nobody else has the memory, and
    // all `len` elements are initialised: they are zero, which the caller promises is valid.
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
