//! Which series are compared, and the bars: the limits that our times should keep.

use super::what::{Case, Collective, Series};

/// Our series, and the series that it is compared with.
pub(crate) type Pair = (Series, Series);

/// The pairs that are compared, in the order of the table's columns.
pub(crate) const PAIRS: [Pair; 8] = [
    (Series::Shm, Series::MpiShm),
    (Series::Shm, Series::Gloo),
    (Series::Await, Series::Wait),
    (Series::Threads, Series::Memory),
    (Series::Arena, Series::Memory),
    (Series::Tcp, Series::MpiTcp),
    (Series::Tcp, Series::Gloo),
    (Series::Tcp, Series::Exchange),
];

/// The most that a measurement may be to pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    /// Our time divided by theirs.
    Ratio(f64),
    /// Our time minus theirs, in microseconds.
    More(f64),
}

pub(crate) struct Bar {
    pub(crate) collectives: &'static [Collective],
    pub(crate) pair: Pair,
    /// The smallest and the largest size, both included.
    pub(crate) bytes: (u64, u64),
    /// The numbers of ranks that the bar is for. Empty: any number.
    pub(crate) ranks: &'static [usize],
    pub(crate) limit: Limit,
}

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;
const ANY: u64 = u64::MAX;

const fn all_reduce(pair: Pair, bytes: (u64, u64), ranks: &'static [usize], limit: Limit) -> Bar {
    Bar { collectives: &[Collective::AllReduce], pair, bytes, ranks, limit }
}

/// All bars. Where no bar is for a size or number of ranks, the comparison is reported without a verdict.
pub(crate) const BARS: [Bar; 14] = {
    use Limit::{More, Ratio};
    use Series::{Arena, Await, Exchange, Gloo, Memory, MpiShm, MpiTcp, Shm, Tcp, Threads, Wait};
    [
        all_reduce((Shm, MpiShm), (4, 16 * K), &[2, 4], Ratio(1.2)),
        all_reduce((Shm, MpiShm), (64 * K, 64 * K), &[], Ratio(0.45)),
        all_reduce((Shm, MpiShm), (256 * K, 16 * M), &[2], Ratio(0.9)),
        all_reduce((Shm, MpiShm), (256 * K, 16 * M), &[4, 8], Ratio(0.7)),
        all_reduce((Shm, MpiShm), (32 * M, 128 * M), &[], Ratio(0.5)),
        all_reduce((Await, Wait), (4, 16 * K), &[2, 4], More(1.0)),
        all_reduce((Shm, Gloo), (0, ANY), &[], Ratio(0.3)),
        all_reduce((Threads, Memory), (M, ANY), &[], Ratio(1.5)),
        all_reduce((Arena, Memory), (M, ANY), &[], Ratio(1.8)),
        all_reduce((Tcp, MpiTcp), (0, ANY), &[], Ratio(1.0)),
        all_reduce((Tcp, Gloo), (0, 64 * K), &[], Ratio(0.15)),
        all_reduce((Tcp, Gloo), (64 * K + 1, ANY), &[], Ratio(0.8)),
        all_reduce((Tcp, Exchange), (M, ANY), &[], Ratio(1.3)),
        Bar {
            collectives: &[
                Collective::ReduceScatter,
                Collective::AllGather,
                Collective::Broadcast,
                Collective::Reduce,
                Collective::AllToAll,
            ],
            pair: (Shm, MpiShm),
            bytes: (64 * K, ANY),
            ranks: &[],
            limit: Ratio(0.8),
        },
    ]
};

impl Bar {
    fn holds_for(&self, case: Case, pair: Pair) -> bool {
        let ranks = self.ranks.is_empty() || self.ranks.contains(&case.ranks);
        let bytes = self.bytes.0 <= case.bytes && case.bytes <= self.bytes.1;
        self.pair == pair && self.collectives.contains(&case.collective) && ranks && bytes
    }

    /// The bar in words, for the table.
    pub(crate) fn words(&self) -> String {
        let names: Vec<&str> = self.collectives.iter().map(|collective| collective.name()).collect();
        let ranks: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        let ranks = if ranks.is_empty() { String::new() } else { format!(", {} ranks", ranks.join(" and ")) };
        let bytes = match self.bytes {
            (0, ANY) => "every size".into(),
            (0, most) => format!("up to {}", size(most)),
            (least, ANY) if least % K == 1 => format!("above {}", size(least - 1)),
            (least, ANY) => format!("from {}", size(least)),
            (least, most) if least == most => size(least),
            (least, most) => format!("{} to {}", size(least), size(most)),
        };
        format!("{}: {} / {}, {bytes}{ranks}", names.join(", "), self.pair.0.name(), self.pair.1.name())
    }
}

impl Limit {
    /// The value that is compared with the limit.
    pub(crate) fn measure(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Limit::Ratio(_) => ours / theirs,
            Limit::More(_) => ours - theirs,
        }
    }

    pub(crate) fn most(self) -> f64 {
        match self {
            Limit::Ratio(most) | Limit::More(most) => most,
        }
    }

    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Limit::Ratio(_) => format!("{value:.2}"),
            Limit::More(_) => format!("{value:+.2} us"),
        }
    }
}

/// Our time and theirs for one case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Comparison {
    pub(crate) case: Case,
    pub(crate) pair: Pair,
    /// Microseconds.
    pub(crate) ours: f64,
    pub(crate) theirs: f64,
    /// The index in [`BARS`] of the bar for this case, if there is one.
    pub(crate) bar: Option<usize>,
}

