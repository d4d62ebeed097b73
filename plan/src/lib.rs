//! Collectives as plans: pure functions that turn a group's shape into a list of steps for one rank, and a checker for these lists.
//!
//! [`plan`] makes one rank's [`Plan`]; [`Program::compile`] adds what an executor needs to run it;
//! [`check::check`] runs the plans of all ranks symbolically, without any buffering, and says exactly
//! what is wrong with them; [`choose::choose`] picks an algorithm. Nothing here does I/O or touches a buffer.

pub mod check;
pub mod choices;
pub mod choose;
pub mod compile;
pub mod lending;
pub mod mutate;
pub mod shape;
pub mod step;

mod binomial;
mod chain;
mod direct;
mod dissemination;
mod double_tree;
mod doubling;
mod halving;
mod kind;
mod link;
mod one_shot;
mod pairwise;
mod prefix;
mod promises;
mod ring;
mod scatter_all_gather;
mod spread;
mod tree;
mod two_level;

#[cfg(test)]
mod tests;

use tree::Tree;

pub use choose::{Env, SMALL, choose};
pub use compile::{Lending, Program, StepNode, goes_whole};
pub use kind::{Algo, Kind};
pub use lending::lending;
pub use link::LinkClass;
pub use promises::{algorithms, deterministic, keeps_rank_order, suitable};
pub use shape::{Shape, Unsuitable};
pub use step::{At, Holds, INPUT, Layout, Loan, OUTPUT, Operand, Plan, SCRATCH, Slot, Step};

/// A rank inside one group, `0..n`.
pub type Rank = usize;

/// The largest number of ranks in a group.
pub const MOST_RANKS: usize = 1 << 16;

