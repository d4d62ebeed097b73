//! The connections over which ranks have registered with rank 0. A rank keeps its own until it is connected to all others, and then says so
//! over it. If the connection ends before that, rank 0 tells all that are still connecting, as they would else wait until their deadlines.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::lobby::{self, Visitors};
use super::registration::{Connected, News, Tried};
use super::wire::{self, Frames};
use crate::types::Rank;

/// How long a rank goes on to connect without rank 0.
const GRACE: Duration = Duration::from_secs(1);

/// The connections that a rank holds when it has got the table of all ranks.
pub(super) enum Registered {
    /// Rank 0: those of all others.
    Host(Visitors),
    /// Another rank: its connection to rank 0, and what was read from it and not used yet.
    Guest(TcpStream, Frames),
}

/// A rank that is connecting to the others. If it is dropped (on rank 0: with the task of `watch`), all others hear that this rank is gone.
pub(super) enum Connecting {
    Host(mpsc::UnboundedSender<lobby::Event>),
    Guest(OwnedWriteHalf),
}

impl Registered {
    /// Lets `gave_up` know which rank goes away, and why, before it is connected to all others. On rank 0 the task also tells the others, and so
    /// has to live for longer than rank 0 itself connects. Where the ranks try RDMA, all learn by `verdict` whether links go over it, once all
    /// are connected.
    pub(super) fn watch(
        self,
        tasks: &mut JoinSet<()>,
        gave_up: mpsc::UnboundedSender<(Rank, String)>,
        verdict: Option<oneshot::Sender<Tried>>,
    ) -> Connecting {
        match self {
            Registered::Host(visitors) => {
                let tell = visitors.tell();
                tasks.spawn(visitors.watch(gave_up, verdict));
                Connecting::Host(tell)
            }
            Registered::Guest(stream, frames) => {
                let (read, write) = stream.into_split();
                tasks.spawn(listen(read, frames, gave_up, verdict));
                Connecting::Guest(write)
            }
        }
    }
}

impl Connecting {
    /// This rank is connected to all others. If it ends from here on, they see that by themselves.
    pub(super) async fn done(self, rdma: Option<Tried>) {
        let said = Connected { rdma };
        match self {
            Connecting::Host(tell) => _ = tell.send(lobby::Event::Connected { rank: 0, visit: 0, said }),
            // So few bytes always fit into the socket's buffer, so this does not wait. A failure is no error: rank 0 may have ended in peace.
            Connecting::Guest(mut write) => {
                if let Ok(frame) = wire::encode(&said) {
                    _ = write.write_all(&frame).await;
                }
            }
        }
    }
}

/// Listens to rank 0, on another rank, until rank 0 knows that this one is connected to all others.
async fn listen(
    mut read: OwnedReadHalf,
    mut frames: Frames,
    gave_up: mpsc::UnboundedSender<(Rank, String)>,
    mut verdict: Option<oneshot::Sender<Tried>>,
) {
    let mut is_rank_0_connected = false;
    while let Ok(Some(news)) = frames.next::<News, _>(&mut read).await {
        match news {
            News::Connected { rdma } => {
                is_rank_0_connected = true;
                if let (Some(tried), Some(verdict)) = (rdma, verdict.take()) {
                    let _ = verdict.send(tried);
                }
            }
            News::Left { rank, why } => _ = gave_up.send((rank, why)),
            _ => {}
        }
    }
    if !is_rank_0_connected {
        // Perhaps rank 0 was connected to all ranks, and ended before it said so. Then this rank can become connected to all as well, and learns
        // over its connections how rank 0 ended.
        tokio::time::sleep(GRACE).await;
        let _ = gave_up.send((0, "it ended, or the connection to it did".into()));
    }
}
