//! Accepting connections: a bounded number at a time proves itself, the oldest goes for the newest, and strangers disturb
//! nobody.

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

/// Connections that may be proving themselves at once. Beyond, the oldest of them goes.
const AT_ONCE: usize = 64;
/// But not before a rank of ours had time to say its first words, which it does at once...
const SILENT: Duration = Duration::from_millis(50);
/// ... or, having said them, to prove itself: on a busy machine its turn may be long in coming. Who was dropped all the same
/// dials again ([`super::connect`]).
const SPEAKING: Duration = Duration::from_secs(1);

/// A connection that has not proved itself.
struct Unproven {
    since: Instant,
    progress: Arc<Progress>,
    task: AbortHandle,
}

/// All of them, the oldest first.
#[derive(Default)]
struct Hall(Vec<Unproven>);

impl Hall {
    /// Makes room for one more, or says when there may be some.
    fn make_room(&mut self, now: Instant) -> Result<(), Instant> {
        self.0.retain(|u| !u.task.is_finished() && u.progress.stage() < Stage::Proven);
        if self.0.len() <= AT_ONCE {
            return Ok(());
        }
        let patience = |u: &Unproven| if u.progress.stage() == Stage::Silent { SILENT } else { SPEAKING };
        // Those that have said nothing go before those that have.
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

/// Something that connections come to.
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

/// Who has come.
pub(super) struct Visit {
    /// For messages to people.
    pub(super) peer: String,
    /// How far it has come with proving itself: kept up by the handshake.
    pub(super) progress: Arc<Progress>,
}

/// How long a member that cannot be let in, as no descriptor is left, may take to hear so.
const APOLOGY: Duration = Duration::from_secs(1);

/// Who listens, for those that cannot be let in because no descriptor is left in this process: each of them is told so. A connection
/// that nobody accepts would wait for its deadline, and nobody would know why.
pub(super) struct Porter<F> {
    pub(super) rank: Rank,
    pub(super) token: Token,
    /// Called when a member was turned away so: with why, and what it had come for.
    pub(super) turned_away: F,
}

impl<F: Fn(&str, &Purpose) + Send> Porter<F> {
    /// Gives up the descriptor that was kept for this, tells whoever comes next, and takes it again.
    async fn turn_away<L: Listen>(&self, listener: &L, spare: &mut Option<File>, error: &io::Error) {
        drop(spare.take());
        let why = format!("rank {} cannot take one more connection: {}", self.rank, limits::explained(error));
        let told = async {
            let (mut stream, peer) = listener.next().await?;
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
            io::Result::Ok(())
        };
        if timeout(APOLOGY, told).await.is_err() {
            tracing::debug!("nobody else came while no descriptor was left");
        }
        *spare = reserve();
    }
}

/// A descriptor that is held for when none is left.
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
                let progress = Arc::new(Progress::default());
                let handling = handle(stream, Visit { peer: peer.clone(), progress: progress.clone() });
                let task = tasks.spawn(async move {
                    if let Err(refusal) = handling.await {
                        tracing::warn!(%peer, "refused a connection: {refusal}");
                    }
                });
                hall.0.push(Unproven { since: Instant::now(), progress, task });
                while let Err(until) = hall.make_room(Instant::now()) {
                    // Or one of them has done with it.
                    let _ = timeout_at(until, tasks.join_next()).await;
                }
            }
            Err(e) if limits::is_limit(&e) => {
                tracing::warn!("accepting a connection: {e}");
                porter.turn_away(&listener, &mut spare, &e).await;
                // Not at once again, where even that was in vain.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(e) => {
                // A connection that was reset while it waited.
                tracing::warn!("accepting a connection: {e}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Where the control connection of each higher rank is awaited; taken by the first that comes.
type Awaited<T> = Vec<Mutex<Option<oneshot::Sender<T>>>>;

/// What the listener of a rank in a mesh knows, and where it hands connections on to.
pub(super) struct Door {
    pub(super) world: [u8; 16],
    pub(super) rank: Rank,
    pub(super) size: usize,
    pub(super) token: Token,
    pub(super) control: Awaited<TcpStream>,
    pub(super) data: mpsc::UnboundedSender<(DataHello, StdStream)>,
    /// Where it is said that a rank has given up connecting: which one began with it, and why.
    pub(super) gave_up: mpsc::UnboundedSender<(Rank, String)>,
    /// Why this rank has given up itself: whoever comes is told.
    pub(super) closed: OnceLock<String>,
}

enum Admitted {
    Control(Rank),
    Data(DataHello),
    GaveUp(Rank, String),
}

impl Door {
    /// Whether this purpose has a place here.
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
                    Err(format!("rank {} has, or awaits no, control connection from rank {from}", self.rank))
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

    /// For its listeners.
    pub(super) fn porter(&self) -> Porter<impl Fn(&str, &Purpose) + Send + Sync + use<>> {
        let (rank, gave_up) = (self.rank, self.gave_up.clone());
        // While this rank connects to the others, it cannot go on either. Later nobody listens to this.
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
                    // Nobody waits any more: joining failed, and the connection closes.
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
