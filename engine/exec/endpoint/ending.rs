//! Collectives that are on their stream, and not over on the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::EndpointConfig;
use crate::error::{Error, Operation};
use crate::exec::carrier::{Carrier, OnStream};
use crate::exec::deadlines::{DeadlineClock, grace};
use crate::exec::inflight::Key;
use crate::types::Signature;

/// The progress thread looks again after this long whether a device is done with the oldest: after the time that it has been the oldest for, divided by
/// [`PART`], within these limits. So an end is noticed late by a thousandth of what it took at most, and by twenty microseconds of what was short.
const SOONEST: Duration = Duration::from_micros(20);
const LATEST: Duration = Duration::from_micros(500);
const PART: u32 = 1024;
/// A device that takes longer than this for the oldest is asked now and then whether it has failed.
const LONG: Duration = Duration::from_millis(5);

/// Collectives that may be on the stream at a time.
const MOST: usize = 1024;

/// Such a collective.
pub(super) struct Ending {
    pub(super) key: Key,
    pub(super) number: u64,
    pub(super) carrier: Arc<dyn Carrier>,
    signature: Signature,
    timeout: Duration,
    /// Since when it is the oldest, as far as somebody has looked.
    oldest: Option<Instant>,
    /// Since when it is the oldest with its inputs there.
    ready: Option<Instant>,
    /// Since when it is the oldest, while the driver does not take it.
    untaken: Option<Instant>,
    is_watched: bool,
}

impl Ending {
    /// One of which all is on its stream now, when nobody has looked yet whether its inputs are there.
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

/// Those of a communicator, oldest first: they end in this order.
#[derive(Default)]
pub(super) struct Endings(VecDeque<Ending>);

impl Endings {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether so many are on the stream that the next is to wait: a device's queue has an end, at which a launch blocks.
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    /// Whether the oldest is overdue within the time by which two deadlines may be noticed in the other order than they passed: a
    /// collective on its stream is only found to be ready when somebody looks.
    pub(super) fn is_soon_overdue(&self, clock: &DeadlineClock, now: Instant) -> bool {
        let first = self.0.front().and_then(|first| Some((first.ready?, first.timeout)));
        first.is_some_and(|(ready, timeout)| clock.is_overdue(now + grace(timeout), ready, timeout))
    }

    /// The next that is over.
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

    /// From here on this collective, all of which is on its stream, is the last of them.
    pub(super) fn push(&mut self, ending: Ending) {
        self.0.push_back(ending);
    }

    /// How soon to look again whether the oldest is over; `None`: there is none.
    pub(super) fn look_again(&mut self, now: Instant) -> Option<Duration> {
        let first = self.0.front_mut()?;
        let oldest = *first.oldest.get_or_insert(now);
        Some((now.saturating_duration_since(oldest) / PART).clamp(SOONEST, LATEST))
    }

    /// If the oldest has taken long, and nobody watches it yet: has the driver asked now and then whether the device has failed, and
    /// what `tell` makes called if so.
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

    /// Whether the device takes longer than the oldest collective may.
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
