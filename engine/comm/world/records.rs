//! What a world's flight recorders say, and when.

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

/// Dead communicators that are written of, also when nobody holds them any more: the last ones.
const DEAD: usize = 256;

/// What is written beside the recorders of living communicators, and where.
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

/// What is written of a communicator. Whoever hears that it has died may drop it at once, and it is still written of.
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
    /// A communicator dies: has the recorders of all written, by somebody else.
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
    fn recording(&self, cause: Option<&Error>) -> Recording {
        let living = self.comms.all();
        // Whoever tells of a death meanwhile does not wait for this.
        let mut dead: Vec<Entry> = self.records.dead.lock().iter().cloned().collect();
        dead.retain(|dead| !living.iter().any(|e| e.config.comm == dead.id));
        let alive = living.iter().map(|e| Entry::of(self, e, e.health.first_cause()));
        let comms = alive.chain(dead).map(Entry::record).collect();
        let (hosts, clock) = (self.hosts.of_ranks.clone(), *self.records.clock.lock());
        let place = RankPlace { world: self.name(), rank: self.rank, size: self.size(), hosts, clock };
        Recording::new(place, cause, comms, self.records.file.clone())
    }
}
