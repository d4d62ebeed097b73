//! Memory that operations own while they are in flight, and streams of work over it.

pub(crate) mod any;
mod buf;
pub(crate) mod dlpack;
pub(crate) mod elements;
mod erased;
mod fate;
mod host_memory;
mod list;
#[cfg(feature = "ndarray")]
mod ndarray;
mod place;
mod promise;
mod slice;
pub(crate) mod split;
mod stream;
mod stripe;
mod values;

pub use any::{AnyBuf, Untyped};
pub use buf::{Buf, HostBuf, Location};
pub(crate) use buf::{RawBuf, Where, zeroes};
pub(crate) use erased::{ErasedBufs, Parts};
pub(crate) use fate::{Fate, Verdict, Witness};
pub use host_memory::HostMemory;
pub use list::BufList;
pub(crate) use list::raw_bufs;
pub(crate) use place::{DeviceMemory, DeviceOrder};
pub(crate) use promise::Promise;
pub use slice::OwnedSlice;
pub(crate) use slice::SliceOwner;
pub use split::{View, split, split_at};
pub use stream::{Event, HostStream};
pub(crate) use stripe::{ALL, PINNED, Reach, Stripe, pinned_bytes};
pub(crate) use values::check_bools;
