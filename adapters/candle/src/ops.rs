//! The collectives as operations of candle: `x.apply_op1(..)` with a gradient, `x.inplace_op1(..)` in place and without one.

#[cfg(feature = "cuda")]
use allstream::Buf;
#[cfg(feature = "cuda")]
use allstream::cuda::CudarcBuf;
use allstream::{Element, Failed, Rank, ReduceOp, SharedComm};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, InplaceOp1, Layout, MetalStorage, Result, Shape, Tensor, bail,
};

#[cfg(feature = "cuda")]
use crate::collective::Room;
use crate::collective::{Collective, on_device};
use crate::gpu;
#[cfg(feature = "cuda")]
use crate::gpu::in_order;
use crate::storage::{self, apply, apply_in_place};

/// The forward passes of an operation. Its method `prepared` gives, for the layout of the input, the collective and the shape of the result.
macro_rules! forward {
    () => {
        fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            let (op, shape) = self.prepared(layout)?;
            Ok((apply(&op, storage, layout)?, shape))
        }
        fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
            let (op, shape) = self.prepared(layout)?;
            Ok((gpu::apply(&op, storage, layout)?, shape))
        }
        fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
            Err(on_device(CustomOp1::name(self)))
        }
    };
}

/// The same for an operation in place, whose result has the shape of its input.
macro_rules! forward_in_place {
    () => {
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            apply_in_place(&self.prepared(layout)?.0, storage, layout)
        }
        fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
            gpu::apply_in_place(&self.prepared(layout)?.0, storage, layout)
        }
        fn metal_fwd(&self, _: &mut MetalStorage, _: &Layout) -> Result<()> {
            Err(on_device(InplaceOp1::name(self)))
        }
    };
}

/// What `Collective::run` returns.
type Ran<T> = std::result::Result<Vec<T>, Failed<Vec<T>>>;

/// The sum over all ranks, on every rank. Backward: the gradient is passed on unchanged (Megatron's *g*).
///
/// That is right if all ranks compute the same loss from the sum, and that loss counts once, as behind a
/// [`RowParallelLinear`](crate::RowParallelLinear). If each rank computes a loss of its own from the sum, and the losses of all ranks
/// count, put an [`AllReduceBackward`] behind it.
///
/// Copies on the CPU: `apply_op1` makes one, of the input; `inplace_op1` makes none, and gives no gradient.
///
/// ```
/// use allstream::Comm;
/// use allstream_candle::AllReduce;
/// use candle_core::{Device, Tensor};
///
/// let comm = Comm::local(1)?.remove(0).share();
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// let sum = x.apply_op1(AllReduce::new(&comm))?; // with a gradient; one copy
/// x.inplace_op1(&AllReduce::new(&comm))?;        // in x itself; no copy
/// # assert_eq!(sum.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct AllReduce {
    comm: SharedComm,
    op: ReduceOp,
    key: u64,
}

impl AllReduce {
    /// A sum over the ranks of `comm`.
    pub fn new(comm: &SharedComm) -> AllReduce {
        AllReduce { comm: comm.clone(), op: ReduceOp::Sum, key: 0 }
    }

    /// Takes another reduction. For an average the gradient is divided by the number of ranks. Others, except the sum, have no gradient.
    pub fn op(mut self, op: ReduceOp) -> AllReduce {
        self.op = op;
        self
    }

    fn prepared(&self, layout: &Layout) -> Result<(AllReduce, Shape)> {
        Ok((AllReduce { key: storage::key(layout.dims()), ..self.clone() }, layout.shape().clone()))
    }
}

impl Collective for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }
    fn run<T: Element>(&self, values: Vec<T>) -> Ran<T> {
        self.comm.key(self.key).op(self.op).all_reduce(values).wait()
    }
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, _: Room<'_, T>) -> Result<CudarcBuf<T>> {
        in_order(&values.stream().clone(), self.comm.key(self.key).op(self.op).all_reduce(values))
    }
}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }
    forward!();
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match self.op {
            ReduceOp::Sum => Ok(Some(grad.clone())),
            ReduceOp::Avg => Ok(Some((grad / self.comm.size() as f64)?)),
            other => bail!(
                "backward of all_reduce: a reduction by {other} has no gradient, expected a sum or an average: detach its result"
            ),
        }
    }
}

impl InplaceOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce in place"
    }
    forward_in_place!();
}

/// Gives the input unchanged. Backward: the sum of the gradients of all ranks (Megatron's *f*).
///
/// Put it before a layer that computes something different on each rank from the same input, such as a
/// [`ColumnParallelLinear`](crate::ColumnParallelLinear), which has it built in.
///
/// Copies on the CPU: forward one, of the input; backward one, of the gradient, and one more if that is not contiguous.
#[derive(Clone, Debug)]
pub struct AllReduceBackward(SharedComm);

