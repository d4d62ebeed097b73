//! How the ranks of a world find each other: everyone registers with rank 0, and gets the table of all.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::accept::{self, Visit};
use super::connect::{connect_once, resolve};
use super::env::{Address, Heartbeat, LinkChoice, Listener, Rendezvous};
use super::handshake::{self, DEADLINE, Purpose, Refusal, Token};
use super::host::{self, Process};
use super::lobby::{Lobby, absent};
use super::wire::Frames;
use crate::error::Error;
use crate::plan::choices::Choices;
use crate::types::Rank;

/// How often rank 0 tells those who wait for whom they wait, if that changed.
const NEWS: Duration = Duration::from_millis(250);
/// How much longer than its own deadline a registered rank waits for rank 0 to say who is missing.
const GRACE: Duration = Duration::from_secs(2);

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Registration {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    /// Where its own listener can be reached; the best first.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) process: Process,
    /// The name of its unix socket in the abstract namespace.
    pub(crate) socket: Option<String>,
    pub(crate) link: LinkChoice,
}

/// What every rank knows of the world once all have come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) world: [u8; 16],
    pub(crate) members: Vec<Registration>,
    pub(crate) heartbeat: Heartbeat,
    /// Rank 0's choice of algorithms is everyone's.
    pub(crate) choices: Choices,
}

/// From rank 0 to a rank that has registered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum News {
    /// These have not come yet.
    Waiting { missing: Vec<Rank> },
    /// All have come.
    Formed(Box<Table>),
    /// There will be no world.
    Failed { problem: String },
}

/// A rank's part of a world that has formed: the table, and its own listener.
pub(crate) struct Formed {
    pub(crate) table: Table,
    pub(crate) listener: TcpListener,
}

/// This rank, before it knows its addresses.
pub(crate) struct Me<'a> {
    pub(crate) rendezvous: &'a Rendezvous,
    pub(crate) address: &'a Address,
    pub(crate) token: &'a Token,
    pub(crate) process: Process,
    pub(crate) socket: Option<String>,
    pub(crate) deadline: Instant,
}

