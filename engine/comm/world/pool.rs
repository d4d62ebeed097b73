//! Communicators that nobody holds, kept to be used again; and the memory of rings, kept until nobody touches it.
//!
//! Each communicator that is made anew has *rings*: a block of this rank's region, known by the communicator's id. The rings
//! serve that communicator and, one after the other, the later ones that take them up again (its later generations). On
//! each rank they are, in this order:
//!
//! - **in use**: somebody holds a handle, or operations still run;
//! - **idle**: all handles are gone, and all work has ended without a failure: the open links ([`IdleRuns`]) wait here to
//!   be taken up by a `split` of the same members, if all of them agree ([`Proposal`]);
//! - **retired**, for good: this rank reads the peers' rings no more, and has told all members so
//!   ([`Message::Retired`]). A receiver writes into the *sender's* rings which frames it has released: so the block is
//!   given back only when every member that reads it has retired as well.
//!
//! If a member dies, falls silent or leaves without saying that it has retired, nobody waits for it to say so. But a process
//! that is thought dead may still run and write, so the blocks that it reads stay taken until the world ends. No group made
//! afterwards has that member, so there are at most as many such blocks as there were groups at that moment.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;

use super::wholes::Wholes;
use super::{LinksFrom, World};
use crate::comm::links::block_bytes;
use crate::comm::runtime::Ticks;
use crate::error::Error;
use crate::exec::{Endpoint, IdleRuns};
use crate::forked;
use crate::group::message::{CommId, Message};
use crate::types::{Map, Rank};

/// Idle communicators that a world keeps, unless it is told otherwise.
pub(crate) const CAPACITY: usize = 64;
/// The ids of this many ended communicators are kept, so that messages about them are known to be late.
const ENDED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1023);
/// How long a rank whose region is full waits for other members to retire the communicators that have ended here.
const MEMORY: Duration = Duration::from_secs(2);

/// What became of the communicators that a rank has made, and how much memory their rings take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Communicators that took up an idle one of the same members.
    pub hits: u64,
    /// Communicators that were made anew.
    pub misses: u64,
    /// Idle communicators that were ended, because the pool or the region was full, another member ended them or left, or the members disagreed
    /// on which one to take up.
    pub evictions: u64,
    /// Idle communicators now.
    pub idle: usize,
    /// Communicators now that somebody holds, or whose operations still run; without the world's own.
    pub live: usize,
    /// Bytes of ring memory in use: of communicators that are live (also the world's own) or idle, or whose end not all members have confirmed.
    pub ring_bytes: usize,
    /// The most bytes of this rank's region that rings have ever extended over.
    pub ring_peak: usize,
    /// How many bytes they can extend over.
    pub ring_limit: usize,
}

/// What makes two communicators interchangeable.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Likeness {
    /// In order.
    members: Vec<Rank>,
    /// Always empty: communicators on devices are not used again.
    devices: Vec<u32>,
    runs_on: Executor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Executor {
    /// The engine's executor on the host, over the links that the world has chosen between each two ranks.
    Host,
}

impl Likeness {
    fn of(members: &[Rank]) -> Likeness {
        Likeness { members: members.to_vec(), devices: Vec::new(), runs_on: Executor::Host }
    }
}

struct Rings {
    members: Vec<Rank>,
    block: usize,
    /// Members that have retired.
    confirmed: Vec<Rank>,
    /// This rank has retired.
    retired: bool,
    /// The links of retired rings, kept until all members have retired: peers may still have to give back what was lent to them.
    runs: Option<IdleRuns>,
}

struct Idle {
    likeness: Likeness,
    runs: IdleRuns,
}

struct State {
    capacity: usize,
    rings: Map<CommId, Rings>,
    /// How many blocks of rings that are not in `rings` any more are about to be given back.
    settling: usize,
    /// By the id of their rings; the least recently used one ends first.
    idle: LruCache<CommId, Idle>,
    /// Members that have retired rings which are not made here yet.
    heard: LruCache<CommId, Vec<Rank>>,
    /// Communicators that nobody holds any more.
    ended: LruCache<CommId, ()>,
    /// Ranks that have gone: they confirm nothing any more.
    gone: Vec<Rank>,
    hits: u64,
    misses: u64,
    evictions: u64,
}

pub(crate) struct Pool {
    state: Mutex<State>,
    pub(crate) wholes: Wholes,
}

impl Pool {
    pub(crate) fn new(capacity: usize) -> Pool {
        let state = State {
            capacity,
            rings: Map::default(),
            settling: 0,
            idle: LruCache::unbounded(),
            heard: LruCache::new(ENDED),
            ended: LruCache::new(ENDED),
            gone: Vec::new(),
            hits: 0,
            misses: 0,
            evictions: 0,
        };
        Pool { state: Mutex::new(state), wholes: Wholes::default() }
    }

