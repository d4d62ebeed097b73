//! Rank 0's view of the other ranks after it has sent the table, until each of them is connected to all. A rank that dies meanwhile may be
//! awaited by ranks that have no connection to it yet. Rank 0 has one, over which the rank registered, and tells them. Where hosts may talk
//! by RDMA, each rank tells rank 0 how its trials went, and rank 0 tells all ranks whether links use RDMA.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::super::registration::{News, Tried};
use super::super::wire;
use super::{Event, Visitor};
use crate::types::Rank;

/// The ranks that are still connecting, as far as rank 0 knows.
pub(in crate::group) struct Visitors {
    pub(super) connecting: BTreeMap<Rank, Visitor>,
    /// Those that are connected to all others, and wait to hear whether links go over RDMA.
    pub(super) awaiting: Vec<Visitor>,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    pub(super) tell: mpsc::UnboundedSender<Event>,
    pub(super) _watchers: JoinSet<()>,
    pub(super) writers: JoinSet<()>,
}

impl Visitors {
    /// The channel by which rank 0's own task says that rank 0 is connected to all others.
    pub(in crate::group) fn tell(&self) -> mpsc::UnboundedSender<Event> {
        self.tell.clone()
    }

    /// If a rank goes away before it is connected to all, tells the others that are not done; rank 0 is told by `gave_up`. Ends when no rank is
    /// connecting any more.
    ///
    /// Where the ranks try RDMA, `verdict` is given: each rank that is connected waits until all are. Then all are told whether links go over
    /// RDMA, rank 0 by `verdict`: they do if no trial has failed.
    pub(in crate::group) async fn watch(
        mut self,
        gave_up: mpsc::UnboundedSender<(Rank, String)>,
        mut verdict: Option<oneshot::Sender<Tried>>,
    ) {
        let mut is_rank_0_connected = false;
        // Of all failures that were reported, that of the lowest rank: so the order in which reports come does not matter.
        let mut failed: Option<(Rank, String)> = None;
        while !self.connecting.is_empty() || verdict.is_some() && !is_rank_0_connected {
            match self.events.recv().await {
                Some(Event::Connected { rank, visit, said }) => {
                    if let Some(Err(why)) = said.rdma {
                        failed = failed.into_iter().chain([(rank, why)]).min();
                    }
                    is_rank_0_connected |= rank == 0;
                    let visitor = self.take(rank, visit);
                    match &verdict {
                        Some(_) => self.awaiting.extend(visitor),
                        None if rank == 0 => self.tell_all(&News::Connected { rdma: None }),
                        None => {}
                    }
                }
                Some(Event::Left { rank, visit }) => {
                    let Some(visitor) = self.take(rank, visit) else { continue };
                    let why = format!("it ended, or its connection to rank 0 did ({})", visitor.who);
                    tracing::warn!(rank, "rank {rank} gave up connecting to the others: {why}");
                    self.tell_all(&News::Left { rank, why: why.clone() });
                    // The world cannot form now: there will be no verdict.
                    let _ = gave_up.send((rank, why));
                    verdict = None;
                }
                // Nobody can register any more.
                Some(Event::Came { .. } | Event::TurnedAway { .. } | Event::Hopeless(_)) => {}
                None => return,
            }
        }
        if let Some(verdict) = verdict {
            let tried: Tried = failed.map_or(Ok(()), |(_, why)| Err(why));
            self.tell_all(&News::Connected { rdma: Some(tried.clone()) });
            let _ = verdict.send(tried);
        }
        // Waits until the writers have sent what is in the outboxes, as the end of this task ends the writers, too.
        self.awaiting.clear();
        while self.writers.join_next().await.is_some() {}
    }

    fn take(&mut self, rank: Rank, visit: u64) -> Option<Visitor> {
        let is_same = self.connecting.get(&rank).is_some_and(|visitor| visitor.visit == visit);
        if is_same { self.connecting.remove(&rank) } else { None }
    }

    fn tell_all(&self, news: &News) {
        if let Ok(frame) = wire::encode(news) {
            let frame = Arc::new(frame);
            for visitor in self.connecting.values().chain(&self.awaiting) {
                let _ = visitor.outbox.send(frame.clone());
            }
        }
    }
}
