//! The launcher: starts the ranks of one job, here or on several hosts, and ends when all of them have ended.
//!
//! What it promises:
//! - Rank 0 inherits the listening socket of the rendezvous, so nobody else can take the port in between.
//! - The first rank that fails decides the exit code, and stops the others.
//! - No rank outlives the launcher, however the launcher ends. A process that a rank itself started stays in the
//!   rank's process group and is stopped with it; only if the launcher is killed by SIGKILL can such a one stay.
//! - On other hosts an agent keeps the same promises, and takes the end of its connection for the launcher's.

pub(crate) mod agent;
pub(crate) mod bind;
pub(crate) mod hosts;
mod relay;
pub(crate) mod remote;
mod signals;

use std::ffi::OsString;
use std::io::{self, PipeWriter};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use rustix::thread::CpuSet;
use signal_hook::consts::SIGHUP;

use bind::Bind;
use relay::{Source, Stream, relay, write_all};
use signals::SignalThread;

/// From SIGTERM to SIGKILL.
const TERM_TO_KILL: Duration = Duration::from_secs(2);
/// How long a killed process may take to end (it may sit in the kernel) until it is given up.
const KILL_TO_GIVE_UP: Duration = Duration::from_secs(5);
/// How long processes that ranks left behind may still write after the last rank has ended.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// What other launchers set. We may run below one of them, and its idea of a rank is not ours.
const FOREIGN: [&str; 17] = [
    "ALLSTREAM_RENDEZVOUS_FD",
    "ALLSTREAM_PORT",
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
    "SLURM_STEP_NUM_TASKS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "GROUP_RANK",
    "ROLE_RANK",
];

/// A job: the same program once for each rank.
#[derive(Debug)]
pub(crate) struct Job {
    /// Number of ranks on this host; at least 1.
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
    /// Which cores they may run on.
    pub(crate) bind: Bind,
    /// The world that the ranks here are a part of; `None`: they are all of it.
    pub(crate) part: Option<Part>,
}

/// What one host's ranks are in a world.
#[derive(Debug)]
pub(crate) struct Part {
    /// The host, for messages where there are several.
    pub(crate) host: Option<String>,
    /// The first of the ranks here.
    pub(crate) first: usize,
    /// Ranks on all hosts.
    pub(crate) size: usize,
    /// Where the world meets.
    pub(crate) address: String,
    pub(crate) port: u16,
    pub(crate) token: OsString,
    /// Rank 0's, on its host.
    pub(crate) listener: Option<TcpListener>,
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
            bind: Bind::None,
            part: None,
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
    run_watched(job, |_| Ok(()))
}

/// Likewise; `also` gets what tells the launcher of events from elsewhere.
fn run_watched(job: Job, also: impl FnOnce(Sender<Event>) -> io::Result<()>) -> io::Result<ExitCode> {
    if job.ranks == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a job needs at least one rank"));
    }
    let (events, inbox) = mpsc::channel();
    supervise(job.grace, &events, inbox, |members| {
        also(events.clone())?;
        Ok(Started { streams: start_all(job, members, &events)?, port_known: None })
    })
}

/// What has been started, beside the processes.
struct Started<'a> {
    streams: Vec<Stream>,
    port_known: Option<PortKnown<'a>>,
}

/// What is to be done once rank 0's agent has told its port.
type PortKnown<'a> = Box<dyn FnOnce(&[Member], u16) -> io::Result<()> + 'a>;

/// Starts processes and watches over them until all have ended. What was started is in the vector also if a later one
/// failed: it is stopped.
fn supervise<'a>(
    grace: Duration,
    events: &Sender<Event>,
    inbox: Receiver<Event>,
    start: impl FnOnce(&mut Vec<Member>) -> io::Result<Started<'a>>,
) -> io::Result<ExitCode> {
    let _signals = SignalThread::start(events.clone())?;
    // The end of this pipe tells the relay that nothing more is to be waited for.
    let (stop_reader, stop) = io::pipe()?;
    let mut members = Vec::new();
    let started = start(&mut members);
    let mut launcher = Launcher {
        members,
        inbox,
        phase: Phase::Running,
        first: None,
        relayed: false,
        grace,
        port_known: None,
    };
    let relayed = started.and_then(|started| {
        launcher.port_known = started.port_known;
        let (streams, events) = (started.streams, events.clone());
        thread::Builder::new().name("relay".into()).spawn(move || {
            relay(streams, &stop_reader);
            let _ = events.send(Event::Relayed);
        })
    });
    if let Err(error) = relayed {
        launcher.signal_all(Signal::KILL);
        launcher.reap();
        return Err(error);
    }
    launcher.wait_for_members();
    launcher.wait_for_output(stop);
    launcher.reap();
    Ok(launcher.exit_code())
}

enum Event {
    /// A member has ended, or it can no longer be waited for. It is a zombie until `reap`.
    Ended(usize),
    /// An agent has started its ranks. From rank 0's, the port where the world meets.
    Greeted { member: usize, port: u16 },
    /// A signal to this process, or the launcher's to this agent.
    Signal(i32),
    /// The launcher of this agent is gone.
    Cut,
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
    Member(ExitStatus),
    Signal(i32),
}

