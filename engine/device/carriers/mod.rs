//! What carries operations out with CUDA: the [`Carrier`](crate::exec::carrier::Carrier)s of the executor.
//!
//! | file | what an operation does |
//! |---|---|
//! | `staged.rs` | its memory is copied to the host, the host runs it there, and its results are copied back |
//! | `on_device.rs` | the rank's device runs its parts, in a lane of their own (`lane.rs`, `backend.rs`) |
//! | `whole.rs` | a library takes it whole, when its ranks have met over the host's links |
//!
//! `bound.rs`: what a communicator is bound to from then on, and what its end waits for.

mod backend;
mod bound;
mod lane;
mod on_device;
mod staged;
mod whole;

pub(crate) use bound::{BoundTo, bind, bound_to};
pub(crate) use on_device::OnDevice;
pub(crate) use staged::OnHost;
pub(crate) use whole::WholeOp;
