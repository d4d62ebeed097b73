//! A pack: small gradients of one element type that are reduced as one buffer, and how they get into it and back.

use super::layout::Param;
use crate::device::{ALIGNED, DeviceStream, Emptied, OnDevice, PackedAt, Packing, not_there};
use crate::error::Error;
use crate::mem::{AnyBuf, Buf, elements};
use crate::types::DType;

/// Parameters of one element type whose gradients are copied into one buffer, all on the host or all on a device.
#[derive(Clone)]
pub(super) struct Pack {
    /// Of the gradients.
    pub(super) dtype: DType,
    /// Of the buffer into which they are packed: another one where they are compressed.
    pub(super) wire: DType,
    /// The parameters, and the element at which each begins.
    pub(super) members: Vec<(usize, usize)>,
    /// Elements of the buffer.
    pub(super) len: usize,
}

impl Pack {
    /// One for gradients like this one, without any.
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

    /// On the host: copies the gradients into the buffer. `residuals`: what rounding has taken from each parameter.
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

    /// On the host: the same back.
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

    /// On a device: a buffer with all gradients, in the order of the first one's stream.
    ///
    /// # Errors
    /// Also the failure of an operation that a gradient's contents depend on.
    pub(super) fn filled_on_device<B: Buf>(&self, bufs: &mut [Option<B>]) -> Result<OnDevice, Error> {
        self.on_device().fill(bufs)
    }

    /// On a device: puts the copies back on `stream`, behind what the buffer's own stream holds. Nobody has made any use of the gradients
    /// since they were copied into the buffer. Their streams, and the buffer's, do not wait for the copies yet ([`Emptied::streams`]).
    pub(super) fn emptied_on_device<B: Buf>(
        &self,
        stream: &DeviceStream,
        packed: PackedAt,
        bufs: &mut [Option<B>],
    ) -> Result<Emptied, Error> {
        // SAFETY: a bucket fills and empties by the same pack with the gradients that it owns. It keeps the packed buffer, or the operation
        // that has it, until the streams wait for the copies (`Emptied::ordered_after`), and leaks it where they cannot be made to.
        unsafe { self.on_device().empty(stream, packed, bufs) }
    }

    fn on_device(&self) -> Packing<'_> {
        Packing { dtype: self.dtype, len: self.len, members: &self.members }
    }
}
