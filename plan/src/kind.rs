//! The collectives and the algorithms by name.

use std::fmt;

/// An enumeration whose values have a number, which travels between ranks, and a name, which people read and write.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $type:ident {
        $($(#[$of_variant:meta])* $variant:ident = $number:literal $name:literal,)*
    }) => {
        $(#[$meta])*
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $type {
            $($(#[$of_variant])* $variant = $number,)*
        }

        impl $type {
            const EVERY: [$type; [$($number),*].len()] = [$($type::$variant),*];

            /// The field's name, as on the command line and in variables of the environment.
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }

            /// The one with this wire number.
            #[inline]
            pub fn from_u8(value: u8) -> Option<$type> {
                $type::EVERY.into_iter().find(|one| *one as u8 == value)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named! {
    /// A collective operation.
    pub enum Kind {
        /// Every rank ends with the reduction of all ranks' `count` elements.
        AllReduce = 1 "all_reduce",
        /// Every rank ends with the root's `count` elements.
        Broadcast = 2 "broadcast",
        /// The root ends with the reduction; the other ranks' buffers are unchanged.
        Reduce = 3 "reduce",
        /// Every rank ends with all ranks' `count` elements, in rank order (`n * count`).
        AllGather = 4 "all_gather",
        /// Rank r ends with block r (`count` elements) of the reduction of `n * count` elements.
        ReduceScatter = 5 "reduce_scatter",
        /// No rank returns before every rank has called.
        Barrier = 6 "barrier",
        /// The root ends with all ranks' `count` elements, in rank order (`n * count`).
        Gather = 7 "gather",
        /// Rank r ends with block r (`count` elements) of the root's `n * count` elements.
        Scatter = 8 "scatter",
        /// Rank r ends with block r of every rank's `n * count` elements, in rank order (`n * count`).
        AllToAll = 9 "all_to_all",
        /// Rank r ends with the reduction of the `count` elements of ranks `0..=r`.
        Scan = 10 "scan",
        /// Rank r ends with the reduction of the `count` elements of ranks `0..r`; rank 0's output is unchanged.
        ExScan = 11 "exscan",
    }
}

named! {
    /// How a collective is carried out. Which there are for which, and at what cost: `docs/algorithms.md`.
    #[derive(Default)]
    pub enum Algo {
        /// Chosen by size, group and links; the same on every rank.
        #[default]
        Auto = 0 "auto",
        /// One hop: every rank sends all it has to all who need it. Lowest latency, most bytes.
        OneShot = 1 "oneshot",
        /// Straight from who has it to who needs it; where something is reduced or spread, each rank does so with one
        /// chunk: two hops ("two-shot").
        Direct = 2 "direct",
        /// Round the ring; the fewest bytes on each wire, `n-1` hops, and as many back in an all_reduce.
        Ring = 3 "ring",
        /// Exchange with partners at doubling distance (in an all_reduce bidirectional, BDE): `log2 n` hops.
        RecursiveDoubling = 4 "recursive_doubling",
        /// Each round tells the rank `2^k` further on: `ceil(log2 n)` hops. Barrier.
        Dissemination = 5 "dissemination",
        /// Everyone to rank 0, and back from there: the textbook's (and the seeds') first try.
        Naive = 6 "naive",
        /// Two binary trees, half the data each; no rank is an inner node in both.
        DoubleBinaryTree = 7 "double_binary_tree",
        /// A minimum spanning tree: the group is halved again and again. In rank order from any root.
        Mst = 8 "mst",
        /// Reduce-scatter by halving distances, then all-gather by doubling them; any number of ranks, none idles.
        HalvingDoubling = 9 "halving_doubling",
        /// First inside each host, then between hosts, then inside each host. Several hosts with several ranks.
        TwoLevel = 10 "two_level",
        /// A binomial tree, ranks counted from the root.
        Binomial = 11 "binomial",
        /// From rank to rank in one line, in slices that follow each other.
        Chain = 12 "chain",
        /// Broadcast as scatter and all-gather by a ring; reduce as reduce-scatter by a ring and gather.
        ScatterAllGather = 13 "scatter_all_gather",
        /// In each round ranks are paired, and partners exchange what is each other's.
        Pairwise = 14 "pairwise",
        /// Sums for others go to partners at halving distance: `log2 n` hops, any number of ranks.
        RecursiveHalving = 15 "recursive_halving",
    }
}

impl Kind {
    /// All collectives.
    pub const ALL: [Kind; 11] = Kind::EVERY;

    /// Whether values are combined.
    #[inline]
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::Barrier | Kind::Scan | Kind::ExScan
        )
    }

    /// Whether there is a form with a count for each rank.
    #[inline]
    pub const fn varies(self) -> bool {
        matches!(self, Kind::AllGather | Kind::ReduceScatter | Kind::Gather | Kind::Scatter | Kind::AllToAll)
    }

    /// Whether a rank gets what the ranks before it have combined.
    #[inline]
    pub const fn is_scan(self) -> bool {
        matches!(self, Kind::Scan | Kind::ExScan)
    }

    /// Whether one rank is the root.
    #[inline]
    pub const fn rooted(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
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
    pub const ALL: [Algo; 15] = {
        let mut all = [Algo::Auto; 15];
        let (_, but_auto) = Algo::EVERY.split_at(1);
        all.copy_from_slice(but_auto);
        all
    };
}

impl std::str::FromStr for Algo {
    type Err = String;
    fn from_str(s: &str) -> Result<Algo, String> {
        let plain = |s: &str| s.to_ascii_lowercase().replace(['-', '_'], "");
        if plain(s) == "bde" {
            return Ok(Algo::RecursiveDoubling);
        }
        Algo::EVERY.into_iter().find(|a| plain(a.name()) == plain(s)).ok_or_else(|| {
            let names: Vec<_> = Algo::ALL.iter().map(|a| a.name()).collect();
            format!("unknown algorithm {s:?}: expected auto, {} (or bde)", names.join(", "))
        })
    }
}
