//! One case of a measurement: the collective, the layout of its buffers, and the result that it must give.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use allstream::{DType, Element, Kind, ReduceOp, bf16, f8e4m3, f8e5m2, f16};

use crate::units::bus_factor;

/// A collective, or messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Collective(Kind),
    /// Each rank sends to the next and receives from the one before.
    SendRecv,
    /// A message from rank 0 to rank 1 and back; half of that time is reported.
    PingPong,
}

impl What {
    pub(crate) const COLLECTIVES: [Kind; 10] = [
        Kind::AllReduce,
        Kind::Reduce,
        Kind::Broadcast,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Gather,
        Kind::Scatter,
        Kind::Scan,
        Kind::ExScan,
    ];

    fn all() -> impl Iterator<Item = What> {
        What::COLLECTIVES.into_iter().map(What::Collective).chain([What::SendRecv, What::PingPong])
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            What::Collective(kind) => kind.name(),
            What::SendRecv => "send_recv",
            What::PingPong => "pingpong",
        }
    }

    fn kind(self) -> Option<Kind> {
        match self {
            What::Collective(kind) => Some(kind),
            What::SendRecv | What::PingPong => None,
        }
    }

    pub(crate) fn reduces(self) -> bool {
        self.kind().is_some_and(Kind::reduces)
    }

    pub(crate) fn rooted(self) -> bool {
        self.kind().is_some_and(Kind::rooted)
    }

    /// Whether the operation has a form in place, with one buffer.
    pub(crate) fn in_place(self) -> bool {
        self.kind().is_some()
    }

    /// The factor from the algorithm's bandwidth to the bus bandwidth, as nccl-tests defines them.
    pub(crate) fn bus_factor(self, n: usize) -> f64 {
        self.kind().map_or(1.0, |kind| bus_factor(kind, n))
    }
}

impl FromStr for What {
    type Err = String;

    fn from_str(text: &str) -> Result<What, String> {
        let wanted = text.replace('-', "_");
        What::all().find(|what| what.name() == wanted).ok_or_else(|| {
            let names: Vec<_> = What::all().map(What::name).collect();
            format!("no such collective; there is {}", names.join(", "))
        })
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Inputs repeat themselves after so many elements.
pub(crate) const PERIOD: usize = 97;

/// The case behind one line of the table, as each rank knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) what: What,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    pub(crate) n: usize,
    pub(crate) rank: usize,
    /// Elements of a rank's block; of the whole buffer where it is not cut into blocks.
    pub(crate) count: usize,
}

impl Case {
    /// The case whose largest buffer has about so many elements, and at least one in each block.
    pub(crate) fn new(
        what: What,
        op: ReduceOp,
        root: usize,
        (rank, n): (usize, usize),
        elements: usize,
    ) -> Case {
        let blocks = what.kind().is_some_and(Kind::varies);
        let count = if blocks { (elements / n).max(1) } else { elements.max(1) };
        Case { what, op, root, n, rank, count }
    }

    /// Elements of the largest buffer: what nccl-tests calls the size.
    pub(crate) fn elements(&self) -> usize {
        if self.what.kind().is_some_and(Kind::varies) { self.count * self.n } else { self.count }
    }

    /// Elements of the input and of the output of this rank. In place, one buffer has the larger length.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        let (one, all, root) = (self.count, self.count * self.n, self.rank == self.root);
        match self.what {
            What::Collective(Kind::AllGather) => (one, all),
            What::Collective(Kind::ReduceScatter) => (all, one),
            What::Collective(Kind::AllToAll) => (all, all),
            What::Collective(Kind::Gather) => (one, if root { all } else { 0 }),
            What::Collective(Kind::Scatter) => (if root { all } else { 0 }, one),
            What::Collective(Kind::Reduce) => (one, if root { one } else { 0 }),
            _ => (one, one),
        }
    }

    /// Where this rank's own block begins in place, in a buffer that holds all blocks.
    fn own_block(&self) -> usize {
        self.rank * self.count
    }

