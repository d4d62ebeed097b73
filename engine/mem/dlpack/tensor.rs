//! DLPack tensors that other libraries have given to this process, and buffers made of them.

use std::fmt;
use std::ptr::NonNull;

use super::abi::{
    DL_CPU, DL_CUDA, DL_CUDA_HOST, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor,
    FLAG_READ_ONLY, VERSION,
};
use crate::error::{Error, Failed};
use crate::mem::{OwnedSlice, SliceOwner};
use crate::types::{DType, Element};

/// The most dimensions that a tensor may have here: as many as NumPy takes.
pub(super) const MAX_DIMENSIONS: usize = 64;

pub(crate) const CALL: &str = "dlpack import";

/// A DLPack tensor that another library has given away to us. Its deleter is called once: when this value is dropped, or, if a buffer was made
/// of it, when nobody uses that buffer any more.
///
/// [`into_host`](Self::into_host) and [`into_device`](Self::into_device) make a buffer of the tensor. They check all that can be checked.
pub struct Tensor {
    managed: Managed,
    /// A copy of the `DLTensor` in `managed`.
    tensor: DLTensor,
    read_only: bool,
}

enum Managed {
    Versioned(NonNull<DLManagedTensorVersioned>),
    Legacy(NonNull<DLManagedTensor>),
}

impl Drop for Managed {
    fn drop(&mut self) {
        match self {
            // SAFETY: whoever made the `Tensor` promised a valid tensor that is ours; its deleter is called here only.
            Managed::Versioned(managed) => unsafe {
                let deleter = (*managed.as_ptr()).deleter;
                deleter.into_iter().for_each(|delete| delete(managed.as_ptr()));
            },
            // SAFETY: as above.
            Managed::Legacy(managed) => unsafe {
                let deleter = (*managed.as_ptr()).deleter;
                deleter.into_iter().for_each(|delete| delete(managed.as_ptr()));
            },
        }
    }
}

