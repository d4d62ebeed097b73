//! Who has gone from a world, and how: all of them, in the order heard.

use crate::error::Lost;
use crate::types::Rank;

/// The ranks that were lost or have left. A rank that has left may later be lost, too, because another rank says so.
#[derive(Default)]
pub(super) struct Departed {
    lost: Vec<(Rank, Lost)>,
    left: Vec<Rank>,
    /// Lost ranks that the error of a user's call has named, on any communicator.
    told: Vec<Rank>,
}

impl Departed {
    /// Notes that a rank is lost. `false`: that was known already, and the first report stays.
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

    /// Notes that the error of a user's call names this lost rank. Returns whether an earlier error has.
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

    /// Looks through the first `known` losses for the first one of a member of this group. Returns the place of the lost rank
    /// among the members, and how it was lost.
    pub(super) fn first_among(&self, members: &[Rank], known: usize) -> Option<(Rank, Lost)> {
        let place = |(rank, how): &(Rank, Lost)| Some((members.iter().position(|m| m == rank)?, *how));
        self.lost.iter().take(known).find_map(place)
    }

    /// Which of these ranks of the world were lost or have left.
    pub(super) fn any_of(&self, ranks: &[Rank]) -> Vec<Rank> {
        let is_gone = |rank: &Rank| self.left.contains(rank) || self.is_lost(*rank);
        ranks.iter().copied().filter(is_gone).collect()
    }

    /// The members that have left: their places among the members.
    pub(super) fn left_among(&self, members: &[Rank]) -> Vec<Rank> {
        self.left.iter().filter_map(|rank| members.iter().position(|m| m == rank)).collect()
    }
}
