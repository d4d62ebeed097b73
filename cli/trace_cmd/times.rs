//! `allstream trace --times`: who is waited for, how long an operation takes once all have called it, and whether that is what the
//! tuner's table expects. The answer to "is it my network or my code?".

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use allstream::tuning::{Figures, GroupShape, Row, Table};
use allstream::{Algo, Kind, LinkClass, sim};
use serde::Serialize;

use super::ranks::name_ranks;
use super::{CommRecord, Operation, Recording, State};

/// A rank that comes last in at least this part of the calls is the one for which the others wait.
const MOSTLY: f64 = 0.7;
/// An operation that takes more than this many times the expected time is slow.
const SLOW: f64 = 2.0;
/// Clocks drift apart by up to so many microseconds a second.
const DRIFT: f64 = 20.0;

/// Calls of one communicator that are alike, on all its ranks.
#[derive(Debug, Serialize)]
pub(super) struct Times {
    /// The call, as the ranks made it.
    pub(super) call: String,
    /// The number of calls that all ranks with a file have finished and still have on record.
    pub(super) calls: usize,
    /// Ranks that have no file: whether they came last is not known.
    pub(super) unknown: Vec<usize>,
    /// How often each rank was the last to call.
    pub(super) last: BTreeMap<usize, usize>,
    /// Milliseconds from when half of the others had called until the last one did.
    pub(super) late_ms: Spread,
    /// Milliseconds from the last call until the last rank had its result.
    pub(super) after_ms: Spread,
    /// Milliseconds from one call to the next (median).
    pub(super) between_ms: Option<f64>,
    /// Milliseconds that the operation should take, as measured in the tuner's table or predicted from it.
    pub(super) expected_ms: Option<f64>,
    /// Milliseconds by which times that were converted to rank 0's clock may be wrong.
    pub(super) clocks_ms: f64,
    /// What follows from all of this, in a sentence.
    pub(super) verdict: String,
}

/// A median, and the value that nine of ten do not exceed.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) nine_of_ten: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values.get(((values.len() - 1) as f64 * part).round() as usize).copied();
        Spread { median: at(0.5).unwrap_or(0.0), nine_of_ten: at(0.9).unwrap_or(0.0) }
    }
}

/// One call, on all ranks; times in milliseconds by rank 0's clock.
struct Call {
    came: BTreeMap<usize, f64>,
    ended: f64,
}

impl Call {
    /// The last rank to come, when, and how long after half of the others.
    fn last(&self) -> Option<(usize, f64, f64)> {
        let (rank, at) = self.came.iter().max_by(|a, b| a.1.total_cmp(b.1)).map(|(rank, at)| (*rank, *at))?;
        let others = self.came.iter().filter(|(other, _)| **other != rank).map(|(_, at)| *at).collect();
        Some((rank, at, at - Spread::of(others).median))
    }
}

/// The times of a communicator's operations, by kind of call.
pub(super) fn times(
    files: &BTreeMap<usize, Recording>,
    views: &BTreeMap<usize, &CommRecord>,
    table: Option<&Table>,
) -> Vec<Times> {
    let Some(first) = views.values().next() else { return Vec::new() };
    // Nothing is known of ranks that have left no file, such as those that died.
    let ranks = views.len();
    if ranks < 2 {
        return Vec::new();
    }
    let file = |rank: usize| files.get(&first.members[rank]);
    // By call and number: what each rank noted.
    let mut calls: BTreeMap<&str, BTreeMap<u64, BTreeMap<usize, &Operation>>> = BTreeMap::new();
    for (rank, comm) in views {
        let done = comm.operations.iter().filter(|o| o.state == State::Done && o.finished_us.is_some());
        for operation in done.filter(|o| !o.point_to_point()) {
            let by_rank = calls.entry(&operation.call).or_default().entry(operation.number).or_default();
            by_rank.insert(*rank, operation);
        }
    }
    let clock =
        |rank: usize| file(rank).and_then(|file| file.clock.as_ref()).map_or(0.0, |clock| clock.offset_us);
    let error = |rank: usize| {
        let file = file(rank)?;
        let clock = file.clock.as_ref()?;
        Some(clock.error_us + (file.written_at_unix_ms * 1e3 - clock.found_us).max(0.0) / 1e6 * DRIFT)
    };
    let clocks_ms = views.keys().copied().filter_map(error).fold(0.0, f64::max) / 1e3;
    let mut all = Vec::new();
    for (call, by_number) in calls {
        let complete: Vec<_> = by_number.values().filter(|by_rank| by_rank.len() == ranks).collect();
        let Some(operation) = complete.first().and_then(|by_rank| by_rank.values().next()) else { continue };
        let each = |by_rank: &&BTreeMap<usize, &Operation>| {
            // A rank whose operation was queued behind others counts as come when the operation began.
            let came = |(rank, o): (&usize, &&Operation)| {
                (*rank, (o.started_us.unwrap_or(o.submitted_us).max(o.submitted_us) + clock(*rank)) / 1e3)
            };
            let ended = by_rank.iter().filter_map(|(rank, o)| Some((o.finished_us? + clock(*rank)) / 1e3));
            Call { came: by_rank.iter().map(came).collect(), ended: ended.fold(f64::MIN, f64::max) }
        };
        let calls: Vec<Call> = complete.iter().map(each).collect();
        let lasts: Vec<_> = calls.iter().filter_map(Call::last).collect();
        let mut last = BTreeMap::new();
        lasts.iter().for_each(|(rank, ..)| *last.entry(*rank).or_insert(0) += 1);
        let after = calls.iter().zip(&lasts).map(|(call, (_, at, _))| (call.ended - at).max(0.0));
        let between: Vec<f64> = lasts.windows(2).map(|pair| (pair[1].1 - pair[0].1).max(0.0)).collect();
        let mut times = Times {
            call: call.to_owned(),
            calls: calls.len(),
            unknown: (0..first.members.len()).filter(|rank| !views.contains_key(rank)).collect(),
            last,
            late_ms: Spread::of(lasts.iter().map(|(.., late)| *late).collect()),
            after_ms: Spread::of(after.collect()),
            between_ms: (!between.is_empty()).then(|| Spread::of(between).median),
            expected_ms: expected(table, operation, first, files),
            clocks_ms,
            verdict: String::new(),
        };
        times.verdict = verdict(&times, crowded(files, &first.members));
        all.push(times);
    }
    all
}

