//! Buffers in a rank's region, which peers on this host read and write in place.

use std::fmt;
use std::sync::Arc;

use super::region::Region;
use crate::error::Error;
use crate::forked;
use crate::mem::{OwnedSlice, SliceOwner};
use crate::types::{DType, Element};

/// A buffer from [`Comm::alloc`](crate::Comm::alloc): memory that the other ranks of this host read, and in an all_reduce
/// write, in place, so that a collective on it copies nothing into staging slots. Zeroed, aligned to a page; derefs to a slice.
///
/// It may outlive its communicator, and be used with other communicators: those of the same world need no copy either, those of another
/// world treat it like any other buffer.
pub type ArenaBuf<T> = OwnedSlice<T, Pages>;

/// What owns the memory of an [`ArenaBuf`]: pages of a rank's region.
pub struct Pages {
    region: Arc<Region>,
    offset: usize,
    bytes: usize,
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.region.give_pages(self.offset, self.bytes);
    }
}

impl SliceOwner for Pages {
    fn describe(&self, dtype: DType, len: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArenaBuf<{dtype}>({len})")
    }
}

impl<T: Element> ArenaBuf<T> {
    pub(crate) fn zeroed(region: &Arc<Region>, len: usize) -> Result<ArenaBuf<T>, Error> {
        // In a forked child, what is free here may be in use in the parent.
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
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(none)?.max(1);
        let offset = region.take_pages(bytes).ok_or_else(none)?;
        let pages = Pages { region: region.clone(), offset, bytes };
        // SAFETY: `len` elements, aligned to a page, inside the mapping, which the region in `pages` keeps and which does not move. They are
        // zero when given, and zero is a valid Element. Nobody else uses them until `pages` gives them back: correct peers touch them only
        // while an operation owns them.
        Ok(unsafe { OwnedSlice::new(region.at(offset).cast(), len, pages) })
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
