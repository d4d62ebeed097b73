//! Plans of loans: they are right at every size, and the checker notices every way to break them.

use std::collections::BTreeMap;

use super::*;
use crate::check::{Fault, On, Wait, check, check_slices};
use crate::mutate::{apply, mutations};
use crate::shape::{keep, send};
use crate::{At, Layout, Lending, Loan, OUTPUT, Operand, Program, Step, lending};

const ALGOS: [Algo; 2] = [Algo::Direct, Algo::OneShot];

/// The plans of loans of all ranks.
fn loans(algo: Algo, n: usize, in_place: bool) -> Vec<Plan> {
    let of = |rank| lending(Kind::AllReduce, algo, &Shape { n, rank, in_place, ..Shape::default() });
    (0..n).map(|rank| of(rank).expect("a plan of loans")).collect()
}

/// The fault in an in-place one-pass all_reduce of three ranks after `breaking` it. The last step of each rank folds; the first
/// two of rank 1 lend to ranks 2 and 0.
fn fault(breaking: impl FnOnce(&mut [Plan])) -> Fault {
    let mut plans = loans(Algo::Direct, 3, true);
    check(Kind::AllReduce, 0, true, &plans).expect("right before it is broken");
    breaking(&mut plans);
    check(Kind::AllReduce, 0, true, &plans).expect_err("broken")
}

fn fold(plan: &mut Plan) -> &mut Step {
    plan.steps.last_mut().expect("the step that folds")
}

fn out(chunk: u32) -> At {
    At { slot: OUTPUT, chunk }
}

fn lend(to: Rank, chunk: u32) -> Step {
    Step { loan: Some(Loan { to, read: out(chunk), write: out(chunk) }), ..Step::default() }
}

/// In-place plans of all ranks, with these steps, over slots of `parts` chunks.
fn by_hand<const N: usize>(parts: u32, steps: [Vec<Step>; N]) -> Vec<Plan> {
    let slots = vec![Layout::Split { parts }; 2];
    let plan = |(rank, steps)| Plan { size: N, rank, slots: slots.clone(), steps };
    steps.into_iter().enumerate().map(plan).collect()
}

/// One step combines each result in rank order, as in the plans of steps of Direct and OneShot: the results have the same bits.
#[test]
fn one_pass_is_right_at_every_size() {
    for n in 2..=64 {
        for (algo, in_place) in ALGOS.into_iter().flat_map(|algo| [(algo, false), (algo, true)]) {
            let slices = match n {
                1..=9 => 5,
                10..=17 => 3,
                _ => 2,
            };
            let plans = loans(algo, n, in_place);
            let report = check_slices(Kind::AllReduce, 0, in_place, &plans, slices)
                .unwrap_or_else(|fault| panic!("n {n}, in place {in_place}: {fault}"));
            assert!(report.in_order && report.one_step && !report.needs_hand, "n {n}: {report:?}");
            // The loan is one hop, and its way back another; nothing is sent.
            assert_eq!((report.hops, report.sent), (2, 0.0), "n {n}");
            assert_eq!((report.steps, report.messages), (n * n, n * (n - 1)), "n {n}");
        }
    }
}

#[test]
fn only_some_collectives_have_plans_of_loans() {
    for kind in Kind::ALL {
        for &algo in algorithms(kind) {
            let shape = |n| Shape { n, ..Shape::default() };
            let is_one_pass = kind == Kind::AllReduce && ALGOS.contains(&algo);
            assert_eq!(lending(kind, algo, &shape(4)).is_some(), is_one_pass, "{kind} by {algo}");
            assert!(lending(kind, algo, &shape(1)).is_none(), "{kind} by {algo}");
        }
    }
}

#[test]
fn every_mutant_of_a_plan_of_loans_is_caught() {
    let mut caught = BTreeMap::new();
    let mut survivors = Vec::new();
    for n in 2..=6 {
        for (algo, in_place) in ALGOS.into_iter().flat_map(|algo| [(algo, false), (algo, true)]) {
            let right = loans(algo, n, in_place);
            for (rank, plan) in right.iter().enumerate() {
                for (step, mutation) in mutations(Kind::AllReduce, plan) {
                    let mut broken = right.clone();
                    apply(&mut broken[rank], step, &mutation);
                    let name = format!("{mutation:?}").replace(|c: char| !c.is_alphabetic(), "");
                    *caught.entry(name).or_insert(0) += 1;
                    if check(Kind::AllReduce, 0, in_place, &broken).is_ok() {
                        let of = format!("{mutation:?} of rank {rank}'s step {step}");
                        survivors.push(format!("{algo}, n {n}, in place {in_place}: {of}"));
                    }
                }
            }
        }
    }
    println!("{} mutants: {caught:?}", caught.values().sum::<usize>());
    assert!(survivors.is_empty(), "{} survive:\n{}", survivors.len(), survivors.join("\n"));
    // Two algorithms, each in and out of place, with n ranks: one mutant for each rank, loan, step or operand.
    let sum = |count: fn(usize) -> usize| 4 * (2..=6).map(count).sum::<usize>();
    let (ranks, pairs, all) = (sum(|n| n), sum(|n| n * (n - 1)), sum(|n| n * n));
    let due = [
        ("DropDst", ranks),
        ("DropInto", pairs),
        ("DropOperand", all),
        ("DropStep", all),
        ("FlipFinish", ranks),
        ("WrongDst", ranks),
        ("WrongLoanRead", pairs),
        ("WrongLoanWrite", pairs),
        ("WrongOperand", ranks),
    ];
    assert_eq!(caught, due.map(|(name, count)| (name.to_string(), count)).into());
}

