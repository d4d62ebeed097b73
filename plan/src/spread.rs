//! `direct` for the collectives that only copy: each rank sends each piece straight to the ranks that need it.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | broadcast (scatter + all-gather) | 2 | the root `2 (n-1)/n * count`, others `(n-2)/n * count` | Barnett et al., "Interprocessor collective communication library (InterCom)", 1994; here both halves are direct |
//! | all_gather | 1 | `(n-1) * count` | Chan et al., "Collective communication: theory, practice, and experience", 2007 |
//! | gather | 1 | `count` | flat tree, the same |
//! | scatter | 1 | the root `(n-1) * count` | flat tree, the same |
//! | all_to_all | 1 | `(n-1) * count` | "linear": Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997 |

use crate::shape::{keep, send};
use crate::{Kind, Operand, Plan, Rank, Shape, Step};

/// The root sends chunk p to rank p, which sends it to all others but the root; the root's own chunk goes straight to all.
pub(super) fn broadcast(s: &Shape) -> Plan {
    let mut steps = Vec::with_capacity(s.n);
    if s.rank == s.root {
        let dst = |chunk| (!s.in_place).then(|| s.out(chunk));
        steps.extend(s.onwards().map(|p| Step { dst: dst(p), ..send(s.own(p), vec![p]) }));
        steps.push(Step { dst: dst(s.root), ..send(s.own(s.root), s.others()) });
    } else {
        let to = (0..s.n).filter(|&p| p != s.rank && p != s.root).collect();
        steps.push(Step { send: to, ..keep(Operand::Recv(s.root), s.out(s.rank)) });
        steps.extend(s.onwards().map(|p| keep(Operand::Recv(p), s.out(p))));
    }
    s.split(s.n, steps)
}

/// Everyone sends its block to everyone.
pub(super) fn all_gather(s: &Shape) -> Plan {
    let mut steps = vec![first(s, s.others())];
    steps.extend(s.onwards().map(|p| keep(Operand::Recv(p), s.out(p))));
    s.whole(Kind::AllGather, steps)
}

/// Sends our own block; out of place, also copies it to its place in the output.
pub(super) fn first(s: &Shape, to: Vec<usize>) -> Step {
    if s.in_place { send(s.own(s.rank), to) } else { Step { dst: Some(s.out(s.rank)), ..send(s.own(0), to) } }
}

/// Everyone sends its block to the root.
pub(super) fn gather(s: &Shape) -> Plan {
    let mut steps = Vec::new();
    if s.rank == s.root {
        steps.extend((!s.in_place).then(|| keep(s.own(0), s.out(s.root))));
        steps.extend(s.onwards().map(|p| keep(Operand::Recv(p), s.out(p))));
    } else {
        steps.push(send(s.own(0), vec![s.root]));
    }
    s.whole(Kind::Gather, steps)
}

/// The root sends each its block.
pub(super) fn scatter(s: &Shape) -> Plan {
    let mut steps = Vec::new();
    if s.rank == s.root {
        steps.extend(s.onwards().map(|p| send(s.own(p), vec![p])));
        steps.extend((!s.in_place).then(|| keep(s.own(s.root), s.out(0))));
    } else {
        steps.push(keep(Operand::Recv(s.root), s.out(0)));
    }
    s.whole(Kind::Scatter, steps)
}

/// Sends all blocks at once, the right neighbour's first, then receives all, the left neighbour's first.
pub(super) fn all_to_all(s: &Shape) -> Plan {
    let mut steps = Vec::with_capacity(2 * s.n);
    steps.extend(s.onwards().map(|p| send(s.own(p), vec![p])));
    steps.extend((!s.in_place).then(|| keep(s.own(s.rank), s.out(s.rank))));
    steps.extend((1..s.n).map(|k| taken(s, s.before(k))));
    s.whole(Kind::AllToAll, steps)
}

/// Receives block `from` of an all_to_all. In place it replaces the block that we send to that rank: the two ranks swap.
pub(super) fn taken(s: &Shape, from: Rank) -> Step {
    Step { early: s.in_place, ..keep(Operand::Recv(from), s.out(from)) }
}
