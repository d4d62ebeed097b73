//! Communicators made from a communicator: `split`, `dup`, `subset`.

use super::made_together::made_together;
use super::world::{Proposal, ROW};
use super::{Call, Comm, SharedComm};
use crate::error::Error;
use crate::group::message::CommId;
use crate::types::{Rank, mix};

/// The key of the collectives by which ranks make something together. It tells them from the user's calls on the same handle.
const MAKING: u64 = 0x6d61_6b69_6e67_0001;

/// The row of a rank that has no room for the rings of its new group.
const NO_ROOM: [u64; ROW] = [u64::MAX; ROW];

made_together! {
    /// A second communicator of the same ranks, independent of this one. Collective: all ranks call it, and ranks that make several
    /// communicators make them in the same order. So make the communicators of several tasks one after another, before the tasks start: if
    /// each task calls `dup` itself, a task of one rank may be joined with another task of the other ranks.
    ///
    /// A library whose tasks make calls of their own takes `&mut Comm`, `dup`s it and [shares](Comm::share) the `dup`: then calls of the
    /// library's caller do not come between the library's own.
    ///
    /// # Errors
    /// As of [`split`](Self::split).
    async fn dup [] () -> Result<Comm, Error> = |comm| comm.made_by_color(0, comm.rank() as i64);

    /// Communicators of the ranks that give the same `color`, ordered by `key`, then by rank. Collective: all ranks of
    /// this group call it.
    ///
    /// If all members have an idle communicator of the same members in the same order, it is used again. A communicator is
    /// idle when all its members have closed or dropped it and all its work is done.
    ///
    /// A split takes several collectives. If several tasks share the handle, no rank may make another call on it until the
    /// split is done: ranks that make the two calls in different orders get an error.
    ///
    /// # Errors
    /// As of a collective. [`Error::System`] on all ranks when one rank has no memory for the rings of another group: then no group is made,
    /// this communicator stays as it is, and there is room again once other communicators are dropped or closed.
    async fn split [] (color: u64, key: i64) -> Result<Comm, Error> = |comm| comm.made_by_color(color, key);

    /// [`split`](Self::split), except that a rank may give no color: it takes part in the call and gets no communicator.
    ///
    /// # Errors
    /// As of `split`.
    async fn split_some [] (color: Option<u64>, key: i64) -> Result<Option<Comm>, Error>
        = |comm| comm.made_by_some_color(color, key);

    /// A communicator of these ranks of this group, in the order given; `None` on the ranks that are not among them.
    /// Collective: all ranks of this group call it, with the same ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] on all ranks if `ranks` is empty, names a rank twice or names one that is not in this group, or if
    /// not all ranks pass the same `ranks`; this communicator stays as it is. Else as of [`split`](Self::split).
    async fn subset [] (ranks: &[Rank]) -> Result<Option<Comm>, Error> = |comm| comm.made_of(ranks);
}

impl SharedComm {
    pub(super) async fn made_by_color(&self, color: u64, key: i64) -> Result<Comm, Error> {
        let made = self.made_by_some_color(Some(color), key).await?;
        made.ok_or_else(|| Error::system("split", "no communicator was made for a color (a bug)"))
    }

    async fn made_by_some_color(&self, color: Option<u64>, key: i64) -> Result<Option<Comm>, Error> {
        let row = [u64::from(color.is_some()), color.unwrap_or(0), key as u64];
        let answers = self.step().all_gather(row.to_vec()).await?;
        let mut mates: Vec<(i64, Rank)> = (0..self.size())
            .filter(|r| color.is_some() && answers[3 * r..3 * r + 2] == row[..2])
            .map(|r| (answers[3 * r + 2] as i64, r))
            .collect();
        mates.sort_unstable();
        let mates: Vec<Rank> = mates.into_iter().map(|(_, r)| r).collect();
        self.child(&mates, color.unwrap_or(0)).await
    }

