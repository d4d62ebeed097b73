//! The `allstream` command inside the interpreter.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with these arguments, and returns its exit code. `words` are the absolute paths of an interpreter and a script: followed by
/// arguments, they are the command line by which the command starts itself again.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, words: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| allstream_cli::main_as(words, arguments).0)
}
