//! Runs the steps.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::child::{self, How};
use crate::machine::Machine;
use crate::plan::{Proof, Step};
use crate::results::{Outcome, Results, Verdict};
use crate::stacks;

/// What is asked of a run.
#[derive(Debug)]
pub struct Wanted {
    /// Only the steps and stages of these names; all, if there are none.
    pub only: Vec<String>,
    /// When the whole run is to be over.
    pub limit: Duration,
    /// No step takes longer, whatever the plan says.
    pub step_limit: Option<Duration>,
    /// Variables for one step.
    pub with: Vec<(String, String, String)>,
}

impl Wanted {
    pub fn takes(&self, step: &Step) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| *name == step.name || name == step.stage.name)
    }
}

/// With less time than this, a step is not begun.
const LEAST: Duration = Duration::from_secs(5);
/// So much time is left at the end, for what has to be written down.
const RESERVE: Duration = Duration::from_secs(5);
/// So many lines of the log of a step that failed are shown at once.
const SHOWN: usize = 25;

/// Runs all steps that are wanted; whether none failed.
pub fn run(machine: &Machine, steps: Vec<Step>, wanted: &Wanted, mut results: Results) -> io::Result<bool> {
    child::adopt()?;
    let start = Instant::now();
    let mut service = Service::default();
    let mut steps: VecDeque<Step> = steps.into_iter().filter(|step| wanted.takes(step)).collect();
    let mut put_off = VecDeque::new();
    let mut is_late = false;
    while let Some(step) = steps.pop_front().or_else(|| {
        is_late = true;
        put_off.pop_front()
    }) {
        let end =
            if is_late { wanted.limit } else { wanted.limit.min(Duration::from_secs(step.stage.until)) };
        let time = end.saturating_sub(start.elapsed() + RESERVE).min(step.limit);
        let time = wanted.step_limit.map_or(time, |most| most.min(time));
        let outcome = |result, seconds: Duration, why: String| Outcome {
            stage: step.stage.name,
            step: step.name.clone(),
            seconds: seconds.as_secs_f64(),
            result,
            why,
        };
        let outcome = if let Some(why) = &step.lacks {
            outcome(Verdict::Skipped, Duration::ZERO, why.clone())
        } else if time < LEAST.min(wanted.step_limit.unwrap_or(LEAST)) {
            if !is_late {
                put_off.push_back(step);
                continue;
            }
            outcome(Verdict::Skipped, Duration::ZERO, "the time was over".into())
        } else {
            match service.serve(machine, &step) {
                Err(why) => outcome(Verdict::Skipped, Duration::ZERO, why),
                Ok(()) => match one(machine, &step, wanted, &results, time) {
                    Ok((result, took, why)) => outcome(result, took, why),
                    Err(error) => outcome(
                        Verdict::Failed,
                        Duration::ZERO,
                        format!("{}: {error}", step.program.display()),
                    ),
                },
            }
        };
        say(&outcome.line());
        if outcome.result == Verdict::Failed {
            show(&results, &step.name);
        } else if step.is_table && outcome.result == Verdict::Passed {
            results.add_table(&step.name)?;
        }
        results.add(outcome)?;
    }
    drop(service);
    let count = |verdict| results.outcomes().iter().filter(|outcome| outcome.result == verdict).count();
    let (passed, failed) = (count(Verdict::Passed), count(Verdict::Failed));
    let seconds = start.elapsed().as_secs();
    say(&format!("{passed} passed, {failed} failed, {} skipped; {seconds} s", count(Verdict::Skipped)));
    Ok(failed == 0)
}

/// Prints a line; a pipe that is closed is no reason to stop.
pub fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}").and_then(|()| io::stdout().flush());
}

fn show(results: &Results, step: &str) {
    let bytes = fs::read(results.log(step)).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(SHOWN)).for_each(|line| say(&format!("    {line}")));
}

