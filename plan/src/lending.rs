//! Plans of loans: for ranks that can read and write each other's memory.
//!
//! | collective | hops | a rank reads and writes | source |
//! |---|---|---|---|
//! | all_reduce ("one-pass") | 2: the loan, and its way back | one chunk of each input, `count` in all; one chunk of each output, `count` in all | the same division of work as `direct`, without the messages; in the GPU libraries "two-shot over peer memory" |
//!
//! Rank p folds chunk p of all inputs in rank order and writes it into all outputs: so the ranks together read each input once
//! and write each output once, which is the least possible. If the chunks went as messages, each would be read and written once
//! more on its way to every other rank.

use crate::shape::Shape;
use crate::{Algo, Kind, Loan, Operand, Plan, Step};

/// One rank's plan of loans, with the same result, bit for bit, as [`super::plan`] by this algorithm. `None` if there is no such plan
/// for this collective and algorithm, or only one rank.
pub fn lending(kind: Kind, algo: Algo, s: &Shape) -> Option<Plan> {
    let folds = kind == Kind::AllReduce && matches!(algo, Algo::Direct | Algo::OneShot);
    (folds && s.n > 1).then(|| all_reduce(s))
}

/// Lends each peer the chunk of our input and output that the peer folds, and folds our chunk of all inputs into all outputs.
fn all_reduce(s: &Shape) -> Plan {
    let lend = |to| Step { loan: Some(Loan { to, read: s.input(to), write: s.out(to) }), ..Step::default() };
    let mut steps: Vec<Step> = s.onwards().map(lend).collect();
    let own = s.own(s.rank);
    let operands = (0..s.n).map(|p| if p == s.rank { own } else { Operand::Lent(p) }).collect();
    steps.push(Step {
        operands,
        dst: Some(s.out(s.rank)),
        into: s.others(),
        finish: true,
        ..Step::default()
    });
    s.split(s.n, steps)
}
