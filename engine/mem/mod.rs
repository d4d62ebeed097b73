//! Memory that operations own while they are in flight, and streams of work over it.

mod buf;
pub(crate) mod device;
pub(crate) mod dlpack;
mod held;
mod list;
mod split;
mod stream;

pub use buf::{Buf, HostBuf, HostMemory, Location};
pub(crate) use buf::{Where, zeroes};
pub(crate) use held::{Held, Parts};
pub use list::BufList;
pub(crate) use list::Memory as ListMemory;
pub(crate) use list::memory;
pub use split::{View, split, split_at};
pub use stream::{Event, HostStream};
