//! Pairwise exchange: in each round ranks are paired, and each pair swaps what is the other's.
//!
//! all_to_all: 1 hop; a rank sends `(n-1) * count`.
//! Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005. There
//! partners are `rank xor k`, or different ones to send and to receive where n is no power of two; here rank r's partner
//! in round k is `k - r` (mod n), which pairs any number of ranks (Kirkman's round robin) and is what a swap in place
//! needs.
//!
//! Nothing but the order tells it from `direct`: rounds do not wait for each other.

use crate::shape::{keep, send};
use crate::spread::taken;
use crate::{Kind, Plan, Shape};

/// A block to and a block from the partner of each round.
pub(super) fn all_to_all(s: &Shape) -> Plan {
    let mut steps = Vec::with_capacity(2 * s.n);
    for k in 0..s.n {
        let partner = (s.n + k - s.rank) % s.n;
        if partner != s.rank {
            steps.extend([send(s.own(partner), vec![partner]), taken(s, partner)]);
        } else if !s.in_place {
            steps.push(keep(s.own(partner), s.out(partner)));
        }
    }
    s.whole(Kind::AllToAll, steps)
}
