//! The operators of reductions.

use std::fmt;
use std::str::FromStr;

use crate::{DType, UnknownName};

/// How operands are folded into one. The discriminants are part of the wire format.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum = 0,
    /// Product; integers wrap.
    Prod = 1,
    /// Minimum.
    Min = 2,
    /// Maximum.
    Max = 3,
    /// Sum, divided by the number of ranks when finished.
    Avg = 4,
    /// Bitwise and.
    BitAnd = 5,
    /// Bitwise or.
    BitOr = 6,
    /// Bitwise exclusive or.
    BitXor = 7,
}

/// How an average over `ranks` ranks is completed: the sum is divided by `ranks`. Each operand may have been halved `halved` times
/// beforehand, to keep the sums on the way within the range of their type. In that case the sum is divided by `ranks / 2^halved`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finish {
    /// How many ranks have given an operand.
    pub ranks: u32,
    /// How many times each operand was halved: 126 at most, and 0 for integers, which are never halved.
    pub halved: u8,
}

impl From<u32> for Finish {
    /// Completes an average of operands that were not halved.
    fn from(ranks: u32) -> Finish {
        Finish { ranks, halved: 0 }
    }
}

impl Finish {
    /// `2^-halved`: what each operand was multiplied by when it was halved.
    pub(crate) fn power(self) -> f32 {
        f32::from_bits((127 - u32::from(self.halved.min(126))) << 23)
    }
}

impl ReduceOp {
    /// Every operator, at the index of its discriminant.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// The name that [`ReduceOp::parse`] takes: `"sum"`, `"prod"`, `"min"`, `"max"`,
    /// `"avg"`, `"band"`, `"bor"`, `"bxor"`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Avg => "avg",
            ReduceOp::BitAnd => "band",
            ReduceOp::BitOr => "bor",
            ReduceOp::BitXor => "bxor",
        }
    }

    /// The operator with this discriminant.
    pub fn from_u8(value: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.get(usize::from(value)).copied()
    }

    /// The operator with exactly this [name](ReduceOp::name).
    pub fn parse(name: &str) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == name)
    }

    /// `finish` if there is something to divide: if this operator is the average and `finish.ranks` is 2 or more. Else `None`.
    pub fn divides(self, finish: Option<Finish>) -> Option<Finish> {
        finish.filter(|finish| self == ReduceOp::Avg && finish.ranks > 1)
    }

    /// Whether the operator is defined on the type: bitwise operators on integers and
    /// `bool`, the average on all but `bool`, the rest on all.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !dtype.is_float(),
            ReduceOp::Avg => !matches!(dtype, DType::Bool),
            ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Min | ReduceOp::Max => true,
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        ReduceOp::parse(name).ok_or_else(|| UnknownName::new("reduction", name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_lead_back() {
        for (i, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, i);
            assert_eq!(ReduceOp::from_u8(i as u8), Some(op));
            assert_eq!(ReduceOp::parse(op.name()), Some(op));
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        assert_eq!(ReduceOp::from_u8(8), None);
        let error = "mean".parse::<ReduceOp>().unwrap_err();
        assert_eq!(error.to_string(), "unknown reduction: \"mean\"");
    }

    #[test]
    fn support() {
        let count = |op: ReduceOp| DType::ALL.iter().filter(|d| op.supports(**d)).count();
        let counts = ReduceOp::ALL.map(count);
        assert_eq!(counts, [15, 15, 15, 15, 14, 9, 9, 9]);
    }
}