/// The host on which more of these ranks run than there are cores that they may use, if there is one: its name, ranks and cores. If ranks are
/// bound to different cores, the cores of all of them count.
fn crowded(files: &BTreeMap<usize, Recording>, members: &[usize]) -> Option<(String, usize, usize)> {
    let mut hosts: BTreeMap<u32, Vec<&Recording>> = BTreeMap::new();
    for file in members.iter().filter_map(|member| files.get(member)) {
        hosts.entry(file.hosts.get(file.rank).copied().unwrap_or(0)).or_default().push(file);
    }
    let of_host = |files: Vec<&Recording>| {
        let together: BTreeSet<usize> = files.iter().flat_map(|file| &file.core_numbers).copied().collect();
        // A recording that lacks the cores' numbers still says how many cores there are.
        let least = if files.iter().any(|file| file.core_numbers.is_empty()) { files[0].cores } else { 0 };
        (files[0].host.clone(), files.len(), together.len().max(least))
    };
    let over = hosts.into_values().map(of_host).filter(|(_, ranks, cores)| *cores > 0 && ranks > cores);
    over.max_by_key(|(_, ranks, _)| *ranks)
}

/// Milliseconds that the table expects: interpolated between the measured sizes around this one, or else predicted from the table's
/// figures for this class of links.
fn expected(
    table: Option<&Table>,
    operation: &Operation,
    comm: &CommRecord,
    files: &BTreeMap<usize, Recording>,
) -> Option<f64> {
    let table = table?;
    let kind: Kind = operation.collective.as_deref()?.parse().ok()?;
    let link: LinkClass = comm.link.parse().ok()?;
    // Each file names all ranks' hosts, also of those that have left no file.
    let of_ranks = files.values().map(|file| &file.hosts).max_by_key(|hosts| hosts.len())?;
    let hosts: BTreeSet<u32> =
        comm.members.iter().filter_map(|member| of_ranks.get(*member).copied()).collect();
    let (ranks, bytes) = (comm.members.len(), operation.bytes.max(1));
    let group = GroupShape { link, hosts: hosts.len().max(1), ranks };
    let of = |row: &&Row| row.group == group && row.collective == kind;
    let mut known: Vec<(u64, f64)> = table
        .rows
        .iter()
        .filter(of)
        .filter_map(|row| Some((row.bytes, table.times(row).first()?.us)))
        .collect();
    known.sort_by_key(|(size, _)| *size);
    let below = known.iter().rev().find(|(size, _)| *size <= bytes);
    let above = known.iter().find(|(size, _)| *size >= bytes);
    let us = match (below, above) {
        (Some(&(low, a)), Some(&(high, b))) if low < high => {
            let part = ((bytes as f64).ln() - (low as f64).ln()) / ((high as f64).ln() - (low as f64).ln());
            Some((a.ln() + part * (b.ln() - a.ln())).exp())
        }
        (Some((_, us)), Some(_)) => Some(*us),
        // The size is not between two measured ones, so the model predicts the time.
        _ => {
            let algo: Algo = operation.algo.as_deref()?.parse().ok()?;
            let alike = |f: &&Figures| (f.group.link, f.group.hosts) == (link, group.hosts);
            let nearest = table.figures.iter().filter(alike).min_by_key(|f| f.group.ranks.abs_diff(ranks))?;
            sim::predict(kind, algo, ranks, bytes, nearest)
        }
    };
    us.map(|us| us / 1e3)
}

