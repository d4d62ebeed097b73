//! Which CUDA driver the ranks get.

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
                let library = test_support::cuda::library().display().to_string();
                return vec![set(LIBRARY, library), set(CHOICE, "rehearsal".into())];
            }
            Driver::Real => "real",
            Driver::Rehearsal => "rehearsal",
        };
        let library = std::env::var(LIBRARY).ok().map(|file| set(LIBRARY, file));
        library.into_iter().chain([set(CHOICE, choice.into())]).collect()
    }
}
