//! From a rendezvous to a world whose ranks are all connected to each other.

use std::net::TcpStream as StdStream;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::accept::{self, Door};
use super::address::Address;
use super::addresses::Reach;
use super::connect::{Failed, Pair, Pairing, Side};
use super::env::Rendezvous;
use super::farewell;
use super::fds::Handed;
use super::handshake::Token;
use super::host::{self, Process};
use super::lobby::absent;
use super::me::Me;
use super::message::DataHello;
use super::note;
use super::rdma;
use super::registration::{Table, Tried};
use super::rendezvous::LINGER;
use crate::error::Error;
use crate::link::verbs::RDMA;
use crate::types::Rank;

/// Once the table is known, everyone is there: connecting takes at most this, or what is left of the
/// rendezvous timeout if that is more.
const CONNECTING: Duration = Duration::from_secs(10);
/// How long a rank that gives up still waits for connections that are about to become pairs.
const SETTLING: Duration = Duration::from_millis(100);

/// What a rank has when it is connected to all others. The mesh is made from it; before that, nothing that comes from them is delivered.
pub(super) struct Joined {
    pub(super) table: Table,
    pub(super) token: Token,
    pub(super) pairs: Vec<Pair>,
    pub(super) service: JoinSet<()>,
    pub(super) data: mpsc::UnboundedReceiver<(DataHello, StdStream)>,
    /// Until when other ranks may still be connecting.
    pub(super) deadline: Instant,
}

/// The same rendezvous with the address where the ranks meet, and the secret. If it names a note, rank 0 leaves both there, and the others
/// read them. Rank 0 keeps the returned [`note::Left`] until it is connected to all others or has failed, as dropping it removes the note.
pub(super) async fn settled(rendezvous: Rendezvous) -> Result<(Rendezvous, Option<note::Left>), Error> {
    match rendezvous.note.clone() {
        Some(path) => note::settle(rendezvous, &path).await,
        None => Ok((rendezvous, None)),
    }
}

/// The address where the ranks meet, and the secret.
fn parts(rendezvous: &Rendezvous) -> Result<(&Address, Token), Error> {
    let address = rendezvous.address.as_ref().ok_or_else(|| rendezvous.error("no address was given"))?;
    let token = rendezvous.token.clone().ok_or_else(|| {
        rendezvous.error("no secret was given: call `token(...)` with the same on all ranks, or `insecure()` on a trusted machine")
    })?;
    Ok((address, token))
}

/// Tells the others that this rank cannot take part, and why (`unfit`), so that they do not wait for it. If the ranks meet by a note, a rank other
/// than 0 first waits for the note, at most for the rendezvous timeout. Then it tries to reach rank 0, for about [`LINGER`] at most; rank 0 waits as
/// long for the others.
pub(super) async fn decline(rendezvous: Rendezvous, unfit: String) -> Result<(), Error> {
    let (rendezvous, _note) = settled(rendezvous).await?;
    let (address, token) = parts(&rendezvous)?;
    let process = Process::this(rendezvous.host_id.as_deref())?;
    let deadline = Instant::now() + rendezvous.timeout.min(LINGER);
    let reach = Reach::default();
    let (rendezvous, token, unfit) = (&rendezvous, &token, Some(unfit));
    let me = Me { rendezvous, address, token, process, socket: None, deadline, reach: &reach, unfit };
    me.meet().await.map(drop)
}

