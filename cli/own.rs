//! How this command starts itself again: the ranks of `demo`, `perf` and `tune`, a host's agent, the launcher's guard and the doctor's probes
//! are processes of this very command, with other arguments.
//!
//! The command runs either as the program `allstream` or inside a Python interpreter. *Words* are what a shell would call it by, without its
//! arguments: the program's path, or an interpreter and a script.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// How this command was started.
struct Start {
    /// An interpreter and a script, if this command runs in an interpreter. Empty if it is a program of its own.
    words: Vec<OsString>,
    arguments: Vec<OsString>,
}

static START: OnceLock<Start> = OnceLock::new();

/// Notes how this command was started. If this function is called more than once in a process, the first call counts.
pub(crate) fn was_started(words: Vec<OsString>, arguments: Vec<OsString>) {
    let _ = START.set(Start { words, arguments });
}

/// The arguments that this command was given, without the words before them.
pub(crate) fn arguments() -> Vec<OsString> {
    START.get().map_or_else(Vec::new, |start| start.arguments.clone())
}

/// The words that start this command, if it runs in an interpreter.
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

/// How to start this command with these arguments: returns the program (this command's own, or the interpreter) and all its arguments.
pub(crate) fn program(arguments: Vec<OsString>) -> io::Result<(PathBuf, Vec<OsString>)> {
    let mut words = words()?.into_iter();
    let program = words.next().unwrap_or_default();
    Ok((program.into(), words.chain(arguments).collect()))
}

/// A [`Command`] that starts this command; the caller adds the arguments.
pub(crate) fn command() -> io::Result<Command> {
    let (program, arguments) = program(Vec::new())?;
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}

/// As [`command`], but if this command is a program of its own, the very program that runs now is started, even if another one has been
/// installed at its path meanwhile.
pub(crate) fn command_that_runs() -> io::Result<Command> {
    if interpreter().is_some() {
        return command();
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("allstream");
    Ok(command)
}
