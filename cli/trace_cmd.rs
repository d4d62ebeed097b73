//! `allstream trace`: lays the flight recorders of all ranks side by side, and says who is behind.

use crate::Exit;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use allstream::tuning::{self, Table};
use serde::{Deserialize, Serialize};

use overlap::StepReport;
use ranks::{it, name_ranks};
use render::render;
use times::Times;

mod overlap;
mod perfetto;
mod ranks;
mod render;
mod running;
mod times;

/// A larger file is refused: a recorder keeps a bounded number of operations, so no recorder wrote that file.
const LARGEST_FILE: u64 = 64 << 20;
/// The version of the format that this command reads.
const VERSION: u32 = 1;

/// Options of `allstream trace`.
#[derive(Debug, clap::Args)]
pub(crate) struct TraceArgs {
    /// Files that the ranks' flight recorders wrote, or directories of them (every *.json there)
    #[arg(required_unless_present = "pid", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Ask a running process, and all that it started, for what their recorders hold. The launcher's process gives all ranks of this host; a
    /// rank's process gives that rank alone. No process is stopped
    #[arg(long, value_name = "PID", conflicts_with = "paths")]
    pid: Option<u32>,
    /// Say for each kind of call who called last and by how much, how long the operation took from then on, and how long it should
    /// take by the tuner's table (that of `allstream tune`, or the file that ALLSTREAM_TUNING names)
    #[arg(long)]
    times: bool,
    /// Say for each step of a training loop with gradient buckets how long it computed, and how long it then waited for the buckets (exposed)
    #[arg(long)]
    overlap: bool,
    /// Print only a trace for <https://ui.perfetto.dev>, in which each communicator on each rank has rows for its operations, its messages
    /// and its steps
    #[arg(long, conflicts_with_all = ["times", "overlap", "json"])]
    perfetto: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// What one rank wrote about one world.
#[derive(Clone, Debug, Deserialize)]
struct Recording {
    version: u32,
    world: String,
    rank: usize,
    size: usize,
    pid: u32,
    #[serde(default)]
    host: String,
    /// The number of each rank's host.
    #[serde(default)]
    hosts: Vec<u32>,
    /// Cores that the process may run on; 0 where that is not known.
    #[serde(default)]
    cores: usize,
    /// The numbers of these cores; empty where they are not known.
    #[serde(default)]
    core_numbers: Vec<usize>,
    /// How its host's clock differs from that of rank 0's host, if that is another host.
    #[serde(default)]
    clock: Option<Clock>,
    written_at_unix_ms: f64,
    cause: Option<String>,
    comms: Vec<CommRecord>,
}

/// The offset to add to a host's times to get times by rank 0's clock, the offset's possible error, and when it was found (by the host's clock).
#[derive(Clone, Debug, Deserialize)]
struct Clock {
    offset_us: f64,
    error_us: f64,
    found_us: f64,
}

/// One communicator, as one of its members saw it.
#[derive(Clone, Debug, Deserialize)]
struct CommRecord {
    id: u64,
    name: String,
    /// Rank in the communicator.
    rank: usize,
    /// Each member's rank in the world.
    members: Vec<usize>,
    /// The class of the farthest link between members.
    #[serde(default)]
    link: String,
    poisoned: Option<String>,
    operations: Vec<Operation>,
    #[serde(default)]
    messages: Vec<Message>,
    #[serde(default)]
    steps: Vec<Step>,
}

/// A step of a training loop: its gradients were reduced by `operations` operations, from number `first_operation` on. Times are microseconds
/// since 1970.
#[derive(Clone, Debug, Deserialize)]
struct Step {
    number: u64,
    first_operation: u64,
    operations: u64,
    began_us: f64,
    called_us: f64,
    ended_us: f64,
}

/// A message, as its sender or its receiver saw it.
#[derive(Clone, Debug, Deserialize)]
struct Message {
    direction: String,
    /// A rank of the communicator.
    peer: usize,
    tag: u32,
    call: String,
    submitted_us: f64,
    finished_us: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
struct Operation {
    number: u64,
    call: String,
    #[serde(default)]
    collective: Option<String>,
    #[serde(default)]
    algo: Option<String>,
    /// The bytes of a rank's largest buffer.
    #[serde(default)]
    bytes: u64,
    state: State,
    submitted_us: f64,
    started_us: Option<f64>,
    finished_us: Option<f64>,
    /// Ranks of the communicator.
    #[serde(default)]
    waiting_for: Vec<usize>,
    #[serde(default)]
    bytes_done: u64,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum State {
    Queued,
    Running,
    Done,
    Failed,
}

impl Operation {
    fn open(&self) -> bool {
        matches!(self.state, State::Queued | State::Running)
    }

