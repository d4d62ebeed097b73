//! Installs packages of the operating system, where that is possible.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::journal::{Counts, Report};
use crate::part::Ran;
use crate::runner::{execute, say};

/// Programs that some tests use if they are installed, and the packages that have them: an ssh server, and other launchers of ranks.
const FOR_TESTS: [(&str, &str); 4] = [
    ("sshd", "openssh-server"),
    ("mpirun.openmpi", "openmpi-bin"),
    ("mpiexec.hydra", "mpich"),
    ("slurmctld", "slurm-wlm"),
];

/// Installs packages with apt-get, if this process is root. `run` runs one command, and returns what went wrong.
pub(crate) fn install(
    packages: &[&str],
    mut run: impl FnMut(Command) -> Result<(), String>,
) -> Result<(), String> {
    let what = packages.join(" and ");
    let mut apt = |arguments: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive").args(arguments);
        run(apt)
    };
    if apt(&["--version"]).is_err() {
        return Err(format!("there is no apt-get to install {what} with"));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(format!("as root, {what} would have been installed"));
    }
    let install: Vec<_> =
        ["install", "-y", "--no-install-recommends"].iter().chain(packages).copied().collect();
    // apt-get's lists of packages may be old or missing: then they are fetched, and the installation is tried again.
    apt(&install)
        .or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
        .map_err(|error| format!("{what} cannot be installed: {error}"))
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.any(|folder| folder.join(program).is_file())
}

/// A part that installs the packages of [`FOR_TESTS`] that are missing. A package that cannot be installed fails nothing: the tests that need it are skipped.
pub(crate) fn for_tests(root: &Path, limit: Duration) -> Ran {
    let missing: Vec<&str> =
        FOR_TESTS.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect();
    let mut counts = Counts::default();
    let mut words = Vec::new();
    for package in missing {
        let installed = install(&[package], |command| {
            let end = execute(command, root, limit, false);
            if end.code() == Some(0) { Ok(()) } else { Err(format!("apt-get: {}", end.how())) }
        });
        match installed {
            Ok(()) => words.push(format!("installed {package}")),
            Err(why) => {
                counts.skipped += 1;
                words.push(why);
            }
        }
    }
    counts.passed += FOR_TESTS.len() as u64 - counts.skipped;
    words.iter().for_each(|line| say(line));
    Ran(if words.is_empty() { "all there".into() } else { words.join("; ") }, counts, Report::default())
}
