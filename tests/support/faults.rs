//! Starts ranks as processes, reads what they report on their standard output, and leaves no process behind.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use allstream::{Comm, Error, LinkChoice, Rendezvous};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

/// Begins each line by which a rank reports something to the test.
const MARK: &str = "@@";
/// How long the start, the rendezvous and ordinary steps may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How soon a failure must be noticed.
pub const SOON: Duration = Duration::from_secs(2);

/// Links between the ranks of a job. `Rdma`: through the verbs library for tests, only between processes. `Mixed`: shared memory within each half of
/// the ranks, TCP between the halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Local,
    Shm,
    Tcp,
    Rdma,
    Mixed,
}

/// CLOCK_MONOTONIC: the same for all processes of the host.
pub fn now() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// Sleeps until `at` on the clock of [`now`].
pub fn sleep_until(at: f64) {
    while let Some(left) = Some(at - now()).filter(|left| *left > 0.0) {
        std::thread::sleep(Duration::from_secs_f64(left));
    }
}

static TURNS: RwLock<()> = RwLock::new(());

/// Held by a test whose timing must be right to a tenth of a second, or that looks at the whole process: no test that holds this
/// guard or that of [`among_others`] runs at the same time.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    TURNS.write().unwrap_or_else(PoisonError::into_inner)
}

/// Held by a test that mostly waits for deadlines of seconds: others that hold this may run at the same time, but none that holds [`alone`].
pub fn among_others() -> RwLockReadGuard<'static, ()> {
    TURNS.read().unwrap_or_else(PoisonError::into_inner)
}

pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// A directory that is removed when this is dropped.
pub struct Scratch(pub PathBuf);

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch::new()
    }
}

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("allstream-faults-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

// ---- the rank's side ------------------------------------------------------------------------------------------------

/// What the test told this rank when it started it.
pub struct Me {
    pub role: String,
    pub rank: usize,
    pub args: Value,
}

impl Me {
    pub fn from_env() -> Option<Me> {
        let role = std::env::var("FAULTS_ROLE").ok()?;
        let rank = std::env::var("RANK").unwrap().parse().unwrap();
        let args = serde_json::from_str(&std::env::var("FAULTS_ARGS").unwrap()).unwrap();
        Some(Me { role, rank, args })
    }

    pub async fn connect(&self) -> Comm {
        Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap()
    }

    pub fn number(&self, name: &str) -> usize {
        self.args[name].as_u64().unwrap() as usize
    }
}

/// Reports an event to the test, with the time as `t`.
pub fn say(event: &str, mut what: Value) {
    what["event"] = json!(event);
    what["t"] = json!(now());
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK}{what}").unwrap();
    out.flush().unwrap();
}

pub fn say_error(event: &str, error: &Error, buffer: bool) {
    say(event, json!({ "error": error, "text": error.to_string(), "buffer": buffer }));
}

/// What this process holds: descriptors counted by kind, threads by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    pub descriptors: BTreeMap<String, usize>,
    pub threads: Vec<String>,
}

impl Census {
    pub fn take() -> Census {
        let mut descriptors = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            let Ok(target) = std::fs::read_link(entry.path()) else { continue };
            let kind = target.to_string_lossy().replace(|c: char| c.is_ascii_digit(), "");
            // The directory being read.
            if !kind.starts_with("/proc/") {
                *descriptors.entry(kind).or_insert(0) += 1;
            }
        }
        Census { descriptors, threads: threads() }
    }

    /// First makes the engine create the threads and descriptors that it keeps until the process ends, so that later differences
    /// from this census come from what the test does.
    pub async fn before_connecting() -> Census {
        Comm::connect(Rendezvous::alone()).await.unwrap().close().await.unwrap();
        let has_card = std::env::var_os(crate::verbs::LIBRARY).is_some();
        if has_card {
            // The verbs library for tests starts a thread at its first use, which never ends.
            drop(allstream::rdma::find().unwrap());
        }
        // The world of one rank frees its memory within moments, and a new thread sets its name as late.
        let mut census = Census::take();
        for _ in 0..100 {
            let held = census.descriptors.keys().any(|k| k.contains("memfd"));
            // Counted in this census, because a thread may set its name just after it was taken.
            let named = census.threads.iter().filter(|name| name.starts_with("allstream")).count();
            let card = census.threads.iter().any(|name| name == "verbs for tests");
            if !held && named == 2 && card == has_card {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            census = Census::take();
        }
        census
    }

    /// Reports to the test whether the process holds the same as in this census, within three seconds.
    pub async fn say_whether_restored(&self) {
        let end = Instant::now() + Duration::from_secs(3);
        let mut found = Census::take();
        while found != *self && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(20)).await;
            found = Census::take();
        }
        let (was, is) = (format!("{self:?}"), format!("{found:?}"));
        say("census", json!({ "same": found == *self, "was": was, "is": is }));
    }
}

