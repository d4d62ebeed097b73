//! A control connection between two ranks that are a pair: one task reads, one writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::env::Heartbeat;
use super::mesh::Events;
use super::message::Message;
use super::wire::{self, Frames};
use crate::error::{Error, Lost};
use crate::trace::log::LOG;
use crate::types::Rank;

/// How long a leaving rank waits for its goodbyes to be written and taken.
pub(super) const FLUSH: Duration = Duration::from_secs(1);
/// Questions and answers beyond this many waiting messages are dropped: they are asked again.
const SOFT_LIMIT: usize = 1 << 10;
/// Nothing is queued beyond this: the rank takes nothing, and will be found silent.
const HARD_LIMIT: usize = 1 << 16;

enum Outgoing {
    Frame(Arc<Vec<u8>>),
    /// The last frame: the connection's own half is shut down behind it.
    Last(Arc<Vec<u8>>),
}

/// What waits to be sent to one rank.
pub(super) struct Outbox {
    queue: mpsc::UnboundedSender<Outgoing>,
    waiting: AtomicUsize,
    gone: AtomicBool,
    #[cfg(test)]
    pub(super) frozen: AtomicBool,
}

pub(super) struct Letters(mpsc::UnboundedReceiver<Outgoing>);

/// A goodbye as it travels. A cause too long for a frame is left out rather than the goodbye.
pub(super) fn goodbye(cause: Option<Error>) -> Arc<Vec<u8>> {
    let frame = wire::encode(&Message::Goodbye { cause }).or_else(|e| {
        tracing::warn!("saying goodbye without the cause: {e}");
        wire::encode(&Message::Goodbye { cause: None })
    });
    Arc::new(frame.unwrap_or_default())
}

impl Outbox {
    pub(super) fn new() -> (Arc<Outbox>, Letters) {
        let (queue, letters) = mpsc::unbounded_channel();
        let outbox = Outbox {
            queue,
            waiting: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
            #[cfg(test)]
            frozen: AtomicBool::new(false),
        };
        (Arc::new(outbox), Letters(letters))
    }

    /// Queues a frame; drops it if the rank is gone, or takes nothing.
    pub(super) fn push(&self, to: Rank, frame: Arc<Vec<u8>>, repeated: bool) {
        if self.gone.load(Ordering::Acquire) {
            return;
        }
        let limit = if repeated { SOFT_LIMIT } else { HARD_LIMIT };
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= limit {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            LOG.line(move || {
                tracing::warn!(to, "dropped a control message: {limit} wait for rank {to}, which takes none");
            });
            return;
        }
        let _ = self.queue.send(Outgoing::Frame(frame));
    }

    /// Queues the last frame.
    pub(super) fn finish(&self, frame: Arc<Vec<u8>>) {
        let _ = self.queue.send(Outgoing::Last(frame));
    }

    fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    #[cfg(test)]
    fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    #[cfg(not(test))]
    fn is_frozen(&self) -> bool {
        false
    }
}

/// Writes what is queued, and heartbeats when nothing is.
pub(super) async fn write(
    mut half: OwnedWriteHalf,
    mut letters: Letters,
    outbox: Arc<Outbox>,
    every: Duration,
) {
    let heartbeat = wire::encode(&Message::Heartbeat).unwrap_or_default();
    // The first one at once: the other side's patience ends with it.
    let mut wait = Duration::ZERO;
    loop {
        let next = timeout(wait, letters.0.recv()).await;
        wait = every;
        let (frame, last) = match next {
            Ok(Some(Outgoing::Frame(frame))) => {
                outbox.waiting.fetch_sub(1, Ordering::Relaxed);
                (Some(frame), false)
            }
            Ok(Some(Outgoing::Last(frame))) => (Some(frame), true),
            Ok(None) => return,
            Err(_) => (None, false),
        };
        if outbox.is_frozen() {
            continue;
        }
        // An error here is the reader's to judge: what has come before it must still be read.
        if half.write_all(frame.as_ref().map_or(&heartbeat, |f| f)).await.is_err() {
            return;
        }
        if last {
            let _ = half.shutdown().await;
            return;
        }
    }
}

/// The reading side of a control connection.
pub(super) struct Reader {
    pub(super) rank: Rank,
    pub(super) from: Rank,
    pub(super) half: OwnedReadHalf,
    pub(super) frames: Frames,
    pub(super) events: Arc<dyn Events>,
    /// Set once this rank leaves: nothing is reported from then on.
    pub(super) leaving: Arc<AtomicBool>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) writer: AbortHandle,
    pub(super) heartbeat: Heartbeat,
    /// How much longer than later the first sign of life may take: the other rank may still be connecting
    /// to others.
    pub(super) patience: Duration,
}

enum End {
    Goodbye(Option<Error>),
    Died(String),
    Silent,
}

impl Reader {
    /// Delivers what comes, and how it ends: once. What is logged is logged by another thread: heartbeats go on whatever a log does.
    pub(super) async fn run(mut self) {
        let end = self.read().await;
        self.outbox.set_gone();
        let (rank, from) = (self.rank, self.from);
        if self.leaving.load(Ordering::Acquire) {
            // The writer still has a goodbye to bring out, which ends it.
            return;
        }
        match end {
            End::Goodbye(cause) => {
                if tracing::enabled!(tracing::Level::DEBUG) {
                    let told = cause.clone();
                    LOG.line(move || tracing::debug!(rank, from, cause = ?told, "rank {from} said goodbye"));
                }
                self.events.goodbye(from, cause);
                self.writer.abort();
            }
            End::Died(why) => {
                LOG.line(move || tracing::warn!(rank, from, "rank {from} was lost: {why}"));
                self.events.lost(from, Lost::Died);
                self.writer.abort();
            }
            End::Silent => {
                let how = Lost::Silent(self.heartbeat.silent);
                LOG.line(move || tracing::warn!(rank, from, "rank {from} was lost: {how}"));
                self.events.lost(from, how);
                // It may wake up again: what it reads then is why it is out.
                self.outbox.finish(goodbye(Some(Error::lost(from, how))));
                tokio::time::sleep(FLUSH).await;
                self.writer.abort();
            }
        }
    }

    async fn read(&mut self) -> End {
        loop {
            loop {
                let leaving = self.leaving.load(Ordering::Acquire);
                let next = self.frames.pop::<Message>();
                if matches!(next, Ok(Some(_))) {
                    // Possibly read together with what settled the pair, and nothing may follow.
                    self.patience = Duration::ZERO;
                }
                match next {
                    Ok(None) => break,
                    Ok(Some(Message::Heartbeat)) => {}
                    Ok(Some(Message::Goodbye { .. })) if leaving => {}
                    Ok(Some(Message::Goodbye { cause })) => return End::Goodbye(cause),
                    Ok(Some(message)) if !leaving => self.events.message(self.from, message),
                    Ok(Some(_)) => {}
                    Err(why) => return End::Died(format!("it sent what no correct rank sends: {why}")),
                }
            }
            let silent = self.heartbeat.silent.saturating_add(self.patience);
            let mut read = timeout(silent, self.frames.fill(&mut self.half)).await;
            if read.is_err() {
                // If it was this process that stood still, bytes are waiting.
                read = timeout(Duration::from_millis(20), self.frames.fill(&mut self.half)).await;
            }
            match read {
                Ok(Ok(0)) => return End::Died("its connection ended without a goodbye".into()),
                Ok(Ok(_)) => self.patience = Duration::ZERO,
                Ok(Err(e)) => return End::Died(format!("its connection broke: {e}")),
                Err(_) => return End::Silent,
            }
        }
    }
}
