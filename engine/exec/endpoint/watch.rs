//! What an endpoint knows of its peers beside the data: what they called, whether they are alive, whether they left; and
//! the deadlines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{COMPARED, Endpoint, Run};
use crate::error::{Error, Lost, Missing, MissingState, Operation};
use crate::exec::deadlines::grace;
use crate::types::{Rank, Signature};

/// Looked at no more often than this, a process may have been stopped, or its machine suspended.
const STILL: Duration = Duration::from_millis(500);

impl Run {
    /// Notes that the process is not standing still.
    pub(super) fn look(&mut self, now: Instant) {
        if now - self.checked > STILL {
            self.awake = now;
        }
        self.checked = now;
    }

    /// Looks at what peers have given back.
    fn reap(&mut self) {
        let Run { active, port, devices, .. } = self;
        for port in std::iter::once(port).chain(devices) {
            // What is wrong with a link is told by the next pass.
            let _ = port.reap(|lent| active.freed(&lent));
        }
    }
}

/// An operation that has not moved for this long asks its peers whether they called the same.
const STALL: Duration = Duration::from_millis(100);
/// How often it asks again.
const STALL_AGAIN: Duration = Duration::from_millis(400);
/// An answer older than this does not count as a sign of life.
const ANSWER: Duration = Duration::from_millis(1200);

impl Endpoint {
    /// A peer closes this communicator.
    pub(crate) fn peer_closing(&self, peer: Rank, calls: u64) {
        if let Some(slot) = self.closing.lock().get_mut(peer) {
            *slot = Some(calls);
        }
    }

    /// Whether every peer has closed or left.
    pub(crate) fn all_closing(&self) -> bool {
        let (closing, left) = (self.closing.lock(), self.left.lock());
        (0..self.size()).all(|r| r == self.config.rank || closing[r].is_some() || left[r])
    }

    /// What no rank noticed while it ran: a frame that nobody here asked for, or a rank that called more or less.
    pub(crate) fn leftover(&self) -> Option<Error> {
        let found = {
            let mut run = self.run.lock();
            run.port.leftover().or_else(|| run.devices.as_mut()?.leftover())
        };
        let (calls, rank) = (self.table.lock().next, self.config.rank);
        if let Some((peer, header)) = found {
            return match self.called(header.op) {
                Some(ours) if ours != header.signature => {
                    Some(self.mismatch(header.op, ours, peer, header.signature))
                }
                Some(_) => None,
                None => Some(Error::invalid(
                    "close",
                    format!(
                        "rank {peer} called {} as operation #{}, which rank {rank} never called (it made {calls} \
                         collective calls); every rank must make the same calls",
                        header.signature, header.op
                    ),
                )),
            };
        }
        let closing = self.closing.lock();
        let other =
            closing.iter().enumerate().find_map(|(peer, c)| c.filter(|c| *c != calls).map(|c| (peer, c)));
        other.map(|(peer, theirs)| {
            Error::invalid(
                "close",
                format!(
                    "rank {peer} made {theirs} collective calls on this communicator, rank {rank} made {calls}; every \
                     rank must make the same calls"
                ),
            )
        })
    }

    /// The last few collectives that were called, oldest first.
    pub(crate) fn last_calls(&self) -> Vec<(u64, Signature)> {
        let table = self.table.lock();
        let first = table.next - table.history.len() as u64;
        let all = (first..).zip(table.history.iter().copied());
        all.skip(table.history.len().saturating_sub(COMPARED)).collect()
    }

    fn called(&self, number: u64) -> Option<Signature> {
        self.table.lock().called(number)
    }

    /// A peer waits in operation `number`: answers with our last call, or fails on a disagreement.
    pub(crate) fn asked(self: &Arc<Self>, peer: Rank, number: u64, theirs: Signature) -> Option<u64> {
        let (ours, next) = {
            let mut table = self.table.lock();
            // Under one lock: a call in between would neither see the question nor be seen by it.
            let ours = table.called(number);
            if ours.is_none() && number >= table.next {
                table.asked.keep(peer, number, theirs);
            }
            (ours, table.next)
        };
        if let Some(ours) = ours.filter(|ours| *ours != theirs) {
            self.fail(self.mismatch(number, ours, peer, theirs));
        }
        next.checked_sub(1)
    }

