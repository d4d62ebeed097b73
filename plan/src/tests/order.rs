//! Every promise about the order of combining is kept, and no promise is missing that would be kept.

use super::*;
use crate::check::check_slices;
use crate::{Operand, Program, deterministic, keeps_rank_order};

#[test]
fn promises_of_order_are_kept_and_tight() {
    for kind in Kind::ALL {
        for &algo in algorithms(kind) {
            let (mut in_order, mut one_step) = (true, true);
            for n in (1..=17usize).chain([24, 31, 32, 33, 64]) {
                // Dealt out in turn: no host is a run of ranks.
                let hosts: Vec<u32> = (0..n as u32).map(|rank| rank % n.div_ceil(2) as u32).collect();
                for (&in_place, root) in
                    places(kind).iter().flat_map(|p| roots(kind, n).into_iter().map(move |r| (p, r)))
                {
                    let shape = Shape { n, root, in_place, hosts: &hosts, ..Shape::default() };
                    if suitable(kind, algo, &shape).is_err() {
                        continue;
                    }
                    let plans = plans_of(kind, algo, &shape);
                    let report = check_slices(kind, root, in_place, &plans, 1).expect("right");
                    in_order &= report.in_order;
                    one_step &= report.one_step;
                }
            }
            assert_eq!(in_order, keeps_rank_order(kind, algo), "{kind} by {algo}: rank order");
            assert_eq!(one_step, deterministic(kind, algo), "{kind} by {algo}: one step");
            assert!(in_order || !one_step);
        }
    }
}

/// Any collective may be asked for a deterministic result, and with it for rank order.
#[test]
fn every_collective_has_a_deterministic_algorithm() {
    for kind in Kind::ALL {
        assert!(algorithms(kind).iter().any(|&algo| deterministic(kind, algo)), "{kind}");
    }
}

/// Where links copy what is sent, ranks come to their end though those whose programs are [stepwise](Program::stepwise) do one step after another, and
/// the others any step that may go on.
#[test]
fn stepwise_programs_come_to_their_end_one_step_after_another() {
    let mut stepwise = 0;
    for kind in Kind::ALL {
        let cases = (1..=17).flat_map(|n| cases(kind, n).map(move |case| (n, case)));
        for (n, (algo, root, in_place)) in cases {
            let programs: Vec<_> =
                plans(kind, algo, n, root, in_place).iter().map(Program::compile).collect();
            stepwise += programs.iter().filter(|program| program.stepwise).count();
            // How many messages were sent from rank to rank, and how many were received.
            let (mut sent, mut received) = (vec![vec![0; n]; n], vec![vec![0; n]; n]);
            let mut done: Vec<_> =
                programs.iter().map(|program| vec![false; program.plan.steps.len()]).collect();
            let mut moved = true;
            while std::mem::take(&mut moved) {
                for (rank, program) in programs.iter().enumerate() {
                    let number =
                        |messages: &[u32], i: usize| messages.iter().position(|step| *step as usize == i);
                    for i in 0..program.plan.steps.len() {
                        let (step, node) = (&program.plan.steps[i], &program.nodes[i]);
                        let after = || node.after_write.iter().chain(&node.after_read).map(|j| *j as usize);
                        let before: Vec<usize> =
                            if program.stepwise { (0..i).collect() } else { after().collect() };
                        let has_come = |operand: &Operand| match *operand {
                            Operand::Recv(from) => {
                                let message = number(&program.recvs[from], i).unwrap();
                                received[from][rank] == message && sent[from][rank] > message
                            }
                            _ => true,
                        };
                        let is_next = |to: &usize| number(&program.sends[*to], i) == Some(sent[rank][*to]);
                        if done[rank][i]
                            || !before.iter().all(|j| done[rank][*j])
                            || !step.operands.iter().all(has_come)
                            || !step.send.iter().all(is_next)
                        {
                            continue;
                        }
                        for operand in &step.operands {
                            if let Operand::Recv(from) = operand {
                                received[*from][rank] += 1;
                            }
                        }
                        step.send.iter().for_each(|to| sent[rank][*to] += 1);
                        (done[rank][i], moved) = (true, true);
                    }
                }
            }
            assert!(
                done.iter().flatten().all(|done| *done),
                "{kind} by {algo} of {n} ranks, root {root}: {done:?}"
            );
        }
    }
    assert!(stepwise > 1000, "{stepwise} programs are stepwise");
}
