//! `cargo xtask kernels`: the PTX and the machine code of the CUDA kernels, made with pinned tools and checked without a GPU.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::house::Check;
use crate::runner::target;

/// The packages with NVRTC, ptxas and nvdisasm, fetched from the Python package index. This NVRTC writes PTX ISA 8.1, which every
/// driver since CUDA 12.1 accepts; this ptxas knows all [`ARCHITECTURES`].
const PACKAGES: [&str; 3] =
    ["nvidia-cuda-nvrtc-cu12==12.1.105", "nvidia-cuda-nvcc-cu12==12.8.93", "nvidia-cuda-nvdisasm==13.5.37"];
/// The architectures that the check assembles the PTX for.
const ARCHITECTURES: [u32; 5] = [75, 80, 90, 100, 120];
/// The architectures that machine code is committed for. On GPUs of another major version the driver compiles the PTX, which takes seconds.
const SHIPPED: [u32; 3] = [80, 90, 100];
/// The architecture whose machine code is disassembled.
const DISASSEMBLED: u32 = 90;
/// Kernels whose names begin with one of these must read and write global memory in vectors of 16 bytes.
const VECTORISED: [&str; 4] = ["combine2_", "combinen_", "scale_", "copy_"];

const NVRTC: &str = include_str!("nvrtc.py");

/// The fetched tools.
struct Tools {
    script: PathBuf,
    nvrtc: PathBuf,
    ptxas: PathBuf,
    nvdisasm: PathBuf,
}

/// Writes the PTX and the machine code that are committed.
pub(crate) fn generate(root: &Path) -> Result<(), String> {
    let tools = tools(root)?;
    let to = committed(root);
    // The PTX of a module that no longer exists must not stay.
    for (name, _) in read_ptx(&to)? {
        fs::remove_file(to.join(&name)).map_err(|error| format!("{name}: {error}"))?;
    }
    compile(&tools, root, &to)?;
    let modules = read_ptx(&to)?;
    for (name, text) in &modules {
        println!("{name:12} {:3} kernels  {:7} bytes", entries(text).count(), text.len());
    }
    for architecture in SHIPPED {
        let folder = machine_code(root, architecture);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mut bytes = 0;
        for name in modules.keys() {
            let (made, _) = cubin(&tools, root, name, architecture, &[])?;
            let to = folder.join(name).with_extension("cubin");
            bytes += fs::copy(&made, &to).map_err(|error| format!("{}: {error}", to.display()))?;
        }
        println!("machine code for sm_{architecture}: {bytes} bytes");
    }
    Ok(())
}

/// Why the check cannot run here, if it cannot.
pub(crate) fn needs(root: &Path) -> Result<(), String> {
    tools(root).map(|_| ())
}

/// Compares the committed PTX and machine code with what the sources give, assembles the PTX, and disassembles the result.
pub(crate) fn check(root: &Path) -> Vec<Check> {
    match tools(root) {
        Ok(tools) => vec![
            ("the committed PTX is what the sources give", complaints(compare(&tools, root))),
            (
                "the committed machine code is what the PTX gives",
                complaints(compare_machine_code(&tools, root)),
            ),
            ("no kernel spills or has local memory", complaints(assemble(&tools, root))),
            ("kernels read and write 16 bytes at a time", complaints(disassemble(&tools, root))),
        ],
        Err(error) => vec![("the tools for CUDA kernels are here", vec![error])],
    }
}

fn complaints(found: Result<Vec<String>, String>) -> Vec<String> {
    found.unwrap_or_else(|error| vec![error])
}

fn committed(root: &Path) -> PathBuf {
    root.join("kernels/cuda/ptx")
}

fn machine_code(root: &Path, architecture: u32) -> PathBuf {
    root.join(format!("kernels/cuda/sm_{architecture}"))
}

fn work(root: &Path) -> PathBuf {
    target(root).join("cuda-kernels")
}

