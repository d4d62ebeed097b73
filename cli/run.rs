//! `allstream run`: the launcher for any program.

use std::ffi::OsString;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use crate::launch::bind::Bind;
use crate::launch::hosts::{self, Host};
use crate::launch::remote::{self, Hosts};
use crate::launch::stdin::Stdin;
use crate::launch::{self, Job, OnFailure, Policy, agent, guard};
use crate::{Exit, own};

const SSH_VARIABLE: &str = "ALLSTREAM_SSH";
/// With this interval ssh ends if the host has not answered for 15 seconds (three intervals). By default ssh may not notice for hours.
const SSH: &str = "ssh -o BatchMode=yes -o ServerAliveInterval=5";

const AFTER: &str = "\
Exit code: 128 + the signal, if a signal to the launcher ended the job. Otherwise the first code other than 0 with which a rank exited by \
itself (with --on-failure keep, the greatest code, even if that is 0); if no rank did, 128 + the signal that was the first to kill a rank.

Signals: SIGINT, SIGTERM, SIGCONT and SIGWINCH are handed to all ranks on all hosts, SIGUSR1 and SIGUSR2 to those that handle them; Ctrl-Z \
stops the ranks with the launcher. After SIGINT or SIGTERM ranks have the time of --kill-after to end; a second such signal kills at once.

Several hosts: ssh must reach them without a password. They need the program at the same path as here, and this very version of \
allstream at the same path or where --remote-bin says. Variables whose names begin with ALLSTREAM_ are passed on; others \
by --env. The job's secret goes through ssh's stdin, so that no list of processes shows it. This host (`localhost`, \
127.0.0.1, its own name) needs no ssh. When the launcher ends, however it ends, the ranks on all hosts end, too.";

/// Options of `allstream run`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct RunArgs {
    /// Number of ranks, each a process: on this host, or on all hosts together (default there: one for each slot)
    #[arg(short = 'n', long, aliases = ["np", "nproc-per-node", "nproc_per_node"], value_name = "N", required_unless_present_any = ["hosts", "host_file", "agent", "guard"])]
    ranks: Option<NonZeroUsize>,
    /// Hosts, and how many ranks each takes: node1:4,node2:4,user@node3
    #[arg(long, value_name = "HOST:SLOTS,...", conflicts_with = "host_file")]
    hosts: Option<String>,
    /// A file that lists hosts and slots in mpirun's format, one host on each line: `node1 slots=4`
    #[arg(long, value_name = "FILE")]
    host_file: Option<PathBuf>,
    /// The command that runs a command on another host; split at spaces, without quotes (default: what ALLSTREAM_SSH says, or
    /// else `ssh -o BatchMode=yes -o ServerAliveInterval=5`)
    // Not clap's `env`, which would count the variable as a given option: agents inherit it, and `--agent` allows no other
    // option.
    #[arg(long, value_name = "COMMAND")]
    ssh: Option<String>,
    /// The path of `allstream` on the other hosts, if not the same as here
    #[arg(long, value_name = "PATH")]
    remote_bin: Option<PathBuf>,
    /// The directory in which ranks start on all hosts, if not the launcher's
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The name or address by which all hosts reach rank 0's host, if not the first host's name
    #[arg(long, value_name = "ADDRESS")]
    master_addr: Option<String>,
    /// Rank 0's port on its host; 0 takes a free one
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    port: u16,
    /// Be the launcher's agent on one of the hosts; the launcher's order comes on stdin
    #[arg(long, hide = true, exclusive = true)]
    agent: bool,
    /// Be the launcher's guard, which kills what is left of the job if the launcher is killed
    #[arg(long, hide = true, exclusive = true)]
    guard: bool,
    /// Let the ranks write to the terminal themselves, instead of relaying their lines as `[rank] line`
    #[arg(long)]
    no_prefix: bool,
    /// Which ranks read what comes to stdin here: `0` (so that `breakpoint()` and `input()` work in rank 0), `all` (each reads a copy), or
    /// `none`. The other ranks find the end of their stdin at once
    #[arg(long, value_enum, default_value = "0", value_name = "RANKS")]
    stdin: Stdin,
    /// Also copy the output of each rank to a file of its own, DIR/rank-N.log, on the rank's host
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix")]
    log_dir: Option<PathBuf>,
    /// To which cores of its host each rank is bound. `core` suits programs whose ranks compute on one thread and do not
    /// outnumber the cores; with `none`, all threads of a rank may run on any core
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    bind_to: Bind,
    /// What is done with the other ranks when one has failed. `stop`: after the grace they get SIGTERM, and after --kill-after SIGKILL.
    /// `keep`: they work on, for programs whose survivors shrink the communicator
    #[arg(long, value_enum, default_value = "stop", value_name = "WHAT")]
    on_failure: OnFailure,
    /// How long the other ranks may run on after a failure, to report what they saw, before they are stopped
    #[arg(long, default_value = "3s", value_name = "TIME", value_parser = humantime::parse_duration)]
    grace: Duration,
    /// How long ranks that were told to end may take, to write a checkpoint, say, before they get SIGKILL. A second Ctrl-C or SIGTERM
    /// kills at once
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = humantime::parse_duration)]
    kill_after: Duration,
    /// With `--on-failure keep`, stop the ranks when fewer than M have not failed. On several hosts, all ranks of a failed
    /// host count as failed, once its last rank has ended
    #[arg(long, default_value = "1", value_name = "M")]
    min_ranks: NonZeroUsize,
    /// Start the job anew, with as many ranks, when it has failed, up to N times; ALLSTREAM_RESTART tells the ranks how often that was
    #[arg(long, default_value_t = 0, value_name = "N")]
    restarts: u32,
    /// Set a variable for every rank; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = variable)]
    env: Vec<(OsString, OsString)>,
    /// The program and its arguments
    #[arg(
        required_unless_present_any = ["agent", "guard"],
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

