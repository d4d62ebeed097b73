//! Scans by recursive doubling: in round k each rank sends what it has to the rank `2^k` after it.
//!
//! | collective | hops | a rank sends | source |
//! |---|---|---|---|
//! | scan | `floor(log2 n)` | `ceil(log2 n) * count` (rank 0, whose own input is its result) | Hillis, Steele, "Data parallel algorithms", CACM 29(12), 1986 |
//! | exscan | `1 + floor(log2 (n-1))` | `(1 + ceil(log2 (n-1))) * count` (rank 1) | the same, over the inputs shifted by one rank |
//!
//! After round k of a scan a rank has the sum of its own input and those of the `2^(k+1) - 1` ranks before it (of all ranks before
//! it, if they are fewer). A received sum is of lower ranks and is the first operand, so results are combined in rank order.
//! `finish` is false, as in every scan.

use crate::shape::{keep, send};
use crate::{Operand, Plan, Rank, Shape, Step};

/// The inclusive scan: each result includes the rank's own input.
pub(super) fn scan(s: &Shape) -> Plan {
    let rounds = Rounds { s, first: 0 };
    let to = rounds.at_first();
    let mut steps = Vec::new();
    if s.rank == 0 && !s.in_place {
        steps.push(Step { send: to, ..keep(s.own(0), s.out(0)) });
    } else if !to.is_empty() {
        steps.push(send(s.own(0), to));
    }
    rounds.run(s.own(0), &mut steps);
    s.split(1, steps)
}

/// Each rank sends its input to the next rank; then ranks 1 and up scan what they received. In place a rank receives into the
/// memory that it sends from, so it gathers the received data before that memory is free (`early`).
pub(super) fn exscan(s: &Shape) -> Plan {
    let mut steps = Vec::new();
    if s.rank + 1 < s.n {
        steps.push(send(s.own(0), vec![s.rank + 1]));
    }
    if s.rank > 0 {
        let rounds = Rounds { s, first: 1 };
        let early = s.in_place && s.rank + 1 < s.n;
        let taken = keep(Operand::Recv(s.rank - 1), s.out(0));
        steps.push(Step { send: rounds.at_first(), early, ..taken });
        rounds.run(Operand::Own(s.out(0)), &mut steps);
    }
    s.split(1, steps)
}

/// The rounds of our rank in a scan over the ranks from `first` on.
struct Rounds<'a> {
    s: &'a Shape<'a>,
    first: Rank,
}

impl Rounds<'_> {
    /// The number of rounds in which we receive.
    fn receives(&self) -> usize {
        (self.s.rank - self.first).checked_ilog2().map_or(0, |k| k as usize + 1)
    }

    /// Who gets the sum that we have before round k: our receiver of round k or, if we receive no more, those of this and all later rounds.
    fn to(&self, k: usize) -> Vec<Rank> {
        let end = if k < self.receives() { k + 1 } else { usize::BITS as usize - 1 };
        (k..end).map_while(|k| Some(self.s.rank + (1 << k)).filter(|&to| to < self.s.n)).collect()
    }

    fn at_first(&self) -> Vec<Rank> {
        self.to(0)
    }

    /// In each round, adds the received sum to what we `have`, and sends the result on.
    fn run(&self, mut have: Operand, steps: &mut Vec<Step>) {
        let dst = self.s.out(0);
        for k in 0..self.receives() {
            let operands = vec![Operand::Recv(self.s.rank - (1 << k)), have];
            steps.push(Step { operands, dst: Some(dst), send: self.to(k + 1), ..Step::default() });
            have = Operand::Own(dst);
        }
    }
}
