//! NVIDIA's own NCCL on a machine without a GPU that it can use: an error on every rank, and the communicator goes on.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use allstream::Error;
use allstream::cuda::Device;

use crate::support::{NCCL, child, nothing_left, ranks, soon};

const NAMED: &str = "ALLSTREAM_TEST_REAL_NCCL";

/// As in `ffi/sys/tests/real_nccl.rs`: an NCCL of NVIDIA's, if there is one.
fn real() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(NAMED) {
        return Some(named.into());
    }
    // The Python environment of `cargo xtask test` is in cargo's target folder, which starts at the root of the repository.
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join(target).join("python/all/lib");
    let pythons = all.read_dir().ok()?.flatten().map(|entry| entry.path());
    pythons
        .map(|python| python.join("site-packages/nvidia/nccl/lib/libnccl.so.2"))
        .find(|file| file.is_file())
}

/// NCCL looks for a driver of its own by the usual name, and does not find the test driver, which allstream loads by another path.
#[test]
fn the_real_nccl_without_a_driver_of_its_own_is_an_error_that_names_the_file() {
    let has_driver = Path::new("/dev/nvidiactl").exists();
    let Some(file) = real().filter(|_| !has_driver) else {
        let why = if has_driver { "this machine has a GPU" } else { "no NCCL of pip's" };
        let _ = std::io::stderr().write_all(format!("\nskipped: {why}; {NAMED} names an NCCL\n").as_bytes());
        return;
    };
    let file = file.to_str().unwrap();
    let test = "nccl::real::the_real_nccl_without_a_driver_of_its_own_is_an_error_that_names_the_file";
    let variables = [(NCCL, file), ("LD_LIBRARY_PATH", ""), ("ALLSTREAM_TIMEOUT", "10")];
    child(test, &variables, || {
        let found = allstream::cuda::nccl().unwrap();
        assert!(found.file == file && found.version.starts_with("2."), "{found:?}");
        let begun = Instant::now();
        ranks(2, |mut comm| {
            let error = soon(comm.bind_nccl(&Device::new(comm.rank()).unwrap())).unwrap_err();
            let _ = std::io::stderr().write_all(format!("\n{error}\n").as_bytes());
            let text = error.to_string();
            assert!(matches!(error, Error::Library { .. }) && text.contains(file), "{text}");
            assert!(text.contains("the last error that NCCL has noted: "), "{text}");
            assert_eq!(soon(comm.all_reduce(vec![1])).unwrap(), [2]);
            soon(comm.close()).unwrap();
        });
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        nothing_left("the ranks have ended");
    });
}
