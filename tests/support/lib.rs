//! For tests: worlds of threads over every link, and worlds of real processes. Every wait has a deadline.
//!
//! This is a crate, so that what the test programs share is compiled only once: above all [`cases`], which makes every call of
//! the engine with every element type.

#![allow(missing_docs)] // For this repository's own tests; the programs that use it are its documentation.

pub mod cases;
pub mod cuda;
pub mod faults;
pub mod node;
pub mod pairwise;
pub mod verbs;

pub use test_oracle::values;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use allstream::{Comm, LinkChoice, Rendezvous};
use futures::executor::block_on;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// How long ranks may take to find each other.
pub const MEET: Duration = Duration::from_secs(30);

const ROLE: &str = "ALLSTREAM_TEST_ROLE";
const PARENT: &str = "ALLSTREAM_TEST_PARENT";
const LIMIT: &str = "ALLSTREAM_TEST_LIMIT";

/// Whether a larger part of all combinations is to be tried: `ALLSTREAM_TEST_FULL` is set, and not to 0.
pub fn full() -> bool {
    std::env::var("ALLSTREAM_TEST_FULL").is_ok_and(|v| !v.is_empty() && v != "0")
}

/// Whether all combinations are to be tried (`ALLSTREAM_TEST_FULL=all`), which takes many minutes more: every mutant, and every type with every
/// reduction on several links.
pub fn everything() -> bool {
    std::env::var("ALLSTREAM_TEST_FULL").is_ok_and(|v| v == "all")
}

/// Chooses a number of repetitions: `core` by default, `in_full` with `ALLSTREAM_TEST_FULL=1`, `all` with `ALLSTREAM_TEST_FULL=all`.
pub fn times<T>(core: T, in_full: T, all: T) -> T {
    match (everything(), full()) {
        (true, _) => all,
        (_, true) => in_full,
        _ => core,
    }
}

/// The folder TARGET/PROFILE where this program was built, and cargo's name for the profile. Tests build other packages in the same way.
pub fn built_in() -> (PathBuf, String) {
    // This program lies in TARGET/PROFILE/deps.
    let exe = std::env::current_exe().expect("this program");
    let folder = exe.ancestors().nth(2).expect("a folder of cargo's").to_path_buf();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev".to_owned(),
        Some(profile) => profile.to_owned(),
    };
    (folder, profile)
}

/// Prints how many cases a test ran, in the form that `cargo xtask test` looks for and repeats at its end. Writes to stderr directly,
/// so that it appears even if the harness captures what tests print.
pub fn tell_cases(test: &str, count: usize) {
    let _ = writeln!(std::io::stderr(), "cases: {count} of {test}");
}

/// Whether this machine has an IPv6 loopback address.
pub fn has_ipv6() -> bool {
    TcpListener::bind("[::1]:0").is_ok()
}

/// The pretended host of a rank: with an even `n` the first half of the ranks is on `a`, the others on `b`; with an odd one they alternate.
pub fn host_label(rank: usize, n: usize) -> &'static str {
    let second = if n.is_multiple_of(2) { 2 * rank >= n } else { rank % 2 == 1 };
    if second { "b" } else { "a" }
}

/// A world of `n` ranks in this process, by rank. Links: `local` ([`Comm::local`]), `inproc`, `shm`, `tcp`, `tcp6`,
/// and `mixed`: two pretended hosts, with memory inside each and TCP between them.
pub fn worlds(n: usize, link: &str) -> Vec<Comm> {
    try_worlds(n, link).unwrap_or_else(|e| panic!("a world of {n} over {link}: {e}"))
}

/// A loopback address that no other call returns soon: the port of a connection that has just ended stays taken on its address
/// for a minute, and tests make tens of thousands of worlds.
pub fn loopback() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    format!("127.{}.{}.{}:0", process % 200 + 1, count / 200 % 200 + 1, count % 200 + 1)
}

