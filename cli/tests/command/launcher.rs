//! `allstream run` from outside: what the launcher gives to the ranks, and that no rank outlives it. Every wait has a deadline.

mod failures;
mod hosts;
mod others;
mod output;
mod perf;
mod running;
mod signals;
mod slurm;
mod ssh;
mod stdin;
mod survive;
mod tune;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, Rendezvous};
use rustix::process::{Pid, Signal, kill_process};

pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A directory for one test. Dropping this kills the processes that wrote their pids there, and removes the directory.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("allstream-launcher-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The pids that processes have written into files here.
    fn pids(&self) -> Vec<u32> {
        let entries = fs::read_dir(&self.0).unwrap().map(Result::unwrap);
        // Reading a named pipe would block.
        let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
        let texts = files.map(|entry| fs::read(entry.path()).unwrap());
        texts.filter_map(|text| String::from_utf8_lossy(&text).trim().parse().ok()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for pid in self.pids().into_iter().filter(|pid| alive(*pid)) {
            let _ = kill_process(pid_of(pid), Signal::KILL);
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(pid.try_into().unwrap()).unwrap()
}

/// Whether a process lives. A zombie does not count: its new parent may never reap it.
fn alive(pid: u32) -> bool {
    !matches!(test_support::process_state(pid), Some('Z' | 'X') | None)
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "not within {DEADLINE:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn launcher(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
    command.arg("run").args(options).args(["--", "/bin/sh", "-c", script]);
    command.env_remove("ALLSTREAM_TOKEN").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command with these arguments and variables, and without a job's token. A variable whose value is empty is removed.
pub(crate) fn allstream(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
    command.args(arguments).env_remove("ALLSTREAM_TOKEN");
    for (name, value) in variables {
        match value.is_empty() {
            true => command.env_remove(name),
            false => command.env(name, value),
        };
    }
    finish(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// What a process writes while it runs, read with a deadline.
struct Shown(mpsc::Receiver<u8>);

impl Shown {
    fn new(mut pipe: impl Read + Send + 'static) -> Shown {
        let (tell, told) = mpsc::channel();
        // Reads on to the end also where nobody listens any more, so that the process can write on.
        thread::spawn(move || {
            let mut bytes = [0; 1 << 10];
            while let Ok(length @ 1..) = pipe.read(&mut bytes) {
                bytes[..length].iter().for_each(|byte| _ = tell.send(*byte));
            }
        });
        Shown(told)
    }

    /// What is written up to the first `end`, with it. If that does not come in time, or the process ends before, the process is killed.
    fn up_to(&self, end: u8, child: &mut Child) -> String {
        let (mut bytes, by) = (Vec::new(), Instant::now() + DEADLINE);
        while bytes.last() != Some(&end) {
            match self.0.recv_timeout(by.saturating_duration_since(Instant::now())) {
                Ok(byte) => bytes.push(byte),
                Err(why) => {
                    let _ = child.kill();
                    panic!("{:?} was not written ({why}); before that: {:?}", char::from(end), text(&bytes));
                }
            }
        }
        text(&bytes)
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Waits for the launcher with a deadline, past which it is killed.
fn finish(mut child: Child) -> Output {
    fn collect(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                pipe.read_to_end(&mut bytes).unwrap();
            }
            bytes
        })
    }
    let (stdout, stderr) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let deadline = if test_support::everything() { 10 * DEADLINE } else { DEADLINE };
    let end = Instant::now() + deadline;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("the launcher did not end within {deadline:?}");
        }
        thread::sleep(Duration::from_millis(5));
    };
    // The launcher leaves nobody who could hold these pipes open.
    wait_until("the output ends", || stdout.is_finished() && stderr.is_finished());
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

/// This test program's path, quoted for a shell.
pub(crate) fn this_program() -> String {
    format!("'{}'", std::env::current_exe().unwrap().display())
}

/// What each rank does in tests where other launchers, or several hosts, bring the ranks together.
#[test]
#[ignore = "a rank; started by other tests"]
fn sums_ranks() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env().unwrap()).await.unwrap();
        let sum = comm.all_reduce(vec![comm.rank() as u64 + 1; 1000]).await.unwrap();
        assert!(sum.iter().all(|x| *x == sum[0]));
        println!("sum of {} ranks: {}", comm.size(), sum[0]);
        comm.close().await.unwrap();
    });
}

