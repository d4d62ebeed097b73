//! What a world's flight recorders say, and when.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::World;
use crate::error::Error;
use crate::exec::Endpoint;
use crate::trace::writer::{Recorded, WRITER};
use crate::trace::{CommRecord, Recorder, Recording};

/// Dead communicators that are written of, also when nobody holds them any more: the last ones.
const DEAD: usize = 256;

/// A communicator that has died. Whoever hears of it may drop it at once, and it is still written of.
#[derive(Clone)]
pub(super) struct Dead {
    id: u64,
    name: String,
    rank: usize,
    members: Vec<usize>,
    cause: Error,
    recorder: Arc<Recorder>,
}

impl World {
    /// A communicator dies: has the recorders of all written, by somebody else.
    pub(super) fn record(self: &Arc<Self>, endpoint: &Endpoint, cause: &Error) {
        let config = &endpoint.config;
        let dead = Dead {
            id: config.comm,
            name: config.name.clone(),
            rank: config.rank,
            members: config.members.clone(),
            cause: cause.clone(),
            recorder: endpoint.recorder.clone(),
        };
        {
            let mut all = self.dead.lock();
            if all.len() == DEAD {
                all.pop_front();
            }
            all.push_back(dead);
        }
        WRITER.request(self.recorded(), cause);
    }

    fn recorded(self: &Arc<Self>) -> Weak<dyn Recorded> {
        let this: Weak<World> = Arc::downgrade(self);
        this
    }

    /// Whether recorders are still to be written; whoever asks is about to go.
    pub(in crate::comm) fn is_recording(self: &Arc<Self>) -> bool {
        WRITER.is_behind(&self.recorded())
    }

    /// Gives the recorders a bounded time to be written.
    pub(in crate::comm) fn wait_for_recorders(self: &Arc<Self>, patience: Duration) {
        WRITER.wait(&self.recorded(), patience);
    }
}

impl Recorded for World {
    fn recording(&self, cause: &Error) -> Recording {
        let living = self.endpoints();
        let each = |e: &Arc<Endpoint>| CommRecord {
            id: e.config.comm,
            name: e.config.name.clone(),
            rank: e.config.rank,
            members: e.config.members.clone(),
            poisoned: e.dying_of().map(Error::to_string),
            operations: e.recorder.snapshot(),
        };
        let mut comms: Vec<CommRecord> = living.iter().map(each).collect();
        // Whoever tells of a death meanwhile does not wait for this.
        let dead: Vec<Dead> = self.dead.lock().iter().cloned().collect();
        let dropped = dead.iter().filter(|dead| !living.iter().any(|e| e.config.comm == dead.id));
        comms.extend(dropped.map(|dead| CommRecord {
            id: dead.id,
            name: dead.name.clone(),
            rank: dead.rank,
            members: dead.members.clone(),
            poisoned: Some(dead.cause.to_string()),
            operations: dead.recorder.snapshot(),
        }));
        Recording::new(self.name(), (self.rank, self.size), cause, comms)
    }
}
