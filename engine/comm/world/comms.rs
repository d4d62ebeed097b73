//! The communicators of a rank, and what is heard of one before it is made here.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::exec::Endpoint;
use crate::group::message::{CommId, Message};
use crate::types::{Map, Rank};

/// At most so many messages are kept for communicators that a peer has and this rank does not have.
const EARLY: usize = 256;

/// The communicators that a rank has.
#[derive(Default)]
pub(super) struct Comms {
    made: Mutex<Map<CommId, Weak<Endpoint>>>,
    /// The last [`EARLY`] messages about communicators that are not made here yet (or ended so long ago that the pool has forgotten their ids),
    /// each with its sender and the number of losses that were known when it came.
    early: Mutex<VecDeque<(Rank, Message, usize)>>,
}

impl Comms {
    pub(super) fn insert(&self, comm: CommId, endpoint: &Arc<Endpoint>) {
        let mut made = self.made.lock();
        made.retain(|_, endpoint| endpoint.strong_count() > 0);
        made.insert(comm, Arc::downgrade(endpoint));
    }

    pub(super) fn all(&self) -> Vec<Arc<Endpoint>> {
        let mut made = self.made.lock();
        made.retain(|_, endpoint| endpoint.strong_count() > 0);
        made.values().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn find(&self, comm: CommId) -> Option<Arc<Endpoint>> {
        self.made.lock().get(&comm).and_then(Weak::upgrade)
    }

    /// Keeps a message about a communicator that this rank does not have.
    pub(super) fn keep_early(&self, from: Rank, message: Message, known_losses: usize) {
        let mut early = self.early.lock();
        if early.len() == EARLY {
            early.pop_front();
        }
        early.push_back((from, message, known_losses));
    }

    /// The kept messages about a communicator, in the order in which they came.
    pub(super) fn early(&self, comm: CommId) -> Vec<(Rank, Message, usize)> {
        self.early.lock().iter().filter(|(_, m, _)| m.comm() == Some(comm)).cloned().collect()
    }
}
