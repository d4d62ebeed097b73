//! Which algorithms there are, when each can be used, and what it promises about the order in which it combines.

use crate::two_level;
use crate::{Algo, Kind, MOST_RANKS, Shape, Unsuitable};

/// The algorithms that [`super::plan`] knows for a collective; the first is a safe choice at any size.
pub const fn algorithms(kind: Kind) -> &'static [Algo] {
    match kind {
        Kind::AllReduce => &[
            Algo::Direct,
            Algo::OneShot,
            Algo::Ring,
            Algo::RecursiveDoubling,
            Algo::HalvingDoubling,
            Algo::DoubleBinaryTree,
            Algo::Mst,
            Algo::Naive,
            Algo::TwoLevel,
        ],
        Kind::Broadcast | Kind::Reduce => {
            &[Algo::Direct, Algo::OneShot, Algo::Binomial, Algo::Mst, Algo::Chain, Algo::ScatterAllGather]
        }
        Kind::AllGather => &[Algo::Direct, Algo::Ring, Algo::RecursiveDoubling],
        Kind::ReduceScatter => &[Algo::Direct, Algo::Ring, Algo::RecursiveHalving],
        Kind::Gather | Kind::Scatter => &[Algo::Direct, Algo::Binomial],
        Kind::AllToAll => &[Algo::Pairwise, Algo::Direct],
        Kind::Scan | Kind::ExScan => &[Algo::Chain, Algo::RecursiveDoubling, Algo::OneShot],
        Kind::Barrier => &[Algo::Dissemination],
    }
}

/// Whether [`super::plan`] has such a plan. The answer is the same on all ranks of a group.
///
/// # Errors
/// [`Unsuitable`], with the reason: the algorithm is not one of [`algorithms`] (so never [`Algo::Auto`]); the shape is not a
/// group (no ranks, more than [`MOST_RANKS`](crate::MOST_RANKS), a rank or root outside it); each rank has a count of its own, but
/// the collective or the algorithm has no such form; or, for [`Algo::TwoLevel`], there is one host, each host has one rank, or
/// [`Shape::hosts`] has a wrong length or numbers the hosts with a gap.
#[inline]
pub fn suitable(kind: Kind, algo: Algo, shape: &Shape) -> Result<(), Unsuitable> {
    let no = |why: String| Err(Unsuitable { kind, algo, why });
    if algo == Algo::Auto {
        return no("choose an algorithm first".into());
    }
    if shape.n > MOST_RANKS {
        return no(format!("a group of {}: at most {MOST_RANKS} ranks are possible", shape.n));
    }
    if shape.rank >= shape.n || (kind.rooted() && shape.root >= shape.n) {
        return no(format!("rank {} or root {} outside a group of {}", shape.rank, shape.root, shape.n));
    }
    if !algorithms(kind).contains(&algo) {
        let names: Vec<_> = algorithms(kind).iter().map(|a| a.name()).collect();
        return no(format!("there is no such plan; there is {}", names.join(", ")));
    }
    if shape.varied && !kind.varies() {
        return no("there is no form with a count for each rank".into());
    }
    if shape.varied && matches!(kind, Kind::Gather | Kind::Scatter) && algo != Algo::Direct {
        let why = "with a count for each rank only the root and that rank know it, so no other can pass it on; \
                   use direct";
        return no(why.into());
    }
    match algo {
        Algo::TwoLevel => two_level::unsuitable(shape).map_or(Ok(()), no),
        _ => Ok(()),
    }
}

/// Whether every result is combined in rank order, lower ranks first, so that the plan serves functions that are
/// associative but not commutative. True where nothing is combined. The checker proves it.
#[inline]
pub const fn keeps_rank_order(kind: Kind, algo: Algo) -> bool {
    match kind {
        Kind::AllReduce => !matches!(algo, Algo::Ring | Algo::HalvingDoubling | Algo::TwoLevel),
        // The first two wrap round the end of the group unless the root is rank 0; the third sums in a ring, whatever the root.
        Kind::Reduce => !matches!(algo, Algo::Binomial | Algo::Chain | Algo::ScatterAllGather),
        Kind::ReduceScatter => !matches!(algo, Algo::Ring | Algo::RecursiveHalving),
        _ => true,
    }
}

/// Whether one step combines all contributions to each result in rank order. The bits of the result then do not depend on the
/// size or on the number of chunks, and all algorithms of which this is true give the same bits. True where nothing is combined. The checker proves it.
#[inline]
pub const fn deterministic(kind: Kind, algo: Algo) -> bool {
    match kind {
        Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::Scan | Kind::ExScan => {
            matches!(algo, Algo::Direct | Algo::OneShot | Algo::Naive)
        }
        _ => true,
    }
}
