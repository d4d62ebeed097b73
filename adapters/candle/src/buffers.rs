//! Buffers: variables that forward passes change and no optimizer does, such as the running statistics of a batch normalization.

use allstream::{ReduceOp, SharedComm};
use candle_core::{InplaceOp1, Result, Tensor};

use crate::params::{self, Param};
use crate::{AllReduce, Broadcast};

/// What happens to the buffers of all ranks at the end of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BufferSync {
    /// Every rank gets rank 0's values.
    #[default]
    Broadcast,
    /// Every rank gets the mean over all ranks. Buffers of integers, which have no mean, get rank 0's values.
    Average,
    /// Each rank keeps its own.
    Off,
}

/// Makes the buffers of all ranks equal as `how` says, with one collective for each element type and device.
pub(crate) fn synchronise(comm: &SharedComm, buffers: &[&Param], how: BufferSync) -> Result<()> {
    if how == BufferSync::Off {
        return Ok(());
    }
    let mut left = buffers.to_vec();
    while let Some(first) = left.first() {
        let (dtype, device) = (first.var.dtype(), first.var.device().clone());
        let (these, others) = left.into_iter().partition::<Vec<&Param>, _>(|param| {
            param.var.dtype() == dtype && param.var.device().same_device(&device)
        });
        left = others;
        let done = if how == BufferSync::Average && dtype.is_float() {
            together(&these, &AllReduce::new(comm).op(ReduceOp::Avg))
        } else {
            together(&these, &Broadcast::new(comm, 0))
        };
        let names = || params::list(these.iter().map(|param| param.name.as_str()), ", ");
        done.map_err(|e| e.context(format!("make the buffers of all ranks alike: {}", names())))?;
    }
    Ok(())
}

/// Runs `op` once on all these buffers together. They must have the same element type and be on the same device.
fn together(buffers: &[&Param], op: &impl InplaceOp1) -> Result<()> {
    if let [alone] = buffers {
        return alone.var.inplace_op1(op);
    }
    let flat = buffers.iter().map(|param| param.var.as_detached_tensor().flatten_all());
    let all = Tensor::cat(&flat.collect::<Result<Vec<_>>>()?, 0)?;
    all.inplace_op1(op)?;
    let mut at = 0;
    for param in buffers {
        let len = param.var.elem_count();
        param.var.set(&all.narrow(0, at, len)?.reshape(param.var.shape())?)?;
        at += len;
    }
    Ok(())
}