/// The sentence that answers "is it my network or my code?".
fn verdict(times: &Times, crowded: Option<(String, usize, usize)>) -> String {
    let Times { late_ms, after_ms, expected_ms, last, calls, .. } = times;
    let (late, after) = (late_ms.median, after_ms.median);
    let (rank, most) =
        last.iter().max_by_key(|(_, count)| **count).map_or((0, 0), |(rank, count)| (*rank, *count));
    let is_slow = expected_ms.is_some_and(|expected| after > SLOW * expected);
    let cores = crowded.map_or(String::new(), |(host, ranks, cores)| {
        format!(
            " {ranks} ranks share {cores} cores of {host}: a rank that has no core is late in everything."
        )
    });
    let beside = match expected_ms {
        Some(expected) => format!("{} where {} are expected", millis(after), millis(*expected)),
        None => {
            format!("{} (how long it should, `allstream tune` or `allstream perf` can tell)", millis(after))
        }
    };
    if late < times.clocks_ms {
        let verdict = if is_slow { "It is the network, or the machine" } else { "Nobody is waited for" };
        return format!(
            "{verdict}: ranks come together, as far as clocks tell ({} apart, clocks may be wrong by {}); the operation \
             itself takes {beside}.{cores}",
            millis(late),
            millis(times.clocks_ms)
        );
    }
    if late > after && most as f64 >= MOSTLY * *calls as f64 {
        return format!(
            "It is the code of {}: it came last in {most} of {calls} calls, {} after the others; once it had called, the \
             operation took {beside}. Look at what it does between calls.{cores}",
            name_ranks(&[rank]),
            millis(late)
        );
    }
    if is_slow {
        return format!(
            "It is the network, or the machine: once all have called, the operation takes {beside}.{cores}"
        );
    }
    if late > after {
        return format!(
            "It is the code: the last rank calls {} after the others, now one and now another; the operation itself takes \
             {beside}. Their work is uneven, or something disturbs them.{cores}",
            millis(late)
        );
    }
    let share = times.between_ms.filter(|between| *between > 0.0).map_or(String::new(), |between| {
        format!(
            "; of the time from one call to the next, that is {:.0} %",
            100.0 * (after / between).min(1.0)
        )
    });
    format!("Ranks come together, and the operation takes {beside}{share}.{cores}")
}

/// A time with a unit that suits its size.
fn millis(ms: f64) -> String {
    match ms {
        ms if ms >= 1000.0 => format!("{:.2} s", ms / 1e3),
        ms if ms >= 1.0 => format!("{ms:.2} ms"),
        ms => format!("{:.1} us", ms.max(0.0) * 1e3),
    }
}

/// Appends the times as they are printed.
pub(super) fn render(out: &mut String, all: &[Times]) {
    for times in all {
        let _ = writeln!(out, "  {} calls of {}", times.calls, times.call);
        let last: Vec<_> =
            times.last.iter().map(|(rank, count)| format!("rank {rank} {count} times")).collect();
        let spread = |s: &Spread| {
            format!("{} (median; nine of ten within {})", millis(s.median), millis(s.nine_of_ten))
        };
        let _ = writeln!(out, "    last to call:           {}", last.join(", "));
        let _ = writeln!(out, "    after the others:       {}", spread(&times.late_ms));
        let _ = writeln!(out, "    from then to the end:   {}", spread(&times.after_ms));
        if let Some(expected) = times.expected_ms {
            let _ = writeln!(out, "    expected by the table:  {}", millis(expected));
        }
        if let Some(between) = times.between_ms {
            let _ = writeln!(out, "    from call to call:      {}", millis(between));
        }
        if !times.unknown.is_empty() {
            let _ = writeln!(
                out,
                "    not counted:            {}, of which there is no file",
                name_ranks(&times.unknown)
            );
        }
        if times.clocks_ms > 0.0 {
            let _ = writeln!(
                out,
                "    clocks of hosts:        compared, may be wrong by {}",
                millis(times.clocks_ms)
            );
        }
        let _ = writeln!(out, "    => {}", times.verdict);
    }
}
