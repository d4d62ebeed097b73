//! Runs the parts in order (some beside the one before), limits the time of their commands, and counts the results.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, PipeReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, nice};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::journal::{Counts, Journal, Report, Timed};
use crate::part::{Part, Ran, Work};

/// The niceness of parts that run beside another: their commands get only the processor time that the other part leaves.
const LEAST_URGENT: i32 = 19;
/// The process groups of the commands that run now. The signal thread kills them.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn running() -> MutexGuard<'static, Vec<Pid>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the signal thread: on SIGINT, SIGTERM or SIGHUP it kills the commands and exits. (Ctrl-C does not reach them: each has its own process group.)
pub(crate) fn take_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // The lock is held until the exit, so that no other command starts.
            let groups = running();
            // Some tests start processes in other process groups; between SIGTERM and SIGKILL they have time to stop these.
            for group in groups.iter() {
                let _ = kill_process_group(*group, Signal::TERM);
            }
            if !groups.is_empty() {
                thread::sleep(Duration::from_millis(500));
            }
            for group in groups.iter() {
                let _ = kill_process_group(*group, Signal::KILL);
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

#[derive(Default)]
struct Outcome {
    name: String,
    result: String,
    counts: Counts,
    time: Duration,
    /// What is printed again at the end if the part failed.
    report: Report,
    /// How long its tests took, how many cases they had, and which of them were skipped.
    tests: Tests,
}

/// What tests told about themselves.
#[derive(Debug, Default)]
struct Tests {
    times: Vec<Timed>,
    cases: Vec<String>,
    skips: Vec<String>,
}

/// How many of the slowest tests are listed.
const SLOWEST: usize = 20;

/// Runs all parts, prints a table, then again what is known of each failure. Returns whether none failed.
pub(crate) fn run_all(parts: &[Part], root: &Path) -> bool {
    let mut outcomes = Vec::new();
    for together in parts.chunk_by(|_, next| next.beside) {
        thread::scope(|scope| {
            let run = |part| scope.spawn(move || timed(part, root));
            let running: Vec<_> = together.iter().map(run).collect();
            outcomes.extend(running.into_iter().zip(together).map(|(ran, part)| {
                ran.join().unwrap_or_else(|_| Outcome {
                    name: part.name.clone(),
                    result: "FAILED: it panicked".into(),
                    counts: Counts { failed: 1, ..Counts::default() },
                    ..Outcome::default()
                })
            }));
        });
    }
    say(&of_tests(&outcomes));
    let (table, total) = summary(&outcomes);
    say(&format!("{table}{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped));
    let again = failures(&outcomes);
    if !again.is_empty() {
        say(&again);
    }
    total.failed == 0
}

/// Runs one part, in a thread of its own, and prints when it begins and how it ended.
fn timed(part: &Part, root: &Path) -> Outcome {
    // Linux sets the niceness of this thread alone. The commands that it starts inherit it, so the part beside which they run has precedence.
    if part.beside && nice(LEAST_URGENT).is_err() {
        say(&format!("cargo xtask: {} cannot be made less urgent than what it runs beside", part.name));
    }
    say(&format!("== {}", part.name));
    let start = Instant::now();
    let mut tests = Tests::default();
    let Ran(result, counts, report) = run_part(part, root, &mut tests);
    let time = start.elapsed();
    say(&format!("== {}: {result}, {:.1} s\n", part.name, time.as_secs_f64()));
    Outcome { name: part.name.clone(), result, counts, time, report, tests }
}

/// The tests that took longest, the numbers of cases, and what tests could not run here and why, by part.
fn of_tests(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    let all = |outcome: &'_ Outcome| {
        outcome.tests.times.iter().map(|timed| (outcome.name.clone(), timed.clone())).collect::<Vec<_>>()
    };
    let mut times: Vec<(String, Timed)> = outcomes.iter().flat_map(all).collect();
    times.sort_by(|(_, a), (_, b)| b.seconds.total_cmp(&a.seconds));
    if !times.is_empty() {
        text += &format!("the slowest {} of {} tests\n", times.len().min(SLOWEST), times.len());
    }
    for (part, Timed { test, seconds }) in times.iter().take(SLOWEST) {
        text += &format!("{seconds:>7.1} s  {part}: {test}\n");
    }
    for Outcome { name, tests, .. } in outcomes {
        tests.cases.iter().for_each(|cases| text += &format!("cases, {name}: {cases}\n"));
    }
    for Outcome { name, tests, .. } in outcomes {
        tests.skips.iter().for_each(|why| text += &format!("skipped, {name}: {why}\n"));
    }
    text
}

/// What failed, once more: a log is read from its end. The names come last.
fn failures(outcomes: &[Outcome]) -> String {
    let failed: Vec<_> = outcomes.iter().filter(|outcome| outcome.counts.failed > 0).collect();
    let mut text = String::new();
    for Outcome { name, report, .. } in &failed {
        text += &format!("\n== what is known of the failure of: {name}\n");
        report.lines.iter().for_each(|line| text += &format!("{line}\n"));
    }
    for Outcome { name, result, report, .. } in &failed {
        text += &format!("\n{name}: {result}");
        report.names.iter().for_each(|test| text += &format!("\n    {test}"));
    }
    text
}

pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

fn summary(outcomes: &[Outcome]) -> (String, Counts) {
    let mut total = Counts::default();
    let mut table = String::new();
    let width = outcomes.iter().map(|outcome| outcome.name.chars().count()).max().unwrap_or(0);
    for Outcome { name, result, counts, time, .. } in outcomes {
        table += &format!("{name:width$}  {:>6.2} min  {result}\n", time.as_secs_f64() / 60.0);
        total.passed += counts.passed;
        total.failed += counts.failed;
        total.skipped += counts.skipped;
    }
    (table, total)
}

fn run_part(part: &Part, root: &Path, tests: &mut Tests) -> Ran {
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
            // ALLSTREAM_TUNING=off: tests must not use the tuning table of the user who runs them. Files of incremental compilation would not be
            // used again here, and take a tenth of the time to write.
            command
                .args(arguments)
                .env("CARGO_INCREMENTAL", "0")
                .env("ALLSTREAM_TUNING", "off")
                .envs(env.iter().map(|(name, value)| (name, value)));
            let mut end = execute(command, root, part.limit, true);
            *tests = Tests {
                times: std::mem::take(&mut end.journal.times),
                cases: std::mem::take(&mut end.journal.cases),
                skips: std::mem::take(&mut end.journal.skips),
            };
            outcome(end, part.limit)
        }
        Work::Checks(checks) => {
            let mut counts = Counts::default();
            let mut report = Report::default();
            for (name, complaints) in checks(root) {
                say(&format!("{name} ... {}", if complaints.is_empty() { "ok" } else { "FAILED" }));
                for complaint in &complaints {
                    say(&format!("  {complaint}"));
                }
                *(if complaints.is_empty() { &mut counts.passed } else { &mut counts.failed }) += 1;
                if !complaints.is_empty() {
                    report.names.push(name.to_string());
                    report.lines.extend(complaints.iter().map(|complaint| format!("{name}: {complaint}")));
                }
            }
            Ran(describe(counts), counts, report)
        }
        Work::Steps(steps) => steps(root, part.limit),
    }
}

