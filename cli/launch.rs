//! The launcher: starts the ranks of one job, here or on several hosts, and ends when all of them have ended.
//!
//! What it promises:
//! - Rank 0 inherits the listening socket of the rendezvous, so nobody else can take the port between the launcher's choice of it and rank
//!   0's start.
//! - When a rank fails, the others are stopped after a time of grace, or work on, as `--on-failure` says; and the job may be started
//!   anew. The launcher exits with the first code other than 0 with which a rank's program exited; [`run`] has the exceptions.
//! - No rank outlives the launcher, however the launcher ends, nor does a process that a rank has started. Such processes are found by
//!   the rank's session, by the job's mark in their environment, and by the job's cgroup where the launcher may make one. If the
//!   launcher is killed, its guard kills them. After a job that has ended well, a process that has made its own session may live on.
//! - On other hosts an agent keeps the same promises. If its connection to the launcher ends, the agent acts as if the launcher had ended.

pub(crate) mod agent;
pub(crate) mod bind;
mod cgroup;
mod door;
mod event;
pub(crate) mod guard;
pub(crate) mod hosts;
mod logs;
mod member;
pub(crate) mod processes;
mod records;
mod relay;
pub(crate) mod remote;
mod signals;
pub(crate) mod stdin;
mod supervise;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};

use crate::Exit;
use bind::Bind;
use event::Event;
use guard::Guard;
use logs::Log;
use member::{Kind, Member, watch};
use relay::{Source, Stream};
use stdin::{Input, Stdin};
use supervise::{Ended, Started, supervise};

/// The variable that tells the ranks how often the job has been started anew.
pub(crate) const RESTART: &str = "ALLSTREAM_RESTART";
/// Variables of a launcher that this one may itself run under. The ranks must not see them: they describe the other launcher's ranks.
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
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Number of ranks, at least 1: those of this host, or in a job for [`remote::run`] those of all hosts.
    pub(crate) ranks: usize,
    /// The program; looked up in `PATH` if it has no slash.
    pub(crate) program: PathBuf,
    /// Its arguments, the same for each rank.
    pub(crate) args: Vec<OsString>,
    /// Relay the output line by line as `[rank] line`; otherwise ranks write to our stdout and stderr themselves.
    pub(crate) prefix: bool,
    /// Which ranks read what comes to the launcher's stdin.
    pub(crate) stdin: Stdin,
    /// The directory for log files, one for each rank, with the rank's output; needs `prefix`.
    pub(crate) logs: Option<PathBuf>,
    /// Variables to set for the ranks. Where the launcher sets one of the same name, the launcher's value wins.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// What is done when a rank has failed.
    pub(crate) policy: Policy,
    /// How often the job is started anew after failures, at most.
    pub(crate) restarts: u32,
    /// Which cores each rank may run on.
    pub(crate) bind: Bind,
}

/// What is done with the other ranks when one has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum OnFailure {
    /// They are stopped after a time of grace
    Stop,
    /// They work on
    Keep,
}

/// What is done when a rank has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Policy {
    pub(crate) on_failure: OnFailure,
    /// How long the other ranks may run on before they are stopped, so that they can report what they saw.
    pub(crate) grace: Duration,
    /// The time from the signal that tells the ranks to end until SIGKILL.
    pub(crate) kill_after: Duration,
    /// With [`OnFailure::Keep`]: how many ranks must not have failed, at least. With fewer, the ranks that still run are stopped.
    pub(crate) min_ranks: usize,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            on_failure: OnFailure::Stop,
            grace: Duration::from_secs(3),
            kill_after: Duration::from_secs(30),
            min_ranks: 1,
        }
    }
}

/// The part of a world whose ranks run on one host.
#[derive(Debug)]
pub(crate) struct Part {
    /// The host's name for messages; `None` if the job has one host only.
    pub(crate) host: Option<String>,
    /// The first of the ranks here.
    pub(crate) first: usize,
    /// Ranks on all hosts.
    pub(crate) size: usize,
    /// Address and port of rank 0's rendezvous.
    pub(crate) address: String,
    pub(crate) port: u16,
    pub(crate) token: OsString,
    /// The listening socket of the rendezvous, on rank 0's host.
    pub(crate) listener: Option<TcpListener>,
    /// The stdin of each rank here.
    inputs: Vec<Input>,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            ranks: 1,
            program: PathBuf::new(),
            args: Vec::new(),
            prefix: true,
            stdin: Stdin::None,
            logs: None,
            env: Vec::new(),
            policy: Policy::default(),
            restarts: 0,
            bind: Bind::None,
        }
    }
}

