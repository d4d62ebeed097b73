//! [`Pack`]: gradients of one element type that are reduced as one buffer, and the copies into this buffer and back.

use super::layout::Param;
use crate::device::{ALIGNED, DeviceStream, Emptied, OnDevice, PackedAt, Packing, not_there};
use crate::error::Error;
use crate::mem::{AnyBuf, Buf, elements};
use crate::types::DType;

/// Parameters of one element type whose gradients are copied into one buffer, all on the host or all on a device.
#[derive(Clone)]
pub(super) struct Pack {
    /// The element type of the gradients.
    pub(super) dtype: DType,
    /// The element type of the buffer: not `dtype` if the gradients are compressed.
    pub(super) wire: DType,
    /// The number of each parameter, and the element of the buffer at which its gradient begins.
    pub(super) members: Vec<(usize, usize)>,
    /// Elements of the buffer.
    pub(super) len: usize,
}

impl Pack {
    /// A pack without parameters, for gradients of the type that `param` has. They are compressed to `wire`, if that is given.
    pub(super) fn new(param: &Param, wire: Option<DType>) -> Pack {
        let dtype = param.dtype();
        Pack { dtype, wire: wire.unwrap_or(dtype), members: Vec::new(), len: 0 }
    }

    pub(super) fn add(&mut self, i: usize, param: &Param) {
        if param.is_on_device() {
            self.len = self.len.next_multiple_of(ALIGNED / self.dtype.size());
        }
        self.members.push((i, self.len));
        self.len += param.len();
    }

    /// On the host: copies the gradients into the buffer. `residuals`: by parameter, what rounding took from its gradient in the last step,
    /// which compressing adds to the gradient of this step. What rounding takes now replaces it.
    pub(super) fn fill<B: Buf>(
        &self,
        packed: &mut AnyBuf,
        bufs: &mut [Option<B>],
        residuals: &mut [Vec<f32>],
    ) -> Result<(), Error> {
        for &(i, at) in &self.members {
            let buf = bufs[i].as_mut().ok_or_else(|| not_there(i))?;
            let len = buf.len();
            let done = if self.wire == self.dtype {
                elements::copy((buf, 0), (packed, at), len)
            } else {
                residuals.get_mut(i).and_then(|residual| elements::compress(buf, residual, (packed, at)))
            };
            done.ok_or_else(|| not_there(i))?;
        }
        Ok(())
    }

    /// On the host: copies the gradients from the buffer back to where they came from.
    pub(super) fn empty<B: Buf>(&self, packed: &mut AnyBuf, bufs: &mut [Option<B>]) -> Result<(), Error> {
        for &(i, at) in &self.members {
            let buf = bufs[i].as_mut().ok_or_else(|| not_there(i))?;
            let len = buf.len();
            let done = if self.wire == self.dtype {
                elements::copy((packed, at), (buf, 0), len)
            } else {
                elements::expand((packed, at), buf)
            };
            done.ok_or_else(|| not_there(i))?;
        }
        Ok(())
    }

    /// On a device: copies all gradients into a new buffer, in the order of the first gradient's stream.
    ///
    /// # Errors
    /// Also the failure of an operation that a gradient's contents depend on.
    pub(super) fn filled_on_device<B: Buf>(&self, bufs: &mut [Option<B>]) -> Result<OnDevice, Error> {
        self.on_device().fill(bufs)
    }

    /// On a device: has `stream` copy from the buffer back to the gradients, after all that the buffer's own stream holds. Nobody may have
    /// used the gradients since `filled_on_device`. Their streams, and the buffer's, do not wait for the copies yet: the caller makes them
    /// wait ([`Emptied::streams`]).
    pub(super) fn emptied_on_device<B: Buf>(
        &self,
        stream: &DeviceStream,
        packed: PackedAt,
        bufs: &mut [Option<B>],
    ) -> Result<Emptied, Error> {
        // SAFETY: a bucket fills and empties by the same pack with the gradients that it owns. It keeps the packed buffer, or the operation
        // that has it, until the streams wait for the copies, or the host has waited for them. If neither is possible, the bucket leaks the
        // gradients (`leak`). `Bucket::join` also leaks the packed buffer, and `Bucket::unpack` frees it in the order of its own stream, which
        // is the one that copies there.
        unsafe { self.on_device().empty(stream, packed, bufs) }
    }

    /// A device may still write to the gradients, and nobody can tell when it is done: nobody gets them back, and their memory is never freed.
    pub(super) fn leak<B: Buf>(&self, bufs: &mut [Option<B>]) {
        for (i, _) in &self.members {
            std::mem::forget(bufs[*i].take());
        }
    }

    fn on_device(&self) -> Packing<'_> {
        Packing { dtype: self.dtype, len: self.len, members: &self.members }
    }
}
