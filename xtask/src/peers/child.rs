//! Runs programs with a time limit: when one has ended or was cut off, all processes that it started are killed.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The environment variable that marks all processes of a run. mpirun's ranks have process groups of their own and outlive a killed mpirun, so killing
/// the group is not enough.
const MARK: &str = "ALLSTREAM_PEERS_RUN";
/// The time between SIGTERM and SIGKILL for a program that is cut off.
const GRACE: Duration = Duration::from_secs(2);

/// The program that runs now. The signal thread kills it.
static RUNNING: Mutex<Option<Running>> = Mutex::new(None);

#[derive(Clone)]
struct Running {
    group: Pid,
    mark: String,
}

fn running() -> MutexGuard<'static, Option<Running>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// On SIGINT, SIGTERM or SIGHUP: kills the program that runs, removes `scratch`, and exits.
pub(crate) fn take_signals(scratch: &Path) -> io::Result<()> {
    let scratch = scratch.to_path_buf();
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // The lock is held until the exit, so that no other program starts.
            let running = running();
            if let Some(running) = &*running {
                let _ = kill_process_group(running.group, Signal::TERM);
                thread::sleep(Duration::from_millis(500));
                sweep(&running.mark);
            }
            let _ = fs::remove_dir_all(&scratch);
            std::process::exit(128 + signal);
        }
    })?;
    Ok(())
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct End {
    /// `None`: it was cut off at its limit.
    pub(crate) status: Option<ExitStatus>,
    /// What the program wrote, also if it was cut off.
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl End {
    /// What went wrong, in one line; `None` if the program succeeded.
    pub(crate) fn failure(&self, limit: Duration) -> Option<String> {
        let end = match self.status {
            Some(status) if status.success() => return None,
            Some(status) => status.to_string(),
            None => format!("cut off after {} s", limit.as_secs()),
        };
        // The last line with a letter or digit: mpirun's banners end with a line of dashes.
        let said = self.stderr.lines().rev().find(|line| line.chars().any(char::is_alphanumeric));
        Some(said.map_or(end.clone(), |said| format!("{end}: {}", said.trim())))
    }
}

/// Runs a program, and kills all its processes before this returns. `scratch` is a temporary folder for the program's output.
pub(crate) fn run(command: &mut Command, limit: Duration, scratch: &Path) -> io::Result<End> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mark = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let [out, err] = ["out", "err"].map(|name| scratch.join(format!("{name}-{mark}")));
    command.env(MARK, &mark).process_group(0).stdin(Stdio::null());
    command.stdout(File::create(&out)?).stderr(File::create(&err)?);
    let (mut child, group) = {
        let mut running = running();
        let child = command.spawn()?;
        let group = Pid::from_child(&child);
        *running = Some(Running { group, mark: mark.clone() });
        (child, group)
    };
    let mut status = wait(&mut child, limit);
    if !matches!(status, Ok(Some(_))) {
        let _ = kill_process_group(group, Signal::TERM);
        let _ = wait(&mut child, GRACE);
        let _ = child.kill();
        status = status.and_then(|_| child.wait().map(|_| None));
    }
    sweep(&mark);
    *running() = None;
    let text = |path: &Path| {
        let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let _ = fs::remove_file(path);
        text.unwrap_or_default()
    };
    let (stdout, stderr) = (text(&out), text(&err));
    Ok(End { status: status?, stdout, stderr })
}

fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Kills all processes with the mark, until none is found; gives up after 100 tries, about two seconds.
fn sweep(mark: &str) {
    for _ in 0..100 {
        let (found, unsure) = marked(mark);
        if found.is_empty() && !unsure {
            return;
        }
        for pid in found {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Processes with the mark in the environment that they started with (dead ones have none); and whether some process is just
/// replacing its program (`exec`), when no environment can be read, so that it may have the mark.
fn marked(mark: &str) -> (Vec<Pid>, bool) {
    let wanted = format!("{MARK}={mark}");
    let (mut found, mut unsure) = (Vec::new(), false);
    for entry in Path::new("/proc").read_dir().into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        let (Some(pid), Ok(environment)) = (pid, fs::read(entry.path().join("environ"))) else { continue };
        if environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes()) {
            found.push(pid);
        }
        unsure |= environment.is_empty() && is_starting(&entry.path());
    }
    (found, unsure)
}

/// Whether a process without an environment is in the middle of an `exec`: then it has no arguments either. Dead processes and
/// the kernel's own threads (children of process 2) have none of the two either, and do not count.
fn is_starting(process: &Path) -> bool {
    let (Ok(arguments), Ok(stat)) =
        (fs::read(process.join("cmdline")), fs::read_to_string(process.join("stat")))
    else {
        return false;
    };
    let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let (state, parent) = (fields.next(), fields.next());
    arguments.is_empty() && !matches!(state, Some("Z" | "X")) && !matches!(parent, Some("0" | "2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str, limit: Duration) -> End {
        let mut command = Command::new("/bin/sh");
        run(command.args(["-c", script]), limit, &std::env::temp_dir()).unwrap()
    }

    #[test]
    fn a_program_that_hangs_is_cut_off_with_all_it_started() {
        let limit = Duration::from_secs(1);
        let start = Instant::now();
        // One process is in a session of its own, and all ignore SIGTERM.
        let end = shell("trap '' TERM; setsid sleep 321 & echo pid $!; sleep 322; sleep 323", limit);
        assert!(start.elapsed() < Duration::from_secs(60));
        assert_eq!(end.failure(limit).as_deref(), Some("cut off after 1 s"));
        let pid = end.stdout.trim().trim_start_matches("pid ");
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "still there: {state}");
    }

    #[test]
    fn what_a_program_leaves_behind_is_ended() {
        let end = shell("setsid sleep 324 >/dev/null 2>&1 & echo $!", LONG);
        assert!(end.failure(Duration::ZERO).is_none());
        let state = fs::read_to_string(format!("/proc/{}/stat", end.stdout.trim())).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "still there: {state}");
    }

    #[test]
    fn a_failure_is_said_in_the_program_s_own_words() {
        let end = shell("echo figures; echo no such thing >&2; echo ------- >&2; exit 3", LONG);
        assert_eq!(end.failure(LONG).as_deref(), Some("exit status: 3: no such thing"));
        assert_eq!(end.stdout, "figures\n");
        assert!(run(&mut Command::new("/no/such/program"), LONG, &std::env::temp_dir()).is_err());
    }
}
