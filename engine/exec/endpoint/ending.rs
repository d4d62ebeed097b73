//! Collectives that are on their stream, and that the device has not ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::EndpointConfig;
use crate::error::{Error, Operation};
use crate::exec::carrier::{Carrier, OnStream};
use crate::exec::deadlines::{DeadlineClock, grace};
use crate::exec::inflight::Key;
use crate::types::Signature;

/// When the progress thread looks again whether a device is done with the oldest collective: after the time for which that has been the oldest,
/// divided by [`PART`], within these limits. So an end is noticed late by 1/1024 of the collective's time at most, or by 20 us if that is more.
const SOONEST: Duration = Duration::from_micros(20);
const LATEST: Duration = Duration::from_micros(500);
const PART: u32 = 1024;
/// If a device takes longer than this for the oldest collective, the driver is asked now and then whether the device has failed.
const LONG: Duration = Duration::from_millis(5);

/// How many collectives may be on the stream at a time.
const MOST: usize = 1024;

/// A collective that is on its stream, and that the device has not ended.
pub(super) struct Ending {
    pub(super) key: Key,
    pub(super) number: u64,
    pub(super) carrier: Arc<dyn Carrier>,
    signature: Signature,
    timeout: Duration,
    /// When it was first seen to be the oldest.
    oldest: Option<Instant>,
    /// When it was first seen to be the oldest with its inputs there.
    ready: Option<Instant>,
    /// Since when it is seen to be the oldest while the driver has not taken its first work; `None`: the driver has, or nobody has looked yet.
    untaken: Option<Instant>,
    is_watched: bool,
}

impl Ending {
    /// A collective all of which has just been put on its stream: nobody has looked yet whether its inputs are there.
    pub(super) fn new(
        key: Key,
        number: u64,
        signature: Signature,
        timeout: Duration,
        carrier: Arc<dyn Carrier>,
    ) -> Ending {
        let (oldest, ready, untaken, is_watched) = (None, None, None, false);
        Ending { key, number, carrier, signature, timeout, oldest, ready, untaken, is_watched }
    }
}

/// All such collectives of a communicator, oldest first: they end in this order.
#[derive(Default)]
pub(super) struct Endings(VecDeque<Ending>);

impl Endings {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether so many are on the stream that the next collective has to wait: when a device's queue is full, a launch blocks.
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    /// Whether the oldest is overdue, or will be within [`grace`]. Its time limit counts from when this rank saw that its inputs were there, which
    /// may be as long as [`grace`] after they came.
    pub(super) fn is_soon_overdue(&self, clock: &DeadlineClock, now: Instant) -> bool {
        let first = self.0.front().and_then(|first| Some((first.ready?, first.timeout)));
        first.is_some_and(|(ready, timeout)| clock.is_overdue(now + grace(timeout), ready, timeout))
    }

    /// Takes out the oldest, if it is over.
    pub(super) fn next(&mut self) -> Result<Option<Ending>, Error> {
        let over = self
            .0
            .front()
            .map_or(Ok(false), |first| first.carrier.on_stream().map_or(Ok(true), OnStream::is_over))?;
        Ok(if over { self.0.pop_front() } else { None })
    }

    pub(super) fn carriers(&self) -> impl Iterator<Item = &Arc<dyn Carrier>> {
        self.0.iter().map(|ending| &ending.carrier)
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Ending> {
        std::mem::take(&mut self.0).into_iter()
    }

    /// Appends a collective, all of which is on its stream.
    pub(super) fn push(&mut self, ending: Ending) {
        self.0.push_back(ending);
    }

    /// How soon to look again whether the oldest is over; `None`: there is none.
    pub(super) fn look_again(&mut self, now: Instant) -> Option<Duration> {
        let first = self.0.front_mut()?;
        let oldest = *first.oldest.get_or_insert(now);
        Some((now.saturating_duration_since(oldest) / PART).clamp(SOONEST, LATEST))
    }

    /// If the oldest has taken long and is not watched yet, has it watched: the driver is then asked now and then whether the device has
    /// failed. When it has, the function that `tell` makes is called.
    pub(super) fn watch<T: FnOnce() + Send + 'static>(&mut self, now: Instant, tell: impl FnOnce() -> T) {
        let Some(first) = self.0.front_mut() else { return };
        let is_long = first.oldest.is_some_and(|oldest| now.saturating_duration_since(oldest) > LONG);
        if is_long
            && !std::mem::replace(&mut first.is_watched, true)
            && let Some(on_stream) = first.carrier.on_stream()
        {
            on_stream.tell(Box::new(tell()));
        }
    }

    /// The error if the oldest collective is overdue. Its time limit counts from when its inputs are there, or else while the driver has not
    /// taken its first work.
    pub(super) fn overdue(
        &mut self,
        clock: &DeadlineClock,
        now: Instant,
        config: &EndpointConfig,
    ) -> Option<Error> {
        let first = self.0.front_mut()?;
        let on_stream = first.carrier.on_stream()?;
        if first.ready.is_none() && on_stream.has_inputs() {
            first.ready = Some(now);
        }
        first.untaken = match on_stream.is_taken() {
            true => None,
            false => first.untaken.or(Some(now)),
        };
        if !clock.is_overdue(now, first.ready.or(first.untaken)?, first.timeout) {
            return None;
        }
        let missing = on_stream.late(config.rank);
        let operation =
            Operation { comm: config.name.clone(), number: first.number, signature: first.signature };
        Some(Error::timeout(operation, config.rank, first.timeout, missing))
    }
}