impl Me<'_> {
    fn registration(&self, addresses: Vec<SocketAddr>) -> Registration {
        let Rendezvous { rank, size, link, .. } = *self.rendezvous;
        let (process, socket) = (self.process.clone(), self.socket.clone());
        Registration { rank, size, addresses, process, socket, link }
    }

    fn error(&self, problem: impl Into<String>) -> Error {
        self.rendezvous.error(problem)
    }

    /// Meets the others. Every rank ends within about the rendezvous timeout.
    pub(crate) async fn meet(&self) -> Result<Formed, Error> {
        if self.rendezvous.rank == 0 { self.host().await } else { self.visit().await }
    }

    // ---- every rank but 0 ----

    async fn visit(&self) -> Result<Formed, Error> {
        let (mut stream, listener) = self.register().await?;
        let mut frames = Frames::default();
        let mut missing: Option<Vec<Rank>> = None;
        let size = self.rendezvous.size;
        loop {
            let news = timeout_at(self.deadline + GRACE, frames.next::<News, _>(&mut stream)).await;
            match news {
                Err(_) => {
                    let who = match &missing {
                        Some(missing) => absent(missing, size),
                        None => "the others".into(),
                    };
                    let after = self.rendezvous.timeout;
                    return Err(self
                        .error(format!("registered with rank 0, but {who} did not come within {after:?}")));
                }
                Ok(Ok(Some(News::Waiting { missing: now }))) => missing = Some(now),
                Ok(Ok(Some(News::Failed { problem }))) => return Err(self.error(problem)),
                Ok(Ok(Some(News::Formed(table)))) => {
                    check_table(&table, self.rendezvous)
                        .map_err(|e| self.error(format!("rank 0 sent {e}")))?;
                    return Ok(Formed { table: *table, listener });
                }
                Ok(Ok(None)) => {
                    let problem = "rank 0 went away before the world had formed; its own output says why";
                    return Err(self.error(problem));
                }
                Ok(Err(why)) => return Err(self.error(format!("reading from rank 0: {why}"))),
            }
        }
    }

    /// Connects to rank 0 until that works, and says who this is.
    async fn register(&self) -> Result<(TcpStream, TcpListener), Error> {
        let mut pause = Duration::from_millis(10);
        loop {
            let last = match timeout_at(self.deadline, self.try_register()).await {
                Ok(Ok(registered)) => return Ok(registered),
                Ok(Err(Attempt::Final(why))) => return Err(self.error(why)),
                Ok(Err(Attempt::Again(why))) => why,
                Err(_) => "it accepted no connection, or did not answer on it".into(),
            };
            if Instant::now() + pause >= self.deadline {
                let after = self.rendezvous.timeout;
                return Err(self.error(format!(
                    "rank 0 could not be reached within {after:?}: {last}. Is rank 0 running, and are MASTER_ADDR and \
                     MASTER_PORT its address?"
                )));
            }
            tracing::debug!(rank = self.rendezvous.rank, address = %self.address, "rank 0 is not there yet: {last}");
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(Duration::from_millis(500));
        }
    }

    async fn try_register(&self) -> Result<(TcpStream, TcpListener), Attempt> {
        let addresses = resolve(self.address).await.map_err(Attempt::Again)?;
        let mut stream =
            connect_once(&addresses, self.deadline).await.map_err(|e| Attempt::Again(e.to_string()))?;
        // Whoever comes from where rank 0 is comes over this interface.
        let local = stream.local_addr().map_err(|e| Attempt::Again(e.to_string()))?;
        let listener = listen_at(with_port(local, 0)).map_err(|e| {
            Attempt::Final(format!("opening this rank's own listener at {}: {e}", local.ip()))
        })?;
        let at = listener.local_addr().map_err(|e| Attempt::Again(e.to_string()))?;
        let purpose = Purpose::Register(Box::new(self.registration(vec![at])));
        match handshake::dial(&mut stream, self.token, &purpose, self.deadline).await {
            Ok(()) => Ok((stream, listener)),
            Err(Refusal::Broken(why)) => Err(Attempt::Again(why)),
            Err(Refusal::Stranger(why)) => {
                Err(Attempt::Final(format!("what answers there is not rank 0: {why}")))
            }
            Err(Refusal::Denied(why)) => Err(Attempt::Final(format!("rank 0 refused this process: {why}"))),
        }
    }

    // ---- rank 0 ----

    async fn host(&self) -> Result<Formed, Error> {
        let door = self.listen().await?;
        let bound = door.local_addr().map_err(|e| self.error(format!("listening: {e}")))?;
        let listener = listen_at(with_port(bound, 0))
            .map_err(|e| self.error(format!("opening this rank's own listener at {}: {e}", bound.ip())))?;
        let port = listener.local_addr().map_err(|e| self.error(format!("listening: {e}")))?.port();

        let (tell, mut events) = mpsc::unbounded_channel();
        let own = self.registration(vec![with_port(bound, port)]);
        let mut lobby = Lobby::new(own, self.rendezvous, tell.clone());
        let mut background = JoinSet::new();
        let token = self.token.clone();
        background.spawn(accept::serve(door, move |stream, visit| {
            welcome(stream, visit, token.clone(), tell.clone())
        }));
        let mut next_news = Instant::now() + NEWS;
        let ended = loop {
            let next = next_news.min(self.deadline);
            match timeout_at(next, events.recv()).await {
                Ok(Some(event)) => {
                    if let Err(problem) = lobby.take(event) {
                        break Err(problem);
                    }
                    if lobby.missing().is_empty() {
                        break lobby.reachable();
                    }
                }
                Ok(None) => break Err("the listener ended".into()),
                Err(_) if Instant::now() >= self.deadline => break Err(lobby.too_late()),
                Err(_) => {
                    lobby.spread_news();
                    next_news = Instant::now() + NEWS;
                }
            }
        };
        // From here on nobody can register.
        drop(background);
        match ended {
            Ok(()) => {
                let table = lobby.close_with_table(host::random()?).await.map_err(|e| self.error(e))?;
                Ok(Formed { table, listener })
            }
            Err(problem) => {
                lobby.close_with_problem(&problem).await;
                Err(self.error(problem))
            }
        }
    }

    /// Rank 0's rendezvous listener: the one given, or one at the address.
    async fn listen(&self) -> Result<TcpListener, Error> {
        let given = match &self.rendezvous.listener {
            Some(Listener::Inherited(fd)) => super::fds::inherited_listener(*fd)
                .map_err(|e| self.error(format!("ALLSTREAM_RENDEZVOUS_FD: {e}")))
                .map(Some)?,
            Some(Listener::Given(listener)) => {
                Some(listener.try_clone().map_err(|e| self.error(format!("using the listener given: {e}")))?)
            }
            None => None,
        };
        if let Some(listener) = given {
            let ready = listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
            return ready.map_err(|e| self.error(format!("using the listener given: {e}")));
        }
        let addresses = resolve(self.address).await.map_err(|e| self.error(e))?;
        let literal = self.address.host == "localhost" || self.address.host.parse::<IpAddr>().is_ok();
        let mut last = None;
        // The name of this host may be in /etc/hosts as a loopback address, where no other host would come.
        for address in addresses.iter().filter(|a| literal || !a.ip().is_loopback()) {
            match listen_at(*address) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => {
                    return Err(self.error(format!(
                        "something else listens at {address} already (another job, or one that has not ended); choose another port (ALLSTREAM_PORT, or MASTER_PORT)"
                    )));
                }
                Err(e) => last = Some(format!("{address}: {e}")),
            }
        }
        if literal && addresses.iter().all(|a| a.ip().is_loopback()) {
            return Err(self.error(format!("listening failed at {}", last.unwrap_or_default())));
        }
        // The address is none of this host's (translated, or a service's): listen on all. Only the token admits.
        let port = self.address.port;
        tracing::warn!(address = %self.address, ?last, "rank 0 listens on all addresses of its host");
        let any = [SocketAddr::from(([0u16; 8], port)), SocketAddr::from(([0u8; 4], port))];
        let listener = any.into_iter().map(listen_at).reduce(Result::or);
        match listener {
            Some(Ok(listener)) => Ok(listener),
            Some(Err(e)) => Err(self.error(format!("listening on port {port}: {e}"))),
            None => Err(self.error("no address to listen at")),
        }
    }
}

