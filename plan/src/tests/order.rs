//! Every promise about the order of combining is kept, and no promise is missing that would be kept.

use super::*;
use crate::check::check_slices;
use crate::{deterministic, keeps_rank_order};

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
