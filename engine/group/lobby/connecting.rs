//! Rank 0's view of the others from the table on, until each of them is connected to all. One that dies meanwhile may be awaited by others that
//! have no connection to it yet: rank 0, to which it has one since it registered, tells them. Where hosts may talk by RDMA, rank 0 hears from each how
//! its trials went, and tells all what comes of that.

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
    /// Where rank 0 says that it is connected to all others itself.
    pub(in crate::group) fn tell(&self) -> mpsc::UnboundedSender<Event> {
        self.tell.clone()
    }

    /// Tells those that are connecting, rank 0 by `gave_up`, of each that goes away before it is connected to all. Ends when none is left.
    ///
    /// Where the ranks try RDMA (`verdict`), those that are connected wait until all are, and then are told, rank 0 by `verdict`, whether links go over
    /// it: they do if no trial has failed.
    pub(in crate::group) async fn watch(
        mut self,
        gave_up: mpsc::UnboundedSender<(Rank, String)>,
        mut verdict: Option<oneshot::Sender<Tried>>,
    ) {
        let mut is_rank_0_connected = false;
        // The failure that the lowest rank has reported, in whatever order reports come.
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
        // Waits until the writers have sent what is in the outboxes: the end of this task would end them before.
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