    /// An endpoint has ended, and nobody holds it: keeps its end of a library's communicator (NCCL's), if it has one.
    fn keep_whole(&self, endpoint: &Endpoint) {
        let capacity = self.state.lock().capacity;
        self.wholes.keep(endpoint, capacity);
    }

    /// Whether a communicator was held here, and is not any more.
    pub(crate) fn has_ended(&self, comm: CommId) -> bool {
        self.state.lock().ended.contains(&comm)
    }

    /// Whether rings were used here, and never will be again.
    pub(crate) fn has_retired(&self, rings: CommId) -> bool {
        let state = self.state.lock();
        state.ended.contains(&rings) && state.rings.get(&rings).is_none_or(|r| r.retired)
    }
}

impl State {
    /// Whether memory of rings is on its way back to the region.
    fn awaits_memory(&self) -> bool {
        self.settling > 0 || self.rings.values().any(|rings| rings.retired)
    }

    /// Takes out the least recently used idle communicators, until at most `capacity` are left.
    fn trim(&mut self, capacity: usize) -> Vec<(CommId, Idle)> {
        let mut out = Vec::new();
        while self.idle.len() > capacity
            && let Some(least) = self.idle.pop_lru()
        {
            self.evictions += 1;
            out.push(least);
        }
        out
    }
}

impl World {
    pub(crate) fn pool_stats(&self) -> PoolStats {
        let (ring_bytes, ring_peak, ring_limit) = self.topology.region.heap();
        let state = self.pool.state.lock();
        let idle = state.idle.len();
        PoolStats {
            hits: state.hits,
            misses: state.misses,
            evictions: state.evictions,
            idle,
            live: state.rings.values().filter(|r| !r.retired).count() - idle,
            ring_bytes,
            ring_peak,
            ring_limit,
        }
    }

    /// Sets how many idle communicators are kept. Those beyond that end now.
    pub(crate) fn set_pool_capacity(&self, capacity: usize) {
        if forked::is_forked() {
            return;
        }
        let out = {
            let mut state = self.pool.state.lock();
            state.capacity = capacity;
            state.trim(capacity)
        };
        self.retire_idle(out);
        self.pool.wholes.trim(capacity);
    }

    /// All handles of a communicator are gone. If there are `runs`, all its work is done; if not, a task waits until it is.
    pub(crate) fn release(self: &Arc<Self>, rings: CommId, endpoint: &Arc<Endpoint>, runs: Option<IdleRuns>) {
        self.pool.state.lock().ended.put(CommId(endpoint.config.comm), ());
        if let Some(runs) = runs {
            self.pool.keep_whole(endpoint);
            return self.shelve(rings, runs);
        }
        // The wait ends, as all operations end at their deadlines at the latest.
        let (world, endpoint) = (self.clone(), endpoint.clone());
        let wait = async move {
            let mut pause = Duration::from_millis(1);
            loop {
                if let Some(runs) = endpoint.take_runs() {
                    world.pool.keep_whole(&endpoint);
                    return world.shelve(rings, runs);
                }
                world.runtime.sleep(pause).await;
                pause = (2 * pause).min(Duration::from_millis(50));
            }
        };
        if let Err(error) = self.runtime.spawn(Box::pin(wait)) {
            tracing::error!(%error, "the end of a communicator was lost: its rings stay taken");
        }
    }

    /// All work of a communicator is done: keeps it as idle if it may be used again, else retires its rings. What the pool has no room for ends.
    fn shelve(&self, id: CommId, runs: IdleRuns) {
        let out = {
            let mut state = self.pool.state.lock();
            let State { rings, gone, .. } = &*state;
            let Some(rings) = rings.get(&id) else { return };
            let whole = rings.confirmed.is_empty() && !rings.members.iter().any(|m| gone.contains(m));
            if runs.healthy && whole {
                let likeness = Likeness::of(&rings.members);
                state.idle.put(id, Idle { likeness, runs });
                let capacity = state.capacity;
                Ok(state.trim(capacity))
            } else {
                Err(runs)
            }
        };
        match out {
            Ok(out) => self.retire_idle(out),
            Err(runs) => self.retire(id, Some(runs)),
        }
    }

    fn retire_idle(&self, idle: Vec<(CommId, Idle)>) {
        idle.into_iter().for_each(|(id, idle)| self.retire(id, Some(idle.runs)));
    }