    /// Element `i` of a rank's input: small, so that results are exact in most types.
    fn value(&self, rank: usize, i: usize) -> u64 {
        let x = (i % PERIOD + 3 * rank) as u64;
        if self.op == ReduceOp::Prod { 1 + x % 2 } else { x % 4 }
    }

    /// Which elements of a buffer of this length hold the input of this rank. In place, where a gather's buffer has the blocks
    /// of all ranks, this is the rank's own block, and the others are zero at first; only rank 0 fills the whole buffer.
    pub(crate) fn own(&self, len: usize, in_place: bool) -> Range<usize> {
        let gathers = matches!(self.what, What::Collective(Kind::AllGather | Kind::Gather));
        let start = if in_place && gathers && len > self.count { self.own_block() } else { 0 };
        start..if start == 0 { len } else { len.min(start + self.count) }
    }

    /// Writes the input of this rank, or as many of its first elements as there is room for.
    pub(crate) fn begin<T: Value>(&self, input: &mut [T]) {
        input.iter_mut().enumerate().for_each(|(i, x)| *x = T::of(self.value(self.rank, i)));
    }

    /// Fills a buffer with the input of this rank and, in place, with zeros around its own block.
    ///
    /// This is as fast as in the programs that are measured beside ours (docs/bench/peers.md): the longer a fill takes, the
    /// more of the buffer other users of the last-level cache have evicted before the timing starts.
    pub(crate) fn fill<T: Value>(&self, buf: &mut [T], in_place: bool) {
        let Range { start, end } = self.own(buf.len(), in_place);
        let (before, own) = buf.split_at_mut(start);
        let (own, after) = own.split_at_mut(end - start);
        before.fill(T::of(0));
        after.fill(T::of(0));
        let (first, rest) = own.split_at_mut(own.len().min(64 * PERIOD));
        self.begin(first);
        rest.chunks_mut(64 * PERIOD).for_each(|piece| piece.copy_from_slice(&first[..piece.len()]));
    }

    /// Which elements of its buffer are this rank's result; an empty range if this rank has no result to check.
    pub(crate) fn result(&self, in_place: bool) -> Range<usize> {
        self.result_start(in_place).map_or(0..0, |start| start..start + self.lengths().1)
    }

    /// Where the result begins; `None` if this rank has no result to check.
    fn result_start(&self, in_place: bool) -> Option<usize> {
        match self.what {
            What::Collective(Kind::Reduce | Kind::Gather) => (self.rank == self.root).then_some(0),
            // No rank comes before rank 0, so its buffer stays as it was.
            What::Collective(Kind::ExScan) => (self.rank > 0).then_some(0),
            What::Collective(Kind::ReduceScatter) if in_place => Some(self.own_block()),
            What::Collective(Kind::Scatter) if in_place && self.rank == self.root => Some(self.own_block()),
            What::PingPong => (self.rank < 2).then_some(0),
            _ => Some(0),
        }
    }

    /// What element `i` of this rank's result must be. Within a block the values repeat after `PERIOD` elements.
    pub(crate) fn expected<T: Value>(&self, i: usize) -> f64 {
        let is_bool = T::DTYPE == DType::Bool;
        let (block, k) = (i / self.count, i % self.count);
        let reduce = |ranks: Range<usize>, i: usize| {
            let values = ranks.map(|rank| self.value(rank, i));
            if is_bool { reduce_bools(self.op, values) } else { reduce::<T>(self.op, values) }
        };
        let one = |rank: usize, i: usize| {
            let value = self.value(rank, i);
            if is_bool { f64::from(u8::from(value != 0)) } else { value as f64 }
        };
        match self.what {
            What::Collective(Kind::AllReduce | Kind::Reduce) => reduce(0..self.n, i),
            What::Collective(Kind::ReduceScatter) => reduce(0..self.n, self.own_block() + i),
            What::Collective(Kind::Scan) => reduce(0..self.rank + 1, i),
            What::Collective(Kind::ExScan) => reduce(0..self.rank, i),
            What::Collective(Kind::AllGather | Kind::Gather) => one(block, k),
            What::Collective(Kind::AllToAll) => one(block, self.own_block() + k),
            What::Collective(Kind::Scatter) => one(self.root, self.own_block() + i),
            What::Collective(_) => one(self.root, i),
            What::SendRecv => one((self.rank + self.n - 1) % self.n, i),
            What::PingPong => one(0, i),
        }
    }
}

