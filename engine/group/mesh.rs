//! A rank's membership in a world: a control connection to every other rank, and what comes over them.

use std::net::{SocketAddr, TcpStream as StdStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connect::{self, Pair, Unreached};
use super::control::{Events, FLUSH, Outbox, Reader, Urgency, goodbye, write};
use super::env::Rendezvous;
use super::gather::{Joined, decline, gather, settled};
use super::handshake::{Purpose, Token};
use super::host;
use super::line::Line;
use super::message::{DataHello, Message};
use super::registration::{Heartbeat, Table};
use super::{runtime, wire};
use crate::error::Error;
use crate::forked;
use crate::link::LinkKind;
use crate::link::exit::Exit;
use crate::plan::choices::Choices;
use crate::types::Rank;

/// How long a data connection may take to come about.
const DATA_DEADLINE: Duration = Duration::from_secs(10);

/// What a rank knows of another.
#[derive(Debug)]
pub(crate) struct PeerInfo {
    /// The other rank, for tests of the table.
    #[cfg(test)]
    pub(crate) rank: Rank,
    /// Its process, on its host.
    pub(crate) pid: u32,
    /// The kind of link between the two ranks. Both hold the same.
    pub(crate) link: &'static LinkKind,
    /// The addresses of its listener. Those with the IP address to which the control connection leads come first.
    pub(crate) address: Vec<SocketAddr>,
    /// The descriptors that it offered. Empty unless the link is over shared memory (`SHM`).
    pub(crate) fds: Vec<OwnedFd>,
    /// Tells whether its process has exited. `None`: this rank has no pidfd of that process, or both ranks are in one process.
    pub(crate) exit: Option<Exit>,
}

/// A rank's membership in a world. Dropping it leaves.
pub(crate) struct Mesh {
    rank: Rank,
    size: usize,
    world: [u8; 16],
    token: Token,
    peers: Vec<Option<PeerInfo>>,
    hosts: Vec<u32>,
    choices: Arc<Choices>,
    outboxes: Vec<Option<Arc<Outbox>>>,
    leaving: Arc<AtomicBool>,
    tasks: Mutex<Option<Tasks>>,
    /// `true` once all tasks have ended and all sockets are closed.
    ended: watch::Sender<bool>,
}

/// The tasks of a mesh.
#[derive(Default)]
struct Tasks {
    readers: JoinSet<()>,
    writers: JoinSet<()>,
    /// The listener; the task that hands data connections on; and the one that reads the connections over which ranks registered (`registered.rs`).
    service: JoinSet<()>,
    dials: JoinSet<()>,
}

impl Tasks {
    /// Waits up to [`FLUSH`] until the goodbyes are written and the other sides have closed, then ends all tasks.
    async fn finish(mut self) {
        self.service.shutdown().await;
        self.dials.shutdown().await;
        let (readers, writers) = (&mut self.readers, &mut self.writers);
        // Closing a socket that holds unread bytes resets the connection, and the goodbye may be lost with it: so each
        // reader goes on reading until the other side has closed, too.
        let taken = async {
            while writers.join_next().await.is_some() {}
            while readers.join_next().await.is_some() {}
        };
        if timeout(FLUSH, taken).await.is_err() {
            tracing::debug!("some ranks did not take the goodbye within {FLUSH:?}");
        }
        self.end().await;
    }

    async fn end(mut self) {
        for set in [&mut self.service, &mut self.dials, &mut self.writers, &mut self.readers] {
            set.shutdown().await;
        }
    }
}

/// Calls back with an error when it is dropped, if it was not called before.
struct Done(Option<Callback>);

type Callback = Box<dyn FnOnce(Result<StdStream, Error>) + Send>;

impl Done {
    fn call(mut self, result: Result<StdStream, Error>) {
        if let Some(callback) = self.0.take() {
            callback(result);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback(Err(Error::Closed { call: "connecting to a rank".into() }));
        }
    }
}

impl Mesh {
    /// Enters the world that `rendezvous` names: returns once all ranks are connected to this one, within the rendezvous
    /// timeout plus about ten seconds at most. Dropping the future gives up.
    ///
    /// `local_fds` (at most [`super::fds::MAX_FDS`]) are offered to ranks of this host. `named` is called with the world's
    /// name before any rank is connected to this one; it must not block. `make_events` is
    /// called when the mesh is complete, before anything is delivered; it runs on the control thread, and must neither block
    /// nor call [`leave`](Self::leave). The events may hold the mesh only as a `Weak`: the mesh's tasks hold the events.
    pub(crate) async fn join<F>(
        rendezvous: Rendezvous,
        local_fds: Vec<OwnedFd>,
        named: impl FnOnce([u8; 16]) + Send + 'static,
        make_events: F,
    ) -> Result<Arc<Mesh>, Error>
    where
        F: FnOnce(&Arc<Mesh>) -> Arc<dyn Events> + Send + 'static,
    {
        runtime::run(join(rendezvous, local_fds, named, make_events)).await
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The world's random name, the same on all ranks.
    pub(crate) fn world(&self) -> [u8; 16] {
        self.world
    }

    /// The other ranks, by rank; `None` for this rank itself.
    pub(crate) fn peers(&self) -> &[Option<PeerInfo>] {
        &self.peers
    }

    /// The host of each rank: numbered from 0 in the order of their first ranks.
    pub(crate) fn hosts(&self) -> &[u32] {
        &self.hosts
    }

    /// Rank 0's choice of algorithms.
    pub(crate) fn choices(&self) -> &Arc<Choices> {
        &self.choices
    }

    /// Queues a message, and never blocks. The message is dropped if that rank is gone, or if too many messages wait for it.
    pub(crate) fn send(&self, to: Rank, message: Message) {
        self.send_all([to], &message);
    }

    /// Tells the other ranks that this one cannot take part in the world, and why. Takes some seconds at most, once rank 0's note (if any) is there.
    pub(crate) async fn decline(rendezvous: Rendezvous, why: &Error) {
        let (rank, unfit) = (rendezvous.rank, why.to_string());
        if rendezvous.size > 1
            && let Err(end) = runtime::run(decline(rendezvous, unfit)).await
        {
            tracing::debug!(rank, "telling the others that this rank cannot take part ended with: {end}");
        }
    }

    /// Queues a message to every other rank.
    pub(crate) fn broadcast(&self, message: Message) {
        self.send_all(0..self.size, &message);
    }

    fn send_all(&self, to: impl IntoIterator<Item = Rank>, message: &Message) {
        let frame = match wire::encode(message) {
            Ok(frame) => Arc::new(frame),
            Err(e) => {
                tracing::error!(rank = self.rank, "a control message was not sent: {e}");
                return;
            }
        };
        let urgency = match message {
            Message::Heartbeat | Message::Stalled { .. } | Message::Called { .. } => Urgency::Repeated,
            Message::Abort { .. } => Urgency::AtOnce,
            _ => Urgency::Once,
        };
        for to in to {
            if let Some(Some(outbox)) = self.outboxes.get(to) {
                outbox.push(to, frame.clone(), urgency);
            }
        }
    }

    /// Opens a data connection. `done` is called exactly once, on the control thread; or at once, on the calling thread, with an
    /// error, if there is no such peer, this rank has left, or the control thread cannot be used.
    pub(crate) fn connect_data(&self, to: Rank, hello: DataHello, done: Callback) {
        let done = Done(Some(done));
        let Some(Some(peer)) = self.peers.get(to) else {
            let problem = format!("rank {to} is no peer of rank {} in a world of {}", self.rank, self.size);
            return done.call(Err(Error::invalid("connecting to a rank", problem)));
        };
        let (addresses, token, own) = (peer.address.clone(), self.token.clone(), self.rank);
        let purpose = Purpose::Data { world: self.world, to, hello };
        let work = async move {
            let dialled = connect::dial(&addresses, &token, &purpose, Instant::now() + DATA_DEADLINE).await;
            let result = match dialled {
                Ok(stream) => connect::for_data(stream)
                    .map_err(|e| Error::os(format!("taking over a data connection to rank {to}"), e)),
                // All ranks are told of this error, so it names this rank, which has run out of something.
                Err(Unreached { why, is_limit: true, .. }) => {
                    let doing = format!("open a data connection from rank {own} to rank {to} of the world");
                    Err(Error::system(doing, why))
                }
                Err(Unreached { at, why, .. }) => Err(Error::Refused {
                    peer: format!("rank {to} at {at}"),
                    problem: format!("opening a data connection from rank {own}: {why}"),
                }),
            };
            done.call(result);
        };
        match runtime::handle() {
            // If this rank has left, `work` is dropped here, which calls `done` with an error.
            Ok(handle) => {
                if let Some(tasks) = &mut *self.tasks.lock() {
                    while tasks.dials.try_join_next().is_some() {}
                    tasks.dials.spawn_on(work, &handle);
                }
            }
            Err(e) => tracing::error!("connecting to rank {to}: {e}"),
        }
    }

    /// As [`leave`](Self::leave), and returns once every socket is closed, after about a second at most.
    pub(crate) async fn close(&self, cause: Option<Error>) {
        self.leave(cause);
        let mut ended = self.ended.subscribe();
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Queues a goodbye to all other ranks and leaves the world, without waiting until they have it. From here on nothing
    /// more is reported to the events, apart from a call that is just under way. Only the first call has an effect.
    pub(crate) fn leave(&self, cause: Option<Error>) {
        if forked::is_forked() {
            // The connections are the parent's, and this process has no control thread to run the tasks: so they are leaked, not dropped.
            std::mem::forget(self.tasks.try_lock().and_then(|mut tasks| tasks.take()));
            return;
        }
        self.leaving.store(true, Ordering::Release);
        let Some(tasks) = self.tasks.lock().take() else { return };
        let frame = goodbye(cause);
        for outbox in self.outboxes.iter().flatten() {
            outbox.finish(frame.clone());
        }
        let ended = self.ended.clone();
        let end = runtime::spawn(async move {
            tasks.finish().await;
            ended.send_replace(true);
        });
        if end.is_err() {
            self.ended.send_replace(true);
        }
    }

    /// As [`close`](Self::close), but blocks the calling thread, for at most `timeout`. On the control thread it does not wait.
    pub(crate) fn leave_blocking(&self, cause: Option<Error>, timeout: Duration) {
        self.leave(cause);
        let mut ended = self.ended.subscribe();
        if runtime::is_control_thread() || *ended.borrow() {
            return;
        }
        let (tell, told) = std::sync::mpsc::channel();
        let wait = runtime::spawn(async move {
            let _ = ended.wait_for(|ended| *ended).await;
            let _ = tell.send(());
        });
        if wait.is_ok() {
            let _ = told.recv_timeout(timeout);
        }
    }

    /// Closes every socket without a goodbye, as the death of the process does.
    #[cfg(test)]
    pub(crate) fn kill(&self) {
        self.leaving.store(true, Ordering::Release);
        let Some(tasks) = self.tasks.lock().take() else { return };
        let ended = self.ended.clone();
        let _ = runtime::spawn(async move {
            tasks.end().await;
            ended.send_replace(true);
        });
    }

    /// Sends nothing more, and closes nothing, as a process does that is stopped.
    #[cfg(test)]
    pub(crate) fn freeze(&self) {
        for outbox in self.outboxes.iter().flatten() {
            outbox.frozen.store(true, Ordering::Release);
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.leave(None);
    }
}

async fn join<F>(
    rendezvous: Rendezvous,
    local_fds: Vec<OwnedFd>,
    named: impl FnOnce([u8; 16]) + Send,
    make_events: F,
) -> Result<Arc<Mesh>, Error>
where
    F: FnOnce(&Arc<Mesh>) -> Arc<dyn Events> + Send + 'static,
{
    let Rendezvous { rank, size, .. } = rendezvous;
    if local_fds.len() > super::fds::MAX_FDS {
        let problem =
            format!("{} descriptors offered; the limit is {}", local_fds.len(), super::fds::MAX_FDS);
        return Err(Error::invalid("Mesh::join", problem));
    }
    let joined = if size == 1 {
        let (members, heartbeat, choices) = (Vec::new(), Heartbeat::default(), rendezvous.choices);
        let table = Table { world: host::random()?, members, heartbeat, choices };
        named(table.world);
        let (_, data) = mpsc::unbounded_channel();
        let token = Token::new(b"");
        Joined { table, token, pairs: Vec::new(), service: JoinSet::new(), data, deadline: Instant::now() }
    } else {
        let (rendezvous, note) = settled(rendezvous).await?;
        let joined = gather(&rendezvous, local_fds, named).await;
        drop(note);
        joined?
    };
    let mesh = start(rank, size, joined, make_events);
    tracing::info!(rank, size, world = %format!("{:032x}", u128::from_be_bytes(mesh.world)), "the world has formed");
    Ok(mesh)
}

/// Makes the mesh and then its events, and only then delivers anything.
fn start<F>(rank: Rank, size: usize, joined: Joined, make_events: F) -> Arc<Mesh>
where
    F: FnOnce(&Arc<Mesh>) -> Arc<dyn Events>,
{
    let Joined { table, token, pairs, service, mut data, deadline } = joined;
    let mut peers: Vec<Option<PeerInfo>> = (0..size).map(|_| None).collect();
    let mut outboxes: Vec<Option<Arc<Outbox>>> = vec![None; size];
    let mut connections = Vec::with_capacity(pairs.len());
    for Pair { rank: peer, stream, frames, link, handed, .. } in pairs {
        let outbox = Outbox::new();
        let member = &table.members[peer];
        let mut address = member.addresses.clone();
        // Addresses at the control connection's IP address come first: that one is known to lead to that rank.
        let reached = stream.peer_addr().ok().map(|at| at.ip().to_canonical());
        address.sort_by_key(|at| reached != Some(at.ip().to_canonical()));
        peers[peer] = Some(PeerInfo {
            #[cfg(test)]
            rank: peer,
            pid: member.process.pid,
            link,
            address,
            fds: handed.fds,
            exit: handed.process.map(Exit::of),
        });
        outboxes[peer] = Some(outbox.clone());
        let line = handed.line.map_or(Line::Tcp(stream), Line::Unix);
        connections.push((peer, line, frames, outbox));
    }
    let hosts = host::numbered(table.members.iter().map(|m| m.process.host.as_str()), size);
    let leaving = Arc::new(AtomicBool::new(false));
    let mesh = Arc::new(Mesh {
        rank,
        size,
        world: table.world,
        token,
        peers,
        hosts,
        choices: Arc::new(table.choices.clone()),
        outboxes,
        leaving: leaving.clone(),
        tasks: Mutex::new(Some(Tasks { service, ..Tasks::default() })),
        ended: watch::Sender::new(false),
    });
    let events = make_events(&mesh);
    if let Some(tasks) = &mut *mesh.tasks.lock() {
        let patience = deadline.saturating_duration_since(Instant::now());
        let heartbeat = wire::encode(&Message::Heartbeat).unwrap_or_default();
        for (from, line, frames, outbox) in connections {
            let (half, write_half) = line.into_split();
            // The first heartbeat is sent before the user learns that the world has formed: this process may be stopped right after that. Until the
            // heartbeat has come, the other rank takes this rank to be still connecting, and waits longer before it counts this rank as silent.
            let _ = write_half.try_write(&heartbeat);
            let heartbeat = table.heartbeat;
            let writer = tasks.writers.spawn(write(write_half, outbox.clone(), heartbeat.interval));
            let (events, leaving) = (events.clone(), leaving.clone());
            let reader =
                Reader { rank, from, half, frames, events, leaving, outbox, writer, heartbeat, patience };
            tasks.readers.spawn(reader.run());
        }
        tasks.service.spawn(async move {
            while let Some((hello, socket)) = data.recv().await {
                if !leaving.load(Ordering::Acquire) {
                    events.data(hello, socket);
                }
            }
        });
    }
    mesh
}