/// Runs one step; its verdict, how long it took, and why it is so.
fn one(
    machine: &Machine,
    step: &Step,
    wanted: &Wanted,
    results: &Results,
    time: Duration,
) -> io::Result<(Verdict, Duration, String)> {
    let log = results.log(&step.name);
    let mut command = Command::new(&step.program);
    command.args(&step.arguments);
    // An operation whose peer does not come is to end within the step, with its own words.
    command.env("ALLSTREAM_TIMEOUT", "20").env("ALLSTREAM_TRACE_DIR", results.traces(&step.name));
    command.envs(step.variables.iter().map(|(name, value)| (name, value)));
    let own = wanted.with.iter().filter(|(of, ..)| *of == step.name);
    command.envs(own.map(|(_, name, value)| (name, value)));
    if step.is_table {
        command.arg("-J").arg(results.figures(&step.name));
    }
    let (how, took) = child::run(&mut command, &log, time, |pids| {
        let text = stacks::of(pids, &machine.program("bin/allstream"));
        if let Err(error) = fs::write(results.stacks(&step.name), text) {
            say(&format!("gpu-pack: the stacks of {} are not kept: {error}", step.name));
        }
    })?;
    let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    let last =
        text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned();
    let failed = |why: String| (Verdict::Failed, took, why);
    Ok(match (how, &step.proof) {
        (How::Code(0), Proof::Says(texts)) => {
            match texts.iter().find(|expected| !text.contains(**expected)) {
                Some(expected) => failed(format!("exit code 0, but without `{expected}`")),
                None => (Verdict::Passed, took, String::new()),
            }
        }
        (How::Code(0), Proof::Tool { .. }) => (Verdict::Passed, took, String::new()),
        (How::Hung, _) => failed(format!(
            "not done after {:.0} s, and ended; stacks/{}.txt has what its threads did",
            time.as_secs_f64(),
            step.name
        )),
        (How::Code(code), Proof::Tool { finds }) if *finds != Some(code) => {
            (Verdict::Skipped, took, format!("it does not work here (exit code {code}): {last}"))
        }
        (How::Code(code), _) => failed(format!("exit code {code}")),
        (How::Signal(signal), _) => failed(format!("died of signal {signal}")),
    })
}

/// NVIDIA's Multi-Process Service, started when a step first needs it, and ended with this.
#[derive(Default)]
struct Service {
    /// The folder of its pipes and logs.
    home: Option<PathBuf>,
}

impl Service {
    const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
    const LOGS: &str = "CUDA_MPS_LOG_DIRECTORY";

    /// Starts it before a step that wants it, and ends it before one that does not; why that cannot be.
    fn serve(&mut self, machine: &Machine, step: &Step) -> Result<(), String> {
        if !step.by_mps {
            self.end();
            return Ok(());
        }
        if self.home.is_some() {
            return Ok(());
        }
        let home = std::env::temp_dir().join(format!("gpu-pack-mps-{}", std::process::id()));
        fs::create_dir_all(&home).map_err(|error| format!("{}: {error}", home.display()))?;
        // SAFETY: this program has one thread; what it starts from now on inherits the variables.
        unsafe {
            std::env::set_var(Self::PIPES, &home);
            std::env::set_var(Self::LOGS, &home);
        }
        self.home = Some(home);
        let control = machine.mps.as_deref().unwrap_or("nvidia-cuda-mps-control");
        let started = Command::new("timeout").args(["20", control, "-d"]).stdin(Stdio::null()).output();
        match started {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                self.end();
                let said = [output.stdout, output.stderr].concat();
                Err(format!("{control} does not start: {}", String::from_utf8_lossy(&said).trim()))
            }
            Err(error) => {
                self.end();
                Err(format!("{control}: {error}"))
            }
        }
    }

    fn end(&mut self) {
        let Some(home) = self.home.take() else { return };
        let mut control = Command::new("timeout");
        control
            .args(["20", "nvidia-cuda-mps-control"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Ok(mut child) = control.spawn() {
            if let Some(mut stdin) = child.stdin.take() {
                let _ = stdin.write_all(b"quit\n");
            }
            let _ = child.wait();
        }
        // SAFETY: as in `serve`.
        unsafe {
            std::env::remove_var(Self::PIPES);
            std::env::remove_var(Self::LOGS);
        }
        let _ = fs::remove_dir_all(home);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
    }
}
