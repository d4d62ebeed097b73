//! The flight recorder: the last operations of each communicator, written as JSON when something fails.
//!
//! All ranks concerned are told of a failure at once, before any file about it is written. A separate thread writes the
//! files ([`writer`]).
//!
//! `allstream trace` lays the files of all ranks side by side. Files go to `ALLSTREAM_TRACE_DIR`, or to `allstream-UID`
//! (the user's number) in the system's directory for temporary files, where the files of old worlds are removed;
//! with `ALLSTREAM_TRACE_DIR=off` no files are written.

pub(crate) mod log;
mod prune;
mod steps;
mod ticks;
pub(crate) mod writer;

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;

use self::steps::Steps;
pub(crate) use self::steps::{Step, StepOnRecord};
use self::ticks::{Both, Tick};
use crate::error::{Error, RecordFile, limits};
use crate::types::{Algo, DType, Kind, Rank, Signature};

/// How many collectives, and how many messages, are kept of each communicator.
const KEEP: usize = 256;

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Queued,
    Running,
    Done,
    Failed,
}

struct Record {
    number: u64,
    signature: Signature,
    state: State,
    submitted: Tick,
    started: Option<Tick>,
    finished: Option<Tick>,
    waiting: Vec<Rank>,
}

/// This rank's side of a message: the call that sends it, or the one that receives it.
struct MessageRecord {
    /// `send` or `recv`.
    direction: &'static str,
    peer: Rank,
    tag: u32,
    signature: Signature,
    submitted: Instant,
    finished: Option<Tick>,
}

/// The last messages of one communicator.
#[derive(Default)]
struct Messages {
    records: VecDeque<MessageRecord>,
    /// How many older records were dropped.
    gone: u64,
}

/// The last collectives of one communicator, in a ring: each overwrites the collective that was submitted [`KEEP`] calls before it.
#[derive(Default)]
struct Collectives {
    records: Vec<Record>,
    /// The number of the first collective ever recorded. The numbers after it have no gaps.
    first: u64,
}

impl Collectives {
    fn place(&self, number: u64) -> usize {
        (number.wrapping_sub(self.first) % KEEP as u64) as usize
    }

    /// In the order of their numbers.
    fn in_order(&self) -> impl Iterator<Item = &Record> {
        let oldest =
            self.records.iter().enumerate().min_by_key(|(_, r)| r.number).map_or(0, |(place, _)| place);
        let (newer, older) = self.records.split_at(oldest);
        older.iter().chain(newer)
    }
}

/// The last operations of one communicator.
pub(crate) struct Recorder {
    collectives: Mutex<Collectives>,
    messages: Mutex<Messages>,
    steps: Mutex<Steps>,
    /// When the recorder was made.
    start: Both,
}

impl Recorder {
    pub(crate) fn new() -> Recorder {
        let collectives = Collectives { records: Vec::with_capacity(KEEP), first: 0 };
        Recorder {
            collectives: Mutex::new(collectives),
            messages: Mutex::default(),
            steps: Mutex::default(),
            start: Both::now(),
        }
    }

    /// Notes a send or a receive that is called now. Returns the number by which [`message_finished`](Self::message_finished) finds it.
    pub(crate) fn message(
        &self,
        direction: &'static str,
        (peer, tag): (Rank, u32),
        signature: Signature,
        submitted: Instant,
    ) -> u64 {
        let mut messages = self.messages.lock();
        if messages.records.len() == KEEP {
            messages.records.pop_front();
            messages.gone += 1;
        }
        messages.records.push_back(MessageRecord {
            direction,
            peer,
            tag,
            signature,
            submitted,
            finished: None,
        });
        messages.gone + messages.records.len() as u64 - 1
    }

    /// The oldest recorded receive that has not finished: the rank that it is from, and its signature.
    pub(crate) fn awaited(&self) -> Option<(Rank, Signature)> {
        let messages = self.messages.lock();
        let waiting = messages.records.iter().find(|m| m.direction == "recv" && m.finished.is_none());
        waiting.map(|m| (m.peer, m.signature))
    }

