//! Chain: each rank passes the data on to the next, slice by slice, so that all links are busy at once.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | broadcast | `n-1` | `count` | pipelined chain: Pješivac-Grbović et al., "Performance analysis of MPI collective operations", Cluster Computing 10, 2007 |
//! | reduce | `n-1` | `count` | the same |
//! | scan, exscan | `n-1` | `count` | linear: Sanders, Träff, "Parallel prefix (scan) algorithms for MPI", EuroPVM/MPI 2006 |
//!
//! The chain of broadcast and reduce begins at the root, and goes on at rank 0 after the last rank: so a reduce combines in
//! rank order only if the root is rank 0. Scans go from rank 0 up, and combine in rank order. A plan has one chunk; the
//! executor cuts it into slices.
//!
//! `finish` is false in every scan: an average would need another divisor on each rank, as the ranks' results have different
//! numbers of contributions. The caller refuses an average of a scan.

use crate::shape::{keep, send};
use crate::{Layout, Operand, Plan, Rank, Shape, Step};

/// The data go from the root to the rank after it, and so on.
pub(super) fn broadcast(s: &Shape) -> Plan {
    let v = s.past_root();
    let to: Vec<Rank> = if v < s.n - 1 { vec![s.right()] } else { vec![] };
    let step = match v {
        0 => Step { dst: (!s.in_place).then(|| s.out(0)), ..send(s.own(0), to) },
        _ => Step { send: to, ..keep(Operand::Recv(s.before(1)), s.out(0)) },
    };
    s.split(1, vec![step])
}

/// Sums go towards the root: each rank combines its own data with the sum from the rank after it, in this order. The sum that
/// it sends on is only in the hand (`compile.rs`), not in memory.
pub(super) fn reduce(s: &Shape) -> Plan {
    let v = s.past_root();
    let both = || vec![s.own(0), Operand::Recv(s.right())];
    let step = match v {
        0 => Step { operands: both(), dst: Some(s.out(0)), finish: true, ..Step::default() },
        _ if v == s.n - 1 => send(s.own(0), vec![s.before(1)]),
        _ => Step { operands: both(), ..send(s.own(0), vec![s.before(1)]) },
    };
    s.split(1, vec![step])
}

/// Each rank adds its own data to the sum from the rank before it, stores the result, and sends it to the next rank.
pub(super) fn scan(s: &Shape) -> Plan {
    let to: Vec<Rank> = if s.rank < s.n - 1 { vec![s.rank + 1] } else { vec![] };
    let step = match s.rank {
        0 => Step { dst: (!s.in_place).then(|| s.out(0)), ..send(s.own(0), to) },
        r => Step {
            operands: vec![Operand::Recv(r - 1), s.own(0)],
            dst: Some(s.out(0)),
            send: to,
            ..Step::default()
        },
    };
    s.split(1, vec![step])
}

/// The sum from the rank before is this rank's result; with its own data added it goes to the next rank. In place, the
/// result overwrites the rank's own data, so these are copied to scratch memory first.
pub(super) fn exscan(s: &Shape) -> Plan {
    let (next, aside) = (s.rank + 1, s.scratch(0));
    let last = next == s.n;
    if s.rank == 0 {
        return s.split(1, vec![send(s.own(0), vec![next])]);
    }
    let take = keep(Operand::Recv(s.rank - 1), s.out(0));
    let pass = |own| Step { operands: vec![Operand::Own(s.out(0)), own], ..send(own, vec![next]) };
    match (last, s.in_place) {
        (true, _) => s.split(1, vec![take]),
        (false, false) => s.split(1, vec![take, pass(s.own(0))]),
        (false, true) => {
            let steps = vec![keep(s.own(0), aside), take, pass(Operand::Own(aside))];
            s.split(1, steps).and_scratch(Layout::Split { parts: 1 })
        }
    }
}
