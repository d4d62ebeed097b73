//! Tests with NVIDIA's own NCCL, as pip installs it. They run without a GPU, too: the library loads, tells its version and makes ids, and
//! without a GPU it says what is missing.
//!
//! The library's file is the one that `ALLSTREAM_TEST_REAL_NCCL` names, or else that of the Python environment in which
//! `cargo xtask test --full` has torch. If there is none, the tests are skipped.

use std::ffi::c_int;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use allstream_sys::cuda::Cuda;
use allstream_sys::nccl::{Nccl, NcclError, NcclResult};

const DEADLINE: Duration = Duration::from_secs(60);
const CHILD: &str = "ALLSTREAM_TEST_NCCL_CHILD";
const NAMED: &str = "ALLSTREAM_TEST_REAL_NCCL";

/// The file of NVIDIA's NCCL, if there is one.
fn real() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(NAMED) {
        return Some(named.into());
    }
    // The Python environment of `cargo xtask test` is in cargo's target folder, which starts at the root of the repository.
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(target).join("python/all/lib");
    let pythons = all.read_dir().ok()?.flatten().map(|entry| entry.path());
    pythons
        .map(|python| python.join("site-packages/nvidia/nccl/lib/libnccl.so.2"))
        .find(|file| file.is_file())
}

/// Runs the test of this name again in a process of its own, in a Python environment that has pip's NCCL; there, this function runs `body`.
/// The process is needed because a process loads only one NCCL, and a broken NCCL may end the process.
fn in_environment(test: &str, body: impl FnOnce() + Send + 'static) {
    if std::env::var(CHILD).as_deref() == Ok(test) {
        let (done, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            body();
            let _ = done.send(());
        });
        if ended.recv_timeout(DEADLINE) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = std::io::stderr().write_all(b"\nNCCL hangs\n");
            std::process::exit(70);
        }
        return thread.join().unwrap();
    }
    let Some(file) = real() else {
        let why = format!("\nskipped: no NCCL of pip's; {NAMED} names one\n");
        let _ = std::io::stderr().write_all(why.as_bytes());
        return;
    };
    let home = std::env::temp_dir().join(format!("allstream-{test}-{}", std::process::id()));
    let folder = home.join("lib/python3.12/site-packages/nvidia/nccl");
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(file.parent().unwrap(), folder.join("lib")).unwrap();
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args([test, "--exact", "--nocapture"]).env(CHILD, test).stdin(Stdio::null());
    // Cargo puts the folder with the CUDA driver for tests into `LD_LIBRARY_PATH`.
    for name in ["ALLSTREAM_NCCL_LIBRARY", "CONDA_PREFIX", "LD_LIBRARY_PATH"] {
        again.env_remove(name);
    }
    again.env("VIRTUAL_ENV", &home);
    let status = again.status().unwrap();
    std::fs::remove_dir_all(home).unwrap();
    assert!(status.success(), "{test} in its own process: {status}");
}

#[test]
fn pip_s_nccl_is_found_and_makes_ids() {
    in_environment("pip_s_nccl_is_found_and_makes_ids", || {
        let nccl = Nccl::get().unwrap();
        assert!(nccl.version_code() >= 21400 && nccl.version().starts_with("2."), "{nccl:?}");
        assert!(nccl.file().ends_with("libnccl.so.2") || nccl.file().contains("nccl"), "{nccl:?}");
        let [a, b] = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
        assert!(a != b && a.0.iter().any(|byte| *byte != 0));
    });
}

/// Makes a communicator, waits until that has succeeded or failed, aborts the communicator in either case, and returns how it ended.
fn init(nccl: &Nccl, rank: c_int, size: c_int) -> Result<(), NcclError> {
    let id = nccl.unique_id()?;
    let comm = nccl.init(size, &id, rank)?;
    let end = Instant::now() + DEADLINE / 2;
    let state = loop {
        // SAFETY: the communicator of the call above, which nobody else has.
        match unsafe { nccl.async_error(comm) } {
            Ok(NcclResult::IN_PROGRESS) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            state => break state,
        }
    };
    // SAFETY: as above, and it is not used again.
    unsafe { nccl.abort(comm) }?;
    state.map(|state| assert_ne!(state, NcclResult::IN_PROGRESS, "it does not come to an end"))
}

#[test]
fn without_a_gpu_pip_s_nccl_says_what_is_missing() {
    in_environment("without_a_gpu_pip_s_nccl_says_what_is_missing", || {
        if Cuda::get().is_ok() {
            let _ = std::io::stderr().write_all(b"\nskipped: there is a GPU\n");
            return;
        }
        let error = init(Nccl::get().unwrap(), 0, 1).unwrap_err();
        let text = error.to_string();
        let _ = std::io::stderr().write_all(format!("\n{text}\n").as_bytes());
        assert!(error.code != NcclResult::IN_PROGRESS && error.call.starts_with("ncclComm"), "{text}");
        assert!(text.contains("the last error that NCCL has noted: ") && text.contains("CUDA"), "{text}");
    });
}
