//! Where NCCL is looked for.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::LIBRARY_VARIABLE;
use crate::library::{is_loaded, named_by};

/// The path of the library in a folder of Python packages, if pip has installed it (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`) there.
const OF_PIP: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The package folders of the Python interpreter that runs, in the order in which it searches them. Empty in other programs.
static PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Adds folders of Python packages (`site-packages`) in which pip may have installed NCCL. allstream's Python package calls this with the
/// folders of the interpreter that runs it, before anybody asks for the library.
pub fn look_in_packages(folders: impl IntoIterator<Item = PathBuf>) {
    let mut packages = PACKAGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for folder in folders {
        if !packages.contains(&folder) {
            packages.push(folder);
        }
    }
}

/// The files to be tried, in order.
pub(super) fn files() -> Vec<String> {
    let packages = PACKAGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    listed(named_by, &packages, is_loaded(c"libnccl.so.2"))
}

/// The files to be tried, given the environment's variables, the package folders of the Python interpreter that runs, and whether the
/// process has loaded a `libnccl.so.2` already.
///
/// A process has one `libnccl.so.2`: whoever asks for that name gets the file that was loaded first. So in an interpreter the file that torch
/// would load comes before the system's, which may be too old for torch.
fn listed(variable: impl Fn(&str) -> Option<String>, packages: &[PathBuf], is_loaded: bool) -> Vec<String> {
    if let Some(named) = variable(LIBRARY_VARIABLE) {
        return vec![named];
    }
    let usual = PathBuf::from("libnccl.so.2");
    let of_python = packages.iter().map(|folder| folder.join(OF_PIP));
    let mut all: Vec<PathBuf> = of_python.collect();
    all.insert(if is_loaded { 0 } else { all.len() }, usual);
    let environment = |name: &str| variable(name).map(PathBuf::from);
    if let Some(conda) = environment("CONDA_PREFIX") {
        // Conda's own package.
        all.push(conda.join("lib/libnccl.so.2"));
    }
    for home in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(environment) {
        all.extend(package_folders(&home).into_iter().map(|folder| folder.join(OF_PIP)));
    }
    let mut files: Vec<String> = Vec::new();
    for file in all {
        let file = file.to_string_lossy().into_owned();
        if !files.contains(&file) {
            files.push(file);
        }
    }
    files
}

/// The folders of packages of a Python environment: one for each version of Python in it.
fn package_folders(home: &Path) -> Vec<PathBuf> {
    let entries = home.join("lib").read_dir().into_iter().flatten().flatten();
    let is_python =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
    let pythons = entries.map(|entry| entry.path()).filter(is_python);
    let mut folders: Vec<PathBuf> =
        pythons.map(|python| python.join("site-packages")).filter(|folder| folder.is_dir()).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment of Python for this test alone, with one version of Python.
    fn home(name: &str) -> PathBuf {
        let home = std::env::temp_dir().join(format!("allstream-sys-{name}-{}", std::process::id()));
        std::fs::create_dir_all(home.join("lib/python3.12/site-packages")).unwrap();
        std::fs::create_dir_all(home.join("lib/pkgconfig")).unwrap();
        home
    }

    #[test]
    fn what_is_named_is_tried_alone_and_else_every_place_in_order() {
        let (venv, conda) = (home("venv"), home("conda"));
        let [v, c] = [&venv, &conda].map(|home| home.display().to_string());
        let both = |name: &str| match name {
            "VIRTUAL_ENV" => Some(v.clone()),
            "CONDA_PREFIX" => Some(c.clone()),
            _ => None,
        };
        let packages = [PathBuf::from("/py/site-packages"), venv.join("lib/python3.12/site-packages")];
        let of_pip = |folder: &str| format!("{folder}/site-packages/{OF_PIP}");
        let (own, of_venv) = (of_pip("/py"), of_pip(&format!("{v}/lib/python3.12")));
        let of_conda = [format!("{c}/lib/libnccl.so.2"), of_pip(&format!("{c}/lib/python3.12"))];
        let usual = "libnccl.so.2".to_owned();

        let [conda_s, conda_pip] = of_conda.clone();
        let program = [usual.clone(), conda_s.clone(), of_venv.clone(), conda_pip.clone()];
        assert_eq!(listed(both, &[], false), program);
        let python = [own.clone(), of_venv.clone(), usual.clone(), conda_s.clone(), conda_pip.clone()];
        assert_eq!(listed(both, &packages, false), python);
        assert_eq!(listed(both, &packages, true), [usual.clone(), own, of_venv, conda_s, conda_pip]);
        assert_eq!(listed(|_| None, &[], false), [usual]);
        let named = |name: &str| if name == LIBRARY_VARIABLE { Some("/a/b.so".into()) } else { both(name) };
        assert_eq!(listed(named, &packages, true), ["/a/b.so"]);
        for home in [venv, conda] {
            std::fs::remove_dir_all(home).unwrap();
        }
    }
}
