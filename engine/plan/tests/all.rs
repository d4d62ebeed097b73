//! Every plan is right at every size, and does what its file says it costs.

use super::super::check::{Report, check, check_slices};
use super::super::{At, Env, INPUT, Layout, OUTPUT, Operand, Program, choose};
use super::*;

/// Every algorithm, root and place at n = 1..=64: 3 slices for the smaller groups, 2 for all.
fn every_size(kind: Kind) {
    for n in 1..=64 {
        for (algo, root, in_place) in cases(kind, n) {
            let plans = plans(kind, algo, n, root, in_place);
            let slices = if n <= 17 { 3 } else { 2 };
            let report = check_slices(kind, root, in_place, &plans, slices)
                .unwrap_or_else(|fault| panic!("{kind} by {algo}, n {n}, in place {in_place}: {fault}"));
            costs(kind, algo, n, in_place, &report);
        }
    }
}

#[test]
fn all_reduce_is_right_at_every_size() {
    every_size(Kind::AllReduce);
}

#[test]
fn broadcast_is_right_at_every_size() {
    every_size(Kind::Broadcast);
}

#[test]
fn reduce_is_right_at_every_size() {
    every_size(Kind::Reduce);
}

#[test]
fn all_gather_is_right_at_every_size() {
    every_size(Kind::AllGather);
}

#[test]
fn reduce_scatter_is_right_at_every_size() {
    every_size(Kind::ReduceScatter);
}

#[test]
fn barrier_is_right_at_every_size() {
    every_size(Kind::Barrier);
}

/// The tables in the algorithms' files.
fn costs(kind: Kind, algo: Algo, n: usize, in_place: bool, report: &Report) {
    let (f, up, down) = (n as f64, n.next_power_of_two().ilog2() as usize, n.ilog2() as usize);
    let one = usize::from(n > 1);
    // In recursive doubling, whose data come in or go out by a fold: both only if two opposite ranks fold.
    let (extra, power) = (n - (1 << down), 1 << down);
    let (folded, folds) = (usize::from(extra > 0), usize::from(extra > 0) + usize::from(2 * extra > power));
    let (hops, sent) = match (kind, algo) {
        (Kind::AllReduce | Kind::Broadcast, Algo::OneShot) => (one, f - 1.0),
        (Kind::Reduce, Algo::OneShot) => (one, one as f64),
        (Kind::AllReduce, Algo::Direct) => (2 * one, 2.0 * (f - 1.0) / f),
        (Kind::Reduce, Algo::Direct) => (2 * one, one as f64),
        (Kind::Broadcast, Algo::Direct) if n == 2 => (1, 1.0),
        (Kind::Broadcast, Algo::Direct) => (2 * one, 2.0 * (f - 1.0) / f),
        (Kind::AllReduce, Algo::Ring) => (2 * (n - 1), 2.0 * (f - 1.0) / f),
        (Kind::AllReduce, _) => (down + folds, (down + folded) as f64),
        (Kind::Barrier, _) => (up, up as f64),
        (Kind::AllGather | Kind::ReduceScatter, Algo::Ring) => (n - 1, f - 1.0),
        (Kind::AllGather | Kind::ReduceScatter, _) => (one, f - 1.0),
        _ => unreachable!("{kind} by {algo}"),
    };
    let what = format!("{kind} by {algo}, n {n}, in place {in_place}: {report:?}");
    assert_eq!(report.hops, hops, "{what}");
    assert!((report.sent - sent).abs() < 1e-9, "{what}: not {sent}");
    // Who could not run without gathering before its memory is free.
    let hand = match (kind, algo) {
        (Kind::AllReduce, Algo::OneShot) => in_place && n > 1,
        (Kind::AllReduce, Algo::RecursiveDoubling) => (in_place && n > 1) || n > 3,
        (Kind::ReduceScatter, Algo::Ring) => !in_place && n > 2,
        (Kind::Barrier, _) => n > 1,
        _ => false,
    };
    assert_eq!(report.needs_hand, hand, "{what}");
}

#[test]
fn a_bigger_group_can_be_checked() {
    let plans = plans(Kind::AllReduce, Algo::RecursiveDoubling, 127, 0, true);
    check(Kind::AllReduce, 0, true, &plans).expect("right");
}

/// Chunks follow one another without gap or overlap, whatever the count (also fewer elements than chunks).
#[test]
fn layouts_cut_without_overlap() {
    for parts in 1..=17u32 {
        for layout in [Layout::Split { parts }, Layout::Blocks { blocks: parts }] {
            for count in 0..=60 {
                let mut end = 0;
                for chunk in 0..layout.chunks() {
                    let range = layout.range(chunk, count);
                    assert_eq!(range.start, end, "{layout:?}, chunk {chunk} of {count}");
                    end = range.end;
                }
                assert_eq!(end, layout.total(count), "{layout:?} of {count}");
            }
        }
    }
}

/// A reduce_scatter in place keeps the other ranks' blocks by `direct`, as `plan` says.
#[test]
fn direct_reduce_scatter_writes_only_its_own_block() {
    for plan in plans(Kind::ReduceScatter, Algo::Direct, 7, 0, true) {
        let own = At { slot: OUTPUT, chunk: plan.rank as u32 };
        assert!(plan.steps.iter().filter_map(|s| s.dst).all(|dst| dst == own));
    }
}

