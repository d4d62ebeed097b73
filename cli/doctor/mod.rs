//! `allstream doctor --device`: asks a CUDA device the questions on whose answers allstream's device path rests.
//!
//! Each question is a probe: a process of its own, which talks to the driver directly. A probe that hangs is killed with all that it has
//! started, and the next one is asked. The process that asks never loads the driver.

mod answer;
mod behind;
mod calls;
mod code;
mod costs;
mod driver;
mod facts;
mod hop;
mod mps;
mod process;
mod shared;
mod waiting;

use crate::Exit;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Serialize;

use crate::error::BoxError;
use answer::{Answer, Outcome, Row, tell, tell_answer};
use driver::{Gpu, Problem, problem};
use facts::Facts;
use process::{Ask, Said, Second};

/// How long all probes together may take.
const ALL: Duration = Duration::from_secs(30);
/// The exit code where there is no driver, or no device.
const NO_DEVICE: u8 = 3;

const AFTER: &str = "\
Exit code: 0, every probe has an answer, whatever it is; 1, one has none: a call failed, it hung and was killed, or there was no time \
left for it; 3, there is no driver, or no such device.


What the answers mean for allstream is in docs/gpu-facts.md.";

/// Options of `allstream doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct DoctorArgs {
    /// The CUDA device to ask (default 0)
    #[arg(long, value_name = "ORDINAL", num_args = 0..=1, require_equals = true, default_missing_value = "0",
          required = true)]
    device: usize,
    /// Ask these probes only
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = names())]
    only: Vec<String>,
    /// Also write all that was found to this file, as JSON
    #[arg(short = 'J', long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print rows for the table in docs/gpu-facts.md
    #[arg(long)]
    markdown: bool,
    /// Be the process of one probe
    #[arg(long, hide = true, conflicts_with_all = ["only", "json", "markdown"])]
    probe: Option<String>,
    /// With --probe: be the second process of a probe that needs two
    #[arg(long, hide = true, requires = "probe")]
    second: bool,
}

/// A question to the device.
struct Probe {
    name: &'static str,
    question: &'static str,
    asks: Asks,
}