pub(crate) fn skipped(reason: &str) -> Ran {
    Ran(format!("skipped: {reason}"), Counts { skipped: 1, ..Counts::default() }, Report::default())
}

pub(crate) fn describe(counts: Counts) -> String {
    let skipped = if counts.skipped == 0 { String::new() } else { format!(", {} skipped", counts.skipped) };
    let word = if counts.failed == 0 { "passed" } else { "FAILED" };
    format!("{word} ({} passed, {} failed{skipped})", counts.passed, counts.failed)
}

/// How a command ended.
pub(crate) struct End {
    /// `None`: it ran past its limit and was killed.
    status: io::Result<Option<ExitStatus>>,
    pub(crate) journal: Journal,
}

impl End {
    /// The command's exit code, if it started, ended in time and was not killed.
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.as_ref().ok().copied().flatten().and_then(|status| status.code())
    }

    /// How the command ended, in words: that it ended well, or why not.
    pub(crate) fn how(&self) -> String {
        match &self.status {
            Err(error) => format!("cannot start: {error}"),
            Ok(None) => "did not end in time".into(),
            // An exit code, or the signal that killed it.
            Ok(Some(status)) => status.to_string(),
        }
    }
}

pub(crate) fn outcome(end: End, limit: Duration) -> Ran {
    let mut counts = end.journal.counts;
    let tested = end.journal.tested;
    let failed = |mut counts: Counts, why: String| {
        counts.failed = counts.failed.max(1);
        (format!("FAILED: {why} ({} passed, {} failed)", counts.passed, counts.failed), counts)
    };
    let (result, counts) = match end.status {
        Err(error) => failed(counts, format!("cannot start: {error}")),
        Ok(None) => {
            // The timeout counts as one failure more than those that the tests reported.
            counts.failed += 1;
            failed(counts, format!("ran past {} s", limit.as_secs()))
        }
        Ok(Some(status)) if !status.success() && counts.failed == 0 => failed(counts, status.to_string()),
        Ok(Some(_)) if !tested => {
            counts.passed += 1;
            ("passed".into(), counts)
        }
        Ok(Some(_)) => (describe(counts), counts),
    };
    let report = if counts.failed == 0 { Report::default() } else { end.journal.report() };
    Ran(result, counts, report)
}

