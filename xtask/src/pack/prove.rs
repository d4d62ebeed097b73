//! The two parts of `cargo xtask test --full` that test the pack: one runs it on this machine's GPU, if there is one; the other rehearses it on
//! the driver for tests, with a step that hangs and a step that dies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{FOLDER, Wanted, command};
use crate::journal::{Counts, Report};
use crate::part::Ran;
use crate::python;
use crate::runner::{self, target};

/// The archive of results that a run of the pack writes.
const RESULTS: &str = "gpu-results.tar.xz";
/// A lent machine sends back at most this many bytes of it.
const MOST: u64 = 16 << 20;
/// The step that hangs within a call of the driver in the rehearsal, and the step that aborts. Each has the variable by which the driver for tests does so.
const HANGS: (&str, &str) = ("example-12_gpu", "ALLSTREAM_TEST_CUDA_HANG=cuMemcpyHtoDAsync:3");
const DIES: (&str, &str) = ("all_reduce-4-threads", "ALLSTREAM_TEST_CUDA_SEED=none");

/// Fails if this machine has no GPU to run the pack on, and says which devices were looked for.
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

fn wanted(out: PathBuf) -> Wanted {
    Wanted { out, nccl: None, without_python: false, for_rehearsal: false }
}

/// Part "GPU": makes the pack and runs it.
pub(crate) fn run(root: &Path, limit: Duration) -> Ran {
    let mut steps = Steps::new(root, limit);
    let (pack, out) = (wanted(root.join(FOLDER)), target(root).join("gpu-pack/results"));
    let mut make = ours();
    make.arg("gpu-pack");
    if !steps.step("the pack is made", make, 0, "") {
        return steps.ran();
    }
    let end = runner::execute(outside(&command(&pack.archive()), root, &out), root, steps.left(), true);
    if end.code() == Some(3) {
        let reason = end.journal.last("gpu-pack: ").unwrap_or("gpu-pack: no GPU").to_owned();
        return runner::skipped(&reason);
    }
    steps.take("the pack runs", end, 0, "");
    steps.ran()
}

/// Part "GPU pack": the pack is made; says that there is no GPU where there is none; and runs on the driver for tests, where all passes
/// but the two steps that are made to fail.
pub(crate) fn prove(root: &Path, limit: Duration) -> Ran {
    let mut steps = Steps::new(root, limit);
    let folder = target(root).join("gpu-pack");
    let (pack, out) = (wanted(folder.join("packed")), folder.join("rehearsal"));
    let _ = fs::remove_dir_all(&out);
    let mut make = ours();
    make.args(["gpu-pack", "--for-rehearsal", "--out"]).arg(&pack.out);
    if python::needs(root).is_err() {
        make.arg("--without-python");
    }
    if !steps.step("the pack is made", make, 0, "") {
        return steps.ran();
    }
    let script = command(&pack.archive());
    // This library exists but is no CUDA driver: so the pack finds no driver, and looks for no other library.
    let mut none = outside(&script, root, &out);
    none.env("ALLSTREAM_CUDA_LIBRARY", "libc.so.6");
    steps.step("without a driver the command says so", none, 3, "gpu-pack: there is no GPU here");
    if needs_device(root).is_err() {
        let bare = outside(&script, root, &out);
        steps.step("without a GPU the command says so", bare, 3, "gpu-pack: there is no GPU here");
    }
    for package in ["cuda-driver-for-tests", "nccl-for-tests"] {
        let mut library = Command::new(runner::cargo());
        library.args(["build", "--package", package]);
        if !steps.step(&format!("{package} is built"), library, 0, "") {
            return steps.ran();
        }
    }
    let built = target(root).join("debug");
    let ((hangs, hang), (dies, death)) = (HANGS, DIES);
    let script = format!("{script} --limit 1000 --with {hangs}:{hang} --with {dies}:{death}");
    let mut rehearsal = outside(&script, root, &out);
    rehearsal.env("ALLSTREAM_CUDA_LIBRARY", built.join("libcuda.so"));
    rehearsal.env("GPU_PACK_NCCL", built.join("libnccl.so"));
    // The Python environment that the tests of the Python package have made, with numpy and torch.
    let pythons = python::environment(root).join("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [pythons].into_iter().filter(|folder| folder.is_dir()).chain(std::env::split_paths(&path));
    if let Ok(path) = std::env::join_paths(folders) {
        rehearsal.env("PATH", path);
    }
    steps.step("the command runs on the driver for tests", rehearsal, 1, "NOT MEASURED ON A DEVICE");
    let unpacked = folder.join("unpacked");
    let _ = fs::remove_dir_all(&unpacked);
    let mut unpack = Command::new(built.join("archive"));
    unpack.arg("-x").arg(out.join(RESULTS)).arg(&unpacked);
    if steps.step("the archive of results is unpacked", unpack, 0, "") {
        let bytes = fs::metadata(out.join(RESULTS)).map_or(0, |about| about.len());
        let mut complaints = outcomes(&unpacked);
        if bytes > MOST {
            complaints.push(format!("{RESULTS} has {bytes} bytes, and {MOST} come back"));
        }
        steps.add("all steps passed but the one that hangs and the one that dies", complaints);
        steps.add("no figure of that is taken for a device's", marked(&unpacked));
    }
    steps.ran()
}

fn results(unpacked: &Path) -> Result<Value, String> {
    let file = unpacked.join("results.json");
    let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
}

/// Complaints about steps whose results are not those that the rehearsal must have.
fn outcomes(unpacked: &Path) -> Vec<String> {
    let results = match results(unpacked) {
        Ok(results) => results,
        Err(error) => return vec![error],
    };
    let mut complaints = Vec::new();
    let steps = results["steps"].as_array().cloned().unwrap_or_default();
    let mut passed = 0;
    for step in &steps {
        let [name, result, why] = ["step", "result", "why"].map(|key| step[key].as_str().unwrap_or_default());
        let expected = match name {
            _ if name == HANGS.0 => why.contains("not done after"),
            _ if name == DIES.0 => why.contains("signal 6") || why.contains("exit code"),
            _ => result == "passed" || result == "skipped" && !why.contains("time was over"),
        };
        passed += usize::from(result == "passed");
        if !expected {
            complaints.push(format!("{name}: {result}: {why}"));
        }
    }
    let fails = |(name, _)| steps.iter().any(|step| step["step"] == name && step["result"] == "failed");
    if !fails(HANGS) || !fails(DIES) {
        complaints.push(format!("{} and {} did not fail, and were made to", HANGS.0, DIES.0));
    }
    // Steps that need a device, or a tool of NVIDIA's, are skipped.
    if passed < 20 {
        complaints.push(format!("{passed} steps passed, expected at least 20"));
    }
    let stacks = fs::read_to_string(unpacked.join(format!("stacks/{}.txt", HANGS.0))).unwrap_or_default();
    if !stacks.contains("allstream") {
        complaints.push(format!("no thread of allstream's among the stacks of {}: {stacks:?}", HANGS.0));
    }
    complaints
}

/// Complaints about results that do not say that they were not measured on a device.
fn marked(unpacked: &Path) -> Vec<String> {
    let mut complaints = Vec::new();
    match results(unpacked) {
        Err(error) => complaints.push(error),
        Ok(results) => {
            if results["measured_on_device"] != Value::Bool(false) {
                complaints.push("results.json: `measured_on_device` is not false".into());
            }
            if results["tables"].as_object().is_none_or(|tables| tables.is_empty()) {
                complaints.push("results.json: no tables".into());
            }
        }
    }
    for file in unpacked.join("tables").read_dir().into_iter().flatten().flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        if !name.starts_with("not-measured-")
            || !name.ends_with(".json") && !text.starts_with("# NOT MEASURED ON A DEVICE")
        {
            complaints.push(format!("{name} does not say that it was not measured on a device"));
        }
    }
    complaints
}

