//! The trait of a collective on a tensor's elements, and what the code for the CPU and for GPUs share: the choice of the type, ranges, errors.

use std::ops::Range;

#[cfg(feature = "cuda")]
use allstream::cuda::CudarcBuf;
use allstream::{Element, Failed};
use candle_core::{DType, Layout, Result, bail};

use crate::error::failed;

/// Allocates a buffer of the given number of elements. They are set to zero in the order of the stream in which the collective runs.
#[cfg(feature = "cuda")]
pub(crate) type Room<'a, T> = &'a dyn Fn(usize) -> Result<CudarcBuf<T>>;

/// A collective on the elements of one tensor, whatever their type.
pub(crate) trait Collective {
    /// The name that errors give it.
    fn name(&self) -> &'static str;
    /// Runs it on elements in the host's memory, and waits for its end.
    fn run<T: Element>(&self, values: Vec<T>) -> std::result::Result<Vec<T>, Failed<Vec<T>>>;
    /// Runs it in the order of the stream that `values` are on; the host does not wait for that stream. `room` allocates memory for the result.
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, room: Room<'_, T>) -> Result<CudarcBuf<T>>;
}

/// Matches a storage of the kind `$kind` by its element type, for the types that candle and the engine share, and runs `$body`. There `$values` is
/// the storage's content, a vector or a slice on a device, and `$wrap` makes a storage from such a content.
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

/// Which elements of a storage a contiguous tensor has. `stored`: how many the storage has.
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

/// The error of a collective that failed, with the call and the tensor. The engine's mismatch error shows no shapes, only the keys made from
/// them, so the text adds that a key is a hash of the shape.
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

/// The error for a tensor on a device that this build cannot use.
pub(crate) fn on_device(name: &str) -> candle_core::Error {
    let gpus = match cfg!(feature = "cuda") {
        true => "only CUDA devices are known",
        false => "tensors on CUDA devices need allstream-candle's feature cuda",
    };
    candle_core::Error::Msg(format!(
        "{name}: the tensor is on a GPU, expected one on the CPU: bring it there with .to_device(&Device::Cpu) first ({gpus})"
    ))
}
