//! Memory, streams and events on CUDA devices.
//!
//! Everything here is ordered by streams: a [`DeviceBuf`] belongs to one, work on it is put there, and its memory goes
//! back to the pool in that order. `docs/adr/0013-device-memory.md` has the rules and their reasons.

mod allocations;
mod arrivals;
mod between;
mod blocks;
mod buf;
mod capture;
pub(crate) mod carriers;
pub(crate) mod chores;
mod context;
pub(crate) mod copied;
#[cfg(feature = "cudarc")]
mod cudarc;
pub(crate) mod current;
mod devices;
mod dlpack;
mod driver;
mod foreign;
mod handle;
mod inputs;
mod ipc;
mod launch;
mod lend;
pub(crate) mod links;
mod modules;
pub(crate) mod nccl;
pub(crate) mod operation;
mod packed;
mod packing;
mod pieces;
mod pinned;
mod pinned_cache;
mod place;
mod pool;
mod queues;
mod share;
mod signal;
mod slices;
mod staging;
mod stream;
mod stripes;
mod transfer;
mod waiter;
pub(crate) mod whole;
mod words;
pub(crate) mod workspace;

pub use buf::DeviceBuf;
pub use chores::settle;
pub use copied::DeviceCopies;
#[cfg(feature = "cudarc")]
pub use cudarc::CudarcBuf;
pub use devices::Device;
pub(crate) use driver::is_loss;
pub use driver::{Driver, device_count, driver};
pub use foreign::ForeignMemory;
pub use nccl::{NcclFound, nccl};
pub(crate) use packed::{Emptied, OnDevice, PackedAt, Packing, not_there};
pub(crate) use packing::{ALIGNED, is_same, zero_on_device};
pub use pinned::PinnedBuf;
pub(crate) use place::DevicePlace;
pub use pool::PoolMemory;
pub use stream::{DeviceEvent, DeviceStream};
pub(crate) use stripes::{Item, Staged, refused_in_capture};
pub use transfer::{Reached, Transfer};