fn run(options: &[&str], script: &str) -> Output {
    finish(launcher(options, script).spawn().unwrap())
}

fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(String::from).collect();
    lines.sort();
    lines
}

/// Starts ranks that write their pids into files and then run `rest`. Returns once all have written.
fn start_sleepers(options: &[&str], ranks: usize, scratch: &Scratch, rest: &str) -> (Child, Vec<u32>) {
    let script =
        format!("echo $$ > {0}/$RANK.new && mv {0}/$RANK.new {0}/$RANK; {rest}", scratch.0.display());
    let child = launcher(options, &script).spawn().unwrap();
    let complete = || (0..ranks).all(|rank| scratch.0.join(rank.to_string()).exists());
    wait_until("all ranks have started", complete);
    (child, scratch.pids())
}

#[test]
fn ranks_get_their_variables() {
    let script =
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $A \"$OMPI_COMM_WORLD_RANK\"";
    let child = launcher(&["-n", "3", "--env", "A=x=y"], script).env("OMPI_COMM_WORLD_RANK", "9").spawn();
    let output = finish(child.unwrap());
    assert!(output.status.success(), "{output:?}");
    let expected = ["[0] 0 3 0 3 127.0.0.1 x=y ", "[1] 1 3 1 3 127.0.0.1 x=y ", "[2] 2 3 2 3 127.0.0.1 x=y "];
    assert_eq!(sorted_lines(&output.stdout), expected);
    assert!(output.stderr.is_empty(), "{output:?}");
}

/// Bound ranks have different cores, as far as there are enough; unbound ones may run wherever the launcher may.
#[test]
fn ranks_are_bound_to_cores_of_their_own_where_that_is_asked_for() {
    let cores = std::thread::available_parallelism().unwrap().get().min(8);
    let script = "echo $(grep Cpus_allowed: /proc/self/status)";
    let places = |options: &[&str]| {
        let lines = sorted_lines(&run(options, script).stdout);
        lines.iter().map(|line| line.split_once(": ").unwrap().1.to_owned()).collect::<Vec<_>>()
    };
    let ranks = cores.to_string();
    let (free, bound) = (places(&["-n", &ranks]), places(&["-n", &ranks, "--bind-to", "core"]));
    assert_eq!((free.len(), bound.len()), (cores, cores));
    assert!(free.iter().all(|place| *place == free[0]), "{free:?}");
    let mut distinct = bound.clone();
    distinct.sort();
    distinct.dedup();
    // `cores` counts processors. If these are hyperthreads, there are fewer cores, and ranks share them.
    assert!(distinct.len() >= cores.div_ceil(2), "{bound:?}");
    assert_eq!(places(&["-n", "1", "--bind-to", "numa"]).len(), 1);
}

#[test]
fn only_rank_0_inherits_the_listening_socket() {
    // /proc/net/tcp must list the inode of rank 0's socket as listening (0A) at MASTER_PORT.
    let script = r#"
        echo "fd=${ALLSTREAM_RENDEZVOUS_FD:-none}"
        echo "sockets=$(ls -l /proc/$$/fd | grep -c socket:)"
        [ "$RANK" = 0 ] || exit 0
        inode=$(readlink /proc/$$/fd/$ALLSTREAM_RENDEZVOUS_FD | tr -dc 0-9)
        grep -i "0100007F:$(printf %04X "$MASTER_PORT") .* 0A .* $inode " /proc/net/tcp > /dev/null && echo listening
    "#;
    let output = run(&["-n", "3"], script);
    let lines = sorted_lines(&output.stdout);
    assert!(lines[0].starts_with("[0] fd=") && lines[0] != "[0] fd=none", "{output:?}");
    assert_eq!(lines[1..3], ["[0] listening", "[0] sockets=1"]);
    assert_eq!(lines[3..], ["[1] fd=none", "[1] sockets=0", "[2] fd=none", "[2] sockets=0"]);
}

