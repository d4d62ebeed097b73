//! What is measured (collectives, forms, links, series), and the measured times.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;

/// A collective. `allstream perf` and the peers' programs call it by the same name.
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

    /// The forms that are compared. MPI's broadcast has only one buffer, and training loops call all_reduce in place: so these two are measured in place only.
    pub(crate) fn forms(self) -> &'static [Form] {
        match self {
            Collective::AllReduce | Collective::Broadcast => &[Form::InPlace],
            _ => &[Form::OutOfPlace, Form::InPlace],
        }
    }
}

/// Whether the result is written to the buffer of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    OutOfPlace,
    InPlace,
}

impl Form {
    pub(crate) const ALL: [Form; 2] = [Form::OutOfPlace, Form::InPlace];

    /// The form's name in the programs' output.
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
    /// Shared memory between ranks of one host
    Shm,
    /// Loopback TCP
    Tcp,
}

/// A program that is measured, with certain options: a column of times in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Series {
    /// Our ranks are processes, the buffers are the user's own, and each operation ends by `.wait()`.
    Shm,
    MpiShm,
    /// As `Shm`, but with `.await` on a current-thread runtime.
    Await,
    /// As `Shm`, measured in turns with `Await`, which is compared with it.
    Wait,
    /// As `Shm`, but with buffers of `comm.alloc()`.
    Arena,
    /// Our ranks are threads of one process.
    Threads,
    /// Only reads every rank's buffer once and writes every rank's buffer once: what memory allows at best.
    Memory,
    Tcp,
    MpiTcp,
    /// Each rank only sends and receives as many bytes as in an all_reduce, over loopback TCP.
    Exchange,
    Gloo,
}

impl Series {
    /// In the order in which they run in the first round: series that are compared follow each other.
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

    /// Whether the series is run if these links are asked for. Gloo, which has TCP only, is run for either: both are compared with it.
    pub(crate) fn on(self, links: &[Link]) -> bool {
        let link = match self {
            Series::Gloo => return true,
            Series::Tcp | Series::MpiTcp | Series::Exchange => Link::Tcp,
            _ => Link::Shm,
        };
        links.contains(&link)
    }

    /// Whether the series is run for this collective. Only `shm`, `tcp` and OpenMPI's two are run for all collectives, the others only for all_reduce.
    pub(crate) fn times(self, collective: Collective) -> bool {
        let all = matches!(self, Series::Shm | Series::MpiShm | Series::Tcp | Series::MpiTcp);
        all || collective == Collective::AllReduce
    }
}

/// What a time was measured for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) collective: Collective,
    pub(crate) form: Form,
    pub(crate) ranks: usize,
    /// The size of a rank's largest buffer.
    pub(crate) bytes: u64,
}

/// A time that a program printed or wrote.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Time {
    pub(crate) case: Case,
    pub(crate) us: f64,
}

/// All times in microseconds: for each case and series, a list with one time for each round.
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

/// The middle value, or the mean of the two in the middle. `None`: there are no values.
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
