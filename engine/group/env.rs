//! Where ranks meet and as whom: given in code, or found in the environment that a launcher set.

use std::fmt;
use std::net::{Ipv6Addr, TcpListener};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::handshake::Token;
use crate::error::Error;
use crate::types::Rank;

/// Launchers, and the variables in which they say rank and size. The first whose both are set is believed.
const LAUNCHERS: [(&str, &str, &str); 3] = [
    ("torchrun, allstream run", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
];

const FROM_ENV: &str = "Rendezvous::from_env";

/// Where the ranks of a world meet, and which of them this one is.
///
/// Rank 0 listens at the address; everyone registers there and learns of all others. Nothing but the
/// shared secret (the *token*) makes a process a member.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    /// `None` only where `size` is 1.
    pub(crate) address: Option<Address>,
    pub(crate) token: Option<Token>,
    pub(crate) timeout: Duration,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) link: LinkChoice,
    pub(crate) host_id: Option<String>,
    pub(crate) listener: Option<Listener>,
}

/// Which links the ranks of a world may use. All ranks must choose alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum LinkChoice {
    /// The nearest that connects two ranks: the process's own memory, shared memory, TCP.
    #[default]
    Auto,
    /// Shared memory between all ranks, also those of one process. An error where hosts differ.
    Shm,
    /// TCP between all ranks.
    Tcp,
    /// The process's own memory. An error where processes differ.
    InProc,
}

/// How ranks watch over each other. Rank 0's is everyone's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// A connection on which nothing was sent for this long carries a heartbeat.
    pub(crate) interval: Duration,
    /// A rank of which nothing was heard for this long is lost.
    pub(crate) silent: Duration,
}

impl Default for Heartbeat {
    fn default() -> Heartbeat {
        Heartbeat { interval: Duration::from_millis(500), silent: Duration::from_secs(10) }
    }
}

/// Rank 0's listening socket, if it was made before.
#[derive(Clone, Debug)]
pub(crate) enum Listener {
    /// Inherited from the process that started this one.
    Inherited(RawFd),
    /// Given in code.
    Given(Arc<TcpListener>),
}

/// `host:port`; an IPv6 address stands in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Address {
    /// Parses `host:port`, `[::1]:port`, with or without `tcp://` before it.
    fn parse(text: &str) -> Result<Address, String> {
        let wanted = || format!("expected tcp://HOST:PORT (an IPv6 address in brackets), found `{text}`");
        let rest = match text.split_once("://") {
            Some(("tcp", rest)) => rest,
            Some((scheme, _)) => return Err(format!("{}: `{scheme}` is not supported, `tcp` is", wanted())),
            None => text,
        };
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(wanted)?;
        Ok(Address {
            host: host_name(host).map_err(|e| format!("{}: {e}", wanted()))?,
            port: port_number(port).map_err(|e| format!("{}: {e}", wanted()))?,
        })
    }
}

/// A host name or an address; an IPv6 address must be in brackets where a port follows.
fn host_name(text: &str) -> Result<String, String> {
    let (inner, bracketed) = match text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        Some(inner) => (inner, true),
        None => (text, false),
    };
    if inner.is_empty() {
        return Err("the host is empty".into());
    }
    let bare = inner.split('%').next().unwrap_or(inner);
    if bracketed && bare.parse::<Ipv6Addr>().is_err() {
        return Err(format!("`{inner}` is not an IPv6 address"));
    }
    if !bracketed && inner.contains(':') {
        return Err(format!("an IPv6 address is written in brackets: [{inner}]"));
    }
    if inner.chars().any(|c| c.is_whitespace() || c.is_control() || "/@[]".contains(c)) {
        return Err(format!("`{inner}` is not a host name"));
    }
    Ok(inner.into())
}

fn port_number(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) => Err("port 0 cannot be known to the other ranks".into()),
        Ok(port) => Ok(port),
        Err(_) => Err(format!("`{text}` is not a port (1 to 65535)")),
    }
}

