//! A pack: small gradients of one element type that are reduced as one buffer, and how they get into it and back.

use std::sync::Arc;

use super::layout::Param;
use crate::device::{
    ALIGNED, DevicePlace, DeviceStream, Part, Table, all_wait_for, is_same, pack_on_device, streams,
    unpack_on_device,
};
use crate::error::Error;
use crate::mem::{AnyBuf, Buf, Fate, RawBuf, elements};
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
        let parts = self.parts(bufs)?;
        parts.iter().try_for_each(|part| part.place.check())?;
        let first = parts.first().ok_or_else(|| not_there(0))?;
        let mut buf = AnyBuf::zeroed_on(&first.place.stream, self.dtype, self.len)?;
        let place = place_of(&mut buf).ok_or_else(|| not_there(0))?;
        // SAFETY: the buffer is new, and has `len` elements of this type; gradients are buffers of their own (`parts`), in the order of
        // their streams, and owned by the caller.
        let table = unsafe { pack_on_device((&place, self.bytes()), &parts) }?;
        if let Some(fate) = &place.fate {
            fates(&parts).for_each(|part| fate.depend_like(part));
        }
        Ok(OnDevice { buf, packed: PackedAt { place, table } })
    }

    /// On a device: puts the copies back on `stream`, behind what the buffer's own stream holds. Nobody has made any use of the gradients
    /// since they were copied into the buffer. Their streams, and the buffer's, do not wait for the copies yet ([`Emptied::streams`]).
    pub(super) fn emptied_on_device<B: Buf>(
        &self,
        stream: &DeviceStream,
        packed: PackedAt,
        bufs: &mut [Option<B>],
    ) -> Result<Emptied, Error> {
        let (parts, PackedAt { place, table }) = (self.parts(bufs)?, packed);
        if !is_same(stream, &place.stream) {
            stream.wait_event(&place.stream.point()?)?;
        }
        // SAFETY: the buffer has `len` elements of this type (`filled_on_device`), and the stream has just been made to wait for its own, on
        // which the kernel is that packed the gradients, behind all that was on their streams.
        unsafe { unpack_on_device(stream, (&place, self.bytes()), &table) }?;
        Ok(Emptied { parts, whole: place.fate, packed_on: place.stream, _table: table })
    }

    fn parts<B: Buf>(&self, bufs: &mut [Option<B>]) -> Result<Vec<Part>, Error> {
        let mut part = |&(i, at): &(usize, usize)| {
            let raw = RawBuf::of(bufs[i].as_mut()?);
            let place = raw.on_device()?;
            Some(Part { place, at: at * self.dtype.size(), bytes: raw.bytes() })
        };
        self.members.iter().map(|member| part(member).ok_or_else(|| not_there(member.0))).collect()
    }

    fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// Gradients of a device, packed.
pub(super) struct OnDevice {
    pub(super) buf: AnyBuf,
    pub(super) packed: PackedAt,
}

/// Where a packed buffer is, also while an operation has it, and the table by which its parts are copied back.
pub(super) struct PackedAt {
    place: DevicePlace,
    table: Table,
}

impl PackedAt {
    /// The stream in whose order the buffer is.
    pub(super) fn stream(&self) -> &DeviceStream {
        &self.place.stream
    }
}

/// Gradients that a kernel copies back, on a stream.
pub(super) struct Emptied {
    parts: Vec<Part>,
    /// What the contents of the packed buffer depend on.
    whole: Option<Arc<Fate>>,
    packed_on: DeviceStream,
    /// Kept until the packed buffer's stream waits for the kernel that reads this table, as its memory goes back in that stream's order.
    _table: Table,
}

impl Emptied {
    /// The streams that are to wait for the copies before anything else is done with the gradients, or the packed buffer goes.
    pub(super) fn streams(&self) -> impl Iterator<Item = &DeviceStream> {
        streams(&self.parts).chain([&self.packed_on])
    }

    /// They wait for what is on `stream`, where the copies are.
    pub(super) fn ordered_after(&self, stream: &DeviceStream) -> Result<(), Error> {
        all_wait_for(stream, self.streams().filter(|other| !is_same(other, stream)))
    }

    /// The gradients' contents now depend on the same operations as the packed buffer's.
    pub(super) fn share_fate(&self) {
        if let Some(whole) = &self.whole {
            fates(&self.parts).for_each(|part| part.depend_like(whole));
        }
    }
}

fn fates(parts: &[Part]) -> impl Iterator<Item = &Arc<Fate>> {
    parts.iter().filter_map(|part| part.place.fate.as_ref())
}

fn place_of(buf: &mut AnyBuf) -> Option<DevicePlace> {
    RawBuf::of(buf).on_device()
}

pub(super) fn not_there(i: usize) -> Error {
    Error::system("reduce a bucket", format!("the gradient of parameter {i} is not there (a bug)"))
}
