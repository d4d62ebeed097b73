//! `cargo xtask gpu-pack`: makes one archive with everything to test and measure on a GPU, for a machine that has only the GPU's driver
//! and glibc; and prints the one command that runs it there.

mod elf;
mod prove;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::part::{PACKAGES, TOOLS};
use crate::python;
use crate::runner::{self, target};

pub(crate) use prove::{needs_device, prove, run};

/// At most this many bytes for the archive and the working tree together: both are sent to a lent machine, which accepts 64 MiB.
const MOST: u64 = 60 << 20;
/// The command must have fewer characters: such a machine accepts 2,000.
const LONGEST_COMMAND: usize = 2000;
/// The default folder for the archive.
pub(crate) const FOLDER: &str = ".gpu-pack";
/// The name of the list of the archive's files, which is written beside the archive.
const CONTENTS: &str = "CONTENTS";
const README: &str = include_str!("../../docs/gpu-pack.md");
const ARRAYS: &str = include_str!("../../tests/gpu-pack/python/arrays.py");
/// Options of `cargo build`: the packages (`PACKED`), and the programs that go into the pack (`TARGETS`).
const PACKED: &str = "--package allstream --package allstream-cli --all-features";
const TARGETS: &str = "--bin allstream --test gpu --example 12_gpu --example 13_gpu_overlap";
const BUILD_RUNNER: &str = "build --package gpu-pack";
/// As pip builds the wheel: where pip has built it before, cargo has little left to do.
const BUILD_PYTHON: &str = "build --release --locked --manifest-path ffi/python/Cargo.toml";
/// Tells PyO3 not to link libpython: the interpreter that loads the module provides its functions. maturin sets this variable, too.
const FOR_ANY_PYTHON: (&str, &str) = ("PYO3_BUILD_EXTENSION_MODULE", "1");
/// Each built program, and its place in the pack. The pack with NCCL leaves out `examples/`.
const PROGRAMS: [(&str, &str); 5] = [
    ("gpu-pack", "run"),
    ("allstream", "bin/allstream"),
    ("gpu", "bin/gpu"),
    ("12_gpu", "examples/12_gpu"),
    ("13_gpu_overlap", "examples/13_gpu_overlap"),
];

/// Which pack to make.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// The folder for the archive.
    pub(crate) out: PathBuf,
    /// If given, makes the pack that contains NCCL: the path of its library.
    pub(crate) nccl: Option<PathBuf>,
    /// Leaves the Python package out.
    pub(crate) without_python: bool,
    /// Builds with the profile of tests instead of release, so nothing that this pack measures counts.
    pub(crate) for_rehearsal: bool,
}

impl Wanted {
    fn name(&self) -> &'static str {
        if self.nccl.is_some() { "allstream-gpu-nccl" } else { "allstream-gpu" }
    }

    pub(crate) fn archive(&self) -> PathBuf {
        self.out.join(format!("{}.tar.xz", self.name()))
    }
}

/// The shell command that unpacks and runs the pack on the other machine; `archive` is the archive's path there.
pub(crate) fn command(archive: &Path) -> String {
    let archive = archive.display();
    format!(
        "set -u; d=$(mktemp -d) && {{ tar -xJf '{archive}' -C \"$d\" 2>/dev/null || python3 -m tarfile -e '{archive}' \"$d\"; }} && \
         \"$d/run\" --out \"${{OUT:-.}}\""
    )
}

