//! Runs the protocol with messages, losses and calls in many orders: in all orders for three members, in random ones for two to six.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use proptest::prelude::*;

use super::board::{Board, Out, Refusal, WINDOW};
use crate::error::{Lost, MissingState};
use crate::group::message::{Outcome, Step};
use crate::types::Rank;

const SILENT: Lost = Lost::Silent(Duration::from_secs(1));

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Packet {
    Say(Vec<(Rank, Lost)>, Step),
    /// A goodbye in peace.
    Bye,
    /// A goodbye to a member that the sender has declared lost.
    Out,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Alive,
    Dead,
    Left,
}

/// One thing that may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Call(Rank),
    /// From the first to the second: the packet at this place of their connection arrives.
    Deliver(Rank, Rank, usize),
    /// The member's process is killed: what it sent last may still arrive, or not.
    Crash(Rank),
    /// The second hears that the first died: nothing more of it will come.
    End(Rank, Rank),
    /// The second takes the first, which lives, for lost.
    Suspect(Rank, Rank),
    Leave(Rank),
}

/// What may still go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Budget {
    crashes: u8,
    leaves: u8,
    suspicions: u8,
    /// Who may be taken for lost.
    victim: Rank,
}

/// Members and what is on the way between them.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Net {
    boards: Vec<Board>,
    state: Vec<State>,
    /// By sender, then receiver.
    links: Vec<Vec<VecDeque<Packet>>>,
    /// Whether the receiver reads nothing more of the sender. By sender, then receiver.
    cut: Vec<Vec<bool>>,
    flags: Vec<Vec<bool>>,
    calls: Vec<usize>,
    verdicts: Vec<BTreeMap<u64, Outcome>>,
    expelled: Vec<bool>,
    budget: Budget,
    /// Whether a connection keeps the order of its messages.
    ordered: bool,
}

impl Net {
    fn new(flags: Vec<Vec<bool>>, budget: Budget, ordered: bool) -> Net {
        let n = flags.len();
        Net {
            boards: (0..n).map(|me| Board::new(me, n)).collect(),
            state: vec![State::Alive; n],
            links: vec![vec![VecDeque::new(); n]; n],
            cut: vec![vec![false; n]; n],
            flags,
            calls: vec![0; n],
            verdicts: vec![BTreeMap::new(); n],
            expelled: vec![false; n],
            budget,
            ordered,
        }
    }

    fn n(&self) -> usize {
        self.boards.len()
    }

    fn alive(&self, rank: Rank) -> bool {
        self.state[rank] == State::Alive
    }

    /// The events that happen sooner or later, and those that may happen.
    fn events(&self) -> (Vec<Event>, Vec<Event>) {
        let (mut must, mut may) = (Vec::new(), Vec::new());
        for a in 0..self.n() {
            if self.alive(a) {
                if self.calls[a] < self.flags[a].len() && !self.expelled[a] {
                    must.push(Event::Call(a));
                }
                if self.budget.crashes > 0 {
                    may.push(Event::Crash(a));
                }
                if self.budget.leaves > 0 {
                    may.push(Event::Leave(a));
                }
            }
            for b in (0..self.n()).filter(|b| *b != a && self.alive(*b) && !self.cut[a][*b]) {
                let link = &self.links[a][b];
                // A goodbye or the end of the connection comes last in any case.
                let says = link.iter().filter(|p| matches!(p, Packet::Say(..))).count();
                let reach = if self.ordered { 1 } else { says.max(1) };
                must.extend((0..link.len().min(reach)).map(|at| Event::Deliver(a, b, at)));
                if self.state[a] == State::Dead {
                    must.push(Event::End(a, b));
                }
                if self.budget.suspicions > 0 && a == self.budget.victim && self.alive(a) {
                    may.push(Event::Suspect(a, b));
                }
            }
        }
        (must, may)
    }

