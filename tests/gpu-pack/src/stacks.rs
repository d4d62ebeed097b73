//! What can be seen of processes that hang: their threads, what each waits for, and its calls where a debugger is there.

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// For all that is asked of processes that hang, together: the other steps need the time.
const LIMIT: Duration = Duration::from_secs(25);
/// For one debugger.
const DEBUGGER: Duration = Duration::from_secs(10);
/// So many processes are looked at with a debugger.
const MOST: usize = 3;
const DEBUGGERS: [&str; 3] = ["gdb", "cuda-gdb", "/usr/local/cuda/bin/cuda-gdb"];

fn read(pid: i32, file: &str) -> String {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ").trim().to_owned()
}

/// What there is to say of these processes, the first of which is the one that the step started.
pub fn of(pids: &[i32], ours: &std::path::Path) -> String {
    let end = Instant::now() + LIMIT;
    let mut text = String::new();
    for pid in pids {
        let _ = writeln!(text, "== process {pid}: {}", read(*pid, "cmdline"));
        threads(*pid, &mut text);
    }
    // A launcher of ours knows of its ranks who waits for whom.
    if let Some(first) = pids.first() {
        let (program, pid) = (ours.display().to_string(), first.to_string());
        let mut trace = Command::new(&program);
        trace.args(["trace", "--pid", &pid]);
        let _ = writeln!(text, "== allstream trace --pid {pid}\n{}", said(trace, Duration::from_secs(5)));
    }
    let Some(debugger) = DEBUGGERS.iter().find(|name| is_there(name)) else {
        let _ = writeln!(text, "== no debugger here ({}): no calls are shown", DEBUGGERS.join(", "));
        return text;
    };
    let drives = |pid: &&i32| read(**pid, "maps").contains("libcuda");
    for pid in pids.iter().filter(drives).take(MOST) {
        let left = end.saturating_duration_since(Instant::now()).min(DEBUGGER);
        let mut gdb = Command::new(debugger);
        gdb.args(["-p", &pid.to_string(), "-nx", "-batch"]);
        gdb.args(["-ex", "set pagination off", "-ex", "thread apply all bt 30"]);
        let _ = writeln!(text, "== {debugger} -p {pid}\n{}", said(gdb, left));
    }
    text
}

/// Whether a program can be started.
pub fn is_there(program: &str) -> bool {
    let mut ask = Command::new(program);
    ask.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ask.status().is_ok()
}

fn threads(pid: i32, text: &mut String) {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for task in tasks {
        let within = format!("task/{}", task.file_name().to_string_lossy());
        let state = read(pid, &format!("{within}/status"));
        let state =
            state.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or("?").trim().to_owned();
        let [name, waits, call] =
            ["comm", "wchan", "syscall"].map(|file| read(pid, &format!("{within}/{file}")));
        let call = call.split(' ').next().unwrap_or_default().to_owned();
        let _ = writeln!(text, "   {name:<16} {state:<16} system call {call}, in {waits}");
    }
}

/// What a command prints within a time, after which it is ended.
fn said(mut command: Command, limit: Duration) -> String {
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return format!("{}: {error}", command.get_program().display()),
    };
    let output = child.stdout.take().map(|mut pipe| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let end = Instant::now() + limit;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    let _ = child.wait();
    output.and_then(|output| output.join().ok()).unwrap_or_default()
}
