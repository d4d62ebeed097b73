//! [`Carrier`]: what carries an operation out where the host does not do so alone.
//!
//! An operation without a carrier is the host's: its parts run in the host's memory ([`Parts`]), and when all of them have run the operation
//! is done. Where an operation has a carrier, the endpoint has the carrier make each pass. The carrier may first bring the operation's
//! memory from elsewhere, may run the parts in the communicator's [`Lane`], or may give the whole operation to a library. All that the
//! endpoint knows of carriers stands in this file. The carriers of CUDA are in `engine/device/carriers/`.

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::host::{Host, HostLoans};
use super::operation::Operation;
use super::port::Port;
use super::run::{NextPart, Parts, Work};
use crate::error::{Error, Missing, MissingState};
use crate::link::exit::{IsOver, Lease};
use crate::mem::{ALL, Reach};
use crate::types::{Rank, Signature};

/// An operation as a call makes it, and what carries it out.
pub(crate) struct Carried {
    pub(crate) operation: Operation,
    /// `None`: the host carries the operation out, in its own memory.
    pub(crate) carrier: Option<Arc<dyn Carrier>>,
}

impl From<Operation> for Carried {
    /// The host is to carry the operation out.
    fn from(operation: Operation) -> Carried {
        Carried { operation, carrier: None }
    }
}

/// Where an operation's parts may run: in the host's memory, over the host's links; or in the device's lane, over the lane's links.
pub(crate) struct Lanes<'a> {
    pub(super) host: &'a mut Parts<Host, HostLoans>,
    pub(super) port: &'a mut Port,
    /// The lane of this rank's device, where the communicator is bound to one.
    pub(crate) device: Option<&'a mut (dyn Lane + 'static)>,
}

impl Lanes<'_> {
    /// Makes one pass over the parts in the host's memory. Returns whether anything moved, and whether no part is left.
    pub(crate) fn pass_on_host(&mut self, work: &mut Work<'_>) -> Result<(bool, bool), Error> {
        self.host.pass(work, None, self.port)
    }

    /// How far the results in the host's memory are complete. `next`: the part that is to start next.
    pub(crate) fn stored_on_host(&self, next: NextPart) -> Reach {
        self.host.stored(next)
    }
}

/// What runs a communicator's parts in memory other than the host's, with the links between the ranks' memory of that kind. A communicator
/// has one lane at most, which it gets when it is bound.
pub(crate) trait Lane: Send {
    /// Makes one pass over the parts. Returns whether anything moved, and whether no part is left.
    fn pass(&mut self, work: &mut Work<'_>) -> Result<(bool, bool), Error>;

    /// Takes back the memory that was lent to peers and that they have released. Returns whether there was any.
    fn reap(&mut self) -> Result<bool, Error>;

    /// Adds to `ranks` those from which the parts wait for a frame, and those to which a frame cannot be sent yet for want of room.
    fn waiting_for(&mut self, ranks: &mut Vec<Rank>);

    /// Forgets the parts in flight, because they are done or because the operation has failed.
    fn clear(&mut self);

    /// The links of this lane.
    fn port(&mut self) -> &mut Port;
}

/// What a pass of a carrier came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// The operation is not complete yet. The value says whether anything moved in this pass.
    Going(bool),
    /// All parts are done, and the same parts are to run once more: for example, the barrier of an operation that a library takes on a device.
    Again,
    /// All parts are done. What the carrier may still have to do is to copy results back ([`Carrier::copies_back`]).
    Complete,
    /// All of the operation has been put on a device's stream. The operation is over when [`OnStream::is_over`] says so.
    OnStream,
}

/// What a carrier is told when its operation is submitted.
pub(crate) struct Submission<'a> {
    /// The communicator's name, for messages to people.
    pub(crate) comm: &'a str,
    /// The communicator and its generation as one number, which is the same on all ranks.
    pub(crate) place: u64,
    /// The operation's number among the communicator's collectives.
    pub(crate) number: u64,
    pub(crate) signature: Signature,
    /// Wakes whoever drives the communicator.
    pub(crate) waker: &'a Waker,
}

