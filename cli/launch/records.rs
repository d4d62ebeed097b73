//! The directory to which the ranks of a job write their flight recorders. When the job has failed, the launcher tells the user its name.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::process::Pid;

use super::Job;

const VARIABLE: &str = "ALLSTREAM_TRACE_DIR";
/// How many directories of jobs that have ended [`prune`] keeps: those that changed last.
const KEPT: usize = 64;

/// The directory of a job's flight recorders.
pub(super) struct Records {
    /// `None`: the user turned flight recorders off.
    dir: Option<PathBuf>,
    /// When the job began: older files in the directory are of other jobs.
    since: SystemTime,
}

impl Records {
    /// The directory that the user names by [`VARIABLE`]. If the user names none: one for this job alone, whose name the ranks get in
    /// [`VARIABLE`]. The directory is made by the first rank that writes a flight recorder.
    pub(super) fn of(job: &mut Job) -> Records {
        let given = job.env.iter().rev().find(|(key, _)| key == VARIABLE).map(|(_, value)| value.clone());
        let dir = match given.or_else(|| std::env::var_os(VARIABLE)) {
            Some(off) if off == "off" => None,
            Some(dir) if !dir.is_empty() => Some(dir.into()),
            _ => {
                // The user's number is in the name, as in the engine's default: one user cannot write to a directory that another one has made.
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

    /// The directory, if on this host it holds a flight recorder that was written since the job began.
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

/// Removes the directories of old jobs from `all`, the user's directory. Those of jobs that still run stay, however old they are.
fn prune(all: &Path) {
    if !is_ours(all) {
        return;
    }
    let is_old = |entry: &fs::DirEntry| {
        entry.file_type().is_ok_and(|kind| kind.is_dir())
            && launcher(&entry.file_name().to_string_lossy()).is_some_and(|pid| !lives(pid))
    };
    let jobs = fs::read_dir(all).into_iter().flatten().flatten().filter(is_old);
    let mut jobs: Vec<_> =
        jobs.filter_map(|job| Some((job.metadata().ok()?.modified().ok()?, job.path()))).collect();
    jobs.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    for (_, dir) in jobs.into_iter().skip(KEPT) {
        // An error does not matter: another launcher may be removing the same directory.
        let _ = fs::remove_dir_all(dir);
    }
}

/// Whether this is a directory of this user's. The temporary directory is open to all users: another one may have made a directory of this name
/// there, or a link that leads to files of ours.
fn is_ours(dir: &Path) -> bool {
    let uid = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(dir).is_ok_and(|about| about.is_dir() && about.uid() == uid)
}

/// The launcher's process number in a directory's name that [`Records::of`] has given, `job-SECONDS-PID`. `None`: it is no such name.
fn launcher(name: &str) -> Option<Pid> {
    let (seconds, pid) = name.strip_prefix("job-")?.split_once('-')?;
    seconds.parse::<u64>().ok()?;
    Pid::from_raw(pid.parse().ok().filter(|pid| *pid > 0)?)
}

/// Whether a process of this number lives, of whatever user.
fn lives(pid: Pid) -> bool {
    rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;

    /// A number that no process has: the system gives out none above 2^22.
    const NOBODY: u32 = (1 << 22) + 1;

    /// Makes `KEPT` directories of ended jobs, and for each name in `older` a directory that changed before all of those.
    fn jobs(all: &Path, older: &[&str]) {
        let newer = (0..KEPT).map(|i| format!("job-{}-{NOBODY}", 2000 + i));
        for (age, name) in newer.chain(older.iter().map(|name| (*name).into())).enumerate() {
            let dir = all.join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("a.json"), "{}").unwrap();
            let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(10_000 - age as u64);
            fs::File::open(&dir).unwrap().set_modified(changed).unwrap();
        }
    }

    #[test]
    fn old_jobs_are_removed_and_neither_running_ones_nor_what_is_no_job() {
        let all = tempfile::tempdir().unwrap();
        let old = format!("job-1000-{NOBODY}");
        let running = format!("job-1000-{}", std::process::id());
        let others = ["job-notes", "job-1-", "job-x-77", "job-1000--5", "notes", &running];
        jobs(all.path(), &[&others[..], &[old.as_str()]].concat());
        prune(all.path());
        assert!(!all.path().join(&old).exists());
        for name in others {
            assert!(all.path().join(name).join("a.json").exists(), "{name}");
        }
        assert_eq!(fs::read_dir(all.path()).unwrap().count(), KEPT + others.len());
    }

    /// Another user may have put a link there, in the place of our directory.
    #[test]
    fn nothing_is_removed_from_where_a_link_leads() {
        let place = tempfile::tempdir().unwrap();
        let (theirs, link) = (place.path().join("theirs"), place.path().join("link"));
        let old = format!("job-1000-{NOBODY}");
        jobs(&theirs, &[&old]);
        symlink(&theirs, &link).unwrap();
        prune(&link);
        assert!(theirs.join(old).exists());
    }
}
