//! Waits for allstream's threads when the Python interpreter ends.

use std::time::Duration;

use pyo3::prelude::*;

use crate::callbacks;
use crate::keeper;

/// How often [`interpreter_ends`] checks whether callbacks still run.
const CALLED: Duration = Duration::from_millis(2);

/// Called when the interpreter ends. Waits until allstream's threads run no Python code any more, and releases the GIL meanwhile, as they
/// need it. Ctrl-C ends the wait, as it does for Python's own threads.
///
/// # Errors
/// The exception that a signal handler has raised.
#[pyfunction]
#[pyo3(name = "_interpreter_ends")]
pub(crate) fn interpreter_ends(py: Python<'_>) -> PyResult<()> {
    if keeper::is_forked() {
        // A forked child has none of allstream's threads.
        return Ok(());
    }
    // First, wait until the keeper's thread has done its tasks: it records how operations ended, and a stream's thread may wait for that.
    keeper::finish(py)?;
    // Then wait for callbacks, which may wait for operations whose end the keeper records meanwhile.
    while callbacks::are_running() {
        py.detach(|| std::thread::sleep(CALLED));
        py.check_signals()?;
    }
    keeper::close(py)
}
