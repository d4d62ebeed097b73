//! Tensors of torch and other libraries, by DLPack. If a tensor's type has a table of C functions, the table says where the tensor's memory is, and
//! no Python object is made for that. A tensor on a CUDA device, or of a type without such a table, is taken over in a capsule.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use allstream::cuda::{DeviceBuf, DeviceStream, ForeignMemory};
use allstream::dlpack::{
    DL_CPU, DL_CUDA, DL_CUDA_HOST, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
    DLPackVersion, DLTensor, FLAG_READ_ONLY, Tensor as DlTensor,
};
use allstream::{AnyBuf, DType, Element, bf16, f8e4m3, f8e5m2, f16};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::cuda::OwnerOfMemory;
use super::{CallStreams, Found, No, Tensor, aligned, pointer};
use crate::in_flight::Use;

/// The supported element types, for error texts.
pub(super) const TYPES: &str = "allstream has bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, float8_e4m3fn and float8_e5m2";

/// The first fields of `DLPackExchangeAPI` in the `dlpack.h` of DLPack 1.2. A tensor type's attribute `__dlpack_c_exchange_api__` is a capsule of it.
#[repr(C)]
pub(super) struct ExchangeApi {
    version: DLPackVersion,
    previous: *mut ExchangeApi,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    /// Describes a Python object in a `DLTensor`. The description is valid while the object exists unchanged.
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int>,
    current_stream: *const c_void,
}

/// The table in a capsule; `None` if the object is no capsule of a table, or the capsule has no table that this module can use.
pub(super) fn table(capsule: &Bound<'_, PyAny>) -> Option<NonNull<ExchangeApi>> {
    let mut at = pointer(capsule, c"dlpack_exchange_api")?.cast::<ExchangeApi>();
    loop {
        // SAFETY: a capsule of this name points to a table, and `previous` to a table of an older version, or is null. Tables of all versions begin
        // with these two fields, and live as long as the process.
        let (version, previous) = unsafe { (at.as_ref().version, at.as_ref().previous) };
        if version.major == 1 {
            // SAFETY: the table is of major version 1, of which `ExchangeApi` has the layout.
            let has_it = unsafe { at.as_ref() }.tensor_from_object.is_some();
            return has_it.then_some(at);
        }
        at = NonNull::new(previous)?;
    }
}

/// Asks the table of a tensor's type where the tensor's memory is.
///
/// # Errors
/// The tensor cannot be used.
pub(super) fn look(tensor: &Bound<'_, PyAny>, table: NonNull<ExchangeApi>) -> Result<Found, No> {
    let py = tensor.py();
    if let Some(needs) = tensor.getattr_opt(intern!(py, "requires_grad"))?
        && needs.is_truthy()?
    {
        return Err("it is a tensor that needs a gradient: give tensor.detach(), which has the same memory"
            .to_owned()
            .into());
    }
    // torch's `is_neg` is true for a tensor whose elements are the negatives of the numbers in its memory.
    if let Some(is_negative) = tensor.getattr_opt(intern!(py, "is_neg"))?
        && is_negative.call0()?.is_truthy()?
    {
        return Err("it stands for the negatives of its memory: give tensor.resolve_neg()".to_owned().into());
    }
    let mut filled = std::mem::MaybeUninit::<DLTensor>::zeroed();
    // SAFETY: `Protocol::of` found the table at the object's own type, so its function accepts the object. The GIL is held, and `filled` has room.
    let failed = unsafe {
        match table.as_ref().tensor_from_object {
            Some(fill) => fill(tensor.as_ptr().cast(), filled.as_mut_ptr()),
            None => -1,
        }
    };
    if failed != 0 {
        return Err(match PyErr::take(py) {
            Some(error) => error.into(),
            None => "its library does not say where its memory is".to_owned().into(),
        });
    }
    // SAFETY: it was zeroed, and all zeros are a valid `DLTensor`; then the function has filled it.
    let about = unsafe { filled.assume_init() };
    // SAFETY: `shape` and `strides` are the tensor's own. They are valid while the tensor exists unchanged, and it does: the GIL is held, and no
    // Python code has run since.
    unsafe { found(&about) }
}

