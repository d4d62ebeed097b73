//! The launcher: starts the ranks of one job on this host, and ends when all of them have ended.
//!
//! What it promises:
//! - Rank 0 inherits the listening socket of the rendezvous, so nobody else can take the port in between.
//! - The first rank that fails decides the exit code, and stops the others.
//! - No rank outlives the launcher, however the launcher ends. A process that a rank itself started stays in the
//!   rank's process group and is stopped with it; only if the launcher is killed by SIGKILL can such a one stay.

mod relay;

use std::ffi::OsString;
use std::fs;
use std::io::{self, PipeWriter};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use relay::{Source, Stream, relay, write_all};

/// From SIGTERM to SIGKILL.
const TERM_TO_KILL: Duration = Duration::from_secs(2);
/// How long a killed process may take to end (it may sit in the kernel) until it is given up.
const KILL_TO_GIVE_UP: Duration = Duration::from_secs(5);
/// How long processes that ranks left behind may still write after the last rank has ended.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// What other launchers set. We may run below one of them, and its idea of a rank is not ours.
const FOREIGN: [&str; 14] = [
    "ALLSTREAM_RENDEZVOUS_FD",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NPROCS",
    "GROUP_RANK",
    "ROLE_RANK",
];

/// A job: the same program once for each rank, all on this host.
#[derive(Debug)]
pub(crate) struct Job {
    /// Number of ranks; at least 1.
    pub(crate) ranks: usize,
    /// The program; looked up in `PATH` if it has no slash.
    pub(crate) program: PathBuf,
    /// Its arguments, the same for each rank.
    pub(crate) args: Vec<OsString>,
    /// Relay the output line by line as `[rank] line`; otherwise ranks write to our stdout and stderr themselves.
    pub(crate) prefix: bool,
    /// Variables to set besides those of the launcher, which win.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// How long the other ranks may go on after one has failed, to report by themselves what they saw.
    pub(crate) grace: Duration,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            ranks: 1,
            program: PathBuf::new(),
            args: Vec::new(),
            prefix: true,
            env: Vec::new(),
            grace: Duration::from_secs(3),
        }
    }
}

/// Runs a job to its end. The exit code is that of the first rank that failed (128 + signal if a signal killed it),
/// or 128 + signal if SIGINT, SIGTERM or SIGHUP came to this process; it then waits for no rank for longer than a
/// few seconds.
///
/// # Errors
/// The ranks could not be started; those that were are stopped.
pub(crate) fn run(job: Job) -> io::Result<ExitCode> {
    if job.ranks == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a job needs at least one rank"));
    }
    let (events, inbox) = mpsc::channel();
    let _signals = SignalThread::start(events.clone())?;
    // The end of this pipe tells the relay that nothing more is to be waited for.
    let (stop_reader, stop) = io::pipe()?;
    let mut ranks = Vec::with_capacity(job.ranks);
    let started = start_all(&job, &mut ranks, &events);
    let mut launcher =
        Launcher { ranks, inbox, phase: Phase::Running, first: None, relayed: false, grace: job.grace };
    let streams = match started {
        Ok(streams) => streams,
        Err(error) => {
            launcher.signal_all(Signal::KILL);
            launcher.reap();
            return Err(error);
        }
    };
    let relay = thread::Builder::new().name("relay".into()).spawn(move || {
        relay(streams, &stop_reader);
        let _ = events.send(Event::Relayed);
    });
    if let Err(error) = relay {
        launcher.signal_all(Signal::KILL);
        launcher.reap();
        return Err(error);
    }
    launcher.wait_for_ranks();
    launcher.wait_for_output(stop);
    launcher.reap();
    Ok(launcher.exit_code())
}

enum Event {
    /// A rank has ended, or it can no longer be waited for. It is a zombie until `reap`.
    Ended(usize),
    /// A signal to this process.
    Signal(i32),
    /// All output has been relayed.
    Relayed,
}

/// What the launcher does, and until when.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    /// A rank failed; the others may end by themselves.
    Grace(Instant),
    /// They have been told to end.
    Terminating(Instant),
    Killed(Instant),
}

/// What decided the exit code.
enum First {
    Rank(ExitStatus),
    Signal(i32),
}

struct Rank {
    child: Child,
    /// Also its process group, as long as the child has not been reaped.
    pid: Pid,
    ended: bool,
}

struct Launcher {
    ranks: Vec<Rank>,
    inbox: Receiver<Event>,
    phase: Phase,
    first: Option<First>,
    relayed: bool,
    grace: Duration,
}

