//! Which CUDA driver the ranks get.

use std::path::Path;

use test_support::cuda;

use crate::choice::Bound;

const CHOICE: &str = "ALLSTREAM_TEST_DRIVER";
const LIBRARY: &str = "ALLSTREAM_CUDA_LIBRARY";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// The one for tests, built if it is not there or is old.
    ForTests,
    /// The machine's, and a device that is fast.
    Real,
    /// Whichever is found, for a short run: nothing that takes long is done.
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

    /// The environment variables that give a process this driver, and an NCCL if `bound` needs one.
    pub(crate) fn variables(self, bound: Bound) -> Vec<(String, String)> {
        let set = |name: &str, value: String| (name.to_owned(), value);
        let file = |name: &str, for_tests: fn() -> &'static Path| match self {
            Driver::ForTests => Some(set(name, for_tests().display().to_string())),
            Driver::Real | Driver::Rehearsal => std::env::var(name).ok().map(|file| set(name, file)),
        };
        let choice = if self == Driver::Real { "real" } else { "rehearsal" };
        let mut all = vec![set(CHOICE, choice.into())];
        all.extend(file(LIBRARY, cuda::library));
        if bound == Bound::Nccl {
            all.extend(file(cuda::NCCL, cuda::nccl_library));
            // Leave to have several ranks on the one device.
            all.push(set("NCCL_MULTI_RANK_GPU_ENABLE", "1".into()));
        }
        all
    }
}
