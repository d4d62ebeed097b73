//! `allstream run`: the launcher for any program.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::launch::{self, Job};

/// Options of `allstream run`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Number of ranks: processes on this host
    #[arg(short = 'n', long, value_name = "N")]
    ranks: NonZeroUsize,
    /// Let the ranks write to the terminal themselves, instead of relaying their lines as `[rank] line`
    #[arg(long)]
    no_prefix: bool,
    /// Set a variable for every rank; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = variable)]
    env: Vec<(OsString, OsString)>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the program as the ranks of a job.
pub(crate) fn run(args: RunArgs) -> std::io::Result<ExitCode> {
    let mut command = args.command.into_iter();
    launch::run(Job {
        ranks: args.ranks.get(),
        // Required, so there is one; an empty path is reported as not found.
        program: command.next().map(PathBuf::from).unwrap_or_default(),
        args: command.collect(),
        prefix: !args.no_prefix,
        env: args.env,
        ..Default::default()
    })
}

/// Names that the launcher sets for each rank.
const OURS: [&str; 7] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ALLSTREAM_RENDEZVOUS_FD",
];

fn variable(text: &str) -> Result<(OsString, OsString), String> {
    match text.split_once('=') {
        Some((key, _)) if OURS.contains(&key) => Err(format!("{key} is set by the launcher for each rank")),
        Some((key, value)) if !key.is_empty() && !text.contains('\0') => Ok((key.into(), value.into())),
        _ => Err("expected KEY=VALUE".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_split_at_the_first_equals_sign() {
        assert_eq!(variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(variable("A="), Ok(("A".into(), "".into())));
        assert!(variable("A").is_err());
        assert!(variable("=b").is_err());
        assert!(variable("RANK=3").is_err());
    }
}