/// The processes of a probe, and what each runs.
enum Asks {
    /// One process.
    Alone(fn(&'static Gpu) -> Result<Answer, Problem>),
    /// Two: the probe's own process runs the first function, and the second process, which it starts, runs the second function.
    Two(fn(&'static Gpu, Second) -> Result<Answer, Problem>, fn(&'static Gpu) -> Result<(), Problem>),
}

use Asks::{Alone, Two};

/// In the order in which they are asked: the probe that tells most comes first, as there may not be time for all.
const PROBES: [Probe; 16] = [
    Probe {
        name: "no-context",
        question: "do queries work on a thread without a context?",
        asks: Alone(waiting::without_a_context),
    },
    Probe {
        name: "device-map",
        question: "do streams reach pinned memory without DEVICEMAP?",
        asks: Alone(waiting::without_device_map),
    },
    Probe {
        name: "release",
        question: "how long until a stream that the host releases goes on?",
        asks: Alone(waiting::release),
    },
    Probe {
        name: "queues",
        question: "how many hardware queues do streams share?",
        asks: Alone(behind::queues),
    },
    Probe {
        name: "depth",
        question: "how many launches does a blocked stream take?",
        asks: Alone(behind::depth),
    },
    Probe {
        name: "calls",
        question: "do calls wait behind a waiting stream?",
        asks: Alone(calls::behind_a_wait),
    },
    Probe {
        name: "ipc",
        question: "does another process reach device memory?",
        asks: Two(shared::ipc, shared::ipc_second),
    },
    Probe {
        name: "registration",
        question: "do streams of two processes share registered memory?",
        asks: Two(shared::registration, shared::registration_second),
    },
    Probe {
        name: "hop",
        question: "how long is a hop between streams of two processes?",
        asks: Two(hop::hop, hop::second),
    },
    Probe {
        name: "costs",
        question: "what does a launch cost the host, and the other calls?",
        asks: Alone(costs::costs),
    },
    Probe {
        name: "noticing",
        question: "how long after its end does a query say that work is done?",
        asks: Alone(waiting::noticing),
    },
    Probe {
        name: "capture",
        question: "do relaxed calls work beside a capture, and leave it valid?",
        asks: Alone(code::capture),
    },
    Probe {
        name: "one-kernel",
        question: "do machine code and PTX give the host's bits?",
        asks: Alone(code::one_kernel),
    },
    Probe { name: "machine-code", question: "does all machine code load?", asks: Alone(code::modules) },
    Probe { name: "copies", question: "how fast does the device copy?", asks: Alone(costs::copies) },
    Probe {
        name: mps::NAME,
        question: "how long is a hop between streams of two processes under MPS?",
        asks: Two(hop::hop, hop::second),
    },
];

fn names() -> clap::builder::PossibleValuesParser {
    PROBES.map(|probe| probe.name).into()
}

/// What is written as JSON.
#[derive(Serialize)]
struct Report<'a> {
    version: &'static str,
    facts: &'a Facts,
    probes: &'a [Row],
}

pub(crate) fn run(args: &DoctorArgs) -> Result<Exit, BoxError> {
    if let Some(name) = &args.probe {
        return Ok(be_probe(name, args.device, args.second));
    }
    // The driver shuts a device down while no process has its file open, and would bring it up anew for each probe, which takes seconds.
    let _held = hold_open();
    let end = Instant::now() + ALL;
    let facts = match process::ask(&Ask::new(facts::NAME, args.device), end) {
        Said::Answer { text, .. } => serde_json::from_str::<Facts>(&text)?,
        Said::Nothing(reason) => {
            writeln!(io::stderr(), "allstream doctor: {reason}")?;
            return Ok(Exit::from(NO_DEVICE));
        }
        Said::NoAnswer(problem) => return Err(format!("the driver does not come up: {problem}").into()),
    };
    let mut stdout = io::stdout().lock();
    for (name, value) in facts.lines() {
        let line = if args.markdown { format!("- {name}: {value}") } else { format!("# {name}: {value}") };
        writeln!(stdout, "{line}")?;
    }
    if args.markdown {
        writeln!(stdout, "\n| probe | question | {} |\n|---|---|---|", facts.name)?;
    }
    let wanted = |probe: &&Probe| args.only.is_empty() || args.only.iter().any(|name| name == probe.name);
    let mut rows = Vec::new();
    for probe in PROBES.iter().filter(wanted) {
        let start = Instant::now();
        let outcome = if start >= end {
            let seconds = ALL.as_secs();
            Outcome::NotAsked {
                reason: format!("the {seconds} s were over; ask it with --only {}", probe.name),
            }
        } else if probe.name == mps::NAME {
            mps::ask(&facts, args.device, end)
        } else {
            outcome(process::ask(&Ask::new(probe.name, args.device), end))
        };
        let seconds = start.elapsed().as_secs_f64();
        let row = Row { name: probe.name, question: probe.question, seconds, outcome };
        writeln!(stdout, "{}", if args.markdown { row.markdown() } else { row.line() })?;
        rows.push(row);
    }
    if let Some(path) = &args.json {
        let report = Report { version: env!("CARGO_PKG_VERSION"), facts: &facts, probes: &rows };
        fs::write(path, serde_json::to_vec_pretty(&report)?)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(if rows.iter().all(Row::is_answered) { Exit::SUCCESS } else { Exit::FAILURE })
}

/// What came of a probe's process.
fn outcome(said: Said) -> Outcome {
    match said {
        Said::Answer { text, end } => match serde_json::from_str::<Answer>(&text) {
            Ok(mut answer) => {
                if let Some(end) = end {
                    let separator = if answer.remark.is_empty() { "" } else { "; " };
                    answer.remark += &format!("{separator}then its process {end}");
                }
                Outcome::Answered(answer)
            }
            Err(error) => Outcome::NoAnswer { problem: format!("its answer cannot be read: {error}") },
        },
        Said::NoAnswer(problem) | Said::Nothing(problem) => Outcome::NoAnswer { problem },
    }
}

/// Opens the file of each NVIDIA device (`/dev/nvidia0`, say) that this process may open.
fn hold_open() -> Vec<File> {
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    let of_a_device = entries.filter(|entry| {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    of_a_device.filter_map(|entry| File::open(entry.path()).ok()).collect()
}

/// Does in this process what the probe of this name does. All that is told goes to the process that asks.
fn be_probe(name: &str, ordinal: usize, second: bool) -> Exit {
    // Once the process that asks is gone, nobody else would kill this one if it hangs.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if name == facts::NAME {
        facts::tell(ordinal);
        return Exit::SUCCESS;
    }
    let Some(probe) = PROBES.iter().find(|probe| probe.name == name) else {
        tell("failed", &format!("there is no probe {name}"));
        return Exit::FAILURE;
    };
    let answer = match (&probe.asks, second) {
        (Alone(ask), false) => up(ordinal).and_then(ask),
        (Two(ask, _), false) => Second::start(name, ordinal).and_then(|second| {
            // This process brings its driver up while the second one does.
            let gpu = Gpu::open(ordinal)?;
            second.is_up()?;
            tell("ready", "");
            ask(gpu, second)
        }),
        (Two(_, ask), true) => up(ordinal).and_then(ask).map(|()| Answer::new("done", "")),
        (Alone(_), true) => Err(problem("this probe is one process")),
    };
    tell_answer(&answer);
    Exit::SUCCESS
}

/// Brings the driver and a context up, and tells the process that asks.
fn up(ordinal: usize) -> Result<&'static Gpu, Problem> {
    Gpu::open(ordinal).inspect(|_| tell("ready", ""))
}