/// Meets the other ranks and connects to all of them. Calls `named` with the world's name before any rank is connected to this one.
pub(super) async fn gather(
    rendezvous: &Rendezvous,
    local_fds: Vec<OwnedFd>,
    named: impl FnOnce([u8; 16]) + Send,
) -> Result<Joined, Error> {
    let Rendezvous { rank, size, link, timeout, .. } = *rendezvous;
    let (address, token) = parts(rendezvous)?;
    let reach = rendezvous.reach.clone().unwrap_or_default();
    let begun = Instant::now();
    let deadline = begun + timeout;
    let mut service = JoinSet::new();
    // Lives until all are connected; its tasks hold the unix socket.
    let mut joining = JoinSet::new();
    let local = LocalSocket::open();
    let me = Me {
        rendezvous,
        address,
        token: &token,
        process: Process::this(rendezvous.host_id.as_deref())?,
        socket: local.name(),
        deadline,
        reach: &reach,
        unfit: None,
    };
    let formed = me.meet().await?;
    // This rank lets nobody in before the door below is there.
    named(formed.table.world);

    let deadline = deadline.max(Instant::now() + CONNECTING);
    let (data_in, data) = mpsc::unbounded_channel();
    let (control, controls) = awaited(rank, size);
    let (slots, mut fds) = awaited(rank, size);
    let world = formed.table.world;
    let (gave_up, mut giving_up) = mpsc::unbounded_channel();
    let prospect = rendezvous.rdma.as_ref().filter(|_| rdma::is_to_try(&formed.table, rank));
    let card = match prospect.cloned() {
        Some(prospect) => Some(rdma::open_aside(prospect).await),
        None => None,
    };
    let (verdict_in, verdict) = card.as_ref().map(|_| oneshot::channel()).unzip();
    // If this is dropped before `done` is called, the others hear that this rank is gone.
    let mut connecting = Some(formed.registered.watch(&mut service, gave_up.clone(), verdict_in));
    let closed = OnceLock::new();
    let door =
        Arc::new(Door { world, rank, size, token: token.clone(), control, data: data_in, gave_up, closed });
    let fds_offered = Arc::new(local_fds);
    local.serve(&mut joining, door.clone(), fds_offered.clone(), slots);
    let (porter, entered) = (door.porter(), door.clone());
    service.spawn(accept::serve(formed.listener, porter, move |stream, visit| {
        entered.clone().enter(stream, visit)
    }));

    let (table, token_of_pairs) = (formed.table, token.clone());
    let pairing = Pairing { rank, table, token: token_of_pairs, link, fds: fds_offered, card, deadline };
    let pairing = Arc::new(pairing);
    let mut pending = JoinSet::new();
    // A descriptor in reserve: a rank that gives up because it has none left needs one to tell the others.
    let spare = std::fs::File::open("/dev/null");
    for (peer, control) in controls.into_iter().enumerate() {
        let side = match (control, fds[peer].take()) {
            (Some(control), Some(fds)) => Side::Await { control, fds },
            _ if peer < rank => Side::Dial,
            _ => continue,
        };
        let pair = pairing.clone().pair(peer, side);
        pending.spawn(async { pair.await.map(Settled::Pair) });
    }
    let tries = verdict.is_some();
    if let Some(verdict) = verdict {
        pending.spawn(async {
            match verdict.await {
                Ok(tried) => Ok(Settled::Rdma(tried)),
                // A rank has given up, and the task below reports that.
                Err(_) => std::future::pending().await,
            }
        });
    }
    pending.spawn(async move {
        match giving_up.recv().await {
            Some((first, why)) => Err(Failed { first, why }),
            None => std::future::pending().await,
        }
    });
    let mut pairs: Vec<Pair> = Vec::with_capacity(size);
    let connected = async {
        all_pairs(&mut pending, &mut pairs, (rank, size), (begun, deadline)).await?;
        if let Some(connecting) = connecting.take() {
            connecting.done(pairing.tried(&pairs)).await;
        }
        if tries { told(&mut pending, rank, deadline).await.map(Some) } else { Ok(None) }
    };
    let tried = match connected.await {
        Ok(tried) => tried,
        Err(failed) => {
            let error = rendezvous.error(failed.shown(rank));
            let _ = door.closed.set(failed.shown(Rank::MAX));
            drop(spare);
            // While this rank is still settling a connection, the rank at the other end may already count it as a pair, and may have joined
            // the world. So this rank makes it a pair, too, and `farewell` tells the other rank over it.
            let soon = Instant::now() + SETTLING;
            while let Ok(Some(end)) = timeout_at(soon, pending.join_next()).await {
                if let Ok(Ok(Settled::Pair(pair))) = end {
                    pairs.push(pair);
                }
            }
            farewell::tell(&pairing, pairs, &failed, error.clone()).await;
            return Err(error);
        }
    };
    drop(pending);
    let table = pairing.table.clone();
    if let Some(tried) = tried {
        rdma::tell(rank, &table, &tried);
        let is_elsewhere =
            |pair: &&mut Pair| table.members[pair.rank].process.host != table.members[rank].process.host;
        if tried.is_ok() {
            pairs.iter_mut().filter(is_elsewhere).for_each(|pair| pair.link = &RDMA);
        }
    }
    Ok(Joined { table, token, pairs, service, data, deadline })
}

/// What a rank waits for while the ranks connect.
enum Settled {
    Pair(Pair),
    /// Where the ranks try RDMA: whether links use it. Rank 0 says so once all ranks are connected to each other.
    Rdma(Tried),
}

type Pending = JoinSet<Result<Settled, Failed>>;

