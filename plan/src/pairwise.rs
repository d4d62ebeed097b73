//! Pairwise exchange: in each round the ranks form pairs, and the two of a pair exchange the blocks that they have for each other.
//!
//! all_to_all: 1 hop; a rank sends `(n-1) * count`.
//! Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005. There
//! rank r's partner is `r xor k`; where n is no power of two, a rank sends to one partner and receives from another. Here rank r's
//! partner in round k is `k - r` (mod n): these are pairs for every n (Kirkman's round robin), as an exchange in place requires.
//!
//! Pairwise exchange differs from `direct` only in the order of the steps: rounds do not wait for each other.

use crate::shape::{keep, send};
use crate::spread::taken;
use crate::{Kind, Plan, Shape};

/// In each round, sends the partner its block and receives one from it. Out of place, a rank copies its own block.
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
