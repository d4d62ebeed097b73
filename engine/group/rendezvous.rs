//! How the ranks of a world find each other: everyone registers with rank 0, and gets the table of all.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::accept::{self, Porter, Visit};
use super::addresses::{self, is_literal, lengthen_queue, listen_at};
use super::connect::resolve;
use super::env::Listener;
use super::handshake::{self, DEADLINE, Purpose, Refusal, Token};
use super::host;
use super::lobby::{Event, Lobby};
use super::me::{Formed, Me};
use super::registered::Registered;
use super::registration::Registration;
use super::signpost::{self, Look};
use crate::error::{Error, limits};

/// How often rank 0 tells the ranks that wait which ranks are missing, if that has changed.
const NEWS: Duration = Duration::from_millis(250);
/// How long rank 0 stays when some rank cannot take part, so that there will be no world: ranks that come meanwhile hear why.
pub(super) const LINGER: Duration = Duration::from_secs(5);

impl Me<'_> {
    /// Meets the others. Every rank ends within about the rendezvous timeout.
    pub(super) async fn meet(&self) -> Result<Formed, Error> {
        if self.rendezvous.rank == 0 { self.host().await } else { self.visit().await }
    }

    // ---- rank 0 ----

    async fn host(&self) -> Result<Formed, Error> {
        let Gate { door, strays } = self.open_gate().await?;
        let bound = door.local_addr().map_err(|e| self.error(format!("listening: {e}")))?;
        let (mut listener, mut told, mut unfit) = (None, Vec::new(), self.unfit.clone());
        if unfit.is_none() {
            match self.reach.listen(bound.ip(), false) {
                Ok((opened, at)) => (listener, told) = (Some(opened), at),
                Err(why) => unfit = Some(why),
            }
        }
        let (tell, mut events) = mpsc::unbounded_channel();
        let mut own = self.registration(told);
        own.unfit = unfit;
        let mut background = JoinSet::new();
        if let Some(told) = strays {
            let (me, tell) = (self.at_signposts(&own), tell.clone());
            background.spawn(async move {
                let problem = signpost::keep_telling(me, bound, told).await;
                let _ = tell.send(Event::Hopeless(problem));
            });
        }
        let mut lobby = Lobby::new(own, self.rendezvous, tell.clone());
        let (token, full) = (self.token.clone(), tell.clone());
        let turned_away = move |why: &str, purpose: &Purpose| {
            if let Purpose::Register(visitor) = purpose {
                let _ = full.send(Event::TurnedAway { rank: visitor.rank, why: why.into() });
            }
        };
        let porter = Porter { rank: 0, token: token.clone(), turned_away };
        background.spawn(accept::serve(door, porter, move |stream, visit| {
            welcome(stream, visit, token.clone(), tell.clone())
        }));
        let mut next_news = Instant::now() + NEWS;
        let mut end = self.deadline;
        let ended = loop {
            if lobby.tell_unfit() {
                // There will be no world. Ranks that come soon still hear why.
                end = end.min(Instant::now() + LINGER);
            }
            let next = next_news.min(end);
            match timeout_at(next, events.recv()).await {
                Ok(Some(event)) => {
                    if let Err(problem) = lobby.take(event) {
                        break Err(problem);
                    }
                    if lobby.missing().is_empty() {
                        break lobby.can_form();
                    }
                }
                Ok(None) => break Err("the listener ended".into()),
                Err(_) if Instant::now() >= end => break Err(lobby.too_late()),
                Err(_) => {
                    lobby.spread_news();
                    next_news = Instant::now() + NEWS;
                }
            }
        };
        // From here on nobody can register.
        drop(background);
        match (ended, listener) {
            (Ok(()), Some(listener)) => {
                let closing = lobby.close_with_table(host::random()?, events).await;
                let (table, visitors) = closing.map_err(|e| self.error(e))?;
                Ok(Formed { table, listener, registered: Registered::Host(visitors) })
            }
            (Ok(()), None) => Err(self.error("rank 0 cannot take part")),
            (Err(problem), _) => {
                lobby.close_with_problem(&problem).await;
                Err(self.error(problem))
            }
        }
    }

    fn at_signposts(&self, own: &Registration) -> signpost::Visitor {
        signpost::Visitor { address: self.address.clone(), token: self.token.clone(), own: own.clone() }
    }

    /// The addresses where ranks meet. The host name is looked up again and again until it has an address: a name may become known only some seconds
    /// after its host has started (a pod's name, in Kubernetes).
    async fn resolve_patiently(&self) -> Result<Vec<SocketAddr>, Error> {
        let mut pause = Duration::from_millis(50);
        loop {
            let why = match timeout_at(self.deadline, resolve(self.address)).await {
                Ok(Ok(addresses)) => return Ok(addresses),
                Ok(Err(why)) => why,
                Err(_) => format!("the host name `{}` was not resolved in time", self.address.host),
            };
            if Instant::now() + pause >= self.deadline {
                return Err(self.error(format!("{why}; tried for {:?}", self.rendezvous.timeout)));
            }
            tracing::info!("{why}; rank 0 tries again");
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(Duration::from_millis(500));
        }
    }

    /// Rank 0's rendezvous listener: the one given, or one at the address.
    async fn open_gate(&self) -> Result<Gate, Error> {
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
            // Whoever opened the socket may have asked for a shorter queue.
            let ready = lengthen_queue(&listener)
                .and_then(|()| listener.set_nonblocking(true))
                .and_then(|()| TcpListener::from_std(listener));
            let door = ready.map_err(|e| self.error(format!("using the listener given: {e}")))?;
            return Ok(Gate { door, strays: None });
        }
        let addresses = self.resolve_patiently().await?;
        let literal = is_literal(&self.address.host);
        let mut last = None;
        // The file /etc/hosts may give this host's name a loopback address. That one is left out, as no other host would come there.
        for address in addresses.iter().filter(|a| literal || !a.ip().is_loopback()) {
            match listen_at(*address) {
                Ok(door) => return Ok(Gate { door, strays: None }),
                Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => {
                    return self.beside(address.ip()).await;
                }
                Err(e) => last = Some(format!("{address}: {}", limits::explained(&e))),
            }
        }
        if literal && addresses.iter().all(|a| a.ip().is_loopback()) {
            return Err(self.error(format!("listening failed at {}", last.unwrap_or_default())));
        }
        // The address is none of this host's (it may be translated, or a service's, or another host's, where a rank may put up a signpost), or
        // only loopback addresses are known for the name. So rank 0 listens on all addresses. Whoever comes there still needs the token.
        let port = self.address.port;
        if last.is_some() {
            tracing::warn!(address = %self.address, ?last, "rank 0 listens on all addresses of its host ({}): where ranks meet is none of \
                 them", addresses::shown());
        }
        let any = [SocketAddr::from(([0u16; 8], port)), SocketAddr::from(([0u8; 4], port))];
        let door = any.into_iter().map(listen_at).reduce(Result::or);
        match door {
            Some(Ok(door)) => Ok(Gate { door, strays: last.is_some().then_some(None) }),
            Some(Err(e)) if e.kind() == std::io::ErrorKind::AddrInUse => {
                self.beside(Ipv4Addr::UNSPECIFIED.into()).await
            }
            Some(Err(e)) => Err(self.error(format!("listening on port {port}: {}", limits::explained(&e)))),
            None => Err(self.error("no address to listen at")),
        }
    }

    /// For when somebody already listens at this port of this host. If that is a rank's signpost, rank 0 listens at another port, and says so there.
    async fn beside(&self, at: IpAddr) -> Result<Gate, Error> {
        let failed = |e: String| self.error(format!("listening beside a signpost: {e}"));
        let (door, _) = self.reach.listen(at, false).map_err(failed)?;
        let bound = door.local_addr().map_err(|e| failed(e.to_string()))?;
        match signpost::look(&self.at_signposts(&self.registration(Vec::new())), bound).await {
            Look::Told(stream) => Ok(Gate { door, strays: Some(Some(stream)) }),
            Look::Problem(problem) => Err(self.error(problem)),
            Look::None(why) => Err(self.error(format!(
                "something else listens at port {} of {at} already (another job, or one that has not ended): {why}; choose another port \
                 (ALLSTREAM_PORT, or MASTER_PORT)",
                self.address.port
            ))),
        }
    }
}

/// Where ranks come to register.
struct Gate {
    door: TcpListener,
    /// `Some` if the other ranks perhaps come to another place than this listener: then rank 0 looks for a signpost at that place. Inside: the
    /// connection to the signpost that rank 0 has already told where it listens, if there is one.
    strays: Option<Option<TcpStream>>,
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
