//! What came of the cases of a world: told by each rank as it goes, so that what is known of one that dies is known, and judged when
//! all have ended.

use std::fmt::Write;

use crate::cases::{Case, Seen, Wrong, agree};

/// So many wrong results are shown in full.
const SHOWN: usize = 20;
/// What a rank tries behind all cases.
pub(crate) const BEHIND: [&str; 2] = ["messages", "gradient buckets"];

/// What a rank tells of one case, in their order; of [`BEHIND`], too.
#[derive(Clone, Debug)]
pub(crate) enum Note {
    /// It was right, and this is what the ranks compare.
    Seen(Seen),
    /// Its values were wrong. The rank goes on.
    Wrong(String),
    /// Something failed, and the rank has ended here.
    Ended(String),
}

impl Note {
    pub(crate) fn of(result: Result<Seen, Wrong>) -> Note {
        match result {
            Ok(seen) => Note::Seen(seen),
            Err(Wrong::Values(why)) => Note::Wrong(why),
            Err(Wrong::Failed(why)) => Note::Ended(why),
        }
    }

    /// A line of a process's output, by which the process that started it is told.
    pub(crate) fn print(&self, rank: usize) {
        // A text has lines of its own.
        let text = |why: &str| serde_json::Value::from(why).to_string();
        match self {
            Note::Seen(Seen::Hash(hash)) => println!("@ {rank} hash {hash}"),
            Note::Seen(Seen::Stay(enter, leave)) => println!("@ {rank} stay {enter} {leave}"),
            Note::Seen(Seen::Nothing) => println!("@ {rank} nothing"),
            Note::Wrong(why) => println!("@ {rank} wrong {}", text(why)),
            Note::Ended(why) => println!("@ {rank} ended {}", text(why)),
        }
    }

    /// The rank and what it told, of such a line.
    pub(crate) fn read(line: &str) -> Option<(usize, Note)> {
        let mut words = line.strip_prefix("@ ")?.splitn(3, ' ');
        let (rank, kind, rest) = (words.next()?.parse().ok()?, words.next()?, words.next().unwrap_or(""));
        let text = || serde_json::from_str(rest).ok();
        let note = match kind {
            "hash" => Note::Seen(Seen::Hash(rest.parse().ok()?)),
            "stay" => {
                let (enter, leave) = rest.split_once(' ')?;
                Note::Seen(Seen::Stay(enter.parse().ok()?, leave.parse().ok()?))
            }
            "nothing" => Note::Seen(Seen::Nothing),
            "wrong" => Note::Wrong(text()?),
            "ended" => Note::Ended(text()?),
            _ => return None,
        };
        Some((rank, note))
    }
}

/// Of one rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    pub(crate) notes: Vec<Note>,
}

impl Account {
    fn wrong(&self) -> impl Iterator<Item = (usize, &str)> {
        self.notes.iter().enumerate().filter_map(|(i, note)| match note {
            Note::Wrong(why) => Some((i, why.as_str())),
            _ => None,
        })
    }

    /// Where and why the rank has ended before all was tried.
    fn end(&self, of: usize) -> Option<(usize, &str)> {
        match self.notes.last() {
            Some(Note::Ended(why)) => Some((self.notes.len() - 1, why)),
            _ if self.notes.len() < of => Some((self.notes.len(), "it told nothing more")),
            _ => None,
        }
    }

    fn seen(&self, i: usize) -> Option<Seen> {
        match self.notes.get(i) {
            Some(Note::Seen(seen)) => Some(*seen),
            _ => None,
        }
    }
}

/// Whether all was right; if not, what was not.
pub(crate) fn judge(cases: &[Case], accounts: &[Account]) -> Result<(), String> {
    let total = cases.len() + BEHIND.len();
    let name = |i: usize| match cases.get(i) {
        Some(case) => format!("case {i}, {case:?}"),
        None => BEHIND.get(i - cases.len()).unwrap_or(&"its end").to_string(),
    };
    // By case, and then by rank.
    let mut wrong: Vec<(usize, usize, &str)> = Vec::new();
    for (rank, account) in accounts.iter().enumerate() {
        wrong.extend(account.wrong().map(|(i, why)| (i, rank, why)));
    }
    wrong.sort_by_key(|(i, rank, _)| (*i, *rank));
    let disagree: Vec<(usize, String)> = (0..cases.len())
        .filter_map(|i| {
            let of_case: Vec<Seen> = accounts.iter().map_while(|account| account.seen(i)).collect();
            (of_case.len() == accounts.len()).then(|| agree(&of_case).err().map(|why| (i, why))).flatten()
        })
        .collect();
    let ends: Vec<(usize, (usize, &str))> =
        accounts.iter().enumerate().filter_map(|(rank, account)| Some((rank, account.end(total)?))).collect();
    if wrong.is_empty() && disagree.is_empty() && ends.is_empty() {
        return Ok(());
    }
    let mut text = String::new();
    let mut say = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    let mut cases_wrong: Vec<usize> =
        wrong.iter().map(|(i, ..)| *i).chain(disagree.iter().map(|(i, _)| *i)).collect();
    cases_wrong.sort_unstable();
    cases_wrong.dedup();
    if !cases_wrong.is_empty() {
        let count = |(rank, account): (usize, &Account)| match account.wrong().count() {
            0 => None,
            count => Some(format!("{count} on rank {rank}")),
        };
        let on: Vec<String> = accounts.iter().enumerate().filter_map(count).collect();
        let apart = format!("{} on which ranks differ", disagree.len());
        let on = if disagree.is_empty() { on } else { [on, vec![apart]].concat() };
        say(format!("{} of {total} cases were wrong: {}", cases_wrong.len(), on.join(", ")));
    }
    if wrong.len() > SHOWN {
        say(format!("the first {SHOWN} of {} wrong results:", wrong.len()));
    }
    for (i, rank, why) in wrong.iter().take(SHOWN) {
        say(format!("rank {rank}, {}: {why}", name(*i)));
    }
    for (i, why) in disagree.iter().take(SHOWN) {
        say(format!("{}: {why}", name(*i)));
    }
    for (rank, (i, why)) in ends {
        say(format!("rank {rank} ended at {i} of {total} ({}): {why}", name(i)));
    }
    Err(text)
}
