//! Rank 0's view while the world forms: who has come, who went away again, who is still missing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

mod connecting;

pub(super) use self::connecting::Visitors;
use super::connect;
use super::env::Rendezvous;
use super::rdma;
use super::registration::{Connected, News, Registration, Table};
use super::wire::{self, Frames};
use crate::types::Rank;

/// How long rank 0 tries to tell all ranks why the world did not form.
const TELLING: Duration = Duration::from_secs(5);

type Outbox = mpsc::UnboundedSender<Arc<Vec<u8>>>;

/// What rank 0 hears of the other ranks until all are connected.
pub(super) enum Event {
    Came {
        registration: Box<Registration>,
        stream: TcpStream,
        peer: String,
    },
    Left {
        rank: Rank,
        visit: u64,
    },
    /// The world has formed, and this rank is connected to all others. Rank 0 sends this for itself, too.
    Connected {
        rank: Rank,
        visit: u64,
        said: Connected,
    },
    /// Rank 0 could not let a rank register, as it had no descriptor left. The rank was told so.
    TurnedAway {
        rank: Rank,
        why: String,
    },
    /// There can be no world, for this reason.
    Hopeless(String),
}

/// A rank that has registered and waits.
struct Visitor {
    registration: Registration,
    /// Process and address, for messages to people.
    who: String,
    /// The address of rank 0 that the visitor has reached.
    reached: Option<IpAddr>,
    visit: u64,
    outbox: Outbox,
    /// It was told that there will be no world.
    told: bool,
}

/// Rank 0's view while the world forms.
pub(super) struct Lobby<'a> {
    own: Registration,
    rendezvous: &'a Rendezvous,
    visitors: BTreeMap<Rank, Visitor>,
    /// Ranks that came and went away again.
    left: BTreeMap<Rank, String>,
    /// Outboxes of ranks that registered and cannot be part of this world, for telling them why.
    turned_away: Vec<Outbox>,
    visits: u64,
    /// Why a rank cannot take part, so that there will be no world.
    unfit: Option<String>,
    /// Ranks that came when rank 0 had no descriptor left ([`Event::TurnedAway`]).
    turned_back: BTreeSet<Rank>,
    /// The missing ranks, and `visits`, when the visitors were last told who is missing.
    told: (Vec<Rank>, u64),
    watchers: JoinSet<()>,
    writers: JoinSet<()>,
    events: mpsc::UnboundedSender<Event>,
}

