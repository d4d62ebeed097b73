//! Ranks, element types, and the signature by which ranks agree on an operation.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub(crate) use allstream_kernels::Finish;
pub use allstream_kernels::{DType, Element, Function, ReduceOp, bf16, f8e4m3, f8e5m2, f16};

use crate::plan::At;
pub use crate::plan::{Algo, Kind, LinkClass, MOST_RANKS, Rank};

/// A hash map without a random seed: processes that make the same changes to it iterate over it in the same order. So a
/// simulated run of a test (`testing/story/`) that is started again from its seed takes the same course.
pub(crate) type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// What a rank called, in the 24 bytes that travel with every frame: two ranks whose signatures differ
/// are told so before any data is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Signature {
    /// The collective ([`Kind`]), or 100 for send/recv. Bit 7 is set for a collective's form with a count for each rank, bit 6 if all
    /// ranks' devices run the collective, bit 4 if a library (NCCL) carries out the whole call.
    pub kind: u8,
    /// [`DType`]; 255 for a call on a list of buffers.
    pub dtype: u8,
    /// [`ReduceOp`]; 254 for a user's function, 255 where nothing is reduced.
    pub op: u8,
    /// The [`Algo`] that was asked for; if that was [`Algo::Auto`], the one that was chosen. Bit 7 is set if the call has a key, bit 6 if
    /// [`detail`](Self::detail) is that key.
    pub algo: u8,
    /// The root's rank (0 where there is none); the tag of a message.
    pub root: u32,
    /// Elements per rank, as the collective counts them. With a count for each rank: the sum of the counts. In a call in which each rank
    /// knows only its own counts: 0; in the frames of such a call: the length of the message that the frame belongs to.
    pub count: u64,
    /// How many earlier communicators of the same members used this communicator's links: 0 for new links.
    pub generation: u32,
    /// A digest of what the other fields do not hold: the count of each rank, the lengths and types of a list, the name of a
    /// user's function. 0 if there is nothing of the kind. If the call has a key, the digest is combined with it by exclusive or: with the
    /// key's low 32 bits and, if any of its high 32 bits is set, with a digest of those. So two keys below 2^32 are never taken for each other.
    pub detail: u32,
}

/// Which elements each chunk covers, in slots whose layout is [`Layout::Table`](crate::plan::Layout::Table).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    /// The range of elements of each chunk, by slot, then by chunk.
    pub(crate) slots: [Vec<Range<usize>>; 3],
}

impl Tables {
    /// How many elements a chunk has: 0 if it is not in the table.
    pub(crate) fn len_of(&self, at: At) -> usize {
        self.slots[usize::from(at.slot)].get(at.chunk as usize).map_or(0, Range::len)
    }
}

/// [`Signature::kind`] of a point-to-point message.
pub(crate) const KIND_P2P: u8 = 100;
/// [`Signature::op`] where nothing is reduced.
pub(crate) const NO_OP: u8 = 255;
/// [`Signature::op`] of a user's function.
pub(crate) const FUNCTION: u8 = 254;
/// [`Signature::dtype`] of a list.
pub(crate) const LIST: u8 = 255;
/// Set in [`Signature::kind`] where each rank has a count of its own.
pub(crate) const VARIED: u8 = 0x80;
/// Set in [`Signature::kind`] where the ranks' devices run the collective.
pub(crate) const ON_DEVICES: u8 = 0x40;
/// Set in [`Signature::kind`] where a library carries out the whole call. (With bit 5 instead, all_gather (4) with [`ON_DEVICES`]
/// would be 100, the kind of a message.)
pub(crate) const WHOLE: u8 = 0x10;

/// Set in [`Signature::algo`] where the call has a key.
const KEYED: u8 = 0x80;
/// Set in [`Signature::algo`] where [`Signature::detail`] is that key, and nothing else.
const IS_KEY: u8 = 0x40;
/// The bits of [`Signature::algo`] that say whether there is a key.
pub(crate) const KEY_BITS: u8 = KEYED | IS_KEY;

/// Mixes one more number into a hash, by the finalizer of SplitMix64: the result is as good as random.
pub(crate) fn mix(x: u64, part: u64) -> u64 {
    let mut x = x.wrapping_add(part).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The 32-bit FNV-1a hash of `bytes`, begun anew if `seed` is 0, else continued from the hash `seed`. Never 0.
pub(crate) fn digest(seed: u32, bytes: impl IntoIterator<Item = u8>) -> u32 {
    let start = if seed == 0 { 0x811c_9dc5 } else { seed };
    bytes.into_iter().fold(start, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193)).max(1)
}

