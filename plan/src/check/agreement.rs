//! Checks that either all ranks take their plans of loans or all take their step-by-step plans, although they do not negotiate.
//!
//! Only the rank itself knows whether it can lend its memory to all its peers. Its *first frame* to each peer tells them: it is
//! a loan, or the first message of the step-by-step plan.
//!
//! * A rank that cannot lend takes its steps at once.
//! * A rank that can lend lends to every peer that its plan of loans names, and looks at the first frame of every peer that it
//!   borrows from. If one of these frames is a message, the rank gives back what it was lent and takes its steps. When it has made
//!   all its loans and seen all loans to it, it folds, and can no longer change to its steps.
//!
//! So two things must hold. First, the first message of the steps to each peer must not wait for any peer: otherwise a rank that
//! cannot lend might wait for a message of a rank that in turn waits for its first frame. Second, no rank folds if any rank
//! cannot lend, and all fold if all can lend.
//!
//! The second is tried out. In groups of up to [`ALL_SUBSETS`] ranks every subset is tried as the ranks that cannot lend; in larger
//! groups: each rank alone, all ranks but one, two subsets of half the ranks, none, and all.
//!
//! What happens depends on when frames are sent and seen. In groups of up to [`ALL_SCHEDULES`] ranks every order is tried, in larger
//! groups two: the one in which every possible loan is made and seen before any message, and the opposite. The order with the loans
//! first is the worst case. It has every loan of any other order, so a rank that folds in some other order also folds in this one.
//! And a rank that takes its steps in this order cannot lend, or has seen a message on a link on which no loan can come (the sender
//! cannot lend, or not to this rank): so it takes its steps in every order. Hence a rank that decides in this order decides in
//! every other order, too.

use std::collections::HashSet;

use crate::{Operand, Plan, Program, Rank};

/// The largest group in which every subset of ranks is tried as those that cannot lend.
pub const ALL_SUBSETS: usize = 8;
/// The largest group in which every order of events is tried.
pub const ALL_SCHEDULES: usize = 3;
/// The largest group that can be checked. A set of ranks is the bits of a `u64`, of which half are used at most.
const MAX_RANKS: usize = 32;

/// Why ranks might not agree on whether to lend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// There are too many ranks, or not one plan of each sort for each rank, in rank order.
    #[error("{lending} plans of loans and {steps} of steps: can compare up to {MAX_RANKS} of each")]
    Shape {
        /// Plans of loans.
        lending: usize,
        /// Step-by-step plans.
        steps: usize,
    },
    /// The steps of a rank send nothing to this peer.
    #[error("the steps of rank {rank} send nothing to rank {to}")]
    Silent {
        /// Whose steps.
        rank: Rank,
        /// The peer that never gets a frame.
        to: Rank,
    },
    /// The first message of a rank's steps to this peer waits for some peer.
    #[error("rank {rank}, step {step}: the first message to rank {to} waits for a peer")]
    Late {
        /// Whose steps.
        rank: Rank,
        /// The step that sends the message.
        step: usize,
        /// The peer that the message goes to.
        to: Rank,
    },
    /// A rank folds although others cannot lend.
    #[error("rank {rank} folds, but {cannot:?} cannot lend")]
    Folds {
        /// Who cannot lend.
        cannot: Vec<Rank>,
        /// Who folds.
        rank: Rank,
    },
    /// A rank takes its steps although all can lend.
    #[error("rank {rank} takes its steps, but all can lend")]
    Steps {
        /// Who takes its steps.
        rank: Rank,
    },
    /// A rank never knows whether to fold or to take its steps.
    #[error("rank {rank} never decides if {cannot:?} cannot lend")]
    Undecided {
        /// Who cannot lend.
        cannot: Vec<Rank>,
        /// Who does not know.
        rank: Rank,
    },
}

