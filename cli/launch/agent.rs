//! The launcher's hand on one host of several: starts the ranks there, relays what they write, and lets none outlive
//! the launcher, or the connection to it.
//!
//! It is this command again (`allstream run --agent`), started through ssh, or directly on the launcher's own host.
//! What it is to do comes as one line on stdin, so that neither the secret nor anything of the user's stands in a
//! command line. Then a line `signal TERM` hands that signal to the ranks, a line `stdin 5` says that the next five bytes are for the
//! stdin of the ranks that have one (none: its end), and the end of stdin kills the ranks: that is what a launcher
//! leaves behind, however it ends. On stdout there is one line as a greeting, and then the ranks' output.

use crate::Exit;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
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
use super::{Job, Part, Policy, complain, signals};

/// Before the name of a signal that the agent's ranks are to get.
const SIGNAL: &str = "signal ";
/// Before the number of bytes that follow for their stdin.
const STDIN: &str = "stdin ";
/// More is never said at once.
const MOST_AT_ONCE: usize = 1 << 20;
/// Before the version and the port in the greeting.
const GREETING: &str = "allstream-agent";
/// The longest order: arguments and variables of one command fit the system's own limit, which is less.
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
    /// Where the world meets. Rank 0's agent opens the port, any if it is 0, and tells which.
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) token: OsString,
}

impl Order {
    /// As it travels: one line.
    pub(super) fn line(&self) -> io::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(self).map_err(io::Error::other)?;
        line.push(b'\n');
        Ok(line)
    }
}

/// Hands a signal to an agent's ranks.
pub(super) fn signal(signal: i32) -> Vec<u8> {
    format!("{SIGNAL}{}\n", signals::name(signal)).into_bytes()
}

/// Hands a piece of stdin to an agent's ranks; the empty one is the end.
pub(super) fn stdin(piece: &[u8]) -> Vec<u8> {
    [format!("{STDIN}{}\n", piece.len()).as_bytes(), piece].concat()
}

pub(super) fn version() -> String {
    VERSION.into()
}

/// The port in a greeting.
pub(super) fn greeting(line: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(line).ok()?.trim_end();
    let (version, port) = text.strip_prefix(GREETING)?.strip_prefix(' ')?.split_once(' ')?;
    (version == VERSION).then(|| port.parse().ok()).flatten()
}

/// Runs the ranks that the order on stdin asks for.
///
/// # Errors
/// There was no order, it is another version's, or the ranks could not be started.
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
    // Whatever a login shell has written before ends here.
    let greeting = format!("\n{GREETING} {VERSION} {port}\n");
    write_all(&mut io::stdout().lock(), greeting.as_bytes())?;
    let ended = super::run_watched(&job, Some(part), |events| {
        thread::Builder::new().name("launcher".into()).spawn(move || obey(stdin, &queues, &events)).map(drop)
    });
    ended.map(|ended| Exit::from(ended.code)).map_err(named)
}

/// Does what the launcher says, until it says nothing more. Nothing here waits for a rank.
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
    // Also the program is looked up from there.
    std::env::set_current_dir(&order.dir).map_err(|error| {
        let dir = order.dir.display();
        io::Error::new(error.kind(), format!("cannot enter {dir}: {error}; name another with --dir"))
    })?;
    let listener = if order.first == 0 { Some(listen(&order.address, order.port)?) } else { None };
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

/// Opens rank 0's port at the address where the others will come, or on all addresses if that one is not of this host
/// (a translated one), or if this host knows its name as a loopback address, where no other host would come.
fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let literal = host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok();
    let found = (host, port).to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    let own = found.into_iter().filter(|address| literal || !address.ip().is_loopback());
    let any: [SocketAddr; 2] = [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    let mut last = None;
    for address in own.chain(any) {
        match TcpListener::bind(address) {
            Ok(listener) => {
                // Long enough for a world that comes at once.
                rustix::net::listen(&listener, 4096)?;
                return Ok(listener);
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let problem = format!("port {port} is taken already; choose another with --port");
                return Err(io::Error::new(error.kind(), problem));
            }
            Err(error) => last = Some(error),
        }
    }
    let why = last.map(|error| format!(": {error}")).unwrap_or_default();
    Err(io::Error::other(format!("cannot listen at {host}, port {port}{why}")))
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

    #[test]
    fn a_port_of_this_host_is_opened() {
        let first = listen("127.0.0.1", 0).unwrap();
        let address = first.local_addr().unwrap();
        assert!(address.ip().is_loopback());
        let error = listen("127.0.0.1", address.port()).unwrap_err().to_string();
        assert!(error.contains("--port"), "{error}");
        // An address of documentation: none of this host's.
        assert!(listen("192.0.2.77", 0).unwrap().local_addr().unwrap().ip().is_unspecified());
    }
}
