//! [`Memory`]: an array of Python's, as a buffer that an operation owns. Nothing is copied.

mod cuda;
mod dlpack;
mod numpy;

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use allstream::{AnyBuf, Buf, DType, Location, Untyped};
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::errors;
use crate::in_flight::{self, Claim, Refused, Taken, Use};
use crate::keeper;

pub(crate) use cuda::{CallStreams, stream_of_others};

/// An array's memory while an operation has it.
pub(crate) struct Memory {
    start: *mut u8,
    len: usize,
    dtype: DType,
    owner: Owner,
    /// The range of addresses in the table of `in_flight`. It is given back before the owner is.
    taken: Option<Taken>,
}

/// The owner that keeps the memory alive.
enum Owner {
    /// The array itself. None once it was given back.
    Object(Option<Py<PyAny>>),
    /// A tensor that another library has handed over by `__dlpack__`. None once it was given back.
    Tensor(Option<Box<Tensor>>),
}

/// A tensor of another library's, and the stream in whose order it is, if it is on a CUDA device. The tensor is dropped first.
struct Tensor {
    buf: AnyBuf,
    stream: Option<Arc<cuda::CallStream>>,
}

// SAFETY: `start` is of memory that the owner keeps, and both owners may be sent: a Python object is touched and dropped only with the GIL
// held (the caller of `release` has it, and `Drop` leaves the object to the keeper).
unsafe impl Send for Memory {}

// SAFETY: for an object, `numpy::look` or `dlpack::look` has found `len` aligned elements of this type at `start`, one after another, in memory
// that the array owns or keeps. The array is kept until this `Memory` is dropped, and moving the `Memory` does not move the elements. They are
// writable, or the operation only reads them (`Use::Read`). The package asks its users that nobody else touches them meanwhile, as every Python
// library does that works without the GIL; a second operation of ours on the same memory waits or is refused (`in_flight`). For a tensor the
// promises are `AnyBuf`'s.
unsafe impl Buf for Memory {
    type Elem = Untyped;
    fn len(&self) -> usize {
        self.len
    }
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn location(&mut self) -> Location {
        match &mut self.owner {
            Owner::Object(_) => Location::host(self.start),
            Owner::Tensor(Some(tensor)) => tensor.buf.location(),
            // Given back: nobody asks any more.
            Owner::Tensor(None) => Location::host(self.start),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        drop(self.taken.take());
        match &mut self.owner {
            Owner::Object(object) => object.take().into_iter().for_each(keeper::give_back),
            // Its library's deleter may want the GIL.
            Owner::Tensor(tensor) => tensor.take().into_iter().for_each(|tensor| keeper::delete(tensor)),
        }
    }
}

/// An array's memory, as the array describes it.
#[derive(Clone, Copy)]
struct Found {
    start: *mut u8,
    len: usize,
    dtype: DType,
    /// The CUDA device that it is on; `None`: it is in the host's memory.
    device: Option<usize>,
}

/// How the arrays of a type tell where their memory is.
#[derive(Clone, Copy)]
enum Protocol {
    /// A table of C functions, which torch's tensors have.
    Table(NonNull<dlpack::ExchangeApi>),
    /// numpy's structure.
    ArrayStruct,
    /// A capsule.
    Capsule,
}

// SAFETY: the table is read-only, and its library is never unloaded: DLPack demands that the table lives as long as the process.
unsafe impl Send for Protocol {}

/// The protocols of the types seen so far, by the type's address. Each of these types is kept alive.
static TYPES: Mutex<Vec<(usize, Protocol)>> = Mutex::new(Vec::new());

impl Protocol {
    /// The protocol of an object's type, if it has one.
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Protocol>> {
        let class = object.get_type();
        let at = class.as_ptr() as usize;
        if let Some((_, known)) = TYPES.lock().iter().find(|(class, _)| *class == at) {
            return Ok(Some(*known));
        }
        let found = Protocol::look_up(&class)?;
        if let Some(protocol) = found {
            // Never dropped, so that no other type comes to have this address.
            let _kept = ManuallyDrop::new(class.unbind());
            TYPES.lock().push((at, protocol));
        }
        Ok(found)
    }

    fn look_up(class: &Bound<'_, PyType>) -> PyResult<Option<Protocol>> {
        let py = class.py();
        if let Some(capsule) = class.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))?
            && let Some(table) = dlpack::table(&capsule)
        {
            return Ok(Some(Protocol::Table(table)));
        }
        // numpy's scalars have the structure as well, but of a copy: writes there would be lost. They have no `__setitem__`.
        if class.hasattr(intern!(py, "__array_struct__"))? && class.hasattr(intern!(py, "__setitem__"))? {
            return Ok(Some(Protocol::ArrayStruct));
        }
        Ok(class.hasattr(intern!(py, "__dlpack__"))?.then_some(Protocol::Capsule))
    }
}

