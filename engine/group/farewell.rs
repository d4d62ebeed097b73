//! A rank that gives up connecting tells the others, which would otherwise wait for it until their deadlines.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connect::{self, Failed, Pair, Pairing};
use super::control::goodbye;
use super::handshake::Purpose;
use super::message::{CommId, Message};
use super::wire;
use crate::error::Error;

/// How long telling all of them may take.
const FAREWELL: Duration = Duration::from_secs(2);
/// After how long a rank that had no descriptor left for telling another one tries again.
const AGAIN: Duration = Duration::from_millis(20);

/// Tells every other rank at its listener. Ranks that are a pair with this one may have joined already, and then do not take such news any more: they
/// are told over the pair's connection, by an abort of the world's communicator.
pub(super) async fn tell(pairing: &Arc<Pairing>, pairs: Vec<Pair>, failed: &Failed, cause: Error) {
    let mut telling = JoinSet::new();
    let mut last = wire::encode(&Message::Abort { comm: CommId::WORLD, cause }).unwrap_or_default();
    // After a goodbye this rank counts as one that has left, not as one that has died.
    last.extend_from_slice(&goodbye(None));
    let last = Arc::new(last);
    for mut pair in pairs {
        let last = last.clone();
        telling.spawn(async move {
            let _ = pair.stream.write_all(&last).await;
            let _ = pair.stream.shutdown().await;
        });
    }
    let own = pairing.rank;
    for to in (0..pairing.table.members.len()).filter(|rank| *rank != own) {
        let (world, first, why) = (pairing.table.world, failed.first, failed.why.clone());
        let purpose = Purpose::GaveUp { world, from: own, to, first, why };
        let pairing = pairing.clone();
        telling.spawn(async move {
            let until = Instant::now() + FAREWELL;
            let addresses = &pairing.table.members[to].addresses;
            while Instant::now() < until {
                match connect::dial(addresses, &pairing.token, &purpose, until).await {
                    Err(unreached) if unreached.is_limit => tokio::time::sleep(AGAIN).await,
                    _ => return,
                }
            }
        });
    }
    let all = async { while telling.join_next().await.is_some() {} };
    if timeout(FAREWELL, all).await.is_err() {
        tracing::debug!(rank = own, "some ranks could not be told within {FAREWELL:?} that this one gave up");
    }
}
