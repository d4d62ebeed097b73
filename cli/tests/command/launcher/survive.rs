//! The example that loses ranks and goes on, under every launcher that lets survivors work on.

use std::io::{BufRead, BufReader};
use std::sync::mpsc;

use super::slurm::Slurm;
use super::*;
use crate::examples::example;

/// The processes that run this program for the job with this secret.
fn ranks_of(program: &Path, token: &str) -> Vec<u32> {
    let token = format!("ALLSTREAM_TOKEN={token}");
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_ours = |pid: &u32| {
        let runs = fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program);
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        runs && environment.split(|byte| *byte == 0).any(|variable| variable == token.as_bytes())
    };
    pids.filter(is_ours).collect()
}

/// Reads what the example's job writes to stdout, and calls `after_some_epochs` after each line that reports an epoch. Returns all lines,
/// and how the launcher ended.
pub(super) fn follow(mut child: Child, mut after_some_epochs: impl FnMut()) -> (Vec<String>, Output) {
    let (tell, told) = mpsc::channel();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
    let end = Instant::now() + DEADLINE;
    let mut lines = Vec::new();
    while let Ok(line) = told.recv_timeout(end.saturating_duration_since(Instant::now())) {
        if line.contains("epoch ") {
            after_some_epochs();
        }
        lines.push(line);
    }
    (lines, finish(child))
}

/// Starts the example under a launcher that starts `ranks` ranks, to train for `epochs` epochs. Kills a random rank whenever ten more
/// epochs are reported, until `left` are left. Returns the lines of stdout, and the launcher's exit code.
fn lose_ranks(mut launcher: Command, epochs: usize, ranks: usize, left: usize) -> (Vec<String>, Option<i32>) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let token = format!("survive {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let program = fs::canonicalize(example("16_survive")).unwrap();
    launcher.arg(&program).arg(epochs.to_string()).env("ALLSTREAM_TOKEN", &token);
    let child = launcher.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut killed, draw) = (0, std::hash::RandomState::new());
    let (lines, output) = follow(child, || {
        if killed < ranks - left {
            let alive = ranks_of(&program, &token);
            let place = std::hash::BuildHasher::hash_one(&draw, killed) as usize % alive.len();
            kill_process(pid_of(alive[place]), Signal::KILL).unwrap();
            killed += 1;
        }
    });
    assert_eq!(killed, ranks - left, "{lines:#?} {output:?}");
    wait_until("no rank is left behind", || ranks_of(&program, &token).is_empty());
    (lines, output.status.code())
}

/// `left` survivors say that there are so many of them, and read at least 95 % of the digits right.
pub(super) fn assert_survived(lines: &[String], left: usize) {
    let of = format!(" of {left}: ");
    let ends: Vec<f32> = lines
        .iter()
        .filter_map(|line| line.split_once(&of)?.1.split_once(" % right at the end")?.0.parse().ok())
        .collect();
    assert_eq!(ends.len(), left, "{lines:#?}");
    assert!(ends.iter().all(|right| *right >= 95.0), "{ends:?}");
}

#[test]
fn five_of_eight_are_killed_under_our_own_launcher() {
    let mut command = others::without_ranks(Path::new(env!("CARGO_BIN_EXE_allstream")));
    command.args(["run", "-n", "8", "--on-failure", "keep", "--"]);
    let (lines, code) = lose_ranks(command, 150, 8, 3);
    assert_survived(&lines, 3);
    assert_eq!(code, Some(0));
}

#[test]
fn survivors_work_on_under_open_mpi_with_recovery() {
    let Some(mpirun) = others::open_mpi() else { return };
    let mut command = others::without_ranks(&mpirun);
    command.args(["--allow-run-as-root", "--oversubscribe", "--enable-recovery", "-n", "4"]);
    // mpirun shares the cores with four ranks, and shows their output late: most of a short training would be over by then.
    let (lines, code) = lose_ranks(command, 1500, 4, 2);
    assert_survived(&lines, 2);
    assert_eq!(code, Some(0));
}

#[test]
fn survivors_work_on_under_srun() {
    let Some(slurm) = Slurm::start() else { return };
    let mut command = others::without_ranks(Path::new("srun"));
    command.args(["--overcommit", "-n", "4"]).env("SLURM_CONF", slurm.conf());
    let (lines, code) = lose_ranks(command, 150, 4, 2);
    assert_survived(&lines, 2);
    assert_eq!(code, Some(137), "what srun makes of a task that was killed");
}