/// Names of this process's threads, sorted, without those that begin with `tokio-` (its blocking pool).
pub fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name = |path: PathBuf| std::fs::read_to_string(path.join("comm")).ok();
    let names = tasks.filter_map(|t| name(t.path())).map(|n| n.trim().to_owned());
    let mut names: Vec<_> = names.filter(|n| !n.starts_with("tokio-")).collect();
    names.sort();
    names
}

pub fn engine_threads() -> Vec<String> {
    threads().into_iter().filter(|n| n.starts_with("allstream")).collect()
}

// ---- the test's side ------------------------------------------------------------------------------------------------

/// A job to be started.
pub struct Plan {
    role: &'static str,
    size: usize,
    link: Link,
    args: Value,
    env: Vec<(&'static str, String)>,
    /// The network namespace of each rank. A rank without an entry runs in the test's own.
    namespaces: Vec<String>,
}

impl Plan {
    pub fn new(role: &'static str, size: usize, link: Link) -> Plan {
        Plan { role, size, link, args: json!({}), env: Vec::new(), namespaces: Vec::new() }
    }

    /// Starts each rank in its network namespace, named by `of_ranks`. The ranks meet at this address, which belongs to that of rank 0.
    pub fn in_namespaces(mut self, of_ranks: Vec<String>, address: &str) -> Plan {
        self.namespaces = of_ranks;
        self.env("MASTER_ADDR", address).env("MASTER_PORT", 29_500)
    }

    pub fn args(mut self, args: Value) -> Plan {
        self.args = args;
        self
    }

    pub fn env(mut self, name: &'static str, value: impl ToString) -> Plan {
        self.env.push((name, value.to_string()));
        self
    }