impl<'a> Lobby<'a> {
    pub(super) fn new(
        own: Registration,
        rendezvous: &'a Rendezvous,
        events: mpsc::UnboundedSender<Event>,
    ) -> Lobby<'a> {
        let unfit = own
            .unfit
            .as_ref()
            .map(|why| format!("rank 0 (process {}) cannot take part: {why}", own.process.pid));
        Lobby {
            unfit,
            own,
            rendezvous,
            visitors: BTreeMap::new(),
            left: BTreeMap::new(),
            turned_away: Vec::new(),
            turned_back: BTreeSet::new(),
            visits: 0,
            told: (Vec::new(), 0),
            watchers: JoinSet::new(),
            writers: JoinSet::new(),
            events,
        }
    }

    pub(super) fn missing(&self) -> Vec<Rank> {
        let is_missing = |rank: &Rank| !self.visitors.contains_key(rank) && !self.turned_back.contains(rank);
        (1..self.own.size).filter(is_missing).collect()
    }

    /// Notes who came or left; an error if there can be no world.
    pub(super) fn take(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Came { registration, stream, peer } => self.came(*registration, stream, &peer),
            Event::Hopeless(problem) => Err(problem),
            Event::TurnedAway { rank, why } => {
                self.unfit.get_or_insert(why);
                self.turned_back.insert(rank);
                Ok(())
            }
            // Ranks that were told that there will be no world leave, as they should.
            Event::Left { .. } | Event::Connected { .. } if self.unfit.is_some() => Ok(()),
            // A rank that says `Connected` before the world has formed is wrong, and counts as one that left.
            Event::Left { rank, visit } | Event::Connected { rank, visit, .. } => {
                if self.visitors.get(&rank).is_some_and(|v| v.visit == visit)
                    && let Some(visitor) = self.visitors.remove(&rank)
                {
                    tracing::warn!(rank, "rank {rank} ({}) registered and went away again", visitor.who);
                    self.left.insert(rank, visitor.who);
                }
                Ok(())
            }
        }
    }

    fn came(&mut self, registration: Registration, stream: TcpStream, peer: &str) -> Result<(), String> {
        let rank = registration.rank;
        let who = format!("process {} at {peer}", registration.process.pid);
        if rank == 0 && registration.process == self.own.process {
            // This is rank 0 itself: it looked for a signpost (`signpost.rs`), and the address led to its own listener.
            return Ok(());
        }
        let reached = stream.local_addr().ok().map(|a| a.ip().to_canonical());
        self.visits += 1;
        let visit = self.visits;
        let outbox = self.attend(rank, visit, stream);
        if let Some(why) = &registration.unfit {
            self.unfit.get_or_insert_with(|| format!("rank {rank} ({who}) cannot take part: {why}"));
        }
        if let Some(problem) = self.conflict(&registration, &who) {
            self.turned_away.push(outbox);
            return Err(self.unfit.clone().unwrap_or(problem));
        }
        tracing::debug!(rank, "rank {rank} ({who}) has registered");
        self.left.remove(&rank);
        self.visitors.insert(rank, Visitor { registration, who, reached, visit, outbox, told: false });
        Ok(())
    }

    /// Why a newcomer and those who are there cannot be one world.
    fn conflict(&self, new: &Registration, who: &str) -> Option<String> {
        let (rank, size) = (new.rank, self.own.size);
        if new.size != size {
            return Some(format!(
                "ranks disagree on the size of the world: rank {rank} ({who}) says {}, rank 0 says {size}; WORLD_SIZE \
                 must be the same on all ranks",
                new.size
            ));
        }
        if rank >= size {
            return Some(format!("rank {rank} ({who}) does not exist in a world of {size}"));
        }
        if new.link != self.own.link {
            return Some(format!(
                "ranks disagree on the link: rank {rank} ({who}) says {:?}, rank 0 says {:?}; ALLSTREAM_LINK must be \
                 the same on all ranks",
                new.link, self.own.link
            ));
        }
        let other = match self.visitors.get(&rank) {
            Some(visitor) => visitor.who.clone(),
            None if rank == 0 => {
                format!("process {}, which listens at {}", self.own.process.pid, self.rendezvous.place())
            }
            None => return None,
        };
        Some(format!(
            "two processes say that they are rank {rank}: {other}, and {who}; every RANK must be given once"
        ))
    }

    /// Serves a visitor's connection: reports when it ends or brings a message, and sends the frames that are put in the outbox.
    fn attend(&mut self, rank: Rank, visit: u64, stream: TcpStream) -> Outbox {
        let (mut read, mut write) = stream.into_split();
        let events = self.events.clone();
        self.watchers.spawn(async move {
            // A registered rank says one thing: that it is connected to all others.
            let said = Frames::default().next::<Connected, _>(&mut read).await;
            let event = match said {
                Ok(Some(said)) => Event::Connected { rank, visit, said },
                Ok(None) | Err(_) => Event::Left { rank, visit },
            };
            let _ = events.send(event);
        });
        let (outbox, mut letters) = mpsc::unbounded_channel::<Arc<Vec<u8>>>();
        self.writers.spawn(async move {
            while let Some(letter) = letters.recv().await {
                if write.write_all(&letter).await.is_err() {
                    return;
                }
            }
        });
        outbox
    }

    /// Tells the visitors which ranks are missing, if there is news of that.
    pub(super) fn spread_news(&mut self) {
        let now = (self.missing(), self.visits);
        if now == self.told {
            return;
        }
        if let Ok(frame) = wire::encode(&News::Waiting { missing: now.0.clone() }) {
            let frame = Arc::new(frame);
            for visitor in self.visitors.values() {
                let _ = visitor.outbox.send(frame.clone());
            }
        }
        self.told = now;
    }

    /// If a rank cannot take part, tells the visitors why there will be no world, and returns `true`.
    pub(super) fn tell_unfit(&mut self) -> bool {
        let Some(problem) = &self.unfit else { return false };
        if let Ok(frame) = wire::encode(&News::Failed { problem: problem.clone() }) {
            let frame = Arc::new(frame);
            for visitor in self.visitors.values_mut().filter(|visitor| !visitor.told) {
                visitor.told = true;
                let _ = visitor.outbox.send(frame.clone());
            }
        }
        true
    }

    /// The error if not all ranks have come before the deadline.
    pub(super) fn too_late(&self) -> String {
        if let Some(problem) = &self.unfit {
            return problem.clone();
        }
        let missing = self.missing();
        let after = self.rendezvous.timeout;
        let never: Vec<Rank> = missing.iter().copied().filter(|r| !self.left.contains_key(r)).collect();
        let mut parts = Vec::new();
        if !never.is_empty() {
            parts.push(format!("{} did not come within {after:?}", absent(&never, self.own.size)));
        }
        for (rank, who) in &self.left {
            parts.push(format!(
                "rank {rank} ({who}) came, and went away again before the {after:?} were over"
            ));
        }
        format!("{}; look at their output, or raise ALLSTREAM_RENDEZVOUS_TIMEOUT", parts.join("; "))
    }

    /// Whether those who are here can be a world: the link can connect them, and each gave addresses at which the other hosts' ranks can reach
    /// it.
    pub(super) fn can_form(&self) -> Result<(), String> {
        if let Some(problem) = &self.unfit {
            return Err(problem.clone());
        }
        let others = self.visitors.values().map(|visitor| &visitor.registration);
        connect::check_link(self.own.link, std::iter::once(&self.own).chain(others))?;
        let local = |v: &Visitor| v.registration.addresses.iter().all(|a| a.ip().is_loopback());
        let abroad = self.visitors.values().find(|v| !local(v));
        let Some(abroad) = abroad else { return Ok(()) };
        let stuck = self
            .visitors
            .values()
            .find(|v| local(v) && v.registration.process.host != abroad.registration.process.host);
        match stuck {
            None => Ok(()),
            Some(v) => Err(format!(
                "rank {} ({}) reaches rank 0 over a loopback address, so rank {} ({}) on another host could not reach \
                 it; set MASTER_ADDR to an address of rank 0's host that is the same on every host (not a name that \
                 /etc/hosts maps to 127.0.1.1)",
                v.registration.rank, v.who, abroad.registration.rank, abroad.who
            )),
        }
    }

    /// The world has formed: everyone gets the table. `events` receives what this lobby's watchers report.
    pub(super) async fn close_with_table(
        self,
        world: [u8; 16],
        events: mpsc::UnboundedReceiver<Event>,
    ) -> Result<(Table, Visitors), String> {
        let mut members = vec![self.own.clone()];
        members.extend(self.visitors.values().map(|v| v.registration.clone()));
        let heartbeat = self.rendezvous.heartbeat;
        let choices = self.rendezvous.choices.clone();
        rdma::condense(&mut members);
        let mut table = Table { world, members, heartbeat, choices };
        let mut frames: BTreeMap<Option<IpAddr>, Arc<Vec<u8>>> = BTreeMap::new();
        for reached in self.visitors.values().map(|v| v.reached).collect::<BTreeSet<_>>() {
            table.members[0].addresses = self.own_addresses(reached);
            match wire::encode(&News::Formed(Box::new(table.clone()))) {
                Ok(frame) => frames.insert(reached, Arc::new(frame)),
                Err(e) => {
                    let tuned = serde_json::to_vec(&table.choices).map_or(0, |choices| choices.len());
                    let problem = format!(
                        "the table of a world of {} ranks is too long: {e}; {tuned} bytes of it are the tuner's \
                         (ALLSTREAM_TUNING=off leaves them out)",
                        self.own.size
                    );
                    self.close_with_problem(&problem).await;
                    return Err(problem);
                }
            };
        }
        for visitor in self.visitors.values() {
            if let Some(frame) = frames.get(&visitor.reached) {
                let _ = visitor.outbox.send(frame.clone());
            }
        }
        let Lobby { visitors: connecting, events: tell, watchers: _watchers, writers, .. } = self;
        let awaiting = Vec::new();
        Ok((table, Visitors { connecting, awaiting, events, tell, _watchers, writers }))
    }

    /// The addresses of rank 0's listener, for a rank that has reached rank 0 at `reached`. If rank 0 listens at all of its host's addresses, these
    /// are the ones at which ranks have reached it, `reached` first.
    fn own_addresses(&self, reached: Option<IpAddr>) -> Vec<SocketAddr> {
        let Some(bound) = self.own.addresses.first().filter(|a| a.ip().is_unspecified()) else {
            return self.own.addresses.clone();
        };
        let mut all: Vec<IpAddr> = reached.into_iter().collect();
        for ip in self.visitors.values().filter_map(|v| v.reached) {
            if !all.contains(&ip) && all.len() < 8 {
                all.push(ip);
            }
        }
        all.into_iter().map(|ip| SocketAddr::new(ip, bound.port())).collect()
    }

    /// There will be no world: everyone who is here hears why.
    pub(super) async fn close_with_problem(mut self, problem: &str) {
        tracing::error!("the world did not form: {problem}");
        if let Ok(frame) = wire::encode(&News::Failed { problem: problem.into() }) {
            let frame = Arc::new(frame);
            for outbox in self.visitors.values().map(|v| &v.outbox).chain(&self.turned_away) {
                let _ = outbox.send(frame.clone());
            }
        }
        self.flush().await;
    }

    async fn flush(&mut self) {
        self.visitors.clear();
        self.turned_away.clear();
        let writers = &mut self.writers;
        let all = async { while writers.join_next().await.is_some() {} };
        if timeout(TELLING, all).await.is_err() {
            tracing::warn!("some ranks did not take the news of how the world formed within {TELLING:?}");
        }
    }
}

/// "rank 3 of 8", "ranks 3 and 5 of 8".
pub(super) fn absent(missing: &[Rank], size: usize) -> String {
    const SHOWN: usize = 16;
    let mut names: Vec<String> = missing.iter().take(SHOWN).map(Rank::to_string).collect();
    if missing.len() > SHOWN {
        names.push(format!("{} more", missing.len() - SHOWN));
    }
    match names.as_slice() {
        [] => format!("no rank of {size}"),
        [one] => format!("rank {one} of {size}"),
        [most @ .., last] => format!("ranks {} and {last} of {size}", most.join(", ")),
    }
}
