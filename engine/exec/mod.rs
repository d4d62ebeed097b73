//! The executor: it alone runs plans, on links it does not look into.
//!
//! One [`Endpoint`] per communicator and rank holds the table of operations in flight and the machine that runs
//! them. Whoever has time drives it: the process's lane, or the thread that polls or waits. Nothing blocks inside.

mod active;
mod deadlines;
pub(crate) mod device;
mod endpoint;
mod filling;
mod inflight;
mod lane;
mod machine;
mod operation;
mod p2p;
mod port;
pub(crate) mod quarantine;
mod values;

pub(crate) use active::{Active, Pass};
pub(crate) use endpoint::together::{Together, poll_together, wait_together};
pub(crate) use endpoint::{Control, Endpoint, EndpointConfig, Machines, Polled, Submission};
pub(crate) use inflight::{Finished, Inflight, Key};
#[cfg(test)]
pub(crate) use lane::tests::spoil;
pub(crate) use lane::{Lane, lane};
pub(crate) use machine::{FOLDED_FROM, MOST_FOLD, Phantom, STAGED_FROM, STRIPE, cut};
pub(crate) use operation::{Operation, Part, PartList, Reduction, Tables, Then};
#[cfg(feature = "fuzzing")]
pub(crate) use p2p::Messages;
pub(crate) use p2p::{Direction, Message};
pub(crate) use port::{DEVICES, Opener, Port};

/// What an attempt to make progress came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Something moved.
    Advanced,
    /// There is work, and it waits for a peer (or its input).
    Blocked,
    /// There is nothing to do.
    Idle,
}