/// Like [`worlds`], but returns the errors of all ranks that failed to connect.
pub fn try_worlds(n: usize, link: &str) -> Result<Vec<Comm>, String> {
    if link == "local" {
        return Comm::local(n).map_err(|e| e.to_string());
    }
    let ip = if link == "tcp6" { "[::1]:0".into() } else { loopback() };
    let listener = TcpListener::bind(&ip).map_err(|e| format!("{ip}: {e}"))?;
    let at = listener.local_addr().map_err(|e| e.to_string())?;
    let choice = match link {
        "tcp6" => LinkChoice::TCP,
        "mixed" => LinkChoice::AUTO,
        class => class.parse()?,
    };
    let place = |rank| {
        let place = Rendezvous::tcp(&format!("tcp://{at}"), rank, n).map_err(|e| e.to_string())?;
        let place = place.token("a test's").timeout(MEET).link(choice);
        let place = if link == "mixed" { place.host_id(host_label(rank, n)) } else { place };
        if rank == 0 {
            let listener = listener.try_clone().map_err(|e| e.to_string())?;
            return Ok(place.listener(listener));
        }
        Ok(place)
    };
    let places = (0..n).map(place).collect::<Result<Vec<_>, String>>()?;
    let comms = block_on(futures::future::join_all(places.into_iter().map(Comm::connect)));
    // The errors of all ranks, because the first rank with an error does not always name the cause.
    let said = |(rank, c): (usize, &Result<Comm, _>)| {
        c.as_ref().err().map(|e: &allstream::Error| format!("rank {rank}: {e}"))
    };
    let errors: Vec<String> = comms.iter().enumerate().filter_map(said).collect();
    if errors.is_empty() { Ok(comms.into_iter().flatten().collect()) } else { Err(errors.join("; ")) }
}

/// The variables that make rank `rank` of `n` processes use `link`: `shm`, `tcp`, `rdma` (through the library for tests) or `mixed` (shared
/// memory inside each of two pretended hosts, TCP between them).
pub fn link_env(link: &str, rank: usize, n: usize) -> Vec<(String, String)> {
    let set = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    match link {
        "mixed" => set("ALLSTREAM_HOST_ID", host_label(rank, n)),
        "rdma" => verbs::env(verbs::TWO_PORTS),
        link => set("ALLSTREAM_LINK", link),
    }
}

/// A process of this test, and the threads that read its output and errors.
struct Process {
    child: Child,
    output: [Option<JoinHandle<String>>; 2],
}

/// How a rank's process ended.
#[derive(Debug)]
pub struct Ended {
    pub rank: usize,
    /// `None` if it had to be killed at the deadline.
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn success(&self) -> bool {
        self.status.is_some_and(|s| s.success()) && self.stdout.contains("1 passed")
    }
}

/// Processes, one per rank. Dropping this kills those that still run.
pub struct Ranks(Vec<Process>);

impl Ranks {
    pub fn child(&mut self, rank: usize) -> &mut Child {
        &mut self.0[rank].child
    }

    /// Waits for all; those that are not done after `limit` are killed.
    pub fn wait(mut self, limit: Duration) -> Vec<Ended> {
        let end = Instant::now() + limit;
        let mut ended = Vec::new();
        for (rank, process) in self.0.iter_mut().enumerate() {
            let status = loop {
                match process.child.try_wait().expect("a child to wait for") {
                    Some(status) => break Some(status),
                    None if Instant::now() > end => break None,
                    None => thread::sleep(Duration::from_millis(2)),
                }
            };
            if status.is_none() {
                let _ = process.child.kill();
                let _ = process.child.wait();
            }
            let [stdout, stderr] = process
                .output
                .each_mut()
                .map(|reader| reader.take().and_then(|reader| reader.join().ok()).unwrap_or_default());
            ended.push(Ended { rank, status, stdout, stderr });
        }
        ended
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.0 {
            if matches!(process.child.try_wait(), Ok(None)) {
                let _ = process.child.kill();
                let _ = process.child.wait();
            }
        }
    }
}

fn read(pipe: Option<impl Read + Send + 'static>) -> Option<JoinHandle<String>> {
    let mut pipe = pipe?;
    Some(thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }))
}

