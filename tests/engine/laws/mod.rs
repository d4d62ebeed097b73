//! The laws of the house (docs: ARCHITECTURE), each held by tests that name it. Black box: only the public interface.
//!
//! Every test runs under a watchdog: one that hangs fails by name. Random tests print their seeds.

mod arena;
mod averages;
mod bits;
mod bounded;
mod detached;
mod eager;
mod extremes;
mod functions;
mod groups;
pub(crate) mod house;
mod memory;
mod messages;
mod ourselves;
mod refusals;
mod runtimes;
mod scratch;
mod shared;
mod tuning;
mod wakers;
