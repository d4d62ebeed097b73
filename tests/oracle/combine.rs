//! The reductions that tests use, and the results that they must have.

use allstream::plan::{deterministic, keeps_rank_order};
use allstream::{Algo, Call, DType, Function, Kind, ReduceOp};

use crate::values::{Value, mix};

/// A reduction: one of the engine's, a sum of scaled inputs, or a function that the tests define.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    Op(ReduceOp),
    /// The sum of each rank's input times [`factor`].
    Scaled,
    /// A function that adds the bits as integers. It commutes. A contribution that is missing or counted twice changes the result.
    Bits,
    /// A function that composes maps `x -> a x + b`, where `a` and `b` are half of the bits each. It is associative and does
    /// not commute, so any order but that of ranks changes the result.
    Maps,
}

/// What a rank's input is multiplied by.
pub fn factor(rank: usize) -> usize {
    3 - rank % 3
}

impl Combine {
    pub fn all() -> Vec<Combine> {
        let mut all: Vec<Combine> = ReduceOp::ALL.iter().copied().map(Combine::Op).collect();
        all.extend([Combine::Scaled, Combine::Bits, Combine::Maps]);
        all
    }

    /// Whether the reduction is defined on this type.
    pub fn supports(self, dtype: DType) -> bool {
        match self {
            Combine::Op(op) => op.supports(dtype),
            Combine::Scaled => dtype.is_float(),
            Combine::Bits | Combine::Maps => dtype != DType::Bool,
        }
    }

    /// Whether the reduction is defined in this collective.
    pub fn fits(self, kind: Kind) -> bool {
        !(self == Combine::Op(ReduceOp::Avg) && kind.is_scan())
    }

    /// Whether a call may name this algorithm for the reduction (`dtype`: if the type is known). Functions that do not commute need an algorithm
    /// that keeps rank order, and averages of 8-bit floats one that adds all inputs in one step.
    pub fn goes_by(self, dtype: Option<DType>, (kind, algo): (Kind, Algo)) -> bool {
        let eights = dtype.is_some_and(DType::is_float8);
        match self {
            _ if algo == Algo::Auto || !kind.reduces() || kind == Kind::Barrier => true,
            Combine::Maps => keeps_rank_order(kind, algo),
            Combine::Op(ReduceOp::Avg) if eights => deterministic(kind, algo),
            _ => true,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Combine::Op(op) => op.name(),
            Combine::Scaled => "scaled sum",
            Combine::Bits => "function",
            Combine::Maps => "ordered function",
        }
    }

    /// Whether the result is the same in any order, to the bit.
    pub fn is_exact(self) -> bool {
        matches!(self, Combine::Op(ReduceOp::Min | ReduceOp::Max) | Combine::Bits | Combine::Maps)
    }

    /// Adds the reduction to a call's options.
    pub fn option<T: Value>(self, call: Call<'_>, rank: usize) -> Call<'_> {
        match self {
            Combine::Op(op) => call.op(op),
            Combine::Scaled => call.scale(factor(rank) as f64),
            Combine::Bits => call.function(&T::bits_added()),
            Combine::Maps => call.function(&T::maps_in_turn()),
        }
    }

    /// A value to be combined, from random bits (see [`Value::make`]).
    pub fn make<T: Value>(self, special: bool, h: u64, all: u64) -> T {
        match self {
            Combine::Op(op) => T::make(Some(op), special, h, all),
            Combine::Scaled => T::make(Some(ReduceOp::Sum), false, h, all),
            // With an odd `a` a map loses no bits, so different maps stay different, however many follow.
            Combine::Bits | Combine::Maps => value(h | 1),
        }
    }

    /// What `rank` contributes to the reduction where its input is `x`.
    pub(crate) fn scaled<T: Value>(self, rank: usize, x: T) -> T {
        match self {
            // (x + x is exact, and adding x again rounds once, as one multiplication by 3 does.)
            Combine::Scaled if factor(rank) > 1 => T::fold(ReduceOp::Sum, &[x; 3][..factor(rank)]),
            _ => x,
        }
    }

    /// Reduces the inputs of one element, from the left.
    pub fn fold<T: Value>(self, column: &[T]) -> T {
        match self {
            Combine::Op(op) => T::fold(op, column),
            Combine::Scaled => T::fold(ReduceOp::Sum, column),
            Combine::Bits => column.iter().copied().reduce(bits).expect("a rank"),
            Combine::Maps => column.iter().copied().reduce(maps).expect("a rank"),
        }
    }

    /// The result computed in `f64`, and how far from it a result may be that was computed in another order.
    pub(crate) fn near<T: Value>(self, column: &[T], (eps, tiny): (f64, f64)) -> (f64, f64) {
        let n = column.len() as f64;
        let wide = || column.iter().map(|x| x.wide());
        // Each of the n operations rounds by at most half of eps. The remaining quarter is for the rounding of the `f64` result here.
        let (exact, size) = match self {
            Combine::Op(ReduceOp::Prod) => (wide().product::<f64>(), wide().product::<f64>().abs()),
            Combine::Op(ReduceOp::Avg) => (wide().sum::<f64>() / n, wide().map(f64::abs).sum::<f64>() / n),
            _ => (wide().sum(), wide().map(f64::abs).sum()),
        };
        (exact, n * (0.75 * eps * size + tiny))
    }
}

/// The function of [`Combine::Bits`].
pub(crate) fn bits_added<T: Value>() -> Function<T> {
    Function::commutative("the sum of the bits", each(bits::<T>))
}

/// The function of [`Combine::Maps`].
pub(crate) fn maps_in_turn<T: Value>() -> Function<T> {
    Function::ordered("one map after the other", each(maps::<T>))
}

/// Applies `f` element by element.
fn each<T: Value>(f: fn(T, T) -> T) -> impl Fn(&mut [T], &[T]) + Send + Sync + 'static {
    move |left, right| left.iter_mut().zip(right).for_each(|(l, r)| *l = f(*l, *r))
}

/// The value of these bits.
fn value<T: Value>(bits: u64) -> T {
    T::make(None, false, bits, 0)
}

fn bits<T: Value>(left: T, right: T) -> T {
    value(left.bits().wrapping_add(right.bits()))
}

fn maps<T: Value>(left: T, right: T) -> T {
    let half = size_of::<T>() * 4;
    let mask = (1 << half) - 1;
    let parts = |x: T| (x.bits() & mask, x.bits() >> half & mask);
    let ((a, b), (c, d)) = (parts(left), parts(right));
    // First `left`, then `right`: c (a x + b) + d.
    value(a.wrapping_mul(c) & mask | (c.wrapping_mul(b).wrapping_add(d) & mask) << half)
}

/// A count of elements for each rank: some are 0, most differ from each other.
pub fn counts(seed: u64, n: usize, len: usize) -> Vec<usize> {
    let one = |rank: usize| {
        let h = mix(&[seed, rank as u64, 31]);
        match h % 5 {
            0 => 0,
            1 => len,
            2 => len / 2 + usize::from(len > 0),
            3 => len + rank,
            _ => (h >> 8) as usize % (len + 1),
        }
    };
    (0..n).map(one).collect()
}
