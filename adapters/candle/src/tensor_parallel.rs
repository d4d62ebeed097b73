//! Layers whose weights are divided among the ranks of a group: tensor parallelism as Megatron-LM has it.

use allstream::SharedComm;
use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::Linear;

use crate::{AllGather, AllReduce, AllReduceBackward, all_gather};

/// This rank's part of a tensor: the `comm.rank()`-th of `comm.size()` equal parts along `dim`, copied.
///
/// For a layer that is trained, `Var::from_tensor(&shard(..)?)?` is the variable.
///
/// # Errors
/// Where there is no such dimension, or it cannot be divided by the number of ranks.
pub fn shard(full: &Tensor, dim: usize, comm: &SharedComm) -> Result<Tensor> {
    let (n, dims) = (comm.size(), full.dims());
    match dims.get(dim) {
        None => bail!("shard: dimension {dim} was asked for, and the tensor has shape {dims:?}"),
        Some(len) if len % n != 0 => bail!(
            "shard: dimension {dim} of the tensor of shape {dims:?} is {len}, expected a multiple of the number of ranks, {n}: choose \
             a size of the layer, or a number of ranks, that fits"
        ),
        Some(len) => full.narrow(dim, comm.rank() * (len / n), len / n)?.force_contiguous(),
    }
}

/// The two dimensions of a weight.
fn matrix(layer: &str, weight: &Tensor) -> Result<(usize, usize)> {
    match weight.dims() {
        [rows, columns] => Ok((*rows, *columns)),
        dims => bail!("{layer}: the weight has shape {dims:?}, expected two dimensions"),
    }
}

fn check_bias(layer: &str, bias: Option<&Tensor>, out: usize) -> Result<()> {
    match bias {
        Some(bias) if bias.dims() != [out] => {
            bail!(
                "{layer}: the bias has shape {:?}, expected [{out}], one for each row of the weight",
                bias.dims()
            )
        }
        _ => Ok(()),
    }
}

/// Compares the last dimension of an input with what the weight takes.
fn check_input(layer: &str, x: &Tensor, expected: usize, what: &str) -> Result<()> {
    match x.dims().last() {
        Some(found) if *found == expected && x.dims().len() >= 2 => Ok(()),
        _ => bail!(
            "{layer}: the input has shape {:?}, expected at least two dimensions, the last {expected}: {what}",
            x.dims()
        ),
    }
}

/// A linear layer whose outputs (rows of the weight) are divided among the ranks. The input is the same on all ranks. Each rank gets its
/// own outputs, or with [`gather_output`](Self::gather_output) those of all ranks.
///
/// Forward nothing is sent, unless outputs are gathered; backward the gradient of the input is summed over all ranks
/// ([`AllReduceBackward`]). A rank's own outputs are a fitting input of a [`RowParallelLinear`].
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    linear: Linear,
    inputs: usize,
    comm: SharedComm,
    is_gathered: bool,
}

impl ColumnParallelLinear {
    /// From this rank's rows of the weight, `[outputs / size, inputs]`, and of the bias: see [`shard`], with dimension 0.
    ///
    /// # Errors
    /// If the weight does not have two dimensions, or the bias does not have one element for each row of the weight.
    pub fn new(weight: Tensor, bias: Option<Tensor>, comm: &SharedComm) -> Result<ColumnParallelLinear> {
        let (out, inputs) = matrix("ColumnParallelLinear", &weight)?;
        check_bias("ColumnParallelLinear", bias.as_ref(), out)?;
        Ok(ColumnParallelLinear {
            linear: Linear::new(weight, bias),
            inputs,
            comm: comm.clone(),
            is_gathered: false,
        })
    }

