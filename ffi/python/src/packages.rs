//! What lies beside this package in the interpreter's folders of packages.

use std::path::{Path, PathBuf};

use allstream_sys::nccl::look_in_packages;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// Has NCCL looked for in the folders in which this interpreter looks for packages. torch finds its NCCL there, and a process has one: that
/// of whoever loads it first.
pub(crate) fn tell_of_nccl(py: Python<'_>) {
    let path = py.import("sys").and_then(|sys| sys.getattr("path"));
    let Ok(path) = path.and_then(|path| Ok(path.cast_into::<PyList>()?)) else { return };
    let entries = path.iter().filter_map(|entry| entry.extract::<PathBuf>().ok());
    // Others have parts of the standard library, or a program's own modules, and nobody wants to read of them in an error.
    look_in_packages(entries.filter(|folder| is_of_packages(folder)));
}

fn is_of_packages(folder: &Path) -> bool {
    let is_named = folder.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages");
    is_named || folder.join("nvidia/nccl").is_dir()
}
