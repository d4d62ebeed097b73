//! What the other ranks have told over the control connections: what they called last, that they close, that they left.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Endpoint;
use crate::error::{Error, Missing, MissingState, unreceived};
use crate::types::{Rank, Signature};

/// An answer older than this does not count as a sign of life.
const ANSWER: Duration = Duration::from_millis(1200);

/// How long to wait for the rank's memory lock: a pass of another communicator, which may hold it, is over sooner.
const LOCK: Duration = Duration::from_millis(100);

/// What a rank has sent before it left may come after its goodbye, as the goodbye takes a connection of its own. After so long all has come.
const UNDER_WAY: Duration = Duration::from_millis(200);

/// How many of the messages that one rank waits for are remembered.
const TOLD: usize = 8;

/// What one other rank has told.
#[derive(Clone, Default)]
struct Peer {
    /// Its answer to the last question about an operation that does not move.
    answer: Option<Answer>,
    /// When it said that it has left the world, in peace.
    left: Option<Instant>,
    /// It closes the communicator, on which it has called so many collectives.
    closes_after: Option<u64>,
    /// The last messages from this rank for which it said that it waits: their numbers and signatures.
    awaits: VecDeque<(u64, Signature)>,
}

impl Peer {
    /// Whether it has left longer than [`UNDER_WAY`] ago; `None`: it has not left.
    fn is_long_gone(&self, now: Instant) -> Option<bool> {
        self.left.map(|left| now.saturating_duration_since(left) > UNDER_WAY)
    }
}

#[derive(Clone)]
struct Answer {
    /// The operation that it was asked about.
    about: u64,
    /// The last collective that it has called.
    last: Option<u64>,
    /// A message that it waits to receive, and from whom.
    receives: Option<(Rank, Signature)>,
    at: Instant,
}

/// What all ranks have told, by rank. The lock is taken after all others of the endpoint, and held for a moment.
pub(crate) struct Peers(Mutex<Vec<Peer>>);

impl Peers {
    pub(super) fn new(size: usize) -> Peers {
        Peers(Mutex::new(vec![Peer::default(); size]))
    }

    fn change(&self, peer: Rank, change: impl FnOnce(&mut Peer)) {
        if let Some(peer) = self.0.lock().get_mut(peer) {
            change(peer);
        }
    }

    /// A peer says what it called last, when it was asked about an operation that does not move.
    pub(crate) fn answered(
        &self,
        peer: Rank,
        about: u64,
        last: Option<u64>,
        receives: Option<(Rank, Signature)>,
        at: Instant,
    ) {
        self.change(peer, |peer| peer.answer = Some(Answer { about, last, receives, at }));
    }

    pub(super) fn left(&self, peer: Rank, now: Instant) {
        self.change(peer, |peer| peer.left = Some(now));
    }

    /// A peer closes the communicator, on which it has called so many collectives.
    pub(crate) fn closes(&self, peer: Rank, calls: u64) {
        self.change(peer, |peer| peer.closes_after = Some(calls));
    }

    /// A peer waits to receive a message from this rank.
    pub(crate) fn awaits(&self, peer: Rank, number: u64, signature: Signature) {
        self.change(peer, |peer| {
            if peer.awaits.len() == TOLD {
                peer.awaits.pop_front();
            }
            peer.awaits.push_back((number, signature));
        });
    }

    /// The messages from this rank for which a peer has said that it waits.
    pub(super) fn awaited_by(&self, peer: Rank) -> Vec<(u64, Signature)> {
        self.0.lock().get(peer).map(|peer| peer.awaits.iter().copied().collect()).unwrap_or_default()
    }

    /// The first of these ranks that has left, and whether all that it sent before has had time to come ([`UNDER_WAY`]).
    pub(super) fn first_left(&self, ranks: &[Rank], now: Instant) -> Option<(Rank, bool)> {
        let peers = self.0.lock();
        ranks.iter().find_map(|rank| Some((*rank, peers[*rank].is_long_gone(now)?)))
    }

