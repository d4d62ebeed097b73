//! One shot: whoever has something sends all of it to whoever needs it. One hop.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | all_reduce | 1 | `(n-1) * count`; each rank reduces everything, in rank order | all-to-all broadcast, then local reduction: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", 2007; "one-shot" in the GPU libraries |
//! | broadcast | 1 | the root `(n-1) * count` | flat tree, the same |
//! | reduce | 1 | `count`; the root reduces in rank order | flat tree, the same |
//! | scan, exscan | 1 | `(n-1-rank) * count`; each rank reduces what is before it, in rank order | the definition (MPI 4.1, 6.11) |
//!
//! The naive all_reduce is a reduce to rank 0, then a broadcast from there: 2 hops, and rank 0 sends `(n-1) * count`.
//! It is the obvious first implementation, and the baseline for the others.

use crate::shape::{keep, send};
use crate::{Operand, Plan, Rank, Shape, Step};

/// Every rank sends its input to all others, and all reduce in rank order, so all get the same bits.
///
/// In place, the result overwrites what is being sent, so it waits in the hand (`compile.rs`) until all receivers have released the input.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    s.split(1, vec![send(s.own(0), s.others()), reduction(s)])
}

/// All send to rank 0, which reduces in rank order and sends to all.
pub(super) fn naive(s: &Shape) -> Plan {
    if s.rank == 0 {
        return s.split(1, vec![Step { send: s.others(), ..reduction(s) }]);
    }
    s.split(1, vec![send(s.own(0), vec![0]), keep(Operand::Recv(0), s.out(0))])
}

/// Each rank sends its input to all ranks after it, and reduces the inputs of all ranks before it, in a scan (`own`) also its own.
///
/// `finish` is false in every scan: results differ in how many contributions they hold, and an average of a scan is
/// refused by the caller.
pub(super) fn prefix(s: &Shape, own: bool) -> Plan {
    let later: Vec<Rank> = (s.rank + 1..s.n).collect();
    let mut operands: Vec<_> = (0..s.rank).map(Operand::Recv).collect();
    operands.extend(own.then(|| s.own(0)));
    let mut steps = Vec::new();
    if s.rank == 0 && own && !s.in_place {
        steps.push(Step { send: later, ..keep(s.own(0), s.out(0)) });
    } else {
        steps.extend((!later.is_empty()).then(|| send(s.own(0), later)));
        if s.rank > 0 {
            steps.push(Step { operands, dst: Some(s.out(0)), ..Step::default() });
        }
    }
    s.split(1, steps)
}

/// The root sends to all.
pub(super) fn broadcast(s: &Shape) -> Plan {
    let step = if s.rank == s.root {
        Step { dst: (!s.in_place).then(|| s.out(0)), ..send(s.own(0), s.others()) }
    } else {
        keep(Operand::Recv(s.root), s.out(0))
    };
    s.split(1, vec![step])
}

/// All send to the root.
pub(super) fn reduce(s: &Shape) -> Plan {
    s.split(1, vec![if s.rank == s.root { reduction(s) } else { send(s.own(0), vec![s.root]) }])
}

fn reduction(s: &Shape) -> Step {
    Step { operands: s.in_rank_order(s.own(0)), dst: Some(s.out(0)), finish: true, ..Step::default() }
}