// SAFETY: whoever makes one promises that it may be used and deleted on any thread, and that nobody else uses it.
unsafe impl Send for Tensor {}
// SAFETY: `&Tensor` gives numbers that nobody changes.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Takes a tensor in DLPack's present form, to which a Python capsule named `dltensor_versioned` points.
    ///
    /// # Safety
    /// `managed` is null, or points to a tensor as DLPack defines it, which the caller owns and now gives away (the caller renames a
    /// capsule to `used_dltensor_versioned`). If it is of another major version, only the fields before `dl_tensor` are looked at.
    /// Until its deleter is called:
    /// - `shape` and, unless it is null, `strides` have `ndim` numbers, which nobody changes;
    /// - the memory is valid for reads and writes of all elements that the tensor describes, and holds values of its type
    ///   (a `bool` is 0 or 1);
    /// - nobody else reads or writes the memory, not even the library that the tensor is from;
    /// - for memory of a CUDA device the last two points hold for work on the stream given to [`into_device`](Self::into_device) that
    ///   is put there after that call. A producer makes sure of this for the stream that `__dlpack__(stream=..)` of Python names.
    ///
    /// The deleter may be called on any thread, also on one that operations need to go on, so it must not wait for an operation. (If
    /// it takes Python's lock, nobody may hold that lock while waiting for an operation.)
    ///
    /// # Errors
    /// [`Error::Invalid`]: `managed` is null; the major version is not 1; the dimensions are fewer than 0 or more than 64; or the
    /// tensor has dimensions and a null `shape`. Unless `managed` is null, the deleter has been called.
    pub unsafe fn from_versioned(managed: *mut DLManagedTensorVersioned) -> Result<Tensor, Error> {
        let Some(at) = NonNull::new(managed) else { return Err(null()) };
        // From here on every error drops `managed`, and so calls the deleter.
        let managed = Managed::Versioned(at);
        // SAFETY: a tensor, as the caller promises; what precedes `dl_tensor` has this layout in every version.
        let (version, flags) = unsafe { ((*at.as_ptr()).version, (*at.as_ptr()).flags) };
        if version.major != VERSION.major {
            let problem = format!(
                "the tensor is of DLPack {}.{}, and only version {} is known",
                version.major, version.minor, VERSION.major
            );
            return Err(Error::invalid(CALL, problem));
        }
        // SAFETY: as above, and the tensor is of our major version.
        let tensor = unsafe { (*at.as_ptr()).dl_tensor };
        Tensor::of(managed, tensor, flags & FLAG_READ_ONLY != 0)
    }

    /// Takes a tensor in DLPack's older form, to which a Python capsule named `dltensor` points.
    ///
    /// # Safety
    /// As for [`from_versioned`](Self::from_versioned). This form does not say whether the memory is read-only, so the caller promises
    /// that it may be written to.
    ///
    /// # Errors
    /// As [`from_versioned`](Self::from_versioned).
    pub unsafe fn from_legacy(managed: *mut DLManagedTensor) -> Result<Tensor, Error> {
        let Some(at) = NonNull::new(managed) else { return Err(null()) };
        let managed = Managed::Legacy(at);
        // SAFETY: a tensor, as the caller promises.
        let tensor = unsafe { (*at.as_ptr()).dl_tensor };
        Tensor::of(managed, tensor, false)
    }

    fn of(managed: Managed, tensor: DLTensor, read_only: bool) -> Result<Tensor, Error> {
        let known = usize::try_from(tensor.ndim).is_ok_and(|ndim| ndim <= MAX_DIMENSIONS);
        if !known {
            let problem =
                format!("the tensor has {} dimensions: expected 0 to {MAX_DIMENSIONS}", tensor.ndim);
            return Err(Error::invalid(CALL, problem));
        }
        if tensor.ndim > 0 && tensor.shape.is_null() {
            return Err(Error::invalid(CALL, "the tensor has no shape (a null pointer)"));
        }
        Ok(Tensor { managed, tensor, read_only })
    }

    /// The length of each dimension. A tensor without dimensions is one element.
    pub fn shape(&self) -> &[i64] {
        self.numbers(self.tensor.shape)
    }

    /// The numbers at `at`, one for each dimension: the tensor's shape or its strides. Empty if `at` is null.
    fn numbers(&self, at: *const i64) -> &[i64] {
        let ndim = self.tensor.ndim as usize;
        if ndim == 0 || at.is_null() {
            return &[];
        }
        // SAFETY: whoever made this promised `ndim` numbers until the deleter is called, and `self` calls it when it is dropped.
        unsafe { std::slice::from_raw_parts(at, ndim) }
    }

    /// The type of its elements, if it is one of ours.
    pub fn dtype(&self) -> Option<DType> {
        self.tensor.dtype.dtype()
    }

    /// The device on which its memory is.
    pub fn device(&self) -> DLDevice {
        self.tensor.device
    }

    /// The number of elements, and the address of the first (0 if there are none). Nothing is read at that address.
    pub(crate) fn elements<T: Element>(&self) -> Result<(usize, u64), String> {
        if self.dtype() != Some(T::DTYPE) {
            return Err(format!("the tensor holds {}, the buffer is to hold {}", TypeName(self), T::DTYPE));
        }
        if self.read_only {
            return Err("the tensor is read-only, and operations write to it: ask for a copy".into());
        }
        let shape = self.shape();
        if shape.iter().any(|n| *n < 0) {
            return Err(format!("the shape {shape:?} has a negative length"));
        }
        let len = shape.iter().try_fold(1_usize, |all, n| all.checked_mul(usize::try_from(*n).ok()?));
        let len = if shape.contains(&0) { Some(0) } else { len };
        let size = size_of::<T>();
        let Some(len) =
            len.filter(|len| len.checked_mul(size).is_some_and(|bytes| bytes <= isize::MAX as usize))
        else {
            return Err(format!("the shape {shape:?} is of more elements than any memory has"));
        };
        if len == 0 {
            return Ok((0, 0));
        }
        self.compact(shape)?;
        let data = self.tensor.data.addr() as u64;
        if data == 0 {
            return Err(format!("the tensor has {len} elements and no memory (a null pointer)"));
        }
        let start = data.checked_add(self.tensor.byte_offset);
        let end = start.and_then(|start| start.checked_add((len * size) as u64));
        match (start, end) {
            (Some(start), Some(_)) if start.is_multiple_of(align_of::<T>() as u64) => Ok((len, start)),
            (Some(start), Some(_)) => Err(format!(
                "{start:#x} is no address of a {}, which is a multiple of {}",
                T::DTYPE,
                align_of::<T>()
            )),
            _ => Err(format!(
                "{len} elements, {} bytes after {data:#x}, end beyond the last address that there is",
                self.tensor.byte_offset
            )),
        }
    }

    /// Checks that the elements lie one after another in row-major order. The stride of a dimension of length 1 has no meaning.
    fn compact(&self, shape: &[i64]) -> Result<(), String> {
        let strides = self.numbers(self.tensor.strides);
        let mut expected = 1_i64;
        for (stride, n) in strides.iter().zip(shape).rev() {
            if *n != 1 && *stride != expected {
                return Err(format!(
                    "the tensor has strides {strides:?} for the shape {shape:?}: its elements do not lie one after \
                     another in row-major order; make it contiguous first"
                ));
            }
            expected = expected.saturating_mul(*n);
        }
        Ok(())
    }

    /// Makes a buffer of the tensor, in the host's memory and without a copy.
    ///
    /// # Errors
    /// [`Failed`] with the tensor (always `Some`) and [`Error::Invalid`]: it is not in the host's memory (`kDLCPU`,
    /// `kDLCUDAHost`); its elements are not of type `T`, or not aligned for it; it is not contiguous; it is read-only; or its
    /// shape, offset or address is impossible.
    pub fn into_host<T: Element>(self) -> Result<HostTensor<T>, Failed<Tensor>> {
        let device = self.tensor.device;
        let found = match device.device_type {
            DL_CPU | DL_CUDA_HOST => self.elements::<T>(),
            _ => Err(format!("the tensor is on {}, not in the host's memory", DeviceName(device))),
        };
        match found {
            Ok((len, _)) => {
                // Made from the tensor's own pointer, not from the address that `elements` gives, so it keeps that pointer's provenance.
                let start = self.tensor.data.wrapping_byte_add(self.tensor.byte_offset as usize).cast();
                // SAFETY: whoever made the tensor promised `len` aligned, initialised elements that are ours alone until its deleter
                // is called. `elements` has checked what can be checked.
                Ok(unsafe { OwnedSlice::new(start, len, self) })
            }
            Err(problem) => Err(Failed { buf: Some(self), error: Error::invalid(CALL, problem) }),
        }
    }
}

