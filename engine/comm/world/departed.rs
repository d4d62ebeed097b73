//! Who has gone from a world, and how: all of them, in the order heard.

use crate::error::Lost;
use crate::types::Rank;

/// The ranks that were lost or have left. A rank may be lost after it has left: by what another rank says of it.
#[derive(Default)]
pub(super) struct Departed {
    lost: Vec<(Rank, Lost)>,
    left: Vec<Rank>,
    /// Lost ranks that a call of the user's has named, on any communicator.
    told: Vec<Rank>,
}

impl Departed {
    /// A rank is lost. `false`: that was known, and what was heard first stays.
    pub(super) fn lose(&mut self, rank: Rank, how: Lost) -> bool {
        let new = !self.is_lost(rank);
        if new {
            self.lost.push((rank, how));
        }
        new
    }

    /// A rank has said goodbye.
    pub(super) fn leave(&mut self, rank: Rank) {
        if !self.left.contains(&rank) {
            self.left.push(rank);
        }
    }

    /// A call of the user's names a lost rank. Whether one has before.
    pub(super) fn tell(&mut self, rank: Rank) -> bool {
        let is_told = self.told.contains(&rank);
        if !is_told {
            self.told.push(rank);
        }
        is_told
    }

    /// The first loss of all.
    pub(super) fn first(&self) -> Option<(Rank, Lost)> {
        self.lost.first().copied()
    }

    pub(super) fn is_lost(&self, rank: Rank) -> bool {
        self.lost.iter().any(|(r, _)| *r == rank)
    }

    /// How many ranks are known to be lost.
    pub(super) fn count(&self) -> usize {
        self.lost.len()
    }

    /// Of the first `known` losses the first that concerns a group of these members: the place of the lost rank among
    /// them, and how it was lost.
    pub(super) fn first_among(&self, members: &[Rank], known: usize) -> Option<(Rank, Lost)> {
        let place = |(rank, how): &(Rank, Lost)| Some((members.iter().position(|m| m == rank)?, *how));
        self.lost.iter().take(known).find_map(place)
    }

    /// Those of these ranks of the world that were lost or have left.
    pub(super) fn any_of(&self, ranks: &[Rank]) -> Vec<Rank> {
        let is_gone = |rank: &Rank| self.left.contains(rank) || self.is_lost(*rank);
        ranks.iter().copied().filter(is_gone).collect()
    }

    /// The places of those among these members who have left.
    pub(super) fn left_among(&self, members: &[Rank]) -> Vec<Rank> {
        self.left.iter().filter_map(|rank| members.iter().position(|m| m == rank)).collect()
    }
}
