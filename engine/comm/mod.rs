//! What a user holds: communicators, calls, and work in flight.

mod agree;
mod batch;
mod call;
mod handle;
mod links;
mod ordered;
mod work;
mod world;

pub use agree::{Agree, Verdict};
pub use batch::{Batch, Message};
pub use call::Call;
pub use handle::{Comm, SharedComm, Stats};
pub use ordered::Ordered;
pub use work::Work;