/// A process that the launcher started.
struct Member {
    child: Child,
    /// Also its process group, as long as the child has not been reaped.
    pid: Pid,
    ended: bool,
    kind: Kind,
}

enum Kind {
    Rank {
        rank: usize,
        host: Option<String>,
    },
    /// Of a host, with the ranks there.
    Agent(Agent),
}

struct Agent {
    host: String,
    ranks: Range<usize>,
    /// What is written to its stdin, until it is dropped.
    orders: Option<Sender<Vec<u8>>>,
    greeted: bool,
}

impl Member {
    /// Writes to an agent. One that has ended does not read it.
    fn say(&self, line: Vec<u8>) {
        if let Kind::Agent(Agent { orders: Some(orders), .. }) = &self.kind {
            let _ = orders.send(line);
        }
    }

    /// Signals its process group. One that has ended is included, for what it left behind: it is not reaped yet, so the
    /// group's number cannot belong to anybody else.
    fn signal(&self, signal: Signal) {
        // Fails only if there is nobody left to signal.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// For messages.
    fn name(&self) -> String {
        let pid = self.pid;
        match &self.kind {
            Kind::Rank { rank, host: None } => format!("rank {rank} (pid {pid})"),
            Kind::Rank { rank, host: Some(host) } => format!("rank {rank} on {host} (pid {pid})"),
            Kind::Agent(Agent { host, ranks, .. }) if ranks.len() == 1 => {
                format!("host {host} (rank {})", ranks.start)
            }
            Kind::Agent(Agent { host, ranks, .. }) => {
                format!("host {host} (ranks {} to {})", ranks.start, ranks.end.saturating_sub(1))
            }
        }
    }
}

struct Launcher<'a> {
    members: Vec<Member>,
    inbox: Receiver<Event>,
    phase: Phase,
    first: Option<First>,
    relayed: bool,
    grace: Duration,
    port_known: Option<PortKnown<'a>>,
}

