//! The inputs of ranks, and the reductions of these inputs.

use std::ops::Range;

use crate::combine::Combine;
use crate::values::{MOST, Value, mix};

/// What the inputs of an operation are made from, and how they are combined.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    pub seed: u64,
    /// Whether there are NaN, infinities and zeros among them.
    pub special: bool,
    /// `None`: any bits, which are only copied.
    pub op: Option<Combine>,
    /// Each result is one fold over all ranks in rank order, so that results of floats are known to the bit.
    pub in_rank_order: bool,
}

/// What a reduction (of all blocks) must be.
pub struct Expected<T> {
    pub values: Vec<T>,
    /// If the order is not fixed: the nearly exact result, and how far a value may be from it. Empty: values must agree to the bit.
    pub near: Vec<(f64, f64)>,
}

/// The input of a rank: `count` elements.
pub(crate) fn of_rank<T: Value>(of: Inputs, rank: usize, count: usize) -> Vec<T> {
    let seed = mix(&[of.seed, rank as u64]);
    let own = |i| {
        let (h, all) = (mix(&[seed, i]), mix(&[of.seed, i, 77]));
        of.op.map_or_else(|| T::make(None, of.special, h, all), |op| op.make(of.special, h, all))
    };
    (0..count as u64).map(own).collect()
}

/// The reductions of `count` elements of some of `n` ranks, one range of ranks after another.
///
/// # Panics
/// There is no reduction in `of`.
pub(crate) fn reductions<T: Value>(
    of: Inputs,
    n: usize,
    count: usize,
    ranges: &[Range<usize>],
) -> Expected<T> {
    let op = of.op.expect("a reduction");
    let inputs: Vec<Vec<T>> = (0..n).map(|rank| of_rank(of, rank, count)).collect();
    let mut column = [T::default(); MOST];
    let rounds = T::ROUNDS.filter(|_| !of.in_rank_order);
    let mut expected = Expected { values: Vec::with_capacity(count * ranges.len()), near: Vec::new() };
    for ranks in ranges {
        for i in 0..count {
            for (rank, input) in inputs.iter().enumerate() {
                column[rank] = op.scaled(rank, input[i]);
            }
            let column = &column[ranks.clone()];
            expected.values.push(op.fold(column));
            if let Some(rounds) = rounds {
                // (Two inputs can be added in one order only, as addition commutes.)
                let near = if column.len() > 2 { op.near(column, rounds) } else { (0.0, 0.0) };
                expected.near.push(near);
            }
        }
    }
    expected
}

/// Compares bits. Where the order is not fixed, finite results are compared as numbers.
pub(crate) fn compare<T: Value>(
    name: &str,
    got: &[T],
    expected: &[T],
    near: &[(f64, f64)],
) -> Result<(), String> {
    if got.len() != expected.len() {
        return Err(format!("{name} has {} elements, expected {}", got.len(), expected.len()));
    }
    let wrong = |i: &usize| {
        if got[*i].bits() == expected[*i].bits() {
            return false;
        }
        match near.get(*i) {
            // Compared by bits all the same: results of at most two inputs (tolerance 0), and what is not finite, which has one form only.
            Some((exact, off)) if expected[*i].wide().is_finite() && *off > 0.0 => {
                let far = (got[*i].wide() - exact).abs();
                far.is_nan() || far > *off
            }
            _ => true,
        }
    };
    let mut all = (0..got.len()).filter(wrong);
    match all.next() {
        None => Ok(()),
        Some(i) => Err(format!(
            "{name}[{i}] is {:?} ({:#x}), expected {:?} ({:#x}), and {} more of {} are wrong",
            got[i],
            got[i].bits(),
            expected[i],
            expected[i].bits(),
            all.count(),
            got.len()
        )),
    }
}

/// A hash of all bits of these values, in order.
pub(crate) fn hash<T: Value>(values: &[T]) -> u64 {
    let each = |h: u64, v: &T| (h ^ v.bits()).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    values.iter().fold(0xcbf2_9ce4_8422_2325, each)
}