/// The oracle: folds the ranks' values one after the other, in numbers that hold every result exactly, except averages.
fn reduce<T: Value>(op: ReduceOp, values: impl ExactSizeIterator<Item = u64>) -> f64 {
    let n = values.len();
    match op {
        ReduceOp::Sum => values.fold(0, u64::wrapping_add) as f64,
        ReduceOp::Prod => values.map(|x| x as f64).product(),
        ReduceOp::Min => values.min().unwrap_or(0) as f64,
        ReduceOp::Max => values.max().unwrap_or(0) as f64,
        ReduceOp::Avg => T::average(values.fold(0, u64::wrapping_add), n),
        ReduceOp::BitAnd => values.reduce(|a, b| a & b).unwrap_or(0) as f64,
        ReduceOp::BitOr => values.fold(0, |a, b| a | b) as f64,
        ReduceOp::BitXor => values.fold(0, |a, b| a ^ b) as f64,
    }
}

/// Likewise for truth values: a sum is "any", a product "all".
fn reduce_bools(op: ReduceOp, values: impl Iterator<Item = u64>) -> f64 {
    let mut bools = values.map(|x| x != 0);
    let result = match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr | ReduceOp::Avg => bools.any(|x| x),
        ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => bools.all(|x| x),
        ReduceOp::BitXor => bools.filter(|x| *x).count() % 2 == 1,
    };
    f64::from(u8::from(result))
}

/// An element type that is filled and compared.
pub(crate) trait Value: Element {
    fn of(value: u64) -> Self;
    /// The value of this type that is nearest to `expected`.
    fn nearest(expected: f64) -> Self;
    /// The average of `n` values that have this sum.
    fn average(sum: u64, n: usize) -> f64;
    /// Whether this value is `expected`, within the error that `n` roundings in this type may cause.
    fn is(self, expected: f64, n: usize) -> bool;
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Value for $t {
            fn of(value: u64) -> $t {
                value as $t
            }
            fn nearest(expected: f64) -> $t {
                // Values that do not fit wrap. A product of many ranks may not even fit an `i128`: all bits that this type has are then zero, as
                // a number of such a size has its 53 digits above them.
                if expected.abs() < f64::powi(2.0, 127) { expected as i128 as $t } else { 0 }
            }
            fn average(sum: u64, n: usize) -> f64 {
                // The sum wraps before it is divided, and the quotient is truncated.
                (i128::from(sum as $t) / (n as i128).max(1)) as f64
            }
            fn is(self, expected: f64, _: usize) -> bool {
                self == <$t>::nearest(expected)
            }
        }
    )*};
}

macro_rules! floats {
    ($($t:ty, $digits:expr, $of:expr, $to:expr;)*) => {$(
        impl Value for $t {
            fn of(value: u64) -> $t {
                $of(value as f64)
            }
            fn nearest(expected: f64) -> $t {
                $of(expected)
            }
            fn average(sum: u64, n: usize) -> f64 {
                sum as f64 / n as f64
            }
            fn is(self, expected: f64, n: usize) -> bool {
                let found: f64 = $to(self);
                let rounding = f64::powi(2.0, -$digits);
                (found - expected).abs() <= (n as f64 * rounding).min(0.5) * expected.abs()
            }
        }
    )*};
}

