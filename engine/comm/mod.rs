//! What a user holds: communicators, calls, and work in flight.

mod batch;
mod bytes;
mod call;
mod calls;
mod collectives;
mod handle;
mod links;
mod lists;
mod messages;
mod node;
mod ordered;
mod restore;
mod varied;
mod work;
mod world;

pub use batch::{Batch, Message};
pub use call::Call;
pub use handle::{Comm, SharedComm, Stats};
pub use messages::SendRecv;
pub use node::{Node, NodeCall, NodeWork, Outcomes, Place, Several};
pub use ordered::Ordered;
pub use work::Work;
