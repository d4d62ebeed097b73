//! Turns signals to the launcher into events, and adjusts the signal settings and limits that the launcher inherited.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGSTOP, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH, SIGXFSZ,
};
use signal_hook::iterator::Signals;

use super::event::Event;

/// Signals that end a job.
const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];
/// Signals that end nothing. The launcher handles SIGCHLD even if it was started with SIGCHLD ignored, as the system would then forget the
/// exit status of each rank. SIGXFSZ, without a handler, would end the launcher when a file that it writes has reached `ulimit -f`; with
/// one, only the write fails.
const OTHERS: [i32; 6] = [SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH, SIGCHLD, SIGXFSZ];
/// Signals that the launcher passes to agents. It sends their names, as the numbers differ between machines.
const TOLD: [(&str, i32); 8] = [
    ("INT", SIGINT),
    ("TERM", SIGTERM),
    ("HUP", SIGHUP),
    ("USR1", SIGUSR1),
    ("USR2", SIGUSR2),
    ("CONT", SIGCONT),
    ("WINCH", SIGWINCH),
    ("STOP", SIGSTOP),
];

/// The name of a signal in `TOLD`, without `SIG`; the number of any other signal.
pub(super) fn name(signal: i32) -> String {
    TOLD.iter()
        .find(|(_, number)| *number == signal)
        .map_or_else(|| signal.to_string(), |(name, _)| (*name).into())
}

pub(super) fn by_name(name: &str) -> Option<i32> {
    TOLD.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

/// Whether a signal ends a job.
pub(super) fn ends(signal: i32) -> bool {
    ENDING.contains(&signal)
}

/// Turns signals into events as long as this value lives. Before and afterwards, signals that end a job have their default effect: they end
/// this process. Afterwards the other signals that this value has handled do nothing.
pub(super) struct SignalThread {
    handle: signal_hook::iterator::Handle,
    by_default: &'static AtomicBool,
}

impl SignalThread {
    pub(super) fn start(events: Sender<Event>) -> io::Result<Self> {
        let ignored = ignored_signals();
        // Signals that the parent ignored stay ignored: nohup ignores some on purpose, and so do shells for background jobs.
        let heeded = |signal: &i32| ignored & (1 << (signal - 1)) == 0;
        let ending = ENDING.into_iter().filter(heeded);
        let by_default = end_by_default(ending.clone())?;
        let mut signals = Signals::new(ending.chain(OTHERS).chain([SIGTSTP].into_iter().filter(heeded)))?;
        let handle = signals.handle();
        let_signals_through();
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let _ = events.send(Event::Signal(signal));
            }
        })?;
        // Last, so that signals have their default effect until a thread takes them, and keep it if no thread can be started.
        by_default.store(false, Ordering::SeqCst);
        Ok(Self { handle, by_default })
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        // First: if the handle were closed before, a signal between the two calls would do nothing at all.
        self.by_default.store(true, Ordering::SeqCst);
        self.handle.close();
    }
}

/// Lets these signals end this process, as by default, while the returned flag is true. There is a flag because installed handlers are
/// never removed.
fn end_by_default(signals: impl Iterator<Item = i32>) -> io::Result<&'static AtomicBool> {
    static BY_DEFAULT: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
    let flag = BY_DEFAULT.get_or_init(|| Arc::new(AtomicBool::new(true)));
    if !IS_INSTALLED.load(Ordering::SeqCst) {
        // If this fails, the next call installs all of them; two handlers of one signal do as one.
        for signal in signals {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(flag))?;
        }
        IS_INSTALLED.store(true, Ordering::SeqCst);
    }
    Ok(flag)
}

/// Installs handlers, so that signals that the parent ignored are ignored no more. This is for an agent: its parent is the program that made
/// the connection, not a user's shell. Ranks would inherit the ignored signals, and miss those that the agent hands to them. A rank does not
/// inherit the handlers: for each handled signal it begins with the default.
pub(super) fn forget_ignored() -> io::Result<()> {
    end_by_default(ENDING.into_iter())?;
    signal_hook::flag::register_conditional_default(SIGQUIT, Arc::new(AtomicBool::new(true)))?;
    signal_hook::flag::register(SIGTSTP, Arc::default()).map(drop)
}

/// The signals that this process ignores, as a mask with signal 1 at bit 0.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    super::processes::mask(&status, "SigIgn:")
}

/// Unblocks all signals for this thread, and so for the threads and ranks that it starts. The parent may have blocked some for its own
/// purposes, but users must be able to stop the job, and ranks must receive signals.
fn let_signals_through() {
    // SAFETY: `sigemptyset` initialises the set that `pthread_sigmask` reads. Both are given valid pointers to this function's own
    // variable, or null where nothing is asked for, and change nothing but this thread's mask.
    unsafe {
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}

/// Keeps SIGTTIN from this thread: where the launcher is in the background of its terminal, a read fails, and does not stop the launcher.
pub(super) fn read_without_being_stopped() {
    // SAFETY: as above; the set is initialised before it is used, and only this thread's mask changes.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTTIN);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

/// Whether stdin is a terminal and this process is in its background: then the user types for another program.
pub(super) fn is_in_background() -> bool {
    // SAFETY: both functions only ask the system, about a descriptor that is open (the standard library sees to that) and this process.
    let (foreground, own) = unsafe { (libc::tcgetpgrp(0), libc::getpgrp()) };
    // -1: no terminal, or one that is not this session's.
    foreground != -1 && foreground != own
}

/// Raises this process's limit on open descriptors to the maximum, as the launcher needs several for each rank. Returns the inherited limit,
/// which the ranks get.
pub(super) fn take_descriptors() -> Rlimit {
    static INHERITED: OnceLock<Rlimit> = OnceLock::new();
    let inherited = INHERITED.get_or_init(|| {
        let found = getrlimit(Resource::Nofile);
        // If the system refuses, the inherited limit stays.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: found.maximum, ..found });
        found
    });
    *inherited
}
