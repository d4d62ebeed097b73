//! From the memory of a candle tensor to the buffers of the engine, and back: for every element type that both have.

use std::ops::Range;

use allstream::{AnyBuf, Element, Failed};
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

use crate::collective::{Collective, of_tensor, on_device, range, unknown_type, with_values};
use crate::gpu;

/// Runs a collective on a copy of the input, and gives its result as a new storage.
pub(crate) fn apply(op: &impl Collective, storage: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
    use candle_core::backend::BackendStorage;
    let dtype = storage.dtype();
    let out = with_values!(CpuStorage: storage, op.name(), (values, wrap) => {
        let range = range(op.name(), layout, values.len())?;
        op.run(values[range].to_vec()).map(wrap).map_err(|failed| failed.error)
    });
    out.map_err(|error| of_tensor(op.name(), layout, dtype, error))
}

/// Runs a collective in the storage of a tensor. If the tensor is all of its storage, nothing is copied. If it is a part, its elements are
/// copied out, and the result is copied back in. After a failure the storage has as many elements as before, with unspecified values.
pub(crate) fn apply_in_place(op: &impl Collective, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
    use candle_core::backend::BackendStorage;
    let dtype = storage.dtype();
    let error = with_values!(CpuStorage: storage, op.name(), (values, _wrap) => {
        let range = range(op.name(), layout, values.len())?;
        in_place(op, values, range)
    });
    error.map_or(Ok(()), |error| Err(of_tensor(op.name(), layout, dtype, error)))
}

fn in_place<T: Element>(
    op: &impl Collective,
    values: &mut Vec<T>,
    range: Range<usize>,
) -> Option<allstream::Error> {
    let len = values.len();
    let is_all = range == (0..len);
    let part = if is_all { std::mem::take(values) } else { values[range.clone()].to_vec() };
    let (back, error) = match op.run(part) {
        Ok(part) => (Some(part), None),
        Err(Failed { buf, error }) => (buf, Some(error)),
    };
    match back {
        Some(part) if is_all => *values = part,
        Some(part) if part.len() == range.len() => values[range].copy_from_slice(&part),
        Some(_) => {}
        // The engine keeps the buffer, as a peer may still touch it. The tensor gets zeros in its place, as it must have all its elements.
        None if is_all => *values = zeros(len),
        None => {}
    }
    error
}

/// `len` zeros of an element type.
pub(crate) fn zeros<T: Element>(len: usize) -> Vec<T> {
    allstream::HostBuf::<T>::zeroed(len).to_vec()
}

/// The engine's [`DType`](allstream::DType) for one of candle's. `name`: the call or the variable, for the error.
pub(crate) fn dtype(name: &str, dtype: DType) -> Result<allstream::DType> {
    Ok(match dtype {
        DType::U8 => allstream::DType::U8,
        DType::U32 => allstream::DType::U32,
        DType::I16 => allstream::DType::I16,
        DType::I32 => allstream::DType::I32,
        DType::I64 => allstream::DType::I64,
        DType::BF16 => allstream::DType::BF16,
        DType::F16 => allstream::DType::F16,
        DType::F32 => allstream::DType::F32,
        DType::F64 => allstream::DType::F64,
        _ => return Err(unknown_type(name)),
    })
}

/// Runs a function on the storage of a tensor on the CPU.
fn on_cpu<R>(name: &str, tensor: &Tensor, read: impl FnOnce(&CpuStorage, &Layout) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => read(storage, layout),
        _ => Err(on_device(name)),
    }
}

/// A copy of the elements of a contiguous tensor: for a tensor on the CPU a `Vec` of their type, for one on a CUDA device a buffer there.
pub(crate) fn to_buf(name: &str, tensor: &Tensor) -> Result<AnyBuf> {
    if tensor.device().is_cuda() {
        return gpu::to_buf(name, tensor);
    }
    on_cpu(name, tensor, |storage, layout| {
        Ok(with_values!(CpuStorage: storage, name, (values, _wrap) => {
            AnyBuf::new(values[range(name, layout, values.len())?].to_vec())
        }))
    })
}

/// A buffer for as many elements as a tensor of floats has. On the CPU it is a `Vec` of zeros. On a device it is a copy of the tensor, and
/// `finish_some` of the gradient buckets then sets the elements of this copy to zero.
pub(crate) fn zero_buf(name: &str, like: &Tensor) -> Result<AnyBuf> {
    if like.device().is_cuda() {
        return gpu::to_buf(name, &like.contiguous()?);
    }
    let (dtype, len) = (dtype(name, like.dtype())?, like.elem_count());
    Ok(match dtype {
        allstream::DType::BF16 => AnyBuf::new(zeros::<allstream::bf16>(len)),
        allstream::DType::F16 => AnyBuf::new(zeros::<allstream::f16>(len)),
        allstream::DType::F64 => AnyBuf::new(zeros::<f64>(len)),
        _ => AnyBuf::new(zeros::<f32>(len)),
    })
}