#[test]
fn the_token_is_random_and_shared_and_a_given_one_is_kept() {
    let tokens = |command: &mut Command| {
        let mut lines = sorted_lines(&finish(command.spawn().unwrap()).stdout);
        lines.dedup();
        lines
    };
    let options = ["-n", "2", "--no-prefix"];
    let script = "echo $ALLSTREAM_TOKEN";
    let (first, second) = (tokens(&mut launcher(&options, script)), tokens(&mut launcher(&options, script)));
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_eq!(first[0].len(), 64);
    assert!(first[0].bytes().all(|byte| byte.is_ascii_hexdigit()));
    assert_ne!(first, second);
    assert_eq!(tokens(launcher(&options, script).env("ALLSTREAM_TOKEN", "mine")), ["mine"]);
}

#[test]
fn lines_are_relayed_whole() {
    let script = r"
        i=0
        while [ $i -lt 200 ]; do printf abc; printf 'def %s\n' $i; i=$((i+1)); done
        printf 'x\377y\n'
        head -c 300000 /dev/zero | tr '\0' z
        printf '\nlast' >&2
        printf '\nno newline'
    ";
    let output = run(&["-n", "4"], script);
    assert!(output.status.success());
    let mut count = 0;
    for line in output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let (prefix, text) = line.split_at(4);
        assert!(matches!(prefix, [b'[', b'0'..=b'3', b']', b' ']), "{prefix:?}");
        let whole = text.starts_with(b"abcdef ")
            || text == b"x\xffy"
            || text == b"no newline"
            || (text.len() == 300_000 && text.iter().all(|byte| *byte == b'z'));
        assert!(whole, "{}", String::from_utf8_lossy(&text[..text.len().min(100)]));
        count += 1;
    }
    assert_eq!(count, 4 * 203);
    assert!(output.stdout.ends_with(b"\n"));
    assert!(sorted_lines(&output.stderr).contains(&"[3] last".to_string()));
}

#[test]
fn the_first_failure_gives_the_exit_code_and_stops_all() {
    let scratch = Scratch::new();
    let rest = "if [ $RANK = 1 ]; then sleep 0.2; exit 7; fi; exec sleep 1000";
    let start = Instant::now();
    let (child, pids) = start_sleepers(&["-n", "3"], 3, &scratch, rest);
    let output = finish(child);
    assert_eq!(output.status.code(), Some(7));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.starts_with("allstream run: rank 1 (pid "), "{stderr}");
    assert!(stderr.ends_with(") exited with code 7; stopping the other ranks\n"), "{stderr}");
    assert!(start.elapsed() >= Duration::from_secs(3), "the others have a time of grace");
    assert!(pids.into_iter().all(|pid| !alive(pid)));
}

#[test]
fn a_signal_is_named_and_survivors_may_report() {
    let script = "if [ $RANK = 2 ]; then kill -9 $$; fi; sleep 1; echo 'rank 2 is dead' >&2; exit 1";
    let output = run(&["-n", "3"], script);
    assert_eq!(
        output.status.code(),
        Some(1),
        "a rank's exit code counts, even if a signal has killed another rank before"
    );
    let lines = sorted_lines(&output.stderr);
    assert_eq!(lines[..2], ["[0] rank 2 is dead", "[1] rank 2 is dead"]);
    assert!(lines[2].starts_with("allstream run: rank 2 (pid "), "{lines:?}");
    assert!(lines[2].ends_with(") was killed by signal 9; stopping the other ranks"), "{lines:?}");
    assert_eq!(lines.len(), 3);
}

#[test]
fn signals_to_the_launcher_leave_no_process() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let scratch = Scratch::new();
        // A shell may lose a SIGINT that comes while it starts a program. SIGKILL then ends it after 4 s.
        let options = ["-n", "4", "--kill-after", "4s"];
        let (child, pids) = start_sleepers(&options, 4, &scratch, "sleep 1000; true");
        kill_process(pid_of(child.id()), signal).unwrap();
        let output = finish(child);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert_eq!(pids.len(), 4);
        assert!(pids.into_iter().all(|pid| !alive(pid)));
    }
}