/// Runs a command in its own process group, prints its output (if `echo`) and keeps a journal of it.
pub(crate) fn execute(mut command: Command, root: &Path, limit: Duration, echo: bool) -> End {
    let journal = Arc::new(Mutex::new(Journal::default()));
    let taken = |journal: &Mutex<Journal>| {
        std::mem::take(&mut *journal.lock().unwrap_or_else(PoisonError::into_inner))
    };
    let end = Instant::now() + limit;
    let spawned = (|| {
        // One pipe for both, so that what a test's processes say on stderr stands where they said it.
        let (output, input) = io::pipe()?;
        command.current_dir(root).stdin(Stdio::null()).process_group(0);
        command.stdout(input.try_clone()?).stderr(input);
        let mut running = running();
        let child = command.spawn()?;
        running.push(Pid::from_child(&child));
        Ok((child, output))
    })();
    // The command holds the pipe's write end: without this the reader would never see the end.
    drop(command);
    let (mut child, output) = match spawned {
        Ok(spawned) => spawned,
        Err(error) => return End { status: Err(error), journal: Journal::default() },
    };
    let group = Pid::from_child(&child);
    let (ended, drained) = mpsc::channel();
    let ours = Arc::clone(&journal);
    thread::spawn(move || {
        read(output, echo, &ours);
        let _ = ended.send(());
    });
    let status = wait(&mut child, end);
    // Processes that a test left behind must not hold the pipe open or keep the machine busy.
    let _ = kill_process_group(group, Signal::KILL);
    let status = status.and_then(|status| match status {
        Some(status) => Ok(Some(status)),
        None => child.wait().map(|_| None),
    });
    running().retain(|running| *running != group);
    // A process that left the group may hold the pipe open for ever, so the wait has a limit.
    let _ = drained.recv_timeout(Duration::from_secs(5));
    End { status, journal: taken(&journal) }
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

/// Copies a pipe to stdout line by line (if `echo`), and keeps the journal.
fn read(pipe: PipeReader, echo: bool, journal: &Mutex<Journal>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while pipe.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        if echo {
            let _ = io::stdout().write_all(&line);
        }
        let mut journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.line(&String::from_utf8_lossy(&line));
        line.clear();
    }
    let _ = io::stdout().flush();
}

