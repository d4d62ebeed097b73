//! What tensors on a GPU get where the feature `cuda` is not built: an error that says so.

use allstream::AnyBuf;
use candle_core::{CudaStorage, Layout, Result, Tensor};

use crate::collective::{Collective, on_device};

pub(crate) fn check(name: &str, _: &Tensor) -> Result<()> {
    Err(on_device(name))
}

pub(crate) fn apply(op: &impl Collective, _: &CudaStorage, _: &Layout) -> Result<CudaStorage> {
    Err(on_device(op.name()))
}

pub(crate) fn apply_in_place(op: &impl Collective, _: &mut CudaStorage, _: &Layout) -> Result<()> {
    Err(on_device(op.name()))
}

pub(crate) fn to_buf(name: &str, _: &Tensor) -> Result<AnyBuf> {
    Err(on_device(name))
}

pub(crate) fn from_buf(name: &str, _: AnyBuf, _: &Tensor) -> Result<Tensor> {
    Err(on_device(name))
}