/// Makes the pack. Returns the text to print: its contents, its sizes and the command.
pub(crate) fn make(root: &Path, wanted: &Wanted) -> Result<String, String> {
    let tree = target(root).join("gpu-pack").join(wanted.name());
    let tell = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    if tree.exists() {
        fs::remove_dir_all(&tree).map_err(|error| tell(&tree, error))?;
    }
    // A rehearsal reuses what the integration tests have built. So it names the same packages: cargo enables the features that any named package asks for.
    let (packages, profile) = match wanted.for_rehearsal {
        true => (format!("{PACKAGES} {TOOLS}"), ""),
        false => (PACKED.to_owned(), " --release"),
    };
    let mut built = build(root, &format!("build {packages} {TARGETS}{profile}"))?;
    built.extend(build(root, &format!("{BUILD_RUNNER}{profile}"))?);
    let mut complaints = Vec::new();
    for (name, place) in PROGRAMS {
        if wanted.nccl.is_some() && place.starts_with("examples/") {
            continue;
        }
        let to = tree.join(place);
        strip(executable(&built, name)?, &to)?;
        complaints.extend(elf::complaints(&to)?);
    }
    if wanted.nccl.is_none() && !wanted.without_python {
        complaints.extend(python_package(root, &tree.join("python"))?);
    }
    if let Some(library) = &wanted.nccl {
        let to = tree.join("nccl/libnccl.so.2");
        put(&to, |to| fs::copy(library, to).map(|_| ())).map_err(|error| tell(library, error))?;
    }
    let readme = tree.join("README.md");
    put(&readme, |to| fs::write(to, README)).map_err(|error| tell(&readme, error))?;

    fs::create_dir_all(&wanted.out).map_err(|error| tell(&wanted.out, error))?;
    let archive = wanted.archive();
    let mut pack = Command::new(executable(&built, "archive")?);
    pack.arg(&tree).arg(&archive);
    done(pack)?;
    let packed = fs::metadata(&archive).map_err(|error| tell(&archive, error))?.len();
    let list = contents(&tree)?;
    let command = command(archive.strip_prefix(root).unwrap_or(&archive));
    complaints.extend(too_much(packed, working_tree(root), command.len()));
    let beside = wanted.out.join(CONTENTS);
    fs::write(&beside, &list).map_err(|error| tell(&beside, error))?;
    if !complaints.is_empty() {
        return Err(format!("{}\n{list}", complaints.join("\n")));
    }
    let sizes = format!(
        "{packed:>10}  {} (of {MOST} that it and the working tree may have together)",
        archive.display()
    );
    Ok(format!(
        "{list}{sizes}\ncarry {} there, and run in the folder from which its path leads to it:\n\n{command}\n",
        archive.display()
    ))
}

/// Complaints about sizes: bytes of the archive and of the working tree, and characters of the command.
fn too_much(packed: u64, tree: Option<u64>, command: usize) -> Vec<String> {
    let mut complaints = Vec::new();
    if packed + tree.unwrap_or(0) > MOST {
        let tree = tree.map_or("an unknown number of".into(), |bytes| bytes.to_string());
        complaints.push(format!(
            "the archive has {packed} bytes and the working tree {tree}; together at most {MOST} travel"
        ));
    }
    if command >= LONGEST_COMMAND {
        complaints.push(format!(
            "the command has {command} characters, and must have fewer than {LONGEST_COMMAND}"
        ));
    }
    complaints
}

/// Bytes of the files of the working tree that are sent: those that git tracks, and untracked ones that it does not ignore. `None`: git failed.
fn working_tree(root: &Path) -> Option<u64> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .stdin(Stdio::null());
    let output = git.output().ok().filter(|output| output.status.success())?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let size = |name: &str| fs::symlink_metadata(root.join(name)).map_or(0, |about| about.len());
    Some(names.split('\0').filter(|name| !name.is_empty()).map(size).sum())
}

/// The files of the pack with their sizes.
fn contents(tree: &Path) -> Result<String, String> {
    let (mut list, mut folders) = (Vec::new(), vec![tree.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        let entries = folder.read_dir().map_err(|error| format!("{}: {error}", folder.display()))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes =
                    fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?.len();
                list.push((path.strip_prefix(tree).unwrap_or(&path).display().to_string(), bytes));
            }
        }
    }
    list.sort();
    let total: u64 = list.iter().map(|(_, bytes)| bytes).sum();
    let lines = list.iter().map(|(name, bytes)| format!("{bytes:>10}  {name}\n"));
    Ok(lines.collect::<String>() + &format!("{total:>10}  bytes, before they are packed\n"))
}

