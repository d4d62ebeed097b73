//! Buffers given to other libraries as DLPack tensors.

use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};

use super::abi::{
    DL_CPU, DL_CUDA, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, VERSION,
};
use super::tensor::MAX_DIMENSIONS;
use crate::error::{Error, Failed};
use crate::mem::{Buf, Where};

/// A buffer that is about to be given away as a DLPack tensor: [`export`] makes it.
#[must_use = "nobody has the tensor until one of the `into_` functions gives it"]
pub struct Export<B: Buf> {
    buf: B,
    tensor: DLTensor,
    /// The lengths of all dimensions, then their strides.
    dims: Vec<i64>,
}

// SAFETY: the only pointer in `tensor` that is not null is to memory of `buf`, which is `Send`.
unsafe impl<B: Buf> Send for Export<B> {}

/// Makes a buffer, on the host or on a device, ready to be given to another library as a tensor of this shape, row by row
/// without gaps.
///
/// Nothing is copied, and the other library becomes the memory's only user. The buffer is dropped when that library calls
/// the tensor's deleter, once, on any thread.
///
/// *Order.* A device buffer is used in the order of its stream, so the other library must put its work on that stream. In
/// Python, `__dlpack__(stream=..)` names the stream that the consumer will use. First move the buffer to that stream:
/// [`DeviceBuf::on`](crate::cuda::DeviceBuf::on), with a [`DeviceStream`](crate::cuda::DeviceStream) made by `from_raw`. Then the
/// consumer's work comes after ours, and we use the memory again only after that work, however early the deleter is called.
///
/// Pinned memory is exported as ordinary host memory.
///
/// ```
/// use allstream::dlpack::{self, Tensor};
/// let raw = dlpack::export(vec![1.0_f32; 6], &[2, 3])?.into_versioned();
/// // `raw` goes to a capsule named "dltensor_versioned", say; whoever takes it calls its deleter.
/// // SAFETY: a tensor of our own, which nobody else has.
/// let tensor = unsafe { Tensor::from_versioned(raw.as_ptr()) }?;
/// assert_eq!(tensor.shape(), [2, 3]);
/// let rows = tensor.into_host::<f32>()?;
/// assert_eq!(*rows, [1.0; 6]);
/// # Ok::<(), allstream::Error>(())
/// ```
///
/// # Errors
/// [`Failed`] with the buffer (always `Some`) and [`Error::Invalid`]: the shape has another number of elements than the
/// buffer, or more than 64 dimensions, or no operation can use the buffer. If the collective that wrote a device buffer has failed, the
/// error is that failure's cause.
pub fn export<B: Buf>(mut buf: B, shape: &[usize]) -> Result<Export<B>, Failed<B>> {
    let place = buf.location().0;
    let problem = match place {
        Where::Unfit(why) => Some(why.to_owned()),
        _ => misshapen(shape, buf.len()),
    };
    if let Some(problem) = problem {
        return Err(Failed { buf: Some(buf), error: Error::invalid("dlpack::export", problem) });
    }
    if let Where::Device(place) = &place
        && let Err(error) = place.check()
    {
        return Err(Failed { buf: Some(buf), error });
    }
    let (data, device) = match place {
        Where::Host(start) => (start.cast::<c_void>(), DLDevice { device_type: DL_CPU, device_id: 0 }),
        // Refused above.
        Where::Unfit(_) => (null_mut(), DLDevice { device_type: DL_CPU, device_id: 0 }),
        Where::Device(place) => {
            let device_id = i32::try_from(place.order.device().0).unwrap_or(i32::MAX);
            let data = std::ptr::without_provenance_mut(place.address as usize);
            (data, DLDevice { device_type: DL_CUDA, device_id })
        }
    };
    let strides = (0..shape.len()).map(|at| shape[at + 1..].iter().fold(1, |all, n| (*n).max(1) * all));
    let dims = shape.iter().copied().chain(strides).map(|n| n as i64).collect();
    let tensor = DLTensor {
        // `dlpack.h` asks for a null pointer if there are no elements.
        data: if buf.is_empty() { null_mut() } else { data },
        device,
        ndim: shape.len() as i32,
        dtype: DLDataType::of(buf.dtype()),
        shape: null_mut(),
        strides: null_mut(),
        byte_offset: 0,
    };
    Ok(Export { buf, tensor, dims })
}

