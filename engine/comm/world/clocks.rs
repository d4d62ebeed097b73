//! How clocks of hosts differ, so that times in flight recorders of several hosts can be compared: each rank of another host asks
//! rank 0 what time it is there. The answer was given between the question and its arrival, so half of that time is the error.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::World;
use crate::group::message::Message;
use crate::trace::{ClockDifference, unix_us};
use crate::types::Rank;

/// Questions in a row, of which the fastest answer counts.
const QUESTIONS: usize = 5;
/// From one question of a row to the next.
const PAUSE: Duration = Duration::from_millis(20);
/// From one row to the next: clocks drift.
const AGAIN: Duration = Duration::from_secs(60);
/// A difference that is this much older counts less than one whose error is a microsecond larger.
const DRIFT_US: f64 = 1e5;

impl World {
    /// Compares clocks from now on, if rank 0 is on another host.
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

    /// Somebody asks for the time, or has answered.
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
