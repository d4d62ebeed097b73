//! What is written of a world's flight recorders, and when.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::World;
use crate::error::{Error, RecordFile};
use crate::exec::Endpoint;
use crate::link::kinds::farthest;
use crate::trace::writer::{Recorded, WRITER};
use crate::trace::{ClockDifference, CommRecord, RankPlace, Recorder, Recording};

/// This many dead communicators, the last ones, are written about, even if nobody holds them any more.
const DEAD: usize = 256;

/// Where a rank's flight recorders are written, and what is written with those of its living communicators.
#[derive(Default)]
pub(super) struct Records {
    /// Where the flight recorders are written.
    pub(super) file: Option<Arc<RecordFile>>,
    /// How this host's clock differs from rank 0's, where that is another host.
    pub(super) clock: Mutex<Option<ClockDifference>>,
    /// Communicators that have died; the last ones.
    dead: Mutex<VecDeque<Entry>>,
}

impl Records {
    pub(super) fn new(file: Option<RecordFile>) -> Records {
        Records { file: file.map(Arc::new), ..Records::default() }
    }

    fn bury(&self, entry: Entry) {
        let mut all = self.dead.lock();
        if all.len() == DEAD {
            all.pop_front();
        }
        all.push_back(entry);
    }
}

/// What is written about a communicator. If it has died, its entry is kept, so that it is written about even if the user drops it at once.
#[derive(Clone)]
struct Entry {
    id: u64,
    name: String,
    rank: usize,
    members: Vec<usize>,
    link: String,
    cause: Option<Error>,
    recorder: Arc<Recorder>,
}

impl Entry {
    fn of(world: &World, endpoint: &Endpoint, cause: Option<&Error>) -> Entry {
        let (config, recorder) = (&endpoint.config, endpoint.recorder.clone());
        let (name, members) = (config.name.clone(), config.members.clone());
        let link = farthest(&world.links_to(&members)).name().to_owned();
        Entry { id: config.comm, name, rank: config.rank, members, link, cause: cause.cloned(), recorder }
    }

    fn record(self) -> CommRecord {
        let Entry { id, name, rank, members, link, cause, recorder } = self;
        let (poisoned, operations) = (cause.map(|cause| cause.to_string()), recorder.snapshot(members.len()));
        let (messages, steps) = (recorder.messages(), recorder.steps());
        CommRecord { id, name, rank, members, link, poisoned, operations, messages, steps }
    }
}

impl World {
    /// Called when a communicator dies: asks the writer's thread to write the recorders of all communicators.
    pub(super) fn record(self: &Arc<Self>, endpoint: &Endpoint, cause: &Error) {
        self.records.bury(Entry::of(self, endpoint, Some(cause)));
        WRITER.request(self.recorded(), cause);
    }

    /// Writes the recorders now, on this thread.
    pub(in crate::comm) fn record_now(&self) -> Result<PathBuf, Error> {
        let off = || Error::invalid("record", "ALLSTREAM_TRACE_DIR is `off`: flight recorders go nowhere");
        self.recording(None).write()?.ok_or_else(off)
    }

    fn recorded(self: &Arc<Self>) -> Weak<dyn Recorded> {
        let this: Weak<World> = Arc::downgrade(self);
        this
    }

    /// Whether recorders of this rank are still to be written. If so, the writer hurries, as the caller is about to leave.
    pub(in crate::comm) fn is_recording(self: &Arc<Self>) -> bool {
        WRITER.is_behind(&self.recorded())
    }

    /// Gives the recorders a bounded time to be written.
    pub(in crate::comm) fn wait_for_recorders(self: &Arc<Self>, patience: Duration) {
        WRITER.wait(&self.recorded(), patience);
    }
}

impl Recorded for World {
    fn recording(&self, cause: Option<&Error>) -> Recording {
        let living = self.comms.all();
        // Copied, so that a thread that reports a death meanwhile does not wait for the rest.
        let mut dead: Vec<Entry> = self.records.dead.lock().iter().cloned().collect();
        dead.retain(|dead| !living.iter().any(|e| e.config.comm == dead.id));
        let alive = living.iter().map(|e| Entry::of(self, e, e.health.first_cause()));
        let comms = alive.chain(dead).map(Entry::record).collect();
        let (hosts, clock) = (self.hosts.of_ranks.clone(), *self.records.clock.lock());
        let place = RankPlace { world: self.name(), rank: self.rank, size: self.size(), hosts, clock };
        Recording::new(place, cause, comms, self.records.file.clone())
    }
}