fn null() -> Error {
    Error::invalid(CALL, "there is no tensor (a null pointer)")
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.managed {
            Managed::Versioned(_) => "",
            Managed::Legacy(_) => ", legacy",
        };
        write!(f, "Tensor({} {:?} on {}{form})", TypeName(self), self.shape(), DeviceName(self.device()))
    }
}

/// The type of a tensor's elements, as error texts name it.
struct TypeName<'a>(&'a Tensor);

impl fmt::Display for TypeName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = self.0.tensor.dtype;
        match dtype.dtype() {
            Some(known) => known.fmt(f),
            None => {
                let (code, bits, lanes) = (dtype.code, dtype.bits, dtype.lanes);
                write!(f, "elements of DLPack's type code {code}, {bits} bits, {lanes} lanes")
            }
        }
    }
}

pub(crate) struct DeviceName(pub(crate) DLDevice);

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DLDevice { device_type, device_id } = self.0;
        match device_type {
            DL_CPU => f.write_str("the CPU"),
            DL_CUDA => write!(f, "CUDA device {device_id}"),
            DL_CUDA_HOST => f.write_str("the CPU (pinned)"),
            // `kDLCUDAManaged`.
            13 => f.write_str("managed memory of CUDA, which moves"),
            _ => write!(f, "device {device_id} of DLPack's type {device_type}"),
        }
    }
}

/// A buffer made of a DLPack tensor in the host's memory; derefs to a slice of all its elements.
pub type HostTensor<T> = OwnedSlice<T, Tensor>;

impl SliceOwner for Tensor {
    fn describe(&self, dtype: DType, _: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTensor({dtype} {:?})", self.shape())
    }
}

impl<T: Element> HostTensor<T> {
    /// The tensor that this buffer was made of.
    pub fn into_tensor(self) -> Tensor {
        self.into_owner()
    }

    /// The length of each dimension. A tensor without dimensions is one element.
    pub fn shape(&self) -> &[i64] {
        self.owner().shape()
    }
}
