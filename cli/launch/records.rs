//! Where a job's flight recorders go, so that those of one job are together and its end can say where.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Job;

const VARIABLE: &str = "ALLSTREAM_TRACE_DIR";
/// Directories of jobs that are kept: the last ones.
const KEPT: usize = 64;

/// The directory of a job's flight recorders.
pub(super) struct Records {
    /// `None`: they go nowhere.
    dir: Option<PathBuf>,
    since: SystemTime,
}

impl Records {
    /// Where the user says, or in a directory of the job's own, which is made when a rank has something to write.
    pub(super) fn of(job: &mut Job) -> Records {
        let given = job.env.iter().rev().find(|(key, _)| key == VARIABLE).map(|(_, value)| value.clone());
        let dir = match given.or_else(|| std::env::var_os(VARIABLE)) {
            Some(off) if off == "off" => None,
            Some(dir) => Some(dir.into()),
            None => {
                // As the engine's own choice: each user has one that others cannot write to, nor keep from writing to.
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

    /// Where there are some of this job, if there are.
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

/// Removes the directories of old jobs.
fn prune(all: &Path) {
    let is_job = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("job-");
    let jobs = fs::read_dir(all).into_iter().flatten().flatten().filter(is_job);
    let mut jobs: Vec<_> =
        jobs.filter_map(|job| Some((job.metadata().ok()?.modified().ok()?, job.path()))).collect();
    jobs.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    for (_, dir) in jobs.into_iter().skip(KEPT) {
        // Another launcher may be at it as well.
        let _ = fs::remove_dir_all(dir);
    }
}