    /// Retires rings: from here on this rank does not touch the peers' rings of that communicator, and it tells the members so.
    fn retire(&self, id: CommId, mut runs: Option<IdleRuns>) {
        if let Some(runs) = &mut runs {
            runs.stop_reading();
        }
        let members = {
            let mut state = self.pool.state.lock();
            let Some(rings) = state.rings.get_mut(&id) else { return };
            rings.retired = true;
            rings.runs = runs;
            let members = rings.members.clone();
            state.ended.put(id, ());
            members
        };
        self.topology.sockets.forget(id);
        for to in members.into_iter().filter(|m| *m != self.rank) {
            self.send(to, Message::Retired { comm: id });
        }
        self.settle(id);
    }

    /// A member has retired these rings: it will not take them up again, and no longer writes to this rank's block.
    pub(crate) fn peer_retired(&self, from: Rank, id: CommId) {
        let idle = {
            let mut state = self.pool.state.lock();
            let confirmed = match state.rings.get_mut(&id) {
                Some(rings) if !rings.members.contains(&from) => return,
                Some(rings) => &mut rings.confirmed,
                None => state.heard.get_or_insert_mut(id, Vec::new),
            };
            if !confirmed.contains(&from) {
                confirmed.push(from);
            }
            let idle = state.idle.pop(&id);
            state.evictions += u64::from(idle.is_some());
            idle
        };
        match idle {
            Some(idle) => self.retire(id, Some(idle.runs)),
            None => self.settle(id),
        }
    }

    /// A rank died, fell silent or left: it will neither use an idle communicator again nor say that it has retired one.
    pub(crate) fn member_gone(&self, rank: Rank) {
        let (idle, retired) = {
            let mut state = self.pool.state.lock();
            if state.gone.contains(&rank) {
                return;
            }
            state.gone.push(rank);
            let with = |ids: &mut dyn Iterator<Item = (&CommId, &Rings)>| -> Vec<CommId> {
                ids.filter(|(_, r)| r.members.contains(&rank)).map(|(id, _)| *id).collect()
            };
            let all = with(&mut state.rings.iter());
            let (idle, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|id| state.idle.contains(id));
            let idle: Vec<_> = idle.into_iter().filter_map(|id| Some((id, state.idle.pop(&id)?))).collect();
            state.evictions += idle.len() as u64;
            (idle, others)
        };
        self.pool.wholes.forget_with(rank);
        self.retire_idle(idle);
        retired.into_iter().for_each(|id| self.settle(id));
    }

    /// This rank leaves: ends all idle communicators, so that the other members get back the memory of their rings.
    pub(crate) fn empty_pool(&self) {
        self.set_pool_capacity(0);
    }

    /// Gives back the memory of retired rings, if all members that write there have said that they have retired, too.
    fn settle(&self, id: CommId) {
        let mut state = self.pool.state.lock();
        let State { rings, gone, .. } = &mut *state;
        let Some(ended) = rings.get_mut(&id).filter(|r| r.retired) else { return };
        if let Some(runs) = &mut ended.runs {
            runs.reap();
        }
        let writers = ended.members.iter().filter(|m| self.topology.is_near(**m));
        let open: Vec<Rank> = writers.filter(|m| !ended.confirmed.contains(m)).copied().collect();
        if open.iter().any(|m| !gone.contains(m)) {
            return;
        }
        let Some(Rings { members, block, runs, .. }) = rings.remove(&id) else { return };
        state.settling += usize::from(open.is_empty());
        drop(state);
        if !open.is_empty() {
            tracing::debug!(
                rings = id.0,
                ?open,
                "the rings of a communicator stay taken: its members are gone"
            );
            return;
        }
        if let Some(mut runs) = runs {
            runs.take_all_back();
        }
        self.topology.region.free(block, block_bytes(members.len()), true);
        self.pool.state.lock().settling -= 1;
    }

    /// Gives rings back that no other rank has used.
    fn discard(&self, id: CommId) {
        let rings = self.pool.state.lock().rings.remove(&id);
        if let Some(rings) = rings {
            self.topology.region.free(rings.block, block_bytes(rings.members.len()), false);
        }
    }

    /// What this rank brings to a new communicator `id` of `members`: rings, and the idle communicator of these members that
    /// could be taken up instead, if this rank has one.
    ///
    /// # Errors
    /// [`Error::System`] when the region has no room for the rings.
    pub(crate) async fn propose(self: &Arc<Self>, id: CommId, members: Vec<Rank>) -> Result<Proposal, Error> {
        let likeness = Likeness::of(&members);
        let offer = {
            let mut state = self.pool.state.lock();
            let alike = state.idle.iter().filter(|(_, idle)| idle.likeness == likeness);
            // Of several, each member offers the one with the lowest id, so all offer the same, in whatever order they dropped them.
            let least = alike.map(|(id, _)| *id).min();
            least.and_then(|id| Some((id, state.idle.pop(&id)?)))
        };
        let mut proposal =
            Proposal { world: self.clone(), id, members, rings: false, published: false, offer, block: 0 };
        let block = self.block(block_bytes(proposal.members.len())).await?;
        let mut state = self.pool.state.lock();
        let confirmed = state.heard.pop(&id).unwrap_or_default();
        let members = proposal.members.clone();
        state.rings.insert(id, Rings { members, block, confirmed, retired: false, runs: None });
        drop(state);
        (proposal.rings, proposal.block) = (true, block as u64);
        Ok(proposal)
    }

