//! `cargo xtask gpu-pack`: one folder with all that runs on a machine that has a GPU's driver and glibc, and no more.

mod elf;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::journal::{Counts, Report};
use crate::parts::CHECKED;
use crate::runner::{self, Ran};

/// Bytes of all files together.
const MOST: u64 = 60_000_000;
/// Where it goes, if nobody says.
pub(crate) const FOLDER: &str = ".gpu-pack";
/// By this an earlier pack is known, which is replaced.
const CONTENTS: &str = "CONTENTS";
const RUN: &str = include_str!("pack/run.sh");
const README: &str = include_str!("../../docs/gpu-pack.md");
/// As the release's integration tests are built, so that (with [`CHECKED`]) nothing is built twice.
const BUILD: [&str; 15] = [
    "build",
    "--release",
    "--package",
    "allstream",
    "--all-features",
    "--bin",
    "allstream",
    "--test",
    "gpu",
    "--example",
    "12_gpu",
    "--example",
    "13_gpu_overlap",
    "--message-format",
    "json-render-diagnostics",
];
/// What of it goes where.
const PROGRAMS: [(&str, &str); 4] =
    [("allstream", "bin"), ("gpu", "bin"), ("12_gpu", "examples"), ("13_gpu_overlap", "examples")];

/// Makes the pack. What there is to say of it.
pub(crate) fn make(root: &Path, out: &Path) -> Result<String, String> {
    let built = build(root)?;
    clear(out)?;
    let mut files = Vec::new();
    let mut complaints = Vec::new();
    for (name, folder) in PROGRAMS {
        let from = built.iter().find(|(target, _)| target == name);
        let (_, from) = from.ok_or_else(|| format!("cargo tells of no executable {name}"))?;
        let to = out.join(folder).join(name);
        fs::create_dir_all(out.join(folder)).map_err(|error| format!("{}: {error}", to.display()))?;
        strip(from, &to)?;
        complaints.extend(elf::complaints(&to)?);
        files.push(to);
    }
    for (name, text, mode) in [("run", RUN, 0o755), ("README.md", README, 0o644)] {
        let to = out.join(name);
        let written =
            fs::write(&to, text).and_then(|()| fs::set_permissions(&to, fs::Permissions::from_mode(mode)));
        written.map_err(|error| format!("{}: {error}", to.display()))?;
        files.push(to);
    }
    let (mut total, mut list) = (0, String::new());
    for file in &files {
        let bytes = fs::metadata(file).map_err(|error| format!("{}: {error}", file.display()))?.len();
        total += bytes;
        let name = file.strip_prefix(out).unwrap_or(file).display();
        list += &format!("{bytes:>10}  {name}\n");
    }
    list += &format!("{total:>10}  bytes\n");
    let to = out.join(CONTENTS);
    fs::write(&to, &list).map_err(|error| format!("{}: {error}", to.display()))?;
    if total > MOST {
        complaints
            .push(format!("the files have {total} bytes together, at most {MOST} are allowed:\n{list}"));
    }
    if complaints.is_empty() { Ok(list) } else { Err(complaints.join("\n")) }
}

/// Builds, and says where each executable is: by the names of their targets.
fn build(root: &Path) -> Result<Vec<(String, PathBuf)>, String> {
    let mut cargo = Command::new(runner::cargo());
    cargo.args(BUILD).current_dir(root).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = cargo.spawn().map_err(|error| format!("cargo: {error}"))?;
    let lines = child.stdout.take().map(|stdout| BufReader::new(stdout).lines().map_while(Result::ok));
    let built = lines.into_iter().flatten().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(&line).ok()?;
        let file = message.get("executable")?.as_str()?;
        Some((message.get("target")?.get("name")?.as_str()?.to_owned(), PathBuf::from(file)))
    });
    let built = built.collect();
    match child.wait() {
        Ok(status) if status.success() => Ok(built),
        Ok(status) => Err(format!("cargo {}: {status}", BUILD.join(" "))),
        Err(error) => Err(format!("cargo: {error}")),
    }
}

