//! What a user holds: communicators, calls, and work in flight.

mod agree;
mod batch;
mod bind;
mod bytes;
mod call;
mod calls;
mod close;
mod collectives;
mod handle;
mod links;
mod lists;
mod made_together;
mod memory;
mod mesh;
mod messages;
mod names;
mod node;
mod ordered;
mod reach;
mod restore;
mod runtime;
mod shrink;
mod split;
mod staged;
#[cfg(test)]
mod story;
mod varied;
mod whole;
mod work;
mod world;

pub use agree::Agree;
pub use batch::{Batch, Message};
pub use bind::DevicePath;
pub use call::Call;
pub use handle::{Comm, SharedComm, Stats};
pub use mesh::Mesh;
pub use messages::SendRecv;
pub use names::{Backend, BackendStatus, Groups, backends};
pub(crate) use node::together;
pub use node::{Node, NodeCall, NodeWork, Outcomes, Place, Several};
pub(crate) use ordered::{Either, push, ready};
pub use ordered::{Ordered, Stream};
pub use work::Work;
pub use world::{PoolStats, Verdict};
