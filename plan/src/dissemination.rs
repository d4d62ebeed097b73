//! Dissemination: in round k each rank sends what it has heard so far to the rank `2^k` after it.
//!
//! barrier: `ceil(log2 n)` hops; a rank sends one token per hop.
//! Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
//!
//! If n is not a power of two, a token may contain a rank twice. That does no harm: tokens are combined by "or". The next token is
//! written where this one is sent from, so it waits in the hand (`compile.rs`) until this one has been released.

use crate::shape::send;
use crate::{Operand, Plan, Rank, Shape, Step};

/// No rank's last step is over before all ranks have begun.
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
