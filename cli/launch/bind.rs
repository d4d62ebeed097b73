//! Which cores a rank may run on.

use std::collections::BTreeMap;
use std::io;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::{Deserialize, Serialize};

/// What each rank is bound to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Bind {
    /// Nothing: ranks run where the system puts them
    #[default]
    None,
    /// Its share of the cores: all of them, divided evenly among the ranks of the host; one, where ranks outnumber cores
    Core,
    /// The cores of its share of the NUMA nodes, and so the memory there
    Numa,
}

impl Bind {
    /// How to bind so many ranks of this host for a measurement: each to a share of the cores if the ranks do not outnumber the cores
    /// (mpirun binds two ranks to a core each). Else not at all: two ranks that were bound to one core would only take turns on it.
    pub(crate) fn that_fits(ranks: usize) -> Bind {
        match allowed() {
            Ok(allowed) if ranks <= cores(&allowed).len() => Bind::Core,
            _ => Bind::None,
        }
    }

    /// Its name as the value of `--bind-to`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Bind::None => "none",
            Bind::Core => "core",
            Bind::Numa => "numa",
        }
    }

    /// The processors on which each of so many ranks of this host may run, by rank; empty where ranks are not bound.
    ///
    /// # Errors
    /// The system does not say on which processors this process may run.
    pub(crate) fn places(self, ranks: usize) -> io::Result<Vec<CpuSet>> {
        if self == Bind::None {
            return Ok(Vec::new());
        }
        let allowed = allowed()?;
        let units = if self == Bind::Core { cores(&allowed) } else { nodes(&allowed) };
        let place = |cpus: Vec<usize>| {
            let mut set = CpuSet::new();
            cpus.into_iter().for_each(|cpu| set.set(cpu));
            set
        };
        Ok(shares(&units, ranks).into_iter().map(place).collect())
    }
}

/// The processors on which this process may run.
fn allowed() -> io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

fn system(file: &str) -> Option<String> {
    std::fs::read_to_string(format!("/sys/devices/system/{file}")).ok()
}

/// The processors of each core. Cores of one package come one after another.
fn cores(allowed: &[usize]) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for &cpu in allowed {
        let number = |name: &str| system(&format!("cpu/cpu{cpu}/topology/{name}"))?.trim().parse().ok();
        // A processor of which the system says nothing is taken for a core of its own.
        let core = (number("physical_package_id").unwrap_or(0), number("core_id").unwrap_or(cpu));
        cores.entry(core).or_default().push(cpu);
    }
    cores.into_values().collect()
}

/// The allowed processors of each NUMA node that has some. Where the system names no such node: one node with all allowed processors.
fn nodes(allowed: &[usize]) -> Vec<Vec<usize>> {
    let all = list(&system("node/online").unwrap_or_default());
    let of = |node: usize| -> Vec<usize> {
        let cpus = list(&system(&format!("node/node{node}/cpulist")).unwrap_or_default());
        cpus.into_iter().filter(|cpu| allowed.contains(cpu)).collect()
    };
    let nodes: Vec<_> = all.into_iter().map(of).filter(|cpus| !cpus.is_empty()).collect();
    if nodes.is_empty() { vec![allowed.to_vec()] } else { nodes }
}

/// Numbers as the system lists them: `0-3,8,10-11`.
fn list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    text.split(',').filter_map(range).flatten().take(CpuSet::MAX_CPU).collect()
}

/// Divides units evenly among ranks. Each rank gets at least one; where ranks outnumber units, several ranks get the same.
fn shares(units: &[Vec<usize>], ranks: usize) -> Vec<Vec<usize>> {
    let at = |rank: usize| rank * units.len() / ranks;
    let share = |rank| units[at(rank)..at(rank + 1).max(at(rank) + 1)].concat();
    (0..ranks).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_shared_out_evenly() {
        let units: Vec<Vec<usize>> = (0..4).map(|core| vec![core, core + 4]).collect();
        assert_eq!(shares(&units, 1), [[0, 4, 1, 5, 2, 6, 3, 7].to_vec()]);
        assert_eq!(shares(&units, 2), [[0, 4, 1, 5], [2, 6, 3, 7]]);
        assert_eq!(shares(&units, 3), [vec![0, 4], vec![1, 5], vec![2, 6, 3, 7]]);
        assert_eq!(shares(&units, 8).concat(), [0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7]);
    }

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert!(list("\n").is_empty());
        assert_eq!(list("x,1-y,5,3-1"), [5]);
        assert_eq!(list("0-18446744073709551615").len(), CpuSet::MAX_CPU);
    }

    #[test]
    fn ranks_fit_the_cores_or_are_not_bound() {
        let cores = cores(&allowed().unwrap()).len();
        assert_eq!((Bind::that_fits(1), Bind::that_fits(cores)), (Bind::Core, Bind::Core));
        assert_eq!(Bind::that_fits(cores + 1), Bind::None);
        for bind in [Bind::None, Bind::Core, Bind::Numa] {
            assert_eq!(<Bind as clap::ValueEnum>::from_str(bind.name(), false), Ok(bind));
        }
    }

    #[test]
    fn places_are_among_the_allowed() {
        assert!(Bind::None.places(3).unwrap().is_empty());
        let all = sched_getaffinity(None).unwrap();
        for bind in [Bind::Core, Bind::Numa] {
            for ranks in [1, 2, 5] {
                let places = bind.places(ranks).unwrap();
                assert_eq!(places.len(), ranks);
                let inside =
                    |place: &CpuSet| (0..CpuSet::MAX_CPU).all(|cpu| !place.is_set(cpu) || all.is_set(cpu));
                assert!(places.iter().all(|place| place.count() > 0 && inside(place)), "{bind:?} {ranks}");
            }
        }
    }
}