/// Why this shape does not fit `len` elements. `None`: it does, and each of its lengths and strides fits an `i64`.
fn misshapen(shape: &[usize], len: usize) -> Option<String> {
    if shape.len() > MAX_DIMENSIONS {
        return Some(format!("{} dimensions, and libraries take at most {MAX_DIMENSIONS}", shape.len()));
    }
    // The product without the zeros: in a shape with a zero, the other lengths must fit as well.
    let lens = || shape.iter().copied();
    let span = lens().filter(|n| *n > 0).try_fold(1_usize, usize::checked_mul);
    let elements = if lens().any(|n| n == 0) { Some(0) } else { span };
    match (span, elements) {
        (Some(span), Some(elements)) if elements == len && i64::try_from(span).is_ok() => None,
        (Some(_), Some(elements)) => {
            Some(format!("the shape {shape:?} is of {elements} elements, the buffer has {len}"))
        }
        _ => Some(format!("the shape {shape:?} is of more elements than any memory has")),
    }
}

/// What a tensor's `manager_ctx` points to. The tensor is a part of it, and is freed with it.
struct Holder<M, B> {
    managed: M,
    _dims: Vec<i64>,
    _buf: B,
}

impl<B: Buf> Export<B> {
    /// The tensor in DLPack's current form, for a capsule named `dltensor_versioned`. The caller owns it: whoever holds it
    /// must call its deleter once. If nobody does, the buffer leaks.
    pub fn into_versioned(self) -> NonNull<DLManagedTensorVersioned> {
        self.leak(
            |dl_tensor| DLManagedTensorVersioned {
                version: VERSION,
                manager_ctx: null_mut(),
                deleter: Some(delete_versioned::<B>),
                flags: 0,
                dl_tensor,
            },
            |managed| &raw mut managed.manager_ctx,
        )
    }

    /// The tensor in DLPack's older form, for a capsule named `dltensor`. Otherwise as [`into_versioned`](Self::into_versioned).
    pub fn into_legacy(self) -> NonNull<DLManagedTensor> {
        self.leak(
            |dl_tensor| DLManagedTensor {
                dl_tensor,
                manager_ctx: null_mut(),
                deleter: Some(delete_legacy::<B>),
            },
            |managed| &raw mut managed.manager_ctx,
        )
    }

    /// The buffer, which is not given away after all.
    pub fn into_inner(self) -> B {
        self.buf
    }

    fn leak<M>(
        self,
        managed: impl FnOnce(DLTensor) -> M,
        slot: fn(&mut M) -> *mut *mut c_void,
    ) -> NonNull<M> {
        let Export { buf, mut tensor, mut dims } = self;
        let ndim = dims.len() / 2;
        // The numbers lie on the heap, and stay there when the vector moves.
        let (shape, strides) = dims.split_at_mut(ndim);
        (tensor.shape, tensor.strides) = (shape.as_mut_ptr(), strides.as_mut_ptr());
        let holder = Box::new(Holder { managed: managed(tensor), _dims: dims, _buf: buf });
        let holder = Box::into_raw(holder);
        // SAFETY: the holder was just made, and nobody else knows of it.
        let managed = unsafe { &mut (*holder).managed };
        // SAFETY: `slot` gives the address of a field of `managed`.
        unsafe { slot(managed).write(holder.cast()) };
        NonNull::from(managed)
    }
}

impl<B: Buf> fmt::Debug for Export<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = &self.dims[..self.dims.len() / 2];
        write!(f, "Export({} {shape:?})", self.buf.dtype())
    }
}

unsafe extern "C" fn delete_versioned<B: Buf>(this: *mut DLManagedTensorVersioned) {
    if !this.is_null() {
        // SAFETY: the deleter is called with its tensor, once; `manager_ctx` is what `into_versioned` wrote.
        unsafe { drop_holder::<DLManagedTensorVersioned, B>((*this).manager_ctx) };
    }
}

unsafe extern "C" fn delete_legacy<B: Buf>(this: *mut DLManagedTensor) {
    if !this.is_null() {
        // SAFETY: the deleter is called with its tensor, once; `manager_ctx` is what `into_legacy` wrote.
        unsafe { drop_holder::<DLManagedTensor, B>((*this).manager_ctx) };
    }
}

/// # Safety
/// `context` points to the holder that `leak` boxed with these types, and this is the only call with it.
unsafe fn drop_holder<M, B: Buf>(context: *mut c_void) {
    // SAFETY: as the caller promises.
    let holder = unsafe { Box::from_raw(context.cast::<Holder<M, B>>()) };
    // A panic must not unwind into the other library's code.
    if catch_unwind(AssertUnwindSafe(|| drop(holder))).is_err() {
        tracing::error!("a buffer that was given away panicked when it was dropped");
    }
}
