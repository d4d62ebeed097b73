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

            /// The name, as on the command line and in environment variables.
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }

            /// The value that has this number between ranks.
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
    /// How a collective is carried out. `docs/algorithms.md` lists the algorithms of each collective, and what they cost.
    #[derive(Default)]
    pub enum Algo {
        /// Chosen by size, group and links; the same on every rank.
        #[default]
        Auto = 0 "auto",
        /// Every rank sends all its data to all ranks that need them: one hop, but the most bytes.
        OneShot = 1 "oneshot",
        /// Data go straight from the rank that has them to the ranks that need them. In an all_reduce, a reduce and a
        /// broadcast each rank reduces or distributes one chunk: two hops ("two-shot").
        Direct = 2 "direct",
        /// Each rank sends only to the next one in a ring: the fewest bytes on each wire, `n-1` hops, twice as many in an all_reduce.
        Ring = 3 "ring",
        /// Ranks exchange with partners at distance 1, 2, 4, ... (in an all_reduce: bidirectional exchange, BDE): `log2 n` hops.
        RecursiveDoubling = 4 "recursive_doubling",
        /// For barriers: in round k each rank sends a token to the rank `2^k` after it. `ceil(log2 n)` hops.
        Dissemination = 5 "dissemination",
        /// All ranks send to rank 0, which sends the result to all: the textbook's first try, and the baseline for the others.
        Naive = 6 "naive",
        /// Two binary trees, half the data each; no rank is an inner node in both.
        DoubleBinaryTree = 7 "double_binary_tree",
        /// A minimum spanning tree: the group is halved again and again. Combines in rank order, whatever the root.
        Mst = 8 "mst",
        /// A reduce-scatter at halving distances, then an all-gather at doubling ones; for any number of ranks, none of which idles.
        HalvingDoubling = 9 "halving_doubling",
        /// First inside each host, then between hosts, then inside each host. For several hosts, not all of which have only one rank.
        TwoLevel = 10 "two_level",
        /// A binomial tree of the ranks, counted from the root.
        Binomial = 11 "binomial",
        /// From rank to rank in one line, slice after slice.
        Chain = 12 "chain",
        /// Broadcast as scatter and all-gather by a ring; reduce as reduce-scatter by a ring and gather.
        ScatterAllGather = 13 "scatter_all_gather",
        /// In each round the ranks form pairs, and the two of a pair exchange the blocks that they have for each other.
        Pairwise = 14 "pairwise",
        /// Sums for other ranks go to partners at halving distances: `log2 n` hops, for any number of ranks.
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

    /// Whether this collective has a form in which each rank has a count of its own.
    #[inline]
    pub const fn varies(self) -> bool {
        matches!(self, Kind::AllGather | Kind::ReduceScatter | Kind::Gather | Kind::Scatter | Kind::AllToAll)
    }

    /// Whether each rank gets the reduction of the ranks before it (in a scan also of itself).
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