/// What a `DLTensor` says about a tensor's memory, checked.
///
/// # Safety
/// `shape` and `strides` each point to `ndim` numbers, or are null.
unsafe fn found(about: &DLTensor) -> Result<Found, No> {
    let device = match about.device {
        DLDevice { device_type: DL_CPU | DL_CUDA_HOST, .. } => None,
        DLDevice { device_type: DL_CUDA, device_id } => Some(usize::try_from(device_id).unwrap_or(0)),
        DLDevice { device_type, device_id } => {
            let problem = format!(
                "it is on device {device_id} of DLPack's type {device_type}, and arrays are in the host's memory or on a CUDA device"
            );
            return Err(problem.into());
        }
    };
    let dtype = dtype(about.dtype)?;
    if about.ndim > 0 && about.shape.is_null() {
        return Err("its library gives it no shape (a null pointer)".to_owned().into());
    }
    let numbers = |at: *mut i64| match usize::try_from(about.ndim) {
        // SAFETY: as the caller promises.
        Ok(n) if n > 0 && !at.is_null() => unsafe { std::slice::from_raw_parts(at, n) },
        _ => &[],
    };
    let (shape, strides) = (numbers(about.shape), numbers(about.strides));
    let len = shape.iter().try_fold(1usize, |all, n| all.checked_mul(usize::try_from(*n).ok()?));
    let Some(len) = len else { return Err(format!("its shape is {shape:?}").into()) };
    let mut expected = 1i64;
    for (stride, n) in strides.iter().zip(shape).rev() {
        if len > 0 && *n != 1 && *stride != expected {
            let problem = format!(
                "its elements do not lie one after another in row-major order (shape {shape:?}, strides {strides:?}): tensor.contiguous() \
                 makes a copy that does"
            );
            return Err(problem.into());
        }
        expected = expected.saturating_mul(*n);
    }
    let start = about.data.cast::<u8>().wrapping_add(about.byte_offset as usize);
    if len > 0 {
        if about.data.is_null() {
            return Err("it has no memory (a null pointer)".to_owned().into());
        }
        aligned(start, dtype)?;
    }
    Ok(Found { start, len, dtype, device })
}

fn dtype(found: DLDataType) -> Result<DType, No> {
    found.dtype().ok_or_else(|| {
        let DLDataType { code, bits, lanes } = found;
        let problem = match code {
            5 => format!(
                "its elements are complex, of {bits} bits: give their parts, torch.view_as_real(tensor)"
            ),
            _ => format!(
                "its elements are of DLPack's type {code} with {bits} bits and {lanes} lanes; {TYPES}"
            ),
        };
        No::Problem(problem)
    })
}

/// The number of the CUDA device that an array is on, by its `__dlpack_device__`; `None` if it is on no CUDA device or has no such method.
fn cuda_device(object: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let Some(tell) = object.getattr_opt(intern!(object.py(), "__dlpack_device__"))? else { return Ok(None) };
    // The device type is a number or a member of an enumeration.
    let (device_type, device_id) = tell.call0()?.extract::<(Bound<'_, PyAny>, usize)>()?;
    let is_cuda = device_type.call_method0(intern!(object.py(), "__int__"))?.extract::<i32>()? == DL_CUDA;
    Ok(is_cuda.then_some(device_id))
}

/// Asks an array's library for a capsule of the array; if `stream` is given, one that may be used in the order of that stream.
fn capsule<'py>(object: &Bound<'py, PyAny>, stream: Option<&DeviceStream>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let ask = |options: &Bound<'py, PyDict>| match stream {
        None => object.call_method(intern!(py, "__dlpack__"), (), Some(options)),
        Some(_) => py.import("allstream._arrays")?.call_method1(intern!(py, "capsule"), (object, options)),
    };
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item(intern!(py, "stream"), stream.as_raw() as usize)?;
    }
    let old = options.copy()?;
    options.set_item(intern!(py, "max_version"), (1, 1))?;
    match ask(&options) {
        // A library from before DLPack 1.0 does not know the argument `max_version`.
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => ask(&old),
        result => result,
    }
}