impl Memory {
    /// Whether an object is an array, of whatever library.
    pub(crate) fn is_of(object: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(Protocol::of(object)?.is_some())
    }

    /// Takes the memory of an array for an operation; `call` is the name of the Python call, for errors.
    ///
    /// # Errors
    /// It is no array; its elements are of no type of ours, do not lie one after another, are read-only where the operation writes, or on a
    /// device other than CUDA's; it is a tensor that needs a gradient; or another operation has some of the memory, and cannot be waited for.
    pub(crate) fn of(
        object: &Bound<'_, PyAny>,
        how: Use,
        call: &str,
        streams: &mut CallStreams,
        claim: &mut Claim,
    ) -> PyResult<Memory> {
        let refuse = |problem: String| errors::invalid(object.py(), call, &problem);
        let looked = match Protocol::of(object)? {
            Some(Protocol::Table(table)) => Some(dlpack::look(object, table).map_err(|no| no.told(refuse))?),
            Some(Protocol::ArrayStruct) => Some(numpy::look(object, how).map_err(|no| no.told(refuse))?),
            Some(Protocol::Capsule) => None,
            None => return Err(errors::not_an_array(object, call)),
        };
        let (found, owner) = match looked {
            Some(found) if found.device.is_none() => (found, Owner::Object(None)),
            // An array on a device is taken in the order of one of our streams: its library learns of the stream when it is asked for the capsule.
            _ => {
                let (found, tensor) = dlpack::take(object, how, streams).map_err(|no| no.told(refuse))?;
                (found, Owner::Tensor(Some(Box::new(tensor))))
            }
        };
        let Found { start, len, dtype, .. } = found;
        let (bytes, on_host) = (len * dtype.size(), found.device.is_none());
        let taken = in_flight::take(start as usize, bytes, how, on_host, claim).map_err(|refused| {
            refuse(match refused {
                Refused::Elsewhere => {
                    "another operation has this memory, or a part of it: wait() for that one first, or give each operation an array of its own"
                        .into()
                }
                Refused::Underway => {
                    "another call, which has not returned yet, has this memory, or a part of it: make one call after the other".into()
                }
                Refused::Twice => {
                    "two arrays of this call have the same memory, or a part of it: give each memory of its own".into()
                }
            })
        })?;
        let owner = match owner {
            Owner::Object(_) => Owner::Object(Some(object.clone().unbind())),
            tensor => tensor,
        };
        Ok(Memory { start, len, dtype, owner, taken })
    }

    /// An empty memory of the same element type: the input or output of a rank that needs none for its part in the operation.
    pub(crate) fn nothing_like(&self) -> Memory {
        // An address that suits every type.
        let start = std::ptr::without_provenance_mut(align_of::<u128>());
        Memory { start, len: 0, dtype: self.dtype, owner: Owner::Object(None), taken: None }
    }

    /// Whether it is on a device.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(&self.owner, Owner::Tensor(Some(tensor)) if tensor.stream.is_some())
    }

    /// Notes that the operation has succeeded and is over on the device: another call may have the stream in whose order the array was.
    pub(crate) fn is_done_with(&self) {
        if let Owner::Tensor(Some(tensor)) = &self.owner {
            tensor.stream.iter().for_each(|stream| stream.is_done_with());
        }
    }

    /// Gives the array back, at once: the caller has the GIL.
    pub(crate) fn release(mut self, _: Python<'_>) {
        drop(self.taken.take());
        match &mut self.owner {
            Owner::Object(object) => drop(object.take()),
            Owner::Tensor(tensor) => drop(tensor.take()),
        }
    }
}

/// Why an array cannot be used.
enum No {
    /// In words.
    Problem(String),
    /// What Python raised when the array was asked for its memory.
    Raised(PyErr),
}

impl No {
    fn told(self, refuse: impl FnOnce(String) -> PyErr) -> PyErr {
        match self {
            No::Problem(problem) => refuse(problem),
            No::Raised(error) => error,
        }
    }
}

impl From<String> for No {
    fn from(problem: String) -> No {
        No::Problem(problem)
    }
}

impl From<PyErr> for No {
    fn from(error: PyErr) -> No {
        No::Raised(error)
    }
}

/// # Errors
/// The address does not suit elements of this type.
fn aligned(start: *mut u8, dtype: DType) -> Result<(), No> {
    if (start as usize).is_multiple_of(dtype.size()) {
        return Ok(());
    }
    Err(No::Problem(format!(
        "its memory begins at {start:p}, which is no address of a {dtype} (a multiple of {}): copy it first",
        dtype.size()
    )))
}

/// The pointer of a capsule of this name; `None` where the object is no such capsule.
fn pointer(capsule: &Bound<'_, PyAny>, name: &std::ffi::CStr) -> Option<NonNull<std::ffi::c_void>> {
    // SAFETY: the object is alive, and the name a C string; both functions only look.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
            return None;
        }
        NonNull::new(ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))
    }
}
