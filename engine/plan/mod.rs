//! Collectives as plans: pure functions from a group's shape to what one rank does, and a checker for them.
//!
//! [`plan`] makes one rank's [`Plan`]; [`Program::compile`] adds what an executor needs to run it;
//! [`check::check`] runs the plans of all ranks symbolically, without any buffering, and says exactly
//! what is wrong with them; [`choose::choose`] picks an algorithm. Nothing here does I/O or knows of bytes.

pub mod check;
pub mod choose;
pub mod compile;
pub mod mutate;
pub mod shape;
pub mod step;

mod direct;
mod dissemination;
mod doubling;
mod one_shot;
mod ring;
mod spread;

#[cfg(test)]
mod tests;

pub use crate::types::{Algo, Kind, Rank};
pub use choose::{Env, choose};
pub use compile::{Node, Program};
pub use shape::{Shape, Unsuitable};
pub use step::{At, INPUT, Layout, OUTPUT, Operand, Plan, SCRATCH, Slot, Step};

/// The algorithms that [`plan`] knows for a collective; the first is a safe choice at any size.
pub const fn algorithms(kind: Kind) -> &'static [Algo] {
    match kind {
        Kind::AllReduce => &[Algo::Direct, Algo::OneShot, Algo::Ring, Algo::RecursiveDoubling],
        Kind::Broadcast | Kind::Reduce => &[Algo::Direct, Algo::OneShot],
        Kind::AllGather | Kind::ReduceScatter => &[Algo::Direct, Algo::Ring],
        Kind::Barrier => &[Algo::Dissemination],
        Kind::Gather | Kind::Scatter | Kind::AllToAll | Kind::Scan | Kind::ExScan => &[],
    }
}

/// Whether each result is combined in the order of ranks.
pub const fn keeps_rank_order(_kind: Kind, algo: Algo) -> bool {
    matches!(algo, Algo::OneShot | Algo::Direct | Algo::RecursiveDoubling)
}

/// Whether each result is one step over all ranks, in the order of ranks.
pub const fn deterministic(_kind: Kind, algo: Algo) -> bool {
    matches!(algo, Algo::OneShot | Algo::Direct)
}

/// One rank's plan of `kind` by `algo`.
///
/// Out of place it reads [`INPUT`] and writes [`OUTPUT`]; in place it uses only [`OUTPUT`], which holds the
/// input at the start. Chunks of the slots:
///
/// | collective | input | output | in place |
/// |---|---|---|---|
/// | all_reduce, reduce, broadcast | `Split` | the same `Split` | |
/// | all_gather | `Split{1}` | `Blocks{n}` | the input is block `rank` |
/// | reduce_scatter | `Blocks{n}` | `Split{1}` | output `Blocks{n}`, the result is block `rank` |
/// | barrier | | `Split{1}`: a token, combined by "or" | always |
///
/// In a reduce, ranks that are not the root write nothing. In a reduce_scatter in place, the blocks of
/// other ranks keep their contents by [`Algo::Direct`] and are overwritten by [`Algo::Ring`].
///
/// # Errors
/// [`Unsuitable`] if the algorithm is not one of [`algorithms`] (so never [`Algo::Auto`]) or the shape is
/// not a group: no ranks, or a rank or root outside it.
pub fn plan(kind: Kind, algo: Algo, shape: &Shape) -> Result<Plan, Unsuitable> {
    let no = |why: String| Err(Unsuitable { kind, algo, why });
    if algo == Algo::Auto {
        return no("choose an algorithm first".into());
    }
    if shape.rank >= shape.n || (kind.rooted() && shape.root >= shape.n) {
        return no(format!("rank {} or root {} outside a group of {}", shape.rank, shape.root, shape.n));
    }
    let shape = &Shape { in_place: shape.in_place || kind == Kind::Barrier, ..*shape };
    Ok(match (kind, algo) {
        _ if !algorithms(kind).contains(&algo) => {
            let names: Vec<_> = algorithms(kind).iter().map(|a| a.name()).collect();
            return no(format!("there is no such plan; there is {}", names.join(", ")));
        }
        _ if shape.n == 1 => shape.alone(kind),
        (Kind::AllReduce, Algo::OneShot) => one_shot::all_reduce(shape),
        (Kind::AllReduce, Algo::Direct) => direct::all_reduce(shape),
        (Kind::AllReduce, Algo::Ring) => ring::all_reduce(shape),
        (Kind::AllReduce, _) => doubling::all_reduce(shape),
        (Kind::Broadcast, Algo::OneShot) => one_shot::broadcast(shape),
        (Kind::Broadcast, _) => spread::broadcast(shape),
        (Kind::Reduce, Algo::OneShot) => one_shot::reduce(shape),
        (Kind::Reduce, _) => direct::reduce(shape),
        (Kind::AllGather, Algo::Ring) => ring::all_gather(shape),
        (Kind::AllGather, _) => spread::all_gather(shape),
        (Kind::ReduceScatter, Algo::Ring) => ring::reduce_scatter(shape),
        (Kind::ReduceScatter, _) => direct::reduce_scatter(shape),
        (Kind::Barrier, _) => dissemination::barrier(shape),
        _ => return no("there is no such plan yet".into()),
    })
}