    /// Calls `then` with a function that says whether a rank has left so long ago that all that it sent before has come, and returns the result. The
    /// lock is held meanwhile.
    pub(super) fn with_left<R>(&self, now: Instant, then: impl FnOnce(&dyn Fn(Rank) -> bool) -> R) -> R {
        let peers = self.0.lock();
        then(&|rank| peers[rank].is_long_gone(now) == Some(true))
    }

    /// For each rank, whether it has left.
    #[cfg(test)]
    pub(crate) fn all_left(&self) -> Vec<bool> {
        self.0.lock().iter().map(|peer| peer.left.is_some()).collect()
    }

    /// Whether all but rank `us` close or have left.
    pub(crate) fn all_close(&self, us: Rank) -> bool {
        let peers = self.0.lock();
        let closes =
            |(rank, peer): (Rank, &Peer)| rank == us || peer.closes_after.is_some() || peer.left.is_some();
        peers.iter().enumerate().all(closes)
    }

    /// A rank that closes after another number of collectives than `calls`, and that number.
    pub(super) fn closes_after_other(&self, calls: u64) -> Option<(Rank, u64)> {
        let peers = self.0.lock();
        let other = |(rank, peer): (Rank, &Peer)| Some((rank, peer.closes_after.filter(|n| *n != calls)?));
        peers.iter().enumerate().find_map(other)
    }

    /// Who is missing in an operation that rank `us` has given up: all ranks that did not say lately that they wait in it, too.
    /// If all others wait in it, those of them that rank `us` still waits for (`waiting`).
    pub(super) fn missing(&self, number: u64, us: Rank, waiting: &[Rank], now: Instant) -> Vec<Missing> {
        let peers = self.0.lock();
        let state = |peer: &Peer| match &peer.answer {
            Some(answer) if answer.about == number && now - answer.at < ANSWER => match answer.last {
                Some(last) if last >= number => MissingState::Waiting,
                last => match answer.receives {
                    Some((from, message)) => MissingState::Receives { last, from, message },
                    None => MissingState::NotCalled(last),
                },
            },
            _ => MissingState::NoAnswer,
        };
        let others = peers.iter().enumerate().filter(|(rank, _)| *rank != us);
        let mut missing: Vec<_> = others.map(|(rank, peer)| Missing { rank, state: state(peer) }).collect();
        if missing.iter().any(|m| m.state != MissingState::Waiting) {
            missing.retain(|m| m.state != MissingState::Waiting);
        } else {
            missing.retain(|m| waiting.contains(&m.rank));
        }
        missing
    }
}

impl Endpoint {
    /// A peer said goodbye in peace.
    pub(crate) fn peer_left(&self, peer: Rank) {
        self.peers.left(peer, self.config.now());
        self.config.runtime.kick();
    }

    /// A peer waits in collective `number`. Returns the number of this rank's last call; ends the communicator if the two ranks
    /// called different things.
    pub(crate) fn asked(self: &Arc<Self>, peer: Rank, number: u64, theirs: Signature) -> Option<u64> {
        // Under one lock: a call made in between would neither see the question nor be counted in the answer.
        let (ours, calls) = {
            let mut table = self.submitted.lock();
            (table.asked(peer, number, theirs), table.calls)
        };
        if let Some(ours) = ours {
            self.fail(self.config.mismatch(number, ours, peer, theirs));
        }
        calls.checked_sub(1)
    }

