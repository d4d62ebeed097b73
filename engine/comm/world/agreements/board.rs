//! The protocol of an agreement, without any I/O: what one member does with a call, a message, a loss. Why it is right:
//! docs/adr/0010-agree.md.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Lost, Missing, MissingState};
use crate::group::message::{Outcome, Step};
use crate::types::Rank;

/// A member may call this many agreements, counted from its oldest undecided one. No verdict is made before all living members have called. So
/// a verdict that a member still lacks is one of the last `WINDOW`: this many verdicts are remembered.
pub(super) const WINDOW: u64 = 64;

/// What a member is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Out {
    Send {
        to: Rank,
        lost: Vec<(Rank, Lost)>,
        step: Step,
    },
    /// This is the verdict.
    Decided {
        number: u64,
        outcome: Outcome,
    },
    /// The others have declared this member lost: it takes no part any more.
    Expelled(Lost),
}

/// Why a call is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Expelled(Lost),
    Full,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Vote {
    flag: bool,
    ballot: Rank,
    accepted: Option<(Rank, Outcome)>,
}

/// One agreement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Round {
    /// The flag with which this member called.
    mine: Option<bool>,
    /// The others' last votes.
    votes: BTreeMap<Rank, Vote>,
    /// The outcome that this member has accepted last, and the member that proposed it: this one itself, once it has made a proposal.
    accepted: Option<(Rank, Outcome)>,
    /// Who has accepted what this member proposed.
    accepts: BTreeSet<Rank>,
    decided: Option<Outcome>,
}

/// A member's side of all agreements of a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Board {
    me: Rank,
    size: usize,
    /// The other members that are lost. Nothing that they say after that counts.
    lost: BTreeMap<Rank, Lost>,
    expelled: Option<Lost>,
    /// Number of the next call.
    next: u64,
    rounds: BTreeMap<u64, Round>,
}

impl Board {
    pub(super) fn new(me: Rank, size: usize) -> Board {
        Board { me, size, lost: BTreeMap::new(), expelled: None, next: 0, rounds: BTreeMap::new() }
    }

    /// This member calls `agree`. Returns the number of the agreement.
    pub(super) fn call(&mut self, flag: bool, out: &mut Vec<Out>) -> Result<u64, Refusal> {
        if let Some(how) = self.expelled {
            return Err(Refusal::Expelled(how));
        }
        let oldest = self.open().next().unwrap_or(self.next);
        if self.next >= oldest + WINDOW {
            return Err(Refusal::Full);
        }
        let number = self.next;
        self.next += 1;
        self.rounds.entry(number).or_default().mine = Some(flag);
        // The vote goes to all, so that each member can say who is missing.
        self.vote(number, self.others(), out);
        self.advance(number, out);
        Ok(number)
    }

    /// A message has come.
    pub(super) fn hear(&mut self, from: Rank, lost: &[(Rank, Lost)], step: Step, out: &mut Vec<Out>) {
        // A lost member gets no answer: when this member learned of the loss, it told the lost one, which may still live.
        let counts = from < self.size && from != self.me && !self.lost.contains_key(&from);
        if self.expelled.is_some() || !counts {
            return;
        }
        self.lose(lost, out);
        if self.expelled.is_some() || self.lost.contains_key(&from) {
            return;
        }
        match step {
            Step::Vote { number, flag, ballot, accepted } => {
                let Some(round) = self.round(number) else { return };
                if let Some(outcome) = round.decided.clone() {
                    return self.send(from, Step::Decide { number, outcome }, out);
                }
                if round.votes.get(&from).is_none_or(|v| v.ballot <= ballot) {
                    round.votes.insert(from, Vote { flag, ballot, accepted });
                }
                self.advance(number, out);
            }
            Step::Propose { number, outcome } => {
                // The proposer knows that all members below it are lost, and this message has just said so.
                if self.coordinator() != from {
                    return;
                }
                let Some(round) = self.round(number).filter(|r| r.mine.is_some()) else { return };
                if let Some(outcome) = round.decided.clone() {
                    return self.send(from, Step::Decide { number, outcome }, out);
                }
                round.accepted = Some((from, outcome));
                self.send(from, Step::Accept { number }, out);
            }
            Step::Accept { number } => {
                let Some(round) = self.round(number) else { return };
                round.accepts.insert(from);
                self.advance(number, out);
            }
            Step::Decide { number, outcome } => self.decide(number, outcome, out),
            Step::Lost => {}
        }
    }