/// The plan of one rank for the collective `kind` by the algorithm `algo`.
///
/// Out of place the plan reads [`INPUT`] and writes [`OUTPUT`]; in place it uses only [`OUTPUT`] of these two, which holds the
/// input at the start. How these slots are cut into chunks ([`Layout`]):
///
/// | collective | input | output | in place |
/// |---|---|---|---|
/// | all_reduce, reduce, broadcast | `Split` | the same `Split` | |
/// | scan, exscan | `Split{1}` | `Split{1}` | |
/// | all_gather | `Split{1}` | `Blocks{n}` | the input is block `rank` |
/// | reduce_scatter | `Blocks{n}` | `Split{1}` | output `Blocks{n}`, the result is block `rank` |
/// | gather | `Split{1}` | the root: `Blocks{n}`; others, never touched: `Split{1}` | the root's input is block `root`, the others' output `Split{1}` is their input |
/// | scatter | the root: `Blocks{n}`; others, never touched: `Split{1}` | `Split{1}` | the root's output `Blocks{n}` is its input and its result stays block `root`; others: `Split{1}` |
/// | all_to_all | `Blocks{n}` | `Blocks{n}` | block p goes to rank p, and what comes from rank p replaces it |
/// | barrier | | `Split{1}`: a token, combined by "or" | always |
///
/// If each rank has a count of its own ([`Shape::varied`]), `Table{n}` takes the place of `Blocks{n}`, and `Table{1}` that of
/// `Split{1}`. In an all_gather, a reduce_scatter, a gather or a scatter let rank b's count be `f(b)`: then block b has
/// `f(b)` elements, and the `Table{1}` of rank r has `f(r)`. In an all_to_all let rank r send `f(r, b)` elements to rank b:
/// then block b of rank r's input has `f(r, b)` elements, and block b of its output `f(b, r)`; in place these must be equal.
///
/// The plan of a rank may have a third slot, [`SCRATCH`], of `Split{1}`, `Split{n}`, `Blocks{k}` or, if varied, `Table{n}`, whose
/// chunk b has `f(b)` elements.
///
/// In a reduce only the root writes its output. In a reduce_scatter in place, [`Algo::Direct`] leaves the blocks of other ranks as
/// they are, and other algorithms may overwrite them. In a scan no step sets `finish`, as there is no average of a scan. In an
/// exscan rank 0 writes nothing.
///
/// # Errors
/// [`Unsuitable`] if [`suitable`] says so.
pub fn plan(kind: Kind, algo: Algo, shape: &Shape) -> Result<Plan, Unsuitable> {
    suitable(kind, algo, shape)?;
    let s = &Shape { in_place: shape.in_place || kind == Kind::Barrier, ..*shape };
    if s.n == 1 {
        return Ok(s.alone(kind));
    }
    Ok(match (kind, algo) {
        (Kind::AllReduce, Algo::OneShot) => one_shot::all_reduce(s),
        (Kind::AllReduce, Algo::Direct) => direct::all_reduce(s),
        (Kind::AllReduce, Algo::Ring) => ring::all_reduce(s),
        (Kind::AllReduce, Algo::RecursiveDoubling) => doubling::all_reduce(s),
        (Kind::AllReduce, Algo::HalvingDoubling) => halving::all_reduce(s),
        (Kind::AllReduce, Algo::DoubleBinaryTree) => double_tree::all_reduce(s),
        (Kind::AllReduce, Algo::Mst) => tree::all_reduce(s),
        (Kind::AllReduce, Algo::TwoLevel) => two_level::all_reduce(s),
        (Kind::AllReduce, _) => one_shot::naive(s),
        (Kind::Broadcast, Algo::OneShot) => one_shot::broadcast(s),
        (Kind::Broadcast, Algo::Binomial) => tree::broadcast(s, &Tree::binomial(s)),
        (Kind::Broadcast, Algo::Mst) => tree::broadcast(s, &Tree::minimum_spanning(s, s.root)),
        (Kind::Broadcast, Algo::Chain) => chain::broadcast(s),
        (Kind::Broadcast, Algo::ScatterAllGather) => scatter_all_gather::broadcast(s),
        (Kind::Broadcast, _) => spread::broadcast(s),
        (Kind::Reduce, Algo::OneShot) => one_shot::reduce(s),
        (Kind::Reduce, Algo::Binomial) => tree::reduce(s, &Tree::binomial(s)),
        (Kind::Reduce, Algo::Mst) => tree::reduce(s, &Tree::minimum_spanning(s, s.root)),
        (Kind::Reduce, Algo::Chain) => chain::reduce(s),
        (Kind::Reduce, Algo::ScatterAllGather) => scatter_all_gather::reduce(s),
        (Kind::Reduce, _) => direct::reduce(s),
        (Kind::AllGather, Algo::Ring) => ring::all_gather(s),
        (Kind::AllGather, Algo::RecursiveDoubling) => halving::all_gather(s),
        (Kind::AllGather, _) => spread::all_gather(s),
        (Kind::ReduceScatter, Algo::Ring) => ring::reduce_scatter(s),
        (Kind::ReduceScatter, Algo::RecursiveHalving) => halving::reduce_scatter(s),
        (Kind::ReduceScatter, _) => direct::reduce_scatter(s),
        (Kind::Gather, Algo::Binomial) => binomial::gather(s),
        (Kind::Gather, _) => spread::gather(s),
        (Kind::Scatter, Algo::Binomial) => binomial::scatter(s),
        (Kind::Scatter, _) => spread::scatter(s),
        (Kind::AllToAll, Algo::Pairwise) => pairwise::all_to_all(s),
        (Kind::AllToAll, _) => spread::all_to_all(s),
        (Kind::Scan, Algo::RecursiveDoubling) => prefix::scan(s),
        (Kind::Scan, Algo::OneShot) => one_shot::prefix(s, true),
        (Kind::Scan, _) => chain::scan(s),
        (Kind::ExScan, Algo::RecursiveDoubling) => prefix::exscan(s),
        (Kind::ExScan, Algo::OneShot) => one_shot::prefix(s, false),
        (Kind::ExScan, _) => chain::exscan(s),
        (Kind::Barrier, _) => dissemination::barrier(s),
    })
}
