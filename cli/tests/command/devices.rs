//! `allstream perf --device` and `allstream info`: what they say of a device, and where there is none.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use test_support::cuda::{LIBRARY, library, nccl_library};

/// A library that is no driver. It is found, so allstream looks for no other one.
const NO_DRIVER: &str = "libc.so.6";

/// Runs `allstream` with this library as the CUDA driver. It ends by itself, as operations have deadlines.
fn allstream(library: &Path, arguments: &[&str]) -> Output {
    allstream_with(library, &[], arguments)
}

/// As [`allstream`], with knobs of the driver for tests.
fn allstream_with(library: &Path, knobs: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
    command.envs(knobs.iter().copied());
    command.args(arguments).env(LIBRARY, library).env_remove("ALLSTREAM_TOKEN").stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn perf_times_buffers_on_a_device_and_says_how_fast_it_copies() {
    let figures = std::env::temp_dir().join(format!("allstream-perf-device-{}.json", std::process::id()));
    for (device, place) in [("--device", "--threads"), ("--device=1", "--await")] {
        let sizes =
            ["perf", "reduce_scatter", "-N", "2", "-b", "4", "-e", "1K", "-f", "16", "-n", "2", "-w", "0"];
        let more = [device, place, "-J", figures.to_str().unwrap()];
        let output = allstream(library(), &[&sizes[..], &more[..]].concat());
        let said = text(&output.stdout);
        assert!(output.status.success(), "{said}{}", text(&output.stderr));
        assert!(said.contains("device memory") && said.contains("# copies on the device: "), "{said}");
        assert!(said.contains(" MiB each, by events"), "{said}");
        assert_eq!(said.matches("  dev  ").count(), 2, "a column in each half: {said}");
        assert!(said.contains("# Out of bounds values : 0 OK"), "{said}");
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&figures).unwrap()).unwrap();
        let _ = std::fs::remove_file(&figures);
        assert_eq!(json["alloc"], "device");
        assert_eq!(json["device"]["ordinal"], u64::from(device == "--device=1"));
        // Threads read each other's memory on the device.
        if place == "--threads" {
            assert_eq!(json["device"]["path"], "peer");
        }
        assert!(json["device"]["copy_gbs"].as_f64() > Some(0.0), "{json}");
        let rows = json["series"][0]["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3);
        for row in rows {
            assert!(row["out_of_place"]["device_us"].as_f64() > Some(0.0), "{row}");
            assert!(row["in_place"]["device_us"].as_f64() > Some(0.0), "{row}");
        }
    }
}

#[test]
fn perf_by_nccl_says_so_and_without_nccl_what_is_missing() {
    let table = [
        "perf",
        "all_reduce",
        "--device",
        "--nccl",
        "-N",
        "1",
        "--threads",
        "--sizes",
        "1K",
        "-n",
        "2",
        "-w",
        "0",
    ];
    let by = |file: &str| allstream_with(library(), &[("ALLSTREAM_NCCL_LIBRARY", file)], &table);
    let output = by(nccl_library().to_str().unwrap());
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("# path: NCCL") && said.contains("# Out of bounds values : 0 OK"), "{said}");
    let output = by("/nowhere/libnccl.so.2");
    let error = text(&output.stderr);
    assert!(!output.status.success() && error.contains("/nowhere/libnccl.so.2"), "{error}");
}