/// Runs a job of this host to its end, and again if it has failed and may be started anew. The exit code is 128 + signal if SIGINT,
/// SIGTERM or SIGHUP has ended the job: then ranks that still run after [`Policy::kill_after`] are killed. Else it is the first code other
/// than 0 with which a rank exited by itself; with [`OnFailure::Keep`], the greatest code with which a rank exited by itself, even if that is 0.
/// If there is no such code, it is 128 + the signal that was the first to kill a rank, or 0 if no rank was killed.
///
/// # Errors
/// A rank could not be started; those that were started before it are stopped.
pub(crate) fn run(job: Job) -> io::Result<Exit> {
    with_restarts(job, |job| run_watched(job, None, |_| Ok(())))
}

/// Runs a job, and starts it anew after a failure up to `job.restarts` times. Each time the ranks are told how many restarts came before.
fn with_restarts(mut job: Job, mut once: impl FnMut(&Job) -> io::Result<Ended>) -> io::Result<Exit> {
    let records = records::Records::of(&mut job);
    for restart in 0.. {
        job.env.retain(|(key, _)| key != RESTART);
        job.env.push((RESTART.into(), restart.to_string().into()));
        let ended = once(&job)?;
        if ended.code != 0
            && let Some(dir) = records.found()
        {
            let dir = dir.display();
            complain(&format!(
                "what the ranks did last is in {dir}: `allstream trace --times {dir}` lays it side by side"
            ));
        }
        if ended.code == 0 || ended.signalled || restart == job.restarts {
            return Ok(Exit::from(ended.code));
        }
        let (next, most) = (restart + 1, job.restarts);
        complain(&format!(
            "the job failed with code {}; it starts anew (restart {next} of {most})",
            ended.code
        ));
    }
    Ok(Exit::FAILURE)
}

/// Runs a job once. `part`: the ranks of this host in a world of several hosts. `also` is called with a sender through which other threads
/// tell the launcher of events.
fn run_watched(
    job: &Job,
    part: Option<Part>,
    also: impl FnOnce(Sender<Event>) -> io::Result<()>,
) -> io::Result<Ended> {
    if job.ranks == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a job needs at least one rank"));
    }
    let (events, inbox) = mpsc::channel();
    supervise(job.policy, &events, inbox, |members, guard| {
        also(events.clone())?;
        Ok(Started { streams: start_all(job, part, members, &events, guard)?, port_known: None })
    })
}

