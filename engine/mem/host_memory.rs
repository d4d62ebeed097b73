//! [`HostMemory`]: host memory that an operation can own.

use crate::types::Element;

/// Host memory that an operation can own. Every `HostMemory` is a [`Buf`](super::Buf).
///
/// Implemented for `Vec<T>`, `Box<[T]>` and [`HostBuf<T>`](super::HostBuf), for [`View`](super::View)s of any of them, and, with the
/// feature `ndarray`, for that crate's arrays. For other owners of memory (an array library's storage, a mapped file) you can implement
/// it yourself, in a few lines and with a reason for each point below.
///
/// # Safety
///
/// From the moment a value is handed to an operation until it comes back, the engine and (for ranks of the
/// same process) peers access `count()` elements at `ptr()` through raw pointers, from other threads. From
/// [`split`](super::split) to [`join`](super::View::join), the views of a value access these elements, also as
/// slices, and so does an [`AnyBuf`](super::AnyBuf) that holds the value. So:
///
/// - `ptr()` and `count()` give the same answer however often the value is moved, until it is dropped or
///   changed through `&mut self`;
/// - the memory is valid for reads and writes of `count() * size_of::<Self::Elem>()` bytes, initialised, and
///   aligned for the element type;
/// - nothing else reads or writes it while the value is owned by the operation, cut, or in an `AnyBuf`: the owner is
///   unique;
/// - dropping the value on any thread is sound (`Send`).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a buffer that an operation can own",
    label = "no buffer, or none in a list",
    note = "where several buffers go into one call, each stands in a list: ([a], [b]) for buffers of different types, not (a, b)",
    note = "a buffer is owned memory: Vec<T>, Box<[T]>, HostBuf<T>, DeviceBuf<T>, .. of an `Element` type",
    note = "one number goes without a buffer: all_reduce_value(x), broadcast_value(x, root), all_gather_value(x)"
)]
pub unsafe trait HostMemory: Send + 'static {
    /// The element type.
    type Elem: Element;
    /// Start of the memory.
    fn ptr(&self) -> *const Self::Elem;
    /// Start of the memory, for writing.
    fn ptr_mut(&mut self) -> *mut Self::Elem;
    /// Number of elements.
    fn count(&self) -> usize;
    /// Whether the CUDA driver has locked the memory's pages, as for a [`PinnedBuf`](crate::cuda::PinnedBuf): devices then copy
    /// to and from it by themselves. `false` is never wrong: copies are only slower. `true` for memory that is not locked makes
    /// copies block their caller.
    fn is_pinned(&self) -> bool {
        false
    }
    /// Why operations cannot use this memory as it is (for example, an array with gaps between its elements). `None`: they can. A
    /// call refuses such memory in these words, and gives it back. [`count`](Self::count) is 0 then.
    fn unfit(&self) -> Option<&'static str> {
        None
    }
}

// SAFETY: a Vec's elements are on the heap, do not move with it, and are owned by it alone.
unsafe impl<T: Element> HostMemory for Vec<T> {
    type Elem = T;
    fn ptr(&self) -> *const T {
        self.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut T {
        self.as_mut_ptr()
    }
    fn count(&self) -> usize {
        self.len()
    }
}

// SAFETY: as for Vec; the length cannot change.
unsafe impl<T: Element> HostMemory for Box<[T]> {
    type Elem = T;
    fn ptr(&self) -> *const T {
        self.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut T {
        self.as_mut_ptr()
    }
    fn count(&self) -> usize {
        <[T]>::len(self)
    }
}
