//! What is looked at now and then while operations wait: whether an operation has taken longer than it may, whether it does not move
//! and peers are to be asked why, and whether a peer that it waits for has left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Endpoint;
use super::copy_backs::CopyBack;
use super::progress::Run;
use crate::error::{Error, Lost, Missing, MissingState, Operation};
use crate::exec::p2p::{Direction, Overdue};
use crate::types::Signature;

/// When a collective has taken this long, or a quarter of its time limit if that is less, this rank asks its peers whether they called the same.
/// When a message has been awaited for so long, this rank tells the rank that has to send it.
const STALL: Duration = Duration::from_millis(100);
/// How long after that it asks again about the same collective.
const STALL_AGAIN: Duration = Duration::from_millis(400);

impl Run {
    /// Looks at all that can be overdue, and ends the communicator if anything is. Also asks peers about what does not move.
    pub(super) fn check_deadlines(&mut self, of: &Arc<Endpoint>, now: Instant) {
        self.ask_about_breaks(of);
        let overdue = self.failed_before_its_turn(of);
        let overdue = overdue.or_else(|| self.endings.overdue(&self.clock, now, &of.config));
        let overdue = overdue.or_else(|| self.overdue_collective(of, now));
        if let Some(error) = overdue.or_else(|| self.overdue_message(of, now)) {
            of.fail(error);
        }
        self.messages.long_awaited(now, STALL, |from, number, signature| {
            of.config.control.awaits(of, from, number, signature);
        });
        self.end_overdue_copy_backs(of, now);
    }

    /// What has failed on this rank's device while the collective waits for inputs, this rank's or those of other processes. Such a collective is not
    /// yet in [`Endings`](super::ending::Endings), which would have the driver asked, so this function has the driver asked.
    fn failed_before_its_turn(&mut self, of: &Arc<Endpoint>) -> Option<Error> {
        let carrier = self.active.carrier()?.clone();
        if !carrier.lacks_inputs() && carrier.unready().is_empty() {
            return None;
        }
        let on_stream = carrier.on_stream()?;
        if !std::mem::replace(&mut self.active.is_watched, true) {
            on_stream.tell(Box::new(of.waker_of_progress()));
        }
        on_stream.is_over().err()
    }

    /// The error if the collective in work is overdue, or waits for a rank that has left. If the collective is not overdue but has taken a while
    /// ([`STALL`]), peers are asked what they have called.
    fn overdue_collective(&mut self, of: &Endpoint, now: Instant) -> Option<Error> {
        if self.active.carrier().is_some_and(|carrier| carrier.lacks_inputs()) {
            self.active.count_from(now);
        }
        let (number, signature, timeout) = self.active.current()?;
        let started = self.active.started(|| now)?;
        // For a collective that a library takes whole, the ranks meet only when all that was put on streams before it has ended: as long as
        // any of that is left, this one is not to blame. Any other is to blame unless one before it is about to be overdue on the device.
        let is_oldest = match self.active.carrier().is_some_and(|carrier| carrier.meets_last()) {
            true => self.endings.is_empty(),
            false => !self.endings.is_soon_overdue(&self.clock, now),
        };
        if self.clock.is_overdue(now, started, timeout) && is_oldest {
            return Some(if self.active.lacks_memory() {
                of.config.not_come(number, signature, timeout)
            } else {
                self.timed_out(of, number, signature, timeout, now)
            });
        }
        let is_due = self.active.stalled_at.is_none_or(|at| now - at > STALL_AGAIN);
        if now - started <= STALL.min(timeout / 4) || !is_due {
            return None;
        }
        let mut waiting = self.waiting_for();
        if of.peers.first_left(&waiting, now).is_some() {
            // The rank that left may have sent and released, before it left, all that this rank waits for.
            self.reap();
            waiting = self.waiting_for();
        }
        let left = of.peers.first_left(&waiting, now);
        if matches!(left, Some((_, false))) {
            return None;
        }
        self.active.stalled_at = Some(now);
        of.recorder.waiting(number, &waiting);
        if let Some((rank, _)) = left {
            let lost = Error::lost(rank, Lost::Left);
            return Some(match self.active.operation(&of.config.name) {
                Some(operation) => lost.during(operation),
                None => lost,
            });
        }
        of.config.control.stalled(of, number, signature);
        None
    }

    /// The error for a message that is overdue, or whose peer has left, if there is one.
    fn overdue_message(&self, of: &Endpoint, now: Instant) -> Option<Error> {
        let overdue = of.peers.with_left(now, |has_left| self.messages.overdue(now, &self.clock, has_left));
        let (message, why) = overdue?;
        let (number, signature) = (message.number, message.signature);
        let operation = Operation { comm: of.config.name.clone(), number, signature };
        let us = of.config.rank;
        let (rank, state) = match why {
            Overdue::Left => {
                let lost = Error::lost(message.peer, Lost::Left).during(operation);
                let unreceived = match message.direction {
                    Direction::Recv => self.messages.pending(message.peer),
                    Direction::Send => Vec::new(),
                };
                return Some(lost.for_message((us, message.direction.name()), unreceived));
            }
            Overdue::LacksMemory => return Some(of.config.not_come(number, signature, message.timeout)),
            Overdue::HeldUp(state) => (us, state),
            Overdue::Unmatched => {
                let direction = message.direction.other().name().to_owned();
                let pending = self.messages.pending(message.peer);
                let awaited = of.submitted.not_sent(message.peer, of.peers.awaited_by(message.peer));
                (message.peer, MissingState::NotMatched { direction, tag: message.tag, pending, awaited })
            }
        };
        let missing = vec![Missing { rank, state }];
        Some(Error::timeout(operation, us, message.timeout, missing))
    }

    /// The error for the collective in work, which is overdue.
    fn timed_out(
        &mut self,
        of: &Endpoint,
        number: u64,
        signature: Signature,
        after: Duration,
        now: Instant,
    ) -> Error {
        let us = of.config.rank;
        let waiting = self.waiting_for();
        // What holds the operation up on this rank is named only if all ranks have called the operation.
        let held_up = self.active.carrier().and_then(|carrier| carrier.held_up());
        let unready = self.active.carrier().map(|carrier| carrier.unready()).unwrap_or_default();
        let mut missing = of.peers.missing(number, us, &waiting, now);
        let late = missing.iter_mut().filter(|missing| unready.contains(&missing.rank));
        late.for_each(|missing| missing.state = MissingState::NotReady);
        if missing.iter().all(|m| m.state == MissingState::Waiting) {
            missing.extend(held_up.map(|state| Missing { rank: us, state }));
        }
        let operation = Operation { comm: of.config.name.clone(), number, signature };
        Error::timeout(operation, us, after, missing)
    }

    /// Ends operations whose results the device has not copied back within their time limit.
    pub(super) fn end_overdue_copy_backs(&self, of: &Arc<Endpoint>, now: Instant) {
        for CopyBack { key, number, signature, timeout, carrier } in of.copy_backs.overdue(now, &self.clock) {
            let Some(is_starting) = of.copy_backs.give_up(key) else { continue };
            let error = of.config.not_come(number, signature, timeout);
            of.fail(error.clone());
            // A copy may be under way, or be put on a stream at any time, and nothing else waits for it: so the buffers are never dropped.
            if is_starting || carrier.is_settling() {
                std::mem::forget(of.submitted.borrow(key));
            }
            of.finish(key, Err(error));
            of.commands.put_drop(carrier);
        }
    }
}
