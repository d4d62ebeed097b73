//! Accepts connections. At most `AT_ONCE` of them may be in the handshake at the same time. If there are more, the oldest is dropped, so that
//! strangers keep no rank out.

use std::fs::File;
use std::future::Future;
use std::io;
use std::net::TcpStream as StdStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use super::connect;
use super::handshake::{self, DEADLINE, Progress, Purpose, Refusal, Stage, Token};
use super::message::DataHello;
use crate::error::limits;
use crate::types::Rank;

/// How many connections may be proving themselves at once. If there are more, the oldest whose time (`SILENT` or `SPEAKING`) is over is dropped.
const AT_ONCE: usize = 64;
/// A connection that has sent nothing yet is not dropped before this time. It is short, as a rank of this job sends its first bytes at once.
const SILENT: Duration = Duration::from_millis(50);
/// A connection that has sent its first bytes is not dropped before this time. It is longer, as the rank may wait long for a core of a busy machine.
/// A rank that is dropped all the same dials again ([`super::connect`]).
const SPEAKING: Duration = Duration::from_secs(1);

/// A connection that has not proved itself.
struct Unproven {
    since: Instant,
    progress: Arc<Progress>,
    task: AbortHandle,
}

/// The connections that have not proved themselves, the oldest first.
#[derive(Default)]
struct Hall(Vec<Unproven>);

impl Hall {
    /// If there are too many, drops the oldest whose time is over. If no connection's time is over yet, `Err` says when the first one's will be.
    fn make_room(&mut self, now: Instant) -> Result<(), Instant> {
        self.0.retain(|u| !u.task.is_finished() && u.progress.stage() < Stage::Proven);
        if self.0.len() <= AT_ONCE {
            return Ok(());
        }
        let patience = |u: &Unproven| if u.progress.stage() == Stage::Silent { SILENT } else { SPEAKING };
        // Those that have said nothing are dropped before those that have.
        let due =
            |stage| self.0.iter().position(|u| u.progress.stage() == stage && u.since + patience(u) <= now);
        let oldest = due(Stage::Silent).or_else(|| due(Stage::Speaking));
        match oldest {
            Some(oldest) => {
                self.0.remove(oldest).task.abort();
                Ok(())
            }
            None => Err(self.0.iter().map(|u| u.since + patience(u)).min().unwrap_or(now)),
        }
    }
}

/// A listening socket.
pub(super) trait Listen: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    /// The next connection, and who made it, for messages to people.
    fn next(&self) -> impl Future<Output = io::Result<(Self::Stream, String)>> + Send;
}

impl Listen for TcpListener {
    type Stream = TcpStream;
    async fn next(&self) -> io::Result<(TcpStream, String)> {
        let (stream, peer) = self.accept().await?;
        stream.set_nodelay(true)?;
        Ok((stream, peer.to_string()))
    }
}

/// A connection that was accepted.
pub(super) struct Visit {
    /// For messages to people.
    pub(super) peer: String,
    /// How far it has come with proving itself. The handshake updates this.
    pub(super) progress: Arc<Progress>,
}

/// How long it may take to tell a member that it cannot be let in, as this process has no descriptor left.
const APOLOGY: Duration = Duration::from_secs(1);

/// What a listener needs to turn connections away when this process has no descriptor left. Each is told so: a connection that nobody accepts would
/// wait until its deadline, and nobody would know why.
pub(super) struct Porter<F> {
    pub(super) rank: Rank,
    pub(super) token: Token,
    /// Called when a member was turned away: with the reason, and what it had come for.
    pub(super) turned_away: F,
}

impl<F: Fn(&str, &Purpose) + Send> Porter<F> {
    /// Closes the descriptor that is held in reserve, accepts the next connection in its place, tells whoever made that connection the reason, and
    /// opens the reserve again.
    async fn turn_away<L: Listen>(&self, listener: &L, spare: &mut Option<File>, error: &io::Error) {
        drop(spare.take());
        let why = format!("rank {} cannot take one more connection: {}", self.rank, limits::explained(error));
        let accepted = match timeout(APOLOGY, listener.next()).await {
            Ok(Ok(accepted)) => Some(accepted),
            Ok(Err(error)) => {
                tracing::debug!("no connection could be accepted to be turned away: {error}");
                None
            }
            Err(_) => {
                tracing::debug!("nobody else came while no descriptor was left");
                None
            }
        };
        if let Some((mut stream, peer)) = accepted {
            // Counted from here, so that who comes late has as long as others to hear the reason.
            let until = Instant::now() + APOLOGY;
            let no = |purpose: Purpose| {
                (self.turned_away)(&why, &purpose);
                Err::<(), _>(format!("{why} (it was wanted {})", purpose.shown()))
            };
            let end = handshake::accept(&mut stream, &self.token, until, &Progress::default(), no).await;
            tracing::warn!(
                peer,
                "turned a connection away: {}",
                end.err().map_or(why.clone(), |e| e.to_string())
            );
        }
        *spare = reserve();
    }
}