/// A Python environment of this test's own, in which pip has put the NCCL for tests.
fn environment_with_nccl(name: &str) -> (PathBuf, String) {
    let home = std::env::temp_dir().join(format!("allstream-{name}-{}", std::process::id()));
    let folder = home.join("lib/python3.12/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("libnccl.so.2");
    std::os::unix::fs::symlink(nccl_library(), &file).unwrap();
    (home, file.display().to_string())
}

/// The line of `allstream info` about NCCL.
fn info_of_nccl(variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
    for name in ["ALLSTREAM_NCCL_LIBRARY", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command.arg("info").env(LIBRARY, library()).envs(variables.iter().copied()).stdin(Stdio::null());
    let said = text(&command.output().unwrap().stdout);
    said.lines().find(|line| line.starts_with("NCCL ")).unwrap().to_owned()
}

#[test]
fn info_finds_nccl_where_pip_has_put_it_and_says_which_it_is() {
    let none = info_of_nccl(&[]);
    if none.contains(" yes: ") {
        eprintln!("skipped: this machine has an NCCL of its own, which is found first: {none}");
        return;
    }
    for part in ["no: ", "libnccl.so.2 (cannot open", "pip's nvidia-nccl-cu13", "set ALLSTREAM_NCCL_LIBRARY"]
    {
        assert!(none.contains(part), "{part}: {none}");
    }
    let (home, file) = environment_with_nccl("pip");
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let at = (variable, home.to_str().unwrap());
        let said = info_of_nccl(&[at]);
        assert!(said.ends_with(&format!("yes: NCCL 2.27.3 by {file}")), "{said}");
        let said = info_of_nccl(&[at, ("ALLSTREAM_TEST_NCCL_VERSION", "21212")]);
        let wanted = format!("; {file} (is version 2.12.12, and 2.14 or newer is needed)");
        assert!(said.contains("no: ") && said.contains(&wanted), "{said}");
        // If the variable names a library, no other one is taken in its place.
        let said = info_of_nccl(&[at, ("ALLSTREAM_NCCL_LIBRARY", "/nowhere/libnccl.so.2")]);
        assert!(said.contains("looked for /nowhere/libnccl.so.2 (cannot open"), "{said}");
        assert!(said.contains("no: ") && !said.contains(&file), "{said}");
    }
    std::fs::remove_dir_all(home).unwrap();
}

/// An operation that no device runs has no time in the `dev` column, and without `--device` there is no such column.
#[test]
fn perf_has_the_device_s_time_only_where_a_device_runs_the_operation() {
    let sizes = ["-N", "2", "--threads", "--sizes", "1K", "-n", "2", "-w", "0"];
    let table = |arguments: &[&str]| {
        let output = allstream(library(), &[&["perf"], arguments, &sizes[..]].concat());
        let said = text(&output.stdout);
        assert!(output.status.success(), "{said}{}", text(&output.stderr));
        said
    };
    let times = |arguments: &[&str]| {
        let said = table(arguments);
        let row = said.lines().find(|line| !line.starts_with('#')).unwrap();
        // The `dev` column comes after size, count, type, reduction, root and time.
        row.split_whitespace().nth(6).unwrap().to_owned()
    };
    assert!(times(&["all_reduce", "--device", "--join"]).parse::<f64>().unwrap() > 0.0);
    assert_eq!(times(&["all_reduce", "--device", "--staged"]), "N/A");
    assert_eq!(times(&["send_recv", "--device"]), "N/A");
    let said = table(&["all_reduce"]);
    assert!(!said.contains("dev"), "{said}");
}

/// If ranks of one process share a device, `perf` lets all of them call an operation before any of them joins a stream with it. So no rank
/// is held up, however few hardware queues there are, and however the device deals them out to streams.
#[test]
fn perf_joins_when_all_ranks_have_called() {
    for seed in ["1", "2", "3"] {
        let knobs = [
            ("ALLSTREAM_TEST_CUDA_QUEUES", "2"),
            ("ALLSTREAM_TEST_CUDA_DEAL", "seed"),
            ("ALLSTREAM_TEST_CUDA_SEED", seed),
            ("ALLSTREAM_TIMEOUT", "10"),
        ];
        let arguments =
            ["perf", "all_reduce", "--device", "--join", "--threads", "-N", "4", "--sizes", "1K", "-n", "5"];
        let output = allstream_with(library(), &knobs, &arguments);
        assert!(output.status.success(), "seed {seed}: {}{}", text(&output.stdout), text(&output.stderr));
    }
}

/// The host copies a rank's input to the device once out of place and once in place, however many rounds there are.
#[test]
fn perf_uploads_its_inputs_once() {
    // Two ranks, each out of place and in place, make 4 copies to the device.
    let fails_at = |nth: u32, iterations: &str| {
        let fault = format!("cuMemcpyHtoDAsync_v2:{nth}:999");
        let knobs = [("ALLSTREAM_TEST_CUDA_FAIL", fault.as_str())];
        let arguments = ["perf", "all_gather", "--device", "--threads", "--sizes", "100K", "-n", iterations];
        let output = allstream_with(library(), &knobs, &arguments);
        (!output.status.success(), text(&output.stderr))
    };
    for iterations in ["2", "30"] {
        let (failed, said) = fails_at(5, iterations);
        assert!(!failed, "a fifth upload: {said}");
    }
    let (failed, said) = fails_at(4, "2");
    assert!(
        failed && said.contains("cuMemcpyHtoDAsync_v2"),
        "the fourth upload fails, and that is said: {said}"
    );
}

/// Each rank's result is 20 MB of an input that the device has made. It is checked in more than one piece.
#[test]
fn perf_checks_results_that_are_longer_than_what_it_fetches_at_a_time() {
    let arguments = ["perf", "scatter", "--device", "--threads", "--sizes", "40M", "-n", "1", "-w", "0"];
    let output = allstream(library(), &arguments);
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("# Out of bounds values : 0 OK"), "{said}");
}

#[test]
fn perf_says_that_a_device_has_too_little_memory() {
    let arguments = ["perf", "all_reduce", "--device", "--threads", "-N", "2", "--sizes", "32M", "-n", "1"];
    let output = allstream_with(library(), &[("ALLSTREAM_TEST_CUDA_MEMORY", "64M")], &arguments);
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for part in
        ["for all_reduce of 33554432 bytes", "take 67108864 bytes", "fewer ranks (-N) or smaller sizes"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn perf_says_which_device_is_missing() {
    let sizes = ["perf", "all_reduce", "-e", "4"];
    for (library, device, told) in [
        (library(), "--device=9", "there is no device 9, this process sees 2"),
        (Path::new(NO_DRIVER), "--device", "libc.so.6 has no function cuInit"),
    ] {
        for place in [&["--threads"][..], &["-N", "2"]] {
            let output = allstream(library, &[&sizes[..], &[device], place].concat());
            let said = text(&output.stderr);
            assert!(!output.status.success() && said.contains(told), "{device}: {said}");
        }
    }
    let output = allstream(library(), &[&sizes[..], &["--device", "--alloc", "arena"]].concat());
    assert!(
        text(&output.stderr).contains("--alloc arena is memory of the host's"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn info_names_the_devices_or_what_is_missing() {
    let line = |library: &Path| {
        let said = text(&allstream(library, &["info"]).stdout);
        said.lines().find(|line| line.starts_with("CUDA ")).unwrap_or_default().to_owned()
    };
    let found = line(library());
    assert!(
        found.contains(" yes: CUDA 12") && found.contains("device 1: CUDA device for tests 1"),
        "{found}"
    );
    let missing = line(Path::new(NO_DRIVER));
    assert!(missing.contains(" no: ") && missing.contains("libc.so.6 has no function cuInit"), "{missing}");
}