    pub fn start(self) -> Job {
        let traces = Scratch::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // Jobs over RDMA have two ports and one in turns.
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let host = [crate::verbs::TWO_PORTS, crate::verbs::PORT][JOBS.fetch_add(1, Ordering::Relaxed) % 2];
        let mut ranks = Vec::new();
        for rank in 0..self.size {
            let program = std::env::current_exe().unwrap();
            let mut command = match self.namespaces.get(rank) {
                None => Command::new(program),
                Some(name) => {
                    let mut command = Command::new("ip");
                    command.args(["netns", "exec", name]).arg(program);
                    command
                }
            };
            command
                .args(["rank", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", self.size.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("ALLSTREAM_TOKEN", "of this job")
                .env("ALLSTREAM_TRACE_DIR", &traces.0)
                .env("ALLSTREAM_RENDEZVOUS_TIMEOUT", "30")
                .env("FAULTS_ROLE", self.role)
                .env("FAULTS_ARGS", self.args.to_string())
                .envs(self.env.iter().map(|(k, v)| (k, v)));
            match self.link {
                Link::Local => panic!("ranks of several processes"),
                Link::Shm => command.env("ALLSTREAM_LINK", "shm"),
                Link::Tcp => command.env("ALLSTREAM_LINK", "tcp"),
                Link::Rdma => command.envs(crate::verbs::env(host)),
                Link::Mixed => {
                    let half = if rank < self.size / 2 { "left" } else { "right" };
                    command.env("ALLSTREAM_LINK", "auto").env("ALLSTREAM_HOST_ID", half)
                }
            };
            ranks.push(Running::start(
                command,
                rank,
                (rank == 0 && self.namespaces.is_empty()).then_some(&listener),
            ));
        }
        Job { ranks, traces }
    }
}

/// Ranks that run. Dropping a job kills the ranks that still run.
pub struct Job {
    pub ranks: Vec<Running>,
    pub traces: Scratch,
}

impl Job {
    pub fn pids(&self) -> Vec<i32> {
        self.ranks.iter().map(|r| r.pid.as_raw_pid()).collect()
    }

    /// Waits until all ranks have ended by themselves; panics unless each ends with status 0.
    pub fn finish(mut self) {
        let end = Instant::now() + PATIENCE;
        for rank in &mut self.ranks {
            assert_eq!(rank.ended(end), Some(0), "rank {} did not end well: {}", rank.rank, rank.log());
        }
    }
}

/// A rank's process.
pub struct Running {
    pub rank: usize,
    pub pid: Pid,
    child: Child,
    lines: Receiver<Value>,
    log: Arc<Mutex<String>>,
}

impl Running {
    fn start(mut command: Command, rank: usize, inherit: Option<&TcpListener>) -> Running {
        let fd = inherit.map(AsRawFd::as_raw_fd);
        if let Some(fd) = fd {
            command.env("ALLSTREAM_RENDEZVOUS_FD", fd.to_string());
        }
        let in_child = move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if let Some(fd) = fd {
                // SAFETY: the listener stays open until `spawn` returns, and the forked child keeps its copies of all descriptors until it execs.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure only makes two system calls; it takes no lock and allocates nothing.
        unsafe { command.pre_exec(in_child) };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (tell, lines) = channel();
        let log = Arc::new(Mutex::new(String::new()));
        let (out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let shared = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some(text) = line.strip_prefix(MARK) {
                    // If a rank is killed, its last line may be incomplete.
                    let _ = serde_json::from_str(text).map(|value| tell.send(value));
                }
                let mut log = shared.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        let shared = log.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Some(n) = err.read(&mut piece).ok().filter(|n| *n > 0) {
                shared.lock().unwrap().push_str(&String::from_utf8_lossy(&piece[..n]));
            }
        });
        Running { rank, pid: Pid::from_child(&child), child, lines, log }
    }

    /// What the rank has printed. If that is long: its beginning, where a panic explains itself, and its end.
    pub fn log(&self) -> String {
        const PART: usize = 3000;
        let log = self.log.lock().unwrap();
        let count = log.chars().count();
        if count <= 2 * PART {
            return log.clone();
        }
        let [first, last] = [(0, PART), (count - PART, PART)]
            .map(|(skip, take)| log.chars().skip(skip).take(take).collect::<String>());
        format!("{first}\n[...]\n{last}")
    }

    /// Waits for the rank's next report of `event`, and ignores other reports before it.
    pub fn hear(&self, event: &str) -> Value {
        self.hear_also(event, |_| {})
    }

    /// Like `hear`, but passes the reports before it to `earlier`.
    pub fn hear_also(&self, event: &str, mut earlier: impl FnMut(&Value)) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(value) if value["event"] == event => return value,
                Ok(value) => earlier(&value),
                Err(RecvTimeoutError::Timeout) => {
                    panic!("rank {} never said {event}: {}", self.rank, self.log())
                }
                Err(_) => panic!("rank {} ended before it said {event}: {}", self.rank, self.log()),
            }
        }
    }

