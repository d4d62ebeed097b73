//! Tests that the checker itself notices when a rank touches memory that it has lent: rank 0 ignores all that its steps should wait for.

use super::*;
use crate::{Algo, At, INPUT, Layout, Loan, OUTPUT, Operand, SCRATCH, Shape, Slot, Step, lending};

/// The first touch of lent memory by its owner, when rank 0's steps do not wait for its earlier steps.
fn held(plans: &[Plan], in_place: bool) -> Option<Fault> {
    let goal = Goal::new(Kind::AllReduce, 0, in_place, plans).expect("a goal");
    let mut net = Net::new(plans, &goal).expect("a net");
    for node in &mut net.programs[0].nodes {
        node.after_write.clear();
        node.after_read.clear();
    }
    let mode = Mode { slices: 2, eager: false, strict: false, whole: false };
    let values = Values::new(goal.n, goal.pieces(plans, mode.slices));
    Run::new(&net, mode, goal.before(plans, mode.slices, values)).held
}

fn one_pass(n: usize, in_place: bool) -> Vec<Plan> {
    let of = |rank| lending(Kind::AllReduce, Algo::Direct, &Shape { n, rank, in_place, ..Shape::default() });
    (0..n).map(|rank| of(rank).expect("a plan of loans")).collect()
}

/// Plans of loans of three ranks; rank 0 also has a third slot, and does `step` after its loans and before it folds.
fn with(in_place: bool, step: Step) -> Vec<Plan> {
    let mut plans = one_pass(3, in_place);
    plans[0].slots.push(Layout::Split { parts: 3 });
    plans[0].steps.insert(2, step);
    plans
}

/// Chunk 2, which rank 0 lends to rank 2.
fn lent(slot: Slot) -> At {
    At { slot, chunk: 2 }
}

fn copy(from: At, to: At) -> Step {
    Step { operands: vec![Operand::Own(from)], dst: Some(to), ..Step::default() }
}

fn held_by_2(slot: Slot) -> Option<Fault> {
    Some(Fault::Held { rank: 0, at: lent(slot), by: 2 })
}

/// The checker tries the steps of rank 0 first and in order, so its loans are out when it comes to the step after them.
#[test]
fn lent_memory_is_left_alone() {
    let (input, output, scratch) = (lent(INPUT), lent(OUTPUT), lent(SCRATCH));
    assert_eq!(held(&one_pass(3, true), true), None);
    assert_eq!(held(&one_pass(3, false), false), None);
    for in_place in [false, true] {
        // What the borrower may write is neither written nor read.
        assert_eq!(held(&with(in_place, copy(scratch, output)), in_place), held_by_2(OUTPUT));
        assert_eq!(held(&with(in_place, copy(output, scratch)), in_place), held_by_2(OUTPUT));
        // Nor is it sent. Rank 1 receives the chunk after it has folded; rank 2, which is tried after rank 1, still has the loan then.
        let mut plans = with(in_place, Step { dst: None, send: vec![1], ..copy(output, scratch) });
        plans[1].slots.push(Layout::Split { parts: 3 });
        plans[1].steps.push(Step { operands: vec![Operand::Recv(0)], ..copy(scratch, scratch) });
        assert_eq!(held(&plans, in_place), held_by_2(OUTPUT));
    }
    // What the borrower may only read, the lender may read too, but not write.
    assert_eq!(held(&with(false, copy(input, scratch)), false), None);
    assert_eq!(held(&with(false, copy(scratch, input)), false), held_by_2(INPUT));
}

/// A chunk may be lent twice at the same time only if both loans are for reading.
#[test]
fn a_chunk_that_may_be_written_is_lent_once() {
    let lent_twice = |read: At, write: At| {
        let again = Step { loan: Some(Loan { to: 1, read, write }), ..Step::default() };
        let mut plans = with(false, again);
        // A step of rank 1 that takes the second loan.
        plans[1].steps.push(Step { operands: vec![Operand::Lent(0)], ..copy(lent(OUTPUT), lent(OUTPUT)) });
        held(&plans, false)
    };
    let (input, output, scratch) = (lent(INPUT), lent(OUTPUT), lent(SCRATCH));
    assert_eq!(lent_twice(input, scratch), None);
    assert_eq!(lent_twice(scratch, output), held_by_2(OUTPUT));
    assert_eq!(lent_twice(output, scratch), held_by_2(OUTPUT));
    assert_eq!(lent_twice(scratch, input), held_by_2(INPUT));
    assert_eq!(lent_twice(input, input), held_by_2(INPUT));
}
