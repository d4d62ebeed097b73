//! Every rank but 0: how it finds rank 0, registers there, and waits until all have come.

use std::fs::File;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout_at};

use super::addresses::is_literal;
use super::connect::{Failure, connect_once, resolve};
use super::handshake::{self, Purpose, Refusal};
use super::lobby::absent;
use super::me::{Formed, Me};
use super::registered::Registered;
use super::registration::{News, Table};
use super::signpost::Signpost;
use super::wire::Frames;
use crate::error::Error;
use crate::types::Rank;

/// How much longer than its own deadline a registered rank waits for rank 0 to say who is missing.
const GRACE: Duration = Duration::from_secs(2);
/// If nobody has listened at the address where the ranks meet for this long, a rank on that address's host listens there itself, as a signpost
/// (`signpost.rs`). Most often rank 0 is only slower to start, and comes before that.
const SIGNPOST_AFTER: Duration = Duration::from_secs(1);

/// How far a rank has come with finding rank 0.
struct Search {
    /// The addresses to which a signpost has sent this rank. `None`: it goes to where the ranks meet.
    sent_to: Option<Vec<SocketAddr>>,
    /// Since when connections, to where the ranks meet or to where a signpost has sent this rank, have been refused, as nobody listens.
    refused: Option<Instant>,
    /// This rank's own signpost, if it has put one up.
    signpost: Option<Signpost>,
    /// An open file that is closed when this process has no descriptor left, as it needs one to tell rank 0 of that.
    spare: Option<File>,
    /// Why this rank cannot take part, as far as it knows by now.
    unfit: Option<String>,
}

/// What came of registering.
enum Waited {
    Formed(Box<Table>, Registered),
    /// Rank 0 listens at one of these addresses.
    Elsewhere(Vec<SocketAddr>),
    /// The rank that had put up the signpost is gone.
    Again,
}

enum Attempt {
    Again(String),
    /// Nobody listens at these addresses.
    Refused(Vec<SocketAddr>, String),
    /// This process has run out of something.
    Limit(String),
    Final(String),
}