impl Launcher<'_> {
    fn wait_for_members(&mut self) {
        while self.members.iter().any(|member| !member.ended) {
            let event = match self.phase {
                Phase::Running => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Phase::Grace(until) | Phase::Terminating(until) | Phase::Killed(until) => {
                    self.inbox.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended(member)) => self.ended(member),
                Ok(Event::Greeted { member, port }) => self.greeted(member, port),
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Ok(Event::Cut) => {
                    self.first.get_or_insert(First::Signal(SIGHUP));
                    self.kill();
                }
                Ok(Event::Relayed) => self.relayed = true,
                Err(_) => match self.phase {
                    Phase::Running | Phase::Grace(_) => self.terminate(),
                    Phase::Terminating(_) => self.kill(),
                    Phase::Killed(_) => {
                        for member in self.members.iter().filter(|member| !member.ended) {
                            complain(&format!("{} did not end when killed", member.name()));
                        }
                        // Connections that no word passes any more.
                        self.signal_all(Signal::KILL);
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
                Ok(Event::Ended(_) | Event::Greeted { .. }) => {}
                Ok(event @ (Event::Signal(_) | Event::Cut)) => {
                    let signal = if let Event::Signal(signal) = event { signal } else { SIGHUP };
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

    fn ended(&mut self, member: usize) {
        let Some(state) = self.members.get_mut(member) else { return };
        state.ended = true;
        // Unknown only if somebody else reaped it, or this process was started with SIGCHLD ignored.
        let mut status = peek_status(state.pid).unwrap_or(ExitStatus::from_raw(1 << 8));
        let unheard = matches!(&state.kind, Kind::Agent(agent) if !agent.greeted);
        if status.success() && unheard {
            status = ExitStatus::from_raw(1 << 8);
        } else if status.success() {
            return;
        }
        if self.first.is_some() {
            return;
        }
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => format!("ended: {status}"),
        };
        let (why, others) = match &state.kind {
            Kind::Rank { .. } => ("", "ranks"),
            Kind::Agent(_) if !unheard => ("", "hosts"),
            Kind::Agent(_) => (
                " before a rank had started there (can it be reached without a password, and is this version of \
                 allstream where --remote-bin says?)",
                "hosts",
            ),
        };
        let name = state.name();
        let left = self.members.iter().any(|member| !member.ended);
        let rest = if left { format!("; stopping the other {others}") } else { String::new() };
        complain(&format!("{name} {how}{why}{rest}"));
        self.first = Some(First::Member(status));
        // Where no rank has started, none has anything to report.
        let started = |member: &Member| !matches!(&member.kind, Kind::Agent(agent) if !agent.greeted);
        if self.members.iter().any(started) {
            self.phase = Phase::Grace(Instant::now() + self.grace);
        } else {
            self.terminate();
        }
    }

    fn greeted(&mut self, member: usize, port: u16) {
        if let Some(Member { kind: Kind::Agent(agent), .. }) = self.members.get_mut(member) {
            agent.greeted = true;
        }
        if member != 0 || !matches!(self.phase, Phase::Running) {
            return;
        }
        if let Some(Err(error)) = self.port_known.take().map(|tell| tell(&self.members, port)) {
            complain(&format!("cannot tell the other hosts what to start: {error}"));
            self.first.get_or_insert(First::Member(ExitStatus::from_raw(1 << 8)));
            self.terminate();
        }
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
        for member in &self.members {
            match &member.kind {
                Kind::Agent(agent) if agent.greeted => member.say(agent::TERM.into()),
                // Also a connection that is only being made.
                _ => member.signal(Signal::TERM),
            }
        }
        self.phase = Phase::Terminating(Instant::now() + TERM_TO_KILL);
    }

    fn kill(&mut self) {
        for member in &mut self.members {
            match &mut member.kind {
                // Its stdin ends, wherever it is. Without the agent's greeting there may be nobody who reads it.
                Kind::Agent(agent) if agent.greeted => drop(agent.orders.take()),
                _ => member.signal(Signal::KILL),
            }
        }
        self.phase = Phase::Killed(Instant::now() + KILL_TO_GIVE_UP);
    }

    fn signal_all(&self, signal: Signal) {
        self.members.iter().for_each(|member| member.signal(signal));
    }

    fn reap(&mut self) {
        for member in &mut self.members {
            // Without waiting: one that could not be killed is left to init.
            let until = Instant::now() + Duration::from_millis(if member.ended { 0 } else { 500 });
            while matches!(member.child.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn exit_code(&self) -> ExitCode {
        let code = match &self.first {
            None => 0,
            Some(First::Signal(signal)) => 128 + signal,
            Some(First::Member(status)) => {
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

/// Starts all ranks of this host. What was started is in `members`, also if a later one failed.
fn start_all(mut job: Job, members: &mut Vec<Member>, events: &Sender<Event>) -> io::Result<Vec<Stream>> {
    let mut part = match job.part.take() {
        Some(part) => part,
        None => whole(&job)?,
    };
    let places = job.bind.places(job.ranks)?;
    let mut streams = Vec::new();
    // Dropped when rank 0 has it: the port is to close when rank 0 ends.
    let mut listener = part.listener.take();
    for local in 0..job.ranks {
        let rank = part.first + local;
        let mut command = command(&job, &part, local);
        survive_nobody(&mut command, listener.as_ref(), places.get(local).copied());
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
        watch(members, child, Kind::Rank { rank, host: part.host.clone() }, events)?;
    }
    Ok(streams)
}

/// Takes a child in, with a thread that tells when it has ended.
fn watch(members: &mut Vec<Member>, child: Child, kind: Kind, events: &Sender<Event>) -> io::Result<()> {
    let pid = Pid::from_child(&child);
    let member = members.len();
    members.push(Member { child, pid, ended: false, kind });
    let events = events.clone();
    thread::Builder::new().name(format!("waits for {member}")).stack_size(64 << 10).spawn(move || {
        let _ = peek_status(pid);
        let _ = events.send(Event::Ended(member));
    })?;
    Ok(())
}

/// The world of a job that is on this host alone.
fn whole(job: &Job) -> io::Result<Part> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(Part {
        host: None,
        first: 0,
        size: job.ranks,
        address: Ipv4Addr::LOCALHOST.to_string(),
        port: listener.local_addr()?.port(),
        token: token(job)?,
        listener: Some(listener),
    })
}

fn command(job: &Job, part: &Part, local: usize) -> Command {
    let mut command = Command::new(&job.program);
    for name in FOREIGN {
        command.env_remove(name);
    }
    command
        .args(&job.args)
        .envs(job.env.iter().map(|(key, value)| (key, value)))
        .env("RANK", (part.first + local).to_string())
        .env("WORLD_SIZE", part.size.to_string())
        .env("LOCAL_RANK", local.to_string())
        .env("LOCAL_WORLD_SIZE", job.ranks.to_string())
        .env("MASTER_ADDR", &part.address)
        .env("MASTER_PORT", part.port.to_string())
        .env("ALLSTREAM_TOKEN", &part.token)
        .stdin(Stdio::null())
        .process_group(0);
    command
}

/// Lets the child die with this thread, which waits for all of them, inherit the socket if there is one, and run where it is to.
fn survive_nobody(command: &mut Command, inherit: Option<&TcpListener>, place: Option<CpuSet>) {
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
        if let Some(place) = &place {
            rustix::thread::sched_setaffinity(None, place)?;
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
    // (of the allocator, say) at the fork. The closure makes at most four system calls (prctl, getppid,
    // sched_setaffinity, fcntl), takes no lock, allocates nothing (its errors are plain errno numbers) and owns only copies of
    // integers and a set of bits.
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

/// One line on stderr, for the user.
fn complain(text: &str) {
    let _ = write_all(&mut io::stderr().lock(), format!("allstream run: {text}\n").as_bytes());
}