impl AllReduceBackward {
    /// The gradient is summed over the ranks of `comm`.
    pub fn new(comm: &SharedComm) -> AllReduceBackward {
        AllReduceBackward(comm.clone())
    }
}

/// Sends nothing, and gives its input back.
struct Identity;

impl Collective for Identity {
    fn name(&self) -> &'static str {
        "all_reduce_backward"
    }
    fn run<T: Element>(&self, values: Vec<T>) -> Ran<T> {
        Ok(values)
    }
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, _: Room<'_, T>) -> Result<CudarcBuf<T>> {
        Ok(values)
    }
}

impl AllReduceBackward {
    fn prepared(&self, layout: &Layout) -> Result<(Identity, Shape)> {
        Ok((Identity, layout.shape().clone()))
    }
}

impl CustomOp1 for AllReduceBackward {
    fn name(&self) -> &'static str {
        "all_reduce_backward"
    }
    forward!();
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        grad.contiguous()?.apply_op1_no_bwd(&AllReduce::new(&self.0)).map(Some)
    }
}

/// The tensors of all ranks, one after another along dimension 0, on every rank. Backward: the gradients of all ranks are summed, and each
/// rank gets the part of the sum for its own tensor (a [`ReduceScatter`]).
///
/// That is the gradient of the sum of all ranks' losses. [`replicated`](Self::replicated) is for results that all ranks use alike.
///
/// Copies on the CPU: one of the input. [`all_gather`] takes another dimension.
#[derive(Clone, Debug)]
pub struct AllGather {
    comm: SharedComm,
    is_replicated: bool,
    key: u64,
}

impl AllGather {
    /// Gathers the tensors of all ranks of `comm`, which must have the same shape.
    pub fn new(comm: &SharedComm) -> AllGather {
        AllGather { comm: comm.clone(), is_replicated: false, key: 0 }
    }

    /// For a result from which all ranks compute the same loss, which counts once: backward each rank takes the part of the gradient for its
    /// own tensor, and nothing is sent.
    pub fn replicated(mut self) -> AllGather {
        self.is_replicated = true;
        self
    }
}

impl Collective for AllGather {
    fn name(&self) -> &'static str {
        "all_gather"
    }
    fn run<T: Element>(&self, values: Vec<T>) -> Ran<T> {
        self.comm.key(self.key).all_gather(values).wait()
    }
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, room: Room<'_, T>) -> Result<CudarcBuf<T>> {
        let (stream, all) = (values.stream().clone(), room(values.len() * self.comm.size())?);
        let (_, all) = in_order(&stream, self.comm.key(self.key).all_gather_into(values, all))?;
        Ok(all)
    }
}

/// The first dimension and the others.
fn blocks(name: &str, layout: &Layout) -> Result<(usize, Vec<usize>)> {
    match layout.dims().split_first() {
        Some((first, rest)) => Ok((*first, rest.to_vec())),
        None => {
            bail!("{name}: the tensor is a scalar, expected at least one dimension: call .unsqueeze(0) first")
        }
    }
}

fn with_first(first: usize, rest: Vec<usize>) -> Shape {
    Shape::from([vec![first], rest].concat())
}

impl AllGather {
    fn prepared(&self, layout: &Layout) -> Result<(AllGather, Shape)> {
        let (first, rest) = blocks("all_gather", layout)?;
        let op = AllGather { key: storage::key(layout.dims()), ..self.clone() };
        Ok((op, with_first(first * self.comm.size(), rest)))
    }
}

impl CustomOp1 for AllGather {
    fn name(&self) -> &'static str {
        "all_gather"
    }
    forward!();
    fn bwd(&self, arg: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if self.is_replicated {
            let len = arg.dim(0)?;
            return grad.narrow(0, self.comm.rank() * len, len).map(Some);
        }
        grad.contiguous()?.apply_op1_no_bwd(&ReduceScatter::new(&self.comm)).map(Some)
    }
}

/// The sum of the tensors of all ranks, divided along dimension 0 into as many equal parts as there are ranks: rank r gets the r-th.
/// Backward: the gradients of all parts, on every rank (an [`AllGather`]).
///
/// Copies on the CPU: one of the input. [`reduce_scatter`] takes another dimension.
#[derive(Clone, Debug)]
pub struct ReduceScatter {
    comm: SharedComm,
    key: u64,
}

impl ReduceScatter {
    /// A sum over the ranks of `comm`, which divide it among themselves.
    pub fn new(comm: &SharedComm) -> ReduceScatter {
        ReduceScatter { comm: comm.clone(), key: 0 }
    }
}

impl Collective for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }
    fn run<T: Element>(&self, values: Vec<T>) -> Ran<T> {
        self.comm.key(self.key).reduce_scatter(values).wait()
    }
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, room: Room<'_, T>) -> Result<CudarcBuf<T>> {
        let (stream, part) = (values.stream().clone(), room(values.len() / self.comm.size())?);
        let (_, part) = in_order(&stream, self.comm.key(self.key).reduce_scatter_into(values, part))?;
        Ok(part)
    }
}