impl Launcher {
    fn wait_for_ranks(&mut self) {
        while self.ranks.iter().any(|rank| !rank.ended) {
            let event = match self.phase {
                Phase::Running => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Phase::Grace(until) | Phase::Terminating(until) | Phase::Killed(until) => {
                    self.inbox.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended(rank)) => self.ended(rank),
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Ok(Event::Relayed) => self.relayed = true,
                Err(_) => match self.phase {
                    Phase::Running | Phase::Grace(_) => self.terminate(),
                    Phase::Terminating(_) => self.kill(),
                    Phase::Killed(_) => {
                        for (rank, state) in self.ranks.iter().enumerate().filter(|(_, state)| !state.ended) {
                            complain(&format!("rank {rank} (pid {}) did not end when killed", state.pid));
                        }
                        return;
                    }
                },
            }
        }
    }

    /// The ranks have ended; what they started may hold their pipes open for ever.
    fn wait_for_output(&mut self, stop: PipeWriter) {
        let mut stop = Some(stop);
        let mut until = Instant::now() + LEFTOVERS;
        while !self.relayed {
            let event = if stop.is_some() {
                self.inbox.recv_timeout(until.saturating_duration_since(Instant::now()))
            } else {
                // The relay has only what is in the pipes now, but whoever reads our output may be slow.
                self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match event {
                Ok(Event::Relayed) => self.relayed = true,
                Ok(Event::Ended(_)) => {}
                Ok(Event::Signal(signal)) => {
                    if self.first.is_some() && stop.is_none() {
                        break;
                    }
                    self.first.get_or_insert(First::Signal(signal));
                    until = Instant::now();
                }
                Err(_) => {
                    self.signal_all(Signal::KILL);
                    stop = None;
                }
            }
        }
        // Ranks whose output is not relayed can leave processes too.
        self.signal_all(Signal::KILL);
    }

    fn ended(&mut self, rank: usize) {
        let Some(state) = self.ranks.get_mut(rank) else { return };
        state.ended = true;
        let pid = state.pid;
        // Unknown only if somebody else reaped it, or this process was started with SIGCHLD ignored.
        let status = peek_status(pid).unwrap_or(ExitStatus::from_raw(1 << 8));
        if status.success() || self.first.is_some() {
            return;
        }
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => format!("ended: {status}"),
        };
        let rest = if self.ranks.iter().any(|rank| !rank.ended) { "; stopping the other ranks" } else { "" };
        complain(&format!("rank {rank} (pid {pid}) {how}{rest}"));
        self.first = Some(First::Rank(status));
        self.phase = Phase::Grace(Instant::now() + self.grace);
    }

    fn signalled(&mut self, signal: i32) {
        match self.phase {
            Phase::Running | Phase::Grace(_) => {
                self.first.get_or_insert(First::Signal(signal));
                self.terminate();
            }
            Phase::Terminating(_) => self.kill(),
            Phase::Killed(_) => {}
        }
    }

    fn terminate(&mut self) {
        self.signal_all(Signal::TERM);
        self.phase = Phase::Terminating(Instant::now() + TERM_TO_KILL);
    }

    fn kill(&mut self) {
        self.signal_all(Signal::KILL);
        self.phase = Phase::Killed(Instant::now() + KILL_TO_GIVE_UP);
    }

    /// Signals each rank's process group. Ranks that have ended are included, for what they left behind: they are not
    /// reaped yet, so the group's number cannot belong to anybody else.
    fn signal_all(&self, signal: Signal) {
        for rank in &self.ranks {
            // Fails only if there is nobody left to signal.
            let _ = rustix::process::kill_process_group(rank.pid, signal);
        }
    }

