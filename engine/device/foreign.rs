//! Device memory that someone else owns.

use std::ffi::c_int;

use allstream_sys::cuda::{
    CU_MEMORYTYPE_DEVICE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
};

use super::buf::{DeviceBuf, Source};
use super::stream::DeviceStream;
use crate::error::{Error, Failed};
use crate::types::{DType, Element};

/// Device memory of another library's: an array's storage, say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignMemory {
    /// The device's address of the first element (a `CUdeviceptr`).
    pub pointer: u64,
    /// Number of elements.
    pub len: usize,
    /// Their type.
    pub dtype: DType,
}

impl<T: Element> DeviceBuf<T> {
    /// Makes a buffer of memory that `owner` keeps alive, for use in the order of `stream`.
    ///
    /// `owner` is dropped once the buffer is gone and its stream has done all work put on it before then, as a rule on another thread.
    ///
    /// A communicator that is bound to devices lends ranks in other processes the memory that `cuMemAlloc` gave (CUDA IPC). Once `owner` is
    /// dropped, the memory may be freed even while those processes have it open: none of them reads it any more. The driver then keeps its
    /// pages until another allocation has taken its place, or the communicator is closed.
    ///
    /// # Safety
    /// Until `owner` is dropped:
    /// - `memory.pointer` is valid for reads and writes of `memory.len` elements by work on the device of `stream`;
    /// - when the work that is put on `stream` next begins, all elements hold values of the element type;
    /// - only work that the holder of the buffer puts on the buffer's stream reads or writes them.
    ///
    /// # Errors
    /// [`Failed`] with `owner`. [`Error::Invalid`]: `memory` has another element type, is not aligned for it, or is not memory of
    /// this device. [`Error::Cuda`]: the driver failed when it was asked what the memory is.
    pub unsafe fn from_foreign<O: Send + 'static>(
        memory: ForeignMemory,
        stream: &DeviceStream,
        owner: O,
    ) -> Result<DeviceBuf<T>, Failed<O>> {
        match check::<T>("DeviceBuf::from_foreign", memory, stream) {
            Ok(()) => Ok(DeviceBuf::of(Source::Foreign(Box::new(owner)), memory.pointer, memory.len, stream)),
            Err(error) => Err(Failed { buf: Some(owner), error }),
        }
    }
}

/// Checks what can be known of foreign memory before it is used.
pub(super) fn check<T: Element>(
    call: &str,
    memory: ForeignMemory,
    stream: &DeviceStream,
) -> Result<(), Error> {
    let refuse = |problem: String| Err(Error::invalid(call, problem));
    let ForeignMemory { pointer, len, dtype } = memory;
    if dtype != T::DTYPE {
        return refuse(format!("the memory holds {dtype}, the buffer is to hold {}", T::DTYPE));
    }
    if len == 0 {
        return Ok(());
    }
    if pointer == 0 || !pointer.is_multiple_of(align_of::<T>() as u64) {
        return refuse(format!(
            "{pointer:#x} is no address of a {dtype}, which is a multiple of {} and not 0",
            align_of::<T>()
        ));
    }
    let end = (len as u64).checked_mul(size_of::<T>() as u64).and_then(|bytes| pointer.checked_add(bytes));
    if end.is_none() {
        return refuse(format!("{len} elements at {pointer:#x} are more than any memory has"));
    }
    let context = &stream.0.context;
    let (mut kind, mut ordinal): (u32, c_int) = (0, -1);
    let asked = context.call("ask what a foreign address is of", |cuda| {
        // SAFETY: the driver takes any address; the answer to the first question is an `unsigned int`.
        unsafe {
            cuda.pointer_get_attribute((&raw mut kind).cast(), CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
        }?;
        // SAFETY: as above; the answer to the second is an `int`.
        unsafe {
            cuda.pointer_get_attribute(
                (&raw mut ordinal).cast(),
                CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                pointer,
            )
        }
    });
    match asked {
        Err(Error::Cuda { code: 1, .. }) => {
            refuse(format!("the driver does not know the address {pointer:#x}"))
        }
        Err(error) => Err(error),
        Ok(()) if kind != CU_MEMORYTYPE_DEVICE => {
            refuse(format!("{pointer:#x} is memory of the host, not of a device"))
        }
        Ok(()) if usize::try_from(ordinal) != Ok(context.ordinal) => refuse(format!(
            "{pointer:#x} is on device {ordinal}, the stream is of device {}",
            context.ordinal
        )),
        Ok(()) => Ok(()),
    }
}
