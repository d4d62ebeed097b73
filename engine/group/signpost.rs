//! Signposts, which say where rank 0 is, if it is not where the ranks meet.
//!
//! A launcher may name a host for the ranks to meet at before it knows on which host rank 0 will be: torchrun deals ranks out in the
//! order in which hosts come, and names the host of its own store. Then nobody listens at that address. So after a while a rank of
//! that host puts up a signpost there: a listener that asks for the job's secret, as rank 0 does. Rank 0 finds that the address
//! is none of its host's, or that somebody already listens there. So it connects to the signpost, too, says where it listens, and keeps
//! this connection until the meeting is over. The signpost sends the other ranks on.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::accept::{self, Porter, Visit};
use super::address::Address;
use super::addresses::{is_literal, listen_at};
use super::connect::{connect_once, resolve};
use super::handshake::{self, DEADLINE, Purpose, Refusal, Token};
use super::host::Process;
use super::me::Me;
use super::registration::{News, Registration};
use super::wire::{self, Frames};

/// How often rank 0 looks for a signpost.
const LOOK: Duration = Duration::from_millis(500);
/// How long one look takes at most.
const LOOKING: Duration = Duration::from_secs(2);

/// What rank 0 has said on a connection that it keeps.
#[derive(Clone)]
struct RankZero {
    /// Where it listens.
    addresses: Vec<SocketAddr>,
    process: Process,
    /// The address at its end of the connection.
    from: Option<SocketAddr>,
}

/// `None` as long as rank 0 has not come.
type Known = Option<RankZero>;

/// A rank's signpost. Dropping this takes it down.
pub(super) struct Signpost {
    known: watch::Receiver<Known>,
    _task: JoinSet<()>,
}

impl Signpost {
    /// Puts up a signpost where ranks meet, if that is an address of this host and nobody listens there.
    pub(super) fn raise(me: &Me<'_>, addresses: &[SocketAddr]) -> Option<Signpost> {
        let (token, rank) = (me.token.clone(), me.rendezvous.rank);
        let listener = listen_here(&me.address.host, addresses)?;
        tracing::info!(rank, address = %me.address, "nobody listens where ranks meet: rank {rank} waits there for rank 0");
        let (tell, known) = watch::channel(None);
        let tell = Arc::new(tell);
        let porter = Porter { rank, token: token.clone(), turned_away: |_: &str, _: &Purpose| () };
        let mut task = JoinSet::new();
        task.spawn(accept::serve(listener, porter, move |stream, visit| {
            send_on(stream, visit, token.clone(), tell.clone())
        }));
        Some(Signpost { known, _task: task })
    }

    /// Where rank 0 listens, once it has said so.
    pub(super) async fn told(&self) -> Vec<SocketAddr> {
        match announced(&mut self.known.clone()).await {
            Some(addresses) => addresses,
            // Does not happen: the sender lives as long as this signpost.
            None => std::future::pending().await,
        }
    }
}

/// Waits until rank 0 has said where it is.
async fn announced(known: &mut watch::Receiver<Known>) -> Option<Vec<SocketAddr>> {
    let known = known.wait_for(Option::is_some).await.ok()?;
    known.as_ref().map(|zero| zero.addresses.clone())
}

/// A listener at the first of these addresses that is this host's, and that other hosts may come to.
fn listen_here(host: &str, addresses: &[SocketAddr]) -> Option<TcpListener> {
    let abroad = |address: &&SocketAddr| !address.ip().is_loopback();
    if let Some(listener) = addresses.iter().filter(abroad).find_map(|address| listen_at(*address).ok()) {
        return Some(listener);
    }
    // This host's own name leads to loopback here, and elsewhere to another address of this host: so the signpost listens at all addresses.
    let own_name = !is_literal(host) && addresses.iter().all(|address| address.ip().is_loopback());
    let port = addresses.first().filter(|_| own_name)?.port();
    let all =
        [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))];
    all.into_iter().find_map(|at| listen_at(at).ok())
}

