//! What control connections carry between the ranks of a world.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::types::{Rank, Signature};

/// Names a communicator in a world: the world's own is 0, children take the numbers their parent agrees on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CommId(pub(crate) u64);

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
    /// "I have waited for a while in this operation: have you called the same?"
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
    },
    /// The sender closes the communicator after this many collectives.
    Closing {
        /// Which communicator.
        comm: CommId,
        /// Collectives it has called.
        calls: u64,
    },
    /// The sender has ended a communicator for good: it neither reads nor writes the rings of it any more, and does
    /// not offer to take it up again. Sent once, by each member.
    Retired {
        /// The communicator for which the rings were made.
        comm: CommId,
    },
}

impl Message {
    /// The communicator that this is about.
    pub(crate) fn comm(&self) -> Option<CommId> {
        match self {
            Message::Abort { comm, .. }
            | Message::Stalled { comm, .. }
            | Message::Called { comm, .. }
            | Message::Closing { comm, .. }
            | Message::Retired { comm } => Some(*comm),
            Message::Heartbeat | Message::Goodbye { .. } => None,
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