    /// A message has been sent, or received.
    pub(crate) fn message_finished(&self, number: u64) {
        let mut messages = self.messages.lock();
        let place = number.checked_sub(messages.gone);
        if let Some(record) = place.and_then(|place| messages.records.get_mut(place as usize)) {
            record.finished = Some(Tick::now());
        }
    }

    /// Notes a collective that is submitted now. `has_begun`: it also begins now.
    pub(crate) fn submitted(&self, number: u64, signature: Signature, has_begun: bool) {
        let now = Tick::now();
        let (started, state) = if has_begun { (Some(now), State::Running) } else { (None, State::Queued) };
        let mut collectives = self.collectives.lock();
        if collectives.records.is_empty() {
            collectives.first = number;
        }
        let place = collectives.place(number);
        match collectives.records.get_mut(place) {
            // Overwritten in place, without an allocation, as every operation pays for this.
            Some(record) => {
                record.number = number;
                record.signature = signature;
                record.state = state;
                record.submitted = now;
                record.started = started;
                record.finished = None;
                record.waiting.clear();
            }
            None => {
                let (submitted, finished, waiting) = (now, None, Vec::new());
                collectives.records.push(Record {
                    number,
                    signature,
                    state,
                    submitted,
                    started,
                    finished,
                    waiting,
                });
            }
        }
    }

    /// The number of the last collective that was submitted.
    pub(crate) fn last(&self) -> Option<u64> {
        self.collectives.lock().records.iter().map(|record| record.number).max()
    }

    /// When a collective was submitted, when it began and when it ended. `None`: it has not ended, or is no longer on record.
    pub(crate) fn times(&self, number: u64) -> Option<(Instant, Instant, Instant)> {
        let time = self.start.times();
        let mut found = None;
        self.with(number, |record| {
            found = record.finished.map(|tick| {
                let submitted = time(record.submitted, self.start.time());
                let started = record.started.map_or(submitted, |started| time(started, submitted));
                (submitted, started, time(tick, started))
            });
        });
        found
    }

    /// Notes a step of a training loop whose gradients were reduced here.
    pub(crate) fn step(&self, step: Step) {
        self.steps.lock().keep(step);
    }

    /// The steps, as they are written to the file.
    pub(crate) fn steps(&self) -> Vec<StepOnRecord> {
        self.steps.lock().on_record(unix_times())
    }

    fn with(&self, number: u64, change: impl FnOnce(&mut Record)) {
        let mut collectives = self.collectives.lock();
        let place = collectives.place(number);
        if let Some(record) = collectives.records.get_mut(place).filter(|record| record.number == number) {
            change(record);
        }
    }

    /// Notes that a collective begins now.
    pub(crate) fn started(&self, number: u64) {
        self.with(number, |r| {
            r.state = State::Running;
            r.started = Some(Tick::now());
        });
    }

    pub(crate) fn waiting(&self, number: u64, ranks: &[Rank]) {
        self.with(number, |r| {
            r.waiting.clear();
            r.waiting.extend_from_slice(ranks);
        });
    }

    /// Notes that a collective has ended. A collective fails only because its communicator dies. Its state then stays as it was,
    /// queued or running, since this helps to find the cause.
    pub(crate) fn finished(&self, number: u64, state: State) {
        self.with(number, |r| {
            if state == State::Done {
                r.state = state;
            }
            r.finished = Some(Tick::now());
        });
    }

