//! A collective on the elements of a tensor: what it has to do, and what is the same wherever the elements are.

use std::ops::Range;

#[cfg(feature = "cuda")]
use allstream::cuda::CudarcBuf;
use allstream::{Element, Failed};
use candle_core::{DType, Layout, Result, bail};

use crate::error::failed;

/// Gives memory for so many elements, which are zero, in the order of the stream that a collective runs in.
#[cfg(feature = "cuda")]
pub(crate) type Room<'a, T> = &'a dyn Fn(usize) -> Result<CudarcBuf<T>>;

/// A collective on the elements of one tensor, whatever their type.
pub(crate) trait Collective {
    /// What it is called in errors.
    fn name(&self) -> &'static str;
    /// Runs it, and waits for its end.
    fn run<T: Element>(&self, values: Vec<T>) -> std::result::Result<Vec<T>, Failed<Vec<T>>>;
    /// Runs it in the order of the stream that the elements are on, for which the host does not wait. `room` gives memory for its result.
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, room: Room<'_, T>) -> Result<CudarcBuf<T>>;
}

/// Runs `$body` with what is inside a storage of the kind `$kind`, a vector or a slice of a device, and what puts such a thing into a storage, for
/// the types that candle and the engine share.
macro_rules! with_values {
    ($kind:ident: $storage:expr, $name:expr, ($values:ident, $wrap:ident) => $body:expr) => {
        $crate::collective::with_values!(@arms $kind: $storage, $name, ($values, $wrap) => $body,
            U8 U32 I16 I32 I64 BF16 F16 F32 F64)
    };
    (@arms $kind:ident: $storage:expr, $name:expr, ($values:ident, $wrap:ident) => $body:expr, $($of:ident)*) => {
        match $storage {
            $($kind::$of($values) => {
                let $wrap = $kind::$of;
                $body
            })*
            _ => return Err($crate::collective::unknown_type($name)),
        }
    };
}
pub(crate) use with_values;

pub(crate) fn unknown_type(name: &str) -> candle_core::Error {
    candle_core::Error::Msg(format!(
        "{name}: the tensor has an element type that allstream does not have, expected u8, u32, i16, i32, i64, bf16, f16, f32 or \
         f64: convert it with .to_dtype(..) first"
    ))
}

/// The elements of a tensor in its storage.
pub(crate) fn range(name: &str, layout: &Layout, stored: usize) -> Result<Range<usize>> {
    let (shape, strides) = (layout.shape(), layout.stride());
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!(
            "{name}: the tensor of shape {:?} has strides {strides:?}, expected elements that lie one after another: call \
             .contiguous() on it first",
            shape.dims()
        );
    };
    if end > stored {
        bail!("{name}: the tensor ends at element {end} of a storage of {stored}");
    }
    Ok(start..end)
}

/// The error of a collective that failed, with what was being done. Ranks that differ see each other's keys alone, so what a key is made of
/// is said, too.
pub(crate) fn of_tensor(
    name: &str,
    layout: &Layout,
    dtype: DType,
    error: allstream::Error,
) -> candle_core::Error {
    let why = match error {
        allstream::Error::Mismatch { .. } => {
            ": the shape must be the same on all ranks (the key of a call is a hash of it)"
        }
        _ => "",
    };
    failed(format!("{name} of a tensor of {} and shape {:?}{why}", dtype.as_str(), layout.dims()), error)
}

/// The error for a tensor that is on a device on which nothing runs here.
pub(crate) fn on_device(name: &str) -> candle_core::Error {
    let gpus = match cfg!(feature = "cuda") {
        true => "only CUDA devices are known",
        false => "tensors on CUDA devices need allstream-candle's feature cuda",
    };
    candle_core::Error::Msg(format!(
        "{name}: the tensor is on a GPU, expected one on the CPU: bring it there with .to_device(&Device::Cpu) first ({gpus})"
    ))
}
