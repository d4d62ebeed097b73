//! One job on several hosts: an agent on each, through ssh or, on this host, without.

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

use super::agent::{self, Order};
use super::event::Event;
use super::hosts::{Host, quoted};
use super::member::{Agent, Kind, Member, Said, watch};
use super::processes::MARK;
use super::relay::{Source, Stream};
use super::supervise::{Ended, Started, supervise};
use super::{Job, Policy, RESTART, stdin, survive_nobody, token, with_restarts};
use crate::{Exit, own};

/// Where the ranks of a job go, and how they are reached.
#[derive(Debug)]
pub(crate) struct Hosts {
    /// Each host with its ranks; rank 0's host is the first.
    pub(crate) placed: Vec<(Host, Range<usize>)>,
    /// The command that runs a command on another host: `ssh` and its options.
    pub(crate) ssh: Vec<String>,
    /// The words that start `allstream` on the other hosts.
    pub(crate) remote: Vec<OsString>,
    /// The directory in which the ranks start.
    pub(crate) dir: PathBuf,
    /// The address at which all ranks reach rank 0. `None`: 127.0.0.1 if all ranks are on this host; else the first host's name, without the
    /// user, or this host's own name if the first host is given as `localhost` or a loopback address.
    pub(crate) address: Option<String>,
    /// Rank 0's port; 0: any free one.
    pub(crate) port: u16,
}

/// Variables `ALLSTREAM_*` that are not passed to other hosts: each host has its own, or the order carries the value in another way.
const NOT_PASSED: [&str; 8] = [
    RESTART,
    MARK,
    "ALLSTREAM_TOKEN",
    "ALLSTREAM_TOKEN_FILE",
    "ALLSTREAM_RENDEZVOUS_FD",
    "ALLSTREAM_HOST_ID",
    "ALLSTREAM_PORT",
    "ALLSTREAM_SSH",
];

/// Runs a job on several hosts to its end; `job.ranks` is the number of ranks on all hosts. Otherwise as
/// [`run`](super::run).
///
/// # Errors
/// The agents could not be started; those that were are stopped.
pub(crate) fn run(job: Job, hosts: Hosts) -> io::Result<Exit> {
    with_restarts(job, |job| once(job, &hosts))
}

fn once(job: &Job, hosts: &Hosts) -> io::Result<Ended> {
    let token = token(job)?;
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let here = |host: &Host| host.is_here(&own);
    let address = match (&hosts.address, hosts.placed.first()) {
        (Some(address), _) => address.clone(),
        _ if hosts.placed.iter().all(|(host, _)| here(host)) => "127.0.0.1".into(),
        (None, Some((first, _))) if first.is_loopback() => own.clone(),
        (None, Some((first, _))) => first.address().into(),
        (None, None) => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a job needs at least one host"));
        }
    };
    let passed = std::env::vars_os().filter(|(key, _)| {
        let key = key.to_string_lossy();
        key.starts_with("ALLSTREAM_") && !NOT_PASSED.contains(&&*key)
    });
    let env: Vec<_> =
        passed.chain(job.env.iter().filter(|(key, _)| key != "ALLSTREAM_TOKEN").cloned()).collect();
    let order = |host: &Host, ranks: &Range<usize>, port| Order {
        version: agent::version(),
        host: host.name.clone(),
        first: ranks.start,
        count: ranks.len(),
        size: job.ranks,
        dir: hosts.dir.clone().into(),
        program: job.program.clone().into(),
        args: job.args.clone(),
        env: env.clone(),
        prefix: job.prefix,
        stdin: job.stdin,
        logs: job.logs.clone().map(Into::into),
        // Only the launcher knows how many ranks are left on all hosts, so it alone applies `min_ranks`.
        policy: Policy { min_ranks: 0, ..job.policy },
        bind: job.bind,
        address: address.clone(),
        port,
        token: token.clone(),
    };
    let (events, inbox) = mpsc::channel();
    supervise(job.policy, &events, inbox, |members, _| {
        let mut streams = Vec::new();
        for (host, ranks) in &hosts.placed {
            let command = if here(host) { local()? } else { over_ssh(hosts, host)? };
            let agent = (host, ranks, command);
            streams.extend(start(agent, job.prefix, members, &events)?);
        }
        let mut placed = hosts.placed.iter();
        // Only the first agent gets its order now: the others' orders need the port that the first one opens.
        if let (Some((host, ranks)), Some(member)) = (placed.next(), members.first()) {
            member.say(order(host, ranks, hosts.port).line()?);
        }
        let port_known = move |members: &[Member], port| {
            for ((host, ranks), member) in placed.zip(members.iter().skip(1)) {
                member.say(order(host, ranks, port).line()?);
            }
            // From now on an agent accepts pieces of stdin: its order has been sent before them.
            let have_one = members.iter().filter(|member| member.ranks().any(|rank| job.stdin.reaches(rank)));
            let sinks: Vec<_> = have_one.filter_map(Member::stdin_sink).collect();
            if sinks.is_empty() { Ok(()) } else { stdin::read_for(sinks) }
        };
        Ok(Started { streams, port_known: Some(Box::new(port_known)) })
    })
}