    fn reap(&mut self) {
        for rank in &mut self.ranks {
            // Without waiting: one that could not be killed is left to init.
            let until = Instant::now() + Duration::from_millis(if rank.ended { 0 } else { 500 });
            while matches!(rank.child.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn exit_code(&self) -> ExitCode {
        let code = match &self.first {
            None => 0,
            Some(First::Signal(signal)) => 128 + signal,
            Some(First::Rank(status)) => {
                status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
            }
        };
        ExitCode::from(u8::try_from(code).unwrap_or(1))
    }
}

/// How a process ended, without reaping it.
fn peek_status(pid: Pid) -> io::Result<ExitStatus> {
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => {
                // As wait(2) packs it: the exit code in the second byte, or the signal in the first.
                let packed = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => (code & 0xff) << 8,
                    (None, Some(signal)) => signal,
                    (None, None) => 1 << 8,
                };
                return Ok(ExitStatus::from_raw(packed));
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Starts all ranks, and a thread for each that tells when it has ended. What was started is in `ranks`, also if a
/// later one failed.
fn start_all(job: &Job, ranks: &mut Vec<Rank>, events: &Sender<Event>) -> io::Result<Vec<Stream>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let token = token(job)?;
    let mut streams = Vec::new();
    // Dropped when rank 0 has it: the port is to close when rank 0 ends.
    let mut listener = Some(listener);
    for rank in 0..job.ranks {
        let mut command = command(job, rank, port, &token);
        survive_nobody(&mut command, listener.as_ref());
        if job.prefix {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command.spawn().map_err(|error| {
            let program = job.program.display();
            let what = match error.kind() {
                io::ErrorKind::NotFound => format!("program `{program}` not found"),
                _ => format!("cannot start `{program}`: {error}"),
            };
            io::Error::new(error.kind(), format!("rank {rank}: {what}"))
        })?;
        listener = None;
        streams.extend(child.stdout.take().map(|pipe| Stream::new(rank, Source::Stdout(pipe))));
        streams.extend(child.stderr.take().map(|pipe| Stream::new(rank, Source::Stderr(pipe))));
        let pid = Pid::from_child(&child);
        ranks.push(Rank { child, pid, ended: false });
        let events = events.clone();
        thread::Builder::new().name(format!("rank {rank}")).stack_size(64 << 10).spawn(move || {
            let _ = peek_status(pid);
            let _ = events.send(Event::Ended(rank));
        })?;
    }
    Ok(streams)
}

fn command(job: &Job, rank: usize, port: u16, token: &OsString) -> Command {
    let mut command = Command::new(&job.program);
    for name in FOREIGN {
        command.env_remove(name);
    }
    command
        .args(&job.args)
        .envs(job.env.iter().map(|(key, value)| (key, value)))
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", job.ranks.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("LOCAL_WORLD_SIZE", job.ranks.to_string())
        .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
        .env("MASTER_PORT", port.to_string())
        .env("ALLSTREAM_TOKEN", token)
        .stdin(Stdio::null())
        .process_group(0);
    command
}

/// Lets the child die with this thread, which waits for all of them, and inherit the socket if there is one.
fn survive_nobody(command: &mut Command, inherit: Option<&TcpListener>) {
    let launcher = rustix::process::getpid();
    let fd = inherit.map(AsRawFd::as_raw_fd);
    if let Some(fd) = fd {
        // The child has it under the same number.
        command.env("ALLSTREAM_RENDEZVOUS_FD", fd.to_string());
    }
    let in_child = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // A launcher that died before that call sends nothing: then we have another parent already.
        if rustix::process::getppid() != Some(launcher) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        if let Some(fd) = fd {
            // SAFETY: the caller keeps the listener open until `spawn` returns, and the child has a copy of every
            // descriptor under the same number until it execs, so `fd` is open during this borrow.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed, because another thread may have held a lock
    // (of the allocator, say) at the fork. The closure makes at most three system calls (prctl, getppid, fcntl), takes
    // no lock, allocates nothing (its errors are plain errno numbers) and owns only copies of two integers.
    unsafe { command.pre_exec(in_child) };
}

/// The secret by which ranks of one job know each other: the user's, or 32 random bytes in hex.
fn token(job: &Job) -> io::Result<OsString> {
    let name = "ALLSTREAM_TOKEN";
    let given = job.env.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    if let Some(token) = given.or_else(|| std::env::var_os(name)).filter(|token| !token.is_empty()) {
        return Ok(token);
    }
    let mut bytes = [0_u8; 32];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(format!("no random bytes: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into())
}

/// Takes SIGINT, SIGTERM and SIGHUP while it lives; before and after they do what they do by default.
struct SignalThread {
    handle: signal_hook::iterator::Handle,
    by_default: &'static AtomicBool,
}

impl SignalThread {
    fn start(events: Sender<Event>) -> io::Result<Self> {
        // A handler stays installed for ever, so "as by default" is a flag that it looks at.
        static BY_DEFAULT: OnceLock<Arc<AtomicBool>> = OnceLock::new();
        let ignored = ignored_signals();
        // One that is ignored stays so: this is how nohup and shells' background jobs ask for it.
        let taken = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
        if BY_DEFAULT.get().is_none() {
            let flag = BY_DEFAULT.get_or_init(|| Arc::new(AtomicBool::new(false)));
            for signal in taken.clone() {
                signal_hook::flag::register_conditional_default(signal, Arc::clone(flag))?;
            }
        }
        let by_default = BY_DEFAULT.get_or_init(|| Arc::new(AtomicBool::new(false)));
        by_default.store(false, Ordering::SeqCst);
        let mut signals = Signals::new(taken)?;
        let handle = signals.handle();
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let _ = events.send(Event::Signal(signal));
            }
        })?;
        Ok(Self { handle, by_default })
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.handle.close();
        self.by_default.store(true, Ordering::SeqCst);
    }
}

/// The signals that this process ignores, as a mask with signal 1 at bit 0.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// One line on stderr, for the user.
fn complain(text: &str) {
    let _ = write_all(&mut io::stderr().lock(), format!("allstream run: {text}\n").as_bytes());
}
