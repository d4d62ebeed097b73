//! Compiles a plan to what an executor runs, a [`Program`]: the plan, and what each of its steps has to wait for.
//!
//! # How a program is run
//!
//! Each step takes the slices of its chunk in order. For each slice:
//!
//! 1. It waits for the steps in `after_write` ([`StepNode`]). A **copy** (one operand, not marked `early`) also waits for those in
//!    `after_read` here, as it writes straight to its `dst`.
//! 2. It gathers its operands, in order.
//! 3. A **combining** step (two operands or more), or an early copy, waits for `after_read` only now, with the result in its
//!    *hand* (memory for one slice; the engine says *accumulator*). Otherwise partners that send from where they write (recursive
//!    doubling, one-shot in place, the barrier) would wait for each other for ever.
//! 4. It stores the result in `dst` and sends it from there. (If the step only copies the input, an executor may send from the input
//!    instead.) The step goes on with the next slice meanwhile. Without `dst` the result stays in the hand, and the next slice waits
//!    until all receivers have taken this one. A step that only sends from our own memory needs no hand: what it sends stays where it lies.
//!
//! In a plan of loans, a step that lends ([`Step::loan`]) waits for `after_write` and `after_read`, and then offers the slice to
//! the borrower, in the order of the link's messages. The slice counts as computed and as released when the borrower gives it
//! back. A step that borrows combines a slice only when every rank whose loan it reads or writes into has offered that slice. When
//! it stores the result in `dst`, it also writes it into the loans named in `Step::into`, and gives the slice back to all lenders.
//!
//! The checker ([`super::check`]) proves that plans are right under these rules, over links that buffer nothing.

pub use crate::step::Holds;
use crate::{Algo, At, INPUT, Kind, Loan, OUTPUT, Operand, Plan, Rank, Shape, Step};

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
    /// A message may wait until all its slices are there, and go as one. A caller of [`compile`](Program::compile) that wants that sets
    /// this, where [`goes_whole`] allows it.
    pub whole: bool,
    /// One single step combines each result from the ranks' own inputs, so no partial sum is rounded to the elements' type on the
    /// way. A caller of [`compile`](Program::compile) sets this, where [`deterministic`](super::deterministic) says so.
    pub one_fold: bool,
    /// An executor may run the steps one after another, each as a whole, over links that copy what is sent and have room for a message of each step.
    /// The steps are few, with few operands and receivers; they store in `dst` or send from our own memory, keep to input and output, and lend
    /// nothing. This crate's tests show that the ranks of such an executor come to their end.
    pub stepwise: bool,
}

/// The most steps of a plan that is [stepwise](Program::stepwise). The next two constants are the most operands and receivers of each step.
pub const STEPWISE_STEPS: usize = 16;
/// See [`STEPWISE_STEPS`].
pub const STEPWISE_OPERANDS: usize = 8;
/// See [`STEPWISE_STEPS`].
pub const STEPWISE_RECEIVERS: usize = 64;

/// A plan of loans, as an executor runs it: this rank makes its loans to its peers, borrows what they lend, folds all of that in one
/// step, and gives their loans back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lending {
    /// The plan.
    pub plan: Plan,
    /// By peer: what this rank lends it, if anything.
    pub loans: Vec<Option<Loan>>,
    /// By peer: whether the step that folds needs a loan from it.
    pub borrows: Vec<bool>,
    /// The step that folds, if there is one.
    pub fold: Option<usize>,
}

impl Lending {
    /// Works out what this rank lends to whom, and from whom it borrows.
    ///
    /// # Panics
    /// If the plan names a rank that does not exist; [`crate::lending()`] makes no such plan.
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

/// A step as a node of the dependency graph. Each of its slices waits for the same slice of the steps in `after_write` and
/// `after_read`. An earlier step is left out where waiting for the others is enough.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StepNode {
    /// Earlier steps that write a `(slot, chunk)` which this step reads or writes: they must have computed the slice.
    pub after_write: Vec<u32>,
    /// Earlier steps that read, or send from, the `(slot, chunk)` that this step writes: they must have
    /// computed the slice, and its receivers must have released it.
    pub after_read: Vec<u32>,
    /// Whether a result may have to wait in the hand: the step has no `dst` to send it from, or gathers its operands before
    /// `dst` is free.
    pub hand: bool,
    /// Later steps that may wait for this one.
    pub dependents: Vec<u32>,
    /// Its `dst` is in the caller's output, and nothing else in the plan reads or writes that chunk: what is stored there stays.
    pub is_final: bool,
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
    /// If the plan names a rank, a slot or a chunk that does not exist; [`super::plan`] makes no such plan.
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
                // Readers have waited for the last writer themselves: to wait for them is enough.
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
                // A result that is only written into loans, and not sent, needs no hand: all the loans have come when the step combines.
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
        let stepwise = is_stepwise(plan);
        let plan = plan.clone();
        Program { plan, nodes, sends, recvs, lending: None, whole: false, one_fold: false, stepwise }
    }
}

/// Whether no step of any rank's plan has a hand, whichever ranks work in place. Then the plans come to their end ([`super::check`])
/// also if each message is sent only when all its slices are there, and released only when all are taken. With a hand they might
/// not: a step takes its next slice only when the hand is empty, while its peer empties the hand only when all slices are there.
pub fn goes_whole(kind: Kind, algo: Algo, shape: &Shape<'_>) -> bool {
    let handless = |rank: Rank, in_place: bool| {
        let plan = super::plan(kind, algo, &Shape { rank, in_place, ..*shape });
        plan.is_ok_and(|plan| !Program::compile(&plan).nodes.iter().any(|node| node.hand))
    };
    (0..shape.n).all(|rank| handless(rank, false) && handless(rank, true))
}

/// Whether a plan is [stepwise](Program::stepwise).
fn is_stepwise(plan: &Plan) -> bool {
    let is_users = |at: &At| matches!(at.slot, INPUT | OUTPUT);
    let is_plain = |step: &Step| {
        step.operands.len() <= STEPWISE_OPERANDS
            && step.send.len() <= STEPWISE_RECEIVERS
            && matches!(step.holds(), Holds::Source | Holds::Dst)
            && step.dst.iter().all(is_users)
            && step.operands.iter().all(|operand| match operand {
                Operand::Own(at) => is_users(at),
                Operand::Recv(_) => true,
                Operand::Lent(_) => false,
            })
    };
    plan.steps.len() <= STEPWISE_STEPS && plan.steps.iter().all(is_plain)
}

/// Notes what step `i`, which lends, waits for: the same as a step that reads chunk `loan.read` and writes chunk `loan.write`. To
/// later steps it is over only when the peer has given the memory back.
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
