//! The pack's `run`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use gpu_pack::machine::{LIBRARY, Machine};
use gpu_pack::results::Results;
use gpu_pack::run::{Wanted, run, say};
use gpu_pack::{machine, plan};

/// allstream on this machine's GPU: what tells most first. README.md beside this program says what the steps are
#[derive(Debug, Parser)]
#[command(
    name = "run",
    after_help = "Exit codes: 0, all passed or were skipped; 1, something failed; 2, the programs do not run here, or a name is unknown; 3, there is no GPU."
)]
struct Arguments {
    /// Where the archive of results goes (default: what OUT says, or the current folder)
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only these steps and stages, as doctor,tables
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// List the steps, and run none
    #[arg(long)]
    list: bool,
    /// The whole run takes no longer than so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 570)]
    limit: u64,
    /// No step takes longer than so many seconds, whatever its own limit is
    #[arg(long, value_name = "SECONDS")]
    step_limit: Option<u64>,
    /// A variable for one step; may be given several times
    #[arg(long, value_name = "STEP:NAME=VALUE", value_parser = variable)]
    with: Vec<(String, String, String)>,
    /// The pack's folder, if not the one in which this program lies
    #[arg(long, value_name = "DIR", hide = true)]
    pack: Option<PathBuf>,
}

fn variable(text: &str) -> Result<(String, String, String), String> {
    let parts = text.split_once(':').and_then(|(step, rest)| Some((step, rest.split_once('=')?)));
    let (step, (name, value)) = parts.ok_or("expected STEP:NAME=VALUE")?;
    Ok((step.into(), name.into(), value.into()))
}

fn main() -> ExitCode {
    ended(&Arguments::parse()).unwrap_or_else(|problem| {
        eprintln!("gpu-pack: {problem}");
        ExitCode::from(2)
    })
}

fn ended(arguments: &Arguments) -> Result<ExitCode, String> {
    let said = |error: std::io::Error| error.to_string();
    let own = std::env::current_exe().map_err(said)?;
    let pack = arguments.pack.clone().or_else(|| own.parent().map(PathBuf::from)).unwrap_or_default();
    let library = std::env::var_os(LIBRARY).filter(|file| !file.is_empty()).map(PathBuf::from);
    forget_other_runs();
    let machine = match Machine::find(&pack, library) {
        Ok(machine) => machine,
        Err(unfit) => {
            let (machine::Unfit::Programs(why) | machine::Unfit::NoGpu(why)) = &unfit;
            eprintln!("gpu-pack: {why}");
            return Ok(ExitCode::from(unfit.code()));
        }
    };
    let wanted = Wanted {
        only: arguments.only.clone(),
        limit: Duration::from_secs(arguments.limit),
        step_limit: arguments.step_limit.map(Duration::from_secs),
        with: arguments.with.clone(),
    };
    let steps = plan::steps(&machine);
    if let Some((step, ..)) =
        wanted.with.iter().find(|(name, ..)| !steps.iter().any(|step| step.name == *name))
    {
        return Err(format!("--with {step}:...: there is no such step; --list names them"));
    }
    if !steps.iter().any(|step| wanted.takes(step)) {
        return Err(format!(
            "--only {}: no step or stage is called so; --list names them",
            arguments.only.join(",")
        ));
    }
    if arguments.list {
        for step in steps.iter().filter(|step| wanted.takes(step)) {
            say(&format!("{:<9} {}", step.stage.name, step.name));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let out =
        arguments.out.clone().or_else(|| std::env::var_os("OUT").map(PathBuf::from)).unwrap_or_default();
    let out = if out.as_os_str().is_empty() { PathBuf::from(".") } else { out };
    std::fs::create_dir_all(&out)
        .and_then(|()| out.canonicalize())
        .map_err(|error| format!("{}: {error}", out.display()))?;
    let folder = std::env::temp_dir().join(format!("gpu-pack-{}", std::process::id()));
    let name = if machine.brings_nccl { "gpu-results-nccl.tar.xz" } else { "gpu-results.tar.xz" };
    let results = Results::begin(&folder, &out.join(name), &machine).map_err(said)?;
    if let Some(mark) = &machine.mark {
        say(mark);
    }
    say(machine.info.trim_end());
    let passed = run(&machine, steps, &wanted, results);
    let _ = std::fs::remove_dir_all(&folder);
    say(&format!("results: {}", out.join(name).display()));
    machine.mark.iter().for_each(|mark| say(mark));
    Ok(if passed.map_err(said)? { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// What is set for other runs must not change this one.
fn forget_other_runs() {
    let ranks = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("ALLSTREAM_") && !text.starts_with("ALLSTREAM_TEST_CUDA_")
            || ranks.contains(&&*text)
        {
            // SAFETY: this program has one thread.
            unsafe { std::env::remove_var(&name) };
        }
    }
}
