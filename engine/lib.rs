//! Async collective communication for Rust training loops.
//!
//! ```
//! # async fn step(mut comm: allstream::Comm, grads: Vec<f32>) -> Result<(), allstream::Error> {
//! let grads = comm.all_reduce(grads).await?;
//! # drop(grads); Ok(()) }
//! ```
//!
//! A collective is submitted by the call, owns its buffer while it is in flight, and gives it back with the result.
//! Ranks are threads of one process, processes of one host (shared memory), or processes of several hosts (RDMA or TCP), in any mix.
//!
//! - [`Comm`]: a rank's handle on a group, and the collectives; [`Comm::local`] makes a group in this process,
//!   [`Comm::connect`] joins one that a launcher (`allstream run`, torchrun, mpirun, srun) has started. [`SharedComm`] has
//!   the same calls through `&self`.
//! - [`Call`]: a call with options: reduction, [`Function`], scale, algorithm, deadline, deterministic mode, a key that tells
//!   otherwise equal calls apart.
//! - [`Work`]: a submitted operation. It is a future for any runtime; `.wait()` blocks; if it is dropped, the operation still runs to its end.
//! - [`Buf`]: what can be sent: `Vec<T>`, `Box<[T]>`, [`HostBuf<T>`], any owner of [`HostMemory`], [`cuda::DeviceBuf`], and with the
//!   feature `ndarray` that crate's owned arrays. [`split`] cuts a buffer into [`View`]s; a [`BufList`] puts several buffers into one operation.
//! - [`Comm::split`], [`Comm::subset`], [`Comm::mesh`]: groups from groups; [`Groups`] keeps them by name.
//! - [`Node`]: several ranks of one process, one for each of its devices, called together.
//! - [`HostStream`], [`Event`], [`Ordered`]: streams of host jobs that run in order beside the caller, and collectives ordered with them.
//! - [`cuda`]: memory, streams and events of CUDA devices, where there are any.
//! - [`dlpack`]: tensors exchanged with other libraries.
//! - [`Error`], [`Failed`]: which rank, which operation, what was expected and what was found; [`Failed`] also gives the buffer back,
//!   unless something may still touch it. [`Comm::agree`]: one [`Verdict`] for all survivors.
//! - [`train`]: gradients reduced in buckets while the backward pass still computes.
//! - [`plan`]: the algorithms as data, and their checker; [`sim`]: how long they would take on other machines.
//!
//! # What holds
//! A call submits its operation at once, whether or not its future is polled. Every rank of a communicator makes the same calls in the
//! same order. Before any data is used, the ranks compare their calls (collective, counts, types, reduction, root, algorithm,
//! [key](Call::key)); if they differ, all ranks get an error that names both calls. Every wait has a deadline, and a timeout ends the communicator.
//!
//! # Numbers
//! Element types and reductions are [`DType`] and [`ReduceOp`]; the rules for NaN, signed zero, overflow and rounding,
//! the same on every path, are those of the crate `allstream-kernels`. All ranks get the same bits; in deterministic mode
//! ([`Call::deterministic`]) the bits depend on the inputs and the number of ranks alone.

/// Collectives as plans, the choice among them, and their checker: the crate `allstream-plan`.
pub use allstream_plan as plan;

pub use crate::comm::{
    Agree, Backend, BackendStatus, Batch, Call, Comm, Groups, Mesh, Message, Ordered, PoolStats, SendRecv,
    SharedComm, Stats, Stream, Verdict, Work, backends,
};
pub use crate::comm::{Node, NodeCall, NodeWork, Outcomes, Place, Several};
pub use crate::error::{Error, Failed, Lost, Members, Missing, MissingState, Operation, Waiting};
pub use crate::group::{LinkChoice, Rendezvous};
pub use crate::link::arena::ArenaBuf;
pub use crate::mem::{
    AnyBuf, Buf, BufList, Event, HostBuf, HostMemory, HostStream, Location, OwnedSlice, Untyped, View, split,
    split_at,
};
pub use crate::types::{
    Algo, DType, Element, Function, Kind, LinkClass, MOST_RANKS, Rank, ReduceOp, Signature, bf16, f8e4m3,
    f8e5m2, f16,
};

/// Compiles the one whole program in the README. The README's other Rust snippets are marked `ignore`; tests/engine/readme.rs runs the snippets of
/// docs/rust.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// CUDA devices: memory on them, streams, events, and copies that are futures.
///
/// The driver (`libcuda`) is loaded when something here is first used, and never linked. So the same program also runs where there is
/// no driver, and gets an [`Error::Unavailable`] there that says which file was looked for. `ALLSTREAM_CUDA_LIBRARY` names
/// another file.
///
/// ```
/// use allstream::cuda::{Device, DeviceBuf, DeviceStream, PinnedBuf};
/// # async fn step() -> Result<(), allstream::Error> {
/// let device = Device::new(0)?;
/// let stream = DeviceStream::new(&device)?;
/// let grads = DeviceBuf::<f32>::zeroed(&stream, 1000)?; // from a pool; work on it is in the order of `stream`
/// // kernels of yours, put on `stream.as_raw()`, that write to `grads.as_ptr()`
/// let (grads, host) = grads.to_host(PinnedBuf::zeroed(&device, 1000)?).await?; // both come back, also on failure
/// # let mut comm = allstream::Comm::local(1)?.remove(0);
/// let host = comm.all_reduce(host).await?;
/// let (host, grads) = grads.copy_from_host(host).await?;
/// # drop((host, grads)); Ok(()) }
/// # let _ = step;
/// ```
pub mod cuda {
    pub use crate::comm::DevicePath;
    #[cfg(feature = "cudarc")]
    pub use crate::device::CudarcBuf;
    pub use crate::device::{
        Device, DeviceBuf, DeviceCopies, DeviceEvent, DeviceStream, Driver, ForeignMemory, NcclFound,
        PinnedBuf, PoolMemory, Reached, Transfer, device_count, driver, nccl, settle,
    };
}

/// RDMA: which network cards of this host can carry links to other hosts, and what is missing.
pub mod rdma {
    pub use crate::group::rdma::find;
    pub use crate::link::verbs::{PassedOver, Rdma, RdmaLayer, RdmaPort};
}

/// DLPack 1.x: buffers given to other libraries as tensors, and other libraries' tensors taken as buffers. Nothing is copied.
///
/// [`export`](dlpack::export) takes any [`Buf`], in the host's memory or a device's. [`Tensor`](dlpack::Tensor) takes another library's
/// tensor by an unsafe function: its caller promises that the producer keeps DLPack's contract; all else is checked. Both use the present
/// form (`DLManagedTensorVersioned`) or the older one (`DLManagedTensor`).
///
/// Each element type has its code in DLPack; `f8e4m3` and `f8e5m2` are `kDLFloat8_e4m3fn` and `kDLFloat8_e5m2`, which came with DLPack 1.1.
pub mod dlpack {
    pub use crate::mem::dlpack::{
        DL_CPU, DL_CUDA, DL_CUDA_HOST, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
        DLPackVersion, DLTensor, Export, FLAG_READ_ONLY, HostTensor, Tensor, VERSION, export,
    };
}

mod comm;
mod commands;
mod device;
mod error;
mod exec;
mod forked;
mod group;
mod link;
mod mem;
pub mod sim;
mod trace;
pub mod train;
pub mod tuning;
mod types;

#[cfg(any(test, feature = "testing", feature = "fuzzing"))]
pub mod testing;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use testing::fuzzing;
