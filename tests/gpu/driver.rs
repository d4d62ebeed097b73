//! Which CUDA driver the ranks get.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const CHOICE: &str = "ALLSTREAM_TEST_DRIVER";
const LIBRARY: &str = "ALLSTREAM_CUDA_LIBRARY";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// The one for tests, built if it is not there or is old.
    ForTests,
    /// The machine's, and a device that is fast.
    Real,
    /// Whichever is found; nothing takes long.
    Rehearsal,
}

impl Driver {
    pub(crate) fn chosen() -> Driver {
        match std::env::var(CHOICE).as_deref() {
            Err(_) | Ok("") => Driver::ForTests,
            Ok("real") => Driver::Real,
            Ok("rehearsal") => Driver::Rehearsal,
            Ok(other) => panic!("{CHOICE} is {other:?}; expected real or rehearsal, or nothing"),
        }
    }

    /// Whether large buffers, and every combination, are worth the time.
    pub(crate) fn large(self) -> bool {
        self == Driver::Real
    }

    /// The environment by which a process has it.
    pub(crate) fn variables(self) -> Vec<(String, String)> {
        let set = |name: &str, value: String| (name.to_owned(), value);
        let choice = match self {
            Driver::ForTests => {
                let library = built().display().to_string();
                return vec![set(LIBRARY, library), set(CHOICE, "rehearsal".into())];
            }
            Driver::Real => "real",
            Driver::Rehearsal => "rehearsal",
        };
        let library = std::env::var(LIBRARY).ok().map(|file| set(LIBRARY, file));
        library.into_iter().chain([set(CHOICE, choice.into())]).collect()
    }
}

fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // This program lies in TARGET/PROFILE/deps.
        let exe = std::env::current_exe().unwrap();
        let folder = exe.ancestors().nth(2).unwrap();
        let profile = match folder.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(profile) => profile,
        };
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "cuda-driver-for-tests", "--profile", profile]);
        cargo.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(folder.parent().unwrap());
        assert!(cargo.status().unwrap().success(), "the CUDA driver for tests does not build");
        folder.join("libcuda.so")
    })
}
