//! What was submitted to an endpoint: the buffers of operations in flight, the queues, and how collectives are numbered.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use super::{COMPARED, Finished};
use crate::error::Error;
use crate::exec::carrier::{Carried, Carrier};
use crate::exec::inflight::{Inflight, Key, Look};
use crate::exec::p2p::{Direction, Message};
use crate::forked;
use crate::link::locks::{EngineGuard, EngineLock};
use crate::mem::{ErasedBufs, Event};
use crate::types::{Map, Rank, Signature, mix};

/// How many signatures are remembered, so that a peer that asks late about a collective gets an answer.
const HISTORY: usize = 256;

/// An operation that has not begun, and the event that it waits for, if any.
pub(super) type Queued<R> = (Key, R, Option<Event>);

/// The table and its lock. A thread that takes both this lock and that of [`Run`](super::Run) takes this one second.
pub(crate) struct Submitted {
    table: EngineLock<Table>,
    /// Whether the table holds operations that have not begun. Written only under the table's lock.
    any_queued: AtomicBool,
}

impl Submitted {
    pub(super) fn new() -> Submitted {
        Submitted { table: EngineLock::new(Table::new()), any_queued: AtomicBool::new(false) }
    }

    pub(super) fn lock(&self) -> EngineGuard<'_, Table> {
        self.table.lock()
    }

    /// Whether anything is queued. A relaxed load is enough: the thread that queues an operation then drives the endpoint itself, and if
    /// work is left it leaves the endpoint to the progress thread (`arm`), with a fence that makes the store visible to that thread.
    pub(super) fn any_queued(&self) -> bool {
        self.any_queued.load(Ordering::Relaxed)
    }

    /// To be called after the queues have changed, with the table still locked.
    pub(super) fn note_queued(&self, table: &Table) {
        self.any_queued.store(table.has_queued(), Ordering::Relaxed);
    }

    /// The carrier of an operation that a stream can be made to wait for. `None` for other operations, and once the operation has ended.
    pub(crate) fn carrier(&self, key: Key) -> Option<Arc<dyn Carrier>> {
        self.lock().joinable.get(&key.number()).cloned()
    }

    /// Takes the buffers of an operation that has not ended out of the table.
    pub(crate) fn borrow(&self, key: Key) -> Option<ErasedBufs> {
        self.lock().inflight.borrow(key)
    }

    /// Operations queued or running.
    pub(crate) fn running(&self) -> usize {
        self.lock().inflight.running()
    }

    /// Takes the outcome of an operation if there is one; otherwise `waker` is woken when there is.
    pub(super) fn look(&self, key: Key, waker: Option<&Waker>) -> Option<Finished> {
        let Some(waker) = waker else { return self.lock().inflight.take(key) };
        let look = self.lock().inflight.poll(key, waker);
        match look {
            Look::Finished(finished) => Some(finished),
            Look::Watched => None,
            Look::Unwatched => {
                // The waker is cloned, and the one that it replaces is dropped, outside the lock: both run somebody else's code.
                let waker = waker.clone();
                let (finished, spare) = self.lock().inflight.watch(key, waker);
                drop(spare);
                finished
            }
        }
    }

    /// The user has dropped the operation's `Work`. Its buffers are dropped now if it has finished, else when it finishes.
    pub(crate) fn detach(&self, key: Key) {
        if forked::is_forked() {
            return;
        }
        let (held, waker) = self.lock().inflight.detach(key);
        drop((held, waker));
    }

    /// Refuses submissions from now on. Returns how many collectives were called.
    pub(crate) fn close(&self) -> u64 {
        let mut table = self.lock();
        table.closed = true;
        table.calls
    }

    /// The last few collectives that were called, oldest first.
    pub(crate) fn last_calls(&self) -> Vec<(u64, Signature)> {
        self.lock().last_calls()
    }

    /// Of the messages that a peer waits to receive from this rank (`awaited`), those for which this rank has not called the send.
    pub(super) fn not_sent(&self, peer: Rank, awaited: Vec<(u64, Signature)>) -> Vec<Signature> {
        let table = self.lock();
        let is_sent = |number: u64, tag| number < table.messages_called(peer, Direction::Send, tag);
        awaited.into_iter().filter(|(n, s)| !is_sent(*n, s.root)).map(|(_, signature)| signature).collect()
    }
}

