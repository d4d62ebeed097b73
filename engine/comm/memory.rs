//! Where the buffers of an operation are: on the host, or on devices.

use crate::mem::{Buf, Location, RawBuf, Where};
use crate::types::DType;

/// Where the input and the output of a part are on the host.
pub(super) type RawBuffers = (*const u8, *mut u8);

/// Stands for raw buffers whose places on the host are not known yet.
pub(super) const UNSTAGED: RawBuffers = (std::ptr::null(), std::ptr::null_mut());

/// The memory of one part: one buffer in place, or two.
pub(super) struct Memory {
    pub(super) input: Option<RawBuf>,
    pub(super) output: RawBuf,
}

impl Memory {
    /// The memory of a part in place.
    pub(super) fn one<B: Buf>(buf: &mut B) -> Memory {
        Memory { input: None, output: RawBuf::of(buf) }
    }

    /// Host memory of the engine's own: `bytes` bytes, in place.
    pub(super) fn host(at: *mut u8, bytes: usize) -> Memory {
        Memory { input: None, output: RawBuf { place: Location::host(at), len: bytes, dtype: DType::U8 } }
    }

    pub(super) fn two<I: Buf, O: Buf>(input: &mut I, output: &mut O) -> Memory {
        Memory { input: Some(RawBuf::of(input)), output: RawBuf::of(output) }
    }

    /// The type of the elements, which both buffers must have.
    pub(super) fn dtype(&self) -> Result<DType, String> {
        let dtype = self.output.dtype;
        match &self.input {
            Some(input) if input.dtype != dtype => {
                Err(format!("the input holds {}, the output {dtype}: both must be of one type", input.dtype))
            }
            _ => Ok(dtype),
        }
    }

    /// Why no operation can use the memory as it is; `None`: operations can.
    pub(super) fn unfit(&self) -> Option<&'static str> {
        self.input.as_ref().and_then(RawBuf::unfit).or_else(|| self.output.unfit())
    }

    /// Where input and output are on the host. `None`: a buffer is on a device, or no operation can use it.
    pub(super) fn on_host(&self) -> Option<RawBuffers> {
        let Where::Host(output) = self.output.place.0 else { return None };
        match &self.input {
            None => Some((output.cast_const(), output)),
            Some(RawBuf { place: Location(Where::Host(input)), .. }) => Some((input.cast_const(), output)),
            Some(_) => None,
        }
    }
}