    /// All reports that were not heard yet. Waits until the rank's output ends.
    pub fn rest(&self) -> Vec<Value> {
        let end = Instant::now() + PATIENCE;
        std::iter::from_fn(|| self.lines.recv_timeout(end.saturating_duration_since(Instant::now())).ok())
            .collect()
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid, signal).unwrap();
    }

    /// The rank's exit code, or minus the signal that ended it; `None` if it has not ended at the time `by`.
    pub fn ended(&mut self, by: Instant) -> Option<i32> {
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().or(status.signal().map(|s| -s));
            }
            if Instant::now() >= by {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The error in a report of a rank.
pub fn error_of(said: &Value) -> Error {
    serde_json::from_value(said["error"].clone()).unwrap_or_else(|e| panic!("no error ({e}) in {said}"))
}

/// Names in the system that processes could leave behind: POSIX shared memory, and the engine's unix sockets.
pub fn names_left() -> Vec<String> {
    let shm = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut names: Vec<_> = shm.map(|e| e.path().display().to_string()).collect();
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    names.extend(
        sockets
            .lines()
            .filter_map(|l| l.split_whitespace().last())
            .filter(|n| n.contains("allstream") && !is_of_a_living_process(n))
            .map(str::to_owned),
    );
    names
}

/// Whether `name` is the socket at which a process that still runs, of this test or another, can be asked for its flight recorders; or a queue pair of
/// the verbs library for tests. The system takes such a socket away with its process, and other tests' ranks have theirs meanwhile.
fn is_of_a_living_process(name: &str) -> bool {
    name.starts_with("@allstream-verbs-for-tests-")
        || name.strip_prefix("@allstream-record-").is_some_and(|pid| Path::new("/proc").join(pid).exists())
}

/// Asserts that the names that are new since `before` disappear within 5 s. Names that appear only later are ignored.
pub fn assert_no_new_names(before: &[String]) {
    let mut new: Vec<_> = names_left().into_iter().filter(|n| !before.contains(n)).collect();
    let end = Instant::now() + Duration::from_secs(5);
    while !new.is_empty() {
        assert!(Instant::now() < end, "left behind: {new:?}");
        std::thread::sleep(Duration::from_millis(50));
        let here = names_left();
        new.retain(|n| here.contains(n));
    }
}

pub fn is_gone(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

// ---- ranks that are threads -----------------------------------------------------------------------------------------

/// A world of threads of this process, joined by `link`.
pub fn world(link: Link, size: usize) -> Vec<Comm> {
    let choice = match link {
        Link::Local => return Comm::local(size).unwrap(),
        Link::Shm => LinkChoice::SHM,
        Link::Tcp => LinkChoice::TCP,
        Link::Rdma => panic!("the verbs library for tests is named in the environment of processes"),
        Link::Mixed => LinkChoice::AUTO,
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let join = |rank| {
        let place = Rendezvous::tcp(&address, rank, size).unwrap().token("threads").link(choice);
        let place = if rank == 0 { place.listener(listener.try_clone().unwrap()) } else { place };
        Comm::connect(place)
    };
    let all = block_on(futures::future::join_all((0..size).map(join)));
    all.into_iter().map(Result::unwrap).collect()
}

/// Runs `each` for every rank on a thread of its own; returns the results in rank order. Panics after `PATIENCE`.
pub fn on_threads<T, F, Fut>(comms: Vec<Comm>, each: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Comm) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = T>,
{
    let threads: Vec<_> = comms
        .into_iter()
        .map(|comm| {
            let (tell, told) = channel();
            let each = each.clone();
            std::thread::spawn(move || {
                let _ = tell.send(block_on(each(comm)));
            });
            told
        })
        .collect();
    let end = Instant::now() + PATIENCE;
    let wait = |(rank, told): (usize, Receiver<T>)| {
        let result = told.recv_timeout(end.saturating_duration_since(Instant::now()));
        result.unwrap_or_else(|e| panic!("rank {rank} did not return: {e}"))
    };
    threads.into_iter().enumerate().map(wait).collect()
}

/// Numbers that look random, the same for the same seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// Takes the seed from `ALLSTREAM_TEST_SEED`, or else from the clock, and prints it.
    pub fn seeded() -> Random {
        let given = std::env::var("ALLSTREAM_TEST_SEED").ok().map(|s| s.parse().unwrap());
        let seed = given.unwrap_or_else(|| (now() * 1e9) as u64);
        println!("seed {seed} (ALLSTREAM_TEST_SEED={seed} repeats it)");
        Random(seed)
    }

    /// The next number, in 0.0..1.0.
    pub fn fraction(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        (x >> 11) as f64 / (1u64 << 53) as f64
    }
}
