//! The end of the interpreter.

use std::time::Duration;

use pyo3::prelude::*;

use crate::callbacks;
use crate::keeper;

/// How often it asks whether callbacks still run.
const CALLED: Duration = Duration::from_millis(2);

/// Called when the interpreter ends: waits for the Python that threads of ours run, without the GIL, which they need. As with Python's own
/// threads, Ctrl-C ends the wait.
///
/// # Errors
/// What the handler of a signal raises.
#[pyfunction]
#[pyo3(name = "_interpreter_ends")]
pub(crate) fn interpreter_ends(py: Python<'_>) -> PyResult<()> {
    if keeper::is_forked() {
        // The threads are the parent's.
        return Ok(());
    }
    // First the keeper does all that was left for it: it records how operations ended, which a stream's thread may wait for.
    keeper::finish(py)?;
    // Then callbacks, which may wait for what the keeper records meanwhile.
    while callbacks::are_running() {
        py.detach(|| std::thread::sleep(CALLED));
        py.check_signals()?;
    }
    keeper::close(py)
}
