//! The `allstream` command inside the interpreter.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with these arguments; its exit code. `words`, an interpreter and a script by absolute paths, start it again.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, words: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| allstream_cli::main_as(words, arguments).0)
}
