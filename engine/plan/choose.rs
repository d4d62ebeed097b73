//! Which algorithm: a first rule of thumb, by size and group.
//!
//! The constants are round figures, not measurements. The tuner (a cost model with measured link figures)
//! replaces them; until then every rank must come to the same answer, so nothing here may differ by rank.

use super::{Algo, Kind};

/// Below this, the number of hops is all that counts. To be replaced by the tuner.
pub const SMALL: usize = 16 << 10;
/// Up to this size a root on the network sends a broadcast to all by itself. To be replaced by the tuner.
pub const FLAT_BROADCAST: usize = 64 << 10;
/// Up to this many ranks, all-to-all in one shot beats `log2 n` exchanges. To be replaced by the tuner.
pub const ONE_SHOT_RANKS: usize = 8;
/// Up to this many ranks, everyone talks to everyone; beyond, the ring. To be replaced by the tuner.
pub const DIRECT_RANKS: usize = 16;

/// What the choice depends on besides the operation. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Env {
    /// Ranks in the group.
    pub n: usize,
    /// Whether all ranks share memory.
    pub one_host: bool,
}

/// The algorithm for a collective of `bytes` (of `count` elements: of one block, where there are several).
pub fn choose(kind: Kind, bytes: usize, env: &Env) -> Algo {
    let small = bytes <= SMALL;
    match kind {
        Kind::AllReduce if small && env.n <= ONE_SHOT_RANKS => Algo::OneShot,
        Kind::AllReduce if small => Algo::RecursiveDoubling,
        Kind::AllReduce if env.n <= DIRECT_RANKS => Algo::Direct,
        Kind::AllReduce => Algo::Ring,
        Kind::Broadcast if env.one_host || bytes <= FLAT_BROADCAST => Algo::OneShot,
        Kind::Reduce if small => Algo::OneShot,
        Kind::Broadcast | Kind::Reduce | Kind::AllGather | Kind::ReduceScatter => Algo::Direct,
        Kind::Barrier => Algo::Dissemination,
        Kind::Gather | Kind::Scatter => Algo::Direct,
        Kind::AllToAll => Algo::Pairwise,
        Kind::Scan | Kind::ExScan => Algo::Chain,
    }
}