/// Removes an earlier pack's files, and leaves others (results, say) where they are.
fn clear(out: &Path) -> Result<(), String> {
    let tell = |error| format!("{}: {error}", out.display());
    fs::create_dir_all(out).map_err(tell)?;
    let empty = out.read_dir().map_err(tell)?.next().is_none();
    if !empty && !out.join(CONTENTS).is_file() {
        return Err(format!(
            "{} is neither empty nor an earlier pack (it has no {CONTENTS}): give another folder",
            out.display()
        ));
    }
    for (name, folder) in PROGRAMS {
        let file = out.join(folder).join(name);
        if file.exists() {
            fs::remove_file(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        }
    }
    Ok(())
}

/// A copy without symbols and lines.
fn strip(from: &Path, to: &Path) -> Result<(), String> {
    let tool = std::env::var_os("STRIP").unwrap_or_else(|| "strip".into());
    let status = Command::new(&tool).arg("-o").arg(to).arg(from).stdin(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} {}: {status}", tool.display(), from.display())),
        Err(error) => Err(format!(
            "{}: {error}; it comes with the linker (binutils), and STRIP names another one",
            tool.display()
        )),
    }
}

/// Why there is no GPU here to try the pack on, if there is none.
pub(crate) fn needs_device(_: &Path) -> Result<(), String> {
    let nodes = ["/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg"];
    let mut numbered = Path::new("/dev").read_dir().into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    });
    if nodes.iter().any(|node| Path::new(node).exists()) || numbered.next().is_some() {
        return Ok(());
    }
    Err(format!("no CUDA device here (none of {}, nor another /dev/nvidiaN)", nodes.join(", ")))
}

/// Part "GPU": makes the pack and runs it.
pub(crate) fn run(root: &Path, limit: Duration) -> Ran {
    let mut steps = Steps::new(root, limit);
    let (pack, out) = (root.join(FOLDER), root.join("target/gpu-pack-results"));
    let mut make = ours();
    make.arg("gpu-pack");
    if !steps.step("the pack is made", make, 0, "") {
        return steps.ran();
    }
    let end = runner::execute(outside(&pack.join("run"), &out), root, steps.left(), true);
    if end.code() == Some(3) {
        let reason = end.journal.last("gpu-pack: ").unwrap_or("gpu-pack: no GPU").to_owned();
        return runner::skipped(&reason);
    }
    steps.take("the pack runs", end, 0, "");
    steps.ran()
}

/// Part "GPU pack": the pack is made, says that there is no GPU where there is none, and passes by the driver for tests.
pub(crate) fn prove(root: &Path, limit: Duration) -> Ran {
    let mut steps = Steps::new(root, limit);
    let (pack, out) = (root.join("target/gpu-pack"), root.join("target/gpu-pack-rehearsal"));
    let mut make = ours();
    make.arg("gpu-pack").arg("--out").arg(&pack).envs(CHECKED);
    if !steps.step("the pack is made", make, 0, "") {
        return steps.ran();
    }
    let script = pack.join("run");
    let run = |library: &Path| {
        let mut run = outside(&script, &out);
        run.env("ALLSTREAM_CUDA_LIBRARY", library);
        run
    };
    // A library that is found, so that no other one is looked for, and is no driver.
    let none = run(Path::new("libc.so.6"));
    steps.step("without a driver its `run` says so", none, 3, "gpu-pack: there is no GPU here");
    if needs_device(root).is_err() {
        let bare = outside(&script, &out);
        steps.step("without a GPU its `run` says so", bare, 3, "gpu-pack: there is no GPU here");
    }
    let mut driver = Command::new(runner::cargo());
    driver.args(["build", "--release", "--package", "cuda-driver-for-tests"]).envs(CHECKED);
    if steps.step("the driver for tests is built", driver, 0, "") {
        let library = root.join("target/release/libcuda.so");
        steps.step("its `run` passes by the driver for tests", run(&library), 0, "NOT MEASURED ON A DEVICE");
        let complaints = marked(&out);
        steps.add("no figure of that is taken for a device's", complaints);
    }
    steps.ran()
}