enum Attempt {
    Again(String),
    Final(String),
}

pub(super) fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// A listener with a queue long enough for a world that comes at once.
fn listen_at(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A fixed port may still have connections of an earlier job that are fading out.
    socket.set_reuseaddr(address.port() != 0)?;
    socket.bind(address)?;
    socket.listen(4096)
}

/// What happens at rank 0's door.
pub(super) enum Event {
    Came { registration: Box<Registration>, stream: TcpStream, peer: String },
    Left { rank: Rank, visit: u64 },
}

/// Lets a connection prove itself and hands the registration on.
async fn welcome(
    mut stream: TcpStream,
    visit: Visit,
    token: Token,
    tell: mpsc::UnboundedSender<Event>,
) -> Result<(), Refusal> {
    let admit = |purpose| match purpose {
        Purpose::Register(registration) => Ok(registration),
        _ => Err("this is where ranks register, and nothing else".into()),
    };
    let (deadline, Visit { peer, progress }) = (Instant::now() + DEADLINE, visit);
    let registration = handshake::accept(&mut stream, &token, deadline, &progress, admit).await?;
    let _ = tell.send(Event::Came { registration, stream, peer });
    Ok(())
}

/// Whether a table from rank 0 is one that this rank can stand in.
pub(crate) fn check_table(table: &Table, own: &Rendezvous) -> Result<(), String> {
    if table.members.len() != own.size {
        return Err(format!("a table of {} ranks for a world of {}", table.members.len(), own.size));
    }
    for (rank, member) in table.members.iter().enumerate() {
        if member.rank != rank || member.size != own.size {
            return Err(format!("a table whose entry {rank} says rank {} of {}", member.rank, member.size));
        }
        if member.addresses.is_empty() {
            return Err(format!("a table without an address for rank {rank}"));
        }
    }
    if table.heartbeat.silent.is_zero() || table.heartbeat.interval.is_zero() {
        return Err("a heartbeat of no time at all".into());
    }
    Ok(())
}