    /// For `close`, an error for what no operation has noticed: a frame that nobody here asked for, a rank that made more or fewer
    /// calls, or messages that nobody received.
    pub(crate) fn leftover(&self) -> Option<Error> {
        let (found, left) = {
            let mut run = self.run.lock();
            if self.health.first_cause().is_some() {
                // The communicator dies of something else, and nothing of the other ranks' may be read any more.
                return None;
            }
            let found = run.port.leftover().or_else(|| run.device.as_mut()?.port().leftover());
            // Peers in this process take back what they lent only while they have this lock. The closing thread may
            // hold it already: a user's function, which runs in a pass of another communicator, may call `close`.
            let memory_lock = self.config.memory_lock.try_lock_for(LOCK);
            (found, memory_lock.and_then(|_lock| run.messages.leftover()))
        };
        let (calls, members) = (self.submitted.lock().calls, self.config.named());
        let us = members.rank(self.config.rank);
        if let Some((peer, header)) = found {
            let ours = self.submitted.lock().called(header.op);
            return match ours {
                Some(ours) if ours != header.signature => {
                    Some(self.config.mismatch(header.op, ours, peer, header.signature))
                }
                Some(_) => None,
                None => Some(Error::invalid(
                    "close",
                    format!(
                        "{} called {} as operation #{}, which {us} never called (it made {calls} collective calls); every \
                         rank must make the same calls",
                        members.rank(peer),
                        header.signature,
                        header.op
                    ),
                )),
            };
        }
        if let Some((peer, theirs)) = self.peers.closes_after_other(calls) {
            let problem = format!(
                "{} made {theirs} collective calls on this communicator, {us} made {calls}; every rank must make the same \
                 calls",
                members.rank(peer)
            );
            return Some(Error::invalid("close", problem));
        }
        let (peer, messages) = left?;
        let peer = members.rank(peer);
        let problem = format!(
            "messages from {peer} were not received by {us}; {}; each send needs a recv",
            unreceived("it", &messages)
        );
        Some(Error::invalid("close", problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(peers: &Peers, waiting: &[Rank], now: Instant) -> Vec<(Rank, MissingState)> {
        peers.missing(7, 0, waiting, now).into_iter().map(|m| (m.rank, m.state)).collect()
    }

    #[test]
    fn a_timeout_names_the_ranks_that_have_not_called_and_those_that_do_not_answer() {
        let (peers, now) = (Peers::new(4), Instant::now());
        peers.answered(1, 7, Some(7), None, now);
        peers.answered(2, 7, Some(3), None, now);
        let expected = vec![(2, MissingState::NotCalled(Some(3))), (3, MissingState::NoAnswer)];
        assert_eq!(missing(&peers, &[1], now), expected);
        let later = now + 2 * ANSWER;
        let silent: Vec<_> = (1..4).map(|rank| (rank, MissingState::NoAnswer)).collect();
        assert_eq!(missing(&peers, &[1], later), silent, "old answers are no sign of life");
    }

    #[test]
    fn where_all_have_called_a_timeout_names_those_that_are_waited_for() {
        let (peers, now) = (Peers::new(3), Instant::now());
        peers.answered(1, 7, Some(7), None, now);
        peers.answered(2, 7, Some(9), None, now);
        assert_eq!(missing(&peers, &[2], now), [(2, MissingState::Waiting)]);
        peers.answered(2, 6, Some(9), None, now);
        assert_eq!(missing(&peers, &[2], now), [(2, MissingState::NoAnswer)], "about another operation");
    }

    #[test]
    fn ranks_that_close_after_different_calls_are_found_and_those_that_left_close_too() {
        let peers = Peers::new(3);
        assert!(!peers.all_close(0));
        peers.closes(1, 5);
        let now = Instant::now();
        peers.left(2, now);
        assert!(peers.all_close(0));
        assert_eq!(peers.closes_after_other(5), None);
        assert_eq!(peers.closes_after_other(4), Some((1, 5)));
        for (later, is_long_gone) in [(Duration::ZERO, false), (UNDER_WAY, false), (2 * UNDER_WAY, true)] {
            let then = now + later;
            assert_eq!(peers.first_left(&[1, 2], then), Some((2, is_long_gone)));
            assert_eq!(peers.first_left(&[1], then), None);
            assert_eq!(peers.with_left(then, |has_left| [has_left(1), has_left(2)]), [false, is_long_gone]);
        }
        assert_eq!(peers.all_left(), [false, false, true]);
        peers.left(17, now);
        assert_eq!(peers.all_left().len(), 3, "a rank that is no member changes nothing");
    }
}
