//! Plans broken by hand, each in a way seen in the wild, and the fault that the checker must find.

use super::*;
use crate::check::{Fault, On, Wait, check, check_slices};
use crate::shape::{keep, send};
use crate::{At, INPUT, Layout, OUTPUT, Operand, Step};

fn out(chunk: u32) -> At {
    At { slot: OUTPUT, chunk }
}

fn own(chunk: u32) -> Operand {
    Operand::Own(out(chunk))
}

/// In-place plans of all ranks, with these steps, over slots of `parts` chunks.
fn by_hand<const N: usize>(parts: u32, steps: [Vec<Step>; N]) -> Vec<Plan> {
    let slots = vec![Layout::Split { parts }; 2];
    let plan = |(rank, steps)| Plan { size: N, rank, slots: slots.clone(), steps };
    steps.into_iter().enumerate().map(plan).collect()
}

/// The fault that the checker finds in in-place plans after `breaking` them.
fn fault(kind: Kind, algo: Algo, n: usize, breaking: impl FnOnce(&mut [Plan])) -> Fault {
    let mut plans = plans(kind, algo, n, 0, true);
    check(kind, 0, true, &plans).expect("right before it is broken");
    breaking(&mut plans);
    check(kind, 0, true, &plans).expect_err("broken")
}

/// If ranks cut the elements differently, the chunks of one rank overlap those of another. The checker compares the layouts.
#[test]
fn chunks_that_overlap() {
    let f = fault(Kind::AllReduce, Algo::Ring, 4, |p| p[2].slots = vec![Layout::Split { parts: 3 }; 2]);
    assert!(matches!(f, Fault::Shape { rank: 2, .. }), "{f}");
    let f = fault(Kind::AllReduce, Algo::Direct, 4, |p| {
        for plan in p {
            plan.slots = vec![Layout::Blocks { blocks: 4 }; 2];
        }
    });
    assert!(matches!(f, Fault::Shape { rank: 0, .. }), "{f}");
}

/// A step that names a chunk of another length. If 5 elements are cut into 4 chunks, chunk 0 has two and chunk 2 has one; of a
/// single element, chunk 0 has one and chunk 2 none. The checker tries the single element first.
#[test]
fn lengths_that_differ() {
    let f = fault(Kind::AllReduce, Algo::Direct, 4, |p| p[1].steps[0].operands = vec![own(0)]);
    // Found by rank 2, who expects chunk 2 from rank 1.
    assert_eq!(f, Fault::Length { rank: 2, step: 3, count: 1, own: 0, other: 1 });
    assert_eq!(f.to_string(), "rank 2, step 3: 0 elements meet 1 in an operation of 1 elements");
    let f = fault(Kind::AllReduce, Algo::Ring, 4, |p| p[3].steps[1].dst = Some(out(0)));
    assert!(matches!(f, Fault::Length { .. }), "{f}");
}

#[test]
fn a_missing_receive() {
    let f = fault(Kind::AllGather, Algo::Direct, 3, |p| drop(p[1].steps.remove(1)));
    assert_eq!(f, Fault::Unreceived { from: 2, step: 0, to: 1 });
}

#[test]
fn a_missing_send() {
    let f = fault(Kind::AllGather, Algo::Direct, 3, |p| p[1].steps[0].send.truncate(1));
    assert_eq!(f, Fault::Unsent { from: 1, to: 2, step: 2 });
}

/// Every rank receives before it sends: they deadlock even over links that buffer.
#[test]
fn a_cycle() {
    let step = |from, to| vec![Step { send: vec![to], ..keep(Operand::Recv(from), out(0)) }];
    let plans = by_hand(1, [step(2, 1), step(0, 2), step(1, 0)]);
    let wait = |rank, from| Wait { rank, step: 0, slice: 0, on: On::From(from) };
    let waits = vec![wait(0, 2), wait(1, 0), wait(2, 1)];
    let f = check(Kind::Broadcast, 0, true, &plans).expect_err("a cycle");
    assert_eq!(f, Fault::Deadlock { slices: 1, waits, hidden_by_buffering: false });
    assert!(f.to_string().contains("rank 0, step 0, slice 0 waits for a message from rank 2"), "{f}");
}

