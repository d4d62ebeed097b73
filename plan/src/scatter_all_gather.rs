//! Broadcast as scatter and all_gather, reduce as reduce_scatter and gather: no rank carries all of the data alone.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | broadcast | `n-1` | the root `2 (n-1)/n * count`, others at most `(n-1)/n * count` | Barnett et al., "Interprocessor collective communication library (InterCom)", 1994 (van de Geijn's): scatter, then a ring |
//! | reduce | `n` | `count` | Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, with a ring |
//!
//! What differs from `direct` are the rings: a rank talks to its neighbours and the root only. Scatter and gather are direct. The
//! sources use a tree for them; here the inner nodes of a tree would send one message for each chunk, and more bytes.

use crate::ring::add;
use crate::shape::{keep, send};
use crate::{Layout, Operand, Plan, Rank, Shape, Step};

/// Ranks are counted from the root. Rank v gets chunk v from the root and all other chunks from its left neighbour, and passes on
/// every chunk that its right neighbour does not get from the root.
pub(super) fn broadcast(s: &Shape) -> Plan {
    let (n, v) = (s.n, s.past_root());
    let set = |of: &[usize]| -> Vec<Rank> {
        let mut set: Vec<_> = of.iter().map(|&v| s.real(v)).collect();
        set.sort_unstable();
        set
    };
    // The root sends the chunks in the order in which rank 1 receives them: 1, 0, then from n - 1 down to 2.
    if v == 0 {
        let step = |j: usize| {
            let dst = (!s.in_place).then(|| s.out(s.real(j)));
            Step { dst, ..send(s.own(s.real(j)), if j < 2 { set(&[1]) } else { set(&[1, j]) }) }
        };
        return s.split(n, [1, 0].into_iter().chain((2..n).rev()).map(step).collect());
    }
    let step = |k: usize| {
        let j = (v + n - k) % n;
        let from = if k == 0 { s.root } else { s.before(1) };
        let to = if v + 1 == n || j == v + 1 { vec![] } else { set(&[v + 1]) };
        Step { send: to, ..keep(Operand::Recv(from), s.out(s.real(j))) }
    };
    s.split(n, (0..n).map(step).collect())
}

/// Chunk c starts at rank c and is finished by rank c - 1, which sends it to the root. Partial sums are stored in
/// scratch memory, on the root in the output: a ring of steps that keep them only in the hand (`compile.rs`) would deadlock.
pub(super) fn reduce(s: &Shape) -> Plan {
    let root = s.rank == s.root;
    let place = |c| if root { s.out(c) } else { s.scratch(c) };
    let mut steps = vec![send(s.own(s.rank), vec![s.right()])];
    for k in 1..s.n {
        let (c, last) = (s.before(k), k == s.n - 1);
        let to = match (last, root) {
            (false, _) => vec![s.right()],
            (true, true) => vec![],
            (true, false) => vec![s.root],
        };
        steps.push(Step { dst: Some(place(c)), send: to, finish: last, ..add(s, c) });
    }
    if !root {
        return s.split(s.n, steps).and_scratch(Layout::Split { parts: s.n as u32 });
    }
    steps.extend(s.onwards().map(|p| keep(Operand::Recv(p), s.out((p + 1) % s.n))));
    s.split(s.n, steps)
}