fn check_place(rank: Rank, size: usize) -> Result<(), String> {
    if size == 0 {
        return Err("a world has at least 1 rank; the size given is 0".into());
    }
    if rank >= size {
        return Err(format!("rank {rank} does not exist in a world of {size}: ranks are 0 to {}", size - 1));
    }
    Ok(())
}

fn seconds(name: &str, text: &str) -> Result<Duration, String> {
    text.trim()
        .parse::<f64>()
        .ok()
        .filter(|s| *s >= 0.001 && *s <= 1e7)
        .map(Duration::from_secs_f64)
        .ok_or_else(|| {
            format!("{name} is `{text}`; expected seconds from 0.001 to 10000000, such as 60 or 2.5")
        })
}

/// Reads one variable of the environment; an empty one counts as not set.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Rendezvous {
    /// Reads rank, size, address, secret and options from the environment.
    ///
    /// - Rank and size: `RANK` and `WORLD_SIZE` (torchrun, `allstream run`), `OMPI_COMM_WORLD_RANK` and
    ///   `OMPI_COMM_WORLD_SIZE` (Open MPI), or `SLURM_PROCID` and `SLURM_NTASKS` (Slurm).
    /// - Address: `MASTER_ADDR` (under Slurm, `SLURM_LAUNCH_NODE_IPADDR` if unset) and `MASTER_PORT`.
    /// - Secret: `ALLSTREAM_TOKEN`, or `ALLSTREAM_TOKEN_FILE`, or `ALLSTREAM_INSECURE=1` for none.
    /// - Options: `ALLSTREAM_RENDEZVOUS_TIMEOUT` and `ALLSTREAM_HEARTBEAT_TIMEOUT` (seconds),
    ///   `ALLSTREAM_LINK` (`auto`, `shm`, `tcp`, `inproc`), `ALLSTREAM_HOST_ID` (ranks that say the same
    ///   count as on one host), `ALLSTREAM_RENDEZVOUS_FD` (rank 0's listening socket, inherited).
    ///
    /// # Errors
    /// [`Error::Invalid`] names the variables that were looked for and what was found.
    pub fn from_env() -> Result<Rendezvous, Error> {
        Self::from_lookup(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    pub(crate) fn from_lookup(raw: Lookup<'_>) -> Result<Rendezvous, Error> {
        let get = |name: &str| raw(name).filter(|v| !v.trim().is_empty());
        Self::look_up(&get).map_err(|problem| Error::invalid(FROM_ENV, problem))
    }

    fn look_up(get: Lookup<'_>) -> Result<Rendezvous, String> {
        let (rank, size) = place(get)?;
        let mut found = Rendezvous::bare(rank, size);
        if size > 1 {
            found.address = Some(master(get)?);
            found.token = Some(secret(get)?);
        }
        if let Some(text) = get("ALLSTREAM_RENDEZVOUS_TIMEOUT") {
            found.timeout = seconds("ALLSTREAM_RENDEZVOUS_TIMEOUT", &text)?;
        }
        if let Some(text) = get("ALLSTREAM_HEARTBEAT_TIMEOUT") {
            found = found.heartbeat(seconds("ALLSTREAM_HEARTBEAT_TIMEOUT", &text)?);
        }
        if let Some(text) = get("ALLSTREAM_LINK") {
            found.link = match text.trim().to_ascii_lowercase().as_str() {
                "auto" => LinkChoice::Auto,
                "shm" => LinkChoice::Shm,
                "tcp" => LinkChoice::Tcp,
                "inproc" => LinkChoice::InProc,
                _ => return Err(format!("ALLSTREAM_LINK is `{text}`; expected auto, shm, tcp or inproc")),
            };
        }
        found.host_id = get("ALLSTREAM_HOST_ID");
        if let Some(text) = get("ALLSTREAM_RENDEZVOUS_FD").filter(|_| rank == 0 && size > 1) {
            let fd = text.trim().parse::<RawFd>().ok().filter(|fd| *fd > 2).ok_or_else(|| {
                format!("ALLSTREAM_RENDEZVOUS_FD is `{text}`; expected the number of an inherited descriptor above 2")
            })?;
            found.listener = Some(Listener::Inherited(fd));
        }
        Ok(found)
    }

    fn bare(rank: Rank, size: usize) -> Rendezvous {
        Rendezvous {
            rank,
            size,
            address: None,
            token: None,
            timeout: Duration::from_secs(60),
            heartbeat: Heartbeat::default(),
            link: LinkChoice::Auto,
            host_id: None,
            listener: None,
        }
    }

    /// Rank `rank` of `size` meets the others at `tcp://host:port`, where rank 0 listens.
    ///
    /// A world of more than one rank needs a [`token`](Self::token) as well.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address does not parse or there is no such rank.
    pub fn tcp(address: &str, rank: Rank, size: usize) -> Result<Rendezvous, Error> {
        let invalid = |problem| Error::invalid("Rendezvous::tcp", problem);
        check_place(rank, size).map_err(invalid)?;
        let address = Address::parse(address).map_err(invalid)?;
        Ok(Rendezvous { address: Some(address), ..Rendezvous::bare(rank, size) })
    }

    /// A world of one rank: no network, no secret.
    pub fn alone() -> Rendezvous {
        Rendezvous::bare(0, 1)
    }

    /// The secret that makes a process a member; the same on all ranks.
    #[must_use]
    pub fn token(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.token = Some(Token::new(secret.as_ref()));
        self
    }

    /// No secret: whoever reaches the port is a member. For a trusted machine only.
    #[must_use]
    pub fn insecure(self) -> Self {
        self.token([])
    }

    /// How long ranks wait for each other to come. Default 60 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// After how long a rank that sends nothing, not even heartbeats, counts as lost. Default 10 s;
    /// rank 0's is everyone's.
    #[must_use]
    pub fn heartbeat(mut self, silent: Duration) -> Self {
        let silent = silent.max(Duration::from_millis(1));
        let interval = Heartbeat::default().interval.min(silent / 4).max(Duration::from_micros(100));
        self.heartbeat = Heartbeat { interval, silent };
        self
    }

    /// Which links may be used; the same on all ranks.
    #[must_use]
    pub fn link(mut self, link: LinkChoice) -> Self {
        self.link = link;
        self
    }

    /// Names the host: ranks that say the same count as on one host, others as on different ones.
    #[must_use]
    pub fn host_id(mut self, label: impl Into<String>) -> Self {
        self.host_id = Some(label.into());
        self
    }

    /// Rank 0 listens on this socket instead of opening one, so that the port is known, and taken, before
    /// any rank starts. Other ranks do not use it.
    #[must_use]
    pub fn listener(mut self, listener: TcpListener) -> Self {
        self.listener = Some(Listener::Given(Arc::new(listener)));
        self
    }

    /// Which rank this is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The address, for messages to people.
    pub(crate) fn place(&self) -> String {
        self.address.as_ref().map_or_else(|| "(no address)".into(), Address::to_string)
    }

    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Rendezvous { address: self.place(), rank: self.rank, problem: problem.into() }
    }
}

