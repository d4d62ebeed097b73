//! [`AnyBuf`]: a buffer whose element type is known at run time.

use std::any::Any;
use std::fmt;

use super::{Buf, HostBuf, Location, RawBuf, Where};
use crate::error::Error;
use crate::types::{DType, Element, bf16, f8e4m3, f8e5m2, f16};

/// Stands for the element type of a buffer whose type is known only at run time: see [`AnyBuf`].
///
/// It is not an [`Element`], and no value of it exists.
#[derive(Debug)]
pub enum Untyped {}

/// A [`Buf`] of any kind, whose element type is known at run time: for programs that read types from a file, a message
/// or another language.
///
/// Every call that takes a [`Buf`] takes an `AnyBuf`, except calls that return a new `Vec` (use their `_into` forms).
/// That all buffers of a call have the same element type is then checked at run time, by the call.
///
/// ```
/// use allstream::{AnyBuf, Comm, DType};
///
/// let mut comm = Comm::local(1)?.remove(0);
/// let mut grads = AnyBuf::zeroed(DType::F32, 3)?;
/// grads.as_mut_slice::<f32>().unwrap().copy_from_slice(&[1.0, 2.0, 3.0]);
/// let grads = comm.all_reduce(grads).wait()?;
/// assert_eq!(grads.as_slice::<f32>(), Some(&[1.0, 2.0, 3.0][..]));
/// assert_eq!(grads.as_slice::<i32>(), None);
///
/// let weights = comm.broadcast(AnyBuf::new(vec![7_i64; 2]), 0).wait()?;
/// assert_eq!(weights.into_inner::<Vec<i64>>().unwrap(), [7, 7]);
/// # Ok::<(), allstream::Error>(())
/// ```
pub struct AnyBuf(Box<Owned>);

/// A buffer, and its place, length and type. It is boxed, so that an `AnyBuf` is one pointer, and an operation stores its input and its output
/// without another allocation (`ErasedBufs`).
struct Owned {
    raw: RawBuf,
    buf: Box<dyn Any + Send>,
}

// SAFETY: the buffer is Send, and the pointer in `raw` points to memory that the buffer owns.
unsafe impl Send for Owned {}

/// Makes a buffer, whichever the element type is.
pub(crate) trait Make {
    fn make<T: Element>(self) -> Result<AnyBuf, Error>;
}

/// Makes a buffer of this element type, as `how` does.
pub(crate) fn make<M: Make>(dtype: DType, how: M) -> Result<AnyBuf, Error> {
    match dtype {
        DType::Bool => how.make::<bool>(),
        DType::I8 => how.make::<i8>(),
        DType::I16 => how.make::<i16>(),
        DType::I32 => how.make::<i32>(),
        DType::I64 => how.make::<i64>(),
        DType::U8 => how.make::<u8>(),
        DType::U16 => how.make::<u16>(),
        DType::U32 => how.make::<u32>(),
        DType::U64 => how.make::<u64>(),
        DType::F16 => how.make::<f16>(),
        DType::BF16 => how.make::<bf16>(),
        DType::F32 => how.make::<f32>(),
        DType::F64 => how.make::<f64>(),
        DType::F8E4M3 => how.make::<f8e4m3>(),
        DType::F8E5M2 => how.make::<f8e5m2>(),
    }
}

impl AnyBuf {
    /// Takes a buffer, which [`into_inner`](Self::into_inner) gives back.
    pub fn new<B: Buf>(buf: B) -> AnyBuf {
        let mut buf = Box::new(buf);
        AnyBuf(Box::new(Owned { raw: RawBuf::of(&mut *buf), buf }))
    }

    /// `len` elements of zero, in a [`HostBuf`].
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no memory for so many elements.
    pub fn zeroed(dtype: DType, len: usize) -> Result<AnyBuf, Error> {
        struct OnHost(usize);
        impl Make for OnHost {
            fn make<T: Element>(self) -> Result<AnyBuf, Error> {
                HostBuf::<T>::try_zeroed(self.0).map(AnyBuf::new)
            }
        }
        make(dtype, OnHost(len))
    }