    /// Whether it failed. An operation that failed with its communicator keeps the state that it had then, and has an end.
    fn failed(&self) -> bool {
        self.state == State::Failed || self.open() && self.finished_us.is_some()
    }

    /// Whether this is a message: messages are not numbered along with the collectives, but for each peer and tag.
    fn point_to_point(&self) -> bool {
        ["message", "send", "recv"].contains(&self.call.split('(').next().unwrap_or_default().trim())
    }
}

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Report {
    worlds: Vec<WorldReport>,
}

#[derive(Debug, Serialize)]
struct WorldReport {
    world: String,
    size: usize,
    /// Ranks that have a file.
    ranks: Vec<usize>,
    /// Ranks that have none.
    missing: Vec<usize>,
    causes: BTreeMap<usize, String>,
    communicators: Vec<CommReport>,
}

/// Ranks are numbered as in the communicator; `members` has each one's rank in the world.
#[derive(Debug, Serialize)]
struct CommReport {
    id: u64,
    name: String,
    members: Vec<usize>,
    ranks: Vec<RankReport>,
    verdict: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    times: Vec<Times>,
    /// By rank.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    steps: BTreeMap<usize, Vec<StepReport>>,
}

#[derive(Debug, Serialize)]
struct RankReport {
    rank: usize,
    pid: u32,
    host: String,
    poisoned: Option<String>,
    last_finished: Option<OperationReport>,
    current: Option<OperationReport>,
}

#[derive(Debug, Serialize)]
struct OperationReport {
    number: u64,
    call: String,
    state: State,
    /// From the start (of a queued operation: the submission) to the end, or to when the file was written if there is no end.
    seconds: f64,
    waiting_for: Vec<usize>,
    bytes_done: u64,
}

#[derive(Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Kind {
    NoFile,
    NotInFile,
    Disagreement,
    Behind,
    Unfinished,
    Message,
    Poisoned,
    Idle,
}

/// One line of the verdict.
#[derive(Debug, Serialize)]
struct Finding {
    kind: Kind,
    number: Option<u64>,
    /// The ranks it is about.
    ranks: Vec<usize>,
    text: String,
}

/// Reads the files and prints what they say together.
pub(crate) fn run(args: &TraceArgs) -> Result<Exit, Box<dyn std::error::Error + Send + Sync>> {
    let recordings = match args.pid {
        Some(pid) => running::ask(pid)?,
        None => {
            let load = |path: PathBuf| load(&path).map_err(|error| format!("{}: {error}", path.display()));
            files(&args.paths)?.into_iter().map(load).collect::<Result<_, _>>()?
        }
    };
    if args.perfetto {
        return print(&(serde_json::to_string(&perfetto::trace(&newest(recordings)))? + "\n"));
    }
    let table = if args.times { tuning::from_env()?.map(|(_, table)| table) } else { None };
    let report = merge(
        recordings,
        &Wanted {
            times: args.times.then_some(table.as_ref()),
            overlap: args.overlap,
            asked: args.pid.is_some(),
        },
    );
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { render(&report) };
    print(&text)
}

fn print(text: &str) -> Result<Exit, Box<dyn std::error::Error + Send + Sync>> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(Exit::SUCCESS),
    }
}

fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for path in paths {
        let error = |error: io::Error| format!("{}: {error}", path.display());
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let before = files.len();
        for entry in path.read_dir().map_err(error)? {
            let file = entry.map_err(error)?.path();
            if file.extension().is_some_and(|extension| extension == "json") && file.is_file() {
                files.push(file);
            }
        }
        if files.len() == before {
            return Err(format!(
                "{}: no *.json file in this directory: a job that ended well leaves records where it called Comm::record",
                path.display()
            ));
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
}

fn load(path: &Path) -> Result<Recording, String> {
    let mut text = Vec::new();
    // One byte more than allowed tells a file that is too large, whatever its metadata says.
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(LARGEST_FILE + 1).read_to_end(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > LARGEST_FILE {
        return Err(format!("larger than {} MB, so not a flight recorder's file", LARGEST_FILE >> 20));
    }
    parse(&text)
}

fn parse(text: &[u8]) -> Result<Recording, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let bad = |error: serde_json::Error| format!("not a flight recorder's file: {error}");
    let version = serde_json::from_slice::<Version>(text).map_err(bad)?.version;
    if version != VERSION {
        return Err(format!("format version {version}; this allstream reads version {VERSION}"));
    }
    let mut recording: Recording = serde_json::from_slice(text).map_err(bad)?;
    if recording.rank >= recording.size {
        return Err(format!("rank {} in a world of {}", recording.rank, recording.size));
    }
    // No size is an index, but loops run up to it. Nobody has so large a world.
    if recording.size > 1 << 20 {
        return Err(format!("a world of {} ranks", recording.size));
    }
    for comm in &mut recording.comms {
        if comm.rank >= comm.members.len() {
            return Err(format!("rank {} in communicator {} of {}", comm.rank, comm.id, comm.members.len()));
        }
        comm.operations.sort_by_key(|operation| operation.number);
    }
    Ok(recording)
}

/// What a report has besides the verdict.
#[derive(Default)]
struct Wanted<'a> {
    /// Times, with those that the tuner's table expects, if there is a table.
    times: Option<Option<&'a Table>>,
    /// Steps.
    overlap: bool,
    /// Running processes were asked (`--pid`): a rank without a recording was not asked, and need not have died.
    asked: bool,
}

type Worlds = BTreeMap<(String, usize), BTreeMap<usize, Recording>>;

/// The recordings, without a rank's earlier ones if it has several.
fn newest(recordings: Vec<Recording>) -> Vec<Recording> {
    by_world(recordings).into_values().flat_map(BTreeMap::into_values).collect()
}

/// Sorts the recordings by world and rank. Of several recordings of the same rank, the latest counts.
fn by_world(recordings: Vec<Recording>) -> Worlds {
    debug_assert!(recordings.iter().all(|recording| recording.version == VERSION));
    let mut worlds = Worlds::new();
    for recording in recordings {
        let ranks = worlds.entry((recording.world.clone(), recording.size)).or_default();
        let newer = ranks
            .get(&recording.rank)
            .is_none_or(|have| have.written_at_unix_ms < recording.written_at_unix_ms);
        if newer {
            ranks.insert(recording.rank, recording);
        }
    }
    worlds
}

/// Puts the files of each world together. Worlds are in the order in which their last files were written.
fn merge(recordings: Vec<Recording>, wanted: &Wanted<'_>) -> Report {
    let mut worlds: Vec<_> = by_world(recordings).into_iter().collect();
    let written =
        |files: &BTreeMap<usize, Recording>| files.values().map(|f| f.written_at_unix_ms).fold(0.0, f64::max);
    worlds.sort_by(|(_, a), (_, b)| written(a).total_cmp(&written(b)));
    let worlds = worlds.into_iter().map(|((world, size), files)| {
        // Two communicators may have the same number if no rank is in both.
        let keys: BTreeSet<(u64, Vec<usize>)> = (files.values())
            .flat_map(|file| file.comms.iter().map(|comm| (comm.id, comm.members.clone())))
            .collect();
        WorldReport {
            world,
            size,
            ranks: files.keys().copied().collect(),
            missing: (0..size).filter(|rank| !files.contains_key(rank)).collect(),
            causes: files.iter().filter_map(|(rank, file)| Some((*rank, file.cause.clone()?))).collect(),
            communicators: keys
                .into_iter()
                .map(|(id, members)| comm_report(id, members, &files, wanted))
                .collect(),
        }
    });
    Report { worlds: worlds.collect() }
}