    /// Members are lost: this member has found that out, or another member says so.
    pub(super) fn lose(&mut self, lost: &[(Rank, Lost)], out: &mut Vec<Out>) {
        if self.expelled.is_some() {
            return;
        }
        if let Some((_, how)) = lost.iter().find(|(rank, _)| *rank == self.me) {
            return self.expel(*how, out);
        }
        let before = self.coordinator();
        let mut told = false;
        let mut new = Vec::new();
        for &(rank, how) in lost.iter().filter(|(rank, _)| *rank < self.size) {
            if self.lost.contains_key(&rank) {
                continue;
            }
            self.lost.insert(rank, how);
            new.push(rank);
            // A member that leaves says goodbye to all members, so they need not be told. Of any other loss this member may be the only one to
            // know, from the end of its own connection.
            told |= how != Lost::Left;
        }
        if new.is_empty() {
            return;
        }
        if told {
            for to in self.others().into_iter().chain(new) {
                self.send(to, Step::Lost, out);
            }
        }
        let coordinator = self.coordinator();
        for number in self.open().collect::<Vec<_>>() {
            if coordinator != before {
                // A new coordinator sends its vote to all: a member that knows the verdict answers with it.
                let to = if coordinator == self.me { self.others() } else { vec![coordinator] };
                self.vote(number, to, out);
            }
            self.advance(number, out);
        }
    }

    /// The members that have not voted; if all have, those that do not answer.
    pub(super) fn missing(&self, number: u64) -> Vec<Missing> {
        let Some(round) = self.rounds.get(&number) else { return Vec::new() };
        let others = self.others();
        let last = |rank: &Rank| {
            let voted = |r: &Round| r.decided.is_some() || r.votes.contains_key(rank);
            self.rounds.range(..number).rev().find(|(_, r)| voted(r)).map(|(n, _)| *n)
        };
        let silent = others.iter().filter(|r| !round.votes.contains_key(r));
        let missing: Vec<Missing> =
            silent.map(|r| Missing { rank: *r, state: MissingState::NotCalled(last(r)) }).collect();
        if !missing.is_empty() {
            return missing;
        }
        let waited = match self.coordinator() {
            me if me == self.me => others.into_iter().filter(|r| !round.accepts.contains(r)).collect(),
            coordinator => vec![coordinator],
        };
        waited.into_iter().map(|rank| Missing { rank, state: MissingState::NoAnswer }).collect()
    }

    /// Whether a call of this member waits for its verdict.
    pub(super) fn is_open(&self) -> bool {
        self.expelled.is_none() && self.open().next().is_some()
    }

    fn coordinator(&self) -> Rank {
        (0..self.me).find(|r| !self.lost.contains_key(r)).unwrap_or(self.me)
    }

    fn others(&self) -> Vec<Rank> {
        (0..self.size).filter(|r| *r != self.me && !self.lost.contains_key(r)).collect()
    }

