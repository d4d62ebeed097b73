//! The runner with programs that stand in for the pack's: one that hangs, one that dies, one that leaves processes behind, a runner
//! that is killed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use gpu_pack::archive::{self, Entry};
use serde_json::Value;
use tempfile::TempDir;

/// No run of the stand-ins takes longer.
const DEADLINE: Duration = Duration::from_secs(60);

const INFO: &str = r#"if [ "$1" = info ]; then echo "CUDA      yes: CUDA 13.0 by libcuda.so.1; device 0: a stand-in"; exit 0; fi"#;
/// A table as `allstream perf` ends one, and its figures.
const TABLE: &str = r#"while [ $# -gt 0 ]; do [ "$1" = -J ] && echo '{"size": 4}' >"$2"; shift; done; echo '# path: peer'; echo '# Out of bounds values : 0 OK'"#;

/// A pack whose `allstream` and `gpu` are these shell scripts; examples say what is expected of them.
fn stand_in(allstream: &str, gpu: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("bin/allstream", format!("{INFO}\n{allstream}")),
        ("bin/gpu", gpu.to_owned()),
        ("examples/12_gpu", "echo the mean is 1.5".into()),
        ("examples/13_gpu_overlap", "echo by kernels on the GPUs".into()),
    ] {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

fn command(pack: &Path, arguments: &[&str]) -> Command {
    let mut run = Command::new(env!("CARGO_BIN_EXE_gpu-pack"));
    run.arg("--pack").arg(pack).arg("--out").arg(pack.join("out")).args(arguments);
    run.env_remove("ALLSTREAM_CUDA_LIBRARY")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    run
}

fn run(pack: &Path, arguments: &[&str]) -> Output {
    let mut limited = Command::new("timeout");
    let inner = command(pack, arguments);
    limited
        .args(["-k", "5", &DEADLINE.as_secs().to_string()])
        .arg(inner.get_program())
        .args(inner.get_args());
    limited.env_remove("ALLSTREAM_CUDA_LIBRARY").stdin(Stdio::null()).output().unwrap()
}

fn unpacked(pack: &Path) -> Vec<Entry> {
    archive::read(&pack.join("out/gpu-results.tar.xz")).unwrap()
}

fn text(entries: &[Entry], name: &str) -> String {
    let entry = entries.iter().find(|entry| entry.name == name);
    let entry = entry.unwrap_or_else(|| panic!("no {name} among {:?}", names(entries)));
    String::from_utf8_lossy(&entry.content).into_owned()
}

fn names(entries: &[Entry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.name.as_str()).collect()
}

fn result<'a>(results: &'a Value, step: &str) -> &'a Value {
    results["steps"].as_array().unwrap().iter().find(|row| row["step"] == step).unwrap()
}

/// Whether a process is there and is not one that has ended.
fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, after)| !after.trim_start().starts_with('Z'))
}

#[test]
fn a_step_that_hangs_and_one_that_dies_are_named_and_the_others_go_on() {
    // The table of 4 ranks hangs, in a process that its own process started; a world of the conformance dies.
    let perf = format!(
        r#"case "$*" in *"-N 4 --threads"*) echo "it begins"; sleep 1000 & echo $! >"$0.pid"; wait;; esac
{TABLE}"#
    );
    let gpu = r#"case "$1" in short_processes) kill -SEGV $$;; esac; echo "test result: ok. 1 passed""#;
    let pack = stand_in(&perf, gpu);
    let only = "--only=short,all_reduce-2-threads,all_reduce-4-threads,all_reduce-8-threads,example-12_gpu,example-13_gpu_overlap";
    let ended = run(pack.path(), &[only, "--step-limit", "2"]);
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");

    let entries = unpacked(pack.path());
    let results: Value = serde_json::from_str(&text(&entries, "results.json")).unwrap();
    let hung = result(&results, "all_reduce-4-threads");
    assert_eq!(hung["result"], "failed");
    assert!(hung["why"].as_str().unwrap().contains("not done after 2 s"), "{hung}");
    let died = result(&results, "conformance-short_processes");
    assert!(died["result"] == "failed" && died["why"] == "died of signal 11", "{died}");
    let others =
        ["conformance-short_threads", "all_reduce-2-threads", "all_reduce-8-threads", "example-12_gpu"];
    for step in others.into_iter().chain(["example-13_gpu_overlap"]) {
        assert_eq!(result(&results, step)["result"], "passed", "{step}\n{said}");
    }
    assert_eq!(results["measured_on_device"], true);
    assert_eq!(results["tables"]["all_reduce-8-threads"]["size"], 4);
    assert_eq!(text(&entries, "logs/all_reduce-4-threads.txt"), "it begins\n");
    let stacks = text(&entries, "stacks/all_reduce-4-threads.txt");
    assert!(stacks.contains("sleep 1000") && stacks.contains("system call"), "{stacks}");
    assert!(text(&entries, "summary.txt").contains("FAILED: not done after 2 s"));
    // What the step had started is gone with it.
    let pid = fs::read_to_string(pack.path().join("bin/allstream.pid")).unwrap();
    assert!(!runs(&pid), "process {pid} is still there");
}