    /// Every rank gets the outputs of all ranks, in rank order. All ranks must compute the same loss from them: see [`AllGather::replicated`].
    pub fn gather_output(mut self) -> ColumnParallelLinear {
        self.is_gathered = true;
        self
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        check_input("ColumnParallelLinear", x, self.inputs, "the input is the same whole one on all ranks")?;
        let x = x.contiguous()?.apply_op1(AllReduceBackward::new(&self.comm))?;
        let y = self.linear.forward(&x)?;
        if !self.is_gathered {
            return Ok(y);
        }
        let last = y.dims().len() - 1;
        all_gather(&y, AllGather::new(&self.comm).replicated(), last)
    }
}

/// A linear layer whose inputs (columns of the weight) are divided among the ranks. Each rank gives its own part of the input, such as the
/// outputs of a [`ColumnParallelLinear`], and the output is the same on all ranks.
///
/// Forward the outputs are summed over all ranks ([`AllReduce`]) before the bias is added, once; backward nothing is sent.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    linear: Linear,
    inputs: usize,
    bias: Option<Tensor>,
    comm: SharedComm,
}

impl RowParallelLinear {
    /// From this rank's columns of the weight, `[outputs, inputs / size]` (see [`shard`], with dimension 1), and the whole bias.
    ///
    /// # Errors
    /// If the weight does not have two dimensions, or the bias does not have one element for each row of the weight.
    pub fn new(weight: Tensor, bias: Option<Tensor>, comm: &SharedComm) -> Result<RowParallelLinear> {
        let (out, inputs) = matrix("RowParallelLinear", &weight)?;
        check_bias("RowParallelLinear", bias.as_ref(), out)?;
        Ok(RowParallelLinear { linear: Linear::new(weight, None), inputs, bias, comm: comm.clone() })
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        check_input("RowParallelLinear", x, self.inputs, "the input is this rank's part alone")?;
        let y = self.linear.forward(x)?.contiguous()?.apply_op1(AllReduce::new(&self.comm))?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// An embedding whose rows are divided among the ranks. The ids are the same on all ranks, and so is the result.
///
/// Forward each rank looks up the ids whose rows it has, and the results are summed over all ranks; backward nothing is sent.
#[derive(Clone, Debug)]
pub struct VocabParallelEmbedding {
    weight: Tensor,
    comm: SharedComm,
}

impl VocabParallelEmbedding {
    /// From this rank's rows of the table, `[vocabulary / size, hidden]`: see [`shard`], with dimension 0.
    ///
    /// # Errors
    /// Where the weight has other than two dimensions.
    pub fn new(weight: Tensor, comm: &SharedComm) -> Result<VocabParallelEmbedding> {
        matrix("VocabParallelEmbedding", &weight)?;
        Ok(VocabParallelEmbedding { weight, comm: comm.clone() })
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        if !ids.dtype().is_int() {
            bail!("VocabParallelEmbedding: the ids are {}, expected integers", ids.dtype().as_str());
        }
        let (rows, hidden) = matrix("VocabParallelEmbedding", &self.weight)?;
        let (vocabulary, first) = (rows * self.comm.size(), rows * self.comm.rank());
        let all = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let (mut local, mut is_here) = (Vec::with_capacity(all.len()), Vec::with_capacity(all.len()));
        for (at, id) in all.iter().enumerate() {
            let Some(id) = usize::try_from(*id).ok().filter(|id| *id < vocabulary) else {
                bail!(
                    "VocabParallelEmbedding: id {at} is {id}, expected 0..{vocabulary}: compare the tokenizer's vocabulary"
                );
            };
            let row = id.checked_sub(first).filter(|row| *row < rows);
            local.push(row.unwrap_or(0) as u32);
            is_here.push(if row.is_some() { 1f32 } else { 0.0 });
        }
        let (count, device) = (all.len(), self.weight.device());
        let local = Tensor::from_vec(local, count, device)?;
        let is_here = Tensor::from_vec(is_here, (count, 1), device)?.to_dtype(self.weight.dtype())?;
        let found = self.weight.index_select(&local, 0)?.broadcast_mul(&is_here)?;
        let sum = found.apply_op1(AllReduce::new(&self.comm))?;
        sum.reshape([ids.dims(), &[hidden]].concat())
    }
}