/// Checks that ranks which have these plans of loans and these step-by-step plans always agree on which of the two they take.
/// Returns how many subsets of ranks were tried as those that cannot lend.
///
/// It assumes that [`super::check()`] finds no fault in either sort of plans.
///
/// # Errors
/// The first [`Disagreement`] found.
pub fn agree(lending: &[Plan], steps: &[Plan]) -> Result<usize, Disagreement> {
    let n = lending.len();
    let fits = |plans: &[Plan]| plans.iter().enumerate().all(|(rank, p)| (p.size, p.rank) == (n, rank));
    if n > MAX_RANKS || steps.len() != n || !fits(lending) || !fits(steps) {
        return Err(Disagreement::Shape { lending: n, steps: steps.len() });
    }
    steps.iter().try_for_each(sends_first)?;
    let group = Group::new(lending);
    let subsets = subsets(n);
    for &cannot in &subsets {
        let start = State::new(n, cannot);
        if n <= ALL_SCHEDULES {
            group.try_all(start, cannot)?;
        } else {
            for preferred in [Frame::Loan, Frame::Message] {
                group.try_one(start.clone(), preferred, cannot)?;
            }
        }
    }
    Ok(subsets.len())
}

/// Checks that a rank's steps send to every peer, and that the first message to each peer waits for no peer.
fn sends_first(plan: &Plan) -> Result<(), Disagreement> {
    let (program, rank) = (Program::compile(plan), plan.rank);
    // By step: whether neither the step nor any earlier step that it waits for needs a peer.
    let mut alone = Vec::with_capacity(plan.steps.len());
    for (step, node) in plan.steps.iter().zip(&program.nodes) {
        let own = step.loan.is_none() && step.operands.iter().all(|o| matches!(o, Operand::Own(_)));
        let written = node.after_write.iter().all(|&earlier| alone[earlier as usize]);
        // A step that overwrites memory which an earlier step sends waits until the receivers have released the message.
        let unsent = |&earlier: &u32| alone[earlier as usize] && plan.steps[earlier as usize].send.is_empty();
        alone.push(own && step.into.is_empty() && written && node.after_read.iter().all(unsent));
    }
    for to in (0..plan.size).filter(|&to| to != rank) {
        match program.sends[to].first() {
            None => return Err(Disagreement::Silent { rank, to }),
            Some(&step) if !alone[step as usize] => {
                return Err(Disagreement::Late { rank, step: step as usize, to });
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// The sets of ranks to try as those that cannot lend, as bits: all sets of a small group, some of a larger one.
fn subsets(n: usize) -> Vec<u64> {
    let all = (1u64 << n) - 1;
    if n <= ALL_SUBSETS {
        return (0..=all).collect();
    }
    let one = |rank: Rank| 1u64 << rank;
    let mut sets = vec![0, all, all >> (n - n / 2), all & 0x5555_5555_5555_5555];
    sets.extend((0..n).flat_map(|rank| [one(rank), all ^ one(rank)]));
    sets
}

/// What a rank sends to a peer first.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Frame {
    Loan,
    Message,
}

/// What a rank has decided.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Undecided,
    Folds,
    Steps,
}

/// The state of all ranks at one time. Of each link only the first frame matters: no decision depends on later ones.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// By rank.
    stages: Vec<Stage>,
    /// By link (`from * n + to`): the first frame, if it was sent, and whether the receiver has seen it.
    links: Vec<(Option<Frame>, bool)>,
}

/// Something that may happen next.
#[derive(Clone, Copy)]
enum Event {
    /// The first frame of this link is sent.
    Send(usize, Frame),
    /// An undecided receiver sees the first frame of this link, which is of this sort.
    See(usize, Frame),
    /// This rank, which has seen all loans that it needs and made its own, folds.
    Fold(Rank),
}

impl State {
    fn new(n: usize, cannot: u64) -> State {
        let stage = |rank: Rank| if cannot >> rank & 1 == 1 { Stage::Steps } else { Stage::Undecided };
        State { stages: (0..n).map(stage).collect(), links: vec![(None, false); n * n] }
    }

    fn after(&mut self, event: Event) {
        let n = self.stages.len();
        match event {
            Event::Send(link, frame) => self.links[link].0 = Some(frame),
            Event::See(link, frame) => {
                self.links[link].1 = true;
                if frame == Frame::Message {
                    self.stages[link % n] = Stage::Steps;
                }
            }
            Event::Fold(rank) => self.stages[rank] = Stage::Folds,
        }
    }
}

/// Who lends to whom.
struct Group {
    n: usize,
    /// By link (`from * n + to`): whether `from`, if it can lend, begins with a loan.
    lends: Vec<bool>,
    /// By link: whether `to` needs a loan of `from` before it folds.
    borrows: Vec<bool>,
}

impl Group {
    fn new(lending: &[Plan]) -> Group {
        let n = lending.len();
        let (mut lends, mut borrows) = (vec![false; n * n], vec![false; n * n]);
        for plan in lending {
            for step in &plan.steps {
                step.loan.iter().for_each(|loan| lends[plan.rank * n + loan.to] = true);
                step.lenders().for_each(|from| borrows[from * n + plan.rank] = true);
            }
        }
        Group { n, lends, borrows }
    }

    /// All that may happen next.
    fn events<'a>(&'a self, state: &'a State) -> impl Iterator<Item = Event> + 'a {
        let n = self.n;
        let of_links = (0..n * n).filter_map(move |link| {
            let (from, to) = (link / n, link % n);
            match (state.links[link], state.stages[from]) {
                _ if from == to => None,
                ((None, _), Stage::Steps) => Some(Event::Send(link, Frame::Message)),
                ((None, _), Stage::Undecided) if self.lends[link] => Some(Event::Send(link, Frame::Loan)),
                ((Some(frame), false), _) if self.borrows[link] && state.stages[to] == Stage::Undecided => {
                    Some(Event::See(link, frame))
                }
                _ => None,
            }
        });
        let folds = (0..n).filter(move |&rank| {
            let ready = |peer: Rank| {
                let (to, from) = (rank * n + peer, peer * n + rank);
                (!self.lends[to] || state.links[to].0.is_some())
                    && (!self.borrows[from] || state.links[from].1)
            };
            state.stages[rank] == Stage::Undecided && (0..n).all(ready)
        });
        of_links.chain(folds.map(Event::Fold))
    }

    /// Fails if a rank has decided what it must not decide, or is undecided at the end.
    fn judge(&self, state: &State, cannot: u64, is_end: bool) -> Result<(), Disagreement> {
        let ranks = || (0..self.n).filter(|rank| cannot >> rank & 1 == 1).collect();
        for (rank, stage) in state.stages.iter().enumerate() {
            match stage {
                Stage::Folds if cannot != 0 => return Err(Disagreement::Folds { cannot: ranks(), rank }),
                Stage::Steps if cannot == 0 => return Err(Disagreement::Steps { rank }),
                Stage::Undecided if is_end => return Err(Disagreement::Undecided { cannot: ranks(), rank }),
                _ => {}
            }
        }
        Ok(())
    }

    /// All that can happen, in every order.
    fn try_all(&self, start: State, cannot: u64) -> Result<(), Disagreement> {
        let mut known = HashSet::from([start.clone()]);
        let mut open = vec![start];
        while let Some(state) = open.pop() {
            let mut is_end = true;
            for event in self.events(&state) {
                is_end = false;
                let mut next = state.clone();
                next.after(event);
                if known.insert(next.clone()) {
                    open.push(next);
                }
            }
            self.judge(&state, cannot, is_end)?;
        }
        Ok(())
    }

    /// Tries one order of events: those of frames of the `preferred` sort come first (a fold counts as an event of loans).
    ///
    /// All possible events of loans may happen at once, as none of them prevents another; so may all events of messages.
    fn try_one(&self, mut state: State, preferred: Frame, cannot: u64) -> Result<(), Disagreement> {
        let is_preferred = |event: &Event| match *event {
            Event::Send(_, frame) | Event::See(_, frame) => frame == preferred,
            Event::Fold(_) => preferred == Frame::Loan,
        };
        loop {
            let (first, others): (Vec<_>, Vec<_>) = self.events(&state).partition(is_preferred);
            let events = if first.is_empty() { others } else { first };
            if events.is_empty() {
                return self.judge(&state, cannot, true);
            }
            events.into_iter().for_each(|event| state.after(event));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algo, Kind, Shape, lending, plan};

    /// The plans of loans and the step-by-step plans of an all_reduce.
    fn both(algo: Algo, n: usize, in_place: bool) -> (Vec<Plan>, Vec<Plan>) {
        let plans = (0..n).map(|rank| {
            let shape = Shape { n, rank, in_place, ..Shape::default() };
            let loans = lending(Kind::AllReduce, algo, &shape).expect("a plan of loans");
            (loans, plan(Kind::AllReduce, algo, &shape).expect("a plan of steps"))
        });
        plans.unzip()
    }

    #[test]
    fn ranks_agree_whoever_cannot_lend() {
        for algo in [Algo::Direct, Algo::OneShot] {
            for in_place in [false, true] {
                for n in 2..=MAX_RANKS {
                    let (loans, steps) = both(algo, n, in_place);
                    let tried = agree(&loans, &steps);
                    let due = if n <= ALL_SUBSETS { 1 << n } else { 2 * n + 4 };
                    assert_eq!(tried, Ok(due), "{algo}, n {n}, in place {in_place}");
                }
            }
        }
    }

    /// The steps of a ring send to one neighbour alone; those of recursive doubling send to some ranks only after a receive.
    #[test]
    fn steps_that_do_not_tell_all_peers_at_once() {
        let (loans, _) = both(Algo::Direct, 4, true);
        let steps = |algo| -> Vec<Plan> {
            let shape = |rank| Shape { n: 4, rank, in_place: true, ..Shape::default() };
            (0..4).map(|rank| plan(Kind::AllReduce, algo, &shape(rank)).expect("a plan")).collect()
        };
        assert_eq!(agree(&loans, &steps(Algo::Ring)), Err(Disagreement::Silent { rank: 0, to: 2 }));
        let late = agree(&loans, &steps(Algo::RecursiveDoubling));
        assert!(matches!(late, Err(Disagreement::Late { rank: 0, to: 2, .. })), "{late:?}");
        // The steps of `direct`, but with rank 0's first message to rank 1 moved to the end: its first one is now the result, which waits for peers.
        let mut steps = steps(Algo::Direct);
        let first = steps[0].steps.remove(0);
        steps[0].steps.push(first);
        assert!(matches!(agree(&loans, &steps), Err(Disagreement::Late { rank: 0, to: 1, .. })));
    }

    /// A rank that does not borrow from some peer folds although that peer cannot lend.
    #[test]
    fn a_rank_that_does_not_hear_all_folds_alone() {
        for n in [3, 5] {
            let (mut loans, steps) = both(Algo::Direct, n, true);
            let is_loan_to_2 = |step: &crate::Step| step.loan.is_some_and(|loan| loan.to == 2);
            loans[1].steps.retain(|step| !is_loan_to_2(step));
            let fold = loans[2].steps.last_mut().expect("the step that folds");
            fold.operands.retain(|operand| *operand != Operand::Lent(1));
            fold.into.retain(|from| *from != 1);
            assert_eq!(agree(&loans, &steps), Err(Disagreement::Folds { cannot: vec![1], rank: 2 }), "n {n}");
        }
    }

    /// A rank that waits for a loan that nobody makes waits for ever.
    #[test]
    fn a_rank_that_is_lent_nothing_never_decides() {
        for n in [3, 5] {
            let (mut loans, steps) = both(Algo::OneShot, n, false);
            loans[1].steps.retain(|step| step.loan.is_none_or(|loan| loan.to != 2));
            assert_eq!(
                agree(&loans, &steps),
                Err(Disagreement::Undecided { cannot: vec![], rank: 2 }),
                "n {n}"
            );
        }
    }

    #[test]
    fn plans_that_do_not_belong_together() {
        let (loans, steps) = both(Algo::Direct, 3, true);
        let fault = agree(&loans, &steps[..2]);
        assert_eq!(fault, Err(Disagreement::Shape { lending: 3, steps: 2 }));
        assert!(agree(&steps, &loans).is_err());
    }
}
