//! A part of what there is to run.

use std::path::Path;
use std::time::Duration;

use crate::house::Check;
use crate::journal::{Counts, Report};

/// What is built and tested together, so that what they have in common is compiled once, with the features that all of them ask for.
pub(crate) const PACKAGES: &str = "--package allstream --package allstream-plan --package allstream-kernels \
     --package allstream-cuda-kernels --package allstream-sys --package allstream-cli --all-features";
/// What the full run builds with them: what tests are made of.
pub(crate) const TOOLS: &str =
    "--package cuda-driver-for-tests --package nccl-for-tests --package verbs-for-tests --package loom-tests";

/// Members of the workspace that are for its own tests: nobody reads their documentation, and they are not published.
pub(crate) const OURS_ALONE: &str = "--exclude xtask --exclude loom-tests --exclude cuda-driver-for-tests \
     --exclude nccl-for-tests --exclude verbs-for-tests --exclude test-support --exclude test-oracle --exclude gpu-pack";

/// Something to run, and what it needs.
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) work: Work,
    pub(crate) when: When,
    /// It runs at the same time as the part before it, in the time of the processors that the other leaves unused.
    pub(crate) beside: bool,
    /// Why it cannot run here, if it cannot.
    pub(crate) needs: fn(&Path) -> Result<(), String>,
    /// Past this it is killed, and has failed.
    pub(crate) limit: Duration,
}

/// Of which runs a part is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    Always,
    /// Of `test`. `test --full` and `ci` have a part that does the same and more.
    Core,
    /// Of `test --full` and `ci`.
    Full,
}

/// What a part does.
pub(crate) enum Work {
    /// Runs `cargo` with these arguments and variables, in the root of the repository.
    Cargo(Vec<String>, Vec<(&'static str, String)>),
    /// Runs checks in this process.
    Checks(fn(&Path) -> Vec<Check>),
    /// Is not there yet, for this reason.
    NotYet(&'static str),
    /// Runs commands in turn, within the limit.
    Steps(fn(&Path, Duration) -> Ran),
}

/// How a part ended: in words, in numbers, and what is to be said again if it failed.
pub(crate) struct Ran(pub(crate) String, pub(crate) Counts, pub(crate) Report);

impl Ran {
    /// A part that failed for one reason, and what was printed before.
    pub(crate) fn failed(why: String, lines: Vec<String>) -> Ran {
        let counts = Counts { failed: 1, ..Counts::default() };
        Ran(format!("FAILED: {why}"), counts, Report { names: vec![why], lines })
    }
}
