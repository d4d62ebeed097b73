//! Rules of thumb for which algorithm to take, by size and group.
//!
//! Some constants are round figures, for some a measurement is given. Where there is a tuning table (`allstream tune`), it takes
//! precedence. All ranks must come to the same answer, so nothing here may depend on the rank.
//!
//! Some algorithms are never chosen by these rules, only by a table or by the user. Among them are `naive`; trees and chains for broadcast
//! and reduce, which are worth it only at some latencies; and `binomial` for gather and scatter: each block is a message of its own here, so a
//! tree saves the root no messages.

use crate::promises::{deterministic, keeps_rank_order};
use crate::{Algo, Kind};

/// Up to this size only the number of hops matters.
pub const SMALL: usize = 16 << 10;
/// Up to this size the number of messages on a network costs more than their bytes: with four ranks or more, and above [`SMALL`] with
/// two or more, recursive doubling (`log2 n` exchanges) beats one-shot and direct. On loopback, at 4 ranks: 50 us against 64 at 4 B,
/// 71 against 149 at 32 KB, 105 against 167 at 64 KB, 177 against 202 at 128 KB (`allstream perf --check-tuning`). Recursive doubling
/// sends more bytes than direct, which would matter on a network of 1 Gbit/s from 16 KB on.
pub const FEW_MESSAGES: usize = 64 << 10;
/// Up to this size, and on one host at any size, the root of a broadcast sends the data to each rank itself.
pub const FLAT_BROADCAST: usize = 64 << 10;
/// If the other ranks' inputs have at most this many bytes together (the first limit is for one host, the second for a network), the root
/// of a reduce folds them all itself; with two ranks, whatever the size. On 2 cores one-shot took 0.6 to 0.7 of the time of `direct` at 2 ranks
/// whatever the size, and at 4 ranks 0.35 at 32 KB, 0.6 at 512 KB, 0.7 at 4 MB on one host, 0.1, 0.5 and 0.9 on loopback (`allstream
/// perf --check-tuning`). Above the limits, the other ranks would idle on machines with a core for each, and the root's port would be
/// the bottleneck.
pub const FOLDED_BY_ROOT: [usize; 2] = [512 << 10, 256 << 10];
/// Up to this many ranks a small all_reduce in one shot beats `log2 n` exchanges.
pub const ONE_SHOT_RANKS: usize = 8;
/// Up to this many ranks a large all_reduce is `direct`, where each rank sends to each other rank; with more ranks it is a ring.
pub const DIRECT_RANKS: usize = 16;
/// From this size on the ranks of a host first sum their data, and only that sum goes to other hosts: with p ranks on each host
/// the network carries p times fewer bytes, for two hops more.
pub const TWO_LEVEL: usize = 64 << 10;

/// What the choice depends on besides the operation. It must be the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Env {
    /// Ranks in the group.
    pub n: usize,
    /// Whether all ranks share memory.
    pub one_host: bool,
    /// Number of hosts of the group; 0 if it is not known. Whoever sets it must also tell the plan each rank's host ([`super::Shape::hosts`]).
    pub hosts: usize,
    /// Only algorithms that are [`deterministic`].
    pub deterministic: bool,
    /// Only algorithms that [keep the order of ranks](keeps_rank_order).
    pub in_order: bool,
}

/// The algorithm for a collective of `bytes`: the size of one block if a buffer has several, and of the largest block if they differ. There is a plan
/// by this algorithm for every shape with these numbers of ranks and hosts.
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
