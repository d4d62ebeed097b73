//! The directory to which all ranks of a job write their flight recorders. The launcher names it when the job has failed.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Job;

const VARIABLE: &str = "ALLSTREAM_TRACE_DIR";
/// How many directories of jobs [`prune`] leaves: those that changed last.
const KEPT: usize = 64;

/// The directory of a job's flight recorders.
pub(super) struct Records {
    /// `None`: the user turned flight recorders off.
    dir: Option<PathBuf>,
    /// When the job began: older files in the directory are of other jobs.
    since: SystemTime,
}

impl Records {
    /// The directory that the user names by [`VARIABLE`], or else one of this job's own. In either case the ranks find its name in
    /// [`VARIABLE`], and the first rank that writes a flight recorder makes it.
    pub(super) fn of(job: &mut Job) -> Records {
        let given = job.env.iter().rev().find(|(key, _)| key == VARIABLE).map(|(_, value)| value.clone());
        let dir = match given.or_else(|| std::env::var_os(VARIABLE)) {
            Some(off) if off == "off" => None,
            Some(dir) => Some(dir.into()),
            None => {
                // The user's number is in the name, as in the engine's default: one name for all users would be the first user's directory.
                let user = rustix::process::geteuid().as_raw();
                let all = std::env::temp_dir().join(format!("allstream-{user}"));
                prune(&all);
                let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let seconds = since.map_or(0, |since| since.as_secs());
                let dir = all.join(format!("job-{seconds}-{}", std::process::id()));
                job.env.push((VARIABLE.into(), dir.clone().into()));
                Some(dir)
            }
        };
        Records { dir, since: SystemTime::now() }
    }

    /// The directory, if a rank of this job has written a flight recorder there.
    pub(super) fn found(&self) -> Option<&Path> {
        let is_new = |entry: fs::DirEntry| {
            entry.path().extension() == Some(OsStr::new("json"))
                && entry
                    .metadata()
                    .and_then(|about| about.modified())
                    .is_ok_and(|written| written >= self.since)
        };
        let dir = self.dir.as_deref()?;
        fs::read_dir(dir).ok()?.flatten().any(is_new).then_some(dir)
    }
}

/// Removes the directories of old jobs from `all`, the user's directory.
fn prune(all: &Path) {
    let is_job = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("job-");
    let jobs = fs::read_dir(all).into_iter().flatten().flatten().filter(is_job);
    let mut jobs: Vec<_> =
        jobs.filter_map(|job| Some((job.metadata().ok()?.modified().ok()?, job.path()))).collect();
    jobs.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    for (_, dir) in jobs.into_iter().skip(KEPT) {
        // An error does not matter: another launcher may be removing the same directory.
        let _ = fs::remove_dir_all(dir);
    }
}
