//! How the survivors of a communicator meet to make the next one ([`Comm::shrink`](crate::Comm::shrink)).
//!
//! They exchange the same rows as the members of a `split`, but over the control connections, because the data links of the old
//! communicator are dead. Each member that shrinks sends every other member one *answer*: that it comes and what it brings, or that it
//! does not come. So nobody waits for a live member that has given up, only for one that has not answered yet, and at most until the
//! deadline.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;

use super::World;
use super::pool::ROW;
use crate::comm::runtime::{LOOK, Ticks};
use crate::error::{Error, Missing, MissingState};
use crate::exec::Endpoint;
use crate::group::message::{CommId, Message};
use crate::types::{Map, Rank, mix};

/// For how many communicators answers are kept. Beyond these, the one that has had no answer for the longest time is forgotten.
const KEPT: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1023);
/// Goes into the id of the communicator that a shrink makes, to set it apart from the children that `split` makes: "shrunk" in ASCII.
const SHRUNK: u64 = 0x7368_7275_6e6b;

/// A member's answer: its row of the [`Proposal`](super::pool::Proposal) for the new communicator; `None`: it does not come.
type Said = Option<[u64; ROW]>;

/// The members' answers, by the communicator that is to be made and by the member's rank in the world.
pub(super) struct Meetings(Mutex<LruCache<CommId, Map<Rank, Said>>>);

impl Default for Meetings {
    fn default() -> Meetings {
        Meetings(Mutex::new(LruCache::new(KEPT)))
    }
}

impl Meetings {
    /// A member has answered. Its first answer counts.
    pub(super) fn hear(&self, from: Rank, comm: CommId, said: Said) {
        self.0.lock().get_or_insert_mut(comm, Map::default).entry(from).or_insert(said);
    }

    fn said(&self, comm: CommId, rank: Rank) -> Option<Said> {
        self.0.lock().peek(&comm)?.get(&rank).copied()
    }
}

/// This rank's part in making a communicator of another one's survivors. If a meeting is dropped before [`come`](Self::come) is called, it
/// tells the other members that this rank does not come. If it is dropped later, but before this rank has [made](Self::has_made) the new
/// communicator, it tells them that the new communicator is dead: those that have made it would wait for this rank until their deadlines.
pub(in crate::comm) struct Meeting {
    world: Arc<World>,
    pub(in crate::comm) id: CommId,
    /// World ranks of the old communicator's members.
    members: Vec<Rank>,
    said: Answered,
}

/// What the other members have been told.
enum Answered {
    Nothing,
    /// That this rank comes. The number is this rank's in the new communicator.
    Comes(Rank),
    /// The same, and this rank has made the communicator.
    Made,
}

impl Meeting {
    pub(in crate::comm) fn new(world: &Arc<World>, of: &Endpoint) -> Meeting {
        Meeting {
            world: world.clone(),
            // Every member computes the same id, without a message.
            id: CommId(mix(of.config.comm, SHRUNK).max(1)),
            members: of.config.members.clone(),
            said: Answered::Nothing,
        }
    }

    fn tell(&self, message: &Message) {
        for &to in self.members.iter().filter(|m| **m != self.world.rank) {
            self.world.send(to, message.clone());
        }
    }

    /// This rank has made the new communicator.
    pub(in crate::comm) fn has_made(mut self) {
        self.said = Answered::Made;
    }

    /// Tells the other members that this rank comes and brings `row`, and waits until every survivor has answered or is known to be
    /// gone. `survivors` are ranks of the old communicator `of`. Returns their answers in the same order, with `None` also for those
    /// that died or left without an answer.
    ///
    /// # Errors
    /// [`Error::NoVerdict`] at `end`: it names the survivors that have not answered, and `after` as the time that they had.
    pub(in crate::comm) async fn come(
        &mut self,
        row: [u64; ROW],
        survivors: &[Rank],
        of: &Endpoint,
        (end, after): (Instant, Duration),
    ) -> Result<Vec<Said>, Error> {
        self.tell(&Message::Meet { comm: self.id, row: Some(row) });
        let number = survivors.iter().position(|rank| self.members[*rank] == self.world.rank);
        self.said = Answered::Comes(number.unwrap_or_default());
        let mut ticks = Ticks::new(&self.world.runtime, LOOK)?;
        loop {
            // The members that have gone are looked up before the answers: what such a member sent before its connection ended has come
            // by then.
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
                // No communicator ends, so no flight recorder is written that the error could name.
                let members = members.recorded_in(None);
                return Err(Error::NoVerdict { call: "shrink".into(), comm, rank, after, missing, members });
            }
            ticks.next().await?;
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        match self.said {
            Answered::Nothing => self.tell(&Message::Meet { comm: self.id, row: None }),
            Answered::Comes(number) => {
                let cause =
                    Error::aborted(number, "its call of shrink ended before it had this communicator");
                self.tell(&Message::Abort { comm: self.id, cause });
            }
            Answered::Made => {}
        }
    }
}