fn comm_report(
    id: u64,
    members: Vec<usize>,
    files: &BTreeMap<usize, Recording>,
    wanted: &Wanted<'_>,
) -> CommReport {
    let mut views = BTreeMap::new();
    let mut ranks = Vec::new();
    for file in files.values() {
        let Some(comm) = file.comms.iter().find(|comm| comm.id == id && comm.members == members) else {
            continue;
        };
        views.insert(comm.rank, comm);
        let report = |operation: &Operation| OperationReport {
            number: operation.number,
            call: operation.call.clone(),
            state: operation.state,
            seconds: seconds(operation, file.written_at_unix_ms),
            waiting_for: operation.waiting_for.clone(),
            bytes_done: operation.bytes_done,
        };
        ranks.push(RankReport {
            rank: comm.rank,
            pid: file.pid,
            host: file.host.clone(),
            poisoned: comm.poisoned.clone(),
            last_finished: comm.operations.iter().rfind(|operation| !operation.open()).map(report),
            current: comm.operations.iter().find(|operation| operation.open()).map(report),
        });
    }
    ranks.sort_by_key(|rank| rank.rank);
    let name = views.values().next().map(|comm| comm.name.clone()).unwrap_or_default();
    let times = wanted.times.map_or(Vec::new(), |table| times::times(files, &views, table));
    let with_steps = views.iter().filter(|(_, comm)| wanted.overlap && !comm.steps.is_empty());
    let steps = with_steps.map(|(rank, comm)| (*rank, overlap::steps(comm))).collect();
    CommReport {
        id,
        name,
        verdict: verdict(&members, files, &views, wanted.asked),
        members,
        ranks,
        times,
        steps,
    }
}

fn seconds(operation: &Operation, written_at_ms: f64) -> f64 {
    let from = match operation.state {
        State::Queued => operation.submitted_us,
        _ => operation.started_us.unwrap_or(operation.submitted_us),
    };
    // An operation that failed with its communicator keeps the state that it had then: it counts as open, but has an end.
    let still = if operation.open() { written_at_ms * 1e3 } else { from };
    let to = operation.finished_us.unwrap_or(still);
    ((to - from) / 1e6).max(0.0)
}

/// What the views of one communicator say together: worst first.
fn verdict(
    members: &[usize],
    files: &BTreeMap<usize, Recording>,
    views: &BTreeMap<usize, &CommRecord>,
    asked: bool,
) -> Vec<Finding> {
    let mut found = Vec::new();
    let (absent, silent): (Vec<usize>, Vec<usize>) = (0..members.len())
        .filter(|rank| !views.contains_key(rank))
        .partition(|rank| !files.contains_key(&members[*rank]));
    if !absent.is_empty() {
        let it = if absent.len() == 1 { "it" } else { "they" };
        let why = if asked {
            "not asked: give the launcher's process to hear of all".to_owned()
        } else {
            format!("{it} may have died")
        };
        let text = format!("no file from {}: {why}", name_ranks(&absent));
        found.push(Finding { kind: Kind::NoFile, number: None, ranks: absent, text });
    }
    if !silent.is_empty() {
        let text = format!("{} wrote a file, but not about this communicator", name_ranks(&silent));
        found.push(Finding { kind: Kind::NotInFile, number: None, ranks: silent, text });
    }
    // What each rank called, by number.
    let mut calls: BTreeMap<u64, BTreeMap<usize, &Operation>> = BTreeMap::new();
    for (rank, comm) in views {
        for operation in comm.operations.iter().filter(|operation| !operation.point_to_point()) {
            calls.entry(operation.number).or_default().insert(*rank, operation);
        }
    }
    for (number, by_rank) in &calls {
        let mut variants: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (rank, operation) in by_rank {
            variants.entry(operation.call.as_str()).or_default().push(*rank);
        }
        if variants.len() > 1 {
            let mut variants: Vec<_> = variants.into_iter().collect();
            variants.sort_by_key(|(_, ranks)| (ranks.len(), ranks.first().copied()));
            let said: Vec<_> =
                variants.iter().map(|(call, ranks)| format!("{} called {call}", name_ranks(ranks))).collect();
            let ranks = variants.first().map(|(_, ranks)| ranks.clone()).unwrap_or_default();
            let text = format!("the ranks disagree about #{number}: {}", said.join("; "));
            found.push(Finding { kind: Kind::Disagreement, number: Some(*number), ranks, text });
            break; // all that follows is a consequence
        }
    }
    found.extend(progress(members.len(), views, &calls));
    found.extend(messages(views, files, members));
    for (rank, comm) in views {
        if let Some(why) = &comm.poisoned {
            let text = format!("rank {rank} can no longer use this communicator: {why}");
            found.push(Finding { kind: Kind::Poisoned, number: None, ranks: vec![*rank], text });
        }
    }
    if found.is_empty() {
        let text = "nothing is under way, and the ranks agree".to_string();
        found.push(Finding { kind: Kind::Idle, number: None, ranks: Vec::new(), text });
    }
    found
}

