//! Where the ranks of a world meet, and which of them this one is: given in code, or read from the environment that a launcher has set.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::address::Address;
use super::addresses::Reach;
use super::handshake::Token;
use super::host;
use super::launchers::{self, Lookup, Meeting, check_place};
use super::link_choice::LinkChoice;
use super::rdma::{Need, Prospect};
use super::registration::Heartbeat;
use crate::error::Error;
use crate::plan::choices::Choices;
use crate::tuning::Table;
use crate::types::{LinkClass, Rank};

const FROM_ENV: &str = "Rendezvous::from_env";

/// Where the ranks of a world meet, and which of them this one is.
///
/// Rank 0 listens at the address; everyone registers there and learns of all others. Nothing but the
/// shared secret (the *token*) makes a process a member.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    /// `None` only if `size` is 1, or if there is a note.
    pub(crate) address: Option<Address>,
    /// The file in which rank 0 leaves its address and the secret, if nothing else tells them.
    pub(crate) note: Option<PathBuf>,
    pub(crate) token: Option<Token>,
    pub(crate) timeout: Duration,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) link: LinkChoice,
    /// The launcher has said that all ranks are on this host.
    pub(crate) is_one_host: bool,
    /// What this rank has for links over RDMA, if its links may use it.
    pub(crate) rdma: Option<Prospect>,
    pub(crate) host_id: Option<String>,
    pub(crate) listener: Option<Listener>,
    /// The algorithms that the tuner's table chooses, if this is rank 0.
    pub(crate) choices: Choices,
    /// Whether `choices` was set in code, so that the environment is not asked for a table.
    pub(crate) chosen: bool,
    /// Where this rank's own listener may be. None: as the environment says.
    pub(crate) reach: Option<Reach>,
}

/// Rank 0's listening socket, if it was opened before the ranks meet.
#[derive(Clone, Debug)]
pub(crate) enum Listener {
    /// Inherited from the process that started this one.
    Inherited(RawFd),
    /// Given in code.
    Given(Arc<TcpListener>),
}

/// The longest deadline: 116 days. A longer one that is given in code is shortened to it, so that adding it to the current time cannot overflow.
const LONGEST: Duration = Duration::from_secs(10_000_000);

fn seconds(name: &str, text: &str) -> Result<Duration, String> {
    text.trim()
        .parse::<f64>()
        .ok()
        .filter(|s| *s >= 0.001 && *s <= LONGEST.as_secs_f64())
        .map(Duration::from_secs_f64)
        .ok_or_else(|| {
            format!("{name} is `{text}`; expected seconds from 0.001 to 10000000, such as 60 or 2.5")
        })
}

impl Rendezvous {
    pub(crate) fn from_lookup_or_alone(raw: Lookup<'_>) -> Result<Rendezvous, Error> {
        let is_set = |name: &str| raw(name).is_some_and(|value| !value.trim().is_empty());
        if launchers::marks().any(is_set) { Self::from_lookup(raw) } else { Ok(Self::alone()) }
    }

    pub(crate) fn from_lookup(raw: Lookup<'_>) -> Result<Rendezvous, Error> {
        let get = |name: &str| raw(name).filter(|v| !v.trim().is_empty());
        Self::look_up(&get).map_err(|problem| Error::invalid(FROM_ENV, problem))
    }

    fn look_up(get: Lookup<'_>) -> Result<Rendezvous, String> {
        let (rank, size) = launchers::place(get)?;
        Self::look_up_as(get, rank, size)
    }

    /// If two launchers give this process different ranks: the rendezvous by which it tells rank 0 of that, as a rank other than 0. None if they
    /// contradict each other in nothing, or speak of worlds of different sizes.
    pub(super) fn disputed(raw: Lookup<'_>) -> Option<Rendezvous> {
        let get = |name: &str| raw(name).filter(|v| !v.trim().is_empty());
        let (rank, size) = launchers::disputed(&get)?;
        Self::look_up_as(&get, rank, size).ok()
    }

