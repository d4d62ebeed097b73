//! Finds the memory of numpy's arrays, by the C structure in which an array describes itself (`__array_struct__`).

use std::ffi::{c_char, c_int, c_void};

use allstream::DType;
use pyo3::intern;
use pyo3::prelude::*;

use super::{Found, No, aligned, pointer};
use crate::in_flight::Use;

/// `PyArrayInterface` of numpy's C interface.
#[repr(C)]
struct ArrayInterface {
    two: c_int,
    nd: c_int,
    typekind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
    descr: *mut c_void,
}

const C_CONTIGUOUS: c_int = 0x1;
const ALIGNED: c_int = 0x100;
const NOT_SWAPPED: c_int = 0x200;
const WRITEABLE: c_int = 0x400;

/// Finds out where an array's memory is, and what is in it. `how`: what the operation is to do with it.
///
/// # Errors
/// The operation cannot use the memory: its type, byte order, layout or alignment does not suit, or it is to be written and is read-only.
pub(super) fn look(array: &Bound<'_, PyAny>, how: Use) -> Result<Found, No> {
    let py = array.py();
    let capsule = array.getattr(intern!(py, "__array_struct__"))?;
    let about = nameless(&capsule).ok_or_else(|| "its __array_struct__ is no capsule".to_owned())?;
    // SAFETY: numpy's protocol promises that the capsule points to this structure (its field `two`, looked at next, confirms that). The
    // structure lives as long as the capsule, which is held here.
    let about = unsafe { about.cast::<ArrayInterface>().as_ref() };
    if about.two != 2 {
        return Err("its __array_struct__ is not numpy's".to_owned().into());
    }
    let dims = usize::try_from(about.nd).map_err(|_| format!("it has {} dimensions", about.nd))?;
    if dims > 0 && about.shape.is_null() {
        return Err("its __array_struct__ has no lengths".to_owned().into());
    }
    let shape = match dims {
        0 => &[],
        // SAFETY: there are `nd` lengths at `shape`, by numpy's protocol. They belong to the structure, so they live as long as it does.
        _ => unsafe { std::slice::from_raw_parts(about.shape, dims) },
    };
    let dtype = dtype(array, about)?;
    if about.flags & NOT_SWAPPED == 0 {
        return Err("its bytes are in the other order than this machine's: array.astype(array.dtype.newbyteorder('='))".to_owned().into());
    }
    if about.flags & C_CONTIGUOUS == 0 {
        let problem = format!(
            "its elements do not lie one after another in row-major order (shape {shape:?}): numpy.ascontiguousarray(array) makes a copy \
             that does"
        );
        return Err(problem.into());
    }
    if how == Use::Write && about.flags & WRITEABLE == 0 {
        return Err("it is read-only, as what ray.get gives is, and the result is written there: array.copy() makes one that is not"
            .to_owned()
            .into());
    }
    let start = about.data.cast::<u8>();
    if about.flags & ALIGNED == 0 {
        aligned(start, dtype)?;
    }
    let mut lens = shape.iter().map(|len| usize::try_from(*len).ok());
    let len = lens.try_fold(1_usize, |all, len| all.checked_mul(len?));
    let len = len.filter(|len| len.checked_mul(dtype.size()).is_some());
    let len = len.ok_or_else(|| format!("no array has lengths such as {shape:?}"))?;
    Ok(Found { start, len, dtype, device: None })
}

/// The pointer of a capsule that has no name, as numpy's have none, or the name `array_interface`.
fn nameless(capsule: &Bound<'_, PyAny>) -> Option<std::ptr::NonNull<c_void>> {
    // SAFETY: as in `pointer`. A null pointer in place of the name stands for a capsule without one.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule.as_ptr(), std::ptr::null()) == 0 {
            return pointer(capsule, c"array_interface");
        }
        std::ptr::NonNull::new(pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null()))
    }
}

fn dtype(array: &Bound<'_, PyAny>, about: &ArrayInterface) -> Result<DType, No> {
    let known = match (about.typekind as u8, about.itemsize) {
        (b'b', 1) => DType::Bool,
        (b'i', 1) => DType::I8,
        (b'i', 2) => DType::I16,
        (b'i', 4) => DType::I32,
        (b'i', 8) => DType::I64,
        (b'u', 1) => DType::U8,
        (b'u', 2) => DType::U16,
        (b'u', 4) => DType::U32,
        (b'u', 8) => DType::U64,
        (b'f', 2) => DType::F16,
        (b'f', 4) => DType::F32,
        (b'f', 8) => DType::F64,
        // Other types are told apart by name, such as those that the package ml_dtypes adds to numpy.
        _ => {
            let dtype = array.getattr(intern!(array.py(), "dtype"))?;
            let name = dtype.getattr(intern!(array.py(), "name"))?.extract::<String>()?;
            match name.as_str() {
                "bfloat16" => DType::BF16,
                "float8_e4m3fn" => DType::F8E4M3,
                "float8_e5m2" => DType::F8E5M2,
                "complex64" | "complex128" => {
                    let problem = format!(
                        "its elements are {name}: give their parts, array.view(\"{}\")",
                        if about.itemsize == 8 { "float32" } else { "float64" }
                    );
                    return Err(problem.into());
                }
                _ => return Err(format!("its elements are {name}; {}", super::dlpack::TYPES).into()),
            }
        }
    };
    Ok(known)
}