/// Starts this test binary `n` times to run the test `name`, which learns from [`role`] that it is a rank. A rank's process ends
/// itself after `limit`, and dies when the thread that started it ends.
pub fn spawn_ranks(
    name: &str,
    n: usize,
    limit: Duration,
    envs: impl Fn(usize) -> Vec<(String, String)>,
) -> Ranks {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..n {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        for (key, _) in std::env::vars_os() {
            let text = key.to_string_lossy();
            let is_knob = text.starts_with(cuda::KNOBS) && text != cuda::CHILD;
            if ["ALLSTREAM_", "OMPI_", "SLURM_", "MASTER_"].iter().any(|p| text.starts_with(p)) && !is_knob {
                command.env_remove(&key);
            }
        }
        cuda::be_strict(&mut command);
        command
            // The test may be marked as ignored. If it runs nevertheless, its ranks must run too.
            .args([name, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, "rank")
            .env(PARENT, getpid().as_raw_nonzero().to_string())
            .env(LIMIT, limit.as_millis().to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", n.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("ALLSTREAM_TOKEN", format!("of test {}", std::process::id()))
            .env("ALLSTREAM_RENDEZVOUS_TIMEOUT", MEET.as_secs().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let (true, Ok(how)) = (full(), std::env::var("ALLSTREAM_TEST_FULL")) {
            command.env("ALLSTREAM_TEST_FULL", how);
        }
        // A process that another thread starts meanwhile may inherit the listener too, which does no harm.
        let inherit = |flags| rustix::io::fcntl_setfd(&listener, flags).expect("flags of a descriptor");
        if rank == 0 {
            command.env("ALLSTREAM_RENDEZVOUS_FD", listener.as_raw_fd().to_string());
            inherit(rustix::io::FdFlags::empty());
        }
        let mut child = command.envs(envs(rank)).spawn().expect("this program, again");
        inherit(rustix::io::FdFlags::CLOEXEC);
        let output = [read(child.stdout.take()), read(child.stderr.take())];
        ranks.0.push(Process { child, output });
    }
    ranks
}

/// Whether this process is a rank that [`spawn_ranks`] started.
pub fn is_rank() -> bool {
    std::env::var(ROLE).as_deref() == Ok("rank")
}

/// Whether this process is a rank that [`spawn_ranks`] started. Such a test calls this first; from then on a rank's process
/// dies when the thread that started it ends, and ends itself at its deadline.
pub fn role() -> bool {
    if !is_rank() {
        return false;
    }
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    // The signal comes when the thread that started this process ends, so that thread must wait for this process, as tests do.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get() as u64);
    if parent.is_none() || parent != number(PARENT) {
        std::process::exit(3);
    }
    let limit = Duration::from_millis(number(LIMIT).unwrap_or(60_000));
    thread::spawn(move || {
        thread::sleep(limit);
        eprintln!("not done after {limit:?}");
        std::process::exit(4);
    });
    true
}

/// Joins the world that [`spawn_ranks`] started.
pub fn join() -> Comm {
    let place = Rendezvous::from_env().expect("the environment of a rank");
    block_on(Comm::connect(place)).expect("a world")
}

/// Runs `f(rank, comm)` on each rank of a world of `n` over `link`; returns the results by rank. Panics if one is not done within a minute.
pub fn each<R: Send + 'static>(
    n: usize,
    link: &str,
    f: impl Fn(usize, Comm) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let all = on_threads(worlds(n, link), Duration::from_secs(60), f).into_iter();
    all.map(|r| r.unwrap_or_else(|e| panic!("{link}: {e}"))).collect()
}

/// The letter for a process's state in `/proc`: `T` stopped, `Z` a zombie, and so on. `None`: there is no such process.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state follows the process's name, which stands in parentheses and may itself contain any character.
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// Runs `f(rank, comm)` on a thread for each rank; returns the results by rank, with `Err` where a thread panicked or was not
/// done within `limit`. A thread that was not done is left running.
pub fn on_threads<R: Send + 'static>(
    comms: Vec<Comm>,
    limit: Duration,
    f: impl Fn(usize, Comm) -> R + Send + Sync + 'static,
) -> Vec<Result<R, String>> {
    let n = comms.len();
    let all: Vec<Result<R, String>> =
        (0..n).map(|rank| Err(format!("rank {rank} was not done after {limit:?}"))).collect();
    let results = Arc::new(Mutex::new(all));
    let told = results.clone();
    let run = move |rank, comm| {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(rank, comm)));
        // If this thread was left behind, the list of results is empty by now.
        if let Some(place) = told.lock().unwrap().get_mut(rank) {
            *place = result.map_err(|_| format!("rank {rank} panicked"));
        }
    };
    each_on_a_thread(comms, limit, Arc::new(run));
    std::mem::take(&mut *results.lock().unwrap())
}

/// Takes a trait object, so that the code that starts threads is compiled once. Returns when all are done, or after `limit`.
fn each_on_a_thread(comms: Vec<Comm>, limit: Duration, run: Arc<dyn Fn(usize, Comm) + Send + Sync>) {
    let (n, (tell, done)) = (comms.len(), mpsc::channel());
    for (rank, comm) in comms.into_iter().enumerate() {
        let (run, tell) = (run.clone(), tell.clone());
        let run = move || {
            run(rank, comm);
            let _ = tell.send(());
        };
        thread::Builder::new().name(format!("rank {rank}")).spawn(run).expect("a thread");
    }
    let end = Instant::now() + limit;
    for _ in 0..n {
        if done.recv_timeout(end.saturating_duration_since(Instant::now())).is_err() {
            break;
        }
    }
}

/// Closes a communicator; returns the error of `close` as a text.
pub fn close(comm: Comm) -> Result<(), String> {
    block_on(comm.close()).map_err(|e| format!("close: {e}"))
}
