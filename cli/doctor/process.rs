//! Runs each probe as a process, and waits for its answer up to a time limit. Here is also [`Second`], the second process that some probes start.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::answer::{Told, step as step_of_ours};
use super::driver::{Problem, problem};

/// How long the driver and the context may take to come up.
const UP: Duration = Duration::from_secs(10);
/// How long a probe may take from then on.
const PROBE: Duration = Duration::from_secs(3);
/// How long a process may take to end after its answer.
const LEAVING: Duration = Duration::from_secs(1);

/// A probe to be asked.
pub(crate) struct Ask<'a> {
    pub(crate) name: &'a str,
    pub(crate) device: usize,
    /// Environment variables that are set for this probe alone.
    pub(crate) variables: &'a [(&'a str, OsString)],
}

impl<'a> Ask<'a> {
    pub(crate) fn new(name: &'a str, device: usize) -> Ask<'a> {
        Ask { name, device, variables: &[] }
    }
}

/// What came of running a probe.
pub(crate) enum Said {
    /// The answer; and if the process then did not exit with code 0, how it ended.
    Answer { text: String, end: Option<String> },
    /// The probe failed, hung, or ended without an answer.
    NoAnswer(String),
    /// No probe can be run here: there is no driver, or no device.
    Nothing(String),
}

fn command(name: &str, device: usize) -> Result<Command, Problem> {
    let mut command = crate::own::command()?;
    command.args(["doctor", &format!("--device={device}"), "--probe", name]);
    command.stdout(Stdio::piped());
    Ok(command)
}

/// The lines that a process writes, as they come. The channel is disconnected at the end of the output.
fn lines(from: impl Read + Send + 'static) -> Result<Receiver<String>, Problem> {
    let (send, receive) = channel();
    // The thread ends with the output. If a process keeps the output open for ever, the thread stays, but nobody waits for it.
    thread::Builder::new().spawn(move || {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            if send.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    })?;
    Ok(receive)
}

/// A probe's process, and those that it has started, all in one process group. All are killed when this is dropped.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        // A process that is stuck in the driver's kernel module does not end, so the wait has a limit.
        let _ = ended(&mut self.0, LEAVING);
    }
}

/// How a process ended; `None` if it does not end within this time.
pub(crate) fn ended(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            _ => return None,
        }
    }
}

fn told_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".into(),
    }
}

/// Starts a probe's process, and waits for its answer, at most until `end`.
pub(crate) fn ask(ask: &Ask<'_>, end: Instant) -> Said {
    let started = || -> Result<(Group, Receiver<String>), Problem> {
        let mut command = command(ask.name, ask.device)?;
        command.envs(ask.variables.iter().map(|(name, value)| (name, value)));
        let mut child = Group(command.stdin(Stdio::null()).process_group(0).spawn()?);
        let stdout = child.0.stdout.take().ok_or_else(|| problem("it has no output"))?;
        let lines = lines(stdout)?;
        Ok((child, lines))
    };
    match started() {
        Ok((mut group, lines)) => listen(&mut group, &lines, end),
        Err(Problem(text)) => Said::NoAnswer(format!("cannot start its process: {text}")),
    }
}

fn listen(group: &mut Group, lines: &Receiver<String>, end: Instant) -> Said {
    let mut at = String::from("bringing up the driver");
    let mut limit = UP;
    let mut until = (Instant::now() + limit).min(end);
    loop {
        let line = match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) if until == end => {
                return Said::NoAnswer(format!(
                    "killed, as the time for all probes was over; it was at: {at}"
                ));
            }
            Err(RecvTimeoutError::Timeout) => {
                return Said::NoAnswer(format!(
                    "hung, and was killed after {} s; it was at: {at}",
                    limit.as_secs()
                ));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let how = ended(&mut group.0, LEAVING).map_or("closed its output".into(), told_end);
                return Said::NoAnswer(format!("its process {how}; it was at: {at}"));
            }
        };
        match Told::read(&line) {
            Some(Told::Ready) => {
                at = "the beginning".into();
                limit = PROBE;
                until = (Instant::now() + limit).min(end);
            }
            Some(Told::Step(step)) => at = step.into(),
            Some(Told::Answer(text)) => {
                let end = match ended(&mut group.0, LEAVING) {
                    Some(status) if status.success() => None,
                    Some(status) => Some(told_end(status)),
                    None => Some(format!("did not end within {} s, and was killed", LEAVING.as_secs())),
                };
                return Said::Answer { text: text.into(), end };
            }
            Some(Told::Failed(text)) => return Said::NoAnswer(format!("{text}; it was at: {at}")),
            Some(Told::Nothing(text)) => return Said::Nothing(text.into()),
            None => {}
        }
    }
}

/// The second process of a probe, in the process group of the first.
pub(crate) struct Second {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Second {
    pub(crate) fn start(name: &str, device: usize) -> Result<Second, Problem> {
        let mut command = command(name, device)?;
        let mut child = command.arg("--second").stdin(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or_else(|| problem("the second process has no output"))?;
        let lines = lines(stdout)?;
        Ok(Second { input: child.stdin.take(), child, lines })
    }

    /// Waits until its driver and its context are up.
    pub(crate) fn is_up(&self) -> Result<(), Problem> {
        self.until(UP, "the second process to come up", |told| *told == Told::Ready)?.map_err(Problem)
    }

    /// Writes a line to the process's stdin.
    pub(crate) fn give(&mut self, line: &str) -> Result<(), Problem> {
        let input = self.input.as_mut().ok_or_else(|| problem("the second process has no input"))?;
        Ok(writeln!(input, "{line}")?)
    }

    /// Waits until the process reports this step. The inner error is why the process failed, in its own words; the outer one: it reported neither.
    pub(crate) fn reaches(&self, step: &str) -> Result<Result<(), String>, Problem> {
        step_of_ours(&format!("waiting for the second process: {step}"));
        self.until(Duration::from_secs(2), step, |told| *told == Told::Step(step))
    }

    fn until(
        &self,
        limit: Duration,
        what: &str,
        is_it: impl Fn(&Told<'_>) -> bool,
    ) -> Result<Result<(), String>, Problem> {
        let end = Instant::now() + limit;
        let mut at = String::from("bringing up the driver");
        while let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            match Told::read(&line) {
                Some(told) if is_it(&told) => return Ok(Ok(())),
                Some(Told::Step(told)) => at = told.into(),
                Some(Told::Failed(text)) => return Ok(Err(text.into())),
                _ => {}
            }
        }
        let limit = limit.as_secs();
        Err(problem(format!(
            "waited {limit} s for this, or until it ended: {what}; the second process was at: {at}"
        )))
    }

    /// Closes the process's stdin, which tells it that it is no longer needed, and waits a moment for its end.
    pub(crate) fn end(mut self) {
        drop(self.input.take());
        let _ = ended(&mut self.child, Duration::from_millis(300));
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = ended(&mut self.child, Duration::from_millis(100));
    }
}

/// In the second process: reads the line that the first process writes to this one's stdin.
pub(crate) fn given() -> Result<String, Problem> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}
