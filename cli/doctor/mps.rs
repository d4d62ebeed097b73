//! Runs one probe with a daemon of NVIDIA's Multi-Process Service (MPS).

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::answer::{Answer, Outcome};
use super::driver::{Problem, problem, soon};
use super::facts::Facts;
use super::process::{Ask, ask as ask_probe, ended};

/// The probe that is asked while the daemon runs.
pub(crate) const NAME: &str = "hop-mps";
const CONTROL: &str = "nvidia-cuda-mps-control";
/// How long the daemon may take to start, and to end.
const PATIENCE: Duration = Duration::from_secs(3);

/// Asks the probe, for which a daemon is started and ended.
pub(crate) fn ask(facts: &Facts, device: usize, end: Instant) -> Outcome {
    if Path::new(&facts.driver).file_name().is_none_or(|name| name != "libcuda.so.1") {
        let remark = format!("not tried: it is for libcuda.so.1, and the driver here is {}", facts.driver);
        return Outcome::Answered(Answer::no(remark));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let Some(control) =
        std::env::split_paths(&path).map(|folder| folder.join(CONTROL)).find(|it| it.is_file())
    else {
        return Outcome::Answered(Answer::no(format!("{CONTROL} is not installed")));
    };
    match Daemon::start(control) {
        Ok(daemon) => {
            let ask = Ask { variables: &daemon.variables(), ..Ask::new(NAME, device) };
            super::outcome(ask_probe(&ask, end))
        }
        Err(Problem(text)) => Outcome::NoAnswer { problem: format!("{CONTROL} does not start: {text}") },
    }
}

/// The daemon, with folders of its own. It runs in the foreground, and so stays a child of this process. Dropping this value ends the daemon.
struct Daemon {
    control: PathBuf,
    folder: tempfile::TempDir,
    child: Child,
}

impl Daemon {
    fn start(control: PathBuf) -> Result<Daemon, Problem> {
        let folder = tempfile::Builder::new().prefix("allstream-mps-").tempdir()?;
        for name in ["pipe", "log"] {
            std::fs::create_dir(folder.path().join(name))?;
        }
        let mut command = Command::new(&control);
        command.arg("-f").envs(variables(folder.path()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut daemon = Daemon { child: command.spawn()?, control, folder };
        let door = daemon.folder.path().join("pipe").join("control");
        let mut status = None;
        let is_up = soon(PATIENCE, || {
            status = daemon.child.try_wait().ok().flatten();
            door.exists() || status.is_some()
        });
        match status {
            Some(status) => Err(problem(format!("{status}"))),
            None if is_up => Ok(daemon),
            None => Err(problem(format!("it is not there after {} s", PATIENCE.as_secs()))),
        }
    }

    fn variables(&self) -> [(&'static str, OsString); 2] {
        variables(self.folder.path())
    }

    /// Tells the daemon to end, by another run of its program.
    fn quit(&self) -> Result<(), Problem> {
        let mut command = Command::new(&self.control);
        command.envs(self.variables()).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        if let Some(mut input) = child.stdin.take() {
            writeln!(input, "quit")?;
        }
        if ended(&mut child, PATIENCE).is_none() {
            child.kill()?;
        }
        Ok(())
    }
}

fn variables(folder: &Path) -> [(&'static str, OsString); 2] {
    [
        ("CUDA_MPS_PIPE_DIRECTORY", folder.join("pipe").into()),
        ("CUDA_MPS_LOG_DIRECTORY", folder.join("log").into()),
    ]
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(Problem(text)) = self.quit() {
            tracing::warn!("{CONTROL} cannot be told to quit: {text}");
        }
        if ended(&mut self.child, PATIENCE).is_none() {
            let _ = self.child.kill();
            let _ = ended(&mut self.child, PATIENCE);
        }
    }
}
