//! Connecting to other ranks: addresses, dialling, and what two ranks settle before they are a pair.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::fds::Handed;
use super::handshake::{self, DEADLINE, Purpose, Refusal, Token};
use super::link_choice::LinkChoice;
use super::rdma::{self, WhyNot, trial};
use super::registration::{Registration, Table, Tried};
use super::wire::{self, Frames};
use crate::error::limits;
use crate::link::kinds::{between, of};
use crate::link::verbs::Card;
use crate::link::{Lends, LinkKind, Locality};
use crate::types::{LinkClass, Rank};

/// The most time that one address may take while others are left to try.
const PER_ADDRESS: Duration = Duration::from_secs(3);

/// A data connection is probed when nothing has come over it for `PROBE_AFTER`, and then every `PROBE_EVERY`. After `PROBES` probes without an answer
/// it counts as broken: 20 seconds after the network path has failed.
///
/// A communicator may be silent for hours. Firewalls and NATs forget silent connections, some after a minute: probes every ten seconds keep them
/// alive, and find those that were forgotten all the same. The probes also find a network path that fails while data is under way: data flows one way
/// only, so the receiver has sent nothing and probes, whereas the sender does not, and would wait for an acknowledgement for a quarter of an hour, as
/// the system is set. `TCP_USER_TIMEOUT` would end that sooner, but would also end the connection to a receiver that lives and reads nothing, for
/// instance because it computes for a minute. Control connections need no probes: heartbeats go both ways.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(2);
const PROBES: u32 = 5;