    /// The collectives of a communicator of `ranks` ranks, as they are written to the file.
    pub(crate) fn snapshot(&self, ranks: usize) -> Vec<OperationRecord> {
        let (at, time) = (unix_times(), self.start.times());
        let collectives = self.collectives.lock();
        let each = |r: &Record| {
            let submitted = time(r.submitted, self.start.time());
            let after = |tick| at(time(tick, submitted));
            OperationRecord {
                number: r.number,
                call: r.signature.to_string(),
                collective: r.signature.collective().map(Kind::name),
                algo: r.signature.algorithm().map(Algo::name),
                bytes: largest(&r.signature, ranks),
                state: r.state,
                submitted_us: at(submitted),
                started_us: r.started.map(after),
                finished_us: r.finished.map(after),
                waiting_for: if r.state == State::Done { Vec::new() } else { r.waiting.clone() },
            }
        };
        collectives.in_order().map(each).collect()
    }

    /// The messages, as they are written to the file.
    pub(crate) fn messages(&self) -> Vec<MessageOnRecord> {
        let (at, time) = (unix_times(), self.start.times());
        let messages = self.messages.lock();
        let each = |m: &MessageRecord| MessageOnRecord {
            direction: m.direction,
            peer: m.peer,
            tag: m.tag,
            call: m.signature.to_string(),
            submitted_us: at(m.submitted),
            finished_us: m.finished.map(|tick| at(time(tick, m.submitted))),
        };
        messages.records.iter().map(each).collect()
    }
}

/// Gives a function that converts a time to microseconds since 1970, by this host's clock.
fn unix_times() -> impl Fn(Instant) -> f64 {
    let (now, unix) = (Instant::now(), unix_us());
    move |at| unix - (now - at).as_secs_f64() * 1e6
}

/// Bytes of a rank's largest buffer, as `allstream perf` and the tuner's table count them. 0 for a list: its signature has no element type.
fn largest(signature: &Signature, ranks: usize) -> u64 {
    let element = DType::from_u8(signature.dtype).map_or(0, |dtype| dtype.size() as u64);
    let blocks = signature.collective().filter(|kind| kind.varies()).map_or(1, |_| ranks as u64);
    signature.count.saturating_mul(element).saturating_mul(blocks)
}

/// Microseconds since 1970 by this host's clock.
pub(crate) fn unix_us() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64() * 1e6)
}

/// One collective, as the file has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OperationRecord {
    number: u64,
    call: String,
    collective: Option<&'static str>,
    algo: Option<&'static str>,
    bytes: u64,
    state: State,
    submitted_us: f64,
    started_us: Option<f64>,
    finished_us: Option<f64>,
    waiting_for: Vec<Rank>,
}

/// One message, as the file has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MessageOnRecord {
    direction: &'static str,
    peer: Rank,
    tag: u32,
    call: String,
    submitted_us: f64,
    finished_us: Option<f64>,
}

/// One communicator, as the file has it.
#[derive(Debug, Serialize)]
pub(crate) struct CommRecord {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) rank: Rank,
    pub(crate) members: Vec<Rank>,
    /// The class of the farthest link between members.
    pub(crate) link: String,
    pub(crate) poisoned: Option<String>,
    pub(crate) operations: Vec<OperationRecord>,
    pub(crate) messages: Vec<MessageOnRecord>,
    /// Steps of a training loop whose gradients were reduced here.
    pub(crate) steps: Vec<StepOnRecord>,
}

/// The number of the process that first used the log or the writer that this is part of. A forked child of that process must not use it: the log's or
/// writer's thread runs in the parent alone, and its locks may stay locked for ever.
struct FirstProcess(AtomicU32);

impl FirstProcess {
    const fn new() -> FirstProcess {
        FirstProcess(AtomicU32::new(0))
    }

    /// Whether this process was forked from the first. If there is no first one yet, this process becomes the first.
    fn is_another(&self) -> bool {
        let (here, first) = (std::process::id(), self.0.load(Ordering::Relaxed));
        first != here && self.0.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed).is_err()
    }
}

/// Where files go unless the environment names a directory. Each user has a separate directory, as all users share the temporary directory.
fn default_directory() -> PathBuf {
    std::env::temp_dir().join(format!("allstream-{}", rustix::process::geteuid().as_raw()))
}

