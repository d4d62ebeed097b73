//! A control connection between two ranks that are a pair: one task reads, one writes.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::line::{LineIn, LineOut};
use super::message::{DataHello, Message};
use super::registration::Heartbeat;
use super::wire::{self, Frames};
use crate::error::{Error, Lost};
use crate::trace::log::LOG;
use crate::types::Rank;

/// How long a leaving rank waits for its goodbyes to be written and taken.
pub(super) const FLUSH: Duration = Duration::from_secs(1);
/// If this many messages wait, those that are sent again later anyway ([`Urgency::Repeated`]) are dropped.
const SOFT_LIMIT: usize = 1 << 10;
/// If this many messages wait, nothing more is queued: the other rank reads nothing, and will be found silent.
const HARD_LIMIT: usize = 1 << 16;
/// Within the time that another rank may be silent, a rank looks at its own clock this many times. If a look comes so late that one more could have
/// been made, this process itself has stood still.
const LOOKS: u32 = 4;

/// Hears what comes over the control connections. Its functions are called on the control thread, and must not block.
pub(crate) trait Events: Send + Sync + 'static {
    /// Anything but heartbeats and goodbyes; in the order it was sent.
    fn message(&self, from: Rank, message: Message);
    /// A rank died or fell silent. Once per rank, and never after its goodbye.
    fn lost(&self, rank: Rank, how: Lost);
    /// A rank left; with the first cause it knew of, if it did not leave in peace.
    fn goodbye(&self, rank: Rank, cause: Option<Error>);
    /// A data connection that has proved itself. The socket does not block, and sends without delay (`TCP_NODELAY`).
    fn data(&self, hello: DataHello, socket: TcpStream);
}

/// How a message is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// The message will be sent again anyway, so it may be dropped if the other rank reads little.
    Repeated,
    Once,
    /// The message ends a communicator. The thread that sends it also writes it, as far as the socket takes it. When that thread goes on and tells a
    /// user, the process may end; but what was written reaches the other rank before the end of the connection does.
    AtOnce,
}

/// What waits to be sent to one rank.
pub(super) struct Outbox {
    queue: Mutex<Queue>,
    more: Notify,
    /// The writing half of the connection, while it is open.
    half: OnceLock<Weak<LineOut>>,
    gone: AtomicBool,
    #[cfg(test)]
    pub(super) frozen: AtomicBool,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Arc<Vec<u8>>>,
    /// How many bytes of the first frame are written.
    written: usize,
    /// The last frame is queued. Once it is written, the connection is shut down for writing.
    is_last: bool,
}

/// How far writing has come.
enum Wrote {
    All,
    /// All, and the last frame was among them.
    Last,
    /// The connection takes no more now.
    Some,
}

impl Queue {
    fn write(&mut self, half: &LineOut) -> io::Result<Wrote> {
        while let Some(frame) = self.frames.front() {
            let left = &frame[self.written..];
            match half.try_write(left) {
                Ok(0) if !left.is_empty() => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.written += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Wrote::Some),
                Err(e) => return Err(e),
            }
            if self.written == frame.len() {
                self.frames.pop_front();
                self.written = 0;
            }
        }
        Ok(if self.is_last { Wrote::Last } else { Wrote::All })
    }
}

/// The frame of a goodbye. A cause that is too long for a frame is left out of it.
pub(super) fn goodbye(cause: Option<Error>) -> Arc<Vec<u8>> {
    let frame = wire::encode(&Message::Goodbye { cause }).or_else(|e| {
        tracing::warn!("saying goodbye without the cause: {e}");
        wire::encode(&Message::Goodbye { cause: None })
    });
    Arc::new(frame.unwrap_or_default())
}

impl Outbox {
    pub(super) fn new() -> Arc<Outbox> {
        Arc::new(Outbox {
            queue: Mutex::default(),
            more: Notify::new(),
            half: OnceLock::new(),
            gone: AtomicBool::new(false),
            #[cfg(test)]
            frozen: AtomicBool::new(false),
        })
    }

    /// Queues a frame. Drops it if the rank is gone, or if too many frames wait.
    pub(super) fn push(&self, to: Rank, frame: Arc<Vec<u8>>, urgency: Urgency) {
        if self.gone.load(Ordering::Acquire) {
            return;
        }
        let limit = if urgency == Urgency::Repeated { SOFT_LIMIT } else { HARD_LIMIT };
        let mut queue = self.queue.lock();
        if queue.is_last {
            return;
        }
        if queue.frames.len() >= limit {
            LOG.warn(move || {
                tracing::warn!(to, "dropped a control message for rank {to}: {limit} messages wait already, and the rank reads none");
            });
            return;
        }
        queue.frames.push_back(frame);
        let half = self.half.get().filter(|_| urgency == Urgency::AtOnce && !self.is_frozen());
        if let Some(half) = half.and_then(Weak::upgrade) {
            // An error is left to the connection's reader, which finds it, too.
            let _ = queue.write(&half);
        }
        let is_left = !queue.frames.is_empty();
        drop(queue);
        if is_left {
            self.more.notify_one();
        }
    }

