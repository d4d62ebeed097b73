//! Faults planted on purpose, for this repository's own tests.

use parking_lot::Mutex;

pub use crate::link::waits::{Point, Wait, is_stopped, slow_readers, stop_at, take_away};

use crate::plan::mutate::{self, Mutation};
use crate::plan::{Kind, Plan, Rank};

static PLANTED: Mutex<Option<(Kind, Rank, usize, Mutation)>> = Mutex::new(None);

/// From now on, plans of `kind` on `rank` are broken at `step` (`None`: no plan is).
pub fn plant(mutation: Option<(Kind, Rank, usize, Mutation)>) {
    *PLANTED.lock() = mutation;
}

pub(crate) fn mutated(kind: Kind, rank: Rank, mut plan: Plan) -> Plan {
    if let Some((k, r, step, mutation)) = &*PLANTED.lock()
        && (*k, *r) == (kind, rank)
    {
        mutate::apply(&mut plan, *step, mutation);
    }
    plan
}
