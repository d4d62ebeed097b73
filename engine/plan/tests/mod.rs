//! The plans, the checker, and the checker's own checking.

mod all;
mod broken;
mod mutants;

use super::{Algo, Kind, Plan, Rank, Shape, algorithms, plan};

/// The plans of all ranks.
fn plans(kind: Kind, algo: Algo, n: usize, root: Rank, in_place: bool) -> Vec<Plan> {
    let shape = |rank| Shape { n, rank, root, in_place, ..Shape::default() };
    (0..n).map(|rank| plan(kind, algo, &shape(rank)).expect("a plan")).collect()
}

/// Roots worth trying: both ends, the middle, and all of a small group.
fn roots(kind: Kind, n: usize) -> Vec<Rank> {
    let mut roots = match n {
        _ if !kind.rooted() => vec![0],
        1..=5 => (0..n).collect(),
        _ => vec![0, n / 2, n - 1],
    };
    roots.dedup();
    roots
}

/// Every way to carry out a collective in a group of `n`.
fn cases(kind: Kind, n: usize) -> impl Iterator<Item = (Algo, Rank, bool)> {
    let places: &[bool] = if kind == Kind::Barrier { &[true] } else { &[false, true] };
    algorithms(kind).iter().flat_map(move |&algo| {
        roots(kind, n).into_iter().flat_map(move |root| places.iter().map(move |&p| (algo, root, p)))
    })
}