    /// Queues the last frame.
    pub(super) fn finish(&self, frame: Arc<Vec<u8>>) {
        let mut queue = self.queue.lock();
        if !queue.is_last {
            queue.frames.push_back(frame);
            queue.is_last = true;
        }
        drop(queue);
        self.more.notify_one();
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
pub(super) async fn write(half: LineOut, outbox: Arc<Outbox>, every: Duration) {
    let heartbeat = Arc::new(wire::encode(&Message::Heartbeat).unwrap_or_default());
    // Dropping this at the end shuts the connection down for writing.
    let half = Arc::new(half);
    let _ = outbox.half.set(Arc::downgrade(&half));
    // The first heartbeat is sent at once: until it comes, the other rank waits longer than later (`Reader::patience`).
    let mut wait = Duration::ZERO;
    loop {
        let is_idle = timeout(wait, outbox.more.notified()).await.is_err();
        wait = every;
        loop {
            let wrote = {
                let mut queue = outbox.queue.lock();
                if outbox.is_frozen() {
                    queue.frames.clear();
                    break;
                }
                if is_idle && queue.frames.is_empty() && !queue.is_last {
                    queue.frames.push_back(heartbeat.clone());
                }
                queue.write(&half)
            };
            match wrote {
                Ok(Wrote::All) => break,
                Ok(Wrote::Some) => {
                    if half.writable().await.is_err() {
                        return;
                    }
                }
                // An error is left to the reader, which must first read what came before it.
                Ok(Wrote::Last) | Err(_) => return,
            }
        }
    }
}

/// The reading side of a control connection.
pub(super) struct Reader {
    pub(super) rank: Rank,
    pub(super) from: Rank,
    pub(super) half: LineIn,
    pub(super) frames: Frames,
    pub(super) events: Arc<dyn Events>,
    /// Set once this rank leaves: nothing is reported from then on.
    pub(super) leaving: Arc<AtomicBool>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) writer: AbortHandle,
    pub(super) heartbeat: Heartbeat,
    /// How much longer than later ones the first sign of life may take, as the other rank may still be connecting to others.
    pub(super) patience: Duration,
}

enum End {
    Goodbye(Option<Error>),
    Died(String),
    Silent,
}

impl Reader {
    /// Delivers what comes, and then once how the connection ended. Another thread writes the log, so heartbeats go on even if logging blocks.
    pub(super) async fn run(mut self) {
        let end = self.read().await;
        self.outbox.set_gone();
        let (rank, from) = (self.rank, self.from);
        if self.leaving.load(Ordering::Acquire) {
            // The writer still has to send a goodbye, and ends after it.
            return;
        }
        match end {
            End::Goodbye(cause) => {
                let told = cause.clone();
                LOG.debug(move || tracing::debug!(rank, from, cause = ?told, "rank {from} said goodbye"));
                self.events.goodbye(from, cause);
                self.writer.abort();
            }
            End::Died(why) => {
                LOG.warn(move || tracing::warn!(rank, from, "rank {from} was lost: {why}"));
                self.events.lost(from, Lost::Died);
                self.writer.abort();
            }
            End::Silent => {
                let how = Lost::Silent(self.heartbeat.silent);
                LOG.warn(move || tracing::warn!(rank, from, "rank {from} was lost: {how}"));
                self.events.lost(from, how);
                // The rank may wake up again: then this goodbye tells it that it was given up, and why.
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
                    // This message may have been read together with the frame that settled the pair, and perhaps nothing follows it.
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
            match self.fill().await {
                Some(Ok(0)) => return End::Died("its connection ended without a goodbye".into()),
                Some(Ok(_)) => self.patience = Duration::ZERO,
                Some(Err(e)) => return End::Died(format!("its connection broke: {e}")),
                None => return End::Silent,
            }
        }
    }

    /// Reads until something has come. `None`: nothing has come for as long as a rank may be silent. If this process itself has stood still, that
    /// time begins anew, as the ranks of a job that was stopped as a whole are woken one after another.
    async fn fill(&mut self) -> Option<io::Result<usize>> {
        let silent = self.heartbeat.silent.saturating_add(self.patience);
        let look = self.heartbeat.silent / LOOKS;
        let mut since = Instant::now();
        loop {
            let looked = Instant::now();
            let wait = look.min(silent.saturating_sub(looked - since));
            if let Ok(read) = timeout(wait, self.frames.fill(&mut self.half)).await {
                return Some(read);
            }
            let now = Instant::now();
            if now - looked > wait + look {
                since = now;
            } else if now - since >= silent {
                return None;
            }
        }
    }
}