/// The directory that files go to. `None`: no files are written.
pub(crate) fn directory() -> Option<PathBuf> {
    match std::env::var_os("ALLSTREAM_TRACE_DIR") {
        Some(off) if off == "off" => None,
        Some(dir) if !dir.is_empty() => Some(PathBuf::from(dir)),
        _ => Some(default_directory()),
    }
}

/// How this host's clock differs from that of rank 0's host: what to add to a time by this host's clock, and by how much that may be wrong.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ClockDifference {
    pub(crate) offset_us: f64,
    pub(crate) error_us: f64,
    /// When the difference was found, by this host's clock.
    pub(crate) found_us: f64,
}

/// A rank's place in its world.
#[derive(Debug, Serialize)]
pub(crate) struct RankPlace {
    /// The world's name.
    pub(crate) world: String,
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    /// The host of each rank, numbered.
    pub(crate) hosts: Vec<u32>,
    /// `None` on rank 0's host.
    pub(crate) clock: Option<ClockDifference>,
}

/// All that a rank writes about its world.
#[derive(Debug, Serialize)]
pub(crate) struct Recording {
    version: u32,
    #[serde(flatten)]
    place: RankPlace,
    pid: u32,
    host: String,
    /// How many cores this process may run on, and their numbers.
    cores: usize,
    core_numbers: Vec<usize>,
    written_at_unix_ms: f64,
    cause: Option<String>,
    comms: Vec<CommRecord>,
    /// The file that the recording goes to. `None`: it is not written.
    #[serde(skip)]
    file: Option<Arc<RecordFile>>,
}

/// The numbers of the cores that this process may run on; none if the system does not tell.
fn core_numbers() -> Vec<usize> {
    let may = sched_getaffinity(None);
    may.map_or(Vec::new(), |may| (0..CpuSet::MAX_CPU).filter(|core| may.is_set(*core)).collect())
}

impl Recording {
    pub(crate) fn new(
        place: RankPlace,
        cause: Option<&Error>,
        comms: Vec<CommRecord>,
        file: Option<Arc<RecordFile>>,
    ) -> Recording {
        Recording {
            version: 1,
            file,
            place,
            pid: std::process::id(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            core_numbers: core_numbers(),
            written_at_unix_ms: unix_us() / 1e3,
            cause: cause.map(Error::to_string),
            comms,
        }
    }

    /// Writes the file. Returns its path, or `None` if no file is to be written. If writing fails, errors no longer name the file.
    ///
    /// # Errors
    /// The system's error, with the path.
    pub(crate) fn write(&self) -> Result<Option<PathBuf>, Error> {
        let Some(file) = &self.file else { return Ok(None) };
        let path = file.path();
        let doing = || format!("write the flight recorder {}", path.display());
        let text = serde_json::to_vec(self).unwrap_or_default();
        limits::check_file_size(text.len() as u64).map_err(|problem| {
            file.lose();
            Error::system(doing(), problem)
        })?;
        replace(path, &text).map_err(|e| {
            file.lose();
            Error::os(doing(), e)
        })?;
        prune::once();
        Ok(Some(path.to_owned()))
    }
}

/// Writes a file under another name, which nobody else uses, then renames it. So whoever reads meanwhile sees no part of a file, and several
/// processes may write at once.
fn replace(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new(""));
    let default = default_directory();
    // `allstream run` gives each job a directory of its own below the default one.
    if dir.starts_with(&default) {
        // Only this user may put anything there. If the directory exists, another user may have made it.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&default)?;
        belongs_to_us(&default)?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    } else {
        std::fs::create_dir_all(dir)?;
    }
    let everybody = std::fs::Permissions::from_mode(0o666); // less what the process's umask takes away
    let mut part = tempfile::Builder::new().suffix(".part").permissions(everybody).tempfile_in(dir)?;
    part.write_all(text)?;
    part.persist(path).map(drop).map_err(|failed| failed.error)
}

