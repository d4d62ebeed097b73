//! What the pack finds on the machine that it runs on.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::stacks::is_there;

/// Why the pack does not run here; each has an exit code.
#[derive(Debug)]
pub enum Unfit {
    /// The programs cannot be started.
    Programs(String),
    NoGpu(String),
}

impl Unfit {
    pub fn code(&self) -> u8 {
        match self {
            Unfit::Programs(_) => 2,
            Unfit::NoGpu(_) => 3,
        }
    }
}

/// The machine, and where things lie on it.
#[derive(Debug)]
pub struct Machine {
    /// The folder of the pack.
    pub pack: PathBuf,
    /// The CUDA driver that `ALLSTREAM_CUDA_LIBRARY` names, if it names one.
    pub library: Option<PathBuf>,
    /// What `allstream info` says of CUDA, and all that it says.
    pub cuda: String,
    pub info: String,
    /// Why figures of this run are none of a device; `None`: they are.
    pub mark: Option<String>,
    pub python: Python,
    /// NCCL's library: the pack's own, or the one of the machine.
    pub nccl: Option<PathBuf>,
    /// The pack is the one that brings NCCL along. That pack has a short list of steps of its own.
    pub brings_nccl: bool,
    /// NVIDIA's tools, where they are.
    pub ncu: Option<String>,
    pub sanitizer: Option<String>,
    pub mps: Option<String>,
    /// Held open as long as the pack runs: a driver without a user takes seconds to start again.
    _held: Vec<File>,
}

/// What a Python is asked for: what it can import, and where NCCL lies that torch brings.
const ASK: &str = "
import glob, importlib.util as u, os, sys
for name in ('numpy', 'torch', 'cupy'):
    if u.find_spec(name): print('has', name)
for path in sys.path:
    for file in glob.glob(os.path.join(path, 'nvidia', 'nccl', 'lib', 'libnccl.so.2')): print('nccl', file)
";

/// The Python of the machine.
#[derive(Debug, Default)]
pub struct Python {
    pub program: Option<&'static str>,
    pub packages: Vec<String>,
    nccl: Option<PathBuf>,
}

impl Python {
    fn find() -> Python {
        let asked = Command::new("python3").args(["-c", ASK]).stdin(Stdio::null()).output();
        let Some(output) = asked.ok().filter(|output| output.status.success()) else {
            return Python::default();
        };
        let mut python = Python { program: Some("python3"), ..Python::default() };
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            match line.split_once(' ') {
                Some(("has", name)) => python.packages.push(name.to_owned()),
                Some(("nccl", file)) => python.nccl = Some(file.into()),
                _ => {}
            }
        }
        python
    }

    pub fn has(&self, package: &str) -> bool {
        self.packages.iter().any(|name| name == package)
    }
}

fn first(programs: &[&str]) -> Option<String> {
    programs.iter().find(|program| is_there(program)).map(|program| (*program).to_owned())
}

impl Machine {
    /// Looks around. `library` is the driver that `ALLSTREAM_CUDA_LIBRARY` named; the variable itself was taken out of the environment.
    pub fn find(pack: &Path, library: Option<PathBuf>) -> Result<Machine, Unfit> {
        let held = (0..8).filter_map(|n| File::open(format!("/dev/nvidia{n}")).ok()).collect();
        let program = pack.join("bin/allstream");
        let mut ask = Command::new(&program);
        ask.arg("info").stdin(Stdio::null());
        ask.envs(library.iter().map(|file| (LIBRARY, file)));
        let output =
            ask.output().map_err(|error| Unfit::Programs(format!("{}: {error}", program.display())))?;
        let info = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(Unfit::Programs(format!(
                "{} does not run here (it needs x86-64 or whatever it was built for, and glibc 2.35): {}",
                program.display(),
                said.trim()
            )));
        }
        let cuda = info.lines().find_map(|line| line.strip_prefix("CUDA ")).unwrap_or("").trim().to_owned();
        if !cuda.starts_with("yes:") {
            let why = cuda.trim_start_matches("no:").trim();
            return Err(Unfit::NoGpu(format!("there is no GPU here that this could run on: {why}")));
        }
        // A library that someone names may be anything; where it is a GPU's driver, let the loader find it.
        let mark = match &library {
            Some(file) => Some(format!(
                "NOT MEASURED ON A DEVICE: the driver is what {LIBRARY} names, {}",
                file.display()
            )),
            None if cuda.contains(" by libcuda.so.1;") => None,
            None => Some(format!(
                "NOT MEASURED ON A DEVICE, as far as can be told: the driver is not called libcuda.so.1 ({cuda})"
            )),
        };
        let python = Python::find();
        let own = Some(pack.join("nccl/libnccl.so.2")).filter(|file| file.is_file());
        let named = std::env::var_os("GPU_PACK_NCCL").map(PathBuf::from);
        Ok(Machine {
            pack: pack.to_owned(),
            library,
            cuda,
            info,
            mark,
            brings_nccl: own.is_some(),
            nccl: own.or(named).or_else(|| python.nccl.clone()),
            python,
            ncu: first(&["ncu", "/usr/local/cuda/bin/ncu"]),
            sanitizer: first(&["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]),
            mps: first(&["nvidia-cuda-mps-control"]),
            _held: held,
        })
    }

    pub fn is_measured(&self) -> bool {
        self.mark.is_none()
    }

    /// A program of the pack.
    pub fn program(&self, name: &str) -> PathBuf {
        self.pack.join(name)
    }
}

/// The variable by which allstream is told of a CUDA driver.
pub const LIBRARY: &str = "ALLSTREAM_CUDA_LIBRARY";
