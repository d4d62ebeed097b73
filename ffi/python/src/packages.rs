//! Looks for NCCL in the folders in which the interpreter finds packages.

use std::path::{Path, PathBuf};

use allstream_sys::nccl::look_in_packages;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// Tells `allstream_sys` to look for NCCL in the interpreter's package folders. torch finds its NCCL there, and a process can have only one
/// NCCL: the one that is loaded first.
pub(crate) fn tell_of_nccl(py: Python<'_>) {
    let path = py.import("sys").and_then(|sys| sys.getattr("path"));
    let Ok(path) = path.and_then(|path| Ok(path.cast_into::<PyList>()?)) else { return };
    let entries = path.iter().filter_map(|entry| entry.extract::<PathBuf>().ok());
    // Other entries of `sys.path` are of the standard library or of the program: leave them out, so that no error lists them as places searched.
    look_in_packages(entries.filter(|folder| is_of_packages(folder)));
}

fn is_of_packages(folder: &Path) -> bool {
    let is_named = folder.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages");
    is_named || folder.join("nvidia/nccl").is_dir()
}