    /// The buffer that [`new`](Self::new) was given.
    ///
    /// # Errors
    /// This `AnyBuf`, unchanged, if the buffer in it is not a `B`.
    pub fn into_inner<B: Buf>(self) -> Result<B, AnyBuf> {
        let Owned { raw, buf } = *self.0;
        buf.downcast::<B>().map(|buf| *buf).map_err(|buf| AnyBuf(Box::new(Owned { raw, buf })))
    }

    /// The elements; `None` if they are of another type, or not in host memory.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        let start = self.host_start::<T>()?;
        if self.0.raw.len == 0 {
            return Some(&[]); // `start` may be null
        }
        // SAFETY: `len` elements of this type (`host_start` compared it), initialised and aligned as every buffer on the
        // host promises. The buffer, which is borrowed with `self`, is their only owner.
        Some(unsafe { std::slice::from_raw_parts(start, self.0.raw.len) })
    }

    /// As [`as_slice`](Self::as_slice), for writing.
    pub fn as_mut_slice<T: Element>(&mut self) -> Option<&mut [T]> {
        let start = self.host_start::<T>()?;
        if self.0.raw.len == 0 {
            return Some(&mut []);
        }
        // SAFETY: as in `as_slice`, and `&mut self` makes this the only access.
        Some(unsafe { std::slice::from_raw_parts_mut(start, self.0.raw.len) })
    }

    fn host_start<T: Element>(&self) -> Option<*mut T> {
        match self.0.raw.place.0 {
            Where::Host(start) if self.0.raw.dtype == T::DTYPE => Some(start.cast()),
            _ => None,
        }
    }
}

// SAFETY: the buffer inside is a `Buf`, and promises all of this for its place, length and type. Nobody changes it before
// `into_inner` gives it back, since no `&mut` to it is given away.
unsafe impl Buf for AnyBuf {
    type Elem = Untyped;
    fn len(&self) -> usize {
        self.0.raw.len
    }
    fn dtype(&self) -> DType {
        self.0.raw.dtype
    }
    fn location(&mut self) -> Location {
        self.0.raw.place.clone()
    }
}

impl fmt::Debug for AnyBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnyBuf({} x {}", self.0.raw.len, self.0.raw.dtype)?;
        match self.0.raw.device_memory() {
            Some(memory) => {
                let (ordinal, name) = memory.order.device();
                write!(f, " on Device({ordinal}, {name}))")
            }
            None => f.write_str(")"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::split_at;

    #[test]
    fn a_buffer_comes_back_as_what_it_was_and_as_nothing_else() {
        let mut any = AnyBuf::new(vec![1.5_f64, 2.0]);
        assert_eq!((any.dtype(), any.len()), (DType::F64, 2));
        assert_eq!(format!("{any:?}"), "AnyBuf(2 x f64)");
        any.as_mut_slice::<f64>().unwrap()[1] = 4.0;
        assert!(any.as_slice::<i64>().is_none(), "another type of the same size");
        let any = any.into_inner::<Box<[f64]>>().unwrap_err();
        assert_eq!(any.into_inner::<Vec<f64>>().unwrap(), [1.5, 4.0]);
    }

    #[test]
    fn zeroes_are_of_every_type_and_views_can_be_any_buffer() {
        for dtype in DType::ALL {
            let any = AnyBuf::zeroed(dtype, 5).unwrap();
            assert_eq!((any.dtype(), any.len(), any.0.raw.bytes()), (dtype, 5, 5 * dtype.size()));
        }
        let error = AnyBuf::zeroed(DType::F64, usize::MAX / 4).unwrap_err();
        assert!(error.to_string().contains("more than this process can have memory for"), "{error}");
        let [left, right] = split_at(vec![1u16, 2, 3], 1).unwrap();
        let (left, right) = (AnyBuf::new(left), AnyBuf::new(right));
        assert_eq!((left.as_slice::<u16>(), right.as_slice::<u16>()), (Some(&[1][..]), Some(&[2, 3][..])));
    }
}
