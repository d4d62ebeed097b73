//! The fuzz targets.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::journal::{self, Counts, Report};
use crate::part::Ran;
use crate::runner;

/// How long each target is fuzzed.
const SECONDS: u64 = 10;

/// Fuzzes one target after another.
pub(crate) fn all(root: &Path, limit: Duration) -> Ran {
    let mut counts = Counts::default();
    let mut report = Report::default();
    let end = Instant::now() + limit;
    let left = || end.saturating_duration_since(Instant::now());
    let fuzz = |arguments: &[&str], echo| {
        let mut command = Command::new(runner::cargo());
        // The sanitizers need unstable compiler flags; with RUSTC_BOOTSTRAP the stable compiler accepts them.
        command.args(arguments).envs([("RUSTC_BOOTSTRAP", "1"), ("CARGO_BUILD_JOBS", "1")]);
        let limit = left();
        let end = runner::execute(command, root, limit, echo);
        let done = end.journal.last("Done ").map(|line| format!(", {line}")).unwrap_or_default();
        (runner::outcome(end, limit), done)
    };
    if fuzz(&["fuzz", "--version"], false).0.1.failed > 0 {
        let Ran(result, counts, _) = fuzz(&["install", "cargo-fuzz", "--locked"], true).0;
        if counts.failed > 0 {
            return runner::skipped(&format!(
                "cargo-fuzz is not here, and `cargo install cargo-fuzz`: {result}"
            ));
        }
    }
    for target in targets(root) {
        let time = format!("-max_total_time={SECONDS}");
        // Always the same seed: a random search needs hours, and a check of a change should give the same result each time.
        // A fuzzer writes thousands of lines; they matter only if it finds something.
        let (Ran(result, count, found), done) =
            fuzz(&["fuzz", "run", &target, "--", &time, "-timeout=60", "-seed=1"], false);
        found.lines.iter().for_each(|line| runner::say(line));
        runner::say(&format!("fuzz target {target}: {result}{done}"));
        counts.passed += count.passed;
        counts.failed += count.failed;
        if count.failed > 0 {
            report.names.push(format!("fuzz target {target}"));
            report.lines.extend(found.lines);
        }
    }
    report.lines.drain(..report.lines.len().saturating_sub(journal::PRINTED));
    Ran(runner::describe(counts), counts, report)
}

/// The fuzz targets, by the names of their files.
fn targets(root: &Path) -> Vec<String> {
    let files = root.join("fuzz/fuzz_targets").read_dir().into_iter().flatten().flatten();
    let names = files.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".rs").map(String::from));
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Why nothing can be fuzzed here: there are no targets, or no C++ compiler to build libFuzzer with. [`all`] installs cargo-fuzz itself.
pub(crate) fn needs(root: &Path) -> Result<(), String> {
    if targets(root).is_empty() {
        return Err("no fuzz/fuzz_targets/*.rs".into());
    }
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let version = Command::new(&compiler).arg("--version").stdin(Stdio::null()).output();
    version
        .map(|_| ())
        .map_err(|error| format!("no C++ compiler for libFuzzer: {}: {error}", compiler.display()))
}
