//! From a plan to what an executor runs: the plan, and what each step has to wait for.
//!
//! # How a program is run
//!
//! Each step takes the slices of its chunk in order. For each slice:
//!
//! 1. It waits for `after_write`. A **copy** (one operand, not marked `early`) also waits for `after_read` here: it
//!    goes straight to its `dst`.
//! 2. It gathers its operands, in order.
//! 3. A **combining** step (two operands or more), or an early copy, waits for `after_read` only now, with the result in its
//!    *hand* (one slice of memory): partners that send from where they write (recursive doubling, one-shot
//!    in place, the barrier) would otherwise wait for each other for ever.
//! 4. It stores the result in `dst` and sends from there (a copy of the input: from the input), going on with the next slice
//!    meanwhile. Without `dst` the result stays in the hand, and the next slice waits until all sends of this one are taken.
//!    A step that only sends from our own memory needs no hand: it lends its source.
//!
//! In a plan of loans, a step that lends ([`Step::loan`]) waits for `after_write` and `after_read`, and then offers the slice to
//! the borrower, in the order of the link's messages. The slice counts as computed and as released when the borrower gives it
//! back. A step that borrows combines a slice only when every rank whose loan it reads or writes into has offered that slice; it
//! writes the result into those loans when it stores it in `dst`, and gives the slice of all of them back.
//!
//! The checker proves the plans under these rules without any buffering in links ([`super::check`]).

use crate::{Algo, At, Kind, Loan, OUTPUT, Operand, Plan, Rank, Shape, Step};

/// A plan and its dependencies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The plan.
    pub plan: Plan,
    /// What each step waits for, indexed like `plan.steps`.
    pub nodes: Vec<StepNode>,
    /// Per peer: the steps that send or lend to it, in the order of their messages.
    pub sends: Vec<Vec<u32>>,
    /// Per peer: the steps that receive or borrow from it, in the order of their messages. A step borrows a rank's loan once,
    /// whether it reads the loan, writes into it, or both.
    pub recvs: Vec<Vec<u32>>,
    /// The same collective by loans, for ranks that can touch each other's memory, if there is such a plan ([`crate::lending()`]).
    pub lending: Option<Lending>,
    /// A message may wait until all its slices are there, and go as one: allowed by [`goes_whole`], and wanted.
    pub whole: bool,
    /// Each result is combined by one step from what the ranks gave ([`deterministic`](super::deterministic)): no sum on the way is
    /// rounded to the type of the elements.
    pub one_fold: bool,
}

/// A plan of loans, as an executor runs it: this rank lends each peer what it is to be lent, borrows what its peers lend, folds
/// all of it in one step, and gives it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lending {
    /// The plan.
    pub plan: Plan,
    /// By peer: what it is lent, if anything.
    pub loans: Vec<Option<Loan>>,
    /// By peer: whether the step that folds needs a loan of its.
    pub borrows: Vec<bool>,
    /// The step that folds, if there is one.
    pub fold: Option<usize>,
}

impl Lending {
    /// Works out who lends what to whom.
    ///
    /// # Panics
    /// If the plan names a rank that does not exist; [`crate::lending()`] makes none such.
    pub fn compile(plan: Plan) -> Lending {
        let mut loans = vec![None; plan.size];
        for loan in plan.steps.iter().filter_map(|step| step.loan) {
            loans[loan.to] = Some(loan);
        }
        let fold = plan.steps.iter().position(|step| step.loan.is_none());
        let mut borrows = vec![false; plan.size];
        if let Some(step) = fold.map(|i| &plan.steps[i]) {
            step.lenders().for_each(|from| borrows[from] = true);
        }
        Lending { plan, loans, borrows, fold }
    }
}

/// A step in the graph of which step waits for which: what it waits for, slice by slice. Only what does not follow from the rest.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StepNode {
    /// Earlier steps that wrote a `(slot, chunk)` that this step reads or writes: they must have computed.
    pub after_write: Vec<u32>,
    /// Earlier steps that read, or send from, the `(slot, chunk)` that this step writes: they must have
    /// computed, and their sends must have been released.
    pub after_read: Vec<u32>,
    /// Whether the result may have to wait in a hand of one slice: it has no `dst` to be sent from, or it is
    /// gathered before its `dst` is free.
    pub hand: bool,
    /// Later steps that may wait for this one.
    pub dependents: Vec<u32>,
    /// Its `dst` is the caller's, and nothing else in the plan reads or writes that chunk: what is stored there stays.
    pub is_final: bool,
}

/// How a step holds what it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Only lends our own memory: one own operand, no `dst`.
    Source,
    /// In `dst`.
    Dst,
    /// In the hand: computed, but kept nowhere.
    Hand,
    /// Sends nothing: it lends ([`Step::loan`]).
    Loan,
}

impl Step {
    /// How this step holds what it sends.
    #[inline]
    pub fn holds(&self) -> Holds {
        match (self.dst, self.operands.as_slice()) {
            _ if self.loan.is_some() => Holds::Loan,
            (Some(_), _) => Holds::Dst,
            (None, [Operand::Own(_)]) if !self.finish && self.into.is_empty() => Holds::Source,
            _ => Holds::Hand,
        }
    }