/// In place nothing touches the input slot; a ring talks to neighbours only.
#[test]
fn plans_keep_to_their_memory_and_neighbours() {
    for kind in Kind::ALL {
        for (algo, root, in_place) in cases(kind, 6) {
            for plan in plans(kind, algo, 6, root, in_place) {
                for step in &plan.steps {
                    let reads_input =
                        step.operands.iter().any(|o| matches!(o, Operand::Own(at) if at.slot == INPUT));
                    assert!(!(in_place && reads_input), "{kind} by {algo}");
                    assert!(step.dst.is_none_or(|dst| dst.slot == OUTPUT), "{kind} by {algo}");
                    let near = |to: &usize| *to == (plan.rank + 1) % 6;
                    assert!(algo != Algo::Ring || step.send.iter().all(near), "{kind}");
                }
            }
        }
    }
}

/// The few dependencies that `compile` keeps imply all that list order asks for.
#[test]
fn dependencies_imply_list_order() {
    for kind in Kind::ALL {
        for n in [1, 2, 3, 4, 5, 8, 13] {
            for (algo, root, in_place) in cases(kind, n) {
                plans(kind, algo, n, root, in_place).iter().for_each(implied);
            }
        }
    }
}

fn implied(plan: &Plan) {
    let program = Program::compile(plan);
    let mut before: Vec<Vec<bool>> = Vec::new();
    for (j, (step, node)) in plan.steps.iter().zip(&program.nodes).enumerate() {
        let mut reach = vec![false; plan.steps.len()];
        for &i in node.after_write.iter().chain(&node.after_read) {
            assert!((i as usize) < j);
            reach[i as usize] = true;
            reach.iter_mut().zip(&before[i as usize]).for_each(|(r, b)| *r |= b);
        }
        for (i, earlier) in plan.steps[..j].iter().enumerate() {
            let reads = |s: &super::super::Step, at| s.operands.contains(&Operand::Own(at));
            let raw = earlier.dst.is_some_and(|at| reads(step, at));
            let waw = earlier.dst.is_some() && earlier.dst == step.dst;
            let war = step.dst.is_some_and(|at| reads(earlier, at) || earlier.dst == Some(at));
            assert!(reach[i] || !(raw || waw || war), "step {j} must come after step {i}: {plan:?}");
            // Whoever overwrites what is being sent waits for its release, unless someone before it did.
            let lends = war && !earlier.send.is_empty();
            let through = (i + 1..j).any(|m| plan.steps[m].dst == step.dst);
            assert!(!lends || through || node.after_read.contains(&(i as u32)), "{j} after {i}: {plan:?}");
        }
        before.push(reach);
    }
}

#[test]
fn programs_list_messages_in_order() {
    let plan = &plans(Kind::AllReduce, Algo::Ring, 4, 0, true)[1];
    let program = Program::compile(plan);
    assert_eq!(program.sends[2], [0, 1, 2, 3, 4, 5]);
    assert_eq!(program.recvs[0], [1, 2, 3, 4, 5, 6]);
    assert!(program.sends[0].is_empty() && program.recvs[3].is_empty());
}

#[test]
fn what_there_is_no_plan_for_is_refused() {
    let shape = Shape { n: 4, rank: 1, root: 0, in_place: true, ..Shape::default() };
    for kind in Kind::ALL {
        assert!(plan(kind, Algo::Auto, &shape).is_err());
        for algo in Algo::ALL {
            assert_eq!(plan(kind, algo, &shape).is_ok(), algorithms(kind).contains(&algo));
        }
        let first = algorithms(kind)[0];
        assert!(plan(kind, first, &Shape { n: 0, ..shape }).is_err());
        assert!(plan(kind, first, &Shape { rank: 4, ..shape }).is_err());
        assert_eq!(plan(kind, first, &Shape { root: 4, ..shape }).is_err(), kind.rooted());
    }
    let said = plan(Kind::Barrier, Algo::Ring, &shape).expect_err("no ring barrier").to_string();
    assert_eq!(said, "barrier by ring: there is no such plan; there is dissemination");
}

#[test]
fn the_choice_is_always_a_plan() {
    for kind in Kind::ALL {
        for n in 1..=64 {
            for bytes in [0, 1, 16 << 10, (16 << 10) + 1, 64 << 10, 1 << 30] {
                for one_host in [false, true] {
                    assert!(algorithms(kind).contains(&choose(kind, bytes, &Env { n, one_host })));
                }
            }
        }
    }
    let at = |kind, bytes, n| choose(kind, bytes, &Env { n, one_host: false });
    assert_eq!(at(Kind::AllReduce, 16 << 10, 8), Algo::OneShot);
    assert_eq!(at(Kind::AllReduce, 16 << 10, 9), Algo::RecursiveDoubling);
    assert_eq!(at(Kind::AllReduce, 1 << 20, 16), Algo::Direct);
    assert_eq!(at(Kind::AllReduce, 1 << 20, 17), Algo::Ring);
    assert_eq!(at(Kind::Broadcast, 1 << 20, 4), Algo::Direct);
    assert_eq!(at(Kind::Broadcast, 64 << 10, 4), Algo::OneShot);
}
