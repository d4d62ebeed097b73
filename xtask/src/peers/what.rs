//! What is measured, and the figures.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;

/// A collective; its name is that of `allstream perf` and of the peers' programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    AllToAll,
}

impl Collective {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::AllToAll => "all_to_all",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Collective> {
        Collective::value_variants().iter().copied().find(|collective| collective.name() == name)
    }

    /// The forms that are compared. MPI's broadcast has one buffer; all_reduce is what training loops call, in place.
    pub(crate) fn forms(self) -> &'static [Form] {
        match self {
            Collective::AllReduce | Collective::Broadcast => &[Form::InPlace],
            _ => &[Form::OutOfPlace, Form::InPlace],
        }
    }
}

/// Whether the result comes into the buffer of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    OutOfPlace,
    InPlace,
}

impl Form {
    pub(crate) const ALL: [Form; 2] = [Form::OutOfPlace, Form::InPlace];

    /// As the programs write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Form::OutOfPlace => "out_of_place",
            Form::InPlace => "in_place",
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Form::OutOfPlace => "out of place",
            Form::InPlace => "in place",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Link {
    /// Ranks on one host by memory
    Shm,
    /// Loopback TCP
    Tcp,
}

/// A program, in a certain way: a column of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Series {
    /// Ours between processes, users' own buffers, `.wait()`.
    Shm,
    MpiShm,
    /// As `Shm`, `.await` on a current-thread runtime.
    Await,
    /// As `Shm`, in turns with those: what they are held against.
    Wait,
    /// As `Shm`, buffers of `comm.alloc()`.
    Arena,
    /// Ours between threads of one process.
    Threads,
    /// Reads every buffer once, writes every buffer once.
    Memory,
    Tcp,
    MpiTcp,
    /// The bytes of an all_reduce both ways over loopback, nothing else.
    Exchange,
    Gloo,
}

impl Series {
    /// In the order in which they run: what is compared stands side by side.
    pub(crate) const ALL: [Series; 11] = [
        Series::Shm,
        Series::MpiShm,
        Series::Await,
        Series::Wait,
        Series::Arena,
        Series::Threads,
        Series::Memory,
        Series::Tcp,
        Series::MpiTcp,
        Series::Exchange,
        Series::Gloo,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Series::Shm => "shm",
            Series::MpiShm => "OpenMPI shm",
            Series::Await => "shm .await",
            Series::Wait => "shm .wait in turns",
            Series::Arena => "shm arena",
            Series::Threads => "threads",
            Series::Memory => "memory floor",
            Series::Tcp => "tcp",
            Series::MpiTcp => "OpenMPI tcp",
            Series::Exchange => "tcp exchange",
            Series::Gloo => "Gloo",
        }
    }

    pub(crate) fn is_ours(self) -> bool {
        use Series::{Arena, Await, Shm, Tcp, Threads, Wait};
        matches!(self, Shm | Await | Wait | Arena | Threads | Tcp)
    }

    pub(crate) fn is_mpi(self) -> bool {
        matches!(self, Series::MpiShm | Series::MpiTcp)
    }

    /// Whether it is run for these links. Gloo, which has TCP only, is a measure for both.
    pub(crate) fn on(self, links: &[Link]) -> bool {
        let link = match self {
            Series::Gloo => return true,
            Series::Tcp | Series::MpiTcp | Series::Exchange => Link::Tcp,
            _ => Link::Shm,
        };
        links.contains(&link)
    }

    /// Whether it is run for this collective: variants, floors and Gloo are for all_reduce.
    pub(crate) fn times(self, collective: Collective) -> bool {
        let all = matches!(self, Series::Shm | Series::MpiShm | Series::Tcp | Series::MpiTcp);
        all || collective == Collective::AllReduce
    }
}

/// What one figure is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) collective: Collective,
    pub(crate) form: Form,
    pub(crate) ranks: usize,
    /// Of a rank's largest buffer.
    pub(crate) bytes: u64,
}

/// A time that a program gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Time {
    pub(crate) case: Case,
    pub(crate) us: f64,
}

/// All times, in microseconds, a list of rounds for each.
#[derive(Debug, Default)]
pub(crate) struct Figures(BTreeMap<(Case, Series), Vec<f64>>);

impl Figures {
    pub(crate) fn add(&mut self, series: Series, time: Time) {
        self.0.entry((time.case, series)).or_default().push(time.us);
    }

    pub(crate) fn median(&self, case: Case, series: Series) -> Option<f64> {
        median(self.0.get(&(case, series))?)
    }

    pub(crate) fn cases(&self) -> BTreeSet<Case> {
        self.0.keys().map(|(case, _)| *case).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Case, Series, &[f64])> {
        self.0.iter().map(|((case, series), rounds)| (*case, *series, rounds.as_slice()))
    }
}

/// The middle one, or the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[sorted.len() / 2 - 1] + upper) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_rounds() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[9.0, 1.0, 2.0, 4.0]), Some(3.0));
        let case = Case { collective: Collective::Reduce, form: Form::InPlace, ranks: 2, bytes: 4 };
        let mut figures = Figures::default();
        [5.0, 7.0, 100.0].into_iter().for_each(|us| figures.add(Series::Shm, Time { case, us }));
        assert_eq!(figures.median(case, Series::Shm), Some(7.0));
        assert_eq!(figures.median(case, Series::Gloo), None);
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        for collective in Collective::value_variants() {
            let name = collective.to_possible_value().map(|value| value.get_name().to_owned());
            assert_eq!(name.as_deref(), Some(collective.name()));
            assert_eq!(Collective::named(collective.name()), Some(*collective));
        }
    }

    #[test]
    fn variants_and_floors_are_of_all_reduce_alone() {
        let of = |collective, links: &[Link]| -> Vec<&str> {
            let all = Series::ALL.into_iter();
            all.filter(|series| series.times(collective) && series.on(links)).map(Series::name).collect()
        };
        assert_eq!(of(Collective::AllReduce, &[Link::Shm, Link::Tcp]).len(), Series::ALL.len());
        assert_eq!(of(Collective::Reduce, &[Link::Tcp]), ["tcp", "OpenMPI tcp"]);
        assert_eq!(of(Collective::AllReduce, &[Link::Tcp]), ["tcp", "OpenMPI tcp", "tcp exchange", "Gloo"]);
    }
}