    fn happen(&mut self, event: Event) {
        let mut out = Vec::new();
        let at = match event {
            Event::Call(a) => {
                let flag = self.flags[a][self.calls[a]];
                let called = self.boards[a].call(flag, &mut out);
                assert_eq!(called, Ok(self.calls[a] as u64));
                self.calls[a] += 1;
                a
            }
            Event::Deliver(from, to, at) => {
                match self.links[from][to].remove(at).unwrap() {
                    Packet::Say(lost, step) => self.boards[to].hear(from, &lost, step, &mut out),
                    Packet::Bye => {
                        self.cut[from][to] = true;
                        self.boards[to].lose(&[(from, Lost::Left)], &mut out);
                    }
                    Packet::Out => {
                        self.cut[from][to] = true;
                        self.boards[to].lose(&[(to, SILENT)], &mut out);
                        self.boards[to].lose(&[(from, Lost::Left)], &mut out);
                    }
                }
                to
            }
            Event::Crash(a) => {
                self.budget.crashes -= 1;
                self.state[a] = State::Dead;
                return;
            }
            Event::End(from, to) => {
                self.links[from][to].clear();
                self.cut[from][to] = true;
                self.boards[to].lose(&[(from, Lost::Died)], &mut out);
                to
            }
            Event::Suspect(victim, by) => {
                self.budget.suspicions -= 1;
                self.links[victim][by].clear();
                self.cut[victim][by] = true;
                self.boards[by].lose(&[(victim, SILENT)], &mut out);
                // The connection with the victim has ended: only the goodbye goes there.
                out.retain(|o| !matches!(o, Out::Send { to, .. } if *to == victim));
                self.links[by][victim].push_back(Packet::Out);
                by
            }
            Event::Leave(a) => {
                self.budget.leaves -= 1;
                self.state[a] = State::Left;
                for to in (0..self.n()).filter(|to| *to != a) {
                    self.links[a][to].push_back(Packet::Bye);
                }
                return;
            }
        };
        for out in out {
            match out {
                Out::Send { to, lost, step } => {
                    let ended = |p: &Packet| !matches!(p, Packet::Say(..));
                    if self.alive(to) && !self.cut[at][to] && !self.links[at][to].iter().any(ended) {
                        self.links[at][to].push_back(Packet::Say(lost, step));
                    }
                }
                Out::Decided { number, outcome } => self.decided(at, number, outcome),
                Out::Expelled(_) => {
                    assert!(!self.expelled[at], "told once");
                    assert_eq!(at, self.budget.victim, "only who was taken for lost is out");
                    self.expelled[at] = true;
                }
            }
        }
    }

    fn decided(&mut self, at: Rank, number: u64, outcome: Outcome) {
        for other in 0..self.n() {
            // If no living member is taken for lost, those that died with a verdict had the same one.
            let counts = self.alive(other) || self.budget.victim == NOBODY;
            if let Some(theirs) = self.verdicts[other].get(&number).filter(|_| counts) {
                assert_eq!(theirs, &outcome, "ranks {other} and {at} on agreement {number}");
            }
        }
        let lost = |r: &Rank| outcome.lost.iter().any(|(l, _)| l == r);
        assert!(!lost(&at), "a rank that is lost has no verdict");
        let survivors: Vec<Rank> = (0..self.n()).filter(|r| !lost(r)).collect();
        for &rank in &survivors {
            assert!(self.calls[rank] as u64 > number, "rank {rank} has not voted");
        }
        let all = survivors.iter().all(|r| self.flags[*r][number as usize]);
        assert_eq!(outcome.flag, all, "the flags of {survivors:?} together");
        for (rank, how) in &outcome.lost {
            let was = (self.state[*rank], how);
            let so = matches!(was, (State::Dead, Lost::Died) | (State::Left, Lost::Left));
            assert!(so || *rank == self.budget.victim, "rank {rank}: {was:?}");
        }
        let again = self.verdicts[at].insert(number, outcome);
        assert_eq!(again, None, "one verdict");
    }

    /// Called when no event is left that must happen: checks that each member that lives and was not expelled has all its verdicts.
    fn settled(&self) {
        for rank in (0..self.n()).filter(|r| self.alive(*r) && !self.expelled[*r]) {
            let got = self.verdicts[rank].len();
            assert_eq!(got, self.flags[rank].len(), "verdicts of rank {rank}: {:?}", self.boards);
        }
    }

    fn digest(&self) -> u128 {
        let hash = |seed: u64| {
            let mut hasher = DefaultHasher::new();
            seed.hash(&mut hasher);
            self.hash(&mut hasher);
            u128::from(hasher.finish())
        };
        hash(1) << 64 | hash(2)
    }
}

const NOBODY: Rank = usize::MAX;

/// Whether the tests that take minutes are wanted, too.
fn everything() -> bool {
    std::env::var_os("ALLSTREAM_TEST_FULL").is_some_and(|v| v == "all")
}

