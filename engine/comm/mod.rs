//! What a user holds: communicators, calls, and work in flight.

mod batch;
mod call;
mod handle;
mod links;
mod mesh;
mod names;
mod ordered;
mod pool;
mod split;
mod work;
mod world;

pub use batch::{Batch, Message};
pub use call::Call;
pub use handle::{Comm, SharedComm, Stats};
pub use mesh::Mesh;
pub use names::{Backend, BackendStatus, Groups, backends};
pub use ordered::Ordered;
pub use pool::PoolStats;
pub use work::Work;