integers!(i8 i16 i32 i64 u8 u16 u32 u64);
// Beside each type: the number of binary digits of its significand.
floats! {
    f16, 11, f16::from_f64, |x: f16| x.to_f64();
    bf16, 8, bf16::from_f64, |x: bf16| x.to_f64();
    f32, 24, |x| x as f32, f64::from;
    f64, 53, |x| x, |x| x;
    f8e4m3, 4, |x| f8e4m3::from_f32(x as f32), |x: f8e4m3| f64::from(x.to_f32());
    f8e5m2, 3, |x| f8e5m2::from_f32(x as f32), |x: f8e5m2| f64::from(x.to_f32());
}

impl Value for bool {
    fn of(value: u64) -> bool {
        value != 0
    }
    fn nearest(expected: f64) -> bool {
        expected != 0.0
    }
    fn average(sum: u64, _: usize) -> f64 {
        // Never called: `reduce_bools` is the oracle of truth values.
        f64::from(u8::from(sum != 0))
    }
    fn is(self, expected: f64, _: usize) -> bool {
        self == bool::nearest(expected)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::wrong;
    use super::*;

    #[test]
    fn the_check_finds_a_wrong_element() {
        let what = What::Collective(Kind::AllReduce);
        let case = Case::new(what, ReduceOp::Sum, 0, (0, 2), 8);
        let mut result: Vec<f32> = (0..8).map(|i| (case.value(0, i) + case.value(1, i)) as f32).collect();
        assert_eq!(wrong(&case, &result, true), 0);
        result[5] += 1.0;
        assert_eq!(wrong(&case, &result, true), 1);
        result[5] = f32::NAN;
        assert_eq!(wrong(&case, &result, true), 1);
        assert_eq!(wrong(&case, &result[..4], true), 8, "a result that is too short is all wrong");
    }

    /// Integers wrap, as the engine's do: a product of so many ranks is 0, and the sum that an average divides has wrapped before.
    #[test]
    fn integers_of_many_ranks_wrap() {
        fn right<T: Value>(op: ReduceOp, n: usize, of_all: impl Fn(T, T) -> T, finish: impl Fn(T) -> T) {
            let case = Case::new(What::Collective(Kind::AllReduce), op, 0, (0, n), 64);
            let of = |i: usize| {
                let values = (0..n).map(|rank| T::of(case.value(rank, i)));
                finish(values.reduce(&of_all).unwrap())
            };
            let result: Vec<T> = (0..64).map(of).collect();
            assert_eq!(wrong(&case, &result, true), 0, "{op} of {n} ranks, {}", T::DTYPE);
        }
        for n in [2, 60, 300, 1000] {
            right(ReduceOp::Prod, n, i32::wrapping_mul, |x| x);
            right(ReduceOp::Prod, n, u64::wrapping_mul, |x| x);
            right(ReduceOp::Prod, n, i8::wrapping_mul, |x| x);
            right(ReduceOp::Sum, n, i8::wrapping_add, |x| x);
            right(ReduceOp::Avg, n, i8::wrapping_add, |x| (i64::from(x) / n as i64) as i8);
            right(ReduceOp::Avg, n, u8::wrapping_add, |x| (u64::from(x) / n as u64) as u8);
            right(ReduceOp::Avg, n, i32::wrapping_add, |x| x / n as i32);
        }
    }

    #[test]
    fn sizes_are_cut_into_blocks() {
        let gather =
            |elements| Case::new(What::Collective(Kind::AllGather), ReduceOp::Sum, 0, (1, 4), elements);
        assert_eq!((gather(1024).count, gather(1024).elements()), (256, 1024));
        assert_eq!((gather(1).count, gather(1).elements()), (1, 4));
        assert_eq!(gather(1024).lengths(), (256, 1024));
        let mut buf = vec![9u8; 16];
        gather(16).fill(&mut buf, true);
        assert!(buf[..4].iter().chain(&buf[8..]).all(|x| *x == 0), "only its own block is filled: {buf:?}");
    }
}