/// Tries all events in every order from this state on. Returns how many different states there are.
fn explore(net: Net) -> usize {
    let mut seen = HashSet::new();
    let mut todo = vec![net];
    while let Some(net) = todo.pop() {
        let (must, may) = net.events();
        if must.is_empty() {
            net.settled();
        }
        for event in must.into_iter().chain(may) {
            let mut next = net.clone();
            next.happen(event);
            if seen.insert(next.digest()) {
                todo.push(next);
            }
        }
    }
    seen.len()
}

fn once(flags: [bool; 3]) -> Vec<Vec<bool>> {
    flags.into_iter().map(|f| vec![f]).collect()
}

const NONE: Budget = Budget { crashes: 0, leaves: 0, suspicions: 0, victim: NOBODY };

#[test]
fn three_members_agree_whoever_dies_whenever() {
    for flags in [[true, true, false], [false, true, true]] {
        let states = explore(Net::new(once(flags), Budget { crashes: 2, ..NONE }, true));
        println!("two deaths, {flags:?}: {states} states");
    }
    // The random test below has several agreements, too.
    if everything() {
        let twice = vec![vec![true, false], vec![true, true], vec![true, true]];
        let states = explore(Net::new(twice, Budget { crashes: 1, ..NONE }, true));
        println!("two agreements, one death: {states} states");
    }
}

/// It takes four members for one to wait for a new coordinator while that coordinator hears the verdict from a third.
#[test]
fn four_members_agree_where_the_coordinator_dies_while_it_tells_them() {
    let mut net = Net::new(vec![vec![true]; 4], Budget { crashes: 1, ..NONE }, true);
    // Up to the coordinator's decision.
    for a in 0..4 {
        net.happen(Event::Call(a));
    }
    for to in 0..4 {
        for from in (0..4).filter(|from| *from != to) {
            net.happen(Event::Deliver(from, to, 0));
        }
    }
    for to in 1..4 {
        net.happen(Event::Deliver(0, to, 0));
        net.happen(Event::Deliver(to, 0, 0));
    }
    assert_eq!(net.verdicts[0].len(), 1, "it has decided and told nobody yet");
    net.happen(Event::Crash(0));
    println!("the coordinator of four dies: {} states", explore(net));
}

#[test]
fn three_members_agree_whoever_leaves_or_dies() {
    let flags = once([true, false, true]);
    let states = explore(Net::new(flags.clone(), Budget { crashes: 1, leaves: 1, ..NONE }, true));
    println!("one leaves, one dies: {states} states");
    let states = explore(Net::new(flags, Budget { leaves: 2, ..NONE }, true));
    println!("two leave: {states} states");
}

#[test]
fn three_members_agree_also_if_messages_overtake_each_other() {
    let states = explore(Net::new(once([true, false, true]), Budget { crashes: 1, ..NONE }, false));
    println!("one dies, without order: {states} states");
}

#[test]
fn three_members_agree_and_one_that_was_only_slow_never_differs() {
    for victim in 0..3 {
        let suspicions = if everything() { 2 } else { 1 };
        let budget = Budget { suspicions, crashes: 1, leaves: 0, victim };
        let states = explore(Net::new(once([true, true, false]), budget, true));
        println!("rank {victim} is taken for lost, one dies: {states} states");
    }
    if everything() {
        let budget = Budget { suspicions: 1, crashes: 1, leaves: 0, victim: 0 };
        let states = explore(Net::new(once([true, true, false]), budget, false));
        println!("rank 0 is taken for lost, one dies, without order: {states} states");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if everything() { 200_000 } else { 10_000 }))]
    #[test]
    fn any_number_of_members_agree(
        flags in (2usize..=6, 1usize..=3).prop_flat_map(|(n, calls)| prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.8), calls), n)),
        crashes in 0u8..6,
        leaves in 0u8..3,
        suspicions in 0u8..6,
        victim in 0usize..6,
        ordered in any::<bool>(),
        choices in prop::collection::vec(any::<u16>(), 0..400),
    ) {
        let victim = if suspicions > 0 && victim < flags.len() { victim } else { NOBODY };
        let mut net = Net::new(flags, Budget { crashes, leaves, suspicions, victim }, ordered);
        let mut choices = choices.into_iter();
        loop {
            let (must, may) = net.events();
            let choice = usize::from(choices.next().unwrap_or(0));
            let (rare, which) = (choice % 12 == 1, choice / 12);
            let from = if rare && !may.is_empty() { may } else { must };
            let Some(event) = from.get(which % from.len().max(1)) else { break };
            net.happen(*event);
        }
        net.settled();
    }
}