/// Rank and size, from the first launcher that says both.
fn place(get: Lookup<'_>) -> Result<(Rank, usize), String> {
    let mut half = Vec::new();
    for (launcher, rank_name, size_name) in LAUNCHERS {
        let (rank, size) = match (get(rank_name), get(size_name)) {
            (Some(rank), Some(size)) => (rank, size),
            (None, None) => continue,
            (Some(rank), None) => {
                half.push(format!("{rank_name}={rank} is set, but {size_name} is not"));
                continue;
            }
            (None, Some(size)) => {
                half.push(format!("{size_name}={size} is set, but {rank_name} is not"));
                continue;
            }
        };
        let number = |name: &str, text: &str| {
            text.trim().parse::<usize>().map_err(|_| format!("{name} is `{text}`; expected a whole number"))
        };
        let (rank, size) = (number(rank_name, &rank)?, number(size_name, &size)?);
        check_place(rank, size)
            .map_err(|e| format!("{rank_name}={rank}, {size_name}={size} ({launcher}): {e}"))?;
        return Ok((rank, size));
    }
    let wanted = LAUNCHERS.map(|(launcher, rank, size)| format!("{rank} and {size} ({launcher})")).join(", ");
    let found = if half.is_empty() { "none of them is set".into() } else { half.join("; ") };
    Err(format!(
        "no rank: looked for {wanted}; {found}. Start the ranks with `allstream run -n 4 PROGRAM`, or with torchrun, \
         mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and ALLSTREAM_TOKEN yourself"
    ))
}

