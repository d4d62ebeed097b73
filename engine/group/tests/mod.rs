//! Worlds of several ranks in this process, over real sockets. Every wait has a deadline, every port is ephemeral.

mod crowd;
mod forming;
mod giving_up;
#[cfg(target_os = "linux")]
mod hosts;
mod living;
#[cfg(target_os = "linux")]
mod processes;
mod rdma;
mod turned_away;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::message::{CommId, DataHello, Message};
use super::{Events, LinkChoice, Mesh, Rendezvous};
use crate::error::{Error, Lost};
use crate::types::Rank;

const LIMIT: Duration = Duration::from_secs(30);

/// What a rank was told.
#[derive(Debug, Clone, PartialEq)]
enum Heard {
    Message(Rank, Message),
    Lost(Rank, Lost),
    Goodbye(Rank, Option<Error>),
    Data(DataHello),
}

#[derive(Default)]
struct Ears {
    heard: Mutex<Vec<(Instant, Heard)>>,
    sockets: Mutex<Vec<(DataHello, TcpStream)>>,
}

impl Ears {
    fn note(&self, heard: Heard) {
        self.heard.lock().push((Instant::now(), heard));
    }

    fn all(&self) -> Vec<Heard> {
        self.heard.lock().iter().map(|(_, h)| h.clone()).collect()
    }

    /// Waits until `wanted` was heard, and says when.
    async fn hear(&self, wanted: impl Fn(&Heard) -> bool) -> Instant {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some((when, _)) = self.heard.lock().iter().find(|(_, h)| wanted(h)) {
                return *when;
            }
            assert!(Instant::now() < end, "not heard; only {:?}", self.all());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Events for Ears {
    fn message(&self, from: Rank, message: Message) {
        self.note(Heard::Message(from, message));
    }
    fn lost(&self, rank: Rank, how: Lost) {
        self.note(Heard::Lost(rank, how));
    }
    fn goodbye(&self, rank: Rank, cause: Option<Error>) {
        self.note(Heard::Goodbye(rank, cause));
    }
    fn data(&self, hello: DataHello, socket: TcpStream) {
        self.sockets.lock().push((hello, socket));
        self.note(Heard::Data(hello));
    }
}

/// One rank of a world, and what it hears.
struct Member {
    mesh: Arc<Mesh>,
    ears: Arc<Ears>,
}

async fn join_with(rendezvous: Rendezvous, fds: Vec<OwnedFd>) -> Result<Member, Error> {
    let ears = Arc::new(Ears::default());
    let events = ears.clone();
    let joining = Mesh::join(rendezvous, fds, |_| (), move |_| events);
    let mesh = tokio::time::timeout(LIMIT, joining).await.expect("joining ends by itself")?;
    Ok(Member { mesh, ears })
}

async fn join(rendezvous: Rendezvous) -> Result<Member, Error> {
    join_with(rendezvous, Vec::new()).await
}

/// Rendezvous of all ranks of a world that meets at a free port of `ip`.
fn places(ip: &str, size: usize) -> (Vec<Rendezvous>, SocketAddr) {
    let listener = TcpListener::bind((ip, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    let mut all: Vec<_> = (0..size)
        .map(|rank| {
            Rendezvous::tcp(&format!("tcp://{at}"), rank, size).unwrap().token("t").timeout(LIMIT / 2)
        })
        .collect();
    all[0] = all[0].clone().listener(listener);
    (all, at)
}

async fn join_all(places: Vec<Rendezvous>) -> Vec<Result<Member, Error>> {
    futures::future::join_all(places.into_iter().map(join)).await
}

async fn world(places: Vec<Rendezvous>) -> Vec<Member> {
    join_all(places).await.into_iter().map(|m| m.unwrap_or_else(|e| panic!("{e}"))).collect()
}

async fn world_of(size: usize) -> Vec<Member> {
    world(places("127.0.0.1", size).0).await
}

async fn close_all(members: Vec<Member>) {
    let all = futures::future::join_all(members.iter().map(|m| m.mesh.close(None)));
    tokio::time::timeout(LIMIT, all).await.expect("closing ends by itself");
}

fn aborted(reason: &str) -> Error {
    Error::aborted(0, reason)
}