/// The command that starts the agent of this host.
fn local() -> io::Result<Command> {
    let mut command = own::command()?;
    command.args(["run", "--agent"]);
    Ok(command)
}

/// The command that starts the agent of another host. The shell there sees only the words that start `allstream`, and nothing of the user's program.
fn over_ssh(hosts: &Hosts, host: &Host) -> io::Result<Command> {
    let invalid = |problem: &str| io::Error::new(io::ErrorKind::InvalidInput, problem);
    let (ssh, options) = hosts.ssh.split_first().ok_or_else(|| invalid("--ssh names no command"))?;
    let quoted = |word: &OsString| word.to_str().map(quoted);
    let remote = hosts.remote.iter().map(quoted).collect::<Option<Vec<_>>>().ok_or_else(|| {
        invalid("the path of this command is not UTF-8; name it on the other hosts with --remote-bin")
    })?;
    let mut command = Command::new(ssh);
    command.args(options).arg(&host.name).arg(format!("exec {} run --agent", remote.join(" ")));
    Ok(command)
}

/// Starts an agent, which then waits for its order.
fn start(
    (host, ranks, mut command): (&Host, &Range<usize>, Command),
    prefix: bool,
    members: &mut Vec<Member>,
    events: &Sender<Event>,
) -> io::Result<Vec<Stream>> {
    let name = &host.name;
    let shown = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    survive_nobody(&mut command, None, None, None);
    let mut child = command.spawn().map_err(|error| {
        io::Error::new(error.kind(), format!("host {name}: cannot start `{shown}`: {error}"))
    })?;
    let (orders, lines) = mpsc::channel::<Said>();
    let orders = Arc::new(orders);
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let member = members.len();
    let agent = Agent {
        host: name.clone(),
        ranks: ranks.clone(),
        orders: Some(orders),
        greeted: false,
        may_have_greeted: false,
    };
    watch(members, child, Kind::Agent(agent), events)?;
    if let Some(mut stdin) = stdin {
        // A thread writes, because the write blocks when the connection is stuck and the pipe is full. Once all senders of `orders` are
        // dropped, the thread closes the pipe.
        thread::Builder::new().name(format!("to {name}")).stack_size(64 << 10).spawn(move || {
            for Said { bytes, written } in lines {
                if stdin.write_all(&bytes).and_then(|()| stdin.flush()).is_err() {
                    break;
                }
                written.map(|written| written.send(()));
            }
        })?;
    }
    let events = events.clone();
    let greeting = move |line: &[u8]| {
        let port = agent::greeting(line);
        port.map(|port| events.send(Event::Greeted { member, port })).is_some()
    };
    let out = stdout.map(|pipe| Stream::agent(name, Source::Stdout(pipe), prefix, Some(Box::new(greeting))));
    let err = stderr.map(|pipe| Stream::agent(name, Source::Stderr(pipe), prefix, None));
    Ok(out.into_iter().chain(err).collect())
}