/// Two ranks swap what they have, in place: each can store what it receives only when the other has taken what it sends.
#[test]
fn a_swap_that_only_buffering_hides() {
    let steps = |peer| vec![send(own(0), vec![peer]), keep(Operand::Recv(peer), out(0))];
    let plans = by_hand(1, [steps(1), steps(0)]);
    let wait = |rank, peer| Wait { rank, step: 0, slice: 0, on: On::To(peer) };
    let f = check(Kind::Broadcast, 0, true, &plans).expect_err("a swap");
    let waits = vec![wait(0, 1), wait(1, 0)];
    assert_eq!(f, Fault::Deadlock { slices: 1, waits, hidden_by_buffering: true });
    assert!(f.to_string().contains("links that buffer would hide it"), "{f}");
}

/// Rank 0 sends A to rank 1, then B to rank 1 by way of rank 2. Both are in the same memory, so B waits until A is taken; but rank 1 takes A only
/// after B.
#[test]
fn orders_that_cross_and_only_buffering_hides() {
    let replace = |from, to| Step { send: vec![to], ..keep(Operand::Recv(from), out(0)) };
    let both = Step { operands: vec![Operand::Recv(2), Operand::Recv(0)], ..keep(own(0), out(0)) };
    let a_then_b = vec![send(own(0), vec![1]), replace(2, 2)];
    let plans = by_hand(1, [a_then_b, vec![both], vec![send(own(0), vec![0]), replace(0, 1)]]);
    let f = check(Kind::Broadcast, 0, true, &plans).expect_err("crossed");
    assert!(matches!(f, Fault::Deadlock { slices: 1, hidden_by_buffering: true, .. }), "{f}");
}

/// A rank is sent A, then B on one link, but expects B, then A. Messages arrive in the order sent, so it takes A for B.
#[test]
fn messages_in_another_order() {
    let f = fault(Kind::ReduceScatter, Algo::Ring, 4, |p| p[0].steps.swap(1, 2));
    assert!(matches!(f, Fault::Content { .. } | Fault::Missing { .. }), "{f}");
    // One step receives both, slice by slice: it needs the first slice of B before the second slice of A, which is ahead on the link.
    let f = {
        let twice = vec![send(own(0), vec![1]); 2];
        let or = |operands| Step { operands, finish: true, ..keep(own(0), out(0)) };
        let mut plans = by_hand(1, [twice, vec![send(own(0), vec![0])]]);
        plans[0].steps.push(or(vec![Operand::Recv(1), own(0)]));
        plans[1].steps.push(or(vec![Operand::Recv(0), Operand::Recv(0), own(0)]));
        check_slices(Kind::Barrier, 0, true, &plans, 1).expect("one slice is no trouble");
        check(Kind::Barrier, 0, true, &plans).expect_err("two are")
    };
    assert!(matches!(f, Fault::Deadlock { slices: 2, hidden_by_buffering: false, .. }), "{f}");
}

/// A ring of steps that keep values only in the hand completes with one slice a chunk, and deadlocks with two.
#[test]
fn a_ring_of_hands() {
    let mut plans = plans(Kind::ReduceScatter, Algo::Ring, 3, 0, false);
    plans.iter_mut().for_each(|p| p.steps[1].dst = None);
    check_slices(Kind::ReduceScatter, 0, false, &plans, 1).expect("one slice is no trouble");
    let f = check(Kind::ReduceScatter, 0, false, &plans).expect_err("two are");
    assert!(matches!(f, Fault::Deadlock { slices: 2, hidden_by_buffering: true, .. }), "{f}");
}

#[test]
fn a_contribution_twice() {
    let f = fault(Kind::AllReduce, Algo::Direct, 3, |p| {
        let reduction = &mut p[1].steps[2];
        reduction.operands.push(own(1));
    });
    assert_eq!(f, Fault::Twice { rank: 0, at: out(1), of: 1 });
}

#[test]
fn a_contribution_missing() {
    let f = fault(Kind::AllReduce, Algo::Direct, 3, |p| {
        p[1].steps[2].operands.remove(1);
    });
    assert_eq!(f, Fault::Missing { rank: 0, at: out(1), of: 1 });
    assert_eq!(f.to_string(), "rank 0, chunk 1 of slot 1: rank 1's contribution is missing");
    // A rank in a barrier may hear of a rank twice, but must hear of every rank.
    let f = fault(Kind::Barrier, Algo::Dissemination, 3, |p| p[1].steps[1].operands.truncate(1));
    assert!(matches!(f, Fault::Missing { .. }), "{f}");
}

