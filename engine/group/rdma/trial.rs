//! Two ranks of different hosts try whether messages get through by RDMA, before it is decided whether the world's links go over RDMA.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::registration::Tried;
use super::super::wire::{self, Frames};
use crate::link::verbs::{Card, Probe};
use crate::types::Rank;

/// How long the messages of a trial may take, apart from what [`limit`] adds for each host. A card sends a lost packet again after a second.
const LIMIT: Duration = Duration::from_secs(3);
/// How much longer they may take for each host of the world, as a rank tries the ways to all hosts at once.
const FOR_A_HOST: Duration = Duration::from_millis(10);
/// How often the device is polled meanwhile.
const LOOK: Duration = Duration::from_millis(1);
/// Bytes of the stack of a thread that calls the device's library.
const STACK: usize = 512 << 10;

/// How long the messages may take, in a world of so many hosts.
pub(crate) fn limit(hosts: usize) -> Duration {
    LIMIT + FOR_A_HOST * u32::try_from(hosts).unwrap_or(u32::MAX)
}

/// The result of a step at one end: what the other end has to know to go on, or what went wrong.
type Step = Result<Vec<u8>, String>;

/// The control connection of the two ranks, on which nothing else is sent until the world has formed.
pub(crate) struct Talk<'a> {
    /// This end's rank.
    pub(crate) rank: Rank,
    pub(crate) stream: &'a mut TcpStream,
    pub(crate) frames: &'a mut Frames,
}

impl Talk<'_> {
    /// Exchanges the results of a step; `Ok`, with what the other end has told, only if both ends succeeded.
    ///
    /// # Errors
    /// The connection broke.
    async fn exchange(&mut self, own: Step) -> Result<Step, String> {
        let broke = |why: String| format!("{why}, while RDMA was tried");
        let own = own.map_err(|why| format!("rank {}: {why}", self.rank));
        self.stream.write_all(&wire::encode(&own)?).await.map_err(|e| broke(e.to_string()))?;
        let theirs = self.frames.next::<Step, _>(self.stream).await.map_err(broke)?;
        let theirs = theirs.ok_or_else(|| broke("its connection ended".into()))?;
        Ok(own.and(theirs))
    }
}

/// Tries the way between this rank's port, if it could be opened, and the port of the rank at the other end of the connection. Both ranks learn
/// whether messages got through, and if not, why.
///
/// # Errors
/// The connection broke.
pub(crate) async fn run(
    card: &Result<Arc<Card>, String>,
    talk: &mut Talk<'_>,
    limit: Duration,
) -> Result<Tried, String> {
    let card = card.clone();
    let made =
        aside(move || card.and_then(|card| Probe::new(&card).map_err(|error| error.to_string()))).await;
    let hello = made.as_ref().map(Probe::hello).map_err(Clone::clone);
    let (hello, mut probe) = match (talk.exchange(hello).await?, made) {
        (Ok(hello), Ok(probe)) => (hello, probe),
        (Err(why), _) | (Ok(_), Err(why)) => return Ok(Err(why)),
    };
    let connected = aside(move || probe.connect(&hello).map(|()| probe)).await;
    let (step, connected) = match connected {
        Ok(probe) => (Ok(Vec::new()), Some(probe)),
        Err(why) => (Err(why), None),
    };
    probe = match (talk.exchange(step).await?, connected) {
        (Ok(_), Some(probe)) => probe,
        (Err(why), _) => return Ok(Err(why)),
        (Ok(_), None) => return Ok(Err("the port was not connected".into())),
    };
    let tried = send(&mut probe, limit).await;
    // The other end may still use this end's memory and queue pair: they stay until both ends are done.
    let tried = talk.exchange(tried.map(|()| Vec::new())).await?;
    Ok(tried.map(drop))
}

async fn send(probe: &mut Probe, limit: Duration) -> Tried {
    probe.send()?;
    let end = Instant::now() + limit;
    while !probe.is_over()? {
        if Instant::now() >= end {
            return Err(format!("{} within {limit:?}", probe.missing()));
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

/// Calls the device's library on a thread of its own, as some calls block: to connect to a port that does not answer takes a second, in which the
/// kernel asks the network for the port's address. On the control thread, such a call would hold up all worlds of this process.
///
/// # Errors
/// The errors of the call; or no thread can be started.
pub(crate) async fn aside<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let (tell, told) = oneshot::channel();
    let thread = std::thread::Builder::new().name("allstream-rdma".into()).stack_size(STACK);
    let started = thread.spawn(move || drop(tell.send(call())));
    started.map_err(|error| format!("no thread can be started: {error}"))?;
    told.await.unwrap_or_else(|_| Err("the call of the library panicked".into()))
}