/// Starts all ranks of this host. On an error, `members` has those that were started before it.
fn start_all(
    job: &Job,
    part: Option<Part>,
    members: &mut Vec<Member>,
    events: &Sender<Event>,
    guard: &mut Guard,
) -> io::Result<Vec<Stream>> {
    let mut part = match part {
        Some(part) => part,
        None => whole(job)?,
    };
    let places = job.bind.places(job.ranks)?;
    let mut streams = Vec::new();
    let cgroup = guard.make_cgroup();
    // This process drops the socket once rank 0 has inherited it, so that the port closes when rank 0 ends.
    let mut listener = part.listener.take();
    let mut inputs = std::mem::take(&mut part.inputs).into_iter();
    for local in 0..job.ranks {
        let rank = part.first + local;
        let mut command = command(job, &part, local);
        command.env(processes::MARK, &guard.mark);
        survive_nobody(&mut command, listener.as_ref(), places.get(local).copied(), cgroup.as_ref());
        let input = inputs.next().unwrap_or(Input::None);
        let has_stdin = !matches!(input, Input::None);
        command.stdin(match input {
            Input::None => Stdio::null(),
            Input::Inherited => Stdio::inherit(),
            Input::Pipe(_) => Stdio::piped(),
        });
        let log = job.logs.as_ref().map(|dir| Log::open(dir, rank, restart(job))).transpose()?;
        if job.prefix {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut child = command.spawn().map_err(|error| {
            let program = job.program.display();
            let what = match error.kind() {
                io::ErrorKind::NotFound if job.program.to_string_lossy().starts_with('-') => format!(
                    "`{program}` is no option of `allstream run` (its --help has them all), and no program of that name was found"
                ),
                io::ErrorKind::NotFound => format!("program `{program}` not found"),
                _ => format!("cannot start `{program}`: {error}"),
            };
            io::Error::new(error.kind(), format!("rank {rank}: {what}"))
        })?;
        listener = None;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let sources = out.map(Source::Stdout).into_iter().chain(err.map(Source::Stderr));
        streams.extend(sources.map(|source| Stream::new(rank, source, log.clone(), has_stdin)));
        let pipe = child.stdin.take();
        watch(members, child, Kind::Rank { rank, host: part.host.clone() }, events)?;
        if let (Input::Pipe(queue), Some(pipe)) = (input, pipe) {
            queue.write_to(pipe)?;
        }
    }
    Ok(streams)
}

/// All ranks of a job that runs on this host alone, as one part.
fn whole(job: &Job) -> io::Result<Part> {
    let listener = door::open((Ipv4Addr::LOCALHOST, 0).into())?;
    Ok(Part {
        host: None,
        first: 0,
        size: job.ranks,
        address: Ipv4Addr::LOCALHOST.to_string(),
        port: listener.local_addr()?.port(),
        token: token(job)?,
        listener: Some(listener),
        inputs: Input::of_all(job.stdin, job.ranks)?,
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
        .env("ALLSTREAM_TOKEN", &part.token);
    command
}

/// Prepares a child. The system kills the child when the thread that starts it ends; that thread is this one, which waits for all children.
/// The child gets its own session, the limit of descriptors that the launcher inherited, the socket `inherit`, the cores `place`, and the
/// job's cgroup (through the file that [`Cgroup::make`](cgroup::Cgroup::make) opened).
fn survive_nobody(
    command: &mut Command,
    inherit: Option<&TcpListener>,
    place: Option<CpuSet>,
    cgroup: Option<&File>,
) {
    let launcher = rustix::process::getpid();
    let fd = inherit.map(AsRawFd::as_raw_fd);
    let cgroup = cgroup.map(AsRawFd::as_raw_fd);
    if let Some(fd) = fd {
        // The child has the socket under the same descriptor number.
        command.env("ALLSTREAM_RENDEZVOUS_FD", fd.to_string());
    }
    let descriptors = signals::take_descriptors();
    in_own_session(command);
    let in_child = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the launcher died before the call above, no signal comes: then this process has another parent already.
        if rustix::process::getppid() != Some(launcher) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        if let Some(cgroup) = cgroup {
            // SAFETY: the caller keeps the file open until `spawn` returns, and the child has a copy of every descriptor under the same
            // number until it execs, so `cgroup` is open during this borrow.
            let cgroup = unsafe { BorrowedFd::borrow_raw(cgroup) };
            // If the system refuses this, the rank can still be found by its session and its mark.
            let _ = rustix::io::write(cgroup, b"0");
        }
        rustix::process::setrlimit(rustix::process::Resource::Nofile, descriptors)?;
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
    // (of the allocator, say) at the fork. The closure makes at most six system calls (prctl, getppid, write, prlimit64,
    // sched_setaffinity, fcntl), takes no lock, allocates nothing (its errors are plain errno numbers) and owns only copies of
    // integers and a set of bits.
    unsafe { command.pre_exec(in_child) };
}

/// Gives the child its own session, and so no terminal: Ctrl-C or the terminal's end then signals only the launcher, not the child, and a
/// read of the terminal does not stop the child as a background process.
fn in_own_session(command: &mut Command) {
    // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes one system call (setsid), takes no lock and
    // allocates nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        })
    };
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

/// How often the job has been started anew, from the variable that tells its ranks so.
fn restart(job: &Job) -> u32 {
    let said = job.env.iter().rev().find(|(key, _)| key == RESTART);
    said.and_then(|(_, value)| value.to_str()?.parse().ok()).unwrap_or(0)
}

/// One line on stderr, for the user.
fn complain(text: &str) {
    let _ = relay::write_complaint(text);
}
