//! `cargo xtask`: the tests, the house's own checks, and what CI runs.

mod circles;
mod documents;
mod figures;
mod files;
mod fuzz;
mod house;
mod journal;
mod kernels;
mod modules;
mod pack;
mod packages;
mod part;
mod parts;
mod peers;
mod published;
mod python;
mod rdma;
mod runner;
mod way;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The house's own tool
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the tests, and the checks of the house
    Test {
        /// All there is: the tests with many more combinations; fuzzing, candle, the GPU pack, Python with torch and Ray
        #[arg(long)]
        full: bool,
        /// Only parts whose name contains this; may be given several times
        #[arg(long, value_name = "TEXT")]
        only: Vec<String>,
    },
    /// Only the checks of the house: floors, circles, unsafe, sizes of files, paths
    House,
    /// Count engine and plan without tests: lines of code, fields, tuples as parameters, types of one name, methods, long files
    Figures,
    /// List the files that an all_reduce goes through from the call to its first post, by callgrind (valgrind)
    Way,
    /// Compile the CUDA kernels to the PTX that is committed
    Kernels {
        /// Only compare with what is committed, and assemble that
        #[arg(long)]
        check: bool,
    },
    /// Measure beside OpenMPI, Gloo and what the machine can do; print the table of ratios and bars
    Peers(Box<peers::PeersArgs>),
    /// Make an archive with all that runs on a machine with a GPU, and print the command that runs it there: see docs/gpu-pack.md
    GpuPack {
        /// The folder for the archive; an earlier one there is replaced
        #[arg(long, value_name = "DIR", default_value = pack::FOLDER)]
        out: PathBuf,
        /// Instead: the pack that runs several ranks of NCCL on one GPU, with this libnccl.so.2 (2.30 or newer)
        #[arg(long, value_name = "FILE")]
        nccl: Option<PathBuf>,
        /// Leave the Python package out
        #[arg(long)]
        without_python: bool,
        /// Build it as tests are built: for a rehearsal, of which no figure counts
        #[arg(long)]
        for_rehearsal: bool,
    },
    /// Test the search for RDMA devices, and the link over them, on Soft-RoCE, in a virtual machine with a kernel of Debian's
    Rdma {
        /// Print what the link costs there, beside perftest and TCP
        #[arg(long)]
        bars: bool,
        /// Try all kernels, ten thousand operations, a hundred kills, and two machines, the second of which is switched off
        #[arg(long, conflicts_with = "bars")]
        full: bool,
    },
    /// Format, clippy, docs, packages, then `test --full`
    Ci,
}

/// Prints what a command has to tell, or why it failed.
fn printed(command: &str, told: Result<impl std::fmt::Display, impl std::fmt::Display>) -> ExitCode {
    match told {
        Ok(told) => {
            print!("{told}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{command}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let root = root();
    let parts = match Cli::parse().command {
        Command::Test { full, only } => {
            let mut parts = parts::tests(full);
            let is_named = |part: &part::Part| only.iter().any(|text| part.name.contains(text.as_str()));
            parts.retain(|part| only.is_empty() || is_named(part));
            parts
        }
        Command::House => vec![parts::house()],
        Command::Figures => {
            return printed("cargo xtask figures", figures::told(&root));
        }
        Command::Way => {
            return printed("cargo xtask way", way::told(&root));
        }
        Command::Kernels { check: false } => {
            return match kernels::generate(&root) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("cargo xtask: {error}");
                    ExitCode::FAILURE
                }
            };
        }
        Command::Kernels { check: true } => vec![parts::cuda_kernels()],
        Command::Peers(args) => {
            return peers::run(&args, &root).unwrap_or_else(|error| {
                eprintln!("cargo xtask: {error}");
                ExitCode::FAILURE
            });
        }
        Command::GpuPack { out, nccl, without_python, for_rehearsal } => {
            let wanted = pack::Wanted { out: root.join(out), nccl, without_python, for_rehearsal };
            return printed("cargo xtask gpu-pack", pack::make(&root, &wanted));
        }
        Command::Rdma { bars: true, .. } => {
            return printed("cargo xtask rdma", rdma::bars(&root));
        }
        Command::Rdma { bars: false, full } => vec![parts::rdma(full)],
        Command::Ci => parts::lints(&root).into_iter().chain(parts::tests(true)).collect(),
    };
    if parts.is_empty() {
        eprintln!("cargo xtask: no part has such a name");
        return ExitCode::from(2);
    }
    if let Err(error) = runner::take_signals() {
        eprintln!("cargo xtask: cannot take signals: {error}");
        return ExitCode::FAILURE;
    }
    if runner::run_all(&parts, &root) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The repository: where this package's manifest lies, one up.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
