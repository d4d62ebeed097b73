//! One step's program: started with a log, ended at its limit together with all that it has started.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Code(i32),
    Signal(i32),
    /// It had to be killed at its limit.
    Hung,
}

/// So much time programs get from SIGTERM to SIGKILL: a launcher ends its ranks, a recorder is written.
const GRACE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);

/// Takes over processes whose parents end: they stay this process's descendants, so that [`run`] finds them.
pub fn adopt() -> io::Result<()> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(Into::into)
}

/// Runs a command, whose output goes to `log`. At its limit `hangs` is called with the processes of the command, which
/// still run then; afterwards they are ended.
pub fn run(
    command: &mut Command,
    log: &Path,
    limit: Duration,
    hangs: impl FnOnce(&[i32]),
) -> io::Result<(How, Duration)> {
    let start = Instant::now();
    let file = File::create(log)?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
    let mut child = command.spawn()?;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if start.elapsed() >= limit => break None,
            None => thread::sleep(LOOK),
        }
    };
    let took = start.elapsed();
    if status.is_none() {
        let first = child.id().cast_signed();
        let others = descendants().into_iter().filter(|pid| *pid != first);
        hangs(&[first].into_iter().chain(others).collect::<Vec<_>>());
    }
    end_all();
    let how = match status {
        Some(status) => status.code().map_or_else(|| How::Signal(status.signal().unwrap_or(0)), How::Code),
        None => How::Hung,
    };
    Ok((how, took))
}

/// Ends all processes that this one's steps have left behind: first by SIGTERM.
pub fn end_all() {
    for signal in [Signal::TERM, Signal::KILL] {
        let end = Instant::now() + GRACE;
        let mut left = descendants();
        left.iter().for_each(|pid| tell(*pid, signal));
        while !left.is_empty() && Instant::now() < end {
            reap();
            thread::sleep(LOOK);
            left = descendants();
        }
    }
    reap();
}

fn tell(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // One that has ended meanwhile is as good.
        let _ = kill_process(pid, signal);
    }
}

/// Takes note of children that have ended, also of those that were adopted.
fn reap() {
    while matches!(waitpid(None, WaitOptions::NOHANG), Ok(Some(_))) {}
}

/// The processes below this one that still run, but for NVIDIA's Multi-Process Service, which has its own end.
fn descendants() -> Vec<i32> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // `pid (name) state parent ...`; a name may hold anything, parentheses too.
        let Some((before, after)) = stat.rsplit_once(')') else { continue };
        let name = before.split_once('(').map_or("", |(_, name)| name).to_owned();
        let mut words = after.split_whitespace();
        let state = words.next().unwrap_or_default().to_owned();
        let parent = words.next().and_then(|text| text.parse::<i32>().ok()).unwrap_or(0);
        parents.push((pid, parent, state == "Z" || name.starts_with("nvidia-cuda-mps")));
    }
    let mut found = vec![std::process::id().cast_signed()];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(parents.iter().filter(|(_, of, _)| *of == parent).map(|(pid, ..)| *pid));
        next += 1;
    }
    let runs = |pid: &i32| parents.iter().any(|(other, _, left_out)| other == pid && !left_out);
    found.into_iter().skip(1).filter(runs).collect()
}
