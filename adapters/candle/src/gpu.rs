//! Tensors on a CUDA device: from candle's memory to the buffers of the engine, and back, in the order of candle's stream.

use std::ops::Range;
use std::sync::Arc;

use allstream::cuda::{CudarcBuf, DeviceStream};
use allstream::{AnyBuf, Element, Ordered, Work};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{Device, Layout, Result, Storage, Tensor, bail};

use crate::collective::{Collective, of_tensor, on_device, range, with_values};
use crate::error::failed;

/// The driver's handle (`CU_STREAM_PER_THREAD`) for a stream of which every thread has its own. `Device::new_cuda` makes devices that use it.
const PER_THREAD: usize = 2;

/// The stream of a device's tensors. It must be the same stream on all threads.
fn stream_of(name: &str, device: &CudaDevice) -> Result<Arc<CudaStream>> {
    let stream = device.cuda_stream();
    if stream.cu_stream() as usize == PER_THREAD {
        bail!(
            "{name}: the tensor is in the order of the per-thread stream, which is another one on every thread, expected one of its own: \
             make the device with Device::new_cuda_with_stream"
        );
    }
    Ok(stream)
}

/// Whether a tensor that is not on the CPU can be used here.
pub(crate) fn check(name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.device() {
        Device::Cuda(device) => stream_of(name, device).map(drop),
        _ => Err(on_device(name)),
    }
}

fn buffer<T: Element>(name: &str, slice: CudaSlice<T>) -> Result<CudarcBuf<T>> {
    CudarcBuf::new(slice).map_err(|refused| failed(format!("{name} of a tensor on a GPU"), refused.error))
}

/// Makes `stream` wait for a collective, and returns the collective's result, which may be used in the order of that stream.
pub(crate) fn in_order<O: Send + 'static, F: Send + 'static>(
    stream: &DeviceStream,
    work: Work<O, F>,
) -> Result<O> {
    let ordered = work.join(stream).and_then(Ordered::in_order);
    ordered.map_err(|refused| failed("run a collective on a GPU", refused.error))
}

/// Runs a collective on a slice that nothing else uses.
fn run<T: Element + DeviceRepr + ValidAsZeroBits>(
    op: &impl Collective,
    device: &CudaDevice,
    slice: CudaSlice<T>,
) -> Result<CudaSlice<T>> {
    let room = |len: usize| buffer(op.name(), device.alloc_zeros::<T>(len)?);
    op.run_on_device(buffer(op.name(), slice)?, &room).map(CudarcBuf::into_inner)
}

/// Runs a collective on a copy of the input, made on the device, and gives its result as a new storage.
pub(crate) fn apply(op: &impl Collective, storage: &CudaStorage, layout: &Layout) -> Result<CudaStorage> {
    let (device, stream) = (storage.device.clone(), stream_of(op.name(), &storage.device)?);
    let ran: Result<CudaStorageSlice> = with_values!(CudaStorageSlice: &storage.slice, op.name(), (slice, wrap) => {
        let copy = stream.clone_dtod(&slice.slice(range(op.name(), layout, slice.len())?)).w()?;
        run(op, &device, copy).map(wrap)
    });
    let slice = ran.map_err(|error| of_shape(op.name(), storage, layout, error))?;
    Ok(CudaStorage { slice, device })
}

/// Runs a collective in the storage of a tensor. If the tensor is all of its storage, nothing is copied. If it is a part, its elements are
/// copied out, and the result is copied back in. After a failure the values are unspecified, and as many as before, if there is memory for them.
pub(crate) fn apply_in_place(op: &impl Collective, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
    let stream = stream_of(op.name(), &storage.device)?;
    let device = storage.device.clone();
    let ran: Result<()> = with_values!(CudaStorageSlice: &mut storage.slice, op.name(), (slice, _wrap) => {
        let range = range(op.name(), layout, slice.len())?;
        in_place(op, (&device, &stream), slice, range)
    });
    ran.map_err(|error| of_shape(op.name(), storage, layout, error))
}

fn in_place<T: Element + DeviceRepr + ValidAsZeroBits>(
    op: &impl Collective,
    (device, stream): (&CudaDevice, &Arc<CudaStream>),
    slice: &mut CudaSlice<T>,
    range: Range<usize>,
) -> Result<()> {
    let len = slice.len();
    if range != (0..len) {
        let ran = run(op, device, stream.clone_dtod(&slice.slice(range.clone())).w()?)?;
        return device.memcpy_dtod(&ran, &mut slice.slice_mut(range));
    }
    let all = std::mem::replace(slice, stream.null::<T>().w()?);
    match run(op, device, all) {
        Ok(all) => {
            *slice = all;
            Ok(())
        }
        Err(error) => {
            // The buffer does not come back, as the operation may still touch it. The tensor gets zeros, as it must have all its elements.
            if let Ok(zeros) = device.alloc_zeros::<T>(len) {
                *slice = zeros;
            }
            Err(error)
        }
    }
}

/// The error of a collective on a tensor, with its type and shape.
fn of_shape(
    name: &str,
    storage: &CudaStorage,
    layout: &Layout,
    error: candle_core::Error,
) -> candle_core::Error {
    match crate::cause(&error) {
        Some(cause) => of_tensor(name, layout, storage.dtype(), cause.clone()),
        None => error,
    }
}

/// A copy of the elements of a contiguous tensor, on its device.
pub(crate) fn to_buf(name: &str, tensor: &Tensor) -> Result<AnyBuf> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return Err(on_device(name)) };
    let stream = stream_of(name, &storage.device)?;
    with_values!(CudaStorageSlice: &storage.slice, name, (slice, _wrap) => {
        let copy = stream.clone_dtod(&slice.slice(range(name, layout, slice.len())?)).w()?;
        buffer(name, copy).map(AnyBuf::new)
    })
}

/// Makes a tensor of a buffer of floats that [`to_buf`] has made, with the shape and on the device of `like`. It takes the buffer over:
/// nothing is copied.
pub(crate) fn from_buf(name: &str, buf: AnyBuf, like: &Tensor) -> Result<Tensor> {
    let take_f32 =
        |buf: AnyBuf| buf.into_inner().map(|buf| CudaStorageSlice::F32(CudarcBuf::into_inner(buf)));
    let slice = take_f32(buf)
        .or_else(|buf| buf.into_inner().map(|buf| CudaStorageSlice::F64(CudarcBuf::into_inner(buf))))
        .or_else(|buf| buf.into_inner().map(|buf| CudaStorageSlice::BF16(CudarcBuf::into_inner(buf))))
        .or_else(|buf| buf.into_inner().map(|buf| CudaStorageSlice::F16(CudarcBuf::into_inner(buf))));
    match slice {
        Ok(slice) => {
            let storage = CudaStorage { slice, device: like.device().as_cuda_device()?.clone() };
            Ok(Tensor::from_storage(Storage::Cuda(storage), like.shape(), BackpropOp::none(), false))
        }
        Err(buf) => bail!("{name}: {buf:?} came back, expected the slice that was given (a bug)"),
    }
}
