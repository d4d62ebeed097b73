//! Runs parts one after another, each with a time limit, and counts.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::parts::{self, Part, Work};

/// The process group of the command that runs, for the signal thread.
static RUNNING: Mutex<Option<Pid>> = Mutex::new(None);

fn running() -> MutexGuard<'static, Option<Pid>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Commands run in process groups of their own, so that all of one can be killed. This hands Ctrl-C on.
pub(crate) fn take_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Held until the exit: no other command starts.
            let group = running();
            if let Some(group) = *group {
                // Some tests start processes in groups of their own, and stop them if they get the time to.
                let _ = kill_process_group(group, Signal::TERM);
                thread::sleep(Duration::from_millis(500));
                let _ = kill_process_group(group, Signal::KILL);
            }
            std::process::exit(128 + signal);
        }
    })?;
    Ok(())
}

/// The cargo that runs us.
pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

struct Outcome {
    name: String,
    result: String,
    counts: Counts,
    time: Duration,
}

/// Runs all, prints a table, and tells whether none failed.
pub(crate) fn run_all(parts: &[Part], root: &Path) -> bool {
    let mut outcomes = Vec::new();
    for part in parts {
        say(&format!("== {}", part.name));
        let start = Instant::now();
        let (result, counts) = run_part(part, root);
        let time = start.elapsed();
        say(&format!("== {}: {result}, {:.1} s\n", part.name, time.as_secs_f64()));
        outcomes.push(Outcome { name: part.name.clone(), result, counts, time });
    }
    let (table, total) = summary(&outcomes);
    say(&format!("{table}{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped));
    total.failed == 0
}

fn say(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

fn summary(outcomes: &[Outcome]) -> (String, Counts) {
    let mut total = Counts::default();
    let mut table = String::new();
    let width = outcomes.iter().map(|outcome| outcome.name.chars().count()).max().unwrap_or(0);
    for Outcome { name, result, counts, time } in outcomes {
        table += &format!("{name:width$}  {:>7.1} s  {result}\n", time.as_secs_f64());
        total.passed += counts.passed;
        total.failed += counts.failed;
        total.skipped += counts.skipped;
    }
    (table, total)
}

fn run_part(part: &Part, root: &Path) -> (String, Counts) {
    let skipped = |reason: &str| (format!("skipped: {reason}"), Counts { skipped: 1, ..Counts::default() });
    if let Work::NotYet(reason) = part.work {
        return skipped(reason);
    }
    if let Err(reason) = (part.needs)(root) {
        return skipped(&reason);
    }
    match &part.work {
        Work::NotYet(reason) => skipped(reason),
        Work::Cargo(arguments, env) => {
            let mut command = Command::new(cargo());
            command.args(arguments).envs(env.iter().map(|(name, value)| (name, value)));
            let end = execute(command, root, part.limit, true);
            outcome(end, part.limit)
        }
        Work::Checks(checks) => {
            let mut counts = Counts::default();
            for (name, complaints) in checks(root) {
                say(&format!("{name} ... {}", if complaints.is_empty() { "ok" } else { "FAILED" }));
                for complaint in &complaints {
                    say(&format!("  {complaint}"));
                }
                *(if complaints.is_empty() { &mut counts.passed } else { &mut counts.failed }) += 1;
            }
            (describe(counts), counts)
        }
        Work::Fuzz(seconds) => fuzz(root, *seconds, part.limit),
    }
}

fn fuzz(root: &Path, seconds: u64, limit: Duration) -> (String, Counts) {
    let mut counts = Counts::default();
    let end = Instant::now() + limit;
    let left = || end.saturating_duration_since(Instant::now());
    let fuzz = |arguments: &[&str], echo| {
        let mut command = Command::new(cargo());
        // The sanitizers need unstable flags, which this compiler has too.
        command.args(arguments).env("RUSTC_BOOTSTRAP", "1");
        let limit = left();
        outcome(execute(command, root, limit, echo), limit)
    };
    if fuzz(&["fuzz", "--version"], false).1.failed > 0 {
        let (result, counts) = fuzz(&["install", "cargo-fuzz", "--locked"], true);
        if counts.failed > 0 {
            let reason = format!("skipped: cargo-fuzz is not here, and `cargo install cargo-fuzz`: {result}");
            return (reason, Counts { skipped: 1, ..Counts::default() });
        }
    }
    for target in parts::fuzz_targets(root) {
        let time = format!("-max_total_time={seconds}");
        let (result, count) = fuzz(&["fuzz", "run", &target, "--", &time, "-timeout=10"], true);
        say(&format!("fuzz target {target}: {result}"));
        counts.passed += count.passed;
        counts.failed += count.failed;
    }
    (describe(counts), counts)
}

fn describe(counts: Counts) -> String {
    let ignored = if counts.skipped == 0 { String::new() } else { format!(", {} ignored", counts.skipped) };
    let word = if counts.failed == 0 { "passed" } else { "FAILED" };
    format!("{word} ({} passed, {} failed{ignored})", counts.passed, counts.failed)
}

/// How a command ended.
struct End {
    /// `None`: it ran past its limit and was killed.
    status: io::Result<Option<ExitStatus>>,
    counts: Counts,
    /// Whether it printed results of tests at all.
    tested: bool,
}

fn outcome(end: End, limit: Duration) -> (String, Counts) {
    let mut counts = end.counts;
    let failed = |mut counts: Counts, why: String| {
        counts.failed = counts.failed.max(1);
        (format!("FAILED: {why} ({} passed, {} failed)", counts.passed, counts.failed), counts)
    };
    match end.status {
        Err(error) => failed(counts, format!("cannot start: {error}")),
        Ok(None) => {
            // Whatever it did report, the part itself is one more failure.
            counts.failed += 1;
            failed(counts, format!("ran past {} s", limit.as_secs()))
        }
        Ok(Some(status)) if !status.success() && counts.failed == 0 => failed(counts, status.to_string()),
        Ok(Some(_)) if !end.tested => {
            counts.passed += 1;
            ("passed".into(), counts)
        }
        Ok(Some(_)) => (describe(counts), counts),
    }
}

/// Runs a command in its own process group, shows its output (if `echo`) and reads the results of tests in it.
fn execute(mut command: Command, root: &Path, limit: Duration, echo: bool) -> End {
    command
        .current_dir(root)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut counts = Counts::default();
    let mut tested = false;
    let end = Instant::now() + limit;
    let spawned = {
        let mut running = running();
        let spawned = command.spawn();
        *running = spawned.as_ref().ok().map(Pid::from_child);
        spawned
    };
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return End { status: Err(error), counts, tested },
    };
    let group = Pid::from_child(&child);
    let (lines, results) = mpsc::channel();
    show(child.stdout.take(), echo.then(io::stdout), &lines);
    show(child.stderr.take(), echo.then(io::stderr), &lines);
    drop(lines);
    let mut count = |line: String| {
        if let Some(found) = parse_result(&line) {
            tested = true;
            counts.passed += found.passed;
            counts.failed += found.failed;
            counts.skipped += found.skipped;
        }
    };
    let status = wait(&mut child, end);
    // A test that left processes behind must not keep the pipes, or the machine.
    let _ = kill_process_group(group, Signal::KILL);
    let status = status.and_then(|status| match status {
        Some(status) => Ok(Some(status)),
        None => child.wait().map(|_| None),
    });
    *running() = None;
    let drained = Instant::now() + Duration::from_secs(5);
    while let Ok(line) = results.recv_timeout(drained.saturating_duration_since(Instant::now())) {
        count(line);
    }
    End { status, counts, tested }
}

fn wait(child: &mut Child, end: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Copies a pipe to ours line by line, and hands on the lines with results.
fn show(
    pipe: Option<impl Read + Send + 'static>,
    to: Option<impl Write + Send + 'static>,
    lines: &Sender<String>,
) {
    let Some(pipe) = pipe else { return };
    let lines = lines.clone();
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut to = to;
        let mut line = Vec::new();
        while pipe.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let _ = to.as_mut().map(|to| to.write_all(&line));
            if line.starts_with(b"test result: ") {
                let _ = lines.send(String::from_utf8_lossy(&line).into_owned());
            }
            line.clear();
        }
        let _ = to.as_mut().map(Write::flush);
    });
}

/// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
fn parse_result(line: &str) -> Option<Counts> {
    let rest = line.strip_prefix("test result: ")?;
    let (_, numbers) = rest.split_once(". ")?;
    let mut counts = Counts::default();
    for field in numbers.split(';') {
        let mut words = field.split_whitespace();
        let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
        match (number.parse(), what) {
            (Ok(number), "passed") => counts.passed = number,
            (Ok(number), "failed") => counts.failed = number,
            (Ok(number), "ignored") => counts.skipped = number,
            _ => {}
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_tests_are_read() {
        let line = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n";
        assert_eq!(parse_result(line), Some(Counts { passed: 12, failed: 0, skipped: 1 }));
        let line = "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(parse_result(line), Some(Counts { passed: 1, failed: 2, skipped: 0 }));
        assert_eq!(parse_result("test a::b ... ok"), None);
    }

    fn shell(script: &str, limit: Duration) -> (String, Counts) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        outcome(execute(command, Path::new("/"), limit, false), limit)
    }

    #[test]
    fn a_command_past_its_limit_has_failed() {
        let start = Instant::now();
        let (result, counts) = shell("sleep 100 & sleep 100", Duration::from_secs(1));
        assert_eq!(result, "FAILED: ran past 1 s (0 passed, 1 failed)");
        assert_eq!(counts.failed, 1);
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_failure_without_results_counts_as_one() {
        let long = Duration::from_secs(60);
        assert_eq!(shell("exit 3", long).1, Counts { failed: 1, ..Counts::default() });
        assert_eq!(shell("true", long), ("passed".into(), Counts { passed: 1, ..Counts::default() }));
        let results =
            "echo 'test result: ok. 2 passed; 0 failed; 1 ignored'; echo 'test result: ok. 3 passed'";
        assert_eq!(shell(results, long).1, Counts { passed: 5, failed: 0, skipped: 1 });
        assert_eq!(shell(&format!("{results}; exit 1"), long).1.failed, 1);
    }
}
