//! The algorithms that a tuning table says to take, by group, collective and size.

use serde::{Deserialize, Serialize};

pub use crate::LinkClass;
use crate::{Algo, Kind};

/// The properties of a group by which algorithms are measured and chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupShape {
    /// The class of the group's links.
    pub link: LinkClass,
    /// Number of hosts: the same network performs differently between more or fewer hosts.
    pub hosts: usize,
    /// Number of ranks.
    pub ranks: usize,
}

/// The algorithm to take for a collective of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The group's shape.
    pub group: GroupShape,
    /// The collective.
    pub kind: Kind,
    /// Bytes of a rank's largest buffer.
    pub bytes: u64,
    /// The algorithm.
    pub algo: Algo,
}

/// The algorithms to take in every group that a tuning table covers. Rank 0 sends them to all ranks when a world forms.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Choices(Vec<Rule>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Rule {
    #[serde(flatten)]
    group: GroupShape,
    /// The collective's wire number.
    kind: u8,
    steps: Vec<Step>,
}

/// The algorithm for sizes above those of the step before, up to and including `upto` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Step {
    /// Bytes, as [`choose`](super::choose()) counts them: those of one block, where there are several.
    upto: u64,
    /// The algorithm's wire number; 0: none is known for these sizes.
    algo: u8,
}

/// The algorithms to take in one group.
#[derive(Clone, Debug, Default)]
pub struct GroupChoices(Vec<(Kind, Vec<Upto>)>);

/// The algorithm for sizes up to this many bytes; `None`: none is known.
type Upto = (u64, Option<Algo>);

/// The choice for the smallest known size holds down to 1/4 of it, that for the largest up to 4 times it.
const BEYOND: u64 = 4;

/// The bytes of one block if a rank's largest buffer has `bytes`; the same number if the collective has no blocks.
#[inline]
pub fn block(kind: Kind, ranks: usize, bytes: u64) -> u64 {
    if kind.varies() { bytes / ranks.max(1) as u64 } else { bytes }
}

impl Choices {
    /// Makes rules of choices, which may come in any order. Choices for groups of one rank are left out.
    pub fn new(choices: impl IntoIterator<Item = Choice>) -> Choices {
        let mut choices: Vec<_> = choices.into_iter().filter(|choice| choice.group.ranks > 1).collect();
        choices.sort_by_key(|choice| (choice.group, choice.kind as u8, choice.bytes));
        let mut rules: Vec<Rule> = Vec::new();
        let mut before = 0;
        for Choice { group, kind, bytes, algo } in choices {
            let at = |bytes: u64| block(kind, group.ranks, bytes);
            let step = Step { upto: at(bytes.saturating_mul(BEYOND)), algo: algo as u8 };
            match rules.last_mut().filter(|rule| (rule.group, rule.kind) == (group, kind as u8)) {
                Some(rule) => {
                    // Between two sizes, the choice for the nearer one holds: they meet at their geometric mean.
                    let middle = (before as f64 * bytes as f64).sqrt() as u64;
                    match rule.steps.last_mut() {
                        Some(last) if last.algo == step.algo => last.upto = step.upto,
                        Some(last) => {
                            last.upto = at(middle);
                            rule.steps.push(step);
                        }
                        None => {}
                    }
                }
                None => {
                    let below = Step { upto: at(bytes / BEYOND).saturating_sub(1), algo: 0 };
                    rules.push(Rule { group, kind: kind as u8, steps: vec![below, step] });
                }
            }
            before = bytes;
        }
        Choices(rules)
    }

    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps the rules for groups of at most `ranks` ranks: a world of that size has no larger groups.
    pub fn up_to(mut self, ranks: usize) -> Choices {
        self.0.retain(|rule| rule.group.ranks <= ranks);
        self
    }

    /// The rules for a group. If there is none for a collective, the rule of a smaller group takes its place: of those with the same links, as many
    /// hosts and more than half as many ranks, the largest. For sizes whose algorithm does not suit (`suits`), none is known.
    pub fn of_group(&self, group: GroupShape, suits: impl Fn(Kind, Algo) -> bool) -> GroupChoices {
        let near = |rule: &&Rule| {
            let GroupShape { link, hosts, ranks } = rule.group;
            (link, hosts) == (group.link, group.hosts) && ranks <= group.ranks && ranks > group.ranks / 2
        };
        let of_kind = |kind: Kind| {
            let rules = self.0.iter().filter(near).filter(|rule| rule.kind == kind as u8);
            let rule = rules.max_by_key(|rule| rule.group.ranks)?;
            let algo = |step: &Step| {
                Algo::from_u8(step.algo).filter(|algo| *algo != Algo::Auto && suits(kind, *algo))
            };
            Some((kind, rule.steps.iter().map(|step| (step.upto, algo(step))).collect()))
        };
        GroupChoices(Kind::ALL.into_iter().filter_map(of_kind).collect())
    }
}

impl GroupChoices {
    /// The algorithm for a collective of `bytes` bytes, as [`choose`](super::choose()) counts them. `None`: none is known.
    #[inline]
    pub fn choose(&self, kind: Kind, bytes: usize) -> Option<Algo> {
        let (_, steps) = self.0.iter().find(|(of, _)| *of == kind)?;
        steps.iter().find(|(upto, _)| bytes as u64 <= *upto)?.1
    }
}
