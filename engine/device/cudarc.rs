//! Memory of the `cudarc` crate as buffers of collectives and messages.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use allstream_sys::cuda::CU_STREAM_PER_THREAD;
use cudarc::driver::{CudaSlice, DevicePtrMut};

use super::buf::DeviceBuf;
use super::devices::Device;
use super::foreign::{ForeignMemory, check};
use super::stream::DeviceStream;
use crate::error::{Error, Failed, Members};
use crate::mem::{Buf, Location};
use crate::types::{DType, Element};

const CALL: &str = "CudarcBuf::new";

/// A `cudarc::driver::CudaSlice` as a buffer: every collective and message takes it, and gives it back.
///
/// [`new`](Self::new) takes the slice, [`into_inner`](Self::into_inner) gives it back. In between, all work on the slice is in
/// the order of its own stream. cudarc frees the slice on that stream, too.
///
/// ```
/// use allstream::cuda::CudarcBuf;
/// use cudarc::driver::CudaContext;
/// # async fn reduce(mut comm: allstream::Comm) -> Result<(), Box<dyn std::error::Error>> {
/// let stream = CudaContext::new(0)?.new_stream()?;
/// let grads = stream.clone_htod(&[1.0_f32; 1000])?;
/// let grads = comm.all_reduce(CudarcBuf::new(grads)?).await?.into_inner();
/// # drop(grads); Ok(()) }
/// # let _ = reduce;
/// ```
///
/// *Order with other streams* is left to cudarc. The uses of the slice on other streams that cudarc knows of come before ours, and
/// what cudarc does with the slice afterwards comes after ours. cudarc knows of the last read and the last write on another stream,
/// but of none that was made while `disable_event_tracking` held. What cudarc itself would not wait for is not waited for here.
///
/// *Building.* cudarc is built for one version of CUDA: that of its cargo features, of `nvcc`, or of `CUDARC_CUDA_VERSION` (such as
/// `13000`); without any of these, the newest that it knows. It opens the file `libcuda.so`: if `ALLSTREAM_CUDA_LIBRARY` names
/// another driver, slices are refused.
pub struct CudarcBuf<T: Element> {
    slice: CudaSlice<T>,
    stream: DeviceStream,
    address: u64,
}

impl<T: Element> CudarcBuf<T> {
    /// Takes a slice. No thread of the host waits; the slice's stream waits for the slice's uses on other streams.
    ///
    /// # Errors
    /// [`Failed`] with the slice (always `Some`). [`Error::Invalid`]: the slice is on the per-thread default stream (give it a stream
    /// of `CudaContext::new_stream`), is not in the primary context of its device (that of `CudaContext::new`), or the driver says
    /// that its memory is not on that device. [`Error::Unavailable`]: there is no driver. [`Error::Cuda`]: the driver refuses, or
    /// cudarc had kept an error of an earlier call.
    pub fn new(mut slice: CudaSlice<T>) -> Result<CudarcBuf<T>, Failed<CudaSlice<T>>> {
        match enter(&mut slice) {
            Ok((stream, address)) => Ok(CudarcBuf { slice, stream, address }),
            Err(error) => Err(Failed { buf: Some(slice), error }),
        }
    }

    /// The slice's stream, in whose order the buffer is used.
    pub fn stream(&self) -> &DeviceStream {
        &self.stream
    }

    /// Gives the slice back. What cudarc does with it from now on, on any of its streams, comes after our work.
    pub fn into_inner(mut self) -> CudaSlice<T> {
        let stream = self.slice.stream().clone();
        // This makes cudarc record a write to the slice now, for which its other streams will wait. cudarc keeps an error for its next call.
        drop(self.slice.device_ptr_mut(&stream));
        self.slice
    }

    /// Turns it into a [`DeviceBuf`], which can be copied and split. The slice is dropped after that buffer, in the order of its stream.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn into_device_buf(self) -> Result<DeviceBuf<T>, Failed<CudaSlice<T>>> {
        let CudarcBuf { slice, stream, address } = self;
        let memory = ForeignMemory { pointer: address, len: slice.len(), dtype: T::DTYPE };
        // SAFETY: until the slice is dropped nobody else has this memory, and it holds values of type `T`. The slice's uses on other
        // streams come before what is put on its stream next (`enter`).
        unsafe { DeviceBuf::from_foreign(memory, &stream, slice) }
    }
}

/// Returns the slice's stream as a stream of ours, and the slice's address.
fn enter<T: Element>(slice: &mut CudaSlice<T>) -> Result<(DeviceStream, u64), Error> {
    let refuse = |problem: String| Err(Error::invalid(CALL, problem));
    let stream = slice.stream().clone();
    let raw = stream.cu_stream().cast::<c_void>();
    if raw == CU_STREAM_PER_THREAD.0 {
        return refuse(
            "the slice is on the per-thread default stream, which is another stream on every thread; make it on a \
             stream of CudaContext::new_stream"
                .into(),
        );
    }
    let device = Device::new(slice.ordinal())?;
    if stream.context().cu_ctx().cast::<c_void>() != device.0.raw().0.cast() {
        return refuse(format!(
            "the slice is not in the primary context of device {}; make its context with CudaContext::new (and with \
             the same driver: cudarc opens libcuda.so, this {:?})",
            slice.ordinal(),
            device.0.cuda.file()
        ));
    }
    let len = slice.len();
    // This makes the slice's stream wait for the uses on other streams that cudarc knows of.
    let (address, ordered) = slice.device_ptr_mut(&stream);
    drop(ordered);
    if let Err(error) = stream.context().check_err() {
        return Err(Error::Cuda {
            doing: "take memory over from cudarc".into(),
            device: device.ordinal(),
            call: "cudarc".into(),
            code: error.0 as i32,
            name: format!("{:?}", error.0),
            problem: "cudarc had kept this error from an earlier call, or it failed to make the slice's stream wait"
                .into(),
            members: Members::default(),
        });
    }
    // SAFETY: a stream of the primary context (checked above); it exists as long as cudarc's handle, which is passed along.
    let ours = unsafe { DeviceStream::from_raw_of(&device, raw, Arc::clone(&stream)) }?;
    check::<T>(CALL, ForeignMemory { pointer: address, len, dtype: T::DTYPE }, &ours)?;
    Ok((ours, address))
}

impl<T: Element> fmt::Debug for CudarcBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudarcBuf<{}>({} on {:?})", T::DTYPE, self.slice.len(), self.stream)
    }
}

impl<T: Element> TryFrom<CudaSlice<T>> for CudarcBuf<T> {
    type Error = Failed<CudaSlice<T>>;
    fn try_from(slice: CudaSlice<T>) -> Result<CudarcBuf<T>, Failed<CudaSlice<T>>> {
        CudarcBuf::new(slice)
    }
}

impl<T: Element> From<CudarcBuf<T>> for CudaSlice<T> {
    fn from(buf: CudarcBuf<T>) -> CudaSlice<T> {
        buf.into_inner()
    }
}

// SAFETY: the slice alone owns its memory (its views borrow the slice). The memory stays in place when the slice moves, and holds values
// of type `T`: only `unsafe` functions of cudarc make other slices. The slice's uses on other streams come before what is put on its
// stream (`enter`). cudarc frees the memory on that stream, and waits for it before it uses the memory on another one (`into_inner`).
unsafe impl<T: Element> Buf for CudarcBuf<T> {
    type Elem = T;
    fn len(&self) -> usize {
        self.slice.len()
    }
    fn dtype(&self) -> DType {
        T::DTYPE
    }
    fn location(&mut self) -> Location {
        Location::device(&self.stream, self.address)
    }
}
