//! `allstream perf --device` and `allstream info`: what they say of a device, and where there is none.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{LIBRARY, library};

/// A library that is found, so that no other one is looked for, and is no driver.
const NO_DRIVER: &str = "libc.so.6";

/// It ends by itself: operations have deadlines.
fn allstream(library: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allstream"));
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
        assert_eq!(json["series"][0]["rows"].as_array().unwrap().len(), 3);
    }
}

#[test]
fn perf_says_which_device_is_missing() {
    let sizes = ["perf", "all_reduce", "--threads", "-e", "4"];
    for (library, device, told) in [
        (library(), "--device=9", "there is no device 9, this process sees 2"),
        (Path::new(NO_DRIVER), "--device", "libc.so.6 has no function cuInit"),
    ] {
        let output = allstream(library, &[&sizes[..], &[device]].concat());
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(told), "{device}: {said}");
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