/// Turns a connection whose handshake is over into a data connection: non-blocking, and probed.
pub(super) fn for_data(stream: TcpStream) -> io::Result<StdStream> {
    let socket = stream.into_std()?;
    sockopt::set_tcp_keepidle(&socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(&socket, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(&socket, PROBES)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    Ok(socket)
}

/// The addresses of a host name. For a literal address no name server is asked.
pub(super) async fn resolve(address: &Address) -> Result<Vec<SocketAddr>, String> {
    let found = tokio::net::lookup_host((address.host.as_str(), address.port)).await;
    let found: Vec<_> =
        found.map_err(|e| format!("the host name `{}` does not resolve: {e}", address.host))?.collect();
    if found.is_empty() {
        return Err(format!("the host name `{}` has no address", address.host));
    }
    Ok(found)
}

/// Until when one address may be tried, if so many are left.
fn share(deadline: Instant, left: usize) -> Instant {
    let now = Instant::now();
    let part = deadline.saturating_duration_since(now) / u32::try_from(left).unwrap_or(u32::MAX).max(1);
    if left == 1 { deadline } else { now + part.min(PER_ADDRESS) }
}

async fn connect_to(address: &SocketAddr, until: Instant) -> io::Result<TcpStream> {
    let stream = timeout_at(until, TcpStream::connect(address))
        .await
        .unwrap_or(Err(io::ErrorKind::TimedOut.into()))?;
    // If nobody listens at a port of the ephemeral range, this end may get that same port, and so be connected to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Tries each address once. The error is of the last one.
pub(super) async fn connect_once(
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<TcpStream, (Failure, String)> {
    let mut last = (Failure::Unreached, "there is no address to connect to".into());
    for (i, address) in addresses.iter().enumerate() {
        match connect_to(address, share(deadline, addresses.len() - i)).await {
            Ok(stream) => return Ok(stream),
            Err(e) => last = (Failure::of(&e), format!("{address}: {}", limits::explained(&e))),
        }
    }
    Err(last)
}

/// How often a handshake is tried if it breaks off. The other side may have dropped the connection for newer ones, before it was proven: because
/// strangers crowd its listener, or because this process was slow to speak.
const ATTEMPTS: u32 = 6;

/// How long to wait before a handshake that has broken off is tried again. `None`: it was tried often enough.
fn again_after(attempt: &mut u32) -> Option<Duration> {
    let pause = *attempt * Duration::from_millis(30);
    *attempt += 1;
    (*attempt <= ATTEMPTS).then_some(pause)
}

/// Why connecting at an address failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// This process, or its machine, has run out of something.
    Limit,
    /// Nobody listens there.
    Refused,
    /// Nothing answered.
    Unreached,
    /// The handshake broke off.
    Broken,
    /// Whoever answered has refused the connection, is another rank, or is no rank of this job.
    Denied,
}

impl Failure {
    fn of(error: &io::Error) -> Failure {
        match error.kind() {
            _ if limits::is_limit(error) => Failure::Limit,
            io::ErrorKind::ConnectionRefused => Failure::Refused,
            _ => Failure::Unreached,
        }
    }
}

/// Why a rank was not reached, and at which addresses it was tried.
#[derive(Debug)]
pub(super) struct Unreached {
    pub(super) at: String,
    pub(super) why: String,
    /// This process has run out of something: the other rank is not at fault.
    pub(super) is_limit: bool,
}

/// Connects to the listener of a rank that has registered, and proves that this rank belongs to the world. An address counts only if the rank that is
/// meant answers the handshake there; otherwise the next one is tried. Tries all addresses again until the deadline. Fails sooner if all of them have
/// refused twice (then the rank is gone), if somebody answers at every address and is not that rank or will not have this one, if a handshake broke
/// off in each of [`ATTEMPTS`] rounds, or if this process has run out of something.
pub(super) async fn dial(
    addresses: &[SocketAddr],
    token: &Token,
    purpose: &Purpose,
    deadline: Instant,
) -> Result<TcpStream, Unreached> {
    let (mut attempt, mut settled) = (1, 0);
    loop {
        let mut failures = Vec::with_capacity(addresses.len());
        for (i, address) in addresses.iter().enumerate() {
            let until = share(deadline, addresses.len() - i);
            match dial_at(address, token, purpose, until).await {
                Ok(stream) => return Ok(stream),
                Err((failure, why)) => failures.push((failure, address, why)),
            }
        }
        let any = |wanted| failures.iter().any(|(failure, ..)| *failure == wanted);
        let pause = if any(Failure::Broken) {
            again_after(&mut attempt)
        } else {
            let is_settled = !any(Failure::Unreached);
            settled += u32::from(is_settled);
            let is_over = settled == 2 || is_settled && !any(Failure::Refused);
            (!is_over).then_some(Duration::from_millis(100))
        };
        match pause.map(|pause| Instant::now() + pause) {
            Some(next) if next < deadline && !any(Failure::Limit) => tokio::time::sleep_until(next).await,
            _ => {
                let why = match &failures[..] {
                    [(_, _, why)] => why.clone(),
                    [] => "it gave no address".into(),
                    _ => failures
                        .iter()
                        .map(|(_, at, why)| format!("{at}: {why}"))
                        .collect::<Vec<_>>()
                        .join("; "),
                };
                let at = addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
                return Err(Unreached { at, why, is_limit: any(Failure::Limit) });
            }
        }
    }
}

async fn dial_at(
    address: &SocketAddr,
    token: &Token,
    purpose: &Purpose,
    until: Instant,
) -> Result<TcpStream, (Failure, String)> {
    let mut stream =
        connect_to(address, until).await.map_err(|e| (Failure::of(&e), limits::explained(&e)))?;
    match handshake::dial(&mut stream, token, purpose, until).await {
        Ok(()) => Ok(stream),
        Err(end @ Refusal::Broken(_)) => Err((Failure::Broken, end.to_string())),
        Err(end) => Err((Failure::Denied, end.to_string())),
    }
}

/// Whether the chosen link can connect the first rank to all others.
pub(super) fn check_link<'a>(
    link: LinkChoice,
    members: impl Iterator<Item = &'a Registration> + Clone,
) -> Result<(), String> {
    let Some(kind) = link.class().and_then(of) else { return Ok(()) };
    if kind.class == LinkClass::RDMA
        && let Some(WhyNot { why, .. }) = rdma::why_not(members.clone())
    {
        return Err(format!("the link is rdma: {why}; or set ALLSTREAM_LINK=tcp on all ranks"));
    }
    let mut others = members;
    let Some(first) = others.next() else { return Ok(()) };
    for other in others {
        if first.process.locality(&other.process) > kind.joins {
            let wanted = if kind.joins == Locality::SameProcess { "one process" } else { "one host" };
            return Err(format!(
                "the link {link} needs all ranks in {wanted}, but rank {} (host {}, process {}) and rank {} (host {}, \
                 process {}) are not; set ALLSTREAM_LINK=auto, or start them there",
                first.rank,
                first.process.host,
                first.process.pid,
                other.rank,
                other.process.host,
                other.process.pid
            ));
        }
    }
    Ok(())
}

/// What two ranks tell each other once before messages flow: whether they share memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Why descriptors could not be exchanged, if that was tried.
    pub(crate) problem: Option<String>,
}

/// This rank's side of a pair of ranks that have settled everything: messages can flow.
pub(super) struct Pair {
    pub(super) rank: Rank,
    pub(super) stream: TcpStream,
    pub(super) frames: Frames,
    pub(super) link: &'static LinkKind,
    pub(super) handed: Handed,
    /// The outcome of their trial of RDMA, if they had one.
    pub(super) tried: Option<Tried>,
}

/// Why this rank has given up connecting to the others.
pub(super) struct Failed {
    /// The rank that gave up first.
    pub(super) first: Rank,
    /// Why that rank gave up.
    pub(super) why: String,
}

impl Failed {
    /// For messages to people.
    pub(super) fn shown(&self, own: Rank) -> String {
        let Failed { first, why } = self;
        if *first == own {
            why.clone()
        } else {
            format!("rank {first} gave up connecting to the others: {why}")
        }
    }
}

/// What this rank needs to become a pair with every other rank.
pub(super) struct Pairing {
    pub(super) rank: Rank,
    pub(super) table: Table,
    pub(super) token: Token,
    pub(super) link: LinkChoice,
    pub(super) fds: Arc<Vec<OwnedFd>>,
    /// This rank's open port for trials of RDMA, or why it cannot be opened. `None`: the ranks do not try RDMA.
    pub(super) card: Option<Result<Arc<Card>, String>>,
    pub(super) deadline: Instant,
}

/// How a pair's control connection comes to be: the higher rank dials.
pub(super) enum Side {
    Dial,
    Await { control: oneshot::Receiver<TcpStream>, fds: oneshot::Receiver<Handed> },
}

impl Pairing {
    /// Makes this rank and `peer` a pair, or says why that failed.
    pub(super) async fn pair(self: Arc<Self>, peer: Rank, side: Side) -> Result<Pair, Failed> {
        let failed = |why| Failed { first: self.rank, why: format!("rank {peer}: {why}") };
        self.settle(peer, side).await.map_err(failed)
    }

    /// The outcome of this rank's trials of RDMA; `None` if it was not to try.
    pub(super) fn tried(&self, pairs: &[Pair]) -> Option<Tried> {
        let opened = self.card.as_ref()?;
        let failed = opened.as_ref().err().map(|why| format!("rank {}: {why}", self.rank));
        let failed = failed.or_else(|| {
            let of_pairs = pairs.iter().filter_map(|pair| Some((pair.rank, pair.tried.clone()?.err()?)));
            of_pairs.min().map(|(_, why)| why)
        });
        Some(failed.map_or(Ok(()), Err))
    }

    async fn settle(&self, peer: Rank, side: Side) -> Result<Pair, String> {
        let world = self.table.world;
        let (ours, theirs) = (&self.table.members[self.rank], &self.table.members[peer]);
        let link = between(self.link.class(), ours.process.locality(&theirs.process));
        let shares = link.lends == Lends::Regions;
        let (mut frames, gone) =
            (Frames::default(), || "its connection ended before the world was connected".to_string());
        let (mut stream, mut theirs_is, mine) = match side {
            Side::Dial => {
                let purpose = Purpose::Control { world, from: self.rank, to: peer };
                let mut addresses = theirs.addresses.clone();
                // Loopback addresses of a rank on another host come last: they usually lead to this host itself, but containers may share a loopback
                // interface.
                let abroad = ours.process.host != theirs.process.host;
                addresses.sort_by_key(|address| abroad && address.ip().is_loopback());
                let dialled = dial(&addresses, &self.token, &purpose, self.deadline).await;
                let mut stream = dialled
                    .map_err(|Unreached { at, why, .. }| format!("connecting to it at {at}: {why}"))?;
                let mine = if shares { self.fetch(theirs).await } else { Ok(Handed::default()) };
                send_ready(&mut stream, &mine).await?;
                let ready = frames.next::<Ready, _>(&mut stream).await?.ok_or_else(gone)?;
                (stream, ready, mine)
            }
            Side::Await { control, fds } => {
                let mut stream = control.await.map_err(|_| "this rank's listener ended".to_string())?;
                let ready = frames.next::<Ready, _>(&mut stream).await?.ok_or_else(gone)?;
                let mine = match (&ready.problem, shares) {
                    (None, true) => timeout_at(self.deadline.min(Instant::now() + DEADLINE), fds)
                        .await
                        .ok()
                        .and_then(Result::ok)
                        .ok_or_else(|| "its descriptors did not arrive".to_string()),
                    (Some(why), _) => Err(why.clone()),
                    (None, false) => Ok(Handed::default()),
                };
                send_ready(&mut stream, &mine).await?;
                (stream, ready, mine)
            }
        };
        let (handed, link) = match (mine, theirs_is.problem.take()) {
            (Ok(handed), None) => (handed, link),
            (Err(why), _) | (Ok(_), Some(why)) => {
                (self.without_memory(peer, &why)?, between(None, Locality::Remote))
            }
        };
        let tried = match &self.card {
            Some(card) if self.table.try_each_other(self.rank, peer) => {
                let mut talk = trial::Talk { rank: self.rank, stream: &mut stream, frames: &mut frames };
                let tried = trial::run(card, &mut talk, trial::limit(self.table.hosts())).await?;
                Some(tried.map_err(|why| format!("between rank {} and rank {peer}: {why}", self.rank)))
            }
            _ => None,
        };
        Ok(Pair { rank: peer, stream, frames, link, handed, tried })
    }

    /// For two ranks that both know that they cannot share memory: they use TCP, but if a link was chosen this is an error.
    fn without_memory(&self, peer: Rank, why: &str) -> Result<Handed, String> {
        if self.link != LinkChoice::AUTO {
            return Err(format!(
                "the link {} was asked for, but no memory can be shared with it: {why}",
                self.link
            ));
        }
        tracing::warn!(rank = self.rank, peer, "rank {peer} is on this host, but data goes over TCP: {why}");
        Ok(Handed::default())
    }

    /// Exchanges descriptors with a rank of this host that listens on a unix socket.
    #[cfg(target_os = "linux")]
    async fn fetch(&self, peer: &Registration) -> Result<Handed, String> {
        use super::fds;
        let Some(name) = &peer.socket else { return Err(format!("rank {} has no unix socket", peer.rank)) };
        let deadline = self.deadline.min(Instant::now() + DEADLINE);
        let work = async {
            let purpose = Purpose::Local { world: self.table.world, from: self.rank };
            let failed = |e: String| format!("the unix socket `@{name}`: {e}");
            let mut attempt = 1;
            loop {
                let connected = fds::connect(name, deadline).await;
                let mut stream = connected.map_err(|e| failed(limits::explained(&e)))?;
                match handshake::dial(&mut stream, &self.token, &purpose, deadline).await {
                    Ok(()) => return Ok(fds::exchange(&stream, &self.fds).await?.over(stream)),
                    Err(end) => match again_after(&mut attempt).filter(|_| matches!(end, Refusal::Broken(_)))
                    {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => return Err(failed(end.to_string())),
                    },
                }
            }
        };
        timeout_at(deadline, work)
            .await
            .unwrap_or_else(|_| Err("exchanging descriptors took too long".into()))
    }

    #[cfg(not(target_os = "linux"))]
    async fn fetch(&self, _: &Registration) -> Result<Handed, String> {
        Err("memory is shared between processes on Linux only".into())
    }
}

async fn send_ready(stream: &mut TcpStream, handed: &Result<Handed, String>) -> Result<(), String> {
    let frame = wire::encode(&Ready { problem: handed.as_ref().err().cloned() })?;
    stream.write_all(&frame).await.map_err(|e| e.to_string())
}