/// A step borrows a rank's loan once, whether it writes into the loan, reads it, or both.
#[test]
fn programs_list_each_loan_once() {
    let mut plan = loans(Algo::Direct, 4, true).swap_remove(1);
    fold(&mut plan).into = vec![0, 2];
    fold(&mut plan).operands.retain(|operand| *operand != Operand::Lent(2));
    let program = Program::compile(&plan);
    assert_eq!(program.recvs, [vec![3], vec![], vec![3], vec![3]]);
    assert_eq!(program.sends, [vec![2], vec![], vec![0], vec![1]]);
    assert_eq!(plan.steps[3].lenders().collect::<Vec<_>>(), [0, 3, 2]);
    assert_eq!(Lending::compile(plan).borrows, [true, false, true, true]);
}

#[test]
fn loans_that_nobody_makes_or_borrows() {
    let f = fault(|p| drop(p[1].steps.remove(0)));
    assert_eq!(f, Fault::Unsent { from: 1, to: 2, step: 2 });
    let f = fault(|p| {
        let fold = fold(&mut p[1]);
        fold.operands.retain(|operand| *operand != Operand::Lent(2));
        fold.into = vec![0];
    });
    assert_eq!(f, Fault::Unreceived { from: 2, step: 1, to: 1 });
}

#[test]
fn loans_that_meet_receives() {
    let f = fault(|p| {
        let fold = fold(&mut p[1]);
        fold.operands[0] = Operand::Recv(0);
        fold.into = vec![2];
    });
    assert_eq!(f, Fault::Mispaired { from: 0, step: 0, to: 1, receiver: 2, is_loan: true });
    assert_eq!(f.to_string(), "rank 0, step 0: a loan that rank 1 receives as a message in its step 2");
    let f = fault(|p| p[0].steps[0] = send(Operand::Own(out(1)), vec![1]));
    assert_eq!(f, Fault::Mispaired { from: 0, step: 0, to: 1, receiver: 2, is_loan: false });
    assert_eq!(f.to_string(), "rank 0, step 0: a message that rank 1 takes for a loan in its step 2");
}

#[test]
fn loans_that_mean_nothing() {
    let malformed = |step: usize, breaking: fn(&mut Step)| {
        let f = fault(|p| breaking(&mut p[1].steps[step]));
        let Fault::Malformed { rank: 1, step: s, what } = f else { panic!("{f}") };
        assert_eq!(s, step);
        what
    };
    fn loan(step: &mut Step) -> &mut Loan {
        step.loan.as_mut().expect("a step that lends")
    }
    let also: [fn(&mut Step); 6] = [
        |s| s.operands = vec![Operand::Own(out(1))],
        |s| s.dst = Some(out(1)),
        |s| s.send = vec![2],
        |s| s.into = vec![2],
        |s| s.finish = true,
        |s| s.early = true,
    ];
    for also in also {
        assert!(malformed(0, also).contains("does something else too"));
    }
    assert!(malformed(0, |s| loan(s).to = 1).contains("to itself"));
    assert!(malformed(0, |s| loan(s).to = 3).contains("to a rank that does not exist"));
    assert!(malformed(0, |s| loan(s).read.chunk = 3).contains("a chunk that does not exist"));
    assert!(malformed(0, |s| loan(s).write.slot = 2).contains("a chunk that does not exist"));
    assert!(malformed(2, |s| s.into = vec![0, 1]).contains("into a loan of"));
    assert!(malformed(2, |s| s.into = vec![0, 3]).contains("into a loan of"));
    assert!(malformed(2, |s| s.into = vec![2, 0]).contains("not ascending"));
    assert!(malformed(2, |s| s.into = vec![0, 0]).contains("not ascending"));
    assert!(malformed(2, |s| s.operands.push(Operand::Lent(1))).contains("operand"));
    assert!(malformed(2, |s| s.operands.push(Operand::Lent(3))).contains("operand"));
    assert!(malformed(2, |s| s.operands.push(Operand::Lent(0))).contains("read twice"));
}

