//! Builds the Python package and runs its tests, in a virtual environment of its own below cargo's target folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::journal::{Counts, Report};
use crate::part::Ran;
use crate::runner;

/// The packages that all tests need.
const BASE: [&str; 4] = ["numpy", "ml_dtypes", "pytest>=8", "pytest-timeout>=2"];
/// The packages that some tests need. Without torch or Ray the tests in the folder of this name are left out; the test of spaCy, in `ray/`, skips
/// itself. PyPI's torch is built for CUDA, but also runs without a GPU.
const LIBRARIES: [(&str, &str); 3] =
    [("torch", "torch==2.15.*"), ("ray", "ray[default,train]==2.60.*"), ("spacy", "spacy==3.8.*")];
/// How long one `pip install` of these packages may take.
const DOWNLOAD: Duration = Duration::from_secs(12 * 60);

/// The names of Python to try: the first that exists and can make virtual environments is taken.
const PYTHONS: [&str; 6] = ["python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10"];
/// A Python program that succeeds if this Python is new enough and can make virtual environments.
const CHECK: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";

fn python() -> Option<&'static str> {
    PYTHONS.into_iter().find(|python| {
        let ended =
            Command::new(python).args(["-c", CHECK]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        ended.is_ok_and(|status| status.success())
    })
}

/// Why the package cannot be tested here.
pub(crate) fn needs(_: &Path) -> Result<(), String> {
    python().map(|_| ()).ok_or_else(|| "there is no Python 3.10 or newer with the module venv".into())
}

/// The folder of the virtual environment.
pub(crate) fn environment(root: &Path) -> PathBuf {
    runner::target(root).join("python/all")
}

struct Work<'a> {
    root: &'a Path,
    end: Instant,
    /// The folder of the virtual environment.
    home: PathBuf,
}

/// Why a step failed: in words, and the last lines that it printed.
struct Stopped(String, Vec<String>);

impl Work<'_> {
    fn new(root: &Path, limit: Duration) -> Work<'_> {
        Work { root, end: Instant::now() + limit, home: environment(root) }
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    fn program(&self, name: &str) -> PathBuf {
        self.home.join("bin").join(name)
    }

    fn run(&self, what: &str, command: Command, limit: Duration, echo: bool) -> Result<(), Stopped> {
        let end = runner::execute(command, self.root, limit.min(self.left()), echo);
        match end.code() {
            Some(0) => Ok(()),
            _ => Err(Stopped(format!("{what}: {}", end.how()), end.journal.report().lines)),
        }
    }

    /// Makes the environment, if it is not there.
    fn make(&self) -> Result<(), Stopped> {
        // pip comes last: where it is missing, making the environment was interrupted.
        if self.program("pip").exists() {
            return Ok(());
        }
        let mut make = Command::new(python().unwrap_or("python3"));
        make.args(["-m", "venv"]).arg(&self.home);
        self.run("making a virtual environment", make, self.left(), false)
    }

    fn install(&self, packages: &[&str], limit: Duration) -> Result<(), Stopped> {
        let mut pip = Command::new(self.program("python"));
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages);
        self.run(&format!("pip install {}", packages.join(" ")), pip, limit, false)
    }

    /// Makes the environment, with what all tests need.
    fn make_with_base(&self) -> Result<(), Stopped> {
        self.make()?;
        self.install(&BASE, DOWNLOAD)
    }

    /// Runs pytest, and counts the tests by the file of results that `conftest.py` writes.
    fn tests(&self, arguments: &[&str]) -> Ran {
        let devices = match devices(self) {
            Ok(devices) => devices,
            Err(stopped) => return failed(stopped),
        };
        let results = self.home.join("results.json");
        let _ = fs::remove_file(&results);
        let mut pytest = Command::new(self.program("python"));
        pytest
            .args(["-m", "pytest", "-q", "--durations=5", "--color=no", "-p", "no:cacheprovider"])
            .args(arguments);
        pytest.current_dir(self.root).env("ALLSTREAM_TEST_RESULTS", &results).env("ALLSTREAM_TUNING", "off");
        pytest.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("PYTHONPATH").envs(devices);
        let stopped = self.run("pytest", pytest, self.left(), true).err();
        let read =
            fs::read_to_string(&results).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
        counted(read.as_ref(), stopped)
    }
}