/// Serves a connection to a signpost: rank 0 says where it listens, another rank waits for that and is sent there.
async fn send_on(
    mut stream: TcpStream,
    visit: Visit,
    token: Token,
    known: Arc<watch::Sender<Known>>,
) -> Result<(), Refusal> {
    let admit = |purpose| match purpose {
        Purpose::Register(visitor) => Ok(visitor),
        _ => Err("this is where ranks register, and nothing else".into()),
    };
    let (deadline, Visit { progress, .. }) = (Instant::now() + DEADLINE, visit);
    let visitor = handshake::accept(&mut stream, &token, deadline, &progress, admit).await?;
    let broken = |e: io::Error| Refusal::Broken(e.to_string());
    let other = known.borrow().clone().filter(|_| visitor.rank == 0);
    // The same process comes again if its connection has broken at its own end only.
    if let Some(other) = other.filter(|other| other.process != visitor.process) {
        let problem = format!(
            "two processes say that they are rank 0: process {} at {:?}, and process {} at {:?}; every RANK must be given once",
            other.process.pid, other.addresses, visitor.process.pid, visitor.addresses
        );
        return tell(&mut stream, &News::Failed { problem }).await.map_err(broken);
    }
    if visitor.rank == 0 {
        tell(&mut stream, &News::Elsewhere { addresses: Vec::new() }).await.map_err(broken)?;
        let from = stream.peer_addr().ok();
        known.send_replace(Some(RankZero { addresses: visitor.addresses, process: visitor.process, from }));
        // Rank 0 keeps this connection until its meeting is over, and says nothing more.
        let _ = stream.read(&mut [0]).await;
        known.send_if_modified(|known| known.take_if(|zero| zero.from == from).is_some());
        return Ok(());
    }
    tell(&mut stream, &News::Waiting { missing: vec![0] }).await.map_err(broken)?;
    let Some(addresses) = announced(&mut known.subscribe()).await else { return Ok(()) };
    tell(&mut stream, &News::Elsewhere { addresses }).await.map_err(broken)
}

async fn tell(stream: &mut TcpStream, news: &News) -> io::Result<()> {
    stream.write_all(&wire::encode(news).map_err(io::Error::other)?).await
}

/// What came of rank 0's look for a signpost.
pub(super) enum Look {
    /// There is one, and rank 0 has told it where it listens: the signpost knows that for as long as this connection lasts.
    Told(TcpStream),
    /// There is none (yet).
    None(String),
    /// There can be no world.
    Problem(String),
}

fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// Rank 0 looks for a signpost where ranks meet, and says there that it listens at `bound`.
pub(super) async fn look(me: &Visitor, bound: SocketAddr) -> Look {
    let until = Instant::now() + LOOKING;
    let looking = async {
        let addresses = resolve(&me.address).await.map_err(Look::None)?;
        let mut stream = connect_once(&addresses, until).await.map_err(|(_, why)| Look::None(why))?;
        let local = stream.local_addr().map_err(|e| Look::None(e.to_string()))?;
        let at = if bound.ip().is_unspecified() { with_port(local, bound.port()) } else { bound };
        let mut own = me.own.clone();
        own.addresses = vec![at];
        let purpose = Purpose::Register(Box::new(own));
        match handshake::dial(&mut stream, &me.token, &purpose, until).await {
            Ok(()) => {}
            Err(end) => return Err(Look::None(end.to_string())),
        }
        match Frames::default().next::<News, _>(&mut stream).await {
            // Another rank 0 listens there, or it is a signpost to which another rank 0 has come.
            Ok(Some(News::Failed { problem })) => Err(Look::Problem(problem)),
            // (The address may also lead back to this rank itself, as that of a Kubernetes service does. That is good, too.)
            _ => Ok(stream),
        }
    };
    match timeout_at(until, looking).await {
        Ok(Ok(stream)) => Look::Told(stream),
        Ok(Err(look)) => look,
        Err(_) => Look::None(format!("no answer within {LOOKING:?}")),
    }
}

/// What rank 0 needs when it goes to a signpost.
pub(super) struct Visitor {
    pub(super) address: Address,
    pub(super) token: Token,
    pub(super) own: Registration,
}

/// Looks for a signpost again and again, until this future is dropped. Returns only if there can be no world, with the reason.
pub(super) async fn keep_telling(me: Visitor, bound: SocketAddr, mut told: Option<TcpStream>) -> String {
    loop {
        if let Some(mut stream) = told.take() {
            let _ = stream.read(&mut [0]).await;
        }
        match look(&me, bound).await {
            Look::Told(stream) => told = Some(stream),
            Look::None(_) => {}
            Look::Problem(problem) => return problem,
        }
        tokio::time::sleep(LOOK).await;
    }
}
