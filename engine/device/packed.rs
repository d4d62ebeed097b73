//! Packs gradients on a device into one buffer, so that one operation is enough for all of them, and copies them back out of it.

use std::sync::Arc;

use super::packing::{Part, Table, all_wait_for, is_same, pack_on_device, streams, unpack_on_device};
use super::place::DevicePlace;
use super::stream::DeviceStream;
use crate::error::Error;
use crate::mem::{AnyBuf, Buf, Fate, RawBuf};
use crate::types::DType;

/// Which gradients, all of one element type, are packed into one buffer of that type.
pub(crate) struct Packing<'a> {
    pub(crate) dtype: DType,
    /// Elements of the buffer.
    pub(crate) len: usize,
    /// For each packed gradient: its index in the `bufs` that `fill` and `empty` get, and the element of the buffer at which it begins.
    pub(crate) members: &'a [(usize, usize)],
}

impl Packing<'_> {
    /// Allocates a buffer and copies all gradients into it, in the order of the first gradient's stream.
    ///
    /// # Errors
    /// The buffer cannot be allocated, or the kernel not put on the stream. Also the failure of an operation that a gradient's contents depend on.
    pub(crate) fn fill<B: Buf>(&self, bufs: &mut [Option<B>]) -> Result<OnDevice, Error> {
        let parts = self.parts(bufs)?;
        parts.iter().try_for_each(|part| part.place.check())?;
        let first = parts.first().ok_or_else(|| not_there(0))?;
        let mut buf = AnyBuf::zeroed_on(&first.place.stream, self.dtype, self.len)?;
        let place = place_of(&mut buf).ok_or_else(|| not_there(0))?;
        // SAFETY: the buffer is new, and has `len` elements of this type, within which all parts lie (`parts` checks it). The gradients are
        // separate buffers that the caller owns, each in the order of its own stream.
        let table = unsafe { pack_on_device((&place, self.bytes()), &parts) }?;
        if let Some(fate) = &place.fate {
            fates(&parts).for_each(|part| fate.depend_like(part));
        }
        Ok(OnDevice { buf, packed: PackedAt { place, table } })
    }

    /// Puts a kernel on `stream` that copies the gradients back out of the buffer, behind what the buffer's own stream holds now. The streams
    /// of the gradients and of the buffer do not wait for the copies yet: the caller makes them wait ([`Emptied::streams`]).
    ///
    /// # Safety
    /// - `packed` is what `fill` gave for this packing and these gradients. The buffer that came with it still exists: the caller owns it, or
    ///   an operation that is on the buffer's stream owns it;
    /// - nobody has used the gradients since `fill`, and nobody uses them or frees the buffer before those streams wait for the copies.
    ///
    /// # Errors
    /// The kernel cannot be put on the stream. [`Error::Invalid`]: the stream is of another device than the gradients.
    pub(crate) unsafe fn empty<B: Buf>(
        &self,
        stream: &DeviceStream,
        packed: PackedAt,
        bufs: &mut [Option<B>],
    ) -> Result<Emptied, Error> {
        let (parts, PackedAt { place, table }) = (self.parts(bufs)?, packed);
        if !is_same(stream, &place.stream) {
            stream.wait_for_stream(&place.stream)?;
        }
        // SAFETY: the buffer has `len` elements of this type (`fill`) and exists, as the caller promises. `stream` is the buffer's own or has
        // just been made to wait for it. On the buffer's stream is the kernel that packed the gradients, behind what was on theirs.
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

/// A buffer with packed gradients, on a device.
pub(crate) struct OnDevice {
    pub(crate) buf: AnyBuf,
    pub(crate) packed: PackedAt,
}

/// Where a packed buffer lies, known also while an operation owns the buffer, and the table by which its parts are copied back.
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
    /// The operations that the contents of the packed buffer depend on.
    whole: Option<Arc<Fate>>,
    packed_on: DeviceStream,
    /// The kernel that copies back reads this table, whose memory is freed in the order of the packed buffer's stream. So it
    /// must not be dropped before that stream waits for the kernel.
    _table: Table,
}

impl Emptied {
    /// The streams that must wait for the copies before anything else is done with the gradients, or the packed buffer is freed.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &DeviceStream> {
        streams(&self.parts).chain([&self.packed_on])
    }

    /// Makes the [`streams`](Self::streams) wait for what is on `stream`, on which [`empty`](Packing::empty) has put the copies.
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
