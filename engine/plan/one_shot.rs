//! One shot: whoever has something sends all of it to whoever needs it. One hop.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | all_reduce | 1 | `(n-1) * count`; each rank reduces everything, in rank order | all-to-all broadcast, then local reduction: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", 2007; "one-shot" in the GPU libraries |
//! | broadcast | 1 | the root `(n-1) * count` | flat tree, the same |
//! | reduce | 1 | `count`; the root reduces in rank order | flat tree, the same |

use super::shape::{keep, send};
use super::{Operand, Plan, Shape, Step};

/// Send all to all; everyone reduces in rank order, so all get the same bits.
///
/// In place, the result overwrites what is being sent: the reduction is gathered in the hand.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    s.split(1, vec![send(s.own(0), s.others()), reduction(s)])
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