/// For each rank, the oldest of its messages that still wait.
fn messages(
    views: &BTreeMap<usize, &CommRecord>,
    files: &BTreeMap<usize, Recording>,
    members: &[usize],
) -> Vec<Finding> {
    let oldest = |(rank, comm): (&usize, &&CommRecord)| {
        let mut waiting = comm.messages.iter().filter(|message| message.finished_us.is_none());
        let (first, more) = (waiting.next()?, waiting.count());
        let Message { direction, peer, tag, call, .. } = first;
        let written = files.get(members.get(*rank)?)?.written_at_unix_ms;
        let (seconds, toward) = (
            (written / 1e3 - first.submitted_us / 1e6).max(0.0),
            if direction == "send" { "to" } else { "from" },
        );
        let more = if more == 0 { String::new() } else { format!("; {more} more messages wait after it") };
        let text = format!(
            "rank {rank} waits in {direction} {toward} rank {peer}, tag {tag}: {call}, for {seconds:.3} s{more}"
        );
        Some(Finding { kind: Kind::Message, number: None, ranks: vec![*rank], text })
    };
    views.iter().filter_map(oldest).collect()
}

/// Who has not called what others have, or else who is inside the oldest operation that has not ended.
fn progress(
    members: usize,
    views: &BTreeMap<usize, &CommRecord>,
    calls: &BTreeMap<u64, BTreeMap<usize, &Operation>>,
) -> Vec<Finding> {
    let mut found = Vec::new();
    let Some((&newest, _)) = calls.last_key_value() else { return found };
    let mut last: BTreeMap<Option<u64>, Vec<usize>> = BTreeMap::new();
    for rank in views.keys() {
        let number =
            calls.iter().rev().find(|(_, by_rank)| by_rank.contains_key(rank)).map(|(number, _)| *number);
        last.entry(number).or_default().push(*rank);
    }
    for (number, behind) in last.into_iter().filter(|(number, _)| *number != Some(newest)) {
        // The first operation that anybody called after the last one that these ranks called.
        let next = calls.range(number.map_or(0, |number| number + 1)..).next();
        let Some((next, by_rank)) = next else { continue };
        let call = by_rank.values().next().map(|operation| operation.call.as_str()).unwrap_or_default();
        let waiting: Vec<_> =
            by_rank.iter().filter(|(_, operation)| operation.open()).map(|(rank, _)| *rank).collect();
        let have = if behind.len() == 1 { "has" } else { "have" };
        let wait = match waiting.len() {
            0 => "nobody waits for it now".to_string(),
            1 => format!("{} waits for {}", name_ranks(&waiting), it(&behind)),
            _ => format!("{} wait for {}", name_ranks(&waiting), it(&behind)),
        };
        let text = format!("{} {have} not called #{next} {call}; {wait}", name_ranks(&behind));
        found.push(Finding { kind: Kind::Behind, number: Some(*next), ranks: behind, text });
    }
    if found.is_empty() {
        let open = calls.iter().find(|(_, by_rank)| by_rank.values().any(|operation| operation.open()));
        let Some((number, by_rank)) = open else { return found };
        let inside: BTreeMap<usize, &Operation> = by_rank
            .iter()
            .filter(|(_, operation)| operation.open())
            .map(|(rank, open)| (*rank, *open))
            .collect();
        let ranks: Vec<usize> = inside.keys().copied().collect();
        let awaited: BTreeSet<usize> =
            inside.values().flat_map(|open| open.waiting_for.iter().copied()).collect();
        // A rank that itself waits for another rank is not the origin of the wait.
        let roots: Vec<usize> = (awaited.iter().copied())
            .filter(|rank| inside.get(rank).is_none_or(|open| open.waiting_for.is_empty()))
            .collect();
        let awaited: Vec<usize> = if roots.is_empty() { awaited.into_iter().collect() } else { roots };
        let call = inside.values().next().map(|open| open.call.as_str()).unwrap_or_default();
        let whom = if awaited.is_empty() {
            String::new()
        } else {
            format!(", waiting for {}", name_ranks(&awaited))
        };
        let have = if ranks.len() == 1 { "has" } else { "have" };
        // Nobody knows whether a rank without a file has called it.
        let who = if views.len() == members { "all" } else { "all that left a file have" };
        let text =
            format!("{who} called #{number} {call}; {} {have} not finished it{whom}", name_ranks(&ranks));
        found.push(Finding { kind: Kind::Unfinished, number: Some(*number), ranks, text });
    }
    found
}

#[cfg(test)]
mod tests;
