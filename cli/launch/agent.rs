//! The agent: the launcher's helper process on one of several hosts. It starts the ranks there, relays what they write, and lets no rank
//! outlive the launcher, or the connection to it.
//!
//! It is this command again (`allstream run --agent`), started through ssh, or directly on the launcher's own host.
//! Its order comes as one line on stdin, so that neither the secret nor the user's program and arguments stand in a
//! command line. After it, a line `signal TERM` hands that signal to the ranks, and a line `stdin 5` says that the next five bytes are for
//! the stdin of the ranks that have one (`stdin 0` ends their stdin). When the agent's stdin ends, it kills the ranks: the system closes
//! that stdin however the launcher ends. On stdout the agent writes one line as a greeting, and then the ranks' output.

use crate::Exit;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;

use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGTERM;

use super::bind::Bind;
use super::event::Event;
use super::relay::write_all;
use super::stdin::{Input, KEPT_BY_AGENT, Queue, Stdin};
use super::{Job, Part, Policy, complain, door, signals};

/// The start of a line with the name of a signal for the agent's ranks.
const SIGNAL: &str = "signal ";
/// The start of a line with the number of bytes that follow for the ranks' stdin.
const STDIN: &str = "stdin ";
/// The most bytes that follow one such line.
const MOST_AT_ONCE: usize = 1 << 20;
/// The start of the greeting, before the version and the port.
const GREETING: &str = "allstream-agent";
/// The most bytes of an order. The system's own limit for the arguments and variables of a command is lower.
const MAX_ORDER: u64 = 64 << 20;
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What an agent is to do.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) version: String,
    /// The host as the launcher calls it, for messages.
    pub(super) host: String,
    /// Ranks `first..first + count` of `size` are here.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) size: usize,
    pub(super) dir: OsString,
    pub(super) program: OsString,
    pub(super) args: Vec<OsString>,
    pub(super) env: Vec<(OsString, OsString)>,
    pub(super) prefix: bool,
    pub(super) stdin: Stdin,
    pub(super) logs: Option<OsString>,
    pub(super) policy: Policy,
    pub(super) bind: Bind,
    /// Address and port of rank 0's rendezvous. Rank 0's agent opens the port (any free one if this is 0), and its greeting tells which one.
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) token: OsString,
}

impl Order {
    /// The order as one line of JSON, as it is sent.
    pub(super) fn line(&self) -> io::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(self).map_err(io::Error::other)?;
        line.push(b'\n');
        Ok(line)
    }
}

/// The line that tells an agent to hand this signal to its ranks.
pub(super) fn signal(signal: i32) -> Vec<u8> {
    format!("{SIGNAL}{}\n", signals::name(signal)).into_bytes()
}

/// The line and the bytes that give an agent's ranks a piece of stdin; an empty piece is the end of it.
pub(super) fn stdin(piece: &[u8]) -> Vec<u8> {
    [format!("{STDIN}{}\n", piece.len()).as_bytes(), piece].concat()
}

pub(super) fn version() -> String {
    VERSION.into()
}

/// The port in a greeting; `None` if the line is no greeting of this version.
pub(super) fn greeting(line: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(line).ok()?.trim_end();
    let (version, port) = text.strip_prefix(GREETING)?.strip_prefix(' ')?.split_once(' ')?;
    (version == VERSION).then(|| port.parse().ok()).flatten()
}

/// Runs the ranks that the order on stdin asks for.
///
/// # Errors
/// No order came, it was of another version, or the ranks could not be started.
pub(crate) fn run() -> io::Result<Exit> {
    signals::forget_ignored()?;
    let mut stdin = BufReader::new(io::stdin());
    let mut line = Vec::new();
    (&mut stdin).take(MAX_ORDER).read_until(b'\n', &mut line)?;
    if !line.ends_with(b"\n") {
        return Err(io::Error::other("the launcher went away before it said what to start"));
    }
    if line.starts_with(SIGNAL.as_bytes()) {
        return Ok(Exit::from(128 + SIGTERM as u8));
    }
    let order: Order = serde_json::from_slice(&line).map_err(|error| {
        io::Error::other(format!(
            "this is allstream {VERSION}, and the launcher's order does not parse: {error}"
        ))
    })?;
    let host = order.host.clone();
    let named = |error: io::Error| io::Error::new(error.kind(), format!("on {host}: {error}"));
    let (job, part) = prepare(order).map_err(named)?;
    let port = part.port;
    let queues: Vec<_> = part.inputs.iter().filter_map(Input::queue).collect();
    // The greeting begins a new line: a login shell may have written half a line before.
    let greeting = format!("\n{GREETING} {VERSION} {port}\n");
    write_all(&mut io::stdout().lock(), greeting.as_bytes())?;
    let ended = super::run_watched(&job, Some(part), |events| {
        thread::Builder::new().name("launcher".into()).spawn(move || obey(stdin, &queues, &events)).map(drop)
    });
    ended.map(|ended| Exit::from(ended.code)).map_err(named)
}

