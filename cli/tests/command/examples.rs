//! Runs examples of which it is promised what they print or how they end. Every wait has a deadline.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const BUILD: Duration = Duration::from_secs(600);
const RUN: Duration = Duration::from_secs(60);

/// Waits for a child for at most `limit`, and then kills it.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        match child.try_wait().expect("a child to wait for") {
            Some(status) => return Some(status),
            None if Instant::now() > end => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn read(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Builds an example with this test's profile, and returns its path: cargo builds no examples for this package's tests, nor does it tell
/// a test where one is.
pub(crate) fn example(name: &str) -> PathBuf {
    let mut command = Command::new(env!("CARGO"));
    // If the variable were set, packages whose build scripts look at it would be built anew.
    command.env_remove("RUSTC_BOOTSTRAP");
    command.args(["build", "--message-format=json", "--example", name]);
    // These are the packages and features of `cargo xtask test`, so that it builds nothing twice.
    command.args(["--package", "allstream", "--package", "allstream-cli", "--all-features"]);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.args(["--profile", &test_support::built_in().1]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("cargo");
    let stdout = child.stdout.take().expect("its output");
    let found = thread::spawn(move || {
        let lines = BufReader::new(stdout).lines().map_while(Result::ok);
        let messages = lines.filter_map(|line| serde_json::from_str::<serde_json::Value>(&line).ok());
        messages.filter_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?))).last()
    });
    let status = wait(&mut child, BUILD);
    assert!(status.is_some_and(|status| status.success()), "cargo build --example {name}: {status:?}");
    found.join().expect("a reader").expect("the path of what was built")
}

/// Runs `by_hand`; returns its exit code, stdout and stderr.
fn by_hand(args: &[&str]) -> (Option<i32>, String, String) {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    run(BUILT.get_or_init(|| example("by_hand")), args)
}

/// Runs an example that was built; returns its exit code, stdout and stderr.
pub(crate) fn run(program: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for variable in ["RANK", "WORLD_SIZE", "ALLSTREAM_LINK", "ALLSTREAM_ALGO", "ALLSTREAM_TIMEOUT"] {
        command.env_remove(variable);
    }
    let mut child = command.spawn().expect("the example");
    let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
    let status = wait(&mut child, RUN);
    let code = status.and_then(|status| status.code());
    (code, stdout.join().expect("a reader"), stderr.join().expect("a reader"))
}

#[test]
fn by_hand_is_right_for_any_number_of_ranks_and_any_length() {
    for ranks in ["1", "2", "3", "5", "8"] {
        for size in ["0", "1", "7", "1000"] {
            let (code, stdout, stderr) = by_hand(&["--ranks", ranks, "--size", size, "--trials", "2"]);
            let what = format!("{ranks} ranks, {size} elements:\n{stdout}\n{stderr}");
            assert_eq!(code, Some(0), "{what}");
            for name in ["allstream", "naive", "ring", "bde", "mst"] {
                let line = stdout.lines().find(|line| line.starts_with(name)).unwrap_or_default();
                assert!(line.ends_with("Check: ok"), "{name}: {line}\n{what}");
            }
            assert!(stderr.is_empty(), "{what}");
        }
    }
}

#[test]
fn by_hand_moves_large_messages_over_every_link() {
    for link in ["shm", "tcp"] {
        // The number of ranks is no power of two, and does not divide the length.
        let args = ["--ranks", "3", "--size", "100001", "--trials", "1", "--link", link];
        let (code, stdout, stderr) = by_hand(&args);
        assert_eq!(code, Some(0), "{link}:\n{stdout}\n{stderr}");
        assert_eq!(stdout.matches("Check: ok").count(), 5, "{link}:\n{stdout}");
    }
}

#[test]
fn by_hand_logs_every_message_of_every_rank() {
    let (code, stdout, stderr) =
        by_hand(&["--ranks", "4", "--size", "10", "--trials", "1", "--algo", "ring", "--log"]);
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    for rank in 0..4 {
        let (left, right) = ((rank + 3) % 4, (rank + 1) % 4);
        let of = |what: String| {
            let start = format!("  rank {rank:<3} {what}");
            let lines = stdout.lines().filter(move |line| line.starts_with(&start));
            lines.filter_map(|line| line.split_whitespace().nth(5)?.parse::<usize>().ok()).collect::<Vec<_>>()
        };
        // 2 (n-1) steps: all chunks but one, and then again all but one. The 4 chunks have 2 or 3 of the 10 elements each.
        for elements in [of(format!("sent to       {right}")), of(format!("received from {left}"))] {
            assert_eq!(elements.len(), 6, "rank {rank}:\n{stdout}");
            assert!(elements.iter().all(|count| [2, 3].contains(count)), "rank {rank}:\n{stdout}");
        }
    }
    let (code, summed, _) = by_hand(&["--ranks", "2", "--size", "10", "--trials", "1", "--algo", "bde"]);
    assert_eq!(code, Some(0));
    assert!(
        summed.contains("rank 1   sent   1 to [0], 40 bytes; received   1 from [0], 40 bytes"),
        "{summed}"
    );
}

#[test]
fn by_hand_says_what_is_wrong_with_its_options() {
    for (args, told) in [
        (["--ranks", "0"], "--ranks is `0`; expected a number from 1 up"),
        (["--algo", "star"], "no algorithm `star`"),
        (["--link", "post"], "--link is `post`; expected auto, inproc, shm, tcp"),
    ] {
        let (code, _, stderr) = by_hand(&args);
        assert_eq!(code, Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(told), "{args:?}: {stderr}");
    }
}