    /// Gets room for rings. If there is none, ends all idle communicators, and waits until their members have retired them, too.
    async fn block(self: &Arc<Self>, bytes: usize) -> Result<usize, Error> {
        let full = match self.topology.region.alloc(bytes) {
            Ok(block) => return Ok(block),
            Err(error) => error,
        };
        let out = self.pool.state.lock().trim(0);
        self.retire_idle(out);
        let end = self.runtime.now() + MEMORY;
        let mut ticks = Ticks::new(&self.runtime, Duration::from_millis(1))?;
        while self.runtime.now() < end {
            // Asked before the next try: memory that comes back in between is free for that try.
            let is_awaited = self.pool.state.lock().awaits_memory();
            if let Ok(block) = self.topology.region.alloc(bytes) {
                return Ok(block);
            }
            if !is_awaited {
                break;
            }
            ticks.next().await?;
        }
        Err(full)
    }
}

/// What a rank brings to a new communicator. The members exchange their [`row`](Proposal::row)s and decide alike. A
/// proposal that is dropped before that ends what it brought: the new rings, and the idle communicator that it offered.
pub(crate) struct Proposal {
    world: Arc<World>,
    id: CommId,
    members: Vec<Rank>,
    /// Rings were made, and are not used yet.
    rings: bool,
    /// Others may have heard of them.
    published: bool,
    offer: Option<(CommId, Idle)>,
    block: u64,
}

/// How many numbers a row has.
pub(crate) const ROW: usize = 5;

impl Proposal {
    /// What the other members must know: where this rank's new rings lie; and the id, generation, number of calls and balance
    /// of messages of the idle communicator that it offers (all 0: it offers none).
    pub(crate) fn row(&mut self) -> [u64; ROW] {
        self.published = true;
        match &self.offer {
            None => [self.block, 0, 0, 0, 0],
            Some((id, Idle { runs: m, .. })) => {
                [self.block, id.0, u64::from(m.generation), m.calls, m.balance]
            }
        }
    }

    /// All members know that none of them makes the communicator: so nobody has used the new rings, and they are freed at once.
    pub(crate) fn withdraw(mut self) {
        self.published = false;
    }

    /// Makes the communicator, from the rows of all members in order: the next generation of the idle one, if all offer
    /// the same one, with the same number of calls made and every message received; else one of new rings. All members have
    /// the same rows, so they decide alike. Returns the communicator, and the id of its rings.
    pub(crate) fn accept(
        mut self,
        name: String,
        rows: &[[u64; ROW]],
    ) -> Result<(Arc<Endpoint>, CommId), Error> {
        let (world, members) = (self.world.clone(), std::mem::take(&mut self.members));
        let offered = rows.iter().all(|row| row[1] != 0 && row[1..4] == rows[0][1..4]);
        let balanced = rows.iter().fold(0, |sum: u64, row| sum.wrapping_add(row[4])) == 0;
        let again = if offered && balanced { self.offer.take() } else { None };
        let (rings, lines) = match again {
            Some((rings, idle)) => {
                world.pool.state.lock().hits += 1;
                self.rings = false;
                world.discard(self.id);
                (rings, LinksFrom::IdleRuns(idle.runs))
            }
            None => {
                world.pool.state.lock().misses += 1;
                self.rings = false;
                (self.id, LinksFrom::NewRings(rows.iter().map(|row| row[0]).collect()))
            }
        };
        tracing::debug!(rank = world.rank, comm = self.id.0, rings = rings.0, "communicator made");
        match world.endpoint(self.id, name, members, lines) {
            Ok(endpoint) => Ok((endpoint, rings)),
            Err(error) => {
                world.retire(rings, None);
                Err(error)
            }
        }
    }
}

impl Drop for Proposal {
    fn drop(&mut self) {
        if forked::is_forked() {
            return;
        }
        if let Some((id, idle)) = self.offer.take() {
            self.world.pool.state.lock().evictions += 1;
            self.world.retire(id, Some(idle.runs));
        }
        if self.rings {
            match self.published {
                // The other members may have made the communicator.
                true => self.world.retire(self.id, None),
                false => self.world.discard(self.id),
            }
        }
    }
}
