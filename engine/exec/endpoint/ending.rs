//! Collectives that are on their stream, and not over on the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Endpoint;
use super::progress::Run;
use crate::device::operation::DeviceOp;
use crate::error::{Error, Missing, MissingState, Operation};
use crate::exec::deadlines::{DeadlineClock, grace};
use crate::exec::inflight::Key;
use crate::trace::State;
use crate::types::Signature;

/// Who drives looks himself for this long whether a device is done; then the device's driver is asked to tell. A small
/// collective takes a device about as long. To be measured.
const LOOK: Duration = Duration::from_micros(20);

/// Collectives that may be on the stream at a time.
const MOST: usize = 1024;

/// Such a collective.
pub(super) struct Ending {
    pub(super) key: Key,
    pub(super) number: u64,
    pub(super) device: Arc<DeviceOp>,
    signature: Signature,
    timeout: Duration,
    begun: Instant,
    /// Since when it is the oldest with its inputs there.
    ready: Option<Instant>,
    is_watched: bool,
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
    fn next(&mut self) -> Result<Option<Ending>, Error> {
        let over = self.0.front().map_or(Ok(false), |first| first.device.is_over())?;
        Ok(if over { self.0.pop_front() } else { None })
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Ending> {
        std::mem::take(&mut self.0).into_iter()
    }
}

impl Endpoint {
    /// All of the active collective is on its stream.
    pub(super) fn enqueued(run: &mut Run, key: Key, begun: Instant) {
        let Some((number, signature, timeout, _)) = run.active.current() else { return };
        let Some(device) = run.active.device().cloned() else { return };
        run.active.take();
        let (ready, is_watched) = (None, false);
        let ending = Ending { key, number, device, signature, timeout, begun, ready, is_watched };
        run.endings.0.push_back(ending);
    }

    /// Finishes what is over. Whether anything was.
    pub(super) fn end_some(&self, run: &mut Run) -> Result<bool, Error> {
        let mut any = false;
        while let Some(ending) = run.endings.next()? {
            self.recorder.finished(ending.number, State::Done);
            self.finish(ending.key, Ok(()));
            any = true;
        }
        Ok(any)
    }

    /// The thread is about to leave: the driver is to tell when the device is done.
    pub(super) fn watch_endings(self: &Arc<Self>, run: &mut Run) {
        for ending in run.endings.0.iter_mut().filter(|ending| !ending.is_watched) {
            if self.now() - ending.begun < LOOK {
                return;
            }
            ending.is_watched = true;
            let endpoint = Arc::downgrade(self);
            ending.device.watch(move || {
                if let Some(endpoint) = endpoint.upgrade() {
                    endpoint.drive_once();
                    endpoint.leave_to_progress_thread();
                }
            });
        }
    }

    /// Whether the device takes longer than the oldest collective may.
    pub(super) fn overdue_ending(&self, run: &mut Run, now: Instant) -> Option<Error> {
        let Run { endings, clock, .. } = run;
        let first = endings.0.front_mut()?;
        if first.ready.is_none() && first.device.has_inputs() {
            first.ready = Some(now);
        }
        if !clock.is_overdue(now, first.ready?, first.timeout) {
            return None;
        }
        let late = first.device.late().into_iter();
        let mut missing: Vec<_> = late.map(|rank| Missing { rank, state: MissingState::NotReady }).collect();
        if let Some(by) = first.device.taken_by().filter(|_| missing.is_empty()) {
            let state = MissingState::NotEnded { by: by.name().to_owned() };
            missing.push(Missing { rank: self.config.rank, state });
        }
        let operation =
            Operation { comm: self.config.name.clone(), number: first.number, signature: first.signature };
        Some(Error::timeout(operation, self.config.rank, first.timeout, missing))
    }
}
