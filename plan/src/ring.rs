//! Ring: every rank talks to its two neighbours only, and every wire carries as few bytes as possible.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | all_reduce | `2 (n-1)` | `2 (n-1)/n * count` | Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009 |
//! | all_gather | `n-1` | `(n-1) * count` | Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005 |
//! | reduce_scatter | `n-1` | `(n-1) * count` | the first half of the all_reduce |
//!
//! A chunk is summed in ring order from the rank where it starts, so the rounding depends on the chunk's index. But one rank
//! finishes it, and all get that rank's bits. Every step that receives and sends on stores what it sends in `dst`: a ring of steps
//! that keep it only in the hand (`compile.rs`) deadlocks as soon as a chunk has more than one slice.

use crate::shape::{keep, send};
use crate::spread::first;
use crate::{Kind, Operand, Plan, Shape, Step};

/// Chunk c starts at rank c and is finished by rank c - 1, then goes round once more.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let mut steps = vec![send(s.own(s.rank), vec![s.right()])];
    for k in 1..s.n {
        let chunk = s.before(k);
        steps.push(Step { dst: Some(s.out(chunk)), finish: k == s.n - 1, ..add(s, chunk) });
    }
    for k in s.n..2 * s.n - 1 {
        let to = if k < 2 * s.n - 2 { vec![s.right()] } else { vec![] };
        steps.push(Step { send: to, ..keep(Operand::Recv(s.before(1)), s.out(s.before(k))) });
    }
    s.split(s.n, steps)
}

/// Each block goes round once.
pub(super) fn all_gather(s: &Shape) -> Plan {
    let mut steps = vec![first(s, vec![s.right()])];
    for k in 1..s.n {
        let to = if k < s.n - 1 { vec![s.right()] } else { vec![] };
        steps.push(Step { send: to, ..keep(Operand::Recv(s.before(1)), s.out(s.before(k))) });
    }
    s.whole(Kind::AllGather, steps)
}

/// Block b starts at rank b + 1 and arrives, complete, at rank b.
///
/// In place a partial sum is stored in its block of the output: **other ranks' blocks are overwritten**. Out of place the output
/// has one chunk: every partial sum is stored there until it has been sent, and the next one is gathered in the hand meanwhile.
/// Where blocks differ in length, that chunk does not fit the other blocks: each partial sum is then stored in scratch memory.
pub(super) fn reduce_scatter(s: &Shape) -> Plan {
    let lent = s.varied && !s.in_place && s.n > 2;
    let mut steps = vec![send(s.own(s.before(1)), vec![s.right()])];
    for k in 1..s.n {
        let (block, last) = (s.before(k + 1), k == s.n - 1);
        let dst = match (s.in_place, lent && !last) {
            (true, _) => s.out(block),
            (_, true) => s.scratch(block),
            _ => s.out(0),
        };
        let step = Step { dst: Some(dst), finish: last, ..add(s, block) };
        steps.push(if last { Step { send: vec![], ..step } } else { step });
    }
    let plan = s.whole(Kind::ReduceScatter, steps);
    if lent { plan.and_scratch(s.blocks()) } else { plan }
}

/// Adds our own chunk to what the left neighbour sends, and sends the sum to the right neighbour.
pub(super) fn add(s: &Shape, chunk: usize) -> Step {
    Step {
        operands: vec![Operand::Recv(s.before(1)), s.own(chunk)],
        send: vec![s.right()],
        ..Step::default()
    }
}
