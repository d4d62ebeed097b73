//! Recursive doubling (bidirectional exchange, BDE): partners at distance 1, 2, 4, ... exchange all they have.
//!
//! all_reduce: `floor(log2 n)` hops, and 1 or 2 more if n is not a power of two (2 if n is above 1.5 times the largest
//! power of two below it); a rank sends at most `floor(log2 n) * count`, and `count` more if n is not a power of two.
//! Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
//! IJHPCA 19(1), 2005, section 4.5, also for group sizes that are no power of two.
//!
//! With `2^m` the largest power of two up to n, the first `2 (n - 2^m)` ranks pair up: the even rank of a pair sends its
//! data to the odd one and gets the result from it. So a rank always holds the sum of consecutive ranks. The ranks that one
//! partner has summed directly follow those that the other has summed, and both take the sum of the lower ranks as first operand:
//! all ranks evaluate the same expression, and get the same bits.
//!
//! A partner stores the sum where it sends from, so the sum waits in the hand (`compile.rs`) until the message has been released.

use crate::shape::{keep, send};
use crate::{Operand, Plan, Rank, Shape, Step};

/// All ranks end with the same bits after `log2 n` exchanges.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let power = 1 << s.n.ilog2();
    let extra = s.n - power;
    let folded = s.rank < 2 * extra;
    if folded && s.rank.is_multiple_of(2) {
        let odd = s.rank + 1;
        return s.split(1, vec![send(s.own(0), vec![odd]), keep(Operand::Recv(odd), s.out(0))]);
    }
    // Our number among the ranks that exchange, and the rank that has a given number.
    let me = if folded { s.rank / 2 } else { s.rank - extra };
    let real = |v: usize| -> Rank { if v < extra { 2 * v + 1 } else { v + extra } };
    let partners: Vec<Rank> =
        (0..power.ilog2()).map(|k| real(me ^ (1 << k))).chain(folded.then(|| s.rank - 1)).collect();

    // The first partner gets our own data or, if we are the odd rank of a pair, the pair's sum; each later partner gets the sum so far.
    let (mut steps, mut have) = (Vec::new(), s.own(0));
    if folded {
        steps.push(combine(s, s.rank - 1, have, partners[0]));
        have = Operand::Own(s.out(0));
    } else {
        steps.push(send(have, vec![partners[0]]));
    }
    for k in 0..power.ilog2() as usize {
        let mut step = combine(s, partners[k], have, s.rank);
        step.send = partners.get(k + 1).copied().into_iter().collect();
        step.finish = k + 1 == power.ilog2() as usize;
        steps.push(step);
        have = Operand::Own(s.out(0));
    }
    s.split(1, steps)
}

/// Adds up the sum from `from` and ours, the sum of the lower ranks first, stores the result in the output and sends it to `to`.
fn combine(s: &Shape, from: Rank, ours: Operand, to: Rank) -> Step {
    let theirs = Operand::Recv(from);
    let operands = if from < s.rank { vec![theirs, ours] } else { vec![ours, theirs] };
    Step { operands, dst: Some(s.out(0)), send: vec![to], ..Step::default() }
}