/// Counts from the tests' file of results, and from how pytest ended (`stopped`: it failed).
fn counted(results: Option<&Value>, stopped: Option<Stopped>) -> Ran {
    let texts = |name: &str| -> Vec<String> {
        let all = results.and_then(|results| results[name].as_array()).into_iter().flatten();
        all.filter_map(Value::as_str).map(String::from).collect()
    };
    let (failed, skipped) = (texts("failed"), texts("skipped"));
    let passed = results.and_then(|results| results["passed"].as_u64()).unwrap_or(0);
    let mut counts = Counts { passed, failed: failed.len() as u64, skipped: skipped.len() as u64 };
    let mut report = Report::default();
    skipped.iter().for_each(|why| runner::say(&format!("skipped, python: {why}")));
    if let Some(Stopped(why, lines)) = stopped {
        counts.failed = counts.failed.max(1);
        report.names = if failed.is_empty() { vec![why] } else { failed };
        report.lines = lines;
    } else if passed == 0 {
        counts.failed = 1;
        report.names.push("pytest ran no test".into());
    }
    Ran(runner::describe(counts), counts, report)
}

fn failed(Stopped(why, lines): Stopped) -> Ran {
    Ran::failed(why, lines)
}

/// Makes the environment of [`all`] and downloads the packages that its tests need, beside a part that keeps the processors busy.
pub(crate) fn fetch_all(root: &Path, limit: Duration) -> Ran {
    let work = Work::new(root, limit);
    let each = || LIBRARIES.iter().try_for_each(|(_, package)| work.install(&[package], DOWNLOAD));
    match work.make_with_base().and_then(|()| each()) {
        Ok(()) => Ran("passed".into(), Counts { passed: 1, ..Counts::default() }, Report::default()),
        // `all` tries to install them again, and says which tests are left out if that fails, too.
        Err(Stopped(why, _)) => runner::skipped(&why),
    }
}

/// Builds the CUDA driver and the NCCL for tests. Returns the variables that tell the tests where they are.
fn devices(work: &Work<'_>) -> Result<[(&'static str, PathBuf); 2], Stopped> {
    // One by one, as the Rust tests build them (`tests/support/cuda.rs`): in one command each would get the other's features, and be built again.
    for package in ["cuda-driver-for-tests", "nccl-for-tests"] {
        let mut build = Command::new(runner::cargo());
        build.args(["build", "--locked", "--package", package]);
        work.run(&format!("cargo build of {package}"), build, work.left(), true)?;
    }
    let built = |file| runner::target(work.root).join("debug").join(file);
    Ok([("ALLSTREAM_TEST_CUDA", built("libcuda.so")), ("ALLSTREAM_TEST_NCCL", built("libnccl.so"))])
}

/// Copies the Python files of a folder and of the folders below it.
pub(crate) fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in from.read_dir()? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target)?;
        } else if path.extension().is_some_and(|end| end == "py" || end == "pyi") {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

/// Runs all tests: on the wheel as users build it, with torch, Ray and spaCy from pip.
pub(crate) fn all(root: &Path, limit: Duration) -> Ran {
    let work = Work::new(root, limit);
    if let Err(Stopped(why, _)) = work.make_with_base() {
        return runner::skipped(&why);
    }
    let mut arguments = vec!["ffi/python/tests".to_owned()];
    let mut missing = Vec::new();
    for (name, package) in LIBRARIES {
        if let Err(Stopped(why, _)) = work.install(&[package], DOWNLOAD) {
            arguments.push(format!("--ignore=ffi/python/tests/{name}"));
            missing.push(why);
        }
    }
    // As a user installs it: pip fetches maturin, which builds the wheel.
    if let Err(stopped) = work.install(&["--force-reinstall", "--no-deps", "./ffi/python"], work.left()) {
        return failed(stopped);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Ran(_, mut counts, report) = work.tests(&arguments);
    for why in &missing {
        runner::say(&format!("skipped, python: {why}"));
        counts.skipped += 1;
    }
    Ran(runner::describe(counts), counts, report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_fail_and_none_at_all_are_failures() {
        let results = serde_json::json!({"passed": 3, "failed": ["tests/a.py::b"], "skipped": ["no torch"]});
        let stopped = || Stopped("pytest: exit code 1".into(), vec!["line".into()]);
        let Ran(text, counts, report) = counted(Some(&results), Some(stopped()));
        assert_eq!((counts.passed, counts.failed, counts.skipped), (3, 1, 1));
        assert_eq!(
            (text.as_str(), report.names[0].as_str()),
            ("FAILED (3 passed, 1 failed, 1 skipped)", "tests/a.py::b")
        );
        let Ran(_, counts, report) = counted(None, Some(stopped()));
        assert_eq!((counts.failed, report.names[0].as_str()), (1, "pytest: exit code 1"));
        assert_eq!(counted(Some(&serde_json::json!({"passed": 0})), None).1.failed, 1);
        assert_eq!(counted(Some(&serde_json::json!({"passed": 2})), None).1.failed, 0);
    }
}