/// The address where rank 0 listens.
fn master(get: Lookup<'_>) -> Result<Address, String> {
    let (name, host) = [("MASTER_ADDR", get("MASTER_ADDR")), ("SLURM_LAUNCH_NODE_IPADDR", slurm_address(get))]
        .into_iter()
        .find_map(|(name, value)| value.map(|v| (name, v)))
        .ok_or_else(|| {
            String::from(
                "no address: MASTER_ADDR is not set (nor SLURM_LAUNCH_NODE_IPADDR, which counts under Slurm); set it to \
                 the name or address of rank 0's host, 127.0.0.1 if all ranks run on one",
            )
        })?;
    let trimmed = host.trim();
    let bare = trimmed.split('%').next().unwrap_or(trimmed).parse::<Ipv6Addr>().is_ok();
    let host = if bare { Ok(trimmed.into()) } else { host_name(trimmed) };
    let host = host.map_err(|e| format!("{name} is `{trimmed}`; expected a host name or an address: {e}"))?;
    let port = get("MASTER_PORT").ok_or_else(|| {
        String::from(
            "no port: MASTER_PORT is not set; set it to a free port of rank 0's host, the same on all ranks",
        )
    })?;
    let port = port_number(port.trim()).map_err(|e| format!("MASTER_PORT: {e}"))?;
    Ok(Address { host, port })
}

fn slurm_address(get: Lookup<'_>) -> Option<String> {
    get("SLURM_PROCID").and_then(|_| get("SLURM_LAUNCH_NODE_IPADDR"))
}

/// The secret shared by all ranks.
fn secret(get: Lookup<'_>) -> Result<Token, String> {
    if let Some(token) = get("ALLSTREAM_TOKEN") {
        return Ok(Token::new(token.trim().as_bytes()));
    }
    if let Some(path) = get("ALLSTREAM_TOKEN_FILE") {
        let text = std::fs::read(&path)
            .map_err(|e| format!("ALLSTREAM_TOKEN_FILE is `{path}`, which cannot be read: {e}"))?;
        let token = text.trim_ascii();
        if token.is_empty() {
            return Err(format!("ALLSTREAM_TOKEN_FILE is `{path}`, which is empty; put a secret in it"));
        }
        return Ok(Token::new(token));
    }
    match get("ALLSTREAM_INSECURE").as_deref().map(str::trim) {
        Some("1" | "true" | "yes") => Ok(Token::new(b"")),
        Some(other) if !matches!(other, "0" | "false" | "no") => {
            Err(format!("ALLSTREAM_INSECURE is `{other}`; expected 1 or 0"))
        }
        _ => Err("no secret: neither ALLSTREAM_TOKEN nor ALLSTREAM_TOKEN_FILE is set. `allstream run` makes one; with \
                  another launcher, set ALLSTREAM_TOKEN to the same secret on all ranks (for instance from `openssl rand \
                  -hex 32`). On a trusted machine only, ALLSTREAM_INSECURE=1 does without"
            .into()),
    }
}

#[cfg(test)]
#[path = "tests/env.rs"]
mod tests;