/// Runs the program as the ranks of a job.
pub(crate) fn run(args: RunArgs) -> io::Result<Exit> {
    if args.agent {
        return agent::run();
    }
    if args.guard {
        return guard::run();
    }
    let ranks = args.ranks.map(NonZeroUsize::get);
    let hosts = hosts(&args)?;
    let mut command = args.command.into_iter();
    let mut job = Job {
        ranks: ranks.unwrap_or(1),
        // Clap requires a program here; should there be none, the empty path is reported as not found.
        program: command.next().map(PathBuf::from).unwrap_or_default(),
        args: command.collect(),
        prefix: !args.no_prefix,
        stdin: args.stdin,
        logs: args.log_dir,
        env: args.env,
        policy: Policy {
            on_failure: args.on_failure,
            grace: args.grace,
            kill_after: args.kill_after,
            min_ranks: args.min_ranks.get(),
        },
        restarts: args.restarts,
        bind: args.bind_to,
    };
    let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
    if job.policy.min_ranks > 1 && job.policy.on_failure == OnFailure::Stop {
        return Err(invalid(
            "--min-ranks is for --on-failure keep: otherwise all ranks stop when one has failed".into(),
        ));
    }
    let Some(hosts) = hosts else {
        let only = args.dir.is_some()
            || args.master_addr.is_some()
            || args.remote_bin.is_some()
            || args.ssh.is_some()
            || args.port != 0;
        return if only {
            Err(invalid(
                "--dir, --master-addr, --port, --remote-bin and --ssh are for --hosts and --host-file".into(),
            ))
        } else {
            launch::run(job)
        };
    };
    let placed = hosts::placed(&hosts, ranks).map_err(invalid)?;
    job.ranks = placed.iter().map(|(_, ranks)| ranks.len()).sum();
    let remote = args.remote_bin.map_or_else(own::words, |path| Ok(vec![path.into()]))?;
    let dir = args.dir.map_or_else(std::env::current_dir, Ok)?;
    let ssh = match args.ssh {
        Some(ssh) => ssh,
        None => ssh_by_default(std::env::var_os(SSH_VARIABLE)).map_err(invalid)?,
    };
    let ssh = ssh.split_whitespace().map(String::from).collect();
    remote::run(job, Hosts { placed, ssh, remote, dir, address: args.master_addr, port: args.port })
}

/// The command that runs a command on another host, if `--ssh` is not given. An empty variable counts as not set.
fn ssh_by_default(variable: Option<OsString>) -> Result<String, String> {
    match variable.filter(|text| !text.is_empty()) {
        None => Ok(SSH.into()),
        Some(text) => {
            text.into_string().map_err(|text| format!("{SSH_VARIABLE} is {text:?}, which is not UTF-8"))
        }
    }
}

/// The hosts asked for, if any were.
fn hosts(args: &RunArgs) -> io::Result<Option<Vec<Host>>> {
    let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
    if let Some(text) = &args.hosts {
        return hosts::list(text).map(Some).map_err(|problem| invalid(format!("--hosts: {problem}")));
    }
    let Some(path) = &args.host_file else { return Ok(None) };
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot read the host file {shown}: {error}"))
    })?;
    hosts::file(&text).map(Some).map_err(|problem| invalid(format!("the host file {shown}: {problem}")))
}

/// Variables that the launcher sets, or takes away, for each rank.
const OURS: [&str; 9] = [
    launch::RESTART,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ALLSTREAM_PORT",
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
    fn the_command_for_other_hosts_is_the_variables_or_ssh() {
        for unset in [None, Some(OsString::new())] {
            assert_eq!(ssh_by_default(unset).unwrap(), SSH);
        }
        assert_eq!(ssh_by_default(Some("other -p 1".into())).unwrap(), "other -p 1");
    }

    #[test]
    fn variables_are_split_at_the_first_equals_sign() {
        assert_eq!(variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(variable("A="), Ok(("A".into(), "".into())));
        assert!(variable("A").is_err());
        assert!(variable("=b").is_err());
        assert!(variable("RANK=3").is_err());
    }
}
