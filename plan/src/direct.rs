//! `direct` for the collectives that reduce: rank p gets chunk p straight from all ranks, and reduces it in rank order.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | all_reduce ("two-shot") | 2 | `2 (n-1)/n * count` | reduce-scatter + all-gather: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, with direct exchange |
//! | reduce | 2 | `count` (the root `(n-1)/n * count`) | reduce-scatter + gather, the same |
//! | reduce_scatter | 1 | `(n-1) * count` | pairwise exchange: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005 |
//!
//! One step combines each result in rank order, whatever the size and the link, so the bits are always the same.

use crate::shape::{keep, send};
use crate::{Kind, Operand, Plan, Shape, Step};

/// Chunk p goes to rank p, which reduces it and sends the result to all.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let mut steps = scatter(s);
    steps.push(Step { dst: Some(s.out(s.rank)), send: s.others(), ..reduction(s) });
    steps.extend(s.onwards().map(|p| keep(Operand::Recv(p), s.out(p))));
    s.split(s.n, steps)
}

/// Chunk p goes to rank p, which reduces it and sends the result to the root. A rank that is not the root has no memory for the
/// result, so the result is only in the hand (`compile.rs`).
pub(super) fn reduce(s: &Shape) -> Plan {
    let mut steps = scatter(s);
    if s.rank == s.root {
        steps.push(Step { dst: Some(s.out(s.rank)), ..reduction(s) });
        steps.extend(s.onwards().map(|p| keep(Operand::Recv(p), s.out(p))));
    } else {
        steps.push(Step { send: vec![s.root], ..reduction(s) });
    }
    s.split(s.n, steps)
}

/// Block p goes to rank p, which reduces it. In place the other blocks keep their contents.
pub(super) fn reduce_scatter(s: &Shape) -> Plan {
    let result = if s.in_place { s.rank } else { 0 };
    let mut steps = scatter(s);
    steps.push(Step { dst: Some(s.out(result)), ..reduction(s) });
    s.whole(Kind::ReduceScatter, steps)
}

fn scatter(s: &Shape) -> Vec<Step> {
    s.onwards().map(|p| send(s.own(p), vec![p])).collect()
}

fn reduction(s: &Shape) -> Step {
    Step { operands: s.in_rank_order(s.own(s.rank)), finish: true, ..Step::default() }
}
