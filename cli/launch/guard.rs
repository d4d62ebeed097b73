//! The guard: a process beside the launcher. If the launcher dies, the guard kills what the launcher leaves behind.
//!
//! When the launcher dies, the system kills the process that the launcher started for each rank, but nothing that such a process has started:
//! where it is a shell, the user's program lives on. The guard is this command again (`allstream run --guard`), in a session of its own and with
//! no environment variables. The launcher tells the guard on stdin what belongs to the job. If stdin ends without a `done` before, the
//! launcher has died.

use std::fs::File;
use std::io::{self, BufRead, PipeWriter, Write};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::cgroup::Cgroup;
use super::processes;
use crate::{Exit, own};

const DONE: &str = "done";
/// The guard waits this long before it looks again: what was being started when the launcher died may appear a moment later.
const SETTLE: Duration = Duration::from_millis(100);
/// The guard gives up after this time: a killed process that is stuck in the kernel may never end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The launcher's side of the guard.
pub(super) struct Guard {
    /// The value of the environment variable [`processes::MARK`] in the job's processes.
    pub(super) mark: String,
    /// `None`: the launcher may make no cgroup, or has not made it yet.
    cgroup: Option<Cgroup>,
    /// The guard, and the pipe to its stdin. `None`: the guard could not be started; if the launcher dies, the system alone kills the ranks.
    process: Option<(Child, PipeWriter)>,
}

impl Guard {
    /// Starts the guard of a job. If the guard's process does not start, the job runs without it.
    pub(super) fn start() -> io::Result<Guard> {
        let mut bytes = [0_u8; 16];
        getrandom::fill(&mut bytes).map_err(|error| io::Error::other(format!("no random bytes: {error}")))?;
        let mark: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let process = spawn().map_err(|error| tracing::warn!(%error, "the launcher has no guard")).ok();
        let mut guard = Guard { mark, cgroup: None, process };
        guard.tell(&format!("mark {}", guard.mark));
        Ok(guard)
    }

    /// Makes the job's cgroup, if this process may. Ranks move to it by writing `0` to the file that comes back.
    pub(super) fn make_cgroup(&mut self) -> Option<File> {
        let made = Cgroup::of(&self.mark).and_then(|cgroup| {
            // The guard hears of the cgroup before it is made: the launcher may be killed at any moment.
            self.tell(&format!("cgroup {}", cgroup.path().display()));
            let entrance = cgroup.make()?;
            self.cgroup = Some(cgroup);
            Ok(entrance)
        });
        made.inspect_err(|error| tracing::debug!(%error, "the ranks are in no cgroup of their own")).ok()
    }

    /// Kills all that belongs to the job: the processes of these sessions, and those outside that carry the job's mark or are in its cgroup.
    pub(super) fn kill(&self, sessions: &[Pid]) {
        processes::kill(sessions, Some(&self.mark));
        self.cgroup.iter().for_each(Cgroup::kill);
    }

    /// Tells the guard that the session which `leader` leads belongs to the job.
    pub(super) fn watch(&mut self, leader: Pid) {
        self.tell(&format!("session {}", leader.as_raw_nonzero()));
    }

    fn tell(&mut self, line: &str) {
        if let Some((_, pipe)) = &mut self.process {
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Whether the process of this number is the guard.
    pub(super) fn is(&self, pid: Pid) -> bool {
        self.process.as_ref().is_some_and(|(child, _)| Pid::from_child(child) == pid)
    }
}

impl Drop for Guard {
    /// Tells the guard to end and to kill nothing: the launcher has killed what was to be killed, and the system may soon give the job's
    /// process numbers to other processes.
    fn drop(&mut self) {
        self.tell(DONE);
        if let Some((mut child, pipe)) = self.process.take() {
            drop(pipe);
            let _ = child.wait();
        }
        if let Some(cgroup) = self.cgroup.take() {
            cgroup.leave();
        }
    }
}

fn spawn() -> io::Result<(Child, PipeWriter)> {
    let (theirs, ours) = io::pipe()?;
    let mut command = own::command_that_runs()?;
    command.args(["run", "--guard"]).env_clear().current_dir("/");
    command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::null());
    super::in_own_session(&mut command);
    Ok((command.spawn()?, ours))
}

/// Runs this process as the guard of the launcher that writes to stdin.
pub(crate) fn run() -> io::Result<Exit> {
    // These signals do not end the guard: whoever ends a job may send them to all processes of a user.
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    let (mut mark, mut cgroup, mut sessions) = (None, None, Vec::new());
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("mark", text)) => mark = Some(text.to_owned()),
            Some(("cgroup", path)) => cgroup = Some(Cgroup::at(path)),
            Some(("session", pid)) => sessions.extend(pid.parse().ok().and_then(Pid::from_raw)),
            _ if line == DONE => return Ok(Exit::SUCCESS),
            _ => {}
        }
    }
    let end = Instant::now() + PATIENCE;
    let mut is_over = false;
    while !is_over && Instant::now() < end {
        let found = processes::kill(&sessions, mark.as_deref());
        cgroup.iter().for_each(Cgroup::kill);
        thread::sleep(SETTLE);
        is_over = !found
            && processes::living(&sessions, mark.as_deref()).is_empty()
            && cgroup.as_ref().is_none_or(Cgroup::remove);
    }
    Ok(Exit::SUCCESS)
}
