//! A part of a run: what it does, when it runs, and what it needs.

use std::path::Path;
use std::time::Duration;

use crate::house::Check;
use crate::journal::{Counts, Report};

/// The packages that each cargo command takes together, so that common dependencies are compiled once, with the features that any asks for.
pub(crate) const PACKAGES: &str = "--package allstream --package allstream-plan --package allstream-kernels \
     --package allstream-cuda-kernels --package allstream-sys --package allstream-cli --all-features";
/// The packages that the full run adds to [`PACKAGES`]: what takes the place of drivers and libraries in tests, and the loom tests.
pub(crate) const TOOLS: &str =
    "--package cuda-driver-for-tests --package nccl-for-tests --package verbs-for-tests --package loom-tests";

/// Options that leave out the workspace members that only serve its own tests: these are not published, and need no documentation.
pub(crate) const OURS_ALONE: &str = "--exclude xtask --exclude loom-tests --exclude cuda-driver-for-tests \
     --exclude nccl-for-tests --exclude verbs-for-tests --exclude test-support --exclude test-oracle --exclude gpu-pack";

/// Something to run, with its conditions.
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) work: Work,
    pub(crate) when: When,
    /// Whether it runs at the same time as the part before it, and only uses the processor time that this other part leaves.
    pub(crate) beside: bool,
    /// Why it cannot run here, if it cannot.
    pub(crate) needs: fn(&Path) -> Result<(), String>,
    /// A command that runs longer is killed, and the part has failed. [`Work::Checks`] have no limit.
    pub(crate) limit: Duration,
}

/// Which runs a part belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    Always,
    /// Only `test`. `test --full` and `ci` have another part, which does the same and more.
    Core,
    /// Only `test --full` and `ci`.
    Full,
}

/// What a part does.
pub(crate) enum Work {
    /// Runs `cargo` with these arguments and variables, in the root of the repository.
    Cargo(Vec<String>, Vec<(&'static str, String)>),
    /// Runs checks in this process.
    Checks(fn(&Path) -> Vec<Check>),
    /// Runs nothing: the part counts as skipped, for this reason.
    NotYet(&'static str),
    /// Runs commands in turn, within the limit.
    Steps(fn(&Path, Duration) -> Ran),
}

/// How a part ended: in words, in numbers, and what is printed again at the end if it failed.
pub(crate) struct Ran(pub(crate) String, pub(crate) Counts, pub(crate) Report);

impl Ran {
    /// A part that failed for one reason, and what was printed before.
    pub(crate) fn failed(why: String, lines: Vec<String>) -> Ran {
        let counts = Counts { failed: 1, ..Counts::default() };
        Ran(format!("FAILED: {why}"), counts, Report { names: vec![why], lines })
    }
}
