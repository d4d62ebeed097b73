//! Plans broken on purpose, to test that the checker and the conformance tests notice.
//!
//! [`mutations`] lists the single changes to one rank's plan that are certain to be wrong, whatever the
//! timing. The checker must refuse every one. In a test build the engine runs them too, over each kind of link that
//! the conformance tests use, and at least one rank must fail (by a wrong answer, an error or a timeout).

use crate::{At, Kind, Layout, OUTPUT, Operand, Plan, SCRATCH, Step};

/// One change to one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// The step is not there.
    DropStep,
    /// Operand k is not there.
    DropOperand(usize),
    /// The result is not kept.
    DropDst,
    /// The result is not sent to the k-th rank of `send`.
    DropSend(usize),
    /// Operand k is read from the next chunk of its slot.
    WrongOperand(usize),
    /// The result is stored in the next chunk of its slot.
    WrongDst,
    /// `finish` is inverted. At run time only the result of an average changes.
    FlipFinish,
    /// The result is not written into the loan of the k-th rank of `into`.
    DropInto(usize),
    /// The chunk that is lent for reading is replaced by the next one of its slot.
    WrongLoanRead,
    /// The chunk that is lent for writing is replaced by the next one of its slot.
    WrongLoanWrite,
    /// This step and the next, which touch the same memory, change places.
    SwapNext,
}

/// Every mutation of a plan for `kind` that is certain to be wrong, with the index of the step it applies to.
///
/// Omitted are changes that may leave the result right:
/// - In every plan: where a step stores what is only sent on, if that is a partial sum or lies in scratch memory; and the order of
///   independent steps.
/// - In a barrier also: the order of dependent steps, and whether a token is stored between rounds. A rank that passes on more
///   than it must, or hears again what it has lost, does no harm.
/// - In scans also: `finish` (it matters only to an average, and there is none of a scan), and the order of two sums of which the
///   first is not sent (with a commutative reduction the result is the same). The checker would refuse both.
///
/// A step that lends ([`Step::loan`]) is dropped, or lends another chunk for reading or for writing, if its slot has another. In
/// place, where the loan reads and writes the same chunk, only one of the two is replaced.
pub fn mutations(kind: Kind, plan: &Plan) -> Vec<(usize, Mutation)> {
    let exact = kind != Kind::Barrier;
    let scan = kind.is_scan();
    let mut all = Vec::new();
    let program = super::Program::compile(plan);
    for (i, step) in plan.steps.iter().enumerate() {
        all.push((i, Mutation::DropStep));
        if let Some(loan) = step.loan {
            all.extend((chunks(plan, loan.read) > 1).then_some((i, Mutation::WrongLoanRead)));
            all.extend((chunks(plan, loan.write) > 1).then_some((i, Mutation::WrongLoanWrite)));
            continue;
        }
        if !scan {
            all.push((i, Mutation::FlipFinish));
        }
        for (k, operand) in step.operands.iter().enumerate() {
            all.push((i, Mutation::DropOperand(k)));
            if matches!(operand, Operand::Own(at) if chunks(plan, *at) > 1) {
                all.push((i, Mutation::WrongOperand(k)));
            }
        }
        all.extend((0..step.send.len()).map(|k| (i, Mutation::DropSend(k))));
        all.extend((0..step.into.len()).map(|k| (i, Mutation::DropInto(k))));
        if let Some(at) = step.dst {
            // Whether `dst` serves more than sending: it holds a result or a copy of one, or a later step reads it.
            let touches = |later: &&Step| later.dst == Some(at) || later.operands.contains(&Operand::Own(at));
            let next = plan.steps[i + 1..].iter().find(touches);
            let read = next.is_some_and(|later| later.operands.contains(&Operand::Own(at)));
            let result = step.send.is_empty()
                || step.finish
                || !step.combines()
                || (scan && at.slot == OUTPUT && next.is_none());
            if (result && at.slot != SCRATCH) || (read && exact) {
                all.push((i, Mutation::DropDst));
                if chunks(plan, at) > 1 {
                    all.push((i, Mutation::WrongDst));
                }
            }
        }
        let tied = program.nodes.get(i + 1).is_some_and(|next| {
            next.after_read.contains(&(i as u32)) || next.after_write.contains(&(i as u32))
        });
        let harmless = |next: &Step| {
            next.loan.is_some() || scan && step.combines() && next.combines() && step.send.is_empty()
        };
        if tied && exact && !plan.steps.get(i + 1).is_some_and(harmless) {
            all.push((i, Mutation::SwapNext));
        }
    }
    all
}

/// Breaks the plan at this step.
///
/// # Panics
/// If the mutation is not one that [`mutations`] lists for this plan and step.
pub fn apply(plan: &mut Plan, step: usize, mutation: &Mutation) {
    let slots = plan.slots.clone();
    let next = |at: &mut At| at.chunk = (at.chunk + 1) % slots[at.slot as usize].chunks();
    let s = &mut plan.steps[step];
    match *mutation {
        Mutation::DropStep => drop(plan.steps.remove(step)),
        Mutation::DropOperand(k) => drop(s.operands.remove(k)),
        Mutation::DropDst => s.dst = None,
        Mutation::DropSend(k) => drop(s.send.remove(k)),
        Mutation::WrongOperand(k) => match &mut s.operands[k] {
            Operand::Own(at) => next(at),
            Operand::Recv(_) | Operand::Lent(_) => panic!("operand {k} of step {step} is not our own"),
        },
        Mutation::DropInto(k) => drop(s.into.remove(k)),
        Mutation::WrongLoanRead => next(&mut s.loan.as_mut().expect("a step that lends").read),
        Mutation::WrongLoanWrite => next(&mut s.loan.as_mut().expect("a step that lends").write),
        Mutation::WrongDst => next(s.dst.as_mut().expect("a step with a dst")),
        Mutation::FlipFinish => s.finish = !s.finish,
        Mutation::SwapNext => plan.steps.swap(step, step + 1),
    }
}

fn chunks(plan: &Plan, at: At) -> u32 {
    plan.slots.get(at.slot as usize).copied().map_or(0, Layout::chunks)
}
