//! Which messages are in progress.
//!
//! Of those to a peer with one tag, and of those from it with one tag, the oldest [`WINDOW`] are; the others wait here, in order, and their
//! deadlines do not run. Both ends of a message are so many calls of their kind behind the oldest, so neither waits for one that the other
//! cannot begin.

use std::time::Instant;

use super::Messages;
use super::moving::{Direction, Message, Moving, Peer};
use crate::exec::inflight::Key;

/// Each pass looks at all that are in progress.
pub(super) const WINDOW: usize = 1024;

impl Peer {
    pub(super) fn list(&mut self, direction: Direction) -> &mut Vec<Moving> {
        match direction {
            Direction::Send => &mut self.sends,
            Direction::Recv => &mut self.recvs,
        }
    }

    /// Whether as many messages like this one as may be are in progress.
    fn is_full_for(&mut self, message: &Message) -> bool {
        let (direction, tag) = (message.direction, message.tag);
        let list = self.list(direction);
        let is_full = list.len() >= WINDOW && list.iter().filter(|m| m.message.tag == tag).count() >= WINDOW;
        is_full || self.waiting.contains_key(&(direction, tag))
    }
}

impl Messages {
    /// Takes a message in, whose own memory is ready: it begins, or waits for those before it.
    pub(crate) fn add(&mut self, key: Key, message: Message, now: Instant) {
        let peer = &mut self.peers[message.peer];
        peer.touched = true;
        if peer.is_full_for(&message) {
            peer.waiting.entry((message.direction, message.tag)).or_default().push_back((key, message));
            return;
        }
        peer.list(message.direction).push(Moving::new(key, message, now));
    }

    /// Whether copies of a message's memory may be on their way that nobody waits for.
    pub(crate) fn is_settling(&self) -> bool {
        let begun = self.peers.iter().flat_map(|peer| peer.sends.iter().chain(&peer.recvs));
        let waiting = self.peers.iter().flat_map(|peer| peer.waiting.values().flatten());
        let mut all = begun.map(|m| &m.message).chain(waiting.map(|(_, message)| message));
        all.any(|message| message.staged.as_ref().is_some_and(|staged| staged.is_settling()))
    }

    /// Begins messages in the place of those that have ended.
    pub(crate) fn go_on(&mut self, now: impl Fn() -> Instant) {
        for (rank, direction, tag) in self.ended.drain(..) {
            let peer = &mut self.peers[rank];
            let Some(waiting) = peer.waiting.get_mut(&(direction, tag)) else { continue };
            let next = waiting.pop_front();
            if waiting.is_empty() {
                peer.waiting.remove(&(direction, tag));
            }
            let next = next.map(|(key, message)| Moving::new(key, message, now()));
            peer.list(direction).extend(next);
        }
    }
}