impl Comparison {
    pub(crate) fn new(case: Case, pair: Pair, ours: f64, theirs: f64) -> Comparison {
        let bar = BARS.iter().position(|bar| bar.holds_for(case, pair));
        Comparison { case, pair, ours, theirs, bar }
    }

    pub(crate) fn limit(&self) -> Option<Limit> {
        Some(BARS.get(self.bar?)?.limit)
    }

    /// How far the measure is above its limit: as a share of a [`Limit::Ratio`], in microseconds for [`Limit::More`]. `None`: not above, or no bar.
    pub(crate) fn short(&self) -> Option<f64> {
        let limit = self.limit()?;
        let above = limit.measure(self.ours, self.theirs) - limit.most();
        let by = match limit {
            Limit::Ratio(most) => above / most,
            Limit::More(_) => above,
        };
        (above > 0.0).then_some(by)
    }

    /// The text of the table's cell: the measure, the limit, and by how much it is exceeded.
    pub(crate) fn words(&self) -> String {
        let unit =
            if self.pair == (Series::Await, Series::Wait) { Limit::More(0.0) } else { Limit::Ratio(0.0) };
        let limit = self.limit();
        let value = limit.unwrap_or(unit).show(limit.unwrap_or(unit).measure(self.ours, self.theirs));
        match (limit, self.short()) {
            (None, _) => value,
            (Some(limit), None) => format!("{value} (pass, {})", limit.show(limit.most())),
            (Some(limit), Some(by)) => {
                let by = match limit {
                    Limit::Ratio(_) => format!("{:.0} %", (by * 100.0).max(1.0)),
                    Limit::More(_) => format!("{by:.2} us"),
                };
                format!("**{value}** (short of {} by {by})", limit.show(limit.most()))
            }
        }
    }
}

/// Bytes with a unit: 65536 is "64 KB".
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        b if b >= M && b.is_multiple_of(M) => format!("{} MB", b / M),
        b if b >= K && b.is_multiple_of(K) => format!("{} KB", b / K),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::what::Form;
    use super::*;

    fn compared(ranks: usize, bytes: u64, pair: Pair, ours: f64, theirs: f64) -> Comparison {
        let case = Case { collective: Collective::AllReduce, form: Form::InPlace, ranks, bytes };
        Comparison::new(case, pair, ours, theirs)
    }

    fn most(ranks: usize, bytes: u64, pair: Pair) -> Option<f64> {
        compared(ranks, bytes, pair, 1.0, 1.0).limit().map(Limit::most)
    }

    #[test]
    fn each_size_has_its_bar() {
        let shm = (Series::Shm, Series::MpiShm);
        assert_eq!(
            [4, 16 * K, 64 * K, 256 * K, 16 * M, 32 * M, 128 * M].map(|bytes| most(2, bytes, shm)),
            [Some(1.2), Some(1.2), Some(0.45), Some(0.9), Some(0.9), Some(0.5), Some(0.5)]
        );
        assert_eq!([4, 64 * K, M].map(|bytes| most(8, bytes, shm)), [None, Some(0.45), Some(0.7)]);
        assert_eq!(most(4, 128 * K, shm), None, "between two bars there is none");
        let gloo = (Series::Tcp, Series::Gloo);
        assert_eq!([64 * K, 64 * K + 4].map(|bytes| most(4, bytes, gloo)), [Some(0.15), Some(0.8)]);
        assert_eq!([K, M].map(|bytes| most(4, bytes, (Series::Tcp, Series::Exchange))), [None, Some(1.3)]);
        let case = Case { collective: Collective::Reduce, form: Form::OutOfPlace, ranks: 3, bytes: M };
        assert_eq!(Comparison::new(case, shm, 1.0, 1.0).limit(), Some(Limit::Ratio(0.8)));
        assert_eq!(Comparison::new(case, (Series::Tcp, Series::MpiTcp), 1.0, 1.0).limit(), None);
    }

    #[test]
    fn a_verdict_says_by_how_much() {
        let shm = (Series::Shm, Series::MpiShm);
        assert_eq!(compared(2, 64 * K, shm, 40.0, 100.0).words(), "0.40 (pass, 0.45)");
        assert_eq!(compared(2, 64 * K, shm, 45.0, 100.0).words(), "0.45 (pass, 0.45)");
        assert_eq!(compared(2, 64 * K, shm, 90.0, 100.0).words(), "**0.90** (short of 0.45 by 100 %)");
        assert_eq!(compared(8, 4, shm, 2.0, 1.0).words(), "2.00");
        let polled = (Series::Await, Series::Wait);
        assert_eq!(compared(2, 4, polled, 1.5, 1.0).words(), "+0.50 us (pass, +1.00 us)");
        assert_eq!(compared(2, 4, polled, 3.5, 1.0).words(), "**+2.50 us** (short of +1.00 us by 1.50 us)");
        assert_eq!(compared(2, M, polled, 1.5, 1.0).words(), "+0.50 us");
    }

    #[test]
    fn every_bar_is_of_a_pair_that_is_compared() {
        for bar in &BARS {
            assert!(PAIRS.contains(&bar.pair), "{}", bar.words());
            assert!(bar.collectives.iter().all(|c| bar.pair.0.times(*c) && bar.pair.1.times(*c)));
        }
        assert_eq!(BARS[1].words(), "all_reduce: shm / OpenMPI shm, 64 KB");
        assert_eq!(BARS[3].words(), "all_reduce: shm / OpenMPI shm, 256 KB to 16 MB, 4 and 8 ranks");
        assert_eq!(BARS[6].words(), "all_reduce: shm / Gloo, every size");
        assert_eq!(BARS[11].words(), "all_reduce: tcp / Gloo, above 64 KB");
    }
}