impl Signature {
    /// The same call with this key; 0 is the key of a call that was given none.
    pub(crate) fn with_key(mut self, key: u64) -> Signature {
        if key != 0 {
            let high = key >> 32;
            let is_key = self.detail == 0 && high == 0;
            self.algo |= if is_key { KEYED | IS_KEY } else { KEYED };
            self.detail ^= key as u32 ^ if high == 0 { 0 } else { mix(0, high) as u32 };
        }
        self
    }

    /// The collective; `None` for a message.
    pub(crate) fn collective(&self) -> Option<Kind> {
        Kind::from_u8(self.kind & !(VARIED | ON_DEVICES | WHOLE)).filter(|_| !self.is_message())
    }

    /// The algorithm that the call names.
    pub(crate) fn algorithm(&self) -> Option<Algo> {
        Algo::from_u8(self.algo & !KEY_BITS)
    }

    /// Whether this is the signature of a send or a receive.
    pub(crate) fn is_message(&self) -> bool {
        self.kind & !WHOLE == KIND_P2P
    }
}

impl Signature {
    /// The type and the number of elements.
    pub(crate) fn elements(&self) -> String {
        let dtype = match self.dtype {
            LIST => "list",
            dtype => DType::from_u8(dtype).map_or("?", DType::name),
        };
        format!("{dtype} x {}", self.count)
    }

    /// What the send and the receive of a message must have in common besides the tag, as text.
    pub(crate) fn content(&self) -> String {
        let whole =
            if self.kind & WHOLE == 0 { "" } else { ", whole (a library moves it from device to device)" };
        format!("{}{whole}{}", self.elements(), self.details())
    }

    /// The key, a digest of what else ranks must agree on, and the generation, as text: each only if there is one.
    fn details(&self) -> String {
        let detail = self.detail;
        let detail = match self.algo & KEY_BITS {
            KEY_BITS => format!(", key {detail}"),
            0 if detail == 0 => String::new(),
            0 => format!(", details {detail:08x}"),
            _ => format!(", with a key, details {detail:08x}"),
        };
        match self.generation {
            0 => detail,
            generation => format!("{detail}, generation {generation}"),
        }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let elements = self.elements();
        match self.collective() {
            Some(kind) => {
                let varied = if self.kind & VARIED == 0 { "" } else { "_v" };
                write!(f, "{kind}{varied}({elements}")?;
                if let Some(op) = ReduceOp::from_u8(self.op).filter(|_| kind != Kind::Barrier) {
                    write!(f, ", {op}")?;
                }
                if self.op == FUNCTION {
                    f.write_str(", a function")?;
                }
                if kind.rooted() {
                    write!(f, ", root {}", self.root)?;
                }
                if let Some(algo) = self.algorithm() {
                    write!(f, ", {algo}")?;
                }
            }
            None if self.is_message() => write!(f, "message({elements}, tag {}", self.root)?,
            None => write!(f, "unknown kind {}({elements}", self.kind)?,
        }
        if self.kind & ON_DEVICES != 0 && !self.is_message() {
            f.write_str(", on devices")?;
        }
        if self.kind & WHOLE != 0 {
            f.write_str(", whole")?;
        }
        write!(f, "{})", self.details())
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_32_bits_are_never_taken_for_each_other_and_are_shown() {
        let plain = Signature { kind: Kind::AllReduce as u8, count: 4, ..Signature::default() };
        let list = Signature { dtype: LIST, detail: digest(0, *b"lengths"), ..plain };
        let keys = [0, 1, 2, 255, 256, 65_536, 1 << 31, u64::from(u32::MAX), 1 << 32, u64::MAX];
        for call in [plain, list] {
            let keyed = keys.map(|key| call.with_key(key));
            assert_eq!(keyed[0], call, "no key");
            let twice = |i: usize| keyed[..i].contains(&keyed[i]);
            assert!(!(0..keys.len()).any(twice), "{keyed:?}");
        }
        let shown = |call: Signature| call.to_string();
        assert!(shown(plain.with_key(256)).ends_with(", auto, key 256)"), "{}", shown(plain.with_key(256)));
        assert!(shown(plain.with_key(1 << 32)).contains(", with a key, details "));
        assert!(shown(list.with_key(7)).contains(", with a key, details "));
        assert_eq!(plain.with_key(7).collective(), Some(Kind::AllReduce));
    }
}