/// A descriptor to be held in reserve for the time when no other is left.
fn reserve() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Accepts until aborted, and handles each connection in a task that ends with this future.
pub(super) async fn serve<L, F, Fut, T>(listener: L, porter: Porter<T>, handle: F)
where
    L: Listen,
    T: Fn(&str, &Purpose) + Send + Sync,
    F: Fn(L::Stream, Visit) -> Fut + Send,
    Fut: Future<Output = Result<(), Refusal>> + Send + 'static,
{
    let (mut hall, mut tasks) = (Hall::default(), JoinSet::new());
    let mut spare = reserve();
    loop {
        while tasks.try_join_next().is_some() {}
        match listener.next().await {
            Ok((stream, peer)) => {
                // If no descriptor was left for the reserve when a connection was turned away, there may be one now.
                spare = spare.or_else(reserve);
                let progress = Arc::new(Progress::default());
                let handling = handle(stream, Visit { peer: peer.clone(), progress: progress.clone() });
                let task = tasks.spawn(async move {
                    if let Err(refusal) = handling.await {
                        tracing::warn!(%peer, "refused a connection: {refusal}");
                    }
                });
                hall.0.push(Unproven { since: Instant::now(), progress, task });
                while let Err(until) = hall.make_room(Instant::now()) {
                    // Waits until that time, or until a task has ended.
                    let _ = timeout_at(until, tasks.join_next()).await;
                }
            }
            Err(e) if limits::is_limit(&e) => {
                tracing::warn!("accepting a connection: {e}");
                porter.turn_away(&listener, &mut spare, &e).await;
                // A pause before the next try, as turning away may have failed, too.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(e) => {
                // Most likely a connection that was reset while it waited to be accepted.
                tracing::warn!("accepting a connection: {e}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// One entry for each rank. A higher rank dials this one, and brings its control connection or its descriptors: the sender in its entry hands them to
/// the task that awaits them. The first connection that brings them takes the sender out. Lower ranks' entries are empty.
type Awaited<T> = Vec<Mutex<Option<oneshot::Sender<T>>>>;

/// What a rank's listener knows of its world, and where it hands connections on.
pub(super) struct Door {
    pub(super) world: [u8; 16],
    pub(super) rank: Rank,
    pub(super) size: usize,
    pub(super) token: Token,
    pub(super) control: Awaited<TcpStream>,
    pub(super) data: mpsc::UnboundedSender<(DataHello, StdStream)>,
    /// Where the listener reports that a rank has given up connecting: the rank that gave up first, and why.
    pub(super) gave_up: mpsc::UnboundedSender<(Rank, String)>,
    /// Why this rank has given up itself. Ranks that come to connect to it are told.
    pub(super) closed: OnceLock<String>,
}

enum Admitted {
    Control(Rank),
    Data(DataHello),
    GaveUp(Rank, String),
}

impl Door {
    /// Whether a connection for this purpose is let in.
    fn admit(&self, purpose: Purpose) -> Result<Admitted, String> {
        match purpose {
            Purpose::Control { world, from, to } => {
                self.check(world, from)?;
                self.is_meant(to)?;
                if let Some(why) = self.closed.get() {
                    return Err(why.clone());
                }
                let awaited = self.control.get(from).is_some_and(|c| c.lock().is_some());
                if awaited {
                    Ok(Admitted::Control(from))
                } else {
                    Err(format!(
                        "rank {} already has its control connection from rank {from}, or awaits none",
                        self.rank
                    ))
                }
            }
            Purpose::Data { world, to, hello } => {
                self.check(world, hello.from)?;
                self.is_meant(to)?;
                Ok(Admitted::Data(hello))
            }
            Purpose::GaveUp { world, from, to, first, why } => {
                self.check(world, from)?;
                self.is_meant(to)?;
                Ok(Admitted::GaveUp(first, why))
            }
            Purpose::Register(other) => Err(format!(
                "rank {} of {} came to register, but this is a listener of a world that has formed; register with rank 0",
                other.rank, other.size
            )),
            Purpose::Local { .. } => Err("descriptors are exchanged over a unix socket only".into()),
        }
    }

    /// The [`Porter`] of this rank's listeners.
    pub(super) fn porter(&self) -> Porter<impl Fn(&str, &Purpose) + Send + Sync + use<>> {
        let (rank, gave_up) = (self.rank, self.gave_up.clone());
        // While this rank connects to the others, it gives up if it has to turn a rank away. Later nobody receives this.
        let turned_away = move |why: &str, _: &Purpose| _ = gave_up.send((rank, why.into()));
        Porter { rank, token: self.token.clone(), turned_away }
    }

    fn is_meant(&self, to: Rank) -> Result<(), String> {
        if to == self.rank {
            return Ok(());
        }
        Err(format!("rank {to} was meant, and this address leads to rank {}", self.rank))
    }

    fn check(&self, world: [u8; 16], from: Rank) -> Result<(), String> {
        if world != self.world {
            return Err(format!(
                "it belongs to another world ({:032x}) than rank {} here ({:032x})",
                u128::from_be_bytes(world),
                self.rank,
                u128::from_be_bytes(self.world)
            ));
        }
        if from >= self.size || from == self.rank {
            return Err(format!("rank {from} is no peer of rank {} in a world of {}", self.rank, self.size));
        }
        Ok(())
    }

    /// Lets a TCP connection prove itself and hands it on.
    pub(super) async fn enter(self: Arc<Self>, mut stream: TcpStream, visit: Visit) -> Result<(), Refusal> {
        let (deadline, progress) = (Instant::now() + DEADLINE, &visit.progress);
        match handshake::accept(&mut stream, &self.token, deadline, progress, |p| self.admit(p)).await? {
            Admitted::Control(from) => {
                if let Some(waiting) = self.control.get(from).and_then(|c| c.lock().take()) {
                    // If nobody waits any more, as joining has failed, this closes the connection.
                    let _ = waiting.send(stream);
                }
            }
            Admitted::Data(hello) => {
                let stream = connect::for_data(stream).map_err(|e| Refusal::Broken(e.to_string()))?;
                let _ = self.data.send((hello, stream));
            }
            Admitted::GaveUp(first, why) => _ = self.gave_up.send((first, why)),
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
pub(super) mod local {
    //! The unix socket on which ranks of one host exchange descriptors.

    use std::os::fd::OwnedFd;

    use tokio::net::{UnixListener, UnixStream};

    use super::*;
    use crate::group::fds;

    impl Listen for UnixListener {
        type Stream = UnixStream;
        async fn next(&self) -> io::Result<(UnixStream, String)> {
            let (stream, _) = self.accept().await?;
            let pid = stream.peer_cred().ok().and_then(|c| c.pid());
            Ok((stream, pid.map_or_else(|| "a local process".into(), |pid| format!("local process {pid}"))))
        }
    }

    /// What the unix listener knows, and where it hands descriptors on to.
    pub(in crate::group) struct Hatch {
        pub(in crate::group) door: Arc<Door>,
        pub(in crate::group) fds: Arc<Vec<OwnedFd>>,
        pub(in crate::group) slots: Awaited<fds::Handed>,
    }

    impl Hatch {
        /// Lets a local connection prove itself, and exchanges descriptors over it.
        pub(in crate::group) async fn enter(
            self: Arc<Self>,
            mut stream: UnixStream,
            visit: Visit,
        ) -> Result<(), Refusal> {
            let deadline = Instant::now() + DEADLINE;
            let admit = |purpose| {
                let Purpose::Local { world, from } = purpose else {
                    return Err("only descriptors are exchanged over a unix socket".into());
                };
                self.door.check(world, from)?;
                let awaited = self.slots.get(from).and_then(|s| s.lock().take());
                awaited.ok_or_else(|| format!("no descriptors are awaited from rank {from}"))
            };
            let (token, progress) = (&self.door.token, &visit.progress);
            let slot = handshake::accept(&mut stream, token, deadline, progress, admit).await?;
            let fds = timeout_at(deadline, fds::exchange(&stream, &self.fds))
                .await
                .map_err(|_| Refusal::Broken("it did not exchange descriptors in time".into()))?
                .map_err(Refusal::Broken)?;
            let _ = slot.send(fds.over(stream));
            Ok(())
        }
    }
}