    fn look_up_as(get: Lookup<'_>, rank: Rank, size: usize) -> Result<Rendezvous, String> {
        let mut found = Rendezvous::bare(rank, size);
        if size > 1 {
            match launchers::meeting(get)? {
                Meeting::At(address) => {
                    found.address = Some(address);
                    found.token = Some(secret(get)?);
                }
                Meeting::Note(path) => found.note = Some(path),
            }
        }
        if let Some(text) = get("ALLSTREAM_RENDEZVOUS_TIMEOUT") {
            found.timeout = seconds("ALLSTREAM_RENDEZVOUS_TIMEOUT", &text)?;
        }
        if let Some(text) = get("ALLSTREAM_HEARTBEAT_TIMEOUT") {
            found = found.heartbeat(seconds("ALLSTREAM_HEARTBEAT_TIMEOUT", &text)?);
        }
        if let Some(text) = get("ALLSTREAM_LINK") {
            found.link = text.parse().map_err(|wanted| format!("ALLSTREAM_LINK is `{text}`; {wanted}"))?;
        }
        found.host_id = get("ALLSTREAM_HOST_ID");
        let local = get("LOCAL_WORLD_SIZE").and_then(|text| text.trim().parse::<usize>().ok());
        found.is_one_host = local == Some(size);
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
            note: None,
            token: None,
            timeout: Duration::from_secs(60),
            heartbeat: Heartbeat::default(),
            link: LinkChoice::AUTO,
            is_one_host: false,
            rdma: None,
            host_id: None,
            listener: None,
            choices: Choices::default(),
            chosen: false,
            reach: None,
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

    /// Completes the rendezvous of a world that has all its ranks in this process: any free port if no address was given, a random secret if none was
    /// given.
    pub(crate) fn of_one_process(mut self) -> Result<Rendezvous, Error> {
        let doing = |e| Error::system("open a port at which the devices of this process meet", e);
        if self.address.is_none() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(doing)?;
            let port = listener.local_addr().map_err(doing)?.port();
            self.address = Some(Address { host: Ipv4Addr::LOCALHOST.to_string(), port });
            self = self.listener(listener);
        }
        if self.token.is_none() {
            self = self.token(host::random::<16>()?);
        }
        Ok(self)
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

    /// How long ranks wait for each other to come. Default 60 s; 10,000,000 s (116 days) at most, also where more is given.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(LONGEST);
        self
    }

    /// After how long a rank that sends nothing, not even heartbeats, counts as lost. Default 10 s; 20 ms at least, and
    /// 10,000,000 s at most, whatever is given. What rank 0 says counts for all ranks.
    #[must_use]
    pub fn heartbeat(mut self, silent: Duration) -> Self {
        let silent = silent.clamp(Duration::from_millis(20), LONGEST);
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

    /// Names the host of this rank. Ranks that give the same name count as on one host, ranks that give different names as on different hosts.
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

    /// Rank 0 chooses algorithms by this table for everyone, or (`None`) by the rules alone, whatever
    /// [`tuning::VARIABLE`](crate::tuning::VARIABLE) says. Other ranks' tables are not used.
    #[must_use]
    pub fn tuning(mut self, table: Option<&Table>) -> Self {
        self.choices = table.map_or_else(Choices::default, |table| table.choices().up_to(self.size));
        self.chosen = true;
        self
    }

    /// Opens a socket where rank 0 may listen, at an address of this host by which other hosts reach it: for a program that has a way
    /// of its own to tell the other ranks where to meet (a store, a database, a scheduler). The socket and its address are for
    /// [`listener`](Rendezvous::listener) and [`tcp`](Rendezvous::tcp).
    ///
    /// `near` is the host and the port of something that all ranks reach, such as the store: the address is then the one from which this host reaches
    /// it. If `near` is not given, or is a name that leads to this host itself, the address is the one from which this host reaches the internet.
    /// `ALLSTREAM_INTERFACE` chooses another address, and `ALLSTREAM_PORTS` says which ports may be taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a variable that does not parse, or to which no address fits; [`Error::System`] where no socket can be
    /// opened.
    pub fn listen_for_ranks(near: Option<(&str, u16)>) -> Result<(TcpListener, SocketAddr), Error> {
        Reach::from_env()?.listen_for_ranks(near)
    }

    /// Which rank this is.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this rank's links may go over RDMA.
    pub(crate) fn rdma_need(&self) -> Need {
        match self.link.class() {
            _ if self.size == 1 => Need::Never,
            Some(LinkClass::RDMA) => Need::Chosen,
            None if !self.is_one_host || self.host_id.is_some() => Need::Between,
            _ => Need::Never,
        }
    }

    /// The address, or the path of the note, for messages to people.
    pub(crate) fn place(&self) -> String {
        match (&self.address, &self.note) {
            (Some(address), _) => address.to_string(),
            (None, Some(path)) => path.display().to_string(),
            (None, None) => "(no address)".into(),
        }
    }

    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Rendezvous { address: self.place(), rank: self.rank, problem: problem.into() }
    }
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