/// This program.
fn ours() -> Command {
    Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()))
}

/// The printed command, run as on another machine: without the folders of `target/` that cargo has put into `LD_LIBRARY_PATH`, as the
/// driver for tests lies in one of them.
fn outside(command: &str, root: &Path, out: &Path) -> Command {
    let mut run = Command::new("sh");
    run.arg("-c").arg(command).current_dir(root).env("OUT", out).env_remove("ALLSTREAM_CUDA_LIBRARY");
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

/// Runs the steps of a part, and counts their results.
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

    /// Runs a command. Returns whether it ended with the exit code `code` and printed a line that starts with `line` (if not empty).
    fn step(&mut self, name: &str, command: Command, code: i32, line: &str) -> bool {
        let end = runner::execute(command, self.root, self.left(), true);
        self.take(name, end, code, line)
    }

    fn take(&mut self, name: &str, end: runner::End, code: i32, line: &str) -> bool {
        let mut complaints = Vec::new();
        if end.code() != Some(code) {
            complaints.push(format!("{}, expected {code}", end.how()));
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

    struct Unpacked(PathBuf);

    impl Drop for Unpacked {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn unpacked(name: &str, files: &[(&str, &str)]) -> Unpacked {
        let folder = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        for (file, text) in files {
            let to = folder.join(file);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::write(to, text).unwrap();
        }
        Unpacked(folder)
    }

    #[test]
    fn unmarked_figures_are_found() {
        let json = r#"{"measured_on_device": true, "tables": {"a": {}}}"#;
        let folder = unpacked("unmarked", &[("results.json", json), ("tables/perf.txt", "figures")]);
        assert_eq!(marked(&folder.0).len(), 2, "{:?}", marked(&folder.0));
        let json = r#"{"measured_on_device": false, "tables": {}}"#;
        assert_eq!(marked(&unpacked("empty", &[("results.json", json)]).0).len(), 1);
        let json = r#"{"measured_on_device": false, "tables": {"a": {}}}"#;
        let table = ("tables/not-measured-perf.txt", "# NOT MEASURED ON A DEVICE: because");
        assert_eq!(marked(&unpacked("marked", &[("results.json", json), table]).0), [""; 0]);
    }

    #[test]
    fn a_rehearsal_in_which_something_else_fails_or_nothing_does_is_told() {
        let step = |name: &str, result: &str, why: &str| {
            format!(r#"{{"step": "{name}", "result": "{result}", "why": "{why}"}}"#)
        };
        let mut steps: Vec<String> = (0..20).map(|i| step(&format!("s{i}"), "passed", "")).collect();
        steps.push(step(HANGS.0, "failed", "not done after 30 s"));
        steps.push(step(DIES.0, "failed", "died of signal 6"));
        let told = |steps: &[String]| {
            let json = format!(r#"{{"steps": [{}]}}"#, steps.join(","));
            let stacks = format!("stacks/{}.txt", HANGS.0);
            outcomes(&unpacked("outcomes", &[("results.json", &json), (&stacks, "allstream-cuda")]).0)
        };
        assert_eq!(told(&steps), [""; 0]);
        steps[3] = step("s3", "failed", "exit code 1");
        assert_eq!(told(&steps).len(), 2, "{:?}", told(&steps));
        steps[3] = step("s3", "passed", "");
        steps[20] = step(HANGS.0, "passed", "");
        assert_eq!(told(&steps).len(), 2, "{:?}", told(&steps));
    }
}
