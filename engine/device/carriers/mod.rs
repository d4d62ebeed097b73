//! What carries operations out with CUDA: the [`Carrier`](crate::exec::carrier::Carrier)s of the executor.
//!
//! | file | how its carrier carries an operation out |
//! |---|---|
//! | `staged.rs` | the operation's memory is copied to the host, the host runs the parts on the copies, and the results are copied back |
//! | `on_device.rs` | the rank's device runs the parts, in the device's lane (`lane.rs`, `backend.rs`) |
//! | `whole.rs` | a library takes the operation whole, once the ranks have met over the host's links |
//!
//! `bound.rs` has what a communicator is bound to (devices, a library, or both), and what such a communicator waits for when it has failed.

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