/// Turns a buffer of floats into a tensor with the shape and on the device of `like`. The tensor takes the buffer over: nothing is copied.
pub(crate) fn from_buf(name: &str, buf: AnyBuf, like: &Tensor) -> Result<Tensor> {
    let shape = like.shape();
    if like.device().is_cuda() {
        return gpu::from_buf(name, buf, like);
    }
    fn take<T: candle_core::WithDType + Element>(
        buf: AnyBuf,
        shape: &Shape,
    ) -> std::result::Result<Result<Tensor>, AnyBuf> {
        buf.into_inner::<Vec<T>>().map(|values| Tensor::from_vec(values, shape, &Device::Cpu))
    }
    let tensor = take::<f32>(buf, shape)
        .or_else(|buf| take::<f64>(buf, shape))
        .or_else(|buf| take::<allstream::bf16>(buf, shape))
        .or_else(|buf| take::<allstream::f16>(buf, shape));
    match tensor {
        Ok(tensor) => tensor,
        Err(buf) => bail!("{name}: {buf:?} came back, expected the vector that was given (a bug)"),
    }
}

/// A hash of the bits of a tensor's elements, to compare tensors by. A tensor on a device is copied to the host for that.
pub(crate) fn fingerprint(name: &str, tensor: &Tensor) -> Result<u64> {
    if tensor.device().is_cuda() {
        return fingerprint(name, &tensor.to_device(&Device::Cpu)?);
    }
    fn of(words: impl Iterator<Item = u64>) -> u64 {
        words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
            (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        })
    }
    on_cpu(name, tensor, |storage, layout| {
        let part = |len: usize| range(name, layout, len);
        Ok(match storage {
            CpuStorage::U8(v) => of(v[part(v.len())?].iter().map(|x| u64::from(*x))),
            CpuStorage::U32(v) => of(v[part(v.len())?].iter().map(|x| u64::from(*x))),
            CpuStorage::I16(v) => of(v[part(v.len())?].iter().map(|x| *x as u64)),
            CpuStorage::I32(v) => of(v[part(v.len())?].iter().map(|x| *x as u64)),
            CpuStorage::I64(v) => of(v[part(v.len())?].iter().map(|x| *x as u64)),
            CpuStorage::BF16(v) => of(v[part(v.len())?].iter().map(|x| u64::from(x.to_bits()))),
            CpuStorage::F16(v) => of(v[part(v.len())?].iter().map(|x| u64::from(x.to_bits()))),
            CpuStorage::F32(v) => of(v[part(v.len())?].iter().map(|x| u64::from(x.to_bits()))),
            CpuStorage::F64(v) => of(v[part(v.len())?].iter().map(|x| x.to_bits())),
            _ => return Err(unknown_type(name)),
        })
    })
}

/// The sum of the squares of all elements, in `f64`. On the CPU equal elements always give a sum of the same bits. On a device they may not:
/// the device chooses the order in which it adds.
pub(crate) fn squares(name: &str, tensor: &Tensor) -> Result<f64> {
    if !tensor.device().is_cpu() {
        return tensor.detach().to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar();
    }
    fn of<T: Copy>(values: &[T], value: impl Fn(T) -> f64) -> f64 {
        // Eight sums side by side, so that an addition need not wait for the one before.
        let (pieces, rest) = values.as_chunks::<8>();
        let mut sums = [0.0; 8];
        for piece in pieces {
            sums.iter_mut().zip(piece).for_each(|(sum, x)| *sum += value(*x) * value(*x));
        }
        sums.iter().sum::<f64>() + rest.iter().map(|x| value(*x) * value(*x)).sum::<f64>()
    }
    on_cpu(name, &tensor.contiguous()?, |storage, layout| {
        let part = |len: usize| range(name, layout, len);
        Ok(match storage {
            CpuStorage::BF16(v) => of(&v[part(v.len())?], f64::from),
            CpuStorage::F16(v) => of(&v[part(v.len())?], f64::from),
            CpuStorage::F32(v) => of(&v[part(v.len())?], f64::from),
            CpuStorage::F64(v) => of(&v[part(v.len())?], |x| x),
            _ => return Err(unknown_type(name)),
        })
    })
}

/// A hash of a shape, for use as the key of a call: the call then fails also if ranks have equally many elements, but in different shapes.
/// Never 0, which means no key.
pub(crate) fn key(dims: &[usize]) -> u64 {
    let hash = dims.iter().fold(0x811c_9dc5_u32, |hash, dim| {
        (hash ^ *dim as u32 ^ (*dim as u64 >> 32) as u32).wrapping_mul(0x0100_0193)
    });
    u64::from((hash ^ dims.len() as u32).max(1))
}
