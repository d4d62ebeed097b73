//! Buffers in a rank's region: what peers on this host read, and write, where it lies.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::region::Region;
use crate::error::Error;
use crate::forked;
use crate::mem::HostMemory;
use crate::types::{DType, Element};

/// A buffer from [`Comm::alloc`](crate::Comm::alloc): memory that the other ranks of this host read, and in an all_reduce
/// write, in place, so that a collective on it copies nothing into staging slots. Zeroed, aligned to a page; derefs to a slice.
///
/// It may outlive its communicator, and be used with others (of the same world without a copy, of another one as any
/// buffer).
pub struct ArenaBuf<T: Element> {
    region: Arc<Region>,
    start: NonNull<T>,
    offset: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Element> ArenaBuf<T> {
    pub(crate) fn zeroed(region: &Arc<Region>, len: usize) -> Result<ArenaBuf<T>, Error> {
        // What is free here may be in use in the parent.
        forked::check()?;
        if T::DTYPE == DType::Bool {
            // Peers can write there at any time, and a bool must be 0 or 1 at any time.
            let problem = "memory that other ranks can write holds no bools; use u8";
            return Err(Error::invalid("alloc", problem));
        }
        let none = || {
            let doing = format!("allocate {len} x {} where other ranks can read it", T::DTYPE);
            Error::system(doing, "a rank has room for 4 GB of such buffers at a time")
        };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(none)?;
        let offset = region.take_pages(bytes.max(1)).ok_or_else(none)?;
        let start = NonNull::new(region.at(offset).cast()).ok_or_else(none)?;
        Ok(ArenaBuf { region: region.clone(), start, offset, len, of: PhantomData })
    }
}

impl<T: Element> Drop for ArenaBuf<T> {
    fn drop(&mut self) {
        self.region.give_pages(self.offset, (self.len * size_of::<T>()).max(1));
    }
}

impl<T: Element> Deref for ArenaBuf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements inside the mapping, which `region` keeps; zeroed when given (every Element is valid when
        // zero), and uniquely ours: of peers, correct ones touch it only while an operation owns it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for ArenaBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only access of this process.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> fmt::Debug for ArenaBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArenaBuf<{}>({})", T::DTYPE, self.len)
    }
}

// SAFETY: it owns its part of the mapping alone, like Box<[T]>, and Element is Send.
unsafe impl<T: Element> Send for ArenaBuf<T> {}
// SAFETY: `&ArenaBuf` only gives `&[T]`, and Element is Sync.
unsafe impl<T: Element> Sync for ArenaBuf<T> {}

// SAFETY: memory of a mapping that does not move and lives as long as the value; the value is its only owner here.
unsafe impl<T: Element> HostMemory for ArenaBuf<T> {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_page_aligned_and_comes_back() {
        for region in [Region::shared().unwrap(), Region::private().unwrap()] {
            let region = Arc::new(region);
            let mut first = ArenaBuf::<f32>::zeroed(&region, 5000).unwrap();
            assert!(first.iter().all(|x| *x == 0.0) && (first.as_ptr() as usize).is_multiple_of(4096));
            first.fill(1.0);
            let at = first.as_ptr();
            assert!(region.is_page(at.cast(), 20_000) && !region.is_page(region.at(4096), 8));
            drop(first);
            let again = ArenaBuf::<f32>::zeroed(&region, 4999).unwrap();
            assert_eq!(again.as_ptr(), at);
            assert!(again.iter().all(|x| *x == 0.0), "zero again");
            assert_eq!(ArenaBuf::<u8>::zeroed(&region, 0).unwrap().len(), 0);
            let error = ArenaBuf::<f64>::zeroed(&region, 1 << 40).unwrap_err().to_string();
            assert!(error.contains("4 GB"), "{error}");
            let error = ArenaBuf::<bool>::zeroed(&region, 1).unwrap_err().to_string();
            assert!(error.contains("use u8"), "{error}");
        }
    }
}
