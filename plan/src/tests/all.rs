//! Rules that every plan keeps, what `compile` makes of plans, and the choice of an algorithm.

use super::*;
use crate::check::check;
use crate::{
    At, Env, INPUT, Layout, OUTPUT, Operand, Program, SCRATCH, choose, deterministic, keeps_rank_order,
};

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

/// In place, a reduce_scatter by `direct` leaves the other ranks' blocks as they are, as the docs of `plan` say.
#[test]
fn direct_reduce_scatter_writes_only_its_own_block() {
    for plan in plans(Kind::ReduceScatter, Algo::Direct, 7, 0, true) {
        let own = At { slot: OUTPUT, chunk: plan.rank as u32 };
        assert!(plan.steps.iter().filter_map(|s| s.dst).all(|dst| dst == own));
    }
}

/// In place no step reads the input slot; no step ever writes it; in a ring a rank sends only to its right neighbour; scratch is used.
#[test]
fn plans_keep_to_their_memory_and_neighbours() {
    for kind in Kind::ALL {
        for (algo, root, in_place) in cases(kind, 6) {
            for plan in plans(kind, algo, 6, root, in_place) {
                let mut lent =
                    vec![false; plan.slots.get(SCRATCH as usize).map_or(0, |l| l.chunks() as usize)];
                for step in &plan.steps {
                    let reads_input =
                        step.operands.iter().any(|o| matches!(o, Operand::Own(at) if at.slot == INPUT));
                    assert!(!(in_place && reads_input), "{kind} by {algo}");
                    assert!(step.dst.is_none_or(|dst| dst.slot != INPUT), "{kind} by {algo}");
                    if let Some(dst) = step.dst.filter(|dst| dst.slot == SCRATCH) {
                        lent[dst.chunk as usize] = true;
                    }
                    let near = |to: &usize| *to == (plan.rank + 1) % 6;
                    assert!(algo != Algo::Ring || step.send.iter().all(near), "{kind}");
                }
                // The ring of ScatterAllGather has scratch for all chunks, but a rank stores no sum of the chunk that starts at it.
                let unused = lent.iter().filter(|used| !**used).count();
                assert!(unused <= usize::from(algo == Algo::ScatterAllGather), "{kind} by {algo}: {lent:?}");
            }
        }
    }
}

/// Every step names a chunk of its rank's own memory: an executor takes the step's length from that chunk.
#[test]
fn every_step_names_memory_of_its_own() {
    for kind in Kind::ALL {
        let cases = (1..=9).flat_map(|n| cases(kind, n).map(move |case| (n, case)));
        for (n, (algo, root, in_place)) in cases {
            for plan in plans(kind, algo, n, root, in_place) {
                for step in &plan.steps {
                    let own = step.operands.iter().any(|o| matches!(o, Operand::Own(_)));
                    assert!(own || step.dst.is_some(), "{kind} by {algo}: {step:?}");
                }
            }
        }
    }
}

/// The few dependencies that `compile` keeps imply every ordering that the list requires.
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
            let reads = |s: &crate::Step, at| s.operands.contains(&Operand::Own(at));
            let raw = earlier.dst.is_some_and(|at| reads(step, at));
            let waw = earlier.dst.is_some() && earlier.dst == step.dst;
            let war = step.dst.is_some_and(|at| reads(earlier, at) || earlier.dst == Some(at));
            assert!(reach[i] || !(raw || waw || war), "step {j} must come after step {i}: {plan:?}");
            // A step that overwrites what is being sent waits for its release, unless a step between the two has overwritten it.
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
fn the_choice_is_always_a_plan_and_keeps_what_is_asked() {
    for kind in Kind::ALL {
        for (n, hosts) in (1..=64usize).flat_map(|n| [(n, 1), (n, n.div_ceil(2)), (n, n)]) {
            for bytes in [0, 1, 16 << 10, (16 << 10) + 1, 64 << 10, 1 << 30] {
                for flags in 0..8 {
                    let (deterministic_only, in_order) = (flags & 1 != 0, flags & 2 != 0);
                    let env = Env {
                        n,
                        hosts,
                        one_host: flags & 4 != 0,
                        deterministic: deterministic_only,
                        in_order,
                    };
                    let algo = choose(kind, bytes, &env);
                    assert!(algorithms(kind).contains(&algo));
                    assert!(!deterministic_only || deterministic(kind, algo), "{kind} by {algo}");
                    assert!(!in_order || keeps_rank_order(kind, algo), "{kind} by {algo}");
                    let of: Vec<_> = (0..n as u32).map(|rank| rank % hosts as u32).collect();
                    for varied in [false, kind.varies()] {
                        let shape = Shape { n, hosts: &of, varied, ..Shape::default() };
                        suitable(kind, algo, &shape).expect("a plan for it");
                    }
                }
            }
        }
    }
    let at = |kind, bytes, n| choose(kind, bytes, &Env { n, ..Env::default() });
    let near = |kind, bytes, n| choose(kind, bytes, &Env { n, one_host: true, ..Env::default() });
    assert_eq!(near(Kind::AllReduce, 16 << 10, 8), Algo::OneShot);
    assert_eq!(near(Kind::AllReduce, 16 << 10, 9), Algo::RecursiveDoubling);
    assert_eq!(near(Kind::AllReduce, 64 << 10, 4), Algo::Direct);
    assert_eq!(at(Kind::AllReduce, 16 << 10, 3), Algo::OneShot);
    assert_eq!(at(Kind::AllReduce, 16 << 10, 4), Algo::RecursiveDoubling);
    assert_eq!(at(Kind::AllReduce, 64 << 10, 2), Algo::RecursiveDoubling);
    let ordered = Env { n: 8, deterministic: true, ..Env::default() };
    assert_eq!(choose(Kind::AllReduce, 16 << 10, &ordered), Algo::OneShot);
    assert_eq!(choose(Kind::AllReduce, 64 << 10, &ordered), Algo::Direct);
    assert_eq!(at(Kind::AllReduce, 1 << 20, 16), Algo::Direct);
    assert_eq!(at(Kind::Reduce, 64 << 10, 5), Algo::OneShot);
    assert_eq!(at(Kind::Reduce, 64 << 10, 6), Algo::Direct);
    assert_eq!(near(Kind::Reduce, 64 << 10, 9), Algo::OneShot);
    assert_eq!(near(Kind::Reduce, 64 << 10, 10), Algo::Direct);
    assert_eq!(at(Kind::AllReduce, 1 << 20, 17), Algo::Ring);
    assert_eq!(at(Kind::Broadcast, 1 << 20, 4), Algo::Direct);
    assert_eq!(at(Kind::Broadcast, 64 << 10, 4), Algo::OneShot);
    assert_eq!(at(Kind::Scan, 16 << 10, 4), Algo::RecursiveDoubling);
    assert_eq!(at(Kind::Scan, 1 << 20, 4), Algo::Chain);
    let on = |bytes, hosts| choose(Kind::AllReduce, bytes, &Env { n: 16, hosts, ..Env::default() });
    assert_eq!(
        [on(64 << 10, 4), on(64 << 10, 16), on(63 << 10, 4), on(65 << 10, 16)],
        [Algo::TwoLevel, Algo::RecursiveDoubling, Algo::RecursiveDoubling, Algo::Direct]
    );
}
