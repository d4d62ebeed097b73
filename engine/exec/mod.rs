//! The executor: it alone runs plans. It knows links only as [`LinkTx`](crate::link::LinkTx) and [`LinkRx`](crate::link::LinkRx), not their
//! kinds.
//!
//! One [`Endpoint`] per communicator and rank holds the table of operations in flight and what runs them: a [`PartRun`](run::PartRun) for
//! each part, in one kind of memory ([`Backend`](backend::Backend), [`Lends`](backend::Lends)). Whoever has time drives the endpoint: the
//! process's progress thread, or a thread that submits, polls or waits. Nothing in a pass blocks.

mod active;
pub(crate) mod backend;
pub(crate) mod carrier;
mod deadlines;
mod endpoint;
mod filling;
mod host;
mod inflight;
mod operation;
mod p2p;
mod port;
mod progress_thread;
pub(crate) mod quarantine;
mod run;
mod runtime;
mod sources;
mod timed;

pub(crate) use crate::link::Opener;
#[cfg(feature = "fuzzing")]
pub(crate) use active::{Active, Pass};
pub(crate) use endpoint::together::{Together, poll_together, wait_together};
pub(crate) use endpoint::{Control, Endpoint, EndpointConfig, Finished, IdleRuns, ProgramKey};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use inflight::Inflight;
pub(crate) use inflight::Key;
pub(crate) use operation::{Operation, Part, PartList, Reduction, Then};
#[cfg(feature = "fuzzing")]
pub(crate) use p2p::Messages;
pub(crate) use p2p::{Direction, EAGER, Message};
pub(crate) use port::{DEVICES, Payload, Port};
#[cfg(test)]
pub(crate) use progress_thread::tests::spoil;
pub(crate) use progress_thread::{Driven, ProgressThread, keep_and_look, progress_thread};
pub(crate) use run::{NextPart, Parts, STRIPE, StagedBuf, WINDOW, Work, cut};
pub(crate) use runtime::{Runtime, Task};
pub(crate) use timed::{Clock, Loans, Timed};

/// How many operations of a communicator a rank may have queued or in flight. Programs should never come near this bound. It limits the
/// memory that the table takes, about half a kilobyte for each operation.
pub(crate) const QUEUE_LIMIT: usize = 1 << 20;

/// What an attempt to make progress came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Something moved.
    Advanced,
    /// Nothing moved. There may be work, which waits for a peer, for its input, or for a lock that another thread holds.
    Blocked,
    /// There is nothing to do.
    Idle,
}
