//! `allstream doctor --device` on the driver for tests: probes find what this driver is known to do, a probe that fails or hangs keeps no
//! other from answering, and no process is left behind: probes inherit the doctor's stderr, and [`allstream`] waits for its end.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Output;

use serde_json::Value;
use test_support::cuda::library;

use crate::launcher::{allstream, json, text};

/// Asks device 0 with these options and variables; returns the exit code, what was printed, and the probes of the JSON.
fn doctor(options: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("doctor.json");
    let options = [&["doctor", "--device", "-J", file.to_str().unwrap()], options].concat();
    let known = [
        ("ALLSTREAM_CUDA_LIBRARY", library().to_str().unwrap()),
        ("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        ("CUDA_MPS_PIPE_DIRECTORY", ""),
    ];
    let output = allstream(&options, &[&known[..], variables].concat());
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(file.exists(), "{said}{complained}");
    let probes = json(&file)["probes"].as_array().unwrap().clone();
    (output.status.code(), said + &complained, probes)
}

fn probe<'a>(probes: &'a [Value], name: &str) -> &'a Value {
    probes.iter().find(|probe| probe["name"] == name).unwrap_or_else(|| panic!("{name}: {probes:?}"))
}

fn figure(probe: &Value, name: &str) -> f64 {
    probe["figures"][name].as_f64().unwrap_or_else(|| panic!("{name}: {probe}"))
}

fn remark(probe: &Value) -> &str {
    probe["remark"].as_str().unwrap_or_default()
}

#[test]
fn all_probes_answer_and_find_what_the_driver_for_tests_does() {
    let (code, said, probes) = doctor(&[], &[("ALLSTREAM_TEST_CUDA_DEPTH", "100")]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("# device: 0 CUDA device for tests 0, GPU-") && said.contains("# driver: CUDA 12.8")
    );
    assert!(probes.iter().all(|probe| probe["state"] == "answered"), "{said}");
    for name in ["no-context", "device-map", "ipc", "registration", "capture"] {
        assert_eq!(probe(&probes, name)["answer"], "yes", "{said}");
    }
    for (name, wanted) in [
        ("release", "release_us"),
        ("hop", "hop_us"),
        ("costs", "launch_us"),
        ("costs", "launch of 8 threads_us"),
        ("machine-code", "ptx_modules"),
        ("copies", "on_device_gbs"),
        ("copies", "to_host_gbs"),
    ] {
        assert!(figure(probe(&probes, name), wanted) > 0.0, "{wanted}: {said}");
    }
    let queues = probe(&probes, "queues");
    // A busy host makes streams late, and then two queues may look like one.
    assert!((2.0..=8.0).contains(&figure(queues, "queues")), "{said}");
    assert_eq!(figure(queues, "highest_priority_shares"), 1.0, "{said}");
    // The stream's wait takes one of the 100 places, so 99 launches fit. While the next waits for room, only calls that get memory wait, too.
    let depth = probe(&probes, "depth");
    assert_eq!(figure(depth, "launches"), 99.0, "{said}");
    let (_, waits) = remark(depth).split_once("these wait: ").unwrap();
    assert!(waits.starts_with("cuMemAlloc;"), "{said}");
    assert!(remark(probe(&probes, "one-kernel")).contains("by PTX: the host's bits"), "{said}");
    // Without the relaxed mode, calls break the capture.
    let capture = remark(probe(&probes, "capture"));
    assert!(capture.contains("plainly: cuEventQuery is refused (900) and breaks the capture"), "{said}");
    assert!(remark(probe(&probes, "hop-mps")).contains("it is for libcuda.so.1"), "{said}");

    // The page that says what the answers mean names every probe, and its table has a row with the question of each.
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/gpu-facts.md");
    let page = fs::read_to_string(page).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, probes.len());
    for probe in &probes {
        let (name, question) = (probe["name"].as_str().unwrap(), probe["question"].as_str().unwrap());
        assert!(page.contains(&format!("\n| `{name}` | {question} | ")), "{name}");
        assert!(page.contains(&format!("\n- `{name}`: ")), "what {name} means");
    }
}

#[test]
fn queues_are_counted_and_rows_are_those_of_the_page() {
    let variables = [("CUDA_DEVICE_MAX_CONNECTIONS", "3")];
    let (code, said, probes) = doctor(&["--only", "no-context,queues", "--markdown"], &variables);
    assert_eq!((code, probes.len()), (Some(0), 2), "{said}");
    assert_eq!(figure(probe(&probes, "queues"), "queues"), 3.0, "{said}");
    let table = said.split_once("\n\n").unwrap().1;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows[..2], ["| probe | question | CUDA device for tests 0 |", "|---|---|---|"], "{said}");
    let row = "| `no-context` | do queries work on a thread without a context? | yes; cuEventQuery: works; ";
    assert!(rows[2].starts_with(row), "{said}");
    assert!(rows[3].contains("| 3 queues; 40 streams; ") && rows[3].ends_with('|'), "{said}");
    assert!(said.contains("- variables: CUDA_DEVICE_MAX_CONNECTIONS=3"), "{said}");
}

