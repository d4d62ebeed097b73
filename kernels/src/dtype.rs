//! The types of the elements that collectives send and combine.

use std::fmt::{self, Debug, Display};
use std::str::FromStr;

use half::{bf16, f16};

use crate::{UnknownName, f8e4m3, f8e5m2};

/// The type of a buffer's elements. The discriminants are part of the wire format.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// One byte; zero is false, anything else true.
    Bool = 0,
    /// Signed 8-bit integer.
    I8 = 1,
    /// Signed 16-bit integer.
    I16 = 2,
    /// Signed 32-bit integer.
    I32 = 3,
    /// Signed 64-bit integer.
    I64 = 4,
    /// Unsigned 8-bit integer.
    U8 = 5,
    /// Unsigned 16-bit integer.
    U16 = 6,
    /// Unsigned 32-bit integer.
    U32 = 7,
    /// Unsigned 64-bit integer.
    U64 = 8,
    /// IEEE 754 binary16.
    F16 = 9,
    /// The upper half of a binary32.
    BF16 = 10,
    /// IEEE 754 binary32.
    F32 = 11,
    /// IEEE 754 binary64.
    F64 = 12,
    /// OCP FP8 E4M3, without infinities: [`f8e4m3`].
    F8E4M3 = 13,
    /// OCP FP8 E5M2: [`f8e5m2`].
    F8E5M2 = 14,
}

impl DType {
    /// Every type, at the index of its discriminant.
    pub const ALL: [DType; 15] = [
        DType::Bool,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 => 8,
        }
    }

    /// The name that [`DType::parse`] takes: `"f32"`, `"bf16"`, `"i8"`, `"bool"`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
        }
    }

    /// The type with this discriminant.
    pub fn from_u8(value: u8) -> Option<DType> {
        DType::ALL.get(usize::from(value)).copied()
    }

    /// The type with exactly this [name](DType::name).
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Whether this is one of the six float types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64 | DType::F8E4M3 | DType::F8E5M2)
    }

    /// Whether this is one of the two float types of 8 bits.
    pub const fn is_float8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    /// Whether this is one of the eight integer types; `bool` is not.
    pub const fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, DType::Bool)
    }

    /// Whether [`scale`](crate::scale) can multiply elements of this type: it can multiply floats.
    pub const fn scales(self) -> bool {
        self.is_float()
    }
}

impl Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        DType::parse(name).ok_or_else(|| UnknownName::new("data type", name))
    }
}

/// A Rust type that is the in-memory form of one [`DType`].
///
/// # Safety
///
/// An implementor is plain old data: exactly `DTYPE.size()` bytes, no padding, no
/// pointers, and every bit pattern is a valid value. Only `bool` is exempt from the last requirement:
/// whoever fills a buffer of `bool` from outside must make sure that it gets only 0 and 1.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no element type",
    label = "not bool, i8 to i64, u8 to u64, f16, bf16, an 8-bit float, f32 or f64",
    note = "several vectors go into one call as a list: all_reduce_list(vec![a, b])",
    note = "usize and isize differ between machines: use u64 or i64",
    note = "text and structures go as bytes: broadcast_bytes(bytes, root), all_gather_bytes(bytes)"
)]
pub unsafe trait Element: Copy + Send + Sync + 'static + Default + PartialEq + Debug {
    /// The [`DType`] whose in-memory form this Rust type is.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        const _: () = assert!(size_of::<$t>() == DType::$d.size());
        // SAFETY: a primitive number or bool, or a transparent wrapper of a u16 or a u8: no padding, no pointers,
        // and every bit pattern is valid (except for `bool`, which the trait exempts). The size is asserted above.
        unsafe impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}

elements! {
    bool => Bool,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
    f16 => F16,
    bf16 => BF16,
    f32 => F32,
    f64 => F64,
    f8e4m3 => F8E4M3,
    f8e5m2 => F8E5M2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_lead_back() {
        for (i, d) in DType::ALL.into_iter().enumerate() {
            assert_eq!(d as usize, i);
            assert_eq!(DType::from_u8(i as u8), Some(d));
            assert_eq!(DType::parse(d.name()), Some(d));
            assert_eq!(d.to_string().parse(), Ok(d));
        }
        assert_eq!(DType::from_u8(15), None);
        assert_eq!(DType::parse("F32"), None);
        let error = "float".parse::<DType>().unwrap_err();
        assert_eq!(error.to_string(), "unknown data type: \"float\"");
    }

    /// Discriminants travel between ranks: if one changed, a peer of another build would take it for another type.
    #[test]
    fn numbers_stay() {
        let numbers = ["bool", "u64", "f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"]
            .map(|name| DType::parse(name).map(|d| d as u8));
        assert_eq!(numbers, [0, 8, 9, 10, 11, 12, 13, 14].map(Some));
    }

    #[test]
    fn kinds() {
        let floats = DType::ALL.iter().filter(|d| d.is_float()).count();
        let integers = DType::ALL.iter().filter(|d| d.is_integer()).count();
        assert_eq!((floats, integers), (6, 8));
        assert!(!DType::Bool.is_integer() && !DType::Bool.is_float());
    }
}