#[test]
fn a_runner_that_is_killed_leaves_what_was_done_until_then() {
    let perf = format!(r#"case "$*" in *"-N 4 --threads"*) touch "$0.reached"; sleep 1000;; esac; {TABLE}"#);
    let pack = stand_in(&perf, r#"echo "test result: ok. 1 passed""#);
    let mut child =
        command(pack.path(), &["--only=short,all_reduce-2-threads,all_reduce-4-threads"]).spawn().unwrap();
    let end = Instant::now() + DEADLINE;
    while !pack.path().join("bin/allstream.reached").exists() {
        assert!(Instant::now() < end && child.try_wait().unwrap().is_none(), "the step was not reached");
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    let entries = unpacked(pack.path());
    let results: Value = serde_json::from_str(&text(&entries, "results.json")).unwrap();
    let steps: Vec<_> =
        results["steps"].as_array().unwrap().iter().map(|row| row["step"].as_str().unwrap()).collect();
    assert_eq!(steps, ["conformance-short_threads", "conformance-short_processes", "all_reduce-2-threads"]);
    // Nobody is left to end what the killed runner had started.
    let ours = format!("{}", pack.path().display());
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let pid =
            entry.file_name().to_string_lossy().parse::<i32>().ok().and_then(rustix::process::Pid::from_raw);
        if let (true, Some(pid)) = (String::from_utf8_lossy(&line).contains(&ours), pid) {
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
    }
}

#[test]
fn a_machine_without_a_gpu_and_programs_that_do_not_run_have_exit_codes_of_their_own() {
    let pack = stand_in("", "");
    let program = pack.path().join("bin/allstream");
    for (script, code, expected) in [
        (
            "echo 'CUDA   no: the CUDA driver is not available: no file'",
            3,
            "there is no GPU here that this could run on: the CUDA",
        ),
        ("echo 'version GLIBC_2.99 not found' >&2; exit 1", 2, "does not run here"),
    ] {
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        let ended = run(pack.path(), &[]);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(code), "{said}");
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn what_the_time_does_not_suffice_for_is_put_off_and_told() {
    let pack = stand_in(TABLE, r#"echo "test result: ok. 1 passed""#);
    // The reserve alone is longer: nothing begins.
    let ended = run(pack.path(), &["--limit", "5", "--only", "full"]);
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert_eq!(said.matches("skipped: the time was over").count(), 9, "{said}");
    assert!(said.contains("0 passed, 0 failed, 9 skipped"), "{said}");
}

#[test]
fn names_that_no_step_has_are_refused() {
    let pack = stand_in("", "");
    for (arguments, expected) in [
        (["--only", "nonsense"], "no step or stage is called so"),
        (["--with", "nonsense:A=1"], "there is no such step"),
        (["--with", "A=1"], "expected STEP:NAME=VALUE"),
    ] {
        let ended = run(pack.path(), &arguments);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.code() == Some(2) && said.contains(expected), "{said}");
    }
}

#[test]
fn every_step_has_a_name_of_its_own_and_every_stage_is_in_the_documentation() {
    let readme = include_str!("../../../docs/gpu-pack.md");
    let (mut steps, mut stages) = (Vec::new(), Vec::new());
    for nccl in [false, true] {
        let pack = stand_in("", "");
        if nccl {
            fs::create_dir(pack.path().join("nccl")).unwrap();
            fs::write(pack.path().join("nccl/libnccl.so.2"), "").unwrap();
        }
        let listed = run(pack.path(), &["--list"]);
        let listed = String::from_utf8(listed.stdout).unwrap();
        let rows = listed.lines().map(|line| line.split_whitespace().map(String::from).collect::<Vec<_>>());
        let rows: Vec<Vec<String>> = rows.collect();
        let names: Vec<&String> = rows.iter().map(|row| &row[1]).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[..i].contains(name), "{name} is there twice");
        }
        stages.extend(rows.iter().map(|row| row[0].clone()));
        steps.extend(names.into_iter().cloned());
    }
    for stage in stages {
        assert!(readme.contains(&format!("| `{stage}` |")), "docs/gpu-pack.md does not tell of {stage}");
    }
    assert!(steps.len() > 30, "{steps:?}");
}
