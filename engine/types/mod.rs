//! Ranks, element types, and the signature by which ranks agree on an operation.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use allstream_kernels::{DType, Element, ReduceOp, bf16, f16};

mod kind;

pub use kind::{Algo, Kind};

/// A rank inside one communicator, `0..n`.
pub type Rank = usize;

/// What a rank called, in the 24 bytes that travel with every frame: two ranks whose signatures differ
/// are told so before any data is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature {
    /// Collective ([`Kind`]) or 100 for send/recv.
    pub kind: u8,
    /// [`DType`].
    pub dtype: u8,
    /// [`ReduceOp`]; 255 where nothing is reduced.
    pub op: u8,
    /// [`Algo`] that was asked for, after [`Algo::Auto`] was resolved.
    pub algo: u8,
    /// The root's rank (0 where there is none).
    pub root: u32,
    /// Elements per rank, as the collective counts them.
    pub count: u64,
    /// How often the communicator was re-created.
    pub generation: u32,
}

/// [`Signature::kind`] of a point-to-point message.
pub(crate) const KIND_P2P: u8 = 100;
/// [`Signature::op`] where nothing is reduced.
pub(crate) const NO_OP: u8 = 255;

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = DType::from_u8(self.dtype).map_or("?", DType::name);
        match Kind::from_u8(self.kind) {
            Some(kind) => {
                write!(f, "{kind}({dtype} x {}", self.count)?;
                if let Some(op) = ReduceOp::from_u8(self.op).filter(|_| kind != Kind::Barrier) {
                    write!(f, ", {op}")?;
                }
                if kind.rooted() {
                    write!(f, ", root {}", self.root)?;
                }
                if let Some(algo) = Algo::from_u8(self.algo) {
                    write!(f, ", {algo}")?;
                }
            }
            None if self.kind == KIND_P2P => write!(f, "message({dtype} x {}", self.count)?,
            None => write!(f, "unknown kind {}({dtype} x {}", self.kind, self.count)?,
        }
        if self.generation != 0 {
            write!(f, ", generation {}", self.generation)?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
