//! `allstream trace --perfetto`: the records of all ranks as a trace that <https://ui.perfetto.dev> and `chrome://tracing` draw: a process
//! for each rank, and in it rows for each communicator: its operations, those that are queued, its messages, and steps of a training loop.
//! Operations on devices may run at the same time: those that begin before another has ended get rows of their own.
//!
//! The format is the Trace Event Format of Chrome. Times are microseconds by rank 0's clock, from the first event of all ranks.

use serde_json::{Value, json};

use super::Recording;

/// Rows of one communicator: operations that run, those that are queued, messages, steps.
const ROWS: usize = 4;
/// The row for operations that run.
const OPERATIONS: usize = 0;

/// The trace of these records. Records of several worlds stand side by side.
pub(super) fn trace(recordings: &[Recording]) -> Value {
    let mut events = Vec::new();
    for (process, recording) in recordings.iter().enumerate() {
        rank(&mut events, process, recording);
    }
    let starts = events.iter().filter_map(|event| event["ts"].as_f64());
    let zero = starts.fold(f64::INFINITY, f64::min);
    for event in &mut events {
        if let Some(at) = event["ts"].as_f64() {
            event["ts"] = json!(at - zero);
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

fn rank(events: &mut Vec<Value>, process: usize, recording: &Recording) {
    let Recording { rank, size, world, host, pid, .. } = recording;
    let name = format!("rank {rank} of {size} ({host}, process {pid}, world {world})");
    events.push(json!({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}));
    events.push(
        json!({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}),
    );
    let clock = recording.clock.as_ref().map_or(0.0, |clock| clock.offset_us);
    let written = recording.written_at_unix_ms * 1e3;
    // Rows that are there for overlapping operations alone are numbered behind all others.
    let mut more = ROWS * recording.comms.len();
    for (i, comm) in recording.comms.iter().enumerate() {
        let mut rows = Rows {
            events,
            process,
            first: ROWS * i,
            comm: &comm.name,
            named: [false; ROWS],
            ids: 0,
            more: &mut more,
            lanes: Vec::new(),
        };
        let mut running = Vec::new();
        for o in &comm.operations {
            let started = o.started_us.unwrap_or(o.submitted_us).max(o.submitted_us);
            let end = o.finished_us.unwrap_or(written).max(started);
            let args = json!({
                "number": o.number, "algorithm": o.algo, "bytes": o.bytes, "failed": o.failed(),
                "ended": o.finished_us.is_some(),
            });
            if o.started_us.is_none() && o.open() {
                rows.beside(1, &o.call, (o.submitted_us + clock, end + clock), args);
                continue;
            }
            if started > o.submitted_us {
                rows.beside(
                    1,
                    &o.call,
                    (o.submitted_us + clock, started + clock),
                    json!({"number": o.number}),
                );
            }
            running.push((&o.call, (started + clock, end + clock), args));
        }
        running.sort_by(|(_, (a, _), _), (_, (b, _), _)| a.total_cmp(b));
        running.into_iter().for_each(|(call, span, args)| rows.operation(call, span, args));
        for m in &comm.messages {
            let name = format!("{} {} {} tag {}", m.direction, way(&m.direction), m.peer, m.tag);
            let args = json!({ "call": m.call, "ended": m.finished_us.is_some() });
            let end = m.finished_us.unwrap_or(written);
            rows.beside(2, &name, (m.submitted_us + clock, end + clock), args);
        }
        for step in &comm.steps {
            let args = json!({ "step": step.number, "buckets": step.operations });
            rows.row(3, "compute", (step.began_us + clock, step.called_us + clock), args.clone());
            rows.row(3, "exposed", (step.called_us + clock, step.ended_us + clock), args);
        }
    }
}

fn way(direction: &str) -> &'static str {
    if direction == "send" { "to rank" } else { "from rank" }
}

/// The rows of one communicator on one rank.
struct Rows<'a> {
    events: &'a mut Vec<Value>,
    process: usize,
    first: usize,
    comm: &'a str,
    named: [bool; ROWS],
    ids: usize,
    /// The number of the process's next row that is there for overlapping operations alone.
    more: &'a mut usize,
    /// The rows for operations: the number of each, and when its last operation ends.
    lanes: Vec<(usize, f64)>,
}

impl Rows<'_> {
    /// The number of a row, which is named when its first event comes.
    fn name(&mut self, row: usize) -> usize {
        let thread = self.first + row;
        if !std::mem::replace(&mut self.named[row], true) {
            let what = ["operations", "queued operations", "messages", "steps"][row];
            self.call(thread, thread, &format!("{} {what}", self.comm));
        }
        thread
    }

    /// Tells the viewer what to write beside the row with the number `thread`, and in which place among the rows to draw that row.
    fn call(&mut self, thread: usize, place: usize, name: &str) {
        for (event, args) in
            [("thread_name", json!({ "name": name })), ("thread_sort_index", json!({ "sort_index": place }))]
        {
            self.events
                .push(json!({"ph": "M", "pid": self.process, "tid": thread, "name": event, "args": args}));
        }
    }

    /// Adds an operation that ran from `from` to `to`, in the first row for operations that is free at `from`: if a row had two operations at the
    /// same time, the viewer would draw one as a part of the other. To be called for the operations in the order in which they began.
    fn operation(&mut self, name: &str, (from, to): (f64, f64), args: Value) {
        let free = self.lanes.iter().position(|(_, until)| *until <= from);
        let lane = free.unwrap_or_else(|| {
            let thread = match self.lanes.len() {
                0 => self.name(OPERATIONS),
                others => {
                    let (thread, name) = (*self.more, format!("{} operations {}", self.comm, others + 1));
                    *self.more += 1;
                    // Next to the communicator's first row, and not behind the rows of all communicators.
                    self.call(thread, self.first + OPERATIONS, &name);
                    thread
                }
            };
            self.lanes.push((thread, to));
            self.lanes.len() - 1
        });
        self.lanes[lane].1 = to;
        self.span(self.lanes[lane].0, name, (from, to), args);
    }

    /// An event of a row whose events do not overlap.
    fn row(&mut self, row: usize, name: &str, (from, to): (f64, f64), args: Value) {
        let thread = self.name(row);
        self.span(thread, name, (from, to), args);
    }

    fn span(&mut self, thread: usize, name: &str, (from, to): (f64, f64), args: Value) {
        let dur = (to - from).max(0.0);
        self.events.push(json!({
            "ph": "X", "pid": self.process, "tid": thread, "name": name, "ts": from, "dur": dur, "args": args,
        }));
    }

    /// An event that may overlap others of its row: a beginning and an end. The viewer puts such events below each other.
    fn beside(&mut self, row: usize, name: &str, (from, to): (f64, f64), args: Value) {
        let thread = self.name(row);
        self.ids += 1;
        let id = format!("{}.{}.{}", self.process, thread, self.ids);
        for (ph, at) in [("b", from), ("e", to.max(from))] {
            self.events.push(json!({
                "ph": ph, "cat": self.comm, "id": id, "pid": self.process, "tid": thread, "name": name, "ts": at,
                "args": if ph == "b" { args.clone() } else { json!({}) },
            }));
        }
    }
}