#[test]
fn calls_that_wait_for_the_device_are_named() {
    let (code, said, probes) = doctor(&["--only", "calls"], &[("ALLSTREAM_TEST_CUDA_WAITS", "1")]);
    let calls = probe(&probes, "calls");
    assert_eq!((code, &calls["answer"]), (Some(0), &Value::from("yes")), "{said}");
    for name in ["cuMemAlloc,", "cuMemFreeHost,", "cuModuleGetFunction"] {
        assert!(remark(calls).contains(name), "{name} {said}");
    }
}

#[test]
fn a_call_that_fails_is_said_and_the_other_probes_answer() {
    let variables = [("ALLSTREAM_TEST_CUDA_FAIL", "cuEventRecord:1:999,cuIpcOpenMemHandle:1:205")];
    let (code, said, probes) = doctor(&["--only", "no-context,device-map,ipc"], &variables);
    assert_eq!(code, Some(1), "{said}");
    let failed = probe(&probes, "no-context");
    assert_eq!(failed["state"], "no_answer");
    let problem = failed["problem"].as_str().unwrap();
    assert!(problem.starts_with("cuEventRecord answered CUDA_ERROR_UNKNOWN (999)"), "{said}");
    assert_eq!(probe(&probes, "device-map")["answer"], "yes", "{said}");
    // A probe that finds that memory cannot be opened has an answer: no.
    let ipc = probe(&probes, "ipc");
    assert_eq!(ipc["answer"], "no", "{said}");
    let told = "in the other process: cuIpcOpenMemHandle_v2 answered CUDA_ERROR_MAP_FAILED (205)";
    assert!(remark(ipc).starts_with(told), "{said}");
}

#[test]
fn a_probe_that_hangs_is_killed_and_the_other_probes_answer() {
    // The third `cuEventElapsedTime` of a process hangs; the processes of the other two probes do not call it.
    let variables = [("ALLSTREAM_TEST_CUDA_HANG", "cuEventElapsedTime:3")];
    let (code, said, probes) = doctor(&["--only", "costs,no-context,registration"], &variables);
    assert_eq!(code, Some(1), "{said}");
    let problem = probe(&probes, "costs")["problem"].as_str().unwrap_or_default();
    assert_eq!(problem, "hung, and was killed after 3 s; it was at: cuEventElapsedTime", "{said}");
    for name in ["no-context", "registration"] {
        assert_eq!(probe(&probes, name)["answer"], "yes", "{said}");
    }
}

/// Runs the doctor where it should end before it asks a probe.
fn refused(options: &[&str], library: &str) -> Output {
    allstream(&[&["doctor"], options].concat(), &[("ALLSTREAM_CUDA_LIBRARY", library)])
}

#[test]
fn no_driver_and_no_device_are_told_from_a_wrong_command() {
    let driver = library().to_str().unwrap();
    for (options, library, code, told) in [
        (&["--device"][..], "libc.so.6", 3, "install the NVIDIA driver, which brings libcuda.so.1"),
        (&["--device=7"], driver, 3, "there is no device 7, this process sees 2 (CUDA_VISIBLE_DEVICES)"),
        (&[], driver, 2, "--device"),
        (&["--device", "--only", "tides"], driver, 2, "no-context"),
    ] {
        let output = refused(options, library);
        assert_eq!(output.status.code(), Some(code), "{options:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(told), "{options:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{options:?}");
    }
}

/// What the control program of MPS does, as far as the doctor sees it: in the foreground it makes `control`, and ends when it is told to.
const CONTROL: &str = r#"#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo "started with $pipe and $CUDA_MPS_LOG_DIRECTORY" >>"$(dirname "$0")/log"
    : >"$pipe/control"
    while [ ! -e "$pipe/quit" ]; do sleep 0.01; done
    echo ended >>"$(dirname "$0")/log"
else
    read -r what
    : >"$pipe/$what"
fi
"#;

#[test]
fn mps_is_started_for_one_probe_and_ended_also_where_that_fails() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("nvidia-cuda-mps-control");
    fs::write(&control, CONTROL).unwrap();
    fs::set_permissions(&control, fs::Permissions::from_mode(0o755)).unwrap();
    // Under this name the loader finds the driver for tests as it would find a real one.
    symlink(library(), folder.path().join("libcuda.so.1")).unwrap();
    let (place, path) = (folder.path().to_str().unwrap(), std::env::var("PATH").unwrap_or_default());
    let path = format!("{place}:{path}");
    let log = || fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    for (fail, code, state) in [("", 0, "answered"), ("cuStreamWaitValue32:1:1", 1, "no_answer")] {
        let _ = fs::remove_file(folder.path().join("log"));
        let variables = [
            ("ALLSTREAM_CUDA_LIBRARY", ""),
            ("LD_LIBRARY_PATH", place),
            ("PATH", &path),
            ("ALLSTREAM_TEST_CUDA_FAIL", fail),
        ];
        let (ended, said, probes) = doctor(&["--only", "hop-mps"], &variables);
        assert_eq!(ended, Some(code), "{said}");
        let hop = probe(&probes, "hop-mps");
        assert_eq!(hop["state"], state, "{said}");
        assert!(!fail.is_empty() || figure(hop, "hop_us") > 0.0, "{said}");
        let log = log();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!((lines.len(), lines[1]), (2, "ended"), "{log}");
        let pipe =
            lines[0].strip_prefix("started with ").and_then(|line| line.split(" and ").next()).unwrap();
        assert!(!fs::exists(pipe).unwrap(), "{pipe}");
    }
}
