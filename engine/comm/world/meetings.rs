//! How the survivors of a communicator meet to make the next one ([`Comm::shrink`](crate::Comm::shrink)): each says over the
//! control connections what it brings, since the data path is dead.
//!
//! A member that shrinks says to every other member exactly once that it comes, and what it brings, or that it does not come.
//! So nobody waits for a live member that has given up: only for one that has not called yet, and at most until the deadline.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;

use super::World;
use super::pool::ROW;
use crate::comm::runtime::Ticks;
use crate::error::{Error, Missing, MissingState};
use crate::exec::Endpoint;
use crate::group::message::{CommId, Message};
use crate::types::{Map, Rank, mix};

/// Communicators of which it is kept what members said of meeting; the last ones.
const KEPT: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1023);
/// How often a member that waits looks at what was said.
const LOOK: Duration = Duration::from_micros(200);
/// Sets the name of a communicator that was shrunk apart from its children's.
const SHRUNK: u64 = 0x7368_7275_6e6b;

/// What a member brings to a communicator that is made: a row of [`Proposal`](super::pool::Proposal). `None`: it does not come.
type Said = Option<[u64; ROW]>;

/// What was said by members, by communicator to be made and by rank of the world.
pub(super) struct Meetings(Mutex<LruCache<CommId, Map<Rank, Said>>>);

impl Default for Meetings {
    fn default() -> Meetings {
        Meetings(Mutex::new(LruCache::new(KEPT)))
    }
}

impl Meetings {
    /// A member has said whether it comes. What it said first counts.
    pub(super) fn hear(&self, from: Rank, comm: CommId, said: Said) {
        self.0.lock().get_or_insert_mut(comm, Map::default).entry(from).or_insert(said);
    }

    fn said(&self, comm: CommId, rank: Rank) -> Option<Said> {
        self.0.lock().peek(&comm)?.get(&rank).copied()
    }
}

/// This rank's part in making a communicator of another one's survivors. Dropped before it came, it tells the others that it does not.
pub(in crate::comm) struct Meeting {
    world: Arc<World>,
    pub(in crate::comm) id: CommId,
    /// World ranks of the old communicator's members.
    members: Vec<Rank>,
    has_come: bool,
}

impl Meeting {
    pub(in crate::comm) fn new(world: &Arc<World>, of: &Endpoint) -> Meeting {
        Meeting {
            world: world.clone(),
            // All of them come to the same name without asking.
            id: CommId(mix(of.config.comm, SHRUNK).max(1)),
            members: of.config.members.clone(),
            has_come: false,
        }
    }

    fn tell(&self, row: Said) {
        for &to in self.members.iter().filter(|m| **m != self.world.rank) {
            self.world.send(to, Message::Meet { comm: self.id, row });
        }
    }

    /// Says what this rank brings, and waits until every survivor has said the same or is known not to come. What each brings, in
    /// the order of `survivors`, ranks of the old communicator `of`; `None` for those that do not come, or have died meanwhile.
    ///
    /// # Errors
    /// [`Error::NoVerdict`] at `end`, naming the survivors that have said nothing.
    pub(in crate::comm) async fn come(
        mut self,
        row: [u64; ROW],
        survivors: &[Rank],
        of: &Endpoint,
        (end, after): (Instant, Duration),
    ) -> Result<Vec<Said>, Error> {
        self.tell(Some(row));
        self.has_come = true;
        let mut ticks = Ticks::new(&self.world.runtime, LOOK)?;
        loop {
            // Who has gone is looked up first: what a member said before it went has been heard by then.
            let gone = self.world.losses.departed.lock().any_of(&self.members);
            let said = |rank: &Rank| match self.members[*rank] {
                member if member == self.world.rank => Some(Some(row)),
                member => self.world.losses.meetings.said(self.id, member),
            };
            let waits_for = |rank: &&Rank| said(rank).is_none() && !gone.contains(&self.members[**rank]);
            let missing: Vec<Missing> = survivors
                .iter()
                .filter(waits_for)
                .map(|rank| Missing { rank: *rank, state: MissingState::NoAnswer })
                .collect();
            if missing.is_empty() {
                return Ok(survivors.iter().map(|rank| said(rank).flatten()).collect());
            }
            if self.world.runtime.now() >= end {
                let (rank, comm, members) = (of.config.rank, of.config.name.clone(), of.config.named());
                return Err(Error::NoVerdict { call: "shrink".into(), comm, rank, after, missing, members });
            }
            ticks.next().await?;
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if !self.has_come {
            self.tell(None);
        }
    }
}