/// Takes a tensor over in a capsule.
///
/// # Errors
/// The tensor cannot be used. If this function had taken the tensor from the capsule by then, the tensor has gone back to its library.
pub(super) fn take(
    object: &Bound<'_, PyAny>,
    how: Use,
    streams: &mut CallStreams,
) -> Result<(Found, Tensor), No> {
    let not_taken = |error: allstream::Error| No::Problem(error.to_string());
    let device = cuda_device(object)?;
    let stream = device.map(|ordinal| streams.of(ordinal)).transpose().map_err(|error| {
        // If there is no driver, the error says which file was looked for.
        No::Problem(format!("it is on CUDA device {}: {error}", device.unwrap_or(0)))
    })?;
    let capsule = capsule(object, stream.as_ref().map(|stream| stream.stream()))?;
    let (found, tensor) = if let Some(at) = pointer(&capsule, c"dltensor_versioned") {
        let managed = at.cast::<DLManagedTensorVersioned>();
        // SAFETY: a capsule of this name points to such a structure, and still owns it. The structure begins with the version in all versions.
        let version = unsafe { managed.as_ref().version };
        if version.major != 1 {
            let DLPackVersion { major, minor } = version;
            return Err(format!("it is of DLPack {major}.{minor}, and only version 1 is known").into());
        }
        // SAFETY: the structure is of major version 1, of which `DLManagedTensorVersioned` has the layout.
        let (about, flags) = unsafe { (managed.as_ref().dl_tensor, managed.as_ref().flags) };
        if how == Use::Write && flags & FLAG_READ_ONLY != 0 {
            return Err("it is read-only, and the result is written there: give a copy".to_owned().into());
        }
        // SAFETY: `shape` and `strides` are the structure's own, which the capsule keeps alive.
        let found = unsafe { found(&about) }?;
        used(&capsule, c"used_dltensor_versioned")?;
        // SAFETY: since `used` has renamed the capsule, this function alone owns the structure. (The flag is cleared because the engine refuses
        // read-only tensors, not knowing which operations only read. If it is set here, this operation only reads: `Use::Write` was refused above.)
        unsafe { (*managed.as_ptr()).flags &= !FLAG_READ_ONLY };
        // SAFETY: by DLPack's rules the tensor of a renamed capsule belongs to the code that renamed it, this function, which hands it on only once.
        (found, unsafe { DlTensor::from_versioned(managed.as_ptr()) }.map_err(not_taken)?)
    } else if let Some(at) = pointer(&capsule, c"dltensor") {
        let managed = at.cast::<DLManagedTensor>();
        // SAFETY: a capsule of this name points to such a structure, and still owns it.
        let about = unsafe { managed.as_ref().dl_tensor };
        // SAFETY: `shape` and `strides` are the structure's own, which the capsule keeps alive.
        let found = unsafe { found(&about) }?;
        used(&capsule, c"used_dltensor")?;
        // SAFETY: as for the versioned tensor above.
        (found, unsafe { DlTensor::from_legacy(managed.as_ptr()) }.map_err(not_taken)?)
    } else {
        return Err("its __dlpack__() gives no tensor of DLPack's".to_owned().into());
    };
    if found.device != device {
        let problem =
            "its __dlpack_device__() names another device than the tensor that its __dlpack__() gives";
        return Err(problem.to_owned().into());
    }
    let buf = buffer(tensor, &found, stream.as_ref().map(|stream| stream.stream()))?;
    Ok((found, Tensor { buf, stream }))
}

/// Renames a capsule, as DLPack demands of the code that takes the capsule's tensor.
fn used(capsule: &Bound<'_, PyAny>, name: &'static std::ffi::CStr) -> PyResult<()> {
    // SAFETY: the object is a capsule, and the name lives as long as the process. The GIL is held.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

/// Turns the tensor into a buffer whose element type is known only at run time.
fn buffer(tensor: DlTensor, found: &Found, stream: Option<&DeviceStream>) -> Result<AnyBuf, No> {
    fn of<T: Element>(tensor: DlTensor, found: &Found, stream: Option<&DeviceStream>) -> Result<AnyBuf, No> {
        let Some(stream) = stream else {
            let made = tensor.into_host::<T>().map(AnyBuf::new);
            return made.map_err(|failed| No::Problem(failed.error.to_string()));
        };
        let memory = ForeignMemory { pointer: found.start.addr() as u64, len: found.len, dtype: found.dtype };
        let owner = OwnerOfMemory(Some(Box::new(tensor)));
        // SAFETY: the owner keeps the tensor, which has `len` elements of this type at `pointer`, one after another. `take` named `stream` to the
        // tensor's library when it asked for the capsule; so, by DLPack, work on that stream may read and write the elements until the tensor is
        // deleted. The package demands of its users that nobody else touches them meanwhile (`Memory`). `from_foreign` asks the driver whether the
        // address is of this device.
        let made = unsafe { DeviceBuf::<T>::from_foreign(memory, stream, owner) };
        made.map(AnyBuf::new).map_err(|failed| No::Problem(failed.error.to_string()))
    }
    let make = match found.dtype {
        DType::Bool => of::<bool>,
        DType::I8 => of::<i8>,
        DType::I16 => of::<i16>,
        DType::I32 => of::<i32>,
        DType::I64 => of::<i64>,
        DType::U8 => of::<u8>,
        DType::U16 => of::<u16>,
        DType::U32 => of::<u32>,
        DType::U64 => of::<u64>,
        DType::F16 => of::<f16>,
        DType::BF16 => of::<bf16>,
        DType::F32 => of::<f32>,
        DType::F64 => of::<f64>,
        DType::F8E4M3 => of::<f8e4m3>,
        DType::F8E5M2 => of::<f8e5m2>,
    };
    make(tensor, found, stream)
}
