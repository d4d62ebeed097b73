//! Tests of the plans, and of the checker: that it finds no fault in any plan, and finds every fault that is put in.

mod all;
mod broken;
mod costs;
mod lending;
mod mutants;
mod order;
mod refused;
mod table;
mod varied;

use super::{Algo, Kind, Plan, Rank, Shape, algorithms, goes_whole, plan, suitable};

/// The plans of all ranks, two of them on each host.
fn plans(kind: Kind, algo: Algo, n: usize, root: Rank, in_place: bool) -> Vec<Plan> {
    plans_of(kind, algo, &Shape { n, root, in_place, hosts: &in_pairs(n), ..Shape::default() })
}

/// The plans of all ranks of this shape.
fn plans_of(kind: Kind, algo: Algo, shape: &Shape) -> Vec<Plan> {
    (0..shape.n).map(|rank| plan(kind, algo, &Shape { rank, ..*shape }).expect("a plan")).collect()
}

fn in_pairs(n: usize) -> Vec<u32> {
    (0..n as u32).map(|rank| rank / 2).collect()
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

/// The values of `in_place` to try. A barrier is always in place.
fn places(kind: Kind) -> &'static [bool] {
    if kind == Kind::Barrier { &[true] } else { &[false, true] }
}

/// Every way to carry out a collective in a group of `n`.
fn cases(kind: Kind, n: usize) -> impl Iterator<Item = (Algo, Rank, bool)> {
    let hosts = in_pairs(n);
    let fits =
        move |algo: &&Algo| suitable(kind, **algo, &Shape { n, hosts: &hosts, ..Shape::default() }).is_ok();
    algorithms(kind).iter().filter(fits).flat_map(move |&algo| {
        roots(kind, n).into_iter().flat_map(move |root| places(kind).iter().map(move |&p| (algo, root, p)))
    })
}