/// Steps that send or read the wrong block.
#[test]
fn a_wrong_block() {
    let f = fault(Kind::ReduceScatter, Algo::Direct, 3, |p| p[2].steps[0].operands = vec![own(1)]);
    assert_eq!(f, Fault::Content { rank: 0, at: out(0) });
    let f = fault(Kind::AllGather, Algo::Direct, 3, |p| p[2].steps[1].operands = vec![own(2)]);
    assert!(matches!(f, Fault::Unreceived { .. }), "{f}");
    let f = fault(Kind::AllGather, Algo::Direct, 3, |p| p[1].steps[0].operands = vec![own(2)]);
    assert_eq!(f, Fault::Content { rank: 0, at: out(1) });
}

/// Only steps that share memory or a link are ordered.
#[test]
fn independent_steps_may_change_places() {
    let mut plans = plans(Kind::AllGather, Algo::Direct, 4, 0, true);
    plans[1].steps.reverse();
    check(Kind::AllGather, 0, true, &plans).expect("still right");
}

/// Ranks that reduce the same contributions in different orders get different bits.
#[test]
fn another_order_of_operands() {
    for algo in [Algo::OneShot, Algo::RecursiveDoubling] {
        let f = fault(Kind::AllReduce, algo, 4, |p| p[2].steps[1].operands.swap(0, 1));
        assert!(matches!(f, Fault::Bits { rank: 0, .. }), "{algo}: {f}");
    }
}

#[test]
fn finished_never_early_or_twice() {
    let finish = |rank: usize, step: usize| {
        fault(Kind::AllReduce, Algo::Ring, 3, |p| p[rank].steps[step].finish ^= true)
    };
    // Step 2 of rank 0 finishes chunk 1; step 1 is a partial sum of chunk 2; step 3 distributes chunk 0.
    assert_eq!(finish(0, 2), Fault::Finish { rank: 0, at: out(1), too_much: false });
    assert_eq!(finish(0, 1), Fault::Finish { rank: 0, at: out(2), too_much: true });
    assert_eq!(finish(0, 3), Fault::Finish { rank: 0, at: out(0), too_much: true });
    let f = fault(Kind::Broadcast, Algo::OneShot, 3, |p| p[1].steps[0].finish = true);
    assert_eq!(f, Fault::Finish { rank: 1, at: out(0), too_much: true });
}

/// The result overwrites the input that is still to be sent: the later step of the list gets what the earlier one wrote.
#[test]
fn written_before_it_is_sent() {
    let f = fault(Kind::AllReduce, Algo::OneShot, 2, |p| p[0].steps.swap(0, 1));
    assert!(matches!(f, Fault::Twice { rank: 1, .. }), "{f}");
}

#[test]
fn what_must_not_be_written() {
    // A rank that is not the root stores the chunk that it reduces in its own output.
    let f = fault(Kind::Reduce, Algo::Direct, 3, |p| p[2].steps[2].dst = Some(out(2)));
    assert_eq!(f, Fault::Changed { rank: 2, at: out(2) });
    let mut plans = plans(Kind::Reduce, Algo::Direct, 3, 0, false);
    plans[2].steps[2].dst = Some(out(2));
    let f = check(Kind::Reduce, 0, false, &plans).expect_err("not the root");
    assert_eq!(f, Fault::Changed { rank: 2, at: out(2) });
    // The caller's input.
    let input = At { slot: INPUT, chunk: 2 };
    plans[2].steps[2].dst = Some(input);
    let f = check(Kind::Reduce, 0, false, &plans).expect_err("the input");
    assert_eq!(f, Fault::Changed { rank: 2, at: input });
}

#[test]
fn steps_that_mean_nothing() {
    let malformed = |breaking: fn(&mut Step)| {
        let f = fault(Kind::AllReduce, Algo::OneShot, 3, |p| breaking(&mut p[1].steps[0]));
        let Fault::Malformed { rank: 1, step: 0, what } = f else { panic!("{f}") };
        what
    };
    assert!(malformed(|s| s.operands.clear()).contains("nothing to combine"));
    assert!(malformed(|s| s.send.clear()).contains("goes nowhere"));
    assert!(malformed(|s| s.dst = Some(out(1))).contains("result in a chunk"));
    assert!(malformed(|s| s.operands = vec![own(1)]).contains("operand"));
    assert!(malformed(|s| s.operands = vec![Operand::Recv(1)]).contains("operand"));
    assert!(malformed(|s| s.send = vec![1]).contains("to itself"));
    assert!(malformed(|s| s.send = vec![3]).contains("does not exist"));
    assert!(malformed(|s| s.send = vec![2, 0]).contains("not ascending"));
    assert!(malformed(|s| s.send = vec![0, 0]).contains("not ascending"));
}

