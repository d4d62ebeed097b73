//! What control connections carry between the ranks of a world.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Lost};
use crate::link::Break;
use crate::types::{Rank, Signature};

/// Names a communicator in a world. The world's own is 0. The number of every other one is computed from its parent's, by each member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CommId(pub(crate) u64);

impl CommId {
    /// The world's own communicator.
    pub(crate) const WORLD: CommId = CommId(0);
}

/// A control message. On a connection it is a 4-byte little-endian length, followed by so many bytes of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// "I am here." Sent when the sender has sent nothing else for a while.
    Heartbeat,
    /// The sender leaves the world.
    Goodbye {
        /// The first loss that the sender knows of. `None`: it knows of none, and leaves in peace.
        cause: Option<Error>,
    },
    /// The communicator is dead for everyone, for this cause.
    Abort {
        /// Which communicator.
        comm: CommId,
        /// The first cause the sender knows of.
        cause: Error,
    },
    /// "I have waited for a while in this operation: have you called the same?" A rank that closes asks so about its last collectives, too.
    /// If the signature is of a message: "I have waited for a while to receive it from you", which is not answered.
    Stalled {
        /// Which communicator.
        comm: CommId,
        /// Number of the operation.
        number: u64,
        /// What the sender called.
        signature: Signature,
    },
    /// The answer to [`Message::Stalled`]: what the sender called last.
    Called {
        /// Which communicator.
        comm: CommId,
        /// Number of the operation that was asked about.
        number: u64,
        /// Number of the last collective that the sender has called (`None`: it has called none yet).
        last: Option<u64>,
        /// The oldest message that the sender waits to receive, and the rank that is to send it.
        receives: Option<(Rank, Signature)>,
    },
    /// "A data connection between us broke: do you know the cause?" The receiver answers with [`Message::Abort`]. If it knows no cause,
    /// it aborts the communicator because of the break.
    Broke {
        /// Which communicator.
        comm: CommId,
        /// What the sender knows of the break.
        what: Break,
    },
    /// The sender closes the communicator after this many collectives.
    Closing {
        /// Which communicator.
        comm: CommId,
        /// How many collectives the sender has called.
        calls: u64,
    },
    /// A step of an agreement ([`Step`]).
    Agree {
        /// Which communicator.
        comm: CommId,
        /// The members that the sender knows lost, and how.
        lost: Vec<(Rank, Lost)>,
        /// What the sender says.
        step: Step,
    },
    /// The sender has ended a communicator for good. It does not touch the communicator's rings (queues in the members' memory,
    /// `comm/world/pool.rs`) any more, and no later communicator of the same members will use them. Each member sends this once.
    Retired {
        /// The communicator for which the rings were made.
        comm: CommId,
    },
    /// The question "What time is it where you are?", or its answer. Times are microseconds since 1970.
    Clock {
        /// When the question was sent, by the clock of the rank that asks. The answer repeats it.
        asked_us: f64,
        /// When the question arrived, by the clock of the rank that answers. `None`: this is the question.
        at_us: Option<f64>,
    },
    /// The sender says whether it takes part in making a communicator of another one's survivors. Each member that shrinks sends this once.
    Meet {
        /// The communicator to be made.
        comm: CommId,
        /// What the sender would bring to a split (its row of the `Proposal` in `comm/world/pool.rs`). `None`: it does not take part.
        row: Option<[u64; 5]>,
    },
}

/// What members of a communicator tell each other to agree (docs/adr/0010-agree.md). Ranks are ranks of that communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Step {
    /// The sender has called `agree`. From members below `ballot`, which it knows to be lost, it accepts nothing any more.
    Vote {
        /// Number of the agreement.
        number: u64,
        /// The flag that the sender called with.
        flag: bool,
        /// The sender's coordinator: the lowest member that it does not know to be lost.
        ballot: Rank,
        /// The outcome that the sender has accepted last, and from which coordinator.
        accepted: Option<(Rank, Outcome)>,
    },
    /// The sender is the coordinator, and proposes this outcome as the verdict.
    Propose {
        /// Number of the agreement.
        number: u64,
        /// The outcome.
        outcome: Outcome,
    },
    /// The sender has accepted what the receiver proposed.
    Accept {
        /// Number of the agreement.
        number: u64,
    },
    /// This outcome is the verdict: every member that is not lost has accepted it.
    Decide {
        /// Number of the agreement.
        number: u64,
        /// The outcome.
        outcome: Outcome,
    },
    /// The message is sent only for its list of lost members.
    Lost,
}

/// The outcome of an agreement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Whether all flags that were counted are true.
    pub(crate) flag: bool,
    /// Members whose flags were not counted, and how they were lost.
    pub(crate) lost: Vec<(Rank, Lost)>,
}

impl Message {
    /// The communicator that this message is about.
    pub(crate) fn comm(&self) -> Option<CommId> {
        match self {
            Message::Abort { comm, .. }
            | Message::Stalled { comm, .. }
            | Message::Called { comm, .. }
            | Message::Broke { comm, .. }
            | Message::Closing { comm, .. }
            | Message::Retired { comm }
            | Message::Meet { comm, .. }
            | Message::Agree { comm, .. } => Some(*comm),
            Message::Heartbeat | Message::Clock { .. } | Message::Goodbye { .. } => None,
        }
    }
}

/// What a rank says of a data connection that it opens. Data goes over the connection in one direction only, from this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataHello {
    /// Which communicator.
    pub(crate) comm: CommId,
    /// World rank of the rank that opens the connection, and sends the data.
    pub(crate) from: Rank,
    /// 0: collectives, 1: point-to-point.
    pub(crate) channel: u8,
}