    async fn made_of(&self, ranks: &[Rank]) -> Result<Option<Comm>, Error> {
        let n = self.size();
        let twice = ranks.iter().enumerate().find(|(i, r)| ranks[..*i].contains(r));
        let problem = match (ranks.iter().find(|r| **r >= n), twice) {
            _ if ranks.is_empty() => Some("no ranks were named: a group has at least one".to_owned()),
            (Some(r), _) => Some(format!("rank {r} is not in this group of {n}; ranks are 0..={}", n - 1)),
            (None, Some((_, r))) => Some(format!("rank {r} is named twice in {ranks:?}")),
            (None, None) => None,
        };
        self.same("subset", ranks.iter().map(|r| *r as u64), &format!("{ranks:?}"), problem).await?;
        let mates = if ranks.contains(&self.rank()) { ranks } else { &[] };
        self.child(mates, 0).await
    }

    /// For the collectives by which ranks make something together: a call with the key `MAKING`.
    pub(super) fn step(&self) -> Call<'_> {
        self.key(MAKING)
    }

    /// Compares the arguments of a call (`words`; `text` shows them to people) on all ranks. All ranks end with an error if one
    /// of them has a `problem` with its arguments, or was given other arguments.
    pub(super) async fn same(
        &self,
        call: &str,
        words: impl Iterator<Item = u64>,
        text: &str,
        problem: Option<String>,
    ) -> Result<(), Error> {
        let words: Vec<u64> = words.collect();
        let digest = words.iter().fold(words.len() as u64, |x, word| mix(x, *word));
        let row = vec![u64::from(problem.is_some()), digest];
        let rows = self.step().all_gather(row.clone()).await?;
        let odd = (0..self.size()).find(|r| rows[2 * r..2 * r + 2] != row[..]);
        match (problem, odd) {
            (Some(problem), _) => Err(Error::invalid(call, problem)),
            (None, None) => Ok(()),
            (None, Some(peer)) => {
                let members = self.handle().endpoint.config.named();
                let (peer, us) = (members.rank(peer), members.rank(self.rank()));
                let problem =
                    format!("{peer} did not pass what {us} passed, {text}; every rank must pass the same");
                Err(Error::invalid(call, problem))
            }
        }
    }

    /// Makes a communicator of `mates`: ranks of this group, in the order of the new one. All ranks of this group call this
    /// together; a rank that gets no communicator passes no mates.
    async fn child(&self, mates: &[Rank], color: u64) -> Result<Option<Comm>, Error> {
        let (handle, n) = (self.handle(), self.size());
        let (parent, world) = (&handle.endpoint, &handle.membership.world);
        let child = {
            let mut children = handle.children.lock();
            *children += 1;
            *children
        };
        let id = CommId(child_id(parent.config.comm, child, color));
        let mut proposal = if mates.is_empty() {
            Ok(None)
        } else {
            let members = mates.iter().map(|r| parent.config.members[*r]).collect();
            world.propose(id, members).await.map(Some)
        };
        // If this communicator is dead, the proposal is dropped here, which frees its rings at once: no rank has heard of them yet.
        self.check()?;
        let row = match &mut proposal {
            Ok(Some(proposal)) => proposal.row(),
            Ok(None) => [0; ROW],
            Err(_) => NO_ROOM,
        };
        let rows = self.step().all_gather(row.to_vec()).await?;
        let rows: Vec<[u64; ROW]> = rows.chunks_exact(ROW).filter_map(|row| row.try_into().ok()).collect();
        if rows.len() != n {
            return Err(Error::system("split", "not every rank has answered (a bug)"));
        }
        let proposal = proposal?;
        if let Some(without) = rows.iter().position(|row| *row == NO_ROOM) {
            // All ranks see this row, those of other colors, too: no rank makes a communicator, and nobody has used what was proposed.
            proposal.into_iter().for_each(Proposal::withdraw);
            let problem = format!(
                "{} has no room for the rings of another group; drop those that are not needed, on all their members",
                parent.config.named().rank(without)
            );
            return Err(Error::system("make a communicator", problem));
        }
        let Some(proposal) = proposal else { return Ok(None) };
        let rows: Vec<_> = mates.iter().map(|r| rows[*r]).collect();
        let name = format!("{}/{child}.{color}", parent.config.name);
        let (endpoint, rings) = proposal.accept(name, &rows)?;
        Ok(Some(Comm::of(endpoint, handle.membership.clone(), Some(rings))))
    }
}

/// The id of a child communicator: the same on all its members, and different from that of any other communicator.
fn child_id(parent: u64, child: u64, color: u64) -> u64 {
    // 0 is the id of the world's own communicator.
    mix(mix(parent, child), color).max(1)
}
