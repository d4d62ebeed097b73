//! How this command starts itself again: the demo's ranks, a host's agent, the launcher's guard and a probe are all this command.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// How this command was started.
struct Start {
    /// The words before the arguments where another program runs this command: an interpreter and a script. Empty where the program is ours.
    words: Vec<OsString>,
    arguments: Vec<OsString>,
}

static START: OnceLock<Start> = OnceLock::new();

/// Takes note of how this command was started. A process does so once: the first time counts.
pub(crate) fn was_started(words: Vec<OsString>, arguments: Vec<OsString>) {
    let _ = START.set(Start { words, arguments });
}

/// The arguments that this command was given.
pub(crate) fn arguments() -> Vec<OsString> {
    START.get().map_or_else(Vec::new, |start| start.arguments.clone())
}

/// The words that start this command, where another program runs it.
fn interpreter() -> Option<&'static [OsString]> {
    START.get().map(|start| &start.words[..]).filter(|words| !words.is_empty())
}

/// The words that start this command.
pub(crate) fn words() -> io::Result<Vec<OsString>> {
    match interpreter() {
        Some(words) => Ok(words.to_vec()),
        None => Ok(vec![std::env::current_exe()?.into()]),
    }
}

/// The program that starts this command with these arguments, and all of its arguments.
pub(crate) fn program(arguments: Vec<OsString>) -> io::Result<(PathBuf, Vec<OsString>)> {
    let mut words = words()?.into_iter();
    let program = words.next().unwrap_or_default();
    Ok((program.into(), words.chain(arguments).collect()))
}

/// This command, to be given its arguments.
pub(crate) fn command() -> io::Result<Command> {
    let (program, arguments) = program(Vec::new())?;
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}

/// As [`command`], and where no interpreter runs it, the program that runs now even if another one has been installed at its path meanwhile.
pub(crate) fn command_that_runs() -> io::Result<Command> {
    if interpreter().is_some() {
        return command();
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("allstream");
    Ok(command)
}
