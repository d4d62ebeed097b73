//! What was measured or predicted of algorithms, as it is chosen by: those for each size, fastest first.

use serde::{Deserialize, Serialize};

use super::{Algo, Kind};

/// Algorithms that are kept for a size: those that promise what a call asks for may not be the fastest.
const KEPT: usize = 4;

/// How ranks of a group reach each other: what tables are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkClass {
    /// All are in one process.
    InProc,
    /// All are on one host, and share memory.
    Shm,
    /// Anything else: TCP between some of them.
    Tcp,
}

impl LinkClass {
    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            LinkClass::InProc => "inproc",
            LinkClass::Shm => "shm",
            LinkClass::Tcp => "tcp",
        }
    }
}

/// For every group that a table knows of. Travels from rank 0 to all when a world forms.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Choices(Vec<Rule>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Rule {
    link: LinkClass,
    /// The collective's wire number.
    kind: u8,
    ranks: usize,
    steps: Vec<Step>,
}

/// Up to so many bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Step {
    /// As [`super::choose`] counts them: of one block, where there are several.
    upto: u64,
    /// Wire numbers, fastest first.
    algos: Vec<u8>,
}

/// For one group.
#[derive(Clone, Debug, Default)]
pub struct GroupChoices(Vec<(Kind, Vec<Upto>)>);

/// Up to so many bytes, by these, fastest first.
type Upto = (u64, Vec<Algo>);

impl Choices {
    /// Of rows in any order: links, collective, ranks, bytes of the largest buffer, and the algorithms, fastest first.
    pub(crate) fn new(rows: impl IntoIterator<Item = (LinkClass, Kind, usize, u64, Vec<Algo>)>) -> Choices {
        let mut rows: Vec<_> =
            rows.into_iter().filter(|(.., ranks, _, algos)| *ranks > 1 && !algos.is_empty()).collect();
        rows.sort_by_key(|(link, kind, ranks, bytes, _)| (*link, *kind as u8, *ranks, *bytes));
        let mut rules: Vec<Rule> = Vec::new();
        let mut before = 0;
        for (link, kind, ranks, bytes, algos) in rows {
            let algos: Vec<u8> = algos.iter().map(|algo| *algo as u8).take(KEPT).collect();
            let (step, blocks) =
                (Step { upto: u64::MAX, algos }, if kind.varies() { ranks as u64 } else { 1 });
            let rule = rules.last_mut().filter(|r| (r.link, r.kind, r.ranks) == (link, kind as u8, ranks));
            match rule {
                Some(rule) => {
                    if rule.steps.last().is_none_or(|last| last.algos != step.algos) {
                        if let Some(last) = rule.steps.last_mut() {
                            // Between two sizes, the nearer one's, by their ratio.
                            last.upto = (before as f64 * bytes as f64).sqrt() as u64 / blocks;
                        }
                        rule.steps.push(step);
                    }
                }
                None => rules.push(Rule { link, kind: kind as u8, ranks, steps: vec![step] }),
            }
            before = bytes;
        }
        Choices(rules)
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// For a group: by the largest number of ranks that is not more than its own, and more than half of it.
    pub fn of_group(&self, link: LinkClass, ranks: usize) -> GroupChoices {
        let near = |rule: &&Rule| rule.link == link && rule.ranks <= ranks && rule.ranks > ranks / 2;
        let of_kind = |kind: Kind| {
            let rules = self.0.iter().filter(near).filter(|rule| rule.kind == kind as u8);
            let rule = rules.max_by_key(|rule| rule.ranks)?;
            let algos = |step: &Step| step.algos.iter().filter_map(|algo| Algo::from_u8(*algo)).collect();
            Some((kind, rule.steps.iter().map(|step| (step.upto, algos(step))).collect()))
        };
        GroupChoices(Kind::ALL.into_iter().filter_map(of_kind).collect())
    }
}

impl GroupChoices {
    /// The algorithms for a collective of so many bytes, as [`super::choose`] counts them, fastest first. None:
    /// nothing is known.
    pub fn fastest(&self, kind: Kind, bytes: usize) -> &[Algo] {
        let steps = self.0.iter().find(|(of, _)| *of == kind).map_or(&[][..], |(_, steps)| steps);
        steps.iter().find(|(upto, _)| bytes as u64 <= *upto).map_or(&[], |(_, algos)| algos)
    }
}
