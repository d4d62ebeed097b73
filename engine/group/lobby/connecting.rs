//! Rank 0's view of the others from the table on, until each of them is connected to all. One that dies meanwhile may be awaited by others that
//! have no connection to it yet: rank 0, to which it has one since it registered, tells them.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::super::registration::News;
use super::super::wire;
use super::{Event, Visitor};
use crate::types::Rank;

/// The ranks that are still connecting, as far as rank 0 knows.
pub(in crate::group) struct Visitors {
    pub(super) connecting: BTreeMap<Rank, Visitor>,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    pub(super) tell: mpsc::UnboundedSender<Event>,
    pub(super) _watchers: JoinSet<()>,
    pub(super) _writers: JoinSet<()>,
}

impl Visitors {
    /// Where rank 0 says that it is connected to all others itself.
    pub(in crate::group) fn tell(&self) -> mpsc::UnboundedSender<Event> {
        self.tell.clone()
    }

    /// Tells those that are connecting, rank 0 by `gave_up`, of each that goes away before it is connected to all. Ends when none is left.
    pub(in crate::group) async fn watch(mut self, gave_up: mpsc::UnboundedSender<(Rank, String)>) {
        while !self.connecting.is_empty() {
            match self.events.recv().await {
                Some(Event::Connected { rank: 0, .. }) => self.tell_all(&News::Connected),
                Some(Event::Connected { rank, visit }) => drop(self.take(rank, visit)),
                Some(Event::Left { rank, visit }) => {
                    let Some(visitor) = self.take(rank, visit) else { continue };
                    let why = format!("it ended, or its connection to rank 0 did ({})", visitor.who);
                    tracing::warn!(rank, "rank {rank} gave up connecting to the others: {why}");
                    self.tell_all(&News::Left { rank, why: why.clone() });
                    let _ = gave_up.send((rank, why));
                }
                // Nobody can register any more.
                Some(Event::Came { .. } | Event::TurnedAway { .. } | Event::Hopeless(_)) => {}
                None => return,
            }
        }
    }

    fn take(&mut self, rank: Rank, visit: u64) -> Option<Visitor> {
        let is_same = self.connecting.get(&rank).is_some_and(|visitor| visitor.visit == visit);
        if is_same { self.connecting.remove(&rank) } else { None }
    }

    fn tell_all(&self, news: &News) {
        if let Ok(frame) = wire::encode(news) {
            let frame = Arc::new(frame);
            for visitor in self.connecting.values() {
                let _ = visitor.outbox.send(frame.clone());
            }
        }
    }
}
