//! Halving and doubling on a circulant graph: partners at distance 1, 2, 4, ... (or back), any number of ranks.
//!
//! | collective | algorithm | hops | a rank sends | source |
//! |---|---|---|---|---|
//! | all_gather | recursive doubling | `floor(log2 n)` | `(n-1) * count` | Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11), 1997 |
//! | reduce_scatter | recursive halving | `floor(log2 n)` | `(n-1) * count` | Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024 |
//! | all_reduce | halving, then doubling | `2 floor(log2 n)` | `2 (n-1)/n * count` | the same; for powers of two Rabenseifner, "Optimization of collective reduction operations", ICCS 2004 |
//!
//! Where n is no power of two nothing is folded and nobody idles. Block b goes out from rank b along one tree: the rank
//! at distance d (counted onwards from b) has it from distance d without its highest bit. A sum comes in along the same
//! tree. A block has a place of its own, so nothing is ever shifted about as in the source. (There are `ceil(log2 n)`
//! distances, but no block travels all of them unless n is a power of two: hence the hops.)
//!
//! Sums are combined in the order of that tree, which is not the ranks'. Each block is finished by one rank, and all
//! get that rank's bits.

use crate::shape::{keep, send};
use crate::spread::first;
use crate::{Kind, Layout, Operand, Plan, Rank, Shape, Step};

/// Each block goes out along its tree.
pub(super) fn all_gather(s: &Shape) -> Plan {
    let mut steps = vec![first(s, set(further(s, 0)))];
    steps.extend((1..s.n).map(|d| outwards(s, d)));
    s.whole(Kind::AllGather, steps)
}

/// Each block comes in along its tree, to the rank whose it is.
///
/// A sum that is only sent on is kept in place in its own block: **some of the other ranks' blocks are overwritten**. Out
/// of place it is kept in lent memory. (In hands the plan would stop as soon as a block has three slices.)
pub(super) fn reduce_scatter(s: &Shape) -> Plan {
    // Sums of the ranks up to this distance before us pass through us.
    let inner = (1..s.n).take_while(|&d| further(s, d).next().is_some()).count();
    let place = |d: usize| match (s.in_place, s.varied) {
        (true, _) => s.out(s.before(d)),
        (false, true) => s.scratch(s.before(d)),
        (false, false) => s.scratch(d - 1),
    };
    let mut steps = Vec::with_capacity(s.n);
    steps.extend((1..s.n).rev().map(|d| Step { dst: (d <= inner).then(|| place(d)), ..inwards(s, d) }));
    let result = s.out(if s.in_place { s.rank } else { 0 });
    steps.push(Step { dst: Some(result), finish: true, ..inwards(s, 0) });
    let plan = s.whole(Kind::ReduceScatter, steps);
    match (s.in_place || inner == 0, s.varied) {
        (true, _) => plan,
        (false, true) => plan.and_scratch(s.blocks()),
        (false, false) => plan.and_scratch(Layout::Blocks { blocks: inner as u32 }),
    }
}

/// The one, then the other. A partial sum is kept where the result comes to lie.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let mut steps = Vec::with_capacity(2 * s.n);
    for d in (1..s.n).rev() {
        let step = inwards(s, d);
        steps.push(Step { dst: step.combines().then(|| s.out(s.before(d))), ..step });
    }
    let send = set(further(s, 0));
    steps.push(Step { dst: Some(s.out(s.rank)), finish: true, send, ..inwards(s, 0) });
    steps.extend((1..s.n).map(|d| outwards(s, d)));
    s.split(s.n, steps)
}

/// The block of the rank `d` before us: to us from nearer to it, and on.
fn outwards(s: &Shape, d: usize) -> Step {
    Step { send: set(further(s, d)), ..keep(Operand::Recv(nearer(s, d)), s.out(s.before(d))) }
}

/// Our own and all further sums for the rank `d` before us, on to nearer to it.
fn inwards(s: &Shape, d: usize) -> Step {
    let own = s.own(s.before(d));
    let operands = [own].into_iter().chain(further(s, d).map(Operand::Recv)).collect();
    Step { operands, ..send(own, if d > 0 { vec![nearer(s, d)] } else { vec![] }) }
}

/// Who gets from us the block of the rank `d` before us.
fn further(s: &Shape, d: usize) -> impl Iterator<Item = Rank> + use<> {
    let (n, rank) = (s.n, s.rank);
    let bits = usize::BITS - d.leading_zeros();
    (bits..).map(|k| 1 << k).take_while(move |far| d + far < n).map(move |far| (rank + far) % n)
}

/// From whom we get it.
fn nearer(s: &Shape, d: usize) -> Rank {
    s.before(1 << d.ilog2())
}

fn set(ranks: impl Iterator<Item = Rank>) -> Vec<Rank> {
    let mut ranks: Vec<_> = ranks.collect();
    ranks.sort_unstable();
    ranks
}
