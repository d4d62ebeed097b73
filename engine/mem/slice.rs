//! [`OwnedSlice`]: elements in host memory, and their owner. All host buffers that the engine makes are of this type.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::HostMemory;
use crate::types::{DType, Element};

/// Elements in host memory, and what owns that memory; derefs to a slice.
///
/// Every host buffer that allstream makes is an `OwnedSlice`, with its own type of owner: [`HostBuf`](super::HostBuf),
/// [`ArenaBuf`](crate::ArenaBuf), [`PinnedBuf`](crate::cuda::PinnedBuf), [`HostTensor`](crate::dlpack::HostTensor), and
/// [`View`](super::View), whose owner is a share of the buffer that was cut. The memory is given back when the owner is dropped.
pub struct OwnedSlice<T: Element, O> {
    start: NonNull<T>,
    len: usize,
    owner: O,
}

/// What owns the memory of an [`OwnedSlice`].
pub trait SliceOwner: Send + Sync + 'static {
    /// Writes what the buffer is: its name, and the type and number of its elements.
    #[doc(hidden)]
    fn describe(&self, dtype: DType, len: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    /// As [`HostMemory::is_pinned`].
    #[doc(hidden)]
    fn is_pinned(&self) -> bool {
        false
    }
}

impl<T: Element, O> OwnedSlice<T, O> {
    /// The `len` elements from `start` on, which `owner` owns. Where there are none, any `start` will do.
    ///
    /// # Safety
    /// Until `owner` is dropped, and wherever it is moved, `len` elements at `start` are valid for reads and writes, aligned and
    /// initialised, and nobody else reads or writes them (except peers to which an operation lends them, as [`HostMemory`] says).
    pub(crate) unsafe fn new(start: *mut T, len: usize, owner: O) -> OwnedSlice<T, O> {
        let start = NonNull::new(start).filter(|_| len > 0).unwrap_or(NonNull::dangling());
        OwnedSlice { start, len, owner }
    }

    pub(crate) fn owner(&self) -> &O {
        &self.owner
    }

    pub(crate) fn into_owner(self) -> O {
        self.owner
    }

    /// Where the elements are, how many they are, and the owner.
    pub(crate) fn into_parts(self) -> (*mut T, usize, O) {
        (self.start.as_ptr(), self.len, self.owner)
    }
}

impl<T: Element, O> Deref for OwnedSlice<T, O> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised, aligned elements that the owner keeps and nobody else writes, as whoever made this promised;
        // through `self` they are written by `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element, O> DerefMut for OwnedSlice<T, O> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only access of this process.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element, O: SliceOwner> fmt::Debug for OwnedSlice<T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.owner.describe(T::DTYPE, self.len, f)
    }
}

// SAFETY: it is the only owner of its elements, like Box<[T]>; they are Send, and so is `owner`.
unsafe impl<T: Element, O: Send> Send for OwnedSlice<T, O> {}
// SAFETY: `&OwnedSlice` gives `&[T]` and `&O` only, and both are Sync.
unsafe impl<T: Element, O: Sync> Sync for OwnedSlice<T, O> {}

// SAFETY: `start` and `len` do not change when the value moves; the memory is valid, initialised, aligned, and this value's alone
// until its owner is dropped, as whoever made it promised.
unsafe impl<T: Element, O: SliceOwner> HostMemory for OwnedSlice<T, O> {
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
        self.owner.is_pinned()
    }
}