/// Runs a command to its end. Returns what it printed on stdout; if it failed, an error with its output.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{name}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => Ok(said),
        false => Err(format!(
            "{name}: {}: {said}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// The folder that cargo builds in. A relative one starts at the root, where cargo is run.
pub(crate) fn target(root: &Path) -> PathBuf {
    root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::part::When;

    fn report(script: &str, limit: Duration) -> Ran {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        outcome(execute(command, Path::new("/"), limit, false), limit)
    }

    fn shell(script: &str, limit: Duration) -> (String, Counts) {
        let Ran(result, counts, _) = report(script, limit);
        (result, counts)
    }

    #[test]
    fn failures_are_said_again_at_the_end_names_last() {
        let script = "echo '     Running tests/a.rs (x)' >&2; echo 'running 1 test'; echo told >&2; echo failures:; \
            echo; echo because; echo; echo failures:; echo '    t::one'; echo; \
            echo 'test result: FAILED. 0 passed; 1 failed; 0 ignored'; exit 1";
        let Ran(result, counts, report) = report(script, Duration::from_secs(60));
        let passed = |name: &str| Outcome {
            name: name.into(),
            result: "passed".into(),
            counts: Counts { passed: 1, ..Counts::default() },
            time: Duration::ZERO,
            report: Report::default(),
            tests: Tests::default(),
        };
        let tests = Tests::default();
        let failed =
            Outcome { name: "integration".into(), result, counts, time: Duration::ZERO, report, tests };
        let text = failures(&[passed("house"), failed, passed("fuzz")]);
        let expected = "\n== what is known of the failure of: integration\n-- tests/a.rs\n     Running tests/a.rs (x)\n\
            running 1 test\ntold\nfailures:\n\nbecause\n\nfailures:\n    t::one\n\n\
            test result: FAILED. 0 passed; 1 failed; 0 ignored\n\n\
            integration: FAILED (0 passed, 1 failed)\n    tests/a.rs: t::one";
        assert_eq!(text, expected);
        assert_eq!(failures(&[passed("house")]), "");
    }

    /// The work of two parts that must run at the same time. Passes if both have begun before it ends, and at least one runs with [`LEAST_URGENT`].
    fn meets(_: &Path, _: Duration) -> Ran {
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        static NOT_URGENT: AtomicUsize = AtomicUsize::new(0);
        NOT_URGENT.fetch_add(usize::from(nice(0).unwrap() == LEAST_URGENT), Ordering::AcqRel);
        BEGUN.fetch_add(1, Ordering::AcqRel);
        let end = Instant::now() + Duration::from_secs(30);
        while BEGUN.load(Ordering::Acquire) < 2 && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        let [begun, not_urgent] = [&BEGUN, &NOT_URGENT].map(|count| count.load(Ordering::Acquire));
        let failed = u64::from(begun < 2 || not_urgent == 0);
        Ran(String::new(), Counts { failed, ..Counts::default() }, Report::default())
    }

    #[test]
    fn a_part_runs_beside_the_one_before_it_where_it_says_so() {
        let part = |beside| Part {
            name: "a part".into(),
            work: Work::Steps(meets),
            when: When::Always,
            beside,
            needs: |_| Ok(()),
            limit: Duration::from_secs(60),
        };
        assert!(run_all(&[part(false), part(true)], Path::new("/")));
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
    fn how_a_command_ended_is_told() {
        let run = |program: &str, script: &str, limit| {
            let mut command = Command::new(program);
            command.args(["-c", script]);
            execute(command, Path::new("/"), Duration::from_secs(limit), false).how()
        };
        assert_eq!(run("/bin/sh", "true", 60), "exit status: 0");
        assert_eq!(run("/bin/sh", "exit 3", 60), "exit status: 3");
        assert!(run("/bin/sh", "kill -SEGV $$", 60).starts_with("signal: 11"));
        assert_eq!(run("/bin/sh", "sleep 100", 1), "did not end in time");
        let missing = run("/no/such/program", "", 60);
        assert!(missing.starts_with("cannot start: No such file"), "{missing}");
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