pub(super) struct Table {
    pub(super) inflight: Inflight<ErasedBufs, Box<Error>>,
    pub(super) collectives: VecDeque<Queued<Carried>>,
    pub(super) messages: VecDeque<Queued<Message>>,
    /// How many collectives were called so far. This is also the number of the next one.
    pub(super) calls: u64,
    /// Next message number by (peer, direction, tag).
    numbers: Map<(Rank, Direction, u32), u64>,
    /// The signatures of the last collectives.
    history: VecDeque<Signature>,
    /// What peers asked about operations that we have not called yet.
    pub(super) asked: Asked,
    pub(super) closed: bool,
    /// The carriers of the operations that a stream can be made to wait for, by the numbers of their keys.
    pub(super) joinable: Map<u64, Arc<dyn Carrier>>,
}

/// The number of a communicator's first collective.
fn first() -> u64 {
    #[cfg(any(test, feature = "testing"))]
    return crate::testing::faults::calls_before();
    #[cfg(not(any(test, feature = "testing")))]
    0
}

impl Table {
    fn new() -> Table {
        Table {
            inflight: Inflight::with_capacity(64),
            collectives: VecDeque::with_capacity(64),
            messages: VecDeque::with_capacity(64),
            calls: first(),
            numbers: Map::default(),
            history: VecDeque::with_capacity(HISTORY + 1),
            asked: Asked::default(),
            closed: false,
            joinable: Map::default(),
        }
    }

    pub(super) fn has_queued(&self) -> bool {
        !self.messages.is_empty() || !self.collectives.is_empty()
    }

    /// Gives the next number to a collective that is called now. If a peer has asked about this number before and had called something else, also
    /// returns that peer and the signature of its call.
    pub(super) fn number_collective(&mut self, signature: Signature) -> (u64, Option<(Rank, Signature)>) {
        let number = self.calls;
        self.calls += 1;
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(signature);
        (number, self.asked.answer(number, signature))
    }

    /// Gives the next number of its kind to a message that is called now.
    pub(super) fn number_message(&mut self, peer: Rank, direction: Direction, tag: u32) -> u64 {
        let next = self.numbers.entry((peer, direction, tag)).or_insert(0);
        std::mem::replace(next, *next + 1)
    }

    /// How many messages in this direction, with this peer and tag, were called.
    pub(super) fn messages_called(&self, peer: Rank, direction: Direction, tag: u32) -> u64 {
        self.numbers.get(&(peer, direction, tag)).copied().unwrap_or(0)
    }

    /// What this rank called as its collective with this number, if that is still remembered.
    pub(super) fn called(&self, number: u64) -> Option<Signature> {
        let first = self.calls - self.history.len() as u64;
        self.history.get(number.checked_sub(first)? as usize).copied()
    }

    /// The last few collectives that were called, oldest first.
    pub(super) fn last_calls(&self) -> Vec<(u64, Signature)> {
        let first = self.calls - self.history.len() as u64;
        let all = (first..).zip(self.history.iter().copied());
        all.skip(self.history.len().saturating_sub(COMPARED)).collect()
    }

    /// A peer waits in the collective with this number, and says what it called (`theirs`). Returns what this rank called if that differs. If
    /// this rank has not made the call yet, the two are compared when it does.
    pub(super) fn asked(&mut self, peer: Rank, number: u64, theirs: Signature) -> Option<Signature> {
        let ours = self.called(number);
        if ours.is_none() && number >= self.calls {
            self.asked.keep(peer, number, theirs);
        }
        ours.filter(|ours| *ours != theirs)
    }

    /// The number of messages that rank `us` sent minus the number that it received, each message weighted by its sender, receiver and tag.
    /// Over all members this adds up to 0 if every message was received.
    pub(super) fn balance(&self, us: Rank) -> u64 {
        let each = |(&(peer, direction, tag), &n): (&(Rank, Direction, u32), &u64)| match direction {
            Direction::Send => weight(us, peer, tag).wrapping_mul(n),
            Direction::Recv => weight(peer, us, tag).wrapping_mul(n).wrapping_neg(),
        };
        self.numbers.iter().map(each).fold(0, u64::wrapping_add)
    }
}

/// A weight for (sender, receiver, tag), odd and as good as random, so that messages of different kinds do not cancel each other out.
fn weight(from: Rank, to: Rank, tag: u32) -> u64 {
    mix(mix((from as u64) << 32 ^ to as u64, tag.into()), 0) | 1
}

/// Questions: who asks, about which operation, and what it called. Of each peer at most [`COMPARED`] are kept, those about the latest
/// operations: a peer that closes asks about so many at once.
#[derive(Default)]
pub(super) struct Asked(Vec<(Rank, u64, Signature)>);

