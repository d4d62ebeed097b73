//! What was measured or predicted of algorithms, as it is chosen by: one for each size.

use serde::{Deserialize, Serialize};

pub use crate::LinkClass;
use crate::{Algo, Kind};

/// The shape of a group, as algorithms are measured and chosen for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupShape {
    /// The class of links.
    pub link: LinkClass,
    /// Hosts of the group: one network is another between other numbers of them.
    pub hosts: usize,
    /// Ranks of the group.
    pub ranks: usize,
}

/// An algorithm for a collective of one size.
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

/// For every group that a table knows of. Travels from rank 0 to all when a world forms.
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

/// Up to so many bytes, from where the one before ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Step {
    /// As [`choose`](super::choose()) counts them: of one block, where there are several.
    upto: u64,
    /// Its wire number; 0: nothing is known.
    algo: u8,
}

/// For one group.
#[derive(Clone, Debug, Default)]
pub struct GroupChoices(Vec<(Kind, Vec<Upto>)>);

/// Up to so many bytes, this one.
type Upto = (u64, Option<Algo>);

/// How far beyond the sizes that are known, by their ratio, something is said of others.
const BEYOND: u64 = 4;

/// The bytes that a choice goes by, of so many in a rank's largest buffer.
#[inline]
pub fn block(kind: Kind, ranks: usize, bytes: u64) -> u64 {
    if kind.varies() { bytes / ranks.max(1) as u64 } else { bytes }
}

impl Choices {
    /// Of choices in any order.
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
                    // Between two sizes, the nearer one's, by their ratio.
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

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those for groups of at most so many ranks: others cannot be in a world of that size.
    pub fn up_to(mut self, ranks: usize) -> Choices {
        self.0.retain(|rule| rule.group.ranks <= ranks);
        self
    }

    /// For a group, of what `suits` it: by the largest number of ranks that is not more than its own, and more than half of it.
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
    /// The algorithm for a collective of so many bytes, as [`choose`](super::choose()) counts them. `None`: nothing is known.
    #[inline]
    pub fn choose(&self, kind: Kind, bytes: usize) -> Option<Algo> {
        let (_, steps) = self.0.iter().find(|(of, _)| *of == kind)?;
        steps.iter().find(|(upto, _)| bytes as u64 <= *upto)?.1
    }
}