/// Waits until all other ranks are pairs with this one.
async fn all_pairs(
    pending: &mut Pending,
    pairs: &mut Vec<Pair>,
    (rank, size): (Rank, usize),
    (begun, deadline): (Instant, Instant),
) -> Result<(), Failed> {
    while pairs.len() + 1 < size {
        match timeout_at(deadline, pending.join_next()).await {
            Ok(Some(Ok(Ok(Settled::Pair(pair))))) => pairs.push(pair),
            Ok(Some(Ok(Err(failed)))) => return Err(failed),
            Ok(Some(Err(e))) => return Err(Failed { first: rank, why: format!("connecting: {e}") }),
            Ok(None | Some(Ok(Ok(Settled::Rdma(_))))) | Err(_) => {
                let without: Vec<Rank> =
                    (0..size).filter(|r| *r != rank && !pairs.iter().any(|p| p.rank == *r)).collect();
                let (after, absent) = (begun.elapsed(), absent(&without, size));
                let why = format!(
                    "all ranks came, but {absent} did not connect to rank {rank} within {after:.1?}; does a firewall stand between \
                     the hosts?"
                );
                return Err(Failed { first: rank, why });
            }
        }
    }
    Ok(())
}

/// Waits until rank 0 says whether links go over RDMA. Rank 0 says so once all ranks are connected to each other.
async fn told(pending: &mut Pending, rank: Rank, deadline: Instant) -> Result<Tried, Failed> {
    match timeout_at(deadline, pending.join_next()).await {
        Ok(Some(Ok(Ok(Settled::Rdma(tried))))) => Ok(tried),
        Ok(Some(Ok(Err(failed)))) => Err(failed),
        Ok(Some(Err(e))) => Err(Failed { first: rank, why: format!("connecting: {e}") }),
        Ok(None | Some(Ok(Ok(Settled::Pair(_))))) | Err(_) => {
            let why = "this rank is connected to all others, but in time not all of them were connected to each other, or had tried RDMA; \
                       ALLSTREAM_LINK=tcp on all ranks leaves RDMA out";
            Err(Failed { first: rank, why: why.into() })
        }
    }
}

type Sender<T> = Mutex<Option<oneshot::Sender<T>>>;

/// For each higher rank, as higher ranks dial this one: a channel for the one thing that this rank awaits from it. For lower ranks: nothing.
fn awaited<T>(rank: Rank, size: usize) -> (Vec<Sender<T>>, Vec<Option<oneshot::Receiver<T>>>) {
    let one = |peer| {
        let (tell, told) = oneshot::channel();
        if peer > rank { (Mutex::new(Some(tell)), Some(told)) } else { (Mutex::new(None), None) }
    };
    (0..size).map(one).unzip()
}

/// This rank's unix socket, if it could have one.
#[cfg(target_os = "linux")]
struct LocalSocket(Option<(String, tokio::net::UnixListener)>);

#[cfg(target_os = "linux")]
impl LocalSocket {
    fn open() -> LocalSocket {
        let open = || -> Result<_, String> {
            let name =
                format!("allstream-{:032x}", u128::from_le_bytes(host::random().map_err(|e| e.to_string())?));
            let listener = super::fds::listen(&name).map_err(|e| e.to_string())?;
            Ok((name, listener))
        };
        LocalSocket(open().inspect_err(|e| tracing::warn!("no unix socket, so no shared memory: {e}")).ok())
    }

    fn name(&self) -> Option<String> {
        self.0.as_ref().map(|(name, _)| name.clone())
    }

    fn serve(
        self,
        into: &mut JoinSet<()>,
        door: Arc<Door>,
        fds: Arc<Vec<OwnedFd>>,
        slots: Vec<Sender<Handed>>,
    ) {
        if let Some((_, listener)) = self.0 {
            let porter = door.porter();
            let hatch = Arc::new(accept::local::Hatch { door, fds, slots });
            into.spawn(accept::serve(listener, porter, move |stream, visit| {
                hatch.clone().enter(stream, visit)
            }));
        }
    }
}

/// There are no abstract unix sockets here.
#[cfg(not(target_os = "linux"))]
struct LocalSocket;

#[cfg(not(target_os = "linux"))]
impl LocalSocket {
    fn open() -> LocalSocket {
        LocalSocket
    }

    fn name(&self) -> Option<String> {
        None
    }

    fn serve(self, _: &mut JoinSet<()>, _: Arc<Door>, _: Arc<Vec<OwnedFd>>, _: Vec<Sender<Handed>>) {}
}