impl Asked {
    pub(super) fn keep(&mut self, peer: Rank, number: u64, theirs: Signature) {
        self.0.retain(|(p, n, _)| (*p, *n) != (peer, number));
        let of_peer = || self.0.iter().enumerate().filter(|(_, (p, ..))| *p == peer);
        if of_peer().count() >= COMPARED
            && let Some((oldest, _)) = of_peer().min_by_key(|(_, (_, n, _))| *n)
        {
            self.0.swap_remove(oldest);
        }
        self.0.push((peer, number, theirs));
    }

    /// This rank calls the operation now: takes out all questions about it. Returns a peer that has called something else, and what it called.
    pub(super) fn answer(&mut self, number: u64, ours: Signature) -> Option<(Rank, Signature)> {
        if self.0.is_empty() {
            return None;
        }
        let of_number = |(_, n, _): &(Rank, u64, Signature)| *n == number;
        let other = self.0.iter().filter(|q| of_number(q)).find(|(_, _, theirs)| *theirs != ours);
        let other = other.map(|(peer, _, theirs)| (*peer, *theirs));
        self.0.retain(|q| !of_number(q));
        other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(count: u64) -> Signature {
        Signature { count, ..Signature::default() }
    }

    #[test]
    fn the_last_calls_are_remembered_by_number_and_older_ones_are_not() {
        let mut table = Table::new();
        let calls = HISTORY as u64 + 10;
        for count in 0..calls {
            assert_eq!(table.number_collective(signature(count)), (count, None));
        }
        assert_eq!((table.called(9), table.called(10)), (None, Some(signature(10))));
        assert_eq!((table.called(calls - 1), table.called(calls)), (Some(signature(calls - 1)), None));
        let last: Vec<u64> = table.last_calls().into_iter().map(|(number, _)| number).collect();
        assert_eq!(last, (calls - COMPARED as u64..calls).collect::<Vec<_>>());
    }

    #[test]
    fn a_peer_that_called_something_else_is_found_whoever_calls_first() {
        let mut table = Table::new();
        assert_eq!(table.asked(3, 0, signature(7)), None, "not called here yet");
        assert_eq!(table.number_collective(signature(8)), (0, Some((3, signature(7)))));
        assert_eq!(table.asked(3, 0, signature(7)), Some(signature(8)), "called here before");
        assert_eq!(table.asked(3, 0, signature(8)), None);
    }

    #[test]
    fn messages_that_all_were_received_balance_and_one_that_was_not_does_not() {
        let mut tables = [Table::new(), Table::new(), Table::new()];
        let mut sent = |from: Rank, to: Rank, tag, received| {
            tables[from].number_message(to, Direction::Send, tag);
            if received {
                tables[to].number_message(from, Direction::Recv, tag);
            }
            let of = |rank: Rank| tables[rank].balance(rank);
            of(0).wrapping_add(of(1)).wrapping_add(of(2))
        };
        assert_eq!(sent(0, 1, 5, true), 0);
        assert_eq!(sent(1, 0, 5, true), 0);
        assert_eq!(sent(2, 2, 0, true), 0);
        assert_ne!(sent(1, 2, 5, false), 0);
    }

    #[test]
    fn messages_are_numbered_by_peer_direction_and_tag() {
        let mut table = Table::new();
        let mut number = |peer, tag| table.number_message(peer, Direction::Send, tag);
        assert_eq!([number(1, 0), number(1, 0), number(1, 1), number(2, 0), number(1, 0)], [0, 1, 0, 0, 2]);
        assert_eq!(table.number_message(1, Direction::Recv, 0), 0);
    }

    #[test]
    fn every_peer_that_asked_is_compared_with_whoever_was_first() {
        for order in [[1, 0], [0, 1]] {
            let mut asked = Asked::default();
            order.iter().for_each(|&peer| asked.keep(peer, 7, signature(peer as u64)));
            assert_eq!(asked.answer(7, signature(1)), Some((0, signature(0))));
            assert_eq!(asked.answer(7, signature(9)), None, "asked once");
        }
    }

    #[test]
    fn a_peer_may_ask_about_several_operations() {
        let mut asked = Asked::default();
        (0..COMPARED as u64 + 2).for_each(|number| asked.keep(3, number, signature(number)));
        asked.keep(3, 5, signature(50));
        assert_eq!(asked.answer(0, signature(9)), None, "the oldest make room");
        assert_eq!(asked.answer(2, signature(2)), None);
        assert_eq!(asked.answer(5, signature(5)), Some((3, signature(50))));
        assert_eq!(asked.answer(9, signature(1)), Some((3, signature(9))));
    }
}
