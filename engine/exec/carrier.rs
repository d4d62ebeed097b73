//! [`Carrier`]: what carries an operation out where the host does not do so alone.
//!
//! An operation without one is the host's: its parts run in the host's memory ([`Parts`]), and when all have run it is done. One with a
//! carrier has its passes made by that: it may bring the memory from elsewhere first, run the parts in a [`Lane`] of its own, or give the
//! operation to a library. The endpoint knows no more of it than what is here. `engine/device/carriers/` has those of CUDA.

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::host::{Host, HostLoans};
use super::operation::Operation;
use super::parts::{NextPart, Parts, Work};
use super::port::Port;
use crate::error::{Error, Missing, MissingState};
use crate::mem::{ALL, Reach};
use crate::types::{Rank, Signature};

/// An operation, and what carries it out.
pub(crate) struct Carried {
    pub(crate) operation: Operation,
    /// None: the host does, in its memory.
    pub(crate) carrier: Option<Arc<dyn Carrier>>,
}

impl From<Operation> for Carried {
    /// The host's.
    fn from(operation: Operation) -> Carried {
        Carried { operation, carrier: None }
    }
}

/// Where an operation's parts may run: in the host's memory, over the host's links; or in another, over links of its own.
pub(crate) struct Lanes<'a> {
    pub(super) host: &'a mut Parts<Host, HostLoans>,
    pub(super) port: &'a mut Port,
    /// Of the device to which the communicator is bound.
    pub(crate) device: Option<&'a mut (dyn Lane + 'static)>,
}

impl Lanes<'_> {
    /// One pass over the parts, in the host's memory. Whether anything moved, and whether no part is left.
    pub(crate) fn pass_on_host(&mut self, work: &mut Work<'_>) -> Result<(bool, bool), Error> {
        self.host.pass(work, None, self.port)
    }

    /// How far the results are in the host's memory: all of the parts before this one, and so many rounds of it.
    pub(crate) fn stored_on_host(&self, next: NextPart) -> Reach {
        self.host.stored(next)
    }
}

/// The runs of a communicator's parts in memory that is not the host's, and the links between its ranks there.
pub(crate) trait Lane: Send {
    /// One pass over the parts. Whether anything moved, and whether no part is left.
    fn pass(&mut self, work: &mut Work<'_>) -> Result<(bool, bool), Error>;

    /// Takes back what peers have given back. Whether anything came.
    fn reap(&mut self) -> Result<bool, Error>;

    /// Adds the ranks whose frames, or whose room, the parts wait for.
    fn waiting_for(&mut self, ranks: &mut Vec<Rank>);

    /// Forgets the parts in flight: done, or failed.
    fn clear(&mut self);

    /// The links.
    fn port(&mut self) -> &mut Port;
}

/// What a pass of a carrier came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// The operation goes on. Whether anything moved.
    Going(bool),
    /// The same parts are to run once more.
    Again,
    /// All parts are done, and so is the carrier, but for what it [copies back](Carrier::copies_back).
    Complete,
    /// All of the operation is on a device's stream: it is over when [`Carrier::is_over`] says so.
    OnStream,
}

/// What a carrier hears of its operation when that is submitted.
pub(crate) struct Submission<'a> {
    /// The communicator, for people.
    pub(crate) comm: &'a str,
    /// The same and its generation, as one number that all ranks have.
    pub(crate) place: u64,
    pub(crate) number: u64,
    pub(crate) signature: Signature,
    /// Of who drives.
    pub(crate) waker: &'a Waker,
}

/// To be called when the copies of results are on their stream.
pub(crate) type Started = Box<dyn FnOnce() + Send>;
/// To be called when they have ended.
pub(crate) type Ended = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// What carries one operation out.
pub(crate) trait Carrier: Send + Sync {
    /// The operation is submitted. The endpoint's table is locked.
    fn submitted(&self, _: &Submission<'_>) {}

    /// How far the operation's memory is there from the beginning.
    fn reach(&self) -> Reach {
        ALL
    }

    /// Looks at what has come of the operation's memory since so many pieces were `known`: how many are there, and how far the operation
    /// may go by that. `waker` is woken when more has come.
    ///
    /// # Errors
    /// It does not come.
    fn arrived(&self, known: usize, _waker: &Waker) -> Result<(usize, Reach), Error> {
        Ok((known, ALL))
    }

    /// One pass.
    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error>;

    /// What keeps the operation from its end, where no peer's call is missing.
    fn held_up(&self) -> Option<MissingState> {
        None
    }

    /// Whether copies of its memory may be on their way that nobody waits for.
    fn is_settling(&self) -> bool {
        false
    }

    /// Whether somebody else than this process's threads touches the buffers: a device, or a library.
    fn is_elsewhere(&self) -> bool {
        false
    }

    /// Whether its ranks meet only behind all that has not ended yet: it is overdue only when it is the oldest.
    fn meets_last(&self) -> bool {
        false
    }

    /// Whether it was given to something that does not tell when it is done, and is to be asked.
    fn is_to_be_asked(&self) -> bool {
        false
    }

    /// Whether results are to be copied back when all parts are done.
    fn copies_back(&self) -> bool {
        false
    }

    /// Starts to copy the results back. The caller holds no lock of the engine's.
    fn copy_back(self: Arc<Self>, _: Started, ended: Ended) {
        ended(Ok(()));
    }

    /// Whether all of it is on a stream.
    fn is_enqueued(&self) -> bool {
        false
    }

    /// Of an operation that is on a stream: whether that has come to its end.
    fn is_over(&self) -> Result<bool, Error> {
        Ok(true)
    }

    /// Calls `then` when the stream has come to its end, or will not.
    fn tell(&self, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    /// Whether its own inputs are there.
    fn has_inputs(&self) -> bool {
        true
    }

    /// Who keeps the stream from its end, on rank `us`, though all have called.
    fn late(&self, _us: Rank) -> Vec<Missing> {
        Vec::new()
    }

    /// The operation has failed for this cause: gives it up. Whether somebody may still touch its buffers all the same.
    fn cannot_give_up(&self, _cause: &Error) -> bool {
        false
    }

    /// It has failed, and its buffers are not to be given back by whoever has them.
    fn lose(&self) {}

    /// What a stream can be made to wait for before the operation is over; `None`: nothing. `comm/ordered.rs` knows what it is.
    fn joins(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}

/// What a communicator is bound to, beside the host's memory and links.
pub(crate) trait Bound: Any + Send + Sync {
    /// Whether a library takes operations whole.
    fn has_library(&self) -> bool {
        false
    }

    /// The communicator is dead: a library ends what it does. Called again it does nothing.
    fn abort(&self) {}

    /// Of a dead communicator: whether a library may still touch the memory of operations that it took, or streams that it uses have not
    /// come to their ends.
    fn is_library_at_work(&self) -> bool {
        false
    }

    /// Of a dead communicator with ranks in other processes, `since` its end: whether any device may still touch its memory.
    fn is_touched(&self, _: Option<&mut (dyn Lane + 'static)>, _since: Duration) -> bool {
        false
    }

    /// Devices may touch it for longer than anybody waits.
    fn leave(&self) {}
}
