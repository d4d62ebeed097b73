//! What only tests and fuzz targets use: no build of a user's has any of it.
//!
//! | file | what it is | who uses it |
//! |---|---|---|
//! | `faults.rs` | faults planted on purpose: broken plans, short queues, frames cut and results written in unusual ways | the product asks it at the places concerned; `tests/` plants them |
//! | `pipe.rs` | a kind of links through pipes, chosen as `pipe`: an example of a link in one file | conformance; the table of kinds (`link/kinds.rs`) |
//! | `late.rs` | a kind of links that writes to memory by itself, as a network card does, chosen as `late` | `tests/faults`; conformance; the table of kinds |
//! | `virtual_link.rs` | links in virtual time, with delays that the story draws from its seed | stories |
//! | `story/` | ranks that take turns on one thread, in virtual time; deaths at any moment | unit tests |
//! | `slow.rs` | a library that takes collectives of the host's memory whole, slow and correct, and wrong where it is told to be | `tests/engine/whole.rs` |
//! | `worker.rs` | a carrier of operations in one file: the host works on copies that threads make, and results come back later | `tests/engine/worker.rs` |
//! | `fuzzing.rs` | every parser of bytes from outside, by the way they come in (feature `fuzzing`) | the targets in `fuzz/` |
//!
//! Nothing here is on a floor (`xtask/src/house.rs`): it may know all of the engine. The product names it only behind
//! `cfg(any(test, feature = "testing"))`; without that cfg the compiler does not find it. The product itself names the waits that can be
//! taken away and the points at which a rank can be stopped, in `link/waits.rs`, and the locks under which no driver may be called, in
//! `link/locks.rs`. Tests get at them through this module.

#[cfg(any(test, feature = "testing"))]
pub(crate) mod faults;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod late;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod pipe;
#[cfg(any(test, feature = "testing"))]
mod slow;
#[cfg(test)]
mod story;
#[cfg(test)]
mod virtual_link;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod worker;

#[cfg(any(test, feature = "testing"))]
pub use self::{
    faults::{
        Broken, Planted, called_before, fold_between_processes_from, fold_small, frames_of,
        launch_in_any_order, lend_by_turns, plant, stream_small, with_queue_limit,
    },
    late::hold_late_writes,
    pipe::piped,
    slow::Slow,
};
#[cfg(any(test, feature = "testing"))]
pub use crate::link::locks::holds_engine_lock;
#[cfg(any(test, feature = "testing"))]
pub use crate::link::waits::{Point, Wait, is_stopped, slow_readers, stop_at, take_away};