/// An error unless this is a directory of this user's. The temporary directory is open to all users, so another user may have made this directory,
/// or a link in its place.
fn belongs_to_us(dir: &Path) -> std::io::Result<()> {
    let about = std::fs::symlink_metadata(dir)?;
    if about.is_dir() && about.uid() == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let problem = format!(
        "{} is not a directory of this user's: remove it, or name another directory by ALLSTREAM_TRACE_DIR",
        dir.display()
    );
    Err(std::io::Error::other(problem))
}

/// The name of the socket at which a process is asked for its flight recorders.
pub(crate) fn socket_of(pid: u32) -> String {
    format!("allstream-record-{pid}")
}

/// The file of a rank's recorder. `None`: it is not written. If this user cannot write there, errors do not name the file.
pub(crate) fn file_of(world: &str, rank: Rank) -> Option<RecordFile> {
    let dir = directory()?;
    let file = RecordFile::new(dir.join(format!("{world}-rank{rank}.json")));
    // No directory is made before there is something to write, so the nearest one that exists is checked.
    let there = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("."));
    let wanted = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    let default = default_directory();
    let is_foreign = there.starts_with(&default) && belongs_to_us(&default).is_err();
    if is_foreign || rustix::fs::access(there, wanted).is_err() {
        file.lose();
    }
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Members;

    #[test]
    fn a_file_that_could_not_be_written_is_not_named() {
        let dir = tempfile::tempdir().unwrap();
        let (good, below) = (dir.path().join("a.json"), dir.path().join("a.json/b.json"));
        for (path, is_written) in [(good, true), (below, false)] {
            let file = Arc::new(RecordFile::new(path.clone()));
            let error = Error::library("a library", 0, "broke")
                .among(&Members::world().recorded_in(Some(file.clone())));
            assert_eq!(error.record(), Some(&*path), "it is to be written");
            let place = RankPlace { world: "a".into(), rank: 0, size: 1, hosts: vec![0], clock: None };
            let written = Recording::new(place, None, Vec::new(), Some(file)).write();
            assert_eq!((written.is_ok(), error.record().is_some()), (is_written, is_written));
            assert_eq!(error.to_string().contains("flight recorder"), is_written, "{error}");
        }
    }

    #[test]
    fn a_call_with_a_key_is_told_with_its_algorithm() {
        let recorder = Recorder::new();
        let call = Signature { kind: Kind::AllReduce as u8, algo: Algo::Ring as u8, ..Signature::default() };
        for (number, key) in [0, 7, 1 << 40].into_iter().enumerate() {
            recorder.submitted(number as u64, call.with_key(key), true);
        }
        let told = recorder.snapshot(2);
        assert_eq!(told.len(), 3);
        assert!(told.iter().all(|operation| operation.algo == Some(Algo::Ring.name())), "{told:?}");
    }

    #[test]
    fn the_last_collectives_are_told_in_order_and_older_ones_are_forgotten() {
        let recorder = Recorder::new();
        // A communicator's next generation goes on with the numbers of the last one.
        for number in 1000..1600 {
            recorder.submitted(number, Signature::default(), number % 2 == 0);
            recorder.waiting(number, &[1]);
        }
        recorder.finished(1599, State::Done);
        recorder.finished(1000, State::Done);
        let told = recorder.snapshot(2);
        let numbers: Vec<u64> = told.iter().map(|operation| operation.number).collect();
        assert_eq!(numbers, (1600 - KEEP as u64..1600).collect::<Vec<_>>());
        let last = told.last().unwrap();
        assert_eq!((last.state, last.finished_us.is_some(), last.waiting_for.len()), (State::Done, true, 0));
        let queued = told.iter().filter(|operation| operation.state == State::Queued).count();
        assert_eq!(
            (queued, told[0].finished_us),
            (KEEP / 2 - 1, None),
            "what has the place of an older one is a new one"
        );
    }
}