/// What is wrong with the results of a driver that is none of a device: those of each part lie in a folder.
fn marked(out: &Path) -> Vec<String> {
    let (mut complaints, mut tables) = (Vec::new(), 0);
    let parts = out.read_dir().into_iter().flatten().flatten();
    for part in parts.filter(|part| part.path().join("summary.txt").is_file()) {
        let results = part.path().join("results.json");
        let read = fs::read_to_string(&results).map_err(|error| error.to_string());
        let json = read.and_then(|text| {
            serde_json::from_str::<serde_json::Value>(&text).map_err(|error| error.to_string())
        });
        match json {
            Err(error) => complaints.push(format!("{}: {error}", results.display())),
            Ok(json) => {
                if json.get("measured_on_device") != Some(&serde_json::Value::Bool(false)) {
                    complaints.push(format!("{}: `measured_on_device` is not false", results.display()));
                }
                tables += json.get("tables").and_then(|tables| tables.as_object()).map_or(0, |all| all.len());
            }
        }
        for file in part.path().join("tables").read_dir().into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            let text = fs::read_to_string(file.path()).unwrap_or_default();
            let is_json = name.ends_with(".json");
            if !name.starts_with("not-measured-")
                || !is_json && !text.starts_with("# NOT MEASURED ON A DEVICE")
            {
                complaints.push(format!("{name} does not say that it was not measured on a device"));
            }
        }
    }
    if tables == 0 {
        complaints.push(format!("{}: no tables", out.display()));
    }
    complaints
}

/// This program.
fn ours() -> Command {
    Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()))
}

/// The pack's `run`, as somebody would start it elsewhere: cargo has put folders where the loader looks, in which the driver
/// for tests lies.
fn outside(script: &Path, out: &Path) -> Command {
    let mut run = Command::new(script);
    run.env("OUT", out).env_remove("ALLSTREAM_CUDA_LIBRARY");
    if let Some(path) = std::env::var_os("LD_LIBRARY_PATH") {
        let ours = std::env::current_exe().ok().and_then(|exe| Some(exe.ancestors().nth(2)?.to_path_buf()));
        let others = std::env::split_paths(&path)
            .filter(|folder| ours.as_ref().is_none_or(|ours| !folder.starts_with(ours)));
        if let Ok(others) = std::env::join_paths(others) {
            run.env("LD_LIBRARY_PATH", others);
        }
    }
    run
}

/// Steps of a part, and what came of them.
struct Steps<'a> {
    root: &'a Path,
    end: Instant,
    counts: Counts,
    report: Report,
}

