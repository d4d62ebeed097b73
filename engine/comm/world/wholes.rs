//! This rank's ends of libraries' communicators (NCCL's `ncclComm_t`), left by communicators of allstream that nobody holds any more. They are
//! kept to be used again, as a library takes long to make one.
//!
//! A communicator that ended in peace leaves its end here ([`Wholes::keep`]). When the same members bind a communicator to the same
//! library again, in the same order and each to the device that it had, each tells the others the number of the end that it has kept. If
//! all have the same number, they use these ends again ([`SharedComm::open_whole`](super::super::SharedComm)). Else each rank drops its own.

use lru::LruCache;
use parking_lot::Mutex;

use crate::device::carriers::bound_to;
use crate::device::whole::BoundWhole;
use crate::exec::Endpoint;
use crate::types::Rank;

struct Idle {
    /// In order.
    members: Vec<Rank>,
    bound: BoundWhole,
}

/// The kept ends of a rank, by their numbers; the least recently used one is dropped first.
pub(crate) struct Wholes(Mutex<LruCache<u64, Idle>>);

impl Default for Wholes {
    fn default() -> Wholes {
        Wholes(Mutex::new(LruCache::unbounded()))
    }
}

impl Wholes {
    /// An endpoint has ended, and nobody holds it. If it ended in peace, its end of a library is kept. At most `capacity` ends are kept in all.
    pub(super) fn keep(&self, endpoint: &Endpoint, capacity: usize) {
        let bound = bound_to(endpoint).and_then(|bound| bound.whole.as_ref());
        let bound = bound.filter(|_| endpoint.health.first_cause().is_none());
        let Some(bound) = bound.filter(|bound| bound.whole.check().is_ok()) else { return };
        let idle = Idle { members: endpoint.config.members.clone(), bound: bound.clone() };
        let replaced = self.0.lock().put(bound.number, idle);
        drop(replaced);
        self.trim(capacity);
    }

    /// Drops the least recently used ends, until at most `capacity` are left.
    pub(super) fn trim(&self, capacity: usize) {
        loop {
            let least = {
                let mut idle = self.0.lock();
                if idle.len() > capacity { idle.pop_lru() } else { None }
            };
            if least.is_none() {
                return;
            }
        }
    }

    /// Takes out an end that these members could use again. Of several it takes the one with the lowest number: so all members take the same,
    /// in whatever order they dropped them.
    pub(crate) fn take(
        &self,
        members: &[Rank],
        library: &str,
        device: Option<[u8; 16]>,
    ) -> Option<BoundWhole> {
        let mut idle = self.0.lock();
        let is_alike = |idle: &Idle| {
            idle.members == members && idle.bound.device == device && idle.bound.whole.name() == library
        };
        let least = idle.iter().filter(|(_, idle)| is_alike(idle)).map(|(number, _)| *number).min()?;
        idle.pop(&least).map(|idle| idle.bound)
    }

    /// A rank has gone: drops the ends that it has a part in, as nobody can use them again.
    pub(super) fn forget_with(&self, rank: Rank) {
        let gone: Vec<Idle> = {
            let mut idle = self.0.lock();
            let with = idle.iter().filter(|(_, idle)| idle.members.contains(&rank));
            let with: Vec<u64> = with.map(|(number, _)| *number).collect();
            with.iter().filter_map(|number| idle.pop(number)).collect()
        };
        drop(gone);
    }
}