    /// A peer's answer.
    pub(crate) fn heard(&self, peer: Rank, number: u64, last: Option<u64>) {
        if let Some(slot) = self.heard.lock().get_mut(peer) {
            *slot = Some((number, last, Instant::now()));
        }
    }

    /// A peer said goodbye in peace.
    pub(crate) fn peer_left(&self, peer: Rank) {
        if let Some(left) = self.left.lock().get_mut(peer) {
            *left = true;
        }
        self.config.lane.kick();
    }

    #[cfg(test)]
    pub(crate) fn who_left(&self) -> Vec<bool> {
        self.left.lock().clone()
    }

    pub(super) fn check_time(self: &Arc<Self>, run: &mut Run, now: Instant) {
        self.ask_about_breaks(run);
        let mut error = None;
        if let Some((number, signature, timeout, started)) = run.active.current() {
            let elapsed = now - started;
            let stalled = run.active.stalled_at;
            let due = stalled.is_none_or(|at| now - at > STALL_AGAIN);
            // What a library takes whole meets behind what it has not ended on another rank: then that is the oldest.
            let is_oldest = !run.active.is_whole() || run.endings.is_empty();
            if elapsed > timeout && now - run.awake > grace(timeout) && is_oldest {
                error = Some(if run.active.lacks_memory() {
                    self.not_come(number, signature, timeout)
                } else {
                    self.timed_out(number, signature, timeout, &run.waiting_for(), run.active.held_up())
                });
            } else if elapsed > STALL.min(timeout / 4) && due {
                run.active.stalled_at = Some(now);
                let mut waiting = run.waiting_for();
                let gone = |waiting: &[Rank]| {
                    let left = self.left.lock();
                    waiting.iter().copied().find(|w| left[*w])
                };
                if gone(&waiting).is_some() {
                    // It may have done all that was asked of it before.
                    run.reap();
                    waiting = run.waiting_for();
                }
                self.recorder.waiting(number, &waiting);
                let gone = gone(&waiting);
                match gone {
                    Some(rank) => {
                        let operation = run.active.operation(&self.config.name);
                        error = Some(Error::PeerLost { rank, how: Lost::Left, operation });
                    }
                    None => self.config.control.stalled(self, number, signature),
                }
            }
        }
        error = error.or_else(|| self.overdue_ending(run, now));
        if error.is_none() {
            let left = self.left.lock();
            error = run.messages.overdue((now, run.awake), &left).map(|(message, gone, lacks)| {
                let (number, signature) = (message.number, message.signature);
                let operation = Operation { comm: self.config.name.clone(), number, signature };
                if lacks && !gone {
                    return self.not_come(number, signature, message.timeout);
                }
                if gone {
                    return Error::PeerLost {
                        rank: message.peer,
                        how: Lost::Left,
                        operation: Some(operation),
                    };
                }
                let state =
                    MissingState::NotMatched { direction: message.direction.other().name().to_owned() };
                Error::Timeout {
                    operation,
                    rank: self.config.rank,
                    after: message.timeout,
                    missing: vec![Missing { rank: message.peer, state }],
                }
            });
        }
        if let Some(error) = error {
            self.fail(error);
        }
        self.end_overdue_backing((now, run.awake));
    }

    /// `held_up`: what keeps the operation from its end if all have called it.
    fn timed_out(
        &self,
        number: u64,
        signature: Signature,
        after: Duration,
        waiting: &[Rank],
        held_up: Option<MissingState>,
    ) -> Error {
        let heard = self.heard.lock();
        let state = |rank: Rank| match heard[rank] {
            Some((about, last, at)) if about == number && at.elapsed() < ANSWER => {
                if last.is_some_and(|l| l >= number) {
                    MissingState::Waiting
                } else {
                    MissingState::NotCalled(last)
                }
            }
            _ => MissingState::NoAnswer,
        };
        let others = (0..self.size()).filter(|r| *r != self.config.rank);
        let mut missing: Vec<_> = others.map(|rank| Missing { rank, state: state(rank) }).collect();
        if missing.iter().any(|m| m.state != MissingState::Waiting) {
            missing.retain(|m| m.state != MissingState::Waiting);
        } else {
            missing.retain(|m| waiting.contains(&m.rank));
            missing.extend(held_up.map(|state| Missing { rank: self.config.rank, state }));
        }
        let operation = Operation { comm: self.config.name.clone(), number, signature };
        Error::Timeout { operation, rank: self.config.rank, after, missing }
    }
}