impl Steps<'_> {
    fn new(root: &Path, limit: Duration) -> Steps<'_> {
        Steps { root, end: Instant::now() + limit, counts: Counts::default(), report: Report::default() }
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Runs a command; whether it ended with this code and a line that starts so.
    fn step(&mut self, name: &str, command: Command, code: i32, line: &str) -> bool {
        let end = runner::execute(command, self.root, self.left(), true);
        self.take(name, end, code, line)
    }

    fn take(&mut self, name: &str, end: runner::End, code: i32, line: &str) -> bool {
        let mut complaints = Vec::new();
        if end.code() != Some(code) {
            let how = end.code().map_or("no exit code in time".into(), |code| format!("exit code {code}"));
            complaints.push(format!("{how}, expected {code}"));
        } else if !line.is_empty() && end.journal.last(line).is_none() {
            complaints.push(format!("it did not say `{line}...`"));
        }
        if !complaints.is_empty() {
            complaints.extend(end.journal.report().lines);
        }
        self.add(name, complaints)
    }

    fn add(&mut self, name: &str, complaints: Vec<String>) -> bool {
        let passed = complaints.is_empty();
        runner::say(&format!("{name} ... {}", if passed { "ok" } else { "FAILED" }));
        if passed {
            self.counts.passed += 1;
        } else {
            self.counts.failed += 1;
            self.report.names.push(name.into());
            self.report.lines.extend(complaints.into_iter().map(|complaint| format!("{name}: {complaint}")));
        }
        passed
    }

    fn ran(self) -> Ran {
        Ran(runner::describe(self.counts), self.counts, self.report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_no_pack_is_left_alone() {
        let folder = std::env::temp_dir().join(format!("xtask-pack-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("mine"), "x").unwrap();
        let refused = clear(&folder);
        let there = folder.join("mine").is_file();
        fs::write(folder.join(CONTENTS), "").unwrap();
        let again = clear(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert!(refused.is_err_and(|error| error.contains("nor an earlier pack")) && there);
        assert_eq!(again, Ok(()));
    }

    #[test]
    fn unmarked_figures_are_found() {
        let folder = std::env::temp_dir().join(format!("xtask-marked-{}", std::process::id()));
        fs::create_dir_all(folder.join("threads/tables")).unwrap();
        let write = |name: &str, text: &str| fs::write(folder.join("threads").join(name), text).unwrap();
        write("summary.txt", "");
        write("results.json", r#"{"measured_on_device": true, "tables": {"a": {}}}"#);
        write("tables/perf.txt", "figures");
        let unmarked = marked(&folder);
        fs::remove_file(folder.join("threads/tables/perf.txt")).unwrap();
        write("results.json", r#"{"measured_on_device": false, "tables": {}}"#);
        let empty = marked(&folder);
        write("results.json", r#"{"measured_on_device": false, "tables": {"a": {}}}"#);
        write("tables/not-measured-perf.txt", "# NOT MEASURED ON A DEVICE: because");
        let fine = marked(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((unmarked.len(), empty.len()), (2, 1), "{unmarked:?}, {empty:?}");
        assert_eq!(fine, [""; 0]);
    }

    /// A pack whose program does this for every table.
    fn stand_in(name: &str, perf: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("xtask-run-{name}-{}", std::process::id()));
        fs::create_dir_all(folder.join("bin")).unwrap();
        let program = format!(
            "#!/bin/sh\n[ $1 = perf ] || exec echo 'CUDA  yes: CUDA 13.0 by libcuda.so.1; 1 device'\n{perf}\n"
        );
        for (name, text) in [("run", RUN), ("bin/allstream", program.as_str())] {
            fs::write(folder.join(name), text).unwrap();
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        folder
    }

    /// The code and the words of its `run`, and how long it took.
    fn run_of(folder: &Path, arguments: &[&str], limit: &str) -> (Option<i32>, String, Duration) {
        let start = Instant::now();
        let mut run = outside(&folder.join("run"), &folder.join("out"));
        let ended = run.args(arguments).env("LIMIT", limit).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout) + String::from_utf8_lossy(&ended.stderr);
        (ended.status.code(), said.into_owned(), start.elapsed())
    }

    #[test]
    fn a_part_of_the_pack_ends_within_its_limit_and_says_what_it_left_out() {
        let folder = stand_in("late", "exec sleep 100");
        let (code, said, took) = run_of(&folder, &["ceiling"], "4");
        let results = fs::read_to_string(folder.join("out/ceiling/results.json")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(code, Some(1), "{said}");
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(said.contains("FAILED: not done after") && said.contains("not done: perf-join-"), "{said}");
        assert!(serde_json::from_str::<serde_json::Value>(&results).is_ok(), "{results}");
    }

    #[test]
    fn parts_of_the_pack_have_names_and_folders_of_their_own() {
        let perf = r#"while [ $# -gt 0 ]; do [ "$1" = -J ] && echo '{}' >"$2"; shift; done
echo '# copies on the device: 1.0 GB/s'; echo '# Out of bounds values : 0 OK'"#;
        let folder = stand_in("parts", perf);
        let [listed, unknown, none] = [&["list"][..], &["nonsense"], &["ceiling", "nonsense"]]
            .map(|arguments| run_of(&folder, arguments, "60"));
        let ceiling = run_of(&folder, &["ceiling"], "60");
        let mps = run_of(&folder, &["mps"], "60");
        let table = folder.join("out/ceiling/tables/perf-all_reduce-1-threads.txt").is_file();
        fs::remove_dir_all(&folder).unwrap();
        assert!(listed.0 == Some(0) && README.contains("`ceiling`"), "{listed:?}");
        for part in listed.1.lines() {
            assert!(README.contains(&format!("| `{part}` |")), "docs/gpu-pack.md does not tell of {part}");
        }
        assert!(unknown.0 == Some(2) && unknown.1.contains("there is no part"), "{unknown:?}");
        assert_eq!(none.0, Some(2), "{none:?}");
        assert!(ceiling.0 == Some(0) && table && ceiling.1.contains("# copies on the device"), "{ceiling:?}");
        // Where it can be started there is no step that says why not.
        assert!(
            mps.1.contains("not done: mps") || mps.1.contains("perf-all_reduce-2-processes-mps"),
            "{mps:?}"
        );
    }
}