/// Finds the tools; fetches them if the folder for these versions is not there.
fn tools(root: &Path) -> Result<Tools, String> {
    let versions: Vec<&str> = PACKAGES.iter().filter_map(|package| package.split("==").nth(1)).collect();
    let home = work(root).join(format!("tools-{}", versions.join("-")));
    let pip = python(&["-m", "pip", "--version"])?;
    if !home.is_dir() {
        run(pip, "python3 has no pip (`python3 -m pip --version`)")?;
        // Installed under another name, and renamed when complete: so a folder with the final name is complete.
        let partial = home.with_extension(format!("partial-{}", std::process::id()));
        let target = partial.to_string_lossy().into_owned();
        let mut install = vec!["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
        install.extend(["--only-binary=:all:", "--retries=1", "--target", &target]);
        install.extend(PACKAGES);
        let installed =
            run(python(&install)?, &format!("pip cannot install {} (no registry?)", PACKAGES.join(", ")));
        let moved = installed.and_then(|_| {
            fs::rename(&partial, &home).map_err(|error| format!("{}: {error}", home.display()))
        });
        if let Err(error) = moved {
            let _ = fs::remove_dir_all(&partial);
            return Err(error);
        }
    }
    let script = work(root).join("nvrtc.py");
    fs::write(&script, NVRTC).map_err(|error| format!("{}: {error}", script.display()))?;
    Ok(Tools {
        script,
        nvrtc: find(&home, "libnvrtc.so.12")?,
        ptxas: find(&home, "ptxas")?,
        nvdisasm: find(&home, "nvdisasm")?,
    })
}

fn python(arguments: &[&str]) -> Result<Command, String> {
    let mut python = Command::new("python3");
    match Command::new("python3").arg("--version").stdin(Stdio::null()).output() {
        Ok(_) => python.args(arguments),
        Err(error) => return Err(format!("no python3: {error}")),
    };
    Ok(python)
}

/// The file with this name, somewhere below the folder `at`.
fn find(at: &Path, name: &str) -> Result<PathBuf, String> {
    let mut folders = vec![at.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for path in folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|found| found == name) {
                return Ok(path);
            }
        }
    }
    Err(format!("no {name} in {}: remove that folder, and it is fetched again", at.display()))
}

/// What a command says on both its outputs; an error if it fails.
fn run(mut command: Command, failure: &str) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{failure}: {error}"))?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(text) } else { Err(format!("{failure}: {}", text.trim())) }
}

fn compile(tools: &Tools, root: &Path, to: &Path) -> Result<(), String> {
    let mut python = python(&[])?;
    python.arg(&tools.script).arg(&tools.nvrtc).arg(root.join("kernels/cuda")).arg(to);
    run(python, "the kernels do not compile").map(|_| ())
}

/// The `.ptx` files of a folder, by name.
fn read_ptx(folder: &Path) -> Result<BTreeMap<String, String>, String> {
    let read = || -> io::Result<BTreeMap<String, String>> {
        let mut files = BTreeMap::new();
        for entry in folder.read_dir()? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "ptx") {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                files.insert(name, fs::read_to_string(&path)?);
            }
        }
        Ok(files)
    };
    read().map_err(|error| format!("{}: {error}", folder.display()))
}

fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines().filter_map(|line| line.strip_prefix(".visible .entry ")?.strip_suffix('('))
}

fn compare(tools: &Tools, root: &Path) -> Result<Vec<String>, String> {
    let fresh = work(root).join("ptx");
    let _ = fs::remove_dir_all(&fresh);
    compile(tools, root, &fresh)?;
    let (here, fresh) = (read_ptx(&committed(root))?, read_ptx(&fresh)?);
    let names: BTreeMap<&String, ()> = here.keys().chain(fresh.keys()).map(|name| (name, ())).collect();
    let differ = names.into_keys().filter(|name| here.get(*name) != fresh.get(*name));
    Ok(differ
        .map(|name| format!("kernels/cuda/ptx/{name} is out of date: run `cargo xtask kernels`"))
        .collect())
}

fn compare_machine_code(tools: &Tools, root: &Path) -> Result<Vec<String>, String> {
    let mut complaints = Vec::new();
    let modules = read_ptx(&committed(root))?;
    for architecture in SHIPPED {
        let folder = machine_code(root, architecture);
        let there = folder.read_dir().map_or(0, Iterator::count);
        if there != modules.len() {
            complaints.push(format!("{}: {there} files, expected {}", folder.display(), modules.len()));
        }
        for name in modules.keys() {
            let (made, _) = cubin(tools, root, name, architecture, &[])?;
            let here = folder.join(name).with_extension("cubin");
            if fs::read(&made).ok() != fs::read(&here).ok() {
                complaints
                    .push(format!("{} is not what the PTX gives: run `cargo xtask kernels`", here.display()));
            }
        }
    }
    Ok(complaints)
}

