//! The processes of this host that belong to a job: all that are in the session of a rank, and all that carry the job's mark in their
//! environment, whatever session they have made for themselves.

use std::fs;

use rustix::process::{Pid, Signal};

/// The variable that marks a job's processes.
pub(super) const MARK: &str = "ALLSTREAM_JOB";
/// How many times [`kill`] looks for processes at most: some may have been started while others were killed.
const ROUNDS: usize = 20;

/// How many times [`takes`] looks at a process that has blocked all signals, 2 ms apart.
const STARTING: usize = 10;

/// A process, as /proc describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    pub(crate) parent: i32,
    pub(super) session: i32,
    /// The process has ended, and its parent has not reaped it.
    pub(super) is_zombie: bool,
}

/// All processes of this host; none where there is no /proc.
pub(crate) fn all() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter_map(|pid| parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)).collect()
}

/// Reads a line of /proc/PID/stat: `PID (NAME) STATE PARENT GROUP SESSION ...`.
fn parse(stat: &[u8]) -> Option<Process> {
    // A program's name may contain anything, even closing parentheses and bytes that are not UTF-8.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let text = String::from_utf8_lossy(&stat[..end]);
    let pid = text.split_whitespace().next()?.parse().ok().and_then(Pid::from_raw)?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    let mut words = rest.split_whitespace();
    let state = words.next()?;
    let parent = words.next()?.parse().ok()?;
    let session = words.nth(1)?.parse().ok()?;
    let threads = words.nth(13).and_then(|threads| threads.parse().ok()).unwrap_or(0);
    // The first thread of a process may end before the others, and the process lives on.
    let is_zombie = matches!(state, "Z" | "X") && threads < 2;
    Some(Process { pid, parent, session, is_zombie })
}

/// The set of signals in this field of the text of /proc/PID/status: signal 1 is bit 0.
pub(super) fn mask(status: &str, field: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix(field));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Whether a process would survive this signal: the process has a handler for it, ignores it, or has blocked it (to wait for it with
/// `sigwait`, say).
fn takes(pid: Pid, signal: Signal) -> bool {
    let has = |mask: u64, signal: Signal| mask & (1 << (signal.as_raw() - 1)) != 0;
    for _ in 0..STARTING {
        let status = fs::read(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        if has(mask(&status, "SigCgt:") | mask(&status, "SigIgn:"), signal) {
            return true;
        }
        let blocked = mask(&status, "SigBlk:");
        if !has(blocked, signal) {
            return false;
        }
        if !has(blocked, Signal::SEGV) {
            return true;
        }
        // SIGSEGV is blocked, too, so all signals are: most likely the process is just starting another one, and soon unblocks them.
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    true
}

/// The processes that this signal would not end, searched from `pid` downwards: the process itself, or else its children that survive the
/// signal, and so on. A rank's process may be a shell without handlers, and the user's program its child.
pub(super) fn that_take(signal: Signal, pid: Pid) -> Vec<Pid> {
    let all = all();
    let (mut next, mut found) = (vec![pid], Vec::new());
    while let Some(pid) = next.pop() {
        if takes(pid, signal) {
            found.push(pid);
        } else {
            let parent = pid.as_raw_nonzero().get();
            let children = all.iter().filter(|process| process.parent == parent && !process.is_zombie);
            next.extend(children.map(|process| process.pid));
        }
    }
    found
}

/// The living processes of these sessions; and, if a mark is given, also those in other sessions that carry it. Without this process.
pub(super) fn living(sessions: &[Pid], mark: Option<&str>) -> Vec<Pid> {
    let own = rustix::process::getpid();
    let is_ours = |process: &Process| {
        sessions.iter().any(|session| session.as_raw_nonzero().get() == process.session)
            || mark.is_some_and(|mark| is_marked(process.pid, mark))
    };
    let living = all().into_iter().filter(|process| process.pid != own && !process.is_zombie);
    living.filter(is_ours).map(|process| process.pid).collect()
}

fn is_marked(pid: Pid, mark: &str) -> bool {
    let wanted = format!("{MARK}={mark}");
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
}

/// Kills the living processes of these sessions and those with this mark, and what they start meanwhile. Returns whether there were any.
pub(super) fn kill(sessions: &[Pid], mark: Option<&str>) -> bool {
    for round in 0..ROUNDS {
        let found = living(sessions, mark);
        if found.is_empty() {
            return round > 0;
        }
        for pid in found {
            // Fails if the process has ended by itself, or belongs to another user.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let line = b"42 (a) \xff (b c) S 7 8 9 0 -1\n";
        let process = parse(line).unwrap();
        assert_eq!(process.pid, Pid::from_raw(42).unwrap());
        assert_eq!((process.parent, process.session, process.is_zombie), (7, 9, false));
        assert!(parse(b"42 (x) Z 1 1 1 0").unwrap().is_zombie);
        let with_threads = |threads| format!("42 (x) Z 1 1 1 0 -1 4 5 6 7 8 9 10 11 12 20 0 {threads} 0 99");
        assert_eq!([1, 2].map(|n| parse(with_threads(n).as_bytes()).unwrap().is_zombie), [true, false]);
        for bad in [&b""[..], b"x (y) S 1 1 1", b"42 (x", b"42 (x) S 1"] {
            assert_eq!(parse(bad), None);
        }
    }

    #[test]
    fn masks_of_signals() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000000200\n";
        assert_eq!(mask(status, "SigCgt:"), 1 << 9);
        assert_eq!(mask(status, "SigBlk:") | mask(status, "SigIgn:"), 0);
    }

    #[test]
    fn this_process_is_among_all_and_its_session_lives() {
        let own = rustix::process::getpid();
        let found = all().into_iter().find(|process| process.pid == own).unwrap();
        assert!(
            !found.is_zombie
                && found.parent == rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get())
        );
        assert!(!living(&[own], Some("a mark that nobody has")).contains(&own));
    }
}