impl ReduceScatter {
    fn prepared(&self, layout: &Layout) -> Result<(ReduceScatter, Shape)> {
        let (first, rest) = blocks("reduce_scatter", layout)?;
        let n = self.comm.size();
        if !first.is_multiple_of(n) {
            bail!(
                "reduce_scatter: dimension 0 of the tensor of shape {:?} is {first}, expected a multiple of the number of ranks, {n}: \
                 pad it with .pad_with_zeros(0, 0, {})",
                layout.dims(),
                n - first % n
            );
        }
        let op = ReduceScatter { key: storage::key(layout.dims()), ..self.clone() };
        Ok((op, with_first(first / n, rest)))
    }
}

impl CustomOp1 for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }
    forward!();
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        grad.contiguous()?.apply_op1_no_bwd(&AllGather::new(&self.comm)).map(Some)
    }
}

/// The root's tensor, on every rank. Backward: the root gets the sum of the gradients of all ranks, the others zeros.
///
/// Copies on the CPU: `apply_op1` makes one, of the input; `inplace_op1` makes none, and gives no gradient.
#[derive(Clone, Debug)]
pub struct Broadcast {
    comm: SharedComm,
    root: Rank,
    key: u64,
}

impl Broadcast {
    /// Sends the tensor of rank `root` to all ranks of `comm`, whose tensors must have the same shape.
    pub fn new(comm: &SharedComm, root: Rank) -> Broadcast {
        Broadcast { comm: comm.clone(), root, key: 0 }
    }

    fn prepared(&self, layout: &Layout) -> Result<(Broadcast, Shape)> {
        Ok((Broadcast { key: storage::key(layout.dims()), ..self.clone() }, layout.shape().clone()))
    }
}

impl Collective for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }
    fn run<T: Element>(&self, values: Vec<T>) -> Ran<T> {
        self.comm.key(self.key).broadcast(values, self.root).wait()
    }
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, _: Room<'_, T>) -> Result<CudarcBuf<T>> {
        in_order(&values.stream().clone(), self.comm.key(self.key).broadcast(values, self.root))
    }
}

impl CustomOp1 for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }
    forward!();
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        grad.contiguous()?.apply_op1_no_bwd(&Reduce(self.clone())).map(Some)
    }
}

impl InplaceOp1 for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast in place"
    }
    forward_in_place!();
}

/// The sum of all ranks' tensors on the root, zeros on the others: the backward pass of a [`Broadcast`].
struct Reduce(Broadcast);

impl Collective for Reduce {
    fn name(&self) -> &'static str {
        "backward of broadcast"
    }
    fn run<T: Element>(&self, values: Vec<T>) -> Ran<T> {
        let Broadcast { comm, root, key } = &self.0;
        let sum = comm.key(*key).reduce(values, *root).wait()?;
        Ok(if comm.rank() == *root { sum } else { storage::zeros(sum.len()) })
    }
    #[cfg(feature = "cuda")]
    fn run_on_device<T: Element>(&self, values: CudarcBuf<T>, room: Room<'_, T>) -> Result<CudarcBuf<T>> {
        let Broadcast { comm, root, key } = &self.0;
        let sum = in_order(&values.stream().clone(), comm.key(*key).reduce(values, *root))?;
        if comm.rank() == *root { Ok(sum) } else { room(sum.len()) }
    }
}

impl Reduce {
    fn prepared(&self, layout: &Layout) -> Result<(Reduce, Shape)> {
        let (broadcast, shape) = self.0.prepared(layout)?;
        Ok((Reduce(broadcast), shape))
    }
}

impl CustomOp1 for Reduce {
    fn name(&self) -> &'static str {
        "backward of broadcast"
    }
    forward!();
}

/// An [`AllGather`] along any dimension. If that is not dimension 0, candle copies the input and the result once more, to transpose them.
pub fn all_gather(x: &Tensor, op: AllGather, dim: usize) -> Result<Tensor> {
    along("all_gather", x, op, dim)
}

/// A [`ReduceScatter`] along any dimension. If that is not dimension 0, candle copies the input and the result once more, to transpose
/// them.
pub fn reduce_scatter(x: &Tensor, op: ReduceScatter, dim: usize) -> Result<Tensor> {
    along("reduce_scatter", x, op, dim)
}

fn along(name: &str, x: &Tensor, op: impl CustomOp1 + Send + Sync + 'static, dim: usize) -> Result<Tensor> {
    if dim == 0 {
        return x.apply_op1(op);
    }
    if dim >= x.dims().len() {
        bail!(
            "{name}: dimension {dim} was asked for, and the tensor of shape {:?} has dimensions 0..{}",
            x.dims(),
            x.dims().len()
        );
    }
    x.transpose(0, dim)?.contiguous()?.apply_op1(op)?.transpose(0, dim)?.contiguous()
}