/// If one element is cut into three chunks, chunk 0 has it and the others are empty.
#[test]
fn loans_whose_lengths_differ() {
    // The chunk lent for reading and the chunk lent for writing differ in length.
    let f = fault(|p| p[0].steps[0].loan.as_mut().expect("a loan").read.chunk = 0);
    assert_eq!(f, Fault::Length { rank: 0, step: 0, count: 1, own: 1, other: 0 });
    // Both have one length, but the borrower's chunk has another.
    let f = fault(|p| {
        let loan = Loan { to: 1, read: out(0), write: out(0) };
        p[0].steps[0].loan = Some(loan);
    });
    assert_eq!(f, Fault::Length { rank: 1, step: 2, count: 1, own: 0, other: 1 });
    // The same for a loan that is only written into.
    let f = fault(|p| {
        let loan = Loan { to: 1, read: out(0), write: out(0) };
        p[0].steps[0].loan = Some(loan);
        fold(&mut p[1]).operands.retain(|operand| *operand != Operand::Lent(0));
    });
    assert_eq!(f, Fault::Length { rank: 1, step: 2, count: 1, own: 0, other: 1 });
}

/// Two ranks, each of which lends only after it has used the other's loan: neither can begin, and no buffer helps.
#[test]
fn loans_that_come_too_late() {
    let steps = |peer| vec![keep(Operand::Lent(peer), out(0)), lend(peer, 0)];
    let plans = by_hand(1, [steps(1), steps(0)]);
    let wait = |rank, from| Wait { rank, step: 0, slice: 0, on: On::Loan(from) };
    let f = check(Kind::Broadcast, 0, true, &plans).expect_err("nobody begins");
    let waits = vec![wait(0, 1), wait(1, 0)];
    assert_eq!(f, Fault::Deadlock { slices: 1, waits, hidden_by_buffering: false });
    assert!(f.to_string().contains("rank 0, step 0, slice 0 waits for a loan of rank 1"), "{f}");
}

/// A broadcast from rank 1, which writes its two chunks into two loans of rank 0. They are lent in one order: if rank 1
/// borrows them in the other, each chunk goes into the other's place, which the checker sees by the lengths.
#[test]
fn loans_in_another_order() {
    let write = |chunk| Step { operands: vec![Operand::Own(out(chunk))], into: vec![0], ..Step::default() };
    let mut plans = by_hand(2, [vec![lend(1, 0), lend(1, 1)], vec![write(0), write(1)]]);
    let report = check(Kind::Broadcast, 1, true, &plans).expect("right");
    assert_eq!((report.hops, report.sent, report.messages, report.needs_hand), (1, 0.0, 2, false));
    plans[1].steps.swap(0, 1);
    let f = check(Kind::Broadcast, 1, true, &plans).expect_err("exchanged");
    assert!(matches!(f, Fault::Length { .. }), "{f}");
}

/// Rank 1 keeps the loan until it also has a message, which rank 0 sends only when the loan is back.
#[test]
fn loans_that_never_come_back() {
    let add = Step { operands: vec![Operand::Lent(0), Operand::Recv(0)], ..keep(Operand::Lent(0), out(0)) };
    let plans = by_hand(1, [vec![lend(1, 0), send(Operand::Own(out(0)), vec![1])], vec![add]]);
    let f = check(Kind::Broadcast, 0, true, &plans).expect_err("both wait");
    let waits = vec![
        Wait { rank: 0, step: 0, slice: 0, on: On::Back(1) },
        Wait { rank: 1, step: 0, slice: 0, on: On::From(0) },
    ];
    assert_eq!(f, Fault::Deadlock { slices: 1, waits, hidden_by_buffering: false });
    assert!(f.to_string().contains("rank 0, step 0, slice 0 waits for rank 1 to give back its loan"), "{f}");
}

/// Steps that borrow may send their result and keep it nowhere, and loans may follow messages on one link.
#[test]
fn loans_among_messages() {
    // Rank 1 reads what rank 0 lends, and sends it to rank 2. So two ranks have it, but not rank 1.
    let pass_on = Step { operands: vec![Operand::Lent(0)], send: vec![2], ..Step::default() };
    let keep_it = keep(Operand::Recv(1), out(0));
    let plans = by_hand(1, [vec![lend(1, 0)], vec![pass_on], vec![keep_it]]);
    let f = check(Kind::Broadcast, 0, true, &plans).expect_err("rank 1 keeps nothing");
    assert_eq!(f, Fault::Content { rank: 1, at: out(0) });
    // The root sends its data and, once that message is taken, lends the same memory. Rank 1 writes the data back.
    let and_back = Step { operands: vec![Operand::Own(out(0))], into: vec![0], ..Step::default() };
    let root = vec![send(Operand::Own(out(0)), vec![1]), lend(1, 0)];
    let plans = by_hand(1, [root, vec![keep(Operand::Recv(0), out(0)), and_back]]);
    let report = check(Kind::Broadcast, 0, true, &plans).expect("right");
    assert_eq!((report.hops, report.sent, report.messages), (2, 1.0, 2));
}
