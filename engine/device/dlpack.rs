//! Tensors of DLPack as buffers of a device.

use super::buf::DeviceBuf;
use super::foreign::ForeignMemory;
use super::stream::DeviceStream;
use crate::error::{Error, Failed};
use crate::mem::dlpack::{CALL, DL_CUDA, DeviceName, Tensor};
use crate::types::Element;

impl Tensor {
    /// As a device buffer, in the order of `stream`: the one that the producer was told, or that it has put its work on.
    ///
    /// The deleter is called when the buffer is gone and the stream has come to that point, on another thread.
    ///
    /// # Errors
    /// [`Failed`] with the tensor: [`Error::Invalid`], it is not on the device of the stream (`kDLCUDA`, and the device's
    /// number), or the driver does not know its address as one of that device; otherwise as [`into_host`](Self::into_host);
    /// [`Error::Cuda`].
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
                // SAFETY: whoever made the tensor promised what is asked here, for this stream.
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
