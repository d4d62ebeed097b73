//! Halving and doubling on a circulant graph: partners at distance 1, 2, 4, ... or ..., 4, 2, 1, for any number of ranks.
//!
//! | collective | algorithm | hops | a rank sends | source |
//! |---|---|---|---|---|
//! | all_gather | recursive doubling | `floor(log2 n)` | `(n-1) * count` | Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11), 1997 |
//! | reduce_scatter | recursive halving | `floor(log2 n)` | `(n-1) * count` | Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024 |
//! | all_reduce | halving, then doubling | `2 floor(log2 n)` | `2 (n-1)/n * count` | the same; for powers of two Rabenseifner, "Optimization of collective reduction operations", ICCS 2004 |
//!
//! If n is not a power of two, ranks need not pair up first (in recursive doubling they do), and none idles. Block b goes out from rank b along a
//! tree: the rank `b + d` gets it from the rank `b + e` (both mod n), where e is d without its highest bit. Sums for block b come in along
//! the same tree. Each block has its place in memory, so blocks are never shifted; in the source they are. (There are `ceil(log2 n)` distances, but
//! no block travels all of them unless n is a power of two: so there are `floor(log2 n)` hops.)
//!
//! Sums are combined in the order of that tree, which is not rank order. One rank finishes each block, and all get that rank's
//! bits.

use crate::shape::{keep, send};
use crate::spread::first;
use crate::{Kind, Layout, Operand, Plan, Rank, Shape, Step};

/// Each block goes out along its tree.
pub(super) fn all_gather(s: &Shape) -> Plan {
    let mut steps = vec![first(s, set(further(s, 0)))];
    steps.extend((1..s.n).map(|d| outwards(s, d)));
    s.whole(Kind::AllGather, steps)
}

/// The sums for each block come in along its tree, to the rank that the block belongs to.
///
/// In place, a sum that is only sent on is stored in its block: **some of the other ranks' blocks are overwritten**. Out of
/// place it is stored in scratch memory. (If it were only in the hand, `compile.rs`, the plan would deadlock once a block has three
/// slices.)
pub(super) fn reduce_scatter(s: &Shape) -> Plan {
    // The sums for the ranks up to this distance before us pass through us.
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

/// The reduce-scatter, then the all-gather. A partial sum is stored in the output, where later the result of its chunk lies.
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

/// Receives the block of the rank `d` before us from the rank nearer to it in the tree, stores it and sends it further out.
fn outwards(s: &Shape, d: usize) -> Step {
    Step { send: set(further(s, d)), ..keep(Operand::Recv(nearer(s, d)), s.out(s.before(d))) }
}

/// Adds to our own data for the rank `d` before us the sums that come from further out, and sends the result nearer to it.
fn inwards(s: &Shape, d: usize) -> Step {
    let own = s.own(s.before(d));
    let operands = [own].into_iter().chain(further(s, d).map(Operand::Recv)).collect();
    Step { operands, ..send(own, if d > 0 { vec![nearer(s, d)] } else { vec![] }) }
}

/// The ranks to which we send the block of the rank `d` before us, and from which we get sums for it.
fn further(s: &Shape, d: usize) -> impl Iterator<Item = Rank> + use<> {
    let (n, rank) = (s.n, s.rank);
    let bits = usize::BITS - d.leading_zeros();
    (bits..).map(|k| 1 << k).take_while(move |far| d + far < n).map(move |far| (rank + far) % n)
}

/// The rank from which we get the block of the rank `d` before us, and to which we send our sum for it; `d` is not 0.
fn nearer(s: &Shape, d: usize) -> Rank {
    s.before(1 << d.ilog2())
}

fn set(ranks: impl Iterator<Item = Rank>) -> Vec<Rank> {
    let mut ranks: Vec<_> = ranks.collect();
    ranks.sort_unstable();
    ranks
}
