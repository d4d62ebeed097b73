//! Copies between buffers of one device.

use std::sync::Arc;

use allstream_sys::cuda::Cuda;

use super::buf::{DeviceBuf, settle};
use super::transfer::Transfer;
use crate::error::{Error, Failed};
use crate::types::Element;

impl<T: Element> DeviceBuf<T> {
    /// Copies another buffer of the same device and length into this one, on this one's stream, after what the other's
    /// stream holds now. Both come back.
    ///
    /// # Errors
    /// [`Failed`] with both, this one first: [`Error::Invalid`], the lengths or the devices differ; [`Error::Cuda`].
    pub fn copy_from(self, from: DeviceBuf<T>) -> Transfer<(DeviceBuf<T>, DeviceBuf<T>)> {
        let refused = if self.len() != from.len() {
            let problem = format!("this buffer has {} elements, the other {}", self.len(), from.len());
            Err(Error::invalid("copy_from", problem))
        } else if !Arc::ptr_eq(&self.memory.context, &from.memory.context) {
            let (ours, other) = (self.memory.context.ordinal, from.memory.context.ordinal);
            let problem = format!(
                "this buffer is on device {ours}, the other on device {other}, or of another opening"
            );
            Err(Error::invalid("copy_from", problem))
        } else {
            from.follow(self.stream())
        };
        if let Err(error) = refused {
            return Transfer::ended(Err(Failed { buf: Some((self, from)), error }));
        }
        let stream = self.stream().clone();
        let put = |cuda: &Cuda, (to, from): &mut (DeviceBuf<T>, DeviceBuf<T>)| {
            let bytes = to.len() * size_of::<T>();
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: `bytes` bytes on both sides, for the lengths are equal; each buffer has its memory alone, and both
            // are held until the copy is done. It comes after the work on either: on this stream, which waits for
            // what was on the other's; what is put there later comes after this has been waited for.
            unsafe { cuda.memcpy_dtod_async(to.as_ptr(), from.as_ptr(), bytes, to.stream().0.raw) }
        };
        Transfer::start(&stream, (self, from), "copy on the device", put, settle)
    }
}
