//! The `allstream` command as a library. The program `allstream` calls [`main`]. The Python package calls [`main_as`], for
//! `python -m allstream` and for the script `allstream` that pip installs.

mod console;
mod demo;
mod doctor;
mod error;
mod launch;
mod own;
mod perf;
mod run;
mod sim;
mod trace_cmd;
mod tune;
mod units;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{ExitCode, Termination};

use allstream::{Backend, BackendStatus};
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Collective communication for training loops: launcher and tools
#[derive(Debug, Parser)]
#[command(name = "allstream", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a small network on several processes, and check the result
    Demo(demo::DemoArgs),
    /// Start a program as the ranks of a job, on this host or on several
    Run(run::RunArgs),
    /// Merge the ranks' flight recorders, and say who is behind
    Trace(trace_cmd::TraceArgs),
    /// Time a collective by size, check its results, and print nccl-tests' table
    Perf(Box<perf::PerfArgs>),
    /// Simulate a collective on a network that is not here, by each algorithm
    Sim(sim::SimArgs),
    /// Measure each class of links, and write the table by which algorithms are chosen
    Tune(tune::TuneArgs),
    /// Ask a CUDA device how it does what allstream relies on: a probe for each question
    Doctor(doctor::DoctorArgs),
    /// Show what this build can use on this host
    Info {
        /// Show instead the table by which algorithms are chosen, with predicted and measured times
        #[arg(long)]
        tuning: bool,
    },
}

/// The exit code of this command: 0 if all went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit(pub u8);

impl Exit {
    /// All went well.
    pub const SUCCESS: Exit = Exit(0);
    /// What was asked for could not be done; stderr says why.
    pub const FAILURE: Exit = Exit(1);
}

impl From<u8> for Exit {
    fn from(code: u8) -> Exit {
        Exit(code)
    }
}

impl Termination for Exit {
    fn report(self) -> ExitCode {
        self.0.into()
    }
}

/// Runs the command with these arguments (without the program's name). The program that calls this has to be the command and nothing else,
/// since the command starts that program again, with other arguments.
///
/// Arguments that cannot be understood, `--help` and `--version` end the process.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> Exit {
    main_as(Vec::new(), arguments)
}

/// As [`main`], inside an interpreter. `words` are the interpreter and a script, by absolute paths. Followed by arguments, they must
/// start this command again, in any directory and without any variable of the environment.
pub fn main_as(words: Vec<OsString>, arguments: impl IntoIterator<Item = OsString>) -> Exit {
    own::was_started(words, arguments.into_iter().collect());
    let cli = Cli::parse_from(["allstream".into()].into_iter().chain(own::arguments()));
    let filter = EnvFilter::try_from_env("ALLSTREAM_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    // A program that calls this library may have chosen already where events go: then this fails.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).try_init();
    let result = match cli.command {
        Command::Demo(args) => demo::run(args),
        Command::Run(args) => run::run(args).map_err(Into::into),
        Command::Trace(args) => trace_cmd::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Info { tuning: true } => tune::info(),
        Command::Info { tuning: false } => info().map_err(Into::into),
    };
    let exit = result.unwrap_or_else(|error| {
        // Not `eprintln`, which panics if stderr is closed.
        let _ = writeln!(io::stderr(), "allstream: {error}");
        Exit::FAILURE
    });
    // When an interpreter ends, nobody else flushes Rust's stdout.
    let _ = io::stdout().flush();
    exit
}

/// What `info` says of CUDA: the driver and its devices, or why there are none.
fn cuda() -> String {
    use allstream::cuda::{Device, device_count, driver};
    let found = || {
        let (driver, count) = (driver()?, device_count()?);
        let (major, minor) = driver.version;
        let devices =
            (0..count).map(|ordinal| Ok(format!("device {ordinal}: {}", Device::new(ordinal)?.name())));
        let devices = devices.collect::<Result<Vec<_>, allstream::Error>>()?;
        let which = format!("CUDA {major}.{minor} by {}", driver.file);
        Ok(if count == 0 {
            format!("no: no device; {which}")
        } else {
            format!("yes: {which}; {}", devices.join("; "))
        })
    };
    found().unwrap_or_else(|error: allstream::Error| format!("no: {error}"))
}

/// What `info` says of NCCL: its version and its file, or why it cannot be used.
fn nccl() -> String {
    match allstream::cuda::nccl() {
        Ok(nccl) => format!("yes: NCCL {} by {}", nccl.version, nccl.file),
        Err(error) => format!("no: {error}"),
    }
}

/// What `info` says of RDMA, in lines: the ports that can carry links to other hosts, those that cannot and why, and when RDMA is used.
fn rdma() -> Vec<String> {
    let used = "used between hosts if all have it and a test message arrives, else TCP with a warning; ALLSTREAM_LINK=rdma or tcp forces one";
    let found = match allstream::rdma::find() {
        Ok(found) => found,
        Err(error) => return vec![format!("no: {error}"), used.into()],
    };
    let ports = found.ports.iter().enumerate().map(|(at, port)| match at {
        0 => format!("yes: {port}"),
        _ => format!("     {port}"),
    });
    let passed_over = found.passed_over.iter().map(|passed| format!("passed over: {passed}"));
    let library = format!("found by {}", found.library);
    ports.chain(passed_over).chain([library, used.into()]).collect()
}

fn info() -> io::Result<Exit> {
    let cores =
        std::thread::available_parallelism().map_or_else(|error| error.to_string(), |n| n.to_string());
    let mut lines =
        vec![("allstream".to_string(), env!("CARGO_PKG_VERSION").to_string()), ("cores".into(), cores)];
    for BackendStatus { backend, available, .. } in allstream::backends() {
        let name = backend.to_string();
        let there = match (backend, available) {
            (Backend::Rdma, _) => {
                let names = std::iter::once(name.to_uppercase()).chain(std::iter::repeat(String::new()));
                lines.extend(names.zip(rdma()));
                continue;
            }
            (Backend::Cuda, _) => cuda(),
            (Backend::Nccl, Ok(())) => nccl(),
            (_, Ok(())) => "yes".into(),
            (_, Err(error)) => format!("no: {error}"),
        };
        lines.push((if matches!(backend, Backend::Link(_)) { name } else { name.to_uppercase() }, there));
    }
    let text: String = lines.iter().map(|(name, value)| format!("{name:<15}{value}\n")).collect();
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(Exit::SUCCESS),
    }
}