/// Assembles a committed module. Returns the path of the cubin, and what ptxas prints. (`-v` in `options` also changes bytes of the cubin.)
fn cubin(
    tools: &Tools,
    root: &Path,
    name: &str,
    architecture: u32,
    options: &[&str],
) -> Result<(PathBuf, String), String> {
    let cubin = work(root).join(format!("{name}.sm_{architecture}.cubin"));
    let mut ptxas = Command::new(&tools.ptxas);
    ptxas.args(options).arg(format!("-arch=sm_{architecture}")).arg("-o").arg(&cubin);
    ptxas.arg(committed(root).join(name));
    let said = run(ptxas, &format!("ptxas refuses {name} for sm_{architecture}"))?;
    Ok((cubin, said))
}

fn assemble(tools: &Tools, root: &Path) -> Result<Vec<String>, String> {
    let mut complaints = Vec::new();
    for (name, text) in read_ptx(&committed(root))? {
        for architecture in ARCHITECTURES {
            let (_, said) = cubin(tools, root, &name, architecture, &["-v"])?;
            complaints.extend(
                spills(&said, entries(&text).count())
                    .into_iter()
                    .map(|complaint| format!("{name}, sm_{architecture}: {complaint}")),
            );
        }
    }
    Ok(complaints)
}

/// Complaints from the output of `ptxas -v` about a module with this number of kernels.
fn spills(said: &str, kernels: usize) -> Vec<String> {
    const NONE: &str = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    let mut of = "";
    let mut complaints = Vec::new();
    let mut seen = 0;
    for line in said.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            of = name;
        } else if line.contains("bytes stack frame") {
            seen += 1;
            if line.trim() != NONE {
                complaints.push(format!("{of}: {}", line.trim()));
            }
        } else if line.contains("lmem") || line.contains("warning") {
            complaints.push(format!("{of}: {line}"));
        }
    }
    if seen < kernels {
        complaints.push(format!("ptxas told of {seen} kernels of {kernels}"));
    }
    complaints
}

fn disassemble(tools: &Tools, root: &Path) -> Result<Vec<String>, String> {
    let mut complaints = Vec::new();
    for (name, _) in read_ptx(&committed(root))? {
        let (cubin, _) = cubin(tools, root, &name, DISASSEMBLED, &["-v"])?;
        let mut nvdisasm = Command::new(&tools.nvdisasm);
        nvdisasm.arg(&cubin);
        let code = run(nvdisasm, &format!("nvdisasm refuses {name}"))?;
        complaints.extend(narrow(&code).into_iter().map(|complaint| format!("{name}: {complaint}")));
    }
    Ok(complaints)
}

/// Kernels in the disassembly that should read and write vectors, and do not.
fn narrow(code: &str) -> Vec<String> {
    let mut found: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
    let mut of = "";
    for line in code.lines() {
        if let Some((_, section)) = line.split_once(".section\t.text.") {
            of = section.split(',').next().unwrap_or_default();
            found.insert(of, [false; 2]);
        }
        if let Some(found) = found.get_mut(of) {
            found[0] |= line.contains("LDG.E.128");
            found[1] |= line.contains("STG.E.128");
        }
    }
    let mut complaints: Vec<String> = (found.iter())
        .filter(|(name, found)| {
            VECTORISED.iter().any(|start| name.starts_with(start)) && **found != [true; 2]
        })
        .map(|(name, [load, _])| {
            format!("{name}: no {} in its code", if *load { "STG.E.128" } else { "LDG.E.128" })
        })
        .collect();
    if found.is_empty() {
        complaints.push("no code".into());
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spill_is_found() {
        let said = "ptxas info    : Function properties for a\n    0 bytes stack frame, 0 bytes spill stores, \
                    0 bytes spill loads\nptxas info    : Function properties for b\n    8 bytes stack frame, \
                    0 bytes spill stores, 0 bytes spill loads\n";
        let complaint = "b: 8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
        assert_eq!(spills(said, 2), [complaint]);
        assert_eq!(spills(said, 3), [complaint, "ptxas told of 2 kernels of 3"]);
    }

    #[test]
    fn code_without_vectors_is_found() {
        let code = "\t.section\t.text.copy_a,\"ax\"\n LDG.E.128 R4\n STG.E.128\n\
                    \t.section\t.text.copy_b,\"ax\"\n LDG.E.128 R4\n STG.E\n\t.section\t.text.pack_c,\"ax\"\n";
        assert_eq!(narrow(code), ["copy_b: no STG.E.128 in its code"]);
        assert_eq!(narrow(""), ["no code"]);
    }

    #[test]
    fn entries_are_named() {
        assert_eq!(entries(".visible .entry a(\n.param .b8 a_param_0[8]\n)\n").collect::<Vec<_>>(), ["a"]);
    }
}