/// Writes the package as pip would install it, for every Python from 3.10 on. Returns complaints: what it needs that a machine may not have.
fn python_package(root: &Path, folder: &Path) -> Result<Vec<String>, String> {
    let built = build(root, BUILD_PYTHON)?;
    let package = folder.join("allstream");
    let copied = python::copy(&root.join("ffi/python/python/allstream"), &package);
    copied.map_err(|error| format!("copying the Python package: {error}"))?;
    let module = package.join("_native.abi3.so");
    strip(executable(&built, "_native")?, &module)?;
    let script = folder.join("arrays.py");
    fs::write(&script, ARRAYS).map_err(|error| format!("{}: {error}", script.display()))?;
    elf::complaints(&module)
}

fn executable<'a>(built: &'a [(String, PathBuf)], name: &str) -> Result<&'a Path, String> {
    let found = built.iter().find(|(target, _)| target == name);
    found.map(|(_, file)| file.as_path()).ok_or_else(|| format!("cargo tells of no executable {name}"))
}

/// Runs cargo with these arguments. Returns the executables and shared libraries that it built: the name of the target, and the file.
fn build(root: &Path, arguments: &str) -> Result<Vec<(String, PathBuf)>, String> {
    let mut cargo = Command::new(runner::cargo());
    cargo.args(arguments.split_whitespace()).args(["--message-format", "json-render-diagnostics"]);
    cargo.current_dir(root).envs([FOR_ANY_PYTHON]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = cargo.spawn().map_err(|error| format!("cargo: {error}"))?;
    let lines = child.stdout.take().map(|stdout| BufReader::new(stdout).lines().map_while(Result::ok));
    let built = lines.into_iter().flatten().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(&line).ok()?;
        let library = || {
            message
                .get("filenames")?
                .as_array()?
                .iter()
                .filter_map(|file| file.as_str())
                .find(|file| file.ends_with(".so"))
        };
        let file = message.get("executable").and_then(|file| file.as_str()).or_else(library)?;
        Some((message.get("target")?.get("name")?.as_str()?.to_owned(), PathBuf::from(file)))
    });
    let built = built.collect();
    match child.wait() {
        Ok(status) if status.success() => Ok(built),
        Ok(status) => Err(format!("cargo {arguments}: {status}")),
        Err(error) => Err(format!("cargo: {error}")),
    }
}

/// Writes a file, and makes its folder first if it does not exist.
fn put(to: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> std::io::Result<()> {
    to.parent().map_or(Ok(()), fs::create_dir_all)?;
    write(to)
}

/// Copies a program without its debug information. The names of functions stay, as the stacks of a step that hangs show them.
fn strip(from: &Path, to: &Path) -> Result<(), String> {
    put(to, |_| Ok(())).map_err(|error| format!("{}: {error}", to.display()))?;
    let tool = std::env::var_os("STRIP").unwrap_or_else(|| "strip".into());
    let mut strip = Command::new(&tool);
    strip.arg("--strip-debug").arg("-o").arg(to).arg(from);
    done(strip).map_err(|error| {
        format!("{error}; strip comes with the linker (binutils), and STRIP names another one")
    })
}

fn done(mut command: Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name}: {status}")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_travel_is_told_with_its_sizes() {
        assert_eq!(too_much(50 << 20, Some(10 << 20), 1999), [""; 0]);
        let complaints = too_much(50 << 20, Some((10 << 20) + 1), 2000);
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[0].contains("52428800") && complaints[0].contains("10485761"), "{complaints:?}");
    }

    #[test]
    fn the_command_unpacks_by_tar_or_python_and_keeps_to_out() {
        let text = command(Path::new(".gpu-pack/a.tar.xz"));
        assert!(text.len() < LONGEST_COMMAND / 4, "{text}");
        for part in ["tar -xJf '.gpu-pack/a.tar.xz'", "python3 -m tarfile -e", "--out \"${OUT:-.}\""] {
            assert!(text.contains(part), "{text}");
        }
    }
}
