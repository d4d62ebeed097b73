//! What peers have asked about operations that this rank has not called yet.

use super::COMPARED;
use crate::types::{Rank, Signature};

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
