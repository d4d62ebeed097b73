//! How far the clocks of hosts are apart, so that times in flight recorders of several hosts can be compared. Each rank that is on
//! another host than rank 0 asks rank 0 for the time. Rank 0 reads its clock at some moment between the departure of the question
//! and the arrival of the answer. The asking rank takes the middle of that span for the moment, so the error is at most half the span.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::World;
use crate::group::message::Message;
use crate::trace::{ClockDifference, unix_us};
use crate::types::Rank;

/// How many questions a rank sends in a row. The answer that comes fastest has the smallest error, so it counts.
const QUESTIONS: usize = 5;
/// The time from one question of a row to the next.
const PAUSE: Duration = Duration::from_millis(20);
/// The pause between two rows. Clocks drift, so one row is not enough.
const AGAIN: Duration = Duration::from_secs(60);
/// The error of a known difference counts as a microsecond larger for each `DRIFT_US` microseconds of its age.
const DRIFT_US: f64 = 1e5;

impl World {
    /// If rank 0 is on another host, asks it for the time again and again, until the world is dropped.
    pub(in crate::comm) fn compare_clocks(self: &Arc<Self>) {
        if self.hosts.of_ranks.first() == self.hosts.of_ranks.get(self.rank) {
            return;
        }
        let (world, runtime): (Weak<World>, _) = (Arc::downgrade(self), self.runtime.clone());
        let asks = async move {
            loop {
                for _ in 0..QUESTIONS {
                    let Some(world) = world.upgrade() else { return };
                    world.send(0, Message::Clock { asked_us: unix_us(), at_us: None });
                    drop(world);
                    runtime.sleep(PAUSE).await;
                }
                runtime.sleep(AGAIN).await;
            }
        };
        if let Err(error) = self.runtime.spawn(Box::pin(asks)) {
            tracing::warn!(%error, "clocks of hosts are not compared");
        }
    }

    /// Answers `from`, which asks for the time (`at_us` is `None`), or notes rank 0's answer if it is better than the known one.
    pub(super) fn clock_told(&self, from: Rank, asked_us: f64, at_us: Option<f64>) {
        let now = unix_us();
        let Some(at) = at_us else {
            return self.send(from, Message::Clock { asked_us, at_us: Some(now) });
        };
        let error_us = (now - asked_us) / 2.0;
        if from != 0 || !(0.0..1e9).contains(&error_us) {
            return;
        }
        let new = ClockDifference { offset_us: at - (asked_us + error_us), error_us, found_us: now };
        let mut clock = self.records.clock.lock();
        let is_better = |old: &ClockDifference| error_us <= old.error_us + (now - old.found_us) / DRIFT_US;
        if clock.as_ref().is_none_or(is_better) {
            *clock = Some(new);
        }
    }
}
