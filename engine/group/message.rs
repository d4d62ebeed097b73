//! What control connections carry between the ranks of a world.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Lost};
use crate::link::Break;
use crate::types::{Rank, Signature};

/// Names a communicator in a world: the world's own is 0, children take the numbers their parent agrees on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CommId(pub(crate) u64);

impl CommId {
    /// The world's own.
    pub(crate) const WORLD: CommId = CommId(0);
}

/// A control message. One travels as a 4-byte little-endian length and JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// "I am here." Sent when nothing else was for a while.
    Heartbeat,
    /// The sender leaves; with the first cause if it leaves because of one.
    Goodbye {
        /// Why, if not in peace.
        cause: Option<Error>,
    },
    /// The communicator is dead for everyone, for this cause.
    Abort {
        /// Which communicator.
        comm: CommId,
        /// The first cause the sender knows of.
        cause: Error,
    },
    /// "I have waited for a while in this operation: have you called the same?" Of a message: "I have waited for a while to
    /// receive it from you", which is not answered.
    Stalled {
        /// Which communicator.
        comm: CommId,
        /// Number of the operation.
        number: u64,
        /// What the sender called.
        signature: Signature,
    },
    /// Answer to [`Message::Stalled`]: the highest operation number the sender has called.
    Called {
        /// Which communicator.
        comm: CommId,
        /// Number in question.
        number: u64,
        /// The last operation called there (`None`: none yet).
        last: Option<u64>,
        /// A message that the sender waits to receive, and from whom: the oldest such.
        receives: Option<(Rank, Signature)>,
    },
    /// "A data connection between us broke: is there a cause that I have not heard of?" A member that knows of none aborts
    /// the communicator.
    Broke {
        /// Which communicator.
        comm: CommId,
        /// What the sender knows.
        what: Break,
    },
    /// The sender closes the communicator after this many collectives.
    Closing {
        /// Which communicator.
        comm: CommId,
        /// Collectives it has called.
        calls: u64,
    },
    /// A step of an agreement.
    Agree {
        /// Which communicator.
        comm: CommId,
        /// The members that the sender knows lost, and how.
        lost: Vec<(Rank, Lost)>,
        /// What it says.
        step: Step,
    },
    /// The sender has ended a communicator for good: it neither reads nor writes the rings of it any more, and does
    /// not offer to take it up again. Sent once, by each member.
    Retired {
        /// The communicator for which the rings were made.
        comm: CommId,
    },
    /// "What time is it there?", and the answer. Times are microseconds since 1970.
    Clock {
        /// The time where it was asked.
        asked_us: f64,
        /// The time at which it was heard there; `None` in the question.
        at_us: Option<f64>,
    },
    /// The sender takes part in making a communicator of another one's survivors, or does not. Sent once, by each of them.
    Meet {
        /// The communicator to be made.
        comm: CommId,
        /// What the sender brings, as to a split. `None`: it does not come.
        row: Option<[u64; 5]>,
    },
}

/// What members of a communicator say to agree: docs/adr/0010-agree.md. Ranks are the communicator's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Step {
    /// The sender has called, and will accept nothing from members below `ballot` any more: it knows them lost.
    Vote {
        /// Number of the agreement.
        number: u64,
        /// What it called with.
        flag: bool,
        /// Its coordinator.
        ballot: Rank,
        /// The outcome it has accepted last, and from which coordinator.
        accepted: Option<(Rank, Outcome)>,
    },
    /// The sender is coordinator, and this is what the verdict would be.
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
    /// Everyone who lives has accepted this.
    Decide {
        /// Number of the agreement.
        number: u64,
        /// The outcome.
        outcome: Outcome,
    },
    /// Nothing but who is lost.
    Lost,
}

/// What an agreement comes to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// All counted flags together.
    pub(crate) flag: bool,
    /// Members whose flags were not counted.
    pub(crate) lost: Vec<(Rank, Lost)>,
}

impl Message {
    /// The communicator that this is about.
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

/// Opens a data connection: from this rank, for this communicator, in this direction only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataHello {
    /// Which communicator.
    pub(crate) comm: CommId,
    /// World rank of the sender.
    pub(crate) from: Rank,
    /// 0: collectives, 1: point-to-point.
    pub(crate) channel: u8,
}
