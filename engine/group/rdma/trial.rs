//! Two ranks of different hosts try whether messages get through by RDMA, before their world says that its links go over it.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::super::registration::Tried;
use super::super::wire::{self, Frames};
use crate::link::verbs::{Card, Probe};

/// How long the messages may take. A card sends a lost packet again after a second.
const LIMIT: Duration = Duration::from_secs(3);
/// How often the device is asked meanwhile.
const LOOK: Duration = Duration::from_millis(1);

/// A step of one end's: what the other has to know to go on, or what went wrong.
type Step = Result<Vec<u8>, String>;

/// The control connection of the two, which is silent otherwise until the world has formed.
pub(crate) struct Talk<'a> {
    pub(crate) stream: &'a mut TcpStream,
    pub(crate) frames: &'a mut Frames,
}

impl Talk<'_> {
    /// Tells the other end of this one's step, and hears of the other's. Both know then whether to go on: only where both steps went well.
    ///
    /// # Errors
    /// The connection broke.
    async fn exchange(&mut self, own: Step) -> Result<Step, String> {
        self.stream.write_all(&wire::encode(&own)?).await.map_err(|e| e.to_string())?;
        let theirs = self.frames.next::<Step, _>(self.stream).await?;
        let theirs = theirs.ok_or("its connection ended while RDMA was tried")?;
        Ok(own.and(theirs))
    }
}

/// Tries the way between the port of this rank, if it could be opened, and that of the rank at the other end of the connection. Both ranks learn the same.
///
/// # Errors
/// The connection broke.
pub(crate) async fn run(card: &Result<Arc<Card>, String>, talk: &mut Talk<'_>) -> Result<Tried, String> {
    let made = card.clone().and_then(|card| Probe::new(&card).map_err(|error| error.to_string()));
    let hello = made.as_ref().map(Probe::hello).map_err(Clone::clone);
    let (hello, mut probe) = match (talk.exchange(hello).await?, made) {
        (Ok(hello), Ok(probe)) => (hello, probe),
        (Err(why), _) | (Ok(_), Err(why)) => return Ok(Err(why)),
    };
    if let Err(why) = talk.exchange(probe.connect(&hello).map(|()| Vec::new())).await? {
        return Ok(Err(why));
    }
    let tried = send(&mut probe).await;
    // The other end may still need this one's memory and queue: they stay until both have done.
    let tried = talk.exchange(tried.map(|()| Vec::new())).await?;
    Ok(tried.map(drop))
}

async fn send(probe: &mut Probe) -> Tried {
    probe.send()?;
    let end = Instant::now() + LIMIT;
    while !probe.is_over()? {
        if Instant::now() >= end {
            return Err(format!("{} within {LIMIT:?}", probe.missing()));
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}