#[test]
fn a_killed_launcher_leaves_no_process() {
    let scratch = Scratch::new();
    let (mut child, pids) = start_sleepers(&["-n", "4"], 4, &scratch, "exec sleep 1000");
    assert_eq!(pids.len(), 4);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the ranks have ended", || pids.iter().all(|pid| !alive(*pid)));
}

#[test]
fn what_a_rank_leaves_behind_is_stopped_and_does_not_hold_up_the_end() {
    let scratch = Scratch::new();
    let background = "sleep 1000 & echo $! > $0/$RANK.child; printf partial";
    let script = background.replace("$0", &scratch.0.display().to_string());
    for options in [&["-n", "2"][..], &["-n", "2", "--no-prefix"]] {
        let start = Instant::now();
        let output = run(options, &script);
        assert!(output.status.success(), "{output:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
        let pids = scratch.pids();
        assert_eq!(pids.len(), 2);
        wait_until("the children have ended", || pids.iter().all(|pid| !alive(*pid)));
        assert_eq!(String::from_utf8_lossy(&output.stdout).matches("partial").count(), 2);
    }
}

#[test]
fn output_that_ended_early_does_not_hold_up_the_end() {
    let output = run(&["-n", "2"], "exec >&- 2>&-; sleep 0.3; exit 5");
    assert_eq!(output.status.code(), Some(5));
}

#[test]
fn nobody_who_reads_does_not_stop_the_job() {
    let mut child =
        launcher(&["-n", "2"], "i=0; while [ $i -lt 5000 ]; do echo $i; i=$((i+1)); done").spawn().unwrap();
    drop(child.stdout.take());
    assert!(finish(child).status.success());
}

#[test]
fn what_cannot_start_is_a_clear_error() {
    let output = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
        finish(command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    let missing = output(&["run", "-n", "2", "--", "/nowhere/no-such-program", "-x"]);
    assert_eq!(missing.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(stderr, "allstream: rank 0: program `/nowhere/no-such-program` not found\n");
    assert_eq!(output(&["run", "-n", "0", "--", "true"]).status.code(), Some(2));
    assert_eq!(output(&["run", "-n", "2"]).status.code(), Some(2));
    assert_eq!(output(&["run", "-n", "2", "--env", "RANK=1", "--", "true"]).status.code(), Some(2));
}

#[test]
fn trace_and_info_print_something() {
    let scratch = Scratch::new();
    let file = |rank: usize| {
        let operation = r#"{"number":1,"call":"barrier()","state":"running","submitted_us":1,"started_us":2,
            "finished_us":null,"waiting_for":[1],"bytes_done":0}"#;
        let operations = if rank == 0 { operation } else { "" };
        format!(
            r#"{{"version":1,"world":"ab","rank":{rank},"size":2,"pid":1,"host":"h","written_at_unix_ms":5,"cause":null,
            "comms":[{{"id":0,"name":"world","rank":{rank},"members":[0,1],"poisoned":null,"operations":[{operations}]}}]}}"#
        )
    };
    for rank in 0..2 {
        fs::write(scratch.0.join(format!("{rank}.json")), file(rank)).unwrap();
    }
    let allstream = |args: &[&str], path: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
        command.args(args).arg(path).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    };
    let output = allstream(&["trace"], &scratch.0);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("rank 1 has not called #1 barrier(); rank 0 waits for it"), "{output:?}");
    assert!(allstream(&["trace", "--json"], &scratch.0).stdout.starts_with(b"{"));
    fs::write(scratch.0.join("bad.json"), "{").unwrap();
    let output = allstream(&["trace"], &scratch.0);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("bad.json: not a flight recorder's file"));
    let mut info = Command::new(env!("CARGO_BIN_EXE_allstream"));
    let output = finish(info.arg("info").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert!(String::from_utf8_lossy(&output.stdout).contains("inproc         yes"), "{output:?}");
}