fn say(out: &mut Vec<Out>) -> Vec<(Rank, Step)> {
    let send = |o| if let Out::Send { to, step, .. } = o { Some((to, step)) } else { None };
    out.drain(..).filter_map(send).collect()
}

fn vote(number: u64, ballot: Rank) -> Step {
    Step::Vote { number, flag: true, ballot, accepted: None }
}

#[test]
fn who_has_not_voted_is_named_and_then_who_does_not_answer() {
    let (mut board, mut out) = (Board::new(0, 3), Vec::new());
    board.call(true, &mut out).unwrap();
    board.hear(1, &[], vote(0, 0), &mut out);
    let missing = board.missing(0);
    assert_eq!(
        missing.iter().map(|m| (m.rank, &m.state)).collect::<Vec<_>>(),
        [(2, &MissingState::NotCalled(None))]
    );
    board.hear(2, &[], vote(0, 0), &mut out);
    board.hear(1, &[], Step::Accept { number: 0 }, &mut out);
    let missing = board.missing(0);
    assert_eq!(
        missing.iter().map(|m| (m.rank, &m.state)).collect::<Vec<_>>(),
        [(2, &MissingState::NoAnswer)]
    );
    board.hear(2, &[], Step::Accept { number: 0 }, &mut out);
    board.call(true, &mut out).unwrap();
    let missing = board.missing(1);
    assert!(missing.iter().all(|m| m.state == MissingState::NotCalled(Some(0))), "{missing:?}");
}

#[test]
fn a_coordinator_that_hears_the_verdict_passes_it_on() {
    // Rank 0 decided, told rank 3 alone, and died.
    let (mut board, mut out) = (Board::new(1, 4), Vec::new());
    board.call(true, &mut out).unwrap();
    let gone = [(0, Lost::Died)];
    board.lose(&gone, &mut out);
    board.hear(2, &gone, vote(0, 1), &mut out);
    say(&mut out);
    let outcome = Outcome { flag: true, lost: Vec::new() };
    board.hear(3, &gone, Step::Decide { number: 0, outcome: outcome.clone() }, &mut out);
    assert!(out.contains(&Out::Decided { number: 0, outcome: outcome.clone() }));
    assert!(say(&mut out).contains(&(2, Step::Decide { number: 0, outcome })), "rank 2 waits for rank 1");
}

#[test]
fn a_window_of_agreements_is_open_and_as_many_are_remembered() {
    let (mut ahead, mut out) = (Board::new(0, 2), Vec::new());
    for number in 0..WINDOW {
        assert_eq!(ahead.call(true, &mut out), Ok(number));
    }
    assert_eq!(ahead.call(true, &mut out), Err(Refusal::Full));
    // The other member hears all these verdicts, and then calls as many again. It still knows the oldest verdict when it is asked.
    let mut other = Board::new(1, 2);
    for number in 0..WINDOW {
        other.call(true, &mut out).unwrap();
        let outcome = Outcome { flag: true, lost: Vec::new() };
        other.hear(0, &[], Step::Decide { number, outcome }, &mut out);
    }
    for _ in 0..WINDOW {
        other.call(true, &mut out).unwrap();
    }
    say(&mut out);
    for number in [0, WINDOW - 1] {
        other.hear(0, &[], vote(number, 0), &mut out);
        let said = say(&mut out);
        assert!(matches!(said[..], [(0, Step::Decide { number: n, .. })] if n == number), "{said:?}");
    }
    // An agreement that nobody can have reached yet is not kept.
    other.hear(0, &[], vote(u64::MAX, 0), &mut out);
    other.hear(0, &[], vote(3 * WINDOW, 0), &mut out);
    assert!(say(&mut out).is_empty());
    assert_eq!(other.missing(3 * WINDOW), []);
}

#[test]
fn ranks_that_do_not_exist_are_passed_over() {
    let (mut board, mut out) = (Board::new(1, 3), Vec::new());
    board.call(true, &mut out).unwrap();
    say(&mut out);
    let nobody = vec![(7, Lost::Died), (usize::MAX, Lost::Left)];
    board.hear(9, &nobody, vote(0, 0), &mut out);
    board.hear(1, &nobody, vote(0, 0), &mut out);
    board.hear(0, &nobody, vote(0, usize::MAX), &mut out);
    board.hear(2, &nobody, Step::Accept { number: 99 }, &mut out);
    board.hear(
        2,
        &nobody,
        Step::Propose { number: 0, outcome: Outcome { flag: true, lost: nobody.clone() } },
        &mut out,
    );
    assert_eq!(say(&mut out), []);
    assert!(board.is_open());
}