/// Does what the launcher says, until the connection to it ends. Nothing here waits for a rank.
fn obey(mut from: impl BufRead, queues: &[Arc<Queue>], events: &Sender<Event>) {
    let mut line = Vec::new();
    let mut has_room = true;
    loop {
        line.clear();
        if !matches!(from.read_until(b'\n', &mut line), Ok(length) if length > 0) {
            break;
        }
        let text = str::from_utf8(&line).unwrap_or_default().trim_end();
        if let Some(signal) = text.strip_prefix(SIGNAL).and_then(signals::by_name) {
            let _ = events.send(Event::Signal(signal));
        }
        let length = text.strip_prefix(STDIN).and_then(|length| length.parse().ok());
        if let Some(length) = length.filter(|length| *length <= MOST_AT_ONCE) {
            let mut piece = vec![0; length];
            if from.read_exact(&mut piece).is_err() {
                break;
            }
            let refused = queues.iter().filter(|queue| !queue.push_now(&piece)).count();
            if refused > 0 && std::mem::replace(&mut has_room, false) {
                let kept = KEPT_BY_AGENT >> 20;
                complain(&format!(
                    "a rank leaves more than {kept} MiB of its stdin unread; it finds the end there. Give it a file instead"
                ));
            }
        }
    }
    let _ = events.send(Event::Cut);
}

fn prepare(order: Order) -> io::Result<(Job, Part)> {
    if order.version != VERSION {
        let problem = format!(
            "this is allstream {VERSION}, but the launcher is {}; install the same on all hosts",
            order.version
        );
        return Err(io::Error::other(problem));
    }
    // A relative path of the program is looked up from this directory, too.
    std::env::set_current_dir(&order.dir).map_err(|error| {
        let dir = order.dir.display();
        io::Error::new(error.kind(), format!("cannot enter {dir}: {error}; name another with --dir"))
    })?;
    let listener = if order.first == 0 { Some(door::open_for(&order.address, order.port)?) } else { None };
    let port = match &listener {
        Some(listener) => listener.local_addr()?.port(),
        None => order.port,
    };
    let job = Job {
        ranks: order.count,
        program: PathBuf::from(order.program),
        args: order.args,
        prefix: order.prefix,
        stdin: order.stdin,
        logs: order.logs.map(PathBuf::from),
        env: order.env,
        policy: order.policy,
        restarts: 0,
        bind: order.bind,
    };
    let (host, address) = (Some(order.host), order.address);
    let (first, size, token) = (order.first, order.size, order.token);
    let inputs = Input::by_agent(job.stdin, first..first.saturating_add(job.ranks));
    Ok((job, Part { host, first, size, address, port, token, listener, inputs }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn orders_keep_every_byte_on_one_line() {
        let odd = OsString::from_vec(b"a b\n'\"$(x)\\ \xff".to_vec());
        let order = Order {
            version: version(),
            host: "h".into(),
            first: 2,
            count: 2,
            size: 4,
            dir: "/tmp".into(),
            program: odd.clone(),
            args: vec![odd.clone()],
            env: vec![("A".into(), odd)],
            prefix: true,
            stdin: Stdin::All,
            logs: Some("logs".into()),
            policy: Policy { min_ranks: 3, ..Policy::default() },
            bind: Bind::Numa,
            address: "h0".into(),
            port: 1,
            token: "t".into(),
        };
        let line = order.line().unwrap();
        assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
        assert_eq!(serde_json::from_slice::<Order>(&line).unwrap(), order);
    }

    #[test]
    fn greetings() {
        assert_eq!(greeting(format!("{GREETING} {VERSION} 4711\n").as_bytes()), Some(4711));
        for line in ["Welcome to h2\n", "allstream-agent 0.0.0 4711\n", "allstream-agent\n", "\n"] {
            assert_eq!(greeting(line.as_bytes()), None, "{line}");
        }
    }
}
