//! A cgroup (version 2) for the ranks of a job, below the launcher's own: whatever a rank starts is in it, also what leaves the rank's session
//! and takes the job's mark out of its environment. Only some users may make one: root (in a container, if its cgroups are not read-only),
//! and users to whom their systemd has delegated theirs. Everywhere else a job's processes are found by sessions and marks alone (`processes.rs`).
//!
//! The launcher's own cgroup keeps its limits, which hold for the ranks as well: no controller is enabled for the new one.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// The file with the numbers of a cgroup's processes. Writing a process's number to it moves that process to the cgroup; 0 moves the writer itself.
const PROCESSES: &str = "cgroup.procs";
/// How many times [`Cgroup::kill`] looks for processes at most: some may have been started while others were killed.
const ROUNDS: usize = 20;
/// How long to try to remove a cgroup whose processes have just been killed.
const PATIENCE: Duration = Duration::from_secs(1);

/// A job's cgroup. It stays when this is dropped.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// The cgroup of the job with this mark, below that of this process. It is not made yet.
    ///
    /// # Errors
    /// The system has no cgroups of version 2, or this process cannot see its own.
    pub(super) fn of(mark: &str) -> io::Result<Cgroup> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no cgroup of version 2 is mounted here");
        let own = own_cgroup(&own, &mounts).ok_or_else(missing)?;
        Ok(Cgroup { path: own.join(format!("allstream-{mark}")) })
    }

    /// The cgroup at this path, which another process makes.
    pub(super) fn at(path: &str) -> Cgroup {
        Cgroup { path: path.into() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the cgroup. A process that writes `0` to the file that is returned moves into the cgroup.
    ///
    /// # Errors
    /// This process may not make the cgroup, or may move no process to it. Then no cgroup is left.
    pub(super) fn make(&self) -> io::Result<File> {
        // The system asks for this right, too, when a process moves from the launcher's cgroup to the new one.
        let may_move = self.path.with_file_name(PROCESSES);
        OpenOptions::new().write(true).open(may_move)?;
        fs::create_dir(&self.path)?;
        let usable = || {
            let kind = fs::read_to_string(self.path.join("cgroup.type"))?;
            // Below a threaded cgroup the system makes only cgroups that take no processes.
            if kind.trim_end() != "domain" {
                return Err(io::Error::other(format!("it would be a cgroup of type {}", kind.trim_end())));
            }
            OpenOptions::new().write(true).open(self.path.join(PROCESSES))
        };
        usable().inspect_err(|_| _ = fs::remove_dir(&self.path))
    }

    /// Kills all processes in the cgroup, and what they start meanwhile.
    pub(super) fn kill(&self) {
        // Linux 5.14 and later: all at once, and nothing that forks escapes.
        if fs::write(self.path.join("cgroup.kill"), "1").is_ok() {
            return;
        }
        self.kill_one_by_one();
    }

    fn kill_one_by_one(&self) {
        for _ in 0..ROUNDS {
            let found: Vec<Pid> = self.tree().iter().flat_map(|cgroup| processes(cgroup)).collect();
            if found.is_empty() {
                return;
            }
            for pid in found {
                // Where this fails, the process has ended, or is looked for again.
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }

    /// Removes the cgroup and those below it, which the system allows once no process in them lives. Returns whether the cgroup is gone.
    pub(super) fn remove(&self) -> bool {
        self.tree().iter().for_each(|cgroup| _ = fs::remove_dir(cgroup));
        !self.path.exists()
    }

    /// Removes the cgroup and those below it at the end of a job. Processes that may outlive the job go back to the launcher's cgroup.
    pub(super) fn leave(&self) {
        let end = Instant::now() + PATIENCE;
        while !self.remove() && Instant::now() < end {
            // A rank may have made cgroups below. Their processes go, too: a cgroup cannot be removed as long as one below it has a process.
            for pid in self.tree().iter().flat_map(|cgroup| processes(cgroup)) {
                // Where this fails, the process has ended, or is looked for again.
                let _ = fs::write(self.path.with_file_name(PROCESSES), pid.as_raw_nonzero().to_string());
            }
            // Processes that were just killed need a moment to end.
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The cgroup and all below it, those below first.
    fn tree(&self) -> Vec<PathBuf> {
        let mut tree = vec![self.path.clone()];
        let mut next = 0;
        while let Some(cgroup) = tree.get(next) {
            let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
            let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            tree.extend(below.map(|entry| entry.path()).collect::<Vec<_>>());
            next += 1;
        }
        tree.reverse();
        tree
    }
}

/// The processes of one cgroup, without those below it.
fn processes(cgroup: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(cgroup.join(PROCESSES)).unwrap_or_default();
    text.lines().filter_map(|pid| pid.parse().ok().and_then(Pid::from_raw)).collect()
}

/// A path of mountinfo, in which spaces, tabs, line ends and backslashes are written as `\\` and three octal digits.
fn unescape(word: &str) -> PathBuf {
    let mut parts = word.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(&part.as_bytes()[3..]);
            }
            None => bytes.extend([b"\\", part.as_bytes()].concat()),
        }
    }
    OsString::from_vec(bytes).into()
}

/// The directory of the cgroup that /proc/PID/cgroup names, by the mounts that /proc/PID/mountinfo lists.
fn own_cgroup(cgroup: &str, mounts: &str) -> Option<PathBuf> {
    let own = Path::new(cgroup.lines().find_map(|line| line.strip_prefix("0::"))?);
    // The cgroup is outside the part of the tree that this process sees.
    if own.components().any(|part| part == std::path::Component::ParentDir) {
        return None;
    }
    mounts.lines().find_map(|line| {
        // `ID PARENT DEVICE ROOT PLACE OPTIONS... - TYPE SOURCE OPTIONS`
        let (mount, kind) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(3);
        let (root, place) = (unescape(words.next()?), unescape(words.next()?));
        // A container may have mounted a part of the tree.
        let below = own.strip_prefix(root).ok()?;
        kind.starts_with("cgroup2 ").then(|| place.join(below))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    use super::*;

    const UNIFIED: &str = "35 25 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "36 25 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                          37 25 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const PART: &str = "38 25 0:30 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup rw\n";

    #[test]
    fn the_own_cgroup_is_found_however_it_is_mounted() {
        let found = |cgroup, mounts| own_cgroup(cgroup, mounts);
        assert_eq!(found("0::/\n", UNIFIED), Some("/sys/fs/cgroup/".into()));
        assert_eq!(found("0::/user.slice/a b\n", UNIFIED), Some("/sys/fs/cgroup/user.slice/a b".into()));
        assert_eq!(found("8:pids:/x\n0::/y\n", HYBRID), Some("/sys/fs/cgroup/unified/y".into()));
        assert_eq!(found("0::/docker/ab/c\n", PART), Some("/sys/fs/cgroup/c".into()));
        let escaped = r"29 23 0:26 / /mnt/my\040own\134cgroup\0 rw - cgroup2 cgroup2 rw";
        assert_eq!(found("0::/a\n", escaped), Some(r"/mnt/my own\cgroup\0/a".into()));
        for (cgroup, mounts) in
            [("8:pids:/x\n", HYBRID), ("0::/x\n", ""), ("0::/docker/cd\n", PART), ("0::/../x\n", UNIFIED)]
        {
            assert_eq!(found(cgroup, mounts), None, "{cgroup}");
        }
    }

    /// A cgroup with a sleeping process, and one below it with another. If this process may not make cgroups, says why and returns `None`.
    fn with_sleepers(name: &str) -> Option<(Cgroup, [Child; 2])> {
        let cgroup = Cgroup::of(&format!("test-{name}-{}", std::process::id()));
        let made = cgroup.and_then(|cgroup| cgroup.make().map(|_| cgroup));
        let cgroup = made.inspect_err(|why| eprintln!("skipped: no cgroup can be made: {why}")).ok()?;
        let below = cgroup.path().join("below");
        fs::create_dir(&below).unwrap();
        let sleepers = [cgroup.path(), &below].map(|place| {
            let child = Command::new("sleep").arg("1000").spawn().unwrap();
            fs::write(place.join(PROCESSES), child.id().to_string()).unwrap();
            child
        });
        assert!(!cgroup.remove());
        Some((cgroup, sleepers))
    }

    /// The sleepers stand for a daemon that a rank has started, and that has made a cgroup for itself.
    #[test]
    fn processes_that_outlive_the_job_leave_its_cgroup_also_from_cgroups_below() {
        let Some((cgroup, mut sleepers)) = with_sleepers("leave") else { return };
        cgroup.leave();
        let (is_gone, alive) =
            (!cgroup.path().exists(), sleepers.each_mut().map(|child| child.try_wait().unwrap().is_none()));
        for sleeper in &mut sleepers {
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
        cgroup.leave();
        assert!(is_gone && alive == [true; 2], "gone: {is_gone}, alive: {alive:?}");
    }

    /// As on a system without `cgroup.kill`.
    #[test]
    fn processes_are_killed_one_by_one_also_in_cgroups_below() {
        let Some((cgroup, mut sleepers)) = with_sleepers("kill") else { return };
        cgroup.kill_one_by_one();
        for sleeper in &mut sleepers {
            assert_eq!(sleeper.wait().unwrap().signal(), Some(9));
        }
        cgroup.leave();
        assert!(!cgroup.path().exists());
    }
}