impl Me<'_> {
    pub(super) async fn visit(&self) -> Result<Formed, Error> {
        let spare = File::open("/dev/null").ok();
        let mut search =
            Search { sent_to: None, refused: None, signpost: None, spare, unfit: self.unfit.clone() };
        loop {
            let (stream, listener) = self.register(&mut search).await?;
            search.sent_to = None;
            match self.wait(stream).await? {
                Waited::Formed(table, registered) => {
                    let listener =
                        listener.ok_or_else(|| self.error("rank 0 took in a rank that cannot take part"))?;
                    return Ok(Formed { table: *table, listener, registered });
                }
                Waited::Elsewhere(addresses) => search.sent_to = Some(addresses),
                Waited::Again => {}
            }
        }
    }

    /// Waits for the table of all ranks.
    async fn wait(&self, mut stream: TcpStream) -> Result<Waited, Error> {
        let mut frames = Frames::default();
        let mut missing: Option<Vec<Rank>> = None;
        let size = self.rendezvous.size;
        loop {
            let news = timeout_at(self.deadline + GRACE, frames.next::<News, _>(&mut stream)).await;
            let at_signpost = missing.as_ref().is_some_and(|missing| missing.contains(&0));
            match news {
                Err(_) => {
                    let after = self.rendezvous.timeout;
                    let who = missing.as_ref().map_or("the others".into(), |missing| absent(missing, size));
                    return Err(self.error(if at_signpost {
                        format!(
                            "rank 0 could not be reached within {after:?}: another rank waits for it at that address. Is rank 0 \
                             running?"
                        )
                    } else {
                        format!("registered with rank 0, but {who} did not come within {after:?}")
                    }));
                }
                Ok(Ok(Some(News::Waiting { missing: now }))) => missing = Some(now),
                Ok(Ok(Some(News::Failed { problem }))) => return Err(self.error(problem)),
                Ok(Ok(Some(News::Elsewhere { addresses }))) => return Ok(Waited::Elsewhere(addresses)),
                Ok(Ok(Some(News::Formed(table)))) => {
                    table.check(self.rendezvous.size).map_err(|e| self.error(format!("rank 0 sent {e}")))?;
                    return Ok(Waited::Formed(table, Registered::Guest(stream, frames)));
                }
                Ok(_) if at_signpost => return Ok(Waited::Again),
                Ok(Ok(Some(News::Left { .. } | News::Connected { .. }))) => {
                    return Err(self.error("rank 0 sent news of a world before the world itself"));
                }
                Ok(Ok(None)) => {
                    let problem = "rank 0 went away before the world had formed; its own output says why";
                    return Err(self.error(problem));
                }
                Ok(Err(why)) => return Err(self.error(format!("reading from rank 0: {why}"))),
            }
        }
    }

    /// Tries to connect to rank 0 until that works, and registers this rank there.
    async fn register(&self, search: &mut Search) -> Result<(TcpStream, Option<TcpListener>), Error> {
        let mut pause = Duration::from_millis(10);
        loop {
            if let (Some(signpost), None) = (&search.signpost, &search.sent_to) {
                let told = timeout_at(self.deadline, signpost.told()).await;
                search.sent_to = Some(told.map_err(|_| {
                    self.error(format!(
                        "rank 0 could not be reached within {:?}: nobody listened at that address. The address is this rank's \
                         host's, so this rank waited there for rank 0 to say where it listens. Is rank 0 running?",
                        self.rendezvous.timeout
                    ))
                })?);
            }
            let last = match timeout_at(self.deadline, self.try_register(search)).await {
                Ok(Ok(registered)) => return Ok(registered),
                Ok(Err(Attempt::Final(why))) => return Err(self.error(why)),
                Ok(Err(Attempt::Limit(why))) if search.spare.take().is_some() => {
                    search.unfit.get_or_insert(why);
                    continue;
                }
                Ok(Err(Attempt::Limit(why))) => return Err(self.error(why)),
                Ok(Err(Attempt::Again(why))) => {
                    search.refused = None;
                    why
                }
                Ok(Err(Attempt::Refused(addresses, why))) => {
                    let since = *search.refused.get_or_insert_with(Instant::now);
                    if search.signpost.is_none()
                        && search.sent_to.is_none()
                        && since.elapsed() >= SIGNPOST_AFTER
                    {
                        search.signpost = Signpost::raise(self, &addresses);
                    }
                    why
                }
                Err(_) => "no connection was accepted, or nothing answered on the connection".into(),
            };
            search.sent_to = None;
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

    async fn try_register(&self, search: &mut Search) -> Result<(TcpStream, Option<TcpListener>), Attempt> {
        let addresses = match &search.sent_to {
            Some(addresses) => addresses.clone(),
            None => resolve(self.address).await.map_err(Attempt::Again)?,
        };
        let mut stream = match connect_once(&addresses, self.deadline).await {
            Ok(stream) => stream,
            Err((Failure::Refused, why)) => return Err(Attempt::Refused(addresses, why)),
            Err((Failure::Limit, why)) => return Err(Attempt::Limit(why)),
            Err((_, why)) => return Err(Attempt::Again(why)),
        };
        // Ranks that come from rank 0's side of the network reach this rank at this address.
        let local = stream.local_addr().map_err(|e| Attempt::Again(e.to_string()))?.ip();
        // Others may not, if the ranks meet at this host's own name: on this host it often resolves to a loopback address, elsewhere to another
        // address.
        let is_own_name = local.is_loopback() && search.sent_to.is_none() && !is_literal(&self.address.host);
        let (mut listener, mut told) = (None, Vec::new());
        if search.unfit.is_none() {
            match self.reach.listen(local, is_own_name) {
                Ok((opened, at)) => (listener, told) = (Some(opened), at),
                Err(why) => search.unfit = Some(why),
            }
        }
        let mut registration = self.registration(told);
        registration.unfit = search.unfit.clone();
        let purpose = Purpose::Register(Box::new(registration));
        match handshake::dial(&mut stream, self.token, &purpose, self.deadline).await {
            Ok(()) => Ok((stream, listener)),
            Err(Refusal::Broken(why)) => Err(Attempt::Again(why)),
            Err(Refusal::Stranger(why)) => {
                Err(Attempt::Final(format!("what answers there is not rank 0: {why}")))
            }
            Err(Refusal::Denied(why)) => Err(Attempt::Final(format!("rank 0 refused this process: {why}"))),
        }
    }
}
