//! Direct, the copying ones: each rank sends one piece straight to all who need it.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | broadcast (scatter + all-gather) | 2 | the root `2 (n-1)/n * count`, others `(n-2)/n * count` | Barnett et al., "Interprocessor collective communication library (InterCom)", 1994; here both halves are direct |
//! | all_gather | 1 | `(n-1) * count` | Chan et al., "Collective communication: theory, practice, and experience", 2007 |

use super::shape::{keep, send};
use super::{Layout, Operand, Plan, Shape, Step};

/// The root sends chunk p to p, which sends it to the others; the root's own chunk goes straight to all.
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
    gathering(s, steps)
}

/// Our own block on its way, and into its place if it is not there.
pub(super) fn first(s: &Shape, to: Vec<usize>) -> Step {
    if s.in_place { send(s.own(s.rank), to) } else { Step { dst: Some(s.out(s.rank)), ..send(s.own(0), to) } }
}

/// A plan with the layouts of an all_gather.
pub(super) fn gathering(s: &Shape, steps: Vec<Step>) -> Plan {
    s.over(Layout::Split { parts: 1 }, Layout::Blocks { blocks: s.n as u32 }, steps)
}
