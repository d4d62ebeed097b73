//! The collectives and the algorithms by name.

use std::fmt;

/// A collective operation.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every rank ends with the reduction of all ranks' `count` elements.
    AllReduce = 1,
    /// Every rank ends with the root's `count` elements.
    Broadcast = 2,
    /// The root ends with the reduction; the other ranks' buffers are unchanged.
    Reduce = 3,
    /// Every rank ends with all ranks' `count` elements, in rank order (`n * count`).
    AllGather = 4,
    /// Rank r ends with block r (`count` elements) of the reduction of `n * count` elements.
    ReduceScatter = 5,
    /// No rank returns before every rank has called.
    Barrier = 6,
    /// The root ends with all ranks' `count` elements, in rank order (`n * count`).
    Gather = 7,
    /// Rank r ends with block r (`count` elements) of the root's `n * count` elements.
    Scatter = 8,
    /// Rank r ends with block r of every rank's `n * count` elements, in rank order (`n * count`).
    AllToAll = 9,
    /// Rank r ends with the reduction of the `count` elements of ranks `0..=r`.
    Scan = 10,
    /// Rank r ends with the reduction of the `count` elements of ranks `0..r`; rank 0's output is unchanged.
    ExScan = 11,
}

/// How a collective is carried out. Which there are for which, and at what cost: `docs/algorithms.md`.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Algo {
    /// Chosen by size, group and links; the same on every rank.
    #[default]
    Auto = 0,
    /// One hop: every rank sends all it has to all who need it. Lowest latency, most bytes.
    OneShot = 1,
    /// Straight from who has it to who needs it; where something is reduced or spread, each rank does so with one
    /// chunk: two hops ("two-shot").
    Direct = 2,
    /// Round the ring; the fewest bytes on each wire, `n-1` hops, and as many back in an all_reduce.
    Ring = 3,
    /// Exchange with partners at doubling distance (in an all_reduce bidirectional, BDE): `log2 n` hops.
    RecursiveDoubling = 4,
    /// Each round tells the rank `2^k` further on: `ceil(log2 n)` hops. Barrier.
    Dissemination = 5,
    /// Everyone to rank 0, and back from there: the textbook's (and the seeds') first try.
    Naive = 6,
    /// Two binary trees, half the data each; no rank is an inner node in both.
    DoubleBinaryTree = 7,
    /// A minimum spanning tree: the group is halved again and again. In rank order from any root.
    Mst = 8,
    /// Reduce-scatter by halving distances, then all-gather by doubling them; any number of ranks, none idles.
    HalvingDoubling = 9,
    /// First inside each host, then between hosts, then inside each host. Several hosts with several ranks.
    TwoLevel = 10,
    /// A binomial tree, ranks counted from the root.
    Binomial = 11,
    /// From rank to rank in one line, in slices that follow each other.
    Chain = 12,
    /// Broadcast as scatter and all-gather by a ring; reduce as reduce-scatter by a ring and gather.
    ScatterAllGather = 13,
    /// In each round ranks are paired, and partners exchange what is each other's.
    Pairwise = 14,
    /// Sums for others go to partners at halving distance: `log2 n` hops, any number of ranks.
    RecursiveHalving = 15,
}

impl Kind {
    /// All collectives.
    pub const ALL: [Kind; 11] = [
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::Barrier,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllToAll,
        Kind::Scan,
        Kind::ExScan,
    ];

    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Barrier => "barrier",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Scan => "scan",
            Kind::ExScan => "exscan",
        }
    }

    /// The collective with this wire number.
    pub fn from_u8(value: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|k| *k as u8 == value)
    }

    /// Whether values are combined.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::Barrier | Kind::Scan | Kind::ExScan
        )
    }

    /// Whether there is a form with a count for each rank.
    pub const fn varies(self) -> bool {
        matches!(self, Kind::AllGather | Kind::ReduceScatter | Kind::Gather | Kind::Scatter | Kind::AllToAll)
    }

    /// Whether one rank is the root.
    pub const fn rooted(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Kind {
    type Err = String;
    fn from_str(s: &str) -> Result<Kind, String> {
        Kind::ALL.into_iter().find(|kind| kind.name() == s).ok_or_else(|| {
            let names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
            format!("no such collective; there is {}", names.join(", "))
        })
    }
}

impl Algo {
    /// All algorithms but [`Algo::Auto`].
    pub const ALL: [Algo; 15] = [
        Algo::OneShot,
        Algo::Direct,
        Algo::Ring,
        Algo::RecursiveDoubling,
        Algo::Dissemination,
        Algo::Naive,
        Algo::DoubleBinaryTree,
        Algo::Mst,
        Algo::HalvingDoubling,
        Algo::TwoLevel,
        Algo::Binomial,
        Algo::Chain,
        Algo::ScatterAllGather,
        Algo::Pairwise,
        Algo::RecursiveHalving,
    ];

    /// Its name, as in `ALLSTREAM_ALGO` and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Algo::Auto => "auto",
            Algo::OneShot => "oneshot",
            Algo::Direct => "direct",
            Algo::Ring => "ring",
            Algo::RecursiveDoubling => "recursive_doubling",
            Algo::Dissemination => "dissemination",
            Algo::Naive => "naive",
            Algo::DoubleBinaryTree => "double_binary_tree",
            Algo::Mst => "mst",
            Algo::HalvingDoubling => "halving_doubling",
            Algo::TwoLevel => "two_level",
            Algo::Binomial => "binomial",
            Algo::Chain => "chain",
            Algo::ScatterAllGather => "scatter_all_gather",
            Algo::Pairwise => "pairwise",
            Algo::RecursiveHalving => "recursive_halving",
        }
    }

    /// The algorithm with this wire number.
    pub fn from_u8(value: u8) -> Option<Algo> {
        [Algo::Auto].into_iter().chain(Algo::ALL).find(|a| *a as u8 == value)
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Algo {
    type Err = String;
    fn from_str(s: &str) -> Result<Algo, String> {
        let plain = |s: &str| s.to_ascii_lowercase().replace(['-', '_'], "");
        if plain(s) == "bde" {
            return Ok(Algo::RecursiveDoubling);
        }
        [Algo::Auto].into_iter().chain(Algo::ALL).find(|a| plain(a.name()) == plain(s)).ok_or_else(|| {
            let names: Vec<_> = Algo::ALL.iter().map(|a| a.name()).collect();
            format!("unknown algorithm {s:?}: expected auto, {} (or bde)", names.join(", "))
        })
    }
}