    /// Numbers of this member's calls that are undecided.
    fn open(&self) -> impl Iterator<Item = u64> + '_ {
        self.rounds.iter().filter(|(_, r)| r.mine.is_some() && r.decided.is_none()).map(|(n, _)| *n)
    }

    /// The agreement with this number. `None` if it was decided long ago, or if no correct member can have reached it.
    fn round(&mut self, number: u64) -> Option<&mut Round> {
        if number < self.next {
            return self.rounds.get_mut(&number);
        }
        (number - self.next < WINDOW).then(|| self.rounds.entry(number).or_default())
    }

    fn send(&self, to: Rank, step: Step, out: &mut Vec<Out>) {
        let me = self.expelled.map(|how| (self.me, how));
        let lost = self.lost.iter().map(|(rank, how)| (*rank, *how)).chain(me).collect();
        out.push(Out::Send { to, lost, step });
    }

    fn vote(&self, number: u64, to: Vec<Rank>, out: &mut Vec<Out>) {
        let Some((flag, round)) = self.rounds.get(&number).and_then(|r| r.mine.map(|m| (m, r))) else {
            return;
        };
        let vote = Step::Vote { number, flag, ballot: self.coordinator(), accepted: round.accepted.clone() };
        for to in to {
            self.send(to, vote.clone(), out);
        }
    }

    /// Called when a vote or an acceptance has come, or a member need not be waited for any more. If this member is the coordinator, it proposes
    /// an outcome or decides, as soon as it can.
    fn advance(&mut self, number: u64, out: &mut Vec<Out>) {
        if self.coordinator() != self.me {
            return;
        }
        let (me, others) = (self.me, self.others());
        let Some(round) = self.rounds.get_mut(&number).filter(|r| r.decided.is_none()) else { return };
        let Some(mine) = round.mine else { return };
        let proposed =
            round.accepted.as_ref().filter(|(by, _)| *by == me).map(|(_, outcome)| outcome.clone());
        let outcome = match proposed {
            Some(outcome) => outcome,
            None => {
                if !others.iter().all(|r| round.votes.get(r).is_some_and(|v| v.ballot == me)) {
                    return;
                }
                let outcome = round.outcome(mine, &self.lost);
                round.accepted = Some((me, outcome.clone()));
                for &to in &others {
                    self.send(to, Step::Propose { number, outcome: outcome.clone() }, out);
                }
                outcome
            }
        };
        let Some(round) = self.rounds.get(&number) else { return };
        if others.iter().all(|r| round.accepts.contains(r)) {
            self.decide(number, outcome, out);
        }
    }

    fn decide(&mut self, number: u64, outcome: Outcome, out: &mut Vec<Out>) {
        if let Some((_, how)) = outcome.lost.iter().find(|(rank, _)| *rank == self.me) {
            return self.expel(*how, out);
        }
        let Some(round) = self.round(number).filter(|r| r.mine.is_some() && r.decided.is_none()) else {
            return;
        };
        *round = Round { mine: round.mine, decided: Some(outcome.clone()), ..Round::default() };
        // The coordinator also passes on a verdict that it has only heard: those that have voted wait for the coordinator.
        if self.coordinator() == self.me {
            for to in self.others() {
                self.send(to, Step::Decide { number, outcome: outcome.clone() }, out);
            }
        }
        out.push(Out::Decided { number, outcome });
        let newest = self.rounds.iter().rev().find(|(_, r)| r.decided.is_some()).map_or(0, |(n, _)| *n);
        self.rounds.retain(|n, r| r.decided.is_none() || n + WINDOW > newest);
    }

    /// This member was declared lost. It tells the others, as some may still count on it, and takes no part any more.
    fn expel(&mut self, how: Lost, out: &mut Vec<Out>) {
        self.expelled = Some(how);
        for to in self.others() {
            self.send(to, Step::Lost, out);
        }
        out.push(Out::Expelled(how));
    }
}

impl Round {
    /// What a coordinator proposes when it has all votes: of the outcomes that members have accepted, the one of the highest ballot, as it may have
    /// been decided; if none was accepted, what the votes say.
    fn outcome(&self, mine: bool, lost: &BTreeMap<Rank, Lost>) -> Outcome {
        let votes = self.votes.values().filter_map(|v| v.accepted.as_ref());
        if let Some((_, outcome)) = votes.chain(&self.accepted).max_by_key(|(by, _)| *by) {
            return outcome.clone();
        }
        // A member that left in peace after it had voted is counted.
        let counted = |rank: &Rank| lost.get(rank).is_none_or(|how| *how == Lost::Left);
        let flags = self.votes.iter().filter(|(rank, _)| counted(rank)).map(|(_, v)| v.flag);
        let flag = flags.fold(mine, |all, flag| all && flag);
        let absent = |rank: &Rank, how: &Lost| *how != Lost::Left || !self.votes.contains_key(rank);
        let lost = lost.iter().filter(|(rank, how)| absent(rank, how)).map(|(r, h)| (*r, *h)).collect();
        Outcome { flag, lost }
    }
}
