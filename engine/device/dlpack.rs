//! Tensors of DLPack as buffers of a device.

use super::buf::DeviceBuf;
use super::foreign::ForeignMemory;
use super::stream::DeviceStream;
use crate::error::{Error, Failed};
use crate::mem::dlpack::{CALL, DL_CUDA, DeviceName, Tensor};
use crate::types::Element;

impl Tensor {
    /// Turns the tensor into a device buffer in the order of `stream`: the one that the producer was told of, or on which it has put its work.
    ///
    /// The deleter is called once the buffer is dropped and the stream has done what it held at the drop, as a rule on another thread.
    ///
    /// # Errors
    /// [`Failed`] with the tensor. [`Error::Invalid`]: the tensor is not on the device of the stream (`kDLCUDA`, and the device's
    /// number); the driver does not know its address as one of that device; or [`into_host`](Self::into_host) would refuse it, too,
    /// for another reason than its device.
    /// [`Error::Cuda`]: the driver failed when it was asked about the address.
    pub fn into_device<T: Element>(self, stream: &DeviceStream) -> Result<DeviceBuf<T>, Failed<Tensor>> {
        let ordinal = stream.device().ordinal();
        let device = self.device();
        let found = match device.device_type {
            DL_CUDA if usize::try_from(device.device_id) != Ok(ordinal) => {
                Err(format!("the tensor is on {}, the stream is of device {ordinal}", DeviceName(device)))
            }
            DL_CUDA => self.elements::<T>(),
            _ => Err(format!("the tensor is on {}, not on a CUDA device", DeviceName(device))),
        };
        match found {
            Ok((len, pointer)) => {
                let memory = ForeignMemory { pointer, len, dtype: T::DTYPE };
                // SAFETY: whoever made the tensor (`from_versioned`, `from_legacy`) promised what `from_foreign` asks for, on this stream.
                let made = unsafe { DeviceBuf::from_foreign(memory, stream, self) };
                made.map_err(|failed| match failed.error {
                    Error::Invalid { problem, .. } => {
                        Failed { error: Error::invalid(CALL, problem), ..failed }
                    }
                    _ => failed,
                })
            }
            Err(problem) => Err(Failed { buf: Some(self), error: Error::invalid(CALL, problem) }),
        }
    }
}
