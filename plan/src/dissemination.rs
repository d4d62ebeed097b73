//! Dissemination: in round k each rank tells the one `2^k` further on all it has heard.
//!
//! barrier: `ceil(log2 n)` hops; a rank sends one token per hop.
//! Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
//!
//! A token that has heard of a rank twice (n not a power of two) is no harm: tokens are combined by "or".
//! The token is sent from where the next one is written: it is gathered in the hand.

use crate::shape::send;
use crate::{Operand, Plan, Rank, Shape, Step};

/// Nobody leaves before everybody has come.
pub(super) fn barrier(s: &Shape) -> Plan {
    let rounds = (s.n - 1).ilog2() + 1;
    let to = |k: u32| -> Rank { (s.rank + (1 << k)) % s.n };
    let mut steps = vec![send(s.own(0), vec![to(0)])];
    for k in 0..rounds {
        let last = k + 1 == rounds;
        steps.push(Step {
            operands: vec![Operand::Recv(s.before(1 << k)), s.own(0)],
            dst: Some(s.out(0)),
            send: if last { vec![] } else { vec![to(k + 1)] },
            finish: last,
            ..Step::default()
        });
    }
    s.split(1, steps)
}
