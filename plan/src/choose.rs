//! Which algorithm: a first rule of thumb, by size and group.
//!
//! Some constants are round figures, some stand beside a measurement. A table of the tuner's (`allstream tune`) goes before them,
//! where there is one. Every rank must come to the same answer, so nothing here may differ by rank.
//!
//! What these rules never choose, only a table or a name: `naive`; trees and chains for broadcast and reduce, which want a measured latency;
//! `binomial` for gather and scatter, as blocks are messages of their own here and a tree saves the root none.

use crate::promises::{deterministic, keeps_rank_order};
use crate::{Algo, Kind};

/// Below this, the number of hops is all that counts.
pub const SMALL: usize = 16 << 10;
/// Up to this size messages on a network cost more than what is in them: from four ranks on, and above [`SMALL`] from two on,
/// `log2 n` exchanges beat one to everybody and two halves of that. On loopback, at 4 ranks: 50 us against 64 at 4 B, 71 against
/// 149 at 32 KB, 105 against 167 at 64 KB, 177 against 202 at 128 KB (`allstream perf --check-tuning`). It sends more bytes,
/// which a network of 1 Gbit/s would notice from 16 KB on.
pub const FEW_MESSAGES: usize = 64 << 10;
/// Up to this size a root on the network sends a broadcast to all by itself.
pub const FLAT_BROADCAST: usize = 64 << 10;
/// Up to so many bytes of all other ranks together the root of a reduce folds by itself, on one host and over a network. On 2
/// cores that took 0.6 to 0.7 of the time at 2 ranks whatever the size, and at 4 ranks 0.35 at 32 KB, 0.6 at 512 KB, 0.7 at 4 MB
/// on one host, 0.1, 0.5 and 0.9 on loopback (`allstream perf --check-tuning`). The limits are for machines with a core for each
/// rank, where the others would stand idle, and for networks of which the root has one port.
pub const FOLDED_BY_ROOT: [usize; 2] = [512 << 10, 256 << 10];
/// Up to this many ranks, all-to-all in one shot beats `log2 n` exchanges.
pub const ONE_SHOT_RANKS: usize = 8;
/// Up to this many ranks, everyone talks to everyone; beyond, the ring.
pub const DIRECT_RANKS: usize = 16;
/// From this size on, several ranks of a host send one sum to the other hosts, not each its own: with p ranks a host
/// that is p times less on the network, for two hops more.
pub const TWO_LEVEL: usize = 64 << 10;

/// What the choice depends on besides the operation. The same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Env {
    /// Ranks in the group.
    pub n: usize,
    /// Whether all ranks share memory.
    pub one_host: bool,
    /// Hosts of the group; 0 where that is not known. Who says so gives the plan their ranks: [`super::Shape::hosts`].
    pub hosts: usize,
    /// Only algorithms that are [`deterministic`].
    pub deterministic: bool,
    /// Only algorithms that [keep the order of ranks](keeps_rank_order).
    pub in_order: bool,
}

/// The algorithm for a collective of `bytes` (of `count` elements: of one block, where there are several; of the
/// largest, where blocks differ). It is there for every shape of these ranks and hosts.
#[inline]
pub fn choose(kind: Kind, bytes: usize, env: &Env) -> Algo {
    let small = bytes <= SMALL;
    let fits = |algo: Algo| {
        (!env.deterministic || deterministic(kind, algo)) && (!env.in_order || keeps_rank_order(kind, algo))
    };
    let best = match kind {
        Kind::AllReduce if few_messages(bytes, env) && fits(Algo::RecursiveDoubling) => {
            Algo::RecursiveDoubling
        }
        Kind::AllReduce if small && env.n <= ONE_SHOT_RANKS => Algo::OneShot,
        Kind::AllReduce if small => Algo::RecursiveDoubling,
        Kind::AllReduce if bytes >= TWO_LEVEL && fits(Algo::TwoLevel) && two_levels(env) => Algo::TwoLevel,
        Kind::AllReduce if env.n <= DIRECT_RANKS => Algo::Direct,
        Kind::AllReduce if fits(Algo::Ring) => Algo::Ring,
        Kind::AllReduce => Algo::DoubleBinaryTree,
        Kind::Broadcast if env.one_host || bytes <= FLAT_BROADCAST => Algo::OneShot,
        Kind::Reduce if small || folded_by_root(bytes, env) => Algo::OneShot,
        Kind::Broadcast | Kind::Reduce | Kind::AllGather | Kind::ReduceScatter => Algo::Direct,
        Kind::Barrier => Algo::Dissemination,
        Kind::Gather | Kind::Scatter => Algo::Direct,
        Kind::AllToAll => Algo::Pairwise,
        Kind::Scan | Kind::ExScan if small => Algo::RecursiveDoubling,
        Kind::Scan | Kind::ExScan => Algo::Chain,
    };
    match kind {
        _ if fits(best) => best,
        Kind::Scan | Kind::ExScan => Algo::OneShot,
        _ => Algo::Direct,
    }
}

fn folded_by_root(bytes: usize, env: &Env) -> bool {
    let limit = FOLDED_BY_ROOT[usize::from(!env.one_host)];
    env.n <= 2 || (env.n - 1).saturating_mul(bytes) <= limit
}

fn few_messages(bytes: usize, env: &Env) -> bool {
    let two_level = bytes >= TWO_LEVEL && two_levels(env);
    !env.one_host && bytes <= FEW_MESSAGES && !two_level && if bytes <= SMALL { env.n > 3 } else { env.n > 1 }
}

fn two_levels(env: &Env) -> bool {
    !env.one_host && env.hosts > 1 && env.hosts < env.n
}
