//! Checks the packages that would be published, from their packed files alone: so a file that a package lacks is noticed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::part::{OURS_ALONE, Ran};
use crate::runner;

/// Packs the packages, unpacks them as a workspace of their own in cargo's target folder, and runs `cargo check` on it. (The verification by `cargo package`
/// itself would build each package and its dependencies once more, which takes minutes.) The new workspace has the repository's lock file,
/// profiles and target directory, so dependencies that clippy has checked before are not checked again.
pub(crate) fn check(root: &Path, limit: Duration) -> Ran {
    let end = Instant::now() + limit;
    let run = |command: Command| {
        let left = end.saturating_duration_since(Instant::now());
        runner::outcome(runner::execute(command, root, left, true), left)
    };
    let cargo = |arguments: &str| {
        let mut cargo = Command::new(runner::cargo());
        cargo.args(arguments.split_whitespace()).env("CARGO_INCREMENTAL", "0");
        cargo
    };
    let target = runner::target(root);
    let folder = target.join("packages");
    let failed = |why| Ran::failed(why, Vec::new());
    if folder.exists()
        && let Err(error) = fs::remove_dir_all(&folder)
    {
        return failed(format!("{}: {error}", folder.display()));
    }
    // `--allow-dirty`: uncommitted changes are checked, too.
    let mut pack =
        cargo(&format!("package --workspace {OURS_ALONE} --allow-dirty --no-metadata --no-verify"));
    pack.arg("--target-dir").arg(&folder);
    let ran = run(pack);
    if ran.1.failed > 0 {
        return ran;
    }
    let unpacked = folder.join("unpacked");
    let names = match unpack(&folder.join("package"), &unpacked) {
        Ok(names) => names,
        Err(error) => return failed(error),
    };
    if let Err(error) = workspace(root, &unpacked, &names) {
        return failed(format!("{}: {error}", unpacked.display()));
    }
    let mut check = cargo("check --workspace");
    check.arg("--target-dir").arg(&target).arg("--manifest-path").arg(unpacked.join("Cargo.toml"));
    run(check)
}

/// Unpacks what cargo has packed. Returns the names of the unpacked folders: each is a package's name and version.
fn unpack(packed: &Path, to: &Path) -> Result<Vec<String>, String> {
    let tell = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(to).map_err(|error| tell(to, error))?;
    let files = packed.read_dir().map_err(|error| tell(packed, error))?.flatten().map(|entry| entry.path());
    let mut crates: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|end| end == "crate")).collect();
    crates.sort();
    if crates.is_empty() {
        return Err(format!("{}: cargo has packed no package there", packed.display()));
    }
    for file in &crates {
        // `-m` sets the files' time of change to now: cargo packs them with a time long ago, and would take them for files that it checked before.
        let status = Command::new("tar").arg("-xzmf").arg(file).arg("-C").arg(to).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => return Err(format!("tar -xzmf {}: {status}", file.display())),
            Err(error) => return Err(format!("tar: {error}")),
        }
    }
    let name = |file: &PathBuf| Some(file.file_stem()?.to_str()?.to_owned());
    crates.iter().map(|file| name(file).ok_or_else(|| format!("{}: no name", file.display()))).collect()
}

/// The package's name in the name of a folder that cargo has packed, which the version follows. Names and versions may both have hyphens
/// (`allstream-cli-0.2.0-rc.1`); a version begins with three numbers.
fn package(folder: &str) -> Option<&str> {
    let is_version = |text: &str| {
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        numbers.split('.').count() == 3 && numbers.split('.').all(|number| number.parse::<u64>().is_ok())
    };
    let at = folder.match_indices('-').map(|(at, _)| at).find(|at| is_version(&folder[at + 1..]))?;
    Some(&folder[..at])
}

/// Makes a workspace of the unpacked packages, in which they depend on each other and not on those of the registry.
fn workspace(root: &Path, folder: &Path, names: &[String]) -> std::io::Result<()> {
    let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
    let profiles = manifest.split("\n[").filter(|table| table.starts_with("profile.dev"));
    let profiles: String = profiles.map(|table| format!("[{table}\n")).collect();
    let place = |folder: &String| {
        let name = package(folder).ok_or_else(|| format!("`{folder}` is no package's name and version"));
        name.map(|name| format!("{name} = {{ path = {folder:?} }}\n")).map_err(std::io::Error::other)
    };
    let places = names.iter().map(place).collect::<std::io::Result<String>>()?;
    fs::write(
        folder.join("Cargo.toml"),
        format!(
            "[workspace]\nmembers = [\"*\"]\nresolver = \"3\"\n\n[patch.crates-io]\n{places}\n{profiles}"
        ),
    )?;
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_package_is_told_from_its_version() {
        for (folder, name) in [
            ("allstream-0.1.0", Some("allstream")),
            ("allstream-cli-0.1.0", Some("allstream-cli")),
            ("allstream-cli-0.2.0-rc.1", Some("allstream-cli")),
            ("x-2d-1.0.0+a-1.2.3", Some("x-2d")),
            ("allstream", None),
            ("allstream-0.1", None),
        ] {
            assert_eq!(package(folder), name, "{folder}");
        }
    }
}