    /// The ranks whose loans the step borrows, each of them once: first those whose loans it reads, in the order of its
    /// operands, then those whose loans it only writes into.
    #[inline]
    pub fn lenders(&self) -> impl Iterator<Item = Rank> + '_ {
        let read = self.operands.iter().filter_map(|operand| match operand {
            Operand::Lent(from) => Some(*from),
            Operand::Recv(_) | Operand::Own(_) => None,
        });
        read.chain(self.only_into())
    }

    /// The ranks whose loans the step writes into and does not read.
    pub(super) fn only_into(&self) -> impl Iterator<Item = Rank> + '_ {
        self.into.iter().copied().filter(|from| !self.operands.contains(&Operand::Lent(*from)))
    }

    /// A chunk of its own memory, if it names one: all that it names, and its messages, have one length.
    #[inline]
    pub fn chunk(&self) -> Option<At> {
        let own = self.operands.iter().find_map(|o| match o {
            Operand::Own(at) => Some(*at),
            Operand::Recv(_) | Operand::Lent(_) => None,
        });
        self.dst.or(own).or(self.loan.map(|loan| loan.read))
    }

    /// Whether it combines operands, or copies one.
    #[inline]
    pub fn combines(&self) -> bool {
        self.operands.len() > 1
    }

    /// Whether it gathers before its `dst` is free.
    #[inline]
    pub fn gathers_early(&self) -> bool {
        self.early || self.combines()
    }
}

/// Who touched one `(slot, chunk)` so far.
#[derive(Clone, Default)]
struct Touched {
    /// The last step that wrote it.
    writer: Option<u32>,
    /// The steps that have read it, or send from it, since.
    readers: Vec<u32>,
    /// How often steps name it.
    named: u32,
}

impl Program {
    /// Work out what each step waits for.
    ///
    /// # Panics
    /// If the plan names a rank, a slot or a chunk that does not exist; [`super::plan`] makes none such.
    pub fn compile(plan: &Plan) -> Program {
        let mut touched: Vec<Vec<Touched>> =
            plan.slots.iter().map(|l| vec![Touched::default(); l.chunks() as usize]).collect();
        let mut sends = vec![Vec::new(); plan.size];
        let mut recvs = vec![Vec::new(); plan.size];
        let mut nodes = Vec::with_capacity(plan.steps.len());
        for (i, step) in plan.steps.iter().enumerate() {
            let i = i as u32;
            step.send.iter().chain(step.loan.iter().map(|loan| &loan.to)).for_each(|&to| sends[to].push(i));
            let mut node = StepNode::default();
            if let Some(loan) = step.loan {
                lend(&mut touched, &mut node, loan, i);
            }
            for operand in &step.operands {
                match *operand {
                    Operand::Recv(from) | Operand::Lent(from) => recvs[from].push(i),
                    Operand::Own(at) => {
                        let t = of(&mut touched, at);
                        t.named += 1;
                        add(&mut node.after_write, t.writer);
                        if step.dst != Some(at) {
                            t.readers.push(i);
                        }
                    }
                }
            }
            step.only_into().for_each(|from| recvs[from].push(i));
            if let Some(at) = step.dst {
                let t = of(&mut touched, at);
                t.named += 1;
                // Readers have waited for the writer before them.
                if t.readers.is_empty() {
                    add(&mut node.after_write, t.writer);
                }
                t.readers.drain(..).for_each(|r| add(&mut node.after_read, Some(r)));
                t.writer = Some(i);
                if !step.send.is_empty() {
                    t.readers.push(i);
                }
            }
            node.hand = match step.holds() {
                Holds::Source | Holds::Loan => false,
                // What is only written into loans goes straight there: they are all there when it is combined.
                Holds::Hand => !step.send.is_empty(),
                Holds::Dst => step.gathers_early() && !node.after_read.is_empty(),
            };
            nodes.push(node);
        }
        for i in 0..nodes.len() {
            let StepNode { after_write, after_read, .. } = &nodes[i];
            let earlier: Vec<u32> = after_write.iter().chain(after_read).copied().collect();
            for j in earlier {
                add(&mut nodes[j as usize].dependents, Some(i as u32));
            }
        }
        for (node, step) in nodes.iter_mut().zip(&plan.steps) {
            let once = |at: At| at.slot == OUTPUT && of(&mut touched, at).named == 1;
            node.is_final = step.dst.is_some_and(once);
        }
        Program { plan: plan.clone(), nodes, sends, recvs, lending: None, whole: false, one_fold: false }
    }
}

/// Whether no rank's plan has a hand, whoever works in place. Then messages of any length, that are sent when all of them is
/// there and released when all is taken, come to their end too ([`super::check`]). Where a rank holds one slice in its
/// hand, it takes the next one when that is gone, and its peer may wait for both to be released.
pub fn goes_whole(kind: Kind, algo: Algo, shape: &Shape<'_>) -> bool {
    let handless = |rank: Rank, in_place: bool| {
        let plan = super::plan(kind, algo, &Shape { rank, in_place, ..*shape });
        plan.is_ok_and(|plan| !Program::compile(&plan).nodes.iter().any(|node| node.hand))
    };
    (0..shape.n).all(|rank| handless(rank, false) && handless(rank, true))
}

/// Step `i` lends. Its node waits as that of a step that reads the one chunk and writes the other, and is over only when all is
/// given back.
fn lend(touched: &mut [Vec<Touched>], node: &mut StepNode, loan: Loan, i: u32) {
    let t = of(touched, loan.read);
    t.named += 1;
    add(&mut node.after_write, t.writer);
    if loan.write != loan.read {
        t.readers.push(i);
    }
    let t = of(touched, loan.write);
    t.named += 1;
    add(&mut node.after_write, t.writer);
    t.readers.drain(..).for_each(|r| add(&mut node.after_read, Some(r)));
    t.writer = Some(i);
}

fn of(touched: &mut [Vec<Touched>], at: At) -> &mut Touched {
    &mut touched[at.slot as usize][at.chunk as usize]
}

fn add(list: &mut Vec<u32>, step: Option<u32>) {
    if let Some(step) = step.filter(|s| !list.contains(s)) {
        list.push(step);
    }
}
