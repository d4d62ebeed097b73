//! Async collective communication for Rust training loops.
//!
//! ```
//! # async fn step(mut comm: allstream::Comm, grads: Vec<f32>) -> Result<(), allstream::Error> {
//! let grads = comm.all_reduce(grads).await?;
//! # drop(grads); Ok(()) }
//! ```
//!
//! A collective is submitted by the call, owns its buffer while it is in flight, and gives it back with the result.
//! Ranks are threads of one process, processes of one host (shared memory), or hosts (TCP), mixed as they come.
//!
//! - [`Comm`]: a rank's handle on a group, and the collectives; [`Comm::local`] makes a group in this process,
//!   [`Comm::connect`] joins one that a launcher (`allstream run`, torchrun, mpirun, srun) has started. [`SharedComm`] is
//!   the same through `&self`.
//! - [`Call`]: a call with options: reduction, [`Function`], scale, algorithm, deadline, deterministic mode, a key by which equal calls are
//!   told apart.
//! - [`Work`]: a submitted operation: a future, on any runtime; `.wait()` blocks; dropping it lets it run on.
//! - [`Buf`]: what can be sent: `Vec<T>`, `Box<[T]>`, [`HostBuf<T>`], any owner of [`HostMemory`], [`cuda::DeviceBuf`], and with the feature `ndarray` that crate's owned arrays. [`split`] cuts one into [`View`]s;
//!   a [`BufList`] is several in one operation.
//! - [`Comm::split`], [`Comm::subset`], [`Comm::mesh`]: groups from groups; [`Groups`] keeps them by name.
//! - [`Node`]: several ranks of one process, one for each of its devices, called together.
//! - [`HostStream`], [`Event`], [`Ordered`]: work in order beside the caller, and collectives ordered with it.
//! - [`cuda`]: memory, streams and events of CUDA devices, where there are any.
//! - [`dlpack`]: tensors exchanged with other libraries.
//! - [`Error`], [`Failed`]: which rank, which operation, expected and found; and the buffer, unless something may still
//!   touch it. [`Comm::agree`]: one [`Verdict`] for all survivors.
//! - [`train`]: gradients reduced in buckets while the backward pass still computes.
//! - [`plan`]: the algorithms as data, and their checker; [`sim`]: how long they would take elsewhere.
//!
//! # What holds
//! A call submits, polled or not. Every rank of a communicator makes the same calls in the same order; where they do not,
//! all of them get an error that names both calls: what each called is compared (collective, counts, types, reduction, root,
//! algorithm, [key](Call::key)), before any data is used. No wait is without a deadline, and a timeout ends the communicator.
//!
//! # Numbers
//! Element types and reductions are [`DType`] and [`ReduceOp`]; the rules for NaN, signed zero, overflow and rounding,
//! the same on every path, are those of the crate `allstream-kernels`. All ranks get the same bits; in deterministic mode
//! ([`Call::deterministic`]) they depend on the inputs and the number of ranks alone.

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

/// The first program of the README compiles (tests/engine/readme.rs runs those of docs/rust.md).
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// CUDA devices: memory on them, streams, events, and copies that are futures.
///
/// The driver (`libcuda`) is found when something here is first asked for, and never linked: the same program runs where
/// there is none, and gets an [`Error::Unavailable`] that says which file was looked for. `ALLSTREAM_CUDA_LIBRARY` names
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

/// RDMA: which network cards of this host can carry links to others, and what is missing.
pub mod rdma {
    pub use crate::group::rdma::find;
    pub use crate::link::verbs::{PassedOver, Rdma, RdmaLayer, RdmaPort};
}

/// DLPack 1.x: buffers given to other libraries as tensors, and tensors of theirs taken as buffers. Nothing is copied.
///
/// [`export`](dlpack::export) takes any [`Buf`], of the host's or of a device's. [`Tensor`](dlpack::Tensor) takes what another
/// library gives, by an unsafe function whose contract is the producer's; all else is checked. Both in the present form
/// (`DLManagedTensorVersioned`) and in the older one (`DLManagedTensor`).
///
/// An element type has DLPack's code for it; `f8e4m3` and `f8e5m2` are `kDLFloat8_e4m3fn` and `kDLFloat8_e5m2` (1.1).
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
