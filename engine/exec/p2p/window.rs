//! Which messages are in progress.
//!
//! For each peer, direction and tag, the oldest [`WINDOW`] messages are in progress. The others wait here, in order, and their deadlines do not
//! run yet. A message has the same place in the order of its kind at both of its ends, so no end waits for a message that the other end
//! cannot begin.

use std::time::Instant;

use super::Messages;
use super::moving::{Direction, Message, Moving, Peer};
use crate::exec::inflight::Key;

/// How many messages of one peer, direction and tag are in progress at most: each pass looks at all of them.
pub(super) const WINDOW: usize = 1024;

impl Peer {
    pub(super) fn list(&mut self, direction: Direction) -> &mut Vec<Moving> {
        match direction {
            Direction::Send => &mut self.sends,
            Direction::Recv => &mut self.recvs,
        }
    }

    /// Whether this message has to wait: [`WINDOW`] messages of its direction and tag are in progress, or some wait already.
    fn is_full_for(&mut self, message: &Message) -> bool {
        let (direction, tag) = (message.direction, message.tag);
        let list = self.list(direction);
        let is_full = list.len() >= WINDOW && list.iter().filter(|m| m.message.tag == tag).count() >= WINDOW;
        is_full || self.waiting.contains_key(&(direction, tag))
    }
}

impl Messages {
    /// Adds a message whose own memory is ready. It begins now, or waits for those before it.
    pub(crate) fn add(&mut self, key: Key, message: Message, now: Instant) {
        let peer = &mut self.peers[message.peer];
        (peer.touched, self.is_used) = (true, true);
        if peer.is_full_for(&message) {
            peer.waiting.entry((message.direction, message.tag)).or_default().push_back((key, message));
            return;
        }
        peer.list(message.direction).push(Moving::new(key, message, now));
    }

    /// Whether copies for which nothing else waits may be under way, to or from the memory of any message.
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

    /// Whether any message was ever called on this endpoint. If not, a pass has nothing to look at here.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used
    }
}