/// The carrier calls this when the copies of the results have been put on their stream. From then on they have the operation's time limit
/// once more.
pub(crate) type Started = Box<dyn FnOnce() + Send>;
/// The carrier calls this when the copies of the results have ended, well or not.
pub(crate) type Ended = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// What carries one operation out. Only [`pass`](Carrier::pass) has to be written: each default is right for a carrier without that need.
pub(crate) trait Carrier: Send + Sync {
    /// The operation is submitted now. The caller holds the lock of the endpoint's table.
    fn submitted(&self, _: &Submission<'_>) {}

    /// How far the operation may go when it begins: up to where its memory has come by then.
    fn reach(&self) -> Reach {
        ALL
    }

    /// Looks at what has come of the operation's memory. `known`: how many pieces were there at the last look. Returns how many are there
    /// now, and how far the operation may go with those. `waker` is woken when more pieces have come.
    ///
    /// # Errors
    /// A piece will not come.
    fn arrived(&self, known: usize, _waker: &Waker) -> Result<(usize, Reach), Error> {
        Ok((known, ALL))
    }

    /// Makes one pass over the operation: does what can be done now.
    fn pass(&self, work: &mut Work<'_>, lanes: &mut Lanes<'_>) -> Result<Passed, Error>;

    /// What keeps the operation from its end although all peers have called. The error of an operation that is overdue names it.
    fn held_up(&self) -> Option<MissingState> {
        None
    }

    /// Whether copies that nothing else waits for may be under way, to or from the operation's memory. A communicator that fails waits for
    /// them for a while; if they have not ended then, the operation's buffers are not given back.
    fn is_settling(&self) -> bool {
        false
    }

    /// Whether anything but this process's own threads touches the buffers: a device, or a library.
    fn is_elsewhere(&self) -> bool {
        false
    }

    /// Whether the ranks can meet for this operation only after all that was put on streams earlier has ended. Such an operation is overdue only
    /// once it is the oldest: until then the one before it is to blame.
    fn meets_last(&self) -> bool {
        false
    }

    /// Whether all ranks have called the operation, and it waits on the device for this rank's own inputs, or for those of the operation before it.
    /// The time limit counts once these are there.
    fn lacks_inputs(&self) -> bool {
        false
    }

    /// The ranks that have called the operation, and whose missing inputs keep the operation from this rank's stream.
    fn unready(&self) -> Vec<Rank> {
        Vec::new()
    }

    /// Whether the operation waits for something that does not tell when it is there, so that the endpoint has to ask again and again.
    fn is_to_be_asked(&self) -> bool {
        false
    }

    /// Whether the results have to be copied back when all parts are done.
    fn copies_back(&self) -> bool {
        false
    }

    /// Starts to copy back the results, where [`copies_back`](Carrier::copies_back) says so, except those that the carrier has copied back before.
    /// The caller holds none of the engine's locks, and may block.
    fn copy_back(self: Arc<Self>, _: Started, ended: Ended) {
        ended(Ok(()));
    }

    /// The operation on a device's stream, if its work is put on one. A carrier whose pass comes to [`Passed::OnStream`] has this.
    fn on_stream(&self) -> Option<&dyn OnStream> {
        None
    }
}

/// An operation whose work is put on a device's stream. No function of it calls a driver: that could block.
pub(crate) trait OnStream {
    /// Whether all of the operation is on streams: on those of all ranks that touch its buffers.
    fn is_enqueued(&self) -> bool;

    /// Whether those streams have come to the operation's end.
    fn is_over(&self) -> Result<bool, Error>;

    /// Makes the thread of `device/waiter.rs` ask the driver about the stream. `then` is called if the stream fails before the operation's end, or if
    /// the stream has come to that end but the word in memory that should show this does not.
    fn tell(&self, then: Box<dyn FnOnce() + Send>);

    /// Whether this rank's own inputs are there. The time limit of an operation that is on a stream counts from then.
    fn has_inputs(&self) -> bool;

    /// Whether the driver has taken the operation's first work. Until then (the driver may be blocking) the time limit counts even without inputs.
    fn is_taken(&self) -> bool;

    /// Which ranks keep the stream from the operation's end although all have called. `us`: this rank.
    fn late(&self, us: Rank) -> Vec<Missing>;

    /// The communicator has failed for this cause, and is about to end its operations, of which this is one. May be called more than once.
    fn give_up(&self, cause: &Error);

    /// The operation has failed for this cause, and is given up. Returns whether somebody may still touch the buffers all the same.
    fn cannot_give_up(&self, cause: &Error) -> bool;

    /// The operation has failed, and somebody may touch its buffers for longer than anybody waits: whoever holds the buffers must keep them until all
    /// leases in `until` are over; `None`: for good.
    fn lose(&self, until: Option<Vec<Arc<Lease>>>);

    /// What makes streams wait for the operation's end while the operation still runs; `comm/ordered.rs` knows its type.
    fn joins(&self) -> Arc<dyn Any + Send + Sync>;
}

/// What a communicator is bound to besides the host's memory and links: devices, for example, or a library.
pub(crate) trait Bound: Any + Send + Sync {
    /// Whether a library takes operations of this communicator whole.
    fn has_library(&self) -> bool {
        false
    }

    /// The communicator has failed: nothing more of it is begun on devices, and a library is to end what it does. Only the first call does
    /// anything.
    fn abort(&self) {}

    /// For a communicator that has failed: whether a library may still touch the memory of operations that it took, or has work left on a
    /// stream. `since`: for how long the communicator has been ending.
    fn is_library_at_work(&self, _since: Duration) -> bool {
        false
    }

    /// For a communicator that has failed: whether any device may still touch its memory. `since`: for how long it has been ending.
    fn is_touched(&self, _: Option<&mut (dyn Lane + 'static)>, _since: Duration) -> bool {
        false
    }

    /// Called when devices may go on touching the failed communicator's memory for longer than anybody waits.
    fn leave(&self) {}

    /// What says, for a communicator that has failed, that no device touches its memory any more. `None`: nobody can tell.
    fn touched_until(&self) -> Option<IsOver> {
        None
    }

    /// Memory of operations that have failed, beside their buffers: devices may touch it as long as they may touch the buffers. `None`: whoever
    /// carried the operations out keeps that memory.
    fn remains(&self) -> Option<Box<dyn Send>> {
        None
    }
}
