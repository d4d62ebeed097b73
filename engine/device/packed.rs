//! Gradients on a device that are reduced as one buffer: copied into it, and back.

use std::sync::Arc;

use super::packing::{Part, Table, all_wait_for, is_same, pack_on_device, streams, unpack_on_device};
use super::place::DevicePlace;
use super::stream::DeviceStream;
use crate::error::Error;
use crate::mem::{AnyBuf, Buf, Fate, RawBuf};
use crate::types::DType;

/// Gradients of one element type that are packed into one buffer of it.
pub(crate) struct Packing<'a> {
    pub(crate) dtype: DType,
    /// Elements of the buffer.
    pub(crate) len: usize,
    /// Which of the buffers that are given are packed, and the element at which each begins.
    pub(crate) members: &'a [(usize, usize)],
}

impl Packing<'_> {
    /// A buffer with all gradients, in the order of the first one's stream.
    ///
    /// # Errors
    /// Also the failure of an operation that a gradient's contents depend on.
    pub(crate) fn fill<B: Buf>(&self, bufs: &mut [Option<B>]) -> Result<OnDevice, Error> {
        let parts = self.parts(bufs)?;
        parts.iter().try_for_each(|part| part.place.check())?;
        let first = parts.first().ok_or_else(|| not_there(0))?;
        let mut buf = AnyBuf::zeroed_on(&first.place.stream, self.dtype, self.len)?;
        let place = place_of(&mut buf).ok_or_else(|| not_there(0))?;
        // SAFETY: the buffer is new, and has `len` elements of this type, within which all parts lie; gradients are buffers of their own
        // (`parts`), in the order of their streams, and owned by the caller.
        let table = unsafe { pack_on_device((&place, self.bytes()), &parts) }?;
        if let Some(fate) = &place.fate {
            fates(&parts).for_each(|part| fate.depend_like(part));
        }
        Ok(OnDevice { buf, packed: PackedAt { place, table } })
    }

    /// Puts the copies back on `stream`, behind what the buffer's own stream holds. Nobody has made any use of the gradients
    /// since they were copied into the buffer. Their streams, and the buffer's, do not wait for the copies yet ([`Emptied::streams`]).
    ///
    /// # Safety
    /// - `packed` is what `fill` gave for this packing and these gradients, and the buffer that came with it is still there, in this thread's
    ///   hands or in an operation's that is on its stream;
    /// - nothing else is done with the gradients, and the buffer does not go, before those streams wait for the copies.
    pub(crate) unsafe fn empty<B: Buf>(
        &self,
        stream: &DeviceStream,
        packed: PackedAt,
        bufs: &mut [Option<B>],
    ) -> Result<Emptied, Error> {
        let (parts, PackedAt { place, table }) = (self.parts(bufs)?, packed);
        if !is_same(stream, &place.stream) {
            stream.wait_event(&place.stream.point()?)?;
        }
        // SAFETY: the buffer has `len` elements of this type (`fill`) and is there, as the caller promises; the stream has just been made
        // to wait for its own, on which the kernel is that packed the gradients, behind all that was on their streams.
        unsafe { unpack_on_device(stream, (&place, self.bytes()), &table) }?;
        Ok(Emptied { parts, whole: place.fate, packed_on: place.stream, _table: table })
    }

    fn parts<B: Buf>(&self, bufs: &mut [Option<B>]) -> Result<Vec<Part>, Error> {
        let mut part = |&(i, at): &(usize, usize)| {
            let raw = RawBuf::of(bufs[i].as_mut()?);
            let place = raw.on_device()?;
            let (at, bytes) = (at.checked_mul(self.dtype.size())?, raw.bytes());
            at.checked_add(bytes).filter(|end| *end <= self.bytes())?;
            Some(Part { place, at, bytes })
        };
        self.members.iter().map(|member| part(member).ok_or_else(|| not_there(member.0))).collect()
    }

    fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// Gradients of a device, packed.
pub(crate) struct OnDevice {
    pub(crate) buf: AnyBuf,
    pub(crate) packed: PackedAt,
}

/// Where a packed buffer is, also while an operation has it, and the table by which its parts are copied back.
pub(crate) struct PackedAt {
    place: DevicePlace,
    table: Table,
}

impl PackedAt {
    /// The stream in whose order the buffer is.
    pub(crate) fn stream(&self) -> &DeviceStream {
        &self.place.stream
    }
}

/// Gradients that a kernel copies back, on a stream.
pub(crate) struct Emptied {
    parts: Vec<Part>,
    /// What the contents of the packed buffer depend on.
    whole: Option<Arc<Fate>>,
    packed_on: DeviceStream,
    /// Kept until the packed buffer's stream waits for the kernel that reads this table, as its memory goes back in that stream's order.
    _table: Table,
}

impl Emptied {
    /// The streams that are to wait for the copies before anything else is done with the gradients, or the packed buffer goes.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &DeviceStream> {
        streams(&self.parts).chain([&self.packed_on])
    }

    /// They wait for what is on `stream`, where the copies are.
    pub(crate) fn ordered_after(&self, stream: &DeviceStream) -> Result<(), Error> {
        all_wait_for(stream, self.streams().filter(|other| !is_same(other, stream)))
    }

    /// The gradients' contents now depend on the same operations as the packed buffer's.
    pub(crate) fn share_fate(&self) {
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

pub(crate) fn not_there(i: usize) -> Error {
    Error::system("reduce a bucket", format!("the gradient of parameter {i} is not there (a bug)"))
}