#[test]
fn plans_that_do_not_belong_together() {
    let f = fault(Kind::AllReduce, Algo::Ring, 3, |p| p.swap(0, 1));
    assert!(matches!(f, Fault::Shape { rank: 0, .. }), "{f}");
    assert!(matches!(check(Kind::Barrier, 0, true, &[]), Err(Fault::Shape { .. })));
    let plans = plans(Kind::Broadcast, Algo::Direct, 3, 0, true);
    assert!(matches!(check(Kind::Broadcast, 3, true, &plans), Err(Fault::Shape { .. })));
}

/// Rank 2 adds rank 0's input first, and then puts rank 1's in front of it: the right contributions, in another order.
#[test]
fn a_scan_in_another_order() {
    let f = fault(Kind::Scan, Algo::RecursiveDoubling, 3, |p| p[2].steps.swap(0, 1));
    assert_eq!(f, Fault::Order { rank: 2, at: out(0) });
    assert_eq!(f.to_string(), "rank 2, chunk 0 of slot 1: not combined in rank order");
}

/// The result of an exscan has the contributions of all lower ranks and no others; no scan is ever finished.
#[test]
fn a_scan_of_too_much() {
    let f = fault(Kind::Scan, Algo::Chain, 3, |p| p[1].steps[0].finish = true);
    assert_eq!(f, Fault::Finish { rank: 1, at: out(0), too_much: true });
    let f = fault(Kind::ExScan, Algo::OneShot, 3, |p| p[1].steps[1].operands.push(own(0)));
    assert_eq!(f, Fault::Content { rank: 1, at: out(0) });
    let f = fault(Kind::ExScan, Algo::OneShot, 3, |p| p[2].steps[0].operands.truncate(1));
    assert!(matches!(f, Fault::Unreceived { from: 1, to: 2, .. }), "{f}");
}

/// Both ranks send from the memory that they receive into: without early copies they deadlock, unless links buffer.
#[test]
fn a_swap_that_is_not_gathered_early() {
    for algo in [Algo::Pairwise, Algo::Direct] {
        let f = fault(Kind::AllToAll, algo, 2, |p| {
            p.iter_mut().flat_map(|plan| &mut plan.steps).for_each(|step| step.early = false);
        });
        assert!(matches!(f, Fault::Deadlock { slices: 1, hidden_by_buffering: true, .. }), "{algo}: {f}");
    }
}

#[test]
fn gather_and_scatter_touch_only_what_is_theirs() {
    let f = fault(Kind::Gather, Algo::Binomial, 4, |p| p[2].steps[1].dst = Some(out(0)));
    assert_eq!(f, Fault::Changed { rank: 2, at: out(0) });
    let f = fault(Kind::Scatter, Algo::Direct, 3, |p| p[0].steps.push(keep(own(1), out(2))));
    assert_eq!(f, Fault::Changed { rank: 0, at: out(2) });
    let f = fault(Kind::Scatter, Algo::Direct, 3, |p| p[0].steps[0].operands = vec![own(2)]);
    assert_eq!(f, Fault::Content { rank: 1, at: out(0) });
    // Only the root's output has all blocks.
    let f = fault(Kind::Gather, Algo::Direct, 3, |p| p[1].slots = p[0].slots.clone());
    assert!(matches!(f, Fault::Shape { rank: 1, .. }), "{f}");
}

/// Scratch memory holds nothing at the start, and a plan has one scratch slot at most.
#[test]
fn lent_memory() {
    let f = fault(Kind::ExScan, Algo::Chain, 3, |p| drop(p[1].steps.remove(0)));
    assert_eq!(f, Fault::Content { rank: 2, at: out(0) });
    let f = fault(Kind::ExScan, Algo::Chain, 3, |p| p[1].slots.push(Layout::Split { parts: 1 }));
    assert!(matches!(f, Fault::Shape { rank: 1, .. }), "{f}");
}

#[test]
fn a_block_in_the_wrong_place() {
    let mut plans = plans(Kind::AllToAll, Algo::Pairwise, 3, 0, false);
    let step = plans[1].steps.iter_mut().find(|s| s.dst == Some(out(2))).expect("from rank 2");
    step.dst = Some(out(0));
    let f = check(Kind::AllToAll, 0, false, &plans).expect_err("not there");
    assert_eq!(f, Fault::Content { rank: 1, at: out(2) });
}
