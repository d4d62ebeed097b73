//! Finds the programs to measure: our binaries, which it builds, OpenMPI, and a Python with torch. Installs what is missing, where that is possible.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::PeersArgs;
use super::child;
use crate::packages;

const MINUTE: Duration = Duration::from_secs(60);

/// The programs to run.
#[derive(Debug)]
pub(crate) struct Tools {
    /// `allstream`, and the program of `benches/limits.rs`.
    pub(crate) ours: PathBuf,
    pub(crate) limits: PathBuf,
    /// The error says why it is left out.
    pub(crate) mpi: Result<Mpi, String>,
    pub(crate) gloo: Result<Gloo, String>,
}

#[derive(Debug)]
pub(crate) struct Mpi {
    pub(crate) mpirun: OsString,
    /// `benches/peers/mpi_collectives.c`, compiled.
    pub(crate) program: PathBuf,
    pub(crate) version: String,
}

#[derive(Debug)]
pub(crate) struct Gloo {
    pub(crate) python: OsString,
    pub(crate) version: String,
}

/// Builds our programs, and finds or installs the others. `scratch` is a temporary folder.
pub(crate) fn tools(args: &PeersArgs, root: &Path, scratch: &Path) -> Result<Tools, String> {
    let (ours, limits) = build(root, scratch)?;
    Ok(Tools {
        ours,
        limits,
        mpi: mpi(args, root, scratch).inspect_err(|why| eprintln!("{why}")),
        gloo: gloo(args, root, scratch).inspect_err(|why| eprintln!("{why}")),
    })
}

/// What a command printed on stdout; if it failed, an error that says how.
fn said(command: &mut Command, limit: Duration, scratch: &Path) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let end = child::run(command, limit, scratch).map_err(|error| format!("{program}: {error}"))?;
    match end.failure(limit) {
        Some(failure) => Err(format!("{program}: {failure}")),
        None => Ok(end.stdout),
    }
}

fn build(root: &Path, scratch: &Path) -> Result<(PathBuf, PathBuf), String> {
    eprintln!("building, in release: minutes, the first time");
    let mut cargo = Command::new(crate::runner::cargo());
    cargo.current_dir(root).args(["build", "--release", "--bin", "allstream", "--bench", "limits"]);
    let messages = said(cargo.arg("--message-format=json-render-diagnostics"), 60 * MINUTE, scratch)?;
    let built = |name| executable(&messages, name).ok_or_else(|| format!("cargo built no {name}"));
    Ok((built("allstream")?, built("limits")?))
}

/// The path of a target's executable in cargo's messages.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter(|message| message["reason"] == "compiler-artifact" && message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

fn mpi(args: &PeersArgs, root: &Path, scratch: &Path) -> Result<Mpi, String> {
    let (mpirun, mpicc, version) = match find_mpi(scratch) {
        Some(found) => found,
        None => {
            install_mpi(args, scratch)?;
            find_mpi(scratch).ok_or("OpenMPI is not there after its installation: left out")?
        }
    };
    let program = scratch.join("mpi_collectives");
    let mut compiler = Command::new(mpicc);
    compiler.arg("-O2").arg(root.join("benches/peers/mpi_collectives.c")).arg("-o").arg(&program);
    said(&mut compiler, 2 * MINUTE, scratch)
        .map_err(|error| format!("the program for OpenMPI does not compile: left out: {error}"))?;
    Ok(Mpi { mpirun, program, version })
}

/// mpirun, mpicc and the version, of the first pair that is OpenMPI's: other MPIs have commands with the same names.
fn find_mpi(scratch: &Path) -> Option<(OsString, OsString, String)> {
    let named = std::env::var_os("MPIRUN").zip(std::env::var_os("MPICC"));
    let usual = [("mpirun.openmpi", "mpicc.openmpi"), ("mpirun", "mpicc")];
    let pairs = named.into_iter().chain(usual.map(|(run, cc)| (run.into(), cc.into())));
    pairs.into_iter().find_map(|(mpirun, mpicc)| {
        let version = said(Command::new(&mpirun).arg("--version"), MINUTE, scratch).ok()?;
        said(Command::new(&mpicc).arg("--version"), MINUTE, scratch).ok()?;
        let version = version.lines().find(|line| line.contains("Open MPI"))?;
        Some((mpirun, mpicc, version.trim().to_owned()))
    })
}

const MPI_PACKAGES: [&str; 2] = ["openmpi-bin", "libopenmpi-dev"];

fn install_mpi(args: &PeersArgs, scratch: &Path) -> Result<(), String> {
    let what = format!("OpenMPI is not installed: left out. Its packages are {}", MPI_PACKAGES.join(" and "));
    if args.no_install {
        return Err(format!("{what} (--no-install)"));
    }
    eprintln!("installing {}", MPI_PACKAGES.join(" and "));
    let run = |mut command: Command| said(&mut command, 20 * MINUTE, scratch).map(drop);
    packages::install(&MPI_PACKAGES, run).map_err(|why| format!("{what}; {why}"))
}

fn gloo(args: &PeersArgs, root: &Path, scratch: &Path) -> Result<Gloo, String> {
    let folder = crate::runner::target(root).join("peers/venv");
    let in_folder = folder.join("bin/python");
    let named = args.python.clone().or_else(|| std::env::var_os("PYTHON").map(PathBuf::from));
    let candidates = match named {
        Some(python) => vec![python],
        None => vec![in_folder.clone(), "python3".into()],
    };
    if let Some(found) = candidates.into_iter().find_map(|python| torch(python.into(), scratch).ok()) {
        return Ok(found);
    }
    if !args.torch || args.no_install {
        // The text names no path of this machine, as it goes into a table that is committed.
        return Err("No Python here has torch with Gloo: left out. `--torch` installs it under target/; `--python` names \
                    one that has it"
            .into());
    }
    eprintln!("installing torch under {}", folder.display());
    let installed = said(Command::new("python3").args(["-m", "venv"]).arg(&folder), 5 * MINUTE, scratch)
        .and_then(|_| {
            let mut pip = Command::new(&in_folder);
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "torch", "numpy"]);
            pip.args(args.torch_index.iter().flat_map(|index| ["--index-url", index.as_str()]));
            said(&mut pip, 30 * MINUTE, scratch)
        });
    installed.map_err(|error| format!("torch cannot be installed: left out: {error}"))?;
    torch(in_folder.into(), scratch).map_err(|error| format!("torch does not work: left out: {error}"))
}

fn torch(python: OsString, scratch: &Path) -> Result<Gloo, String> {
    const ASK: &str = "import torch, torch.distributed as d; assert d.is_gloo_available(), 'torch without Gloo'; \
                       print(torch.__version__)";
    let version = said(Command::new(&python).args(["-c", ASK]), 2 * MINUTE, scratch)?;
    Ok(Gloo { python, version: version.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_says_where_a_program_is() {
        let messages = "warning: no json\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"allstream\"},\"executable\":null}\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"allstream\"},\"executable\":\"/t/allstream\"}\n\
            {\"reason\":\"build-finished\",\"success\":true}";
        assert_eq!(executable(messages, "allstream"), Some("/t/allstream".into()));
        assert_eq!(executable(messages, "limits"), None);
    }
}
