//! Gather and scatter along a binomial tree: the root talks to `ceil(log2 n)` ranks only.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | gather | `floor(log2 n)` | its subtree's blocks: at most about `n/2 * count` | Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005 |
//! | scatter | `floor(log2 n)` | the root `(n-1) * count` | the same |
//!
//! Ranks are counted from the root; the ranks of a subtree have consecutive numbers ([`Tree::binomial`]). Each block is a
//! message of its own; a rank that passes it on keeps it in scratch memory until then.

use crate::shape::{keep, send};
use crate::tree::{Tree, below};
use crate::{Kind, Layout, Operand, Plan, Rank, Shape, Step};

/// Blocks go up to the root, the block of the lowest number first.
pub(super) fn gather(s: &Shape) -> Plan {
    let (v, parent) = (s.past_root(), Tree::binomial(s).parent);
    let mut steps = Vec::new();
    match parent {
        Some(parent) => steps.push(send(s.own(0), vec![parent])),
        None => steps.extend((!s.in_place).then(|| keep(s.own(0), s.out(s.root)))),
    }
    for d in 1..below(v, s.n) {
        let dst = if v == 0 { s.out(s.real(d)) } else { s.scratch(d - 1) };
        let to = parent.into_iter().collect();
        steps.push(Step { send: to, ..keep(Operand::Recv(child(s, v, d)), dst) });
    }
    passing(s, Kind::Gather, steps)
}

/// Blocks go down from the root, the block of the highest number first: where n is a power of two, that block has the longest way.
pub(super) fn scatter(s: &Shape) -> Plan {
    let (v, parent) = (s.past_root(), Tree::binomial(s).parent);
    let mut steps = Vec::new();
    for d in (1..below(v, s.n)).rev() {
        let to = vec![child(s, v, d)];
        steps.push(match parent {
            Some(parent) => Step { send: to, ..keep(Operand::Recv(parent), s.scratch(d - 1)) },
            None => send(s.own(s.real(d)), to),
        });
    }
    match parent {
        Some(parent) => steps.push(keep(Operand::Recv(parent), s.out(0))),
        None => steps.extend((!s.in_place).then(|| keep(s.own(s.root), s.out(0)))),
    }
    passing(s, Kind::Scatter, steps)
}

/// The child of `v` whose subtree contains number `v + d`.
fn child(s: &Shape, v: usize, d: usize) -> Rank {
    s.real(v + (1 << d.ilog2()))
}

/// The plan of these steps, with scratch memory for the blocks that this rank passes on.
fn passing(s: &Shape, kind: Kind, steps: Vec<Step>) -> Plan {
    let blocks = below(s.past_root(), s.n) as u32 - 1;
    let plan = s.whole(kind, steps);
    if s.rank == s.root || blocks == 0 { plan } else { plan.and_scratch(Layout::Blocks { blocks }) }
}
