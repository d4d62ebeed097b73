//! What is looked at now and then while operations wait: whether one has taken longer than it may, whether one does not move
//! and peers are to be asked why, and whether a peer that one waits for has left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Endpoint;
use super::run::Run;
use crate::error::{Error, Lost, Missing, MissingState, Operation};
use crate::exec::p2p::{Direction, Overdue};
use crate::types::{Rank, Signature};

/// An operation that has not moved for this long asks its peers whether they called the same.
const STALL: Duration = Duration::from_millis(100);
/// How often it asks again.
const STALL_AGAIN: Duration = Duration::from_millis(400);

impl Endpoint {
    /// Ends the communicator if anything is overdue.
    pub(super) fn check_deadlines(self: &Arc<Self>, run: &mut Run, now: Instant) {
        self.ask_about_breaks(run);
        let overdue = run.endings.overdue(&run.clock, now, &self.config);
        let overdue = overdue.or_else(|| self.overdue_collective(run, now));
        if let Some(error) = overdue.or_else(|| self.overdue_message(run, now)) {
            self.fail(error);
        }
        run.messages.long_awaited(now, STALL, |from, number, signature| {
            self.config.control.awaits(self, from, number, signature);
        });
        self.end_overdue_copy_backs(run, now);
    }

    /// Whether the collective in work is overdue, or waits for a rank that has left. If it only does not move, peers are asked
    /// what they have called.
    fn overdue_collective(&self, run: &mut Run, now: Instant) -> Option<Error> {
        let (number, signature, timeout, started) = run.active.current()?;
        // What a library takes whole meets behind what it has not ended on another rank: then that is the oldest. Any other
        // collective that waits behind one that hangs on the device began later than that one, which is to be named.
        let is_oldest = match run.active.carrier().is_some_and(|carrier| carrier.meets_last()) {
            true => run.endings.is_empty(),
            false => !run.endings.is_soon_overdue(&run.clock, now),
        };
        if run.clock.is_overdue(now, started, timeout) && is_oldest {
            return Some(if run.active.lacks_memory() {
                self.config.not_come(number, signature, timeout)
            } else {
                let waiting = run.waiting_for();
                let held_up = run.active.carrier().and_then(|carrier| carrier.held_up());
                self.timed_out((number, signature, timeout), &waiting, held_up, now)
            });
        }
        let is_due = run.active.stalled_at.is_none_or(|at| now - at > STALL_AGAIN);
        if now - started <= STALL.min(timeout / 4) || !is_due {
            return None;
        }
        run.active.stalled_at = Some(now);
        let mut waiting = run.waiting_for();
        if self.peers.first_left(&waiting).is_some() {
            // It may have done all that was asked of it before.
            run.reap();
            waiting = run.waiting_for();
        }
        self.recorder.waiting(number, &waiting);
        if let Some(rank) = self.peers.first_left(&waiting) {
            let lost = Error::lost(rank, Lost::Left);
            return Some(match run.active.operation(&self.config.name) {
                Some(operation) => lost.during(operation),
                None => lost,
            });
        }
        self.config.control.stalled(self, number, signature);
        None
    }

    /// A message that is overdue, or whose peer has left.
    fn overdue_message(&self, run: &Run, now: Instant) -> Option<Error> {
        let overdue = self.peers.with_left(|has_left| run.messages.overdue(now, &run.clock, has_left));
        let (message, why) = overdue?;
        let (number, signature) = (message.number, message.signature);
        let operation = Operation { comm: self.config.name.clone(), number, signature };
        let us = self.config.rank;
        let (rank, state) = match why {
            Overdue::Left => {
                let lost = Error::lost(message.peer, Lost::Left).during(operation);
                let unreceived = match message.direction {
                    Direction::Recv => run.messages.pending(message.peer),
                    Direction::Send => Vec::new(),
                };
                return Some(lost.for_message((us, message.direction.name()), unreceived));
            }
            Overdue::LacksMemory => return Some(self.config.not_come(number, signature, message.timeout)),
            Overdue::HeldUp(state) => (us, state),
            Overdue::Unmatched => {
                let direction = message.direction.other().name().to_owned();
                let pending = run.messages.pending(message.peer);
                let awaited = self.submitted.not_sent(message.peer, self.peers.awaited_by(message.peer));
                (message.peer, MissingState::NotMatched { direction, tag: message.tag, pending, awaited })
            }
        };
        let missing = vec![Missing { rank, state }];
        Some(Error::timeout(operation, us, message.timeout, missing))
    }

    /// `held_up`: what keeps the operation from its end if all have called it.
    fn timed_out(
        &self,
        (number, signature, after): (u64, Signature, Duration),
        waiting: &[Rank],
        held_up: Option<MissingState>,
        now: Instant,
    ) -> Error {
        let us = self.config.rank;
        let mut missing = self.peers.missing(number, us, waiting, now);
        if missing.iter().all(|m| m.state == MissingState::Waiting) {
            missing.extend(held_up.map(|state| Missing { rank: us, state }));
        }
        let operation = Operation { comm: self.config.name.clone(), number, signature };
        Error::timeout(operation, us, after, missing)
    }
}
