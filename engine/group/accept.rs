//! Accepting connections: a bounded number at a time proves itself, strangers disturb nobody.

use std::future::Future;
use std::io;
use std::net::TcpStream as StdStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::handshake::{self, DEADLINE, Purpose, Refusal, Token};
use super::message::DataHello;
use crate::types::Rank;

/// Connections that may be proving themselves at once; more wait in the system's queue.
const AT_ONCE: usize = 64;

/// Something that connections come to.
pub(super) trait Listen: Send + Sync + 'static {
    type Stream: Send + 'static;
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

/// Accepts until aborted, and handles each connection in a task that ends with this future.
pub(super) async fn serve<L, F, Fut>(listener: L, handle: F)
where
    L: Listen,
    F: Fn(L::Stream, String) -> Fut + Send,
    Fut: Future<Output = Result<(), Refusal>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut tasks = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while tasks.try_join_next().is_some() {}
        match listener.next().await {
            Ok((stream, peer)) => {
                let handling = handle(stream, peer.clone());
                tasks.spawn(async move {
                    if let Err(refusal) = handling.await {
                        tracing::warn!(%peer, "refused a connection: {refusal}");
                    }
                    drop(place);
                });
            }
            Err(e) => {
                // A connection that was reset while it waited, or no descriptor left for it.
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
}

enum Admitted {
    Control(Rank),
    Data(DataHello),
}

impl Door {
    /// Whether this purpose has a place here.
    fn admit(&self, purpose: Purpose) -> Result<Admitted, String> {
        match purpose {
            Purpose::Control { world, from } => {
                self.check(world, from)?;
                let awaited = self.control.get(from).is_some_and(|c| c.lock().is_some());
                if awaited {
                    Ok(Admitted::Control(from))
                } else {
                    Err(format!("rank {} has, or awaits no, control connection from rank {from}", self.rank))
                }
            }
            Purpose::Data { world, hello } => {
                self.check(world, hello.from)?;
                Ok(Admitted::Data(hello))
            }
            Purpose::Register(other) => Err(format!(
                "rank {} of {} came to register, but this is a listener of a world that has formed; register with rank 0",
                other.rank, other.size
            )),
            Purpose::Local { .. } => Err("descriptors are exchanged over a unix socket only".into()),
        }
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
    pub(super) async fn enter(self: Arc<Self>, mut stream: TcpStream) -> Result<(), Refusal> {
        let deadline = Instant::now() + DEADLINE;
        match handshake::accept(&mut stream, &self.token, deadline, |p| self.admit(p)).await? {
            Admitted::Control(from) => {
                if let Some(waiting) = self.control.get(from).and_then(|c| c.lock().take()) {
                    // Nobody waits any more: joining failed, and the connection closes.
                    let _ = waiting.send(stream);
                }
            }
            Admitted::Data(hello) => {
                let stream = stream.into_std().map_err(|e| Refusal::Broken(e.to_string()))?;
                let _ = self.data.send((hello, stream));
            }
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
pub(super) mod local {
    //! The unix socket on which ranks of one host exchange descriptors.

    use std::os::fd::OwnedFd;

    use tokio::net::{UnixListener, UnixStream};
    use tokio::time::timeout_at;

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
        pub(in crate::group) async fn enter(self: Arc<Self>, mut stream: UnixStream) -> Result<(), Refusal> {
            let deadline = Instant::now() + DEADLINE;
            let admit = |purpose| {
                let Purpose::Local { world, from } = purpose else {
                    return Err("only descriptors are exchanged over a unix socket".into());
                };
                self.door.check(world, from)?;
                let awaited = self.slots.get(from).and_then(|s| s.lock().take());
                awaited.ok_or_else(|| format!("no descriptors are awaited from rank {from}"))
            };
            let slot = handshake::accept(&mut stream, &self.door.token, deadline, admit).await?;
            let fds = timeout_at(deadline, fds::exchange(&stream, &self.fds))
                .await
                .map_err(|_| Refusal::Broken("it did not exchange descriptors in time".into()))?
                .map_err(Refusal::Broken)?;
            let _ = slot.send(fds);
            Ok(())
        }
    }
}
