//! Where the buffers of an operation are: on the host, or on devices.

use std::sync::Arc;

use crate::mem::device::{DevicePlace, Fate};
use crate::mem::{Buf, ListMemory, Location, Where};
use crate::types::Element;

/// Where the input and the output of a part are on the host.
pub(super) type RawBuffers = (*const u8, *mut u8);

/// RawBuffers that are not known yet.
pub(super) const UNSTAGED: RawBuffers = (std::ptr::null(), std::ptr::null_mut());

/// A buffer: where it is, and its bytes.
pub(super) struct BufferPlace {
    pub(super) place: Location,
    pub(super) bytes: usize,
}

impl BufferPlace {
    fn of<B: Buf>(buf: &mut B) -> BufferPlace {
        BufferPlace { place: buf.location(), bytes: buf.len() * B::Elem::DTYPE.size() }
    }

    pub(super) fn on_device(&self) -> Option<&DevicePlace> {
        match &self.place.0 {
            Where::Host(_) => None,
            Where::Device(place) => Some(place),
        }
    }

    pub(super) fn fate(&self) -> Option<&Arc<Fate>> {
        self.on_device()?.fate.as_ref()
    }
}

impl From<ListMemory> for BufferPlace {
    fn from(memory: ListMemory) -> BufferPlace {
        BufferPlace { place: memory.place, bytes: memory.len * memory.dtype.size() }
    }
}

/// The memory of one part: one buffer in place, or two.
pub(super) struct Memory {
    pub(super) input: Option<BufferPlace>,
    pub(super) output: BufferPlace,
}

impl Memory {
    /// Of an operation in place.
    pub(super) fn one<B: Buf>(buf: &mut B) -> Memory {
        Memory { input: None, output: BufferPlace::of(buf) }
    }

    /// Memory of the engine's own.
    pub(super) fn host(at: *mut u8, bytes: usize) -> Memory {
        Memory { input: None, output: BufferPlace { place: Location::host(at), bytes } }
    }

    pub(super) fn two<I: Buf, O: Buf>(input: &mut I, output: &mut O) -> Memory {
        Memory { input: Some(BufferPlace::of(input)), output: BufferPlace::of(output) }
    }

    pub(super) fn in_place(memory: ListMemory) -> Memory {
        Memory { input: None, output: memory.into() }
    }

    pub(super) fn apart(input: ListMemory, output: ListMemory) -> Memory {
        Memory { input: Some(input.into()), output: output.into() }
    }

    /// `None`: a part of it is on a device.
    pub(super) fn on_host(&self) -> Option<RawBuffers> {
        let Where::Host(output) = self.output.place.0 else { return None };
        match &self.input {
            None => Some((output.cast_const(), output)),
            Some(BufferPlace { place: Location(Where::Host(input)), .. }) => {
                Some((input.cast_const(), output))
            }
            Some(_) => None,
        }
    }
}
