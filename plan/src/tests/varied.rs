//! The forms with a count for each rank.

use super::*;
use crate::check::{Fault, check, check_slices};
use crate::{At, Layout, OUTPUT, SCRATCH, Slot};

fn varied(kind: Kind, n: usize) -> impl Iterator<Item = (Algo, Rank, bool)> {
    let fits = move |algo: Algo| suitable(kind, algo, &Shape { n, varied: true, ..Shape::default() }).is_ok();
    cases(kind, n).filter(move |&(algo, ..)| kind.varies() && fits(algo))
}

#[test]
fn every_varied_form_is_right_at_every_size() {
    for kind in Kind::ALL {
        for n in 1..=64 {
            for (algo, root, in_place) in varied(kind, n) {
                let plans =
                    plans_of(kind, algo, &Shape { n, root, in_place, varied: true, ..Shape::default() });
                let slices = if n <= 9 { 3 } else { 1 };
                let fault = check_slices(kind, root, in_place, &plans, slices).err();
                assert_eq!(fault, None, "{kind} by {algo}, n {n}, root {root}, in place {in_place}");
                let equal = super::plans(kind, algo, n, root, in_place);
                for (plan, equal) in plans.iter().zip(&equal) {
                    let tables = plan.slots.iter().all(|l| matches!(l, Layout::Table { .. }));
                    let chunks = |plan: &Plan| plan.slots[..2].iter().map(|l| l.chunks()).collect::<Vec<_>>();
                    assert!(tables && chunks(plan) == chunks(equal), "{:?}", plan.slots);
                }
            }
        }
    }
}

/// If blocks differ in length, a reduce_scatter that sums on the way needs scratch memory for partial sums, with room for every block; no other of
/// these plans has scratch memory.
#[test]
fn only_partial_sums_take_memory_for_blocks_that_differ() {
    for kind in Kind::ALL {
        for (algo, root, in_place) in varied(kind, 5) {
            for plan in
                plans_of(kind, algo, &Shape { n: 5, root, in_place, varied: true, ..Shape::default() })
            {
                let lent = kind == Kind::ReduceScatter && algo != Algo::Direct && !in_place;
                let layout = plan.slots.get(SCRATCH as usize).copied();
                assert_eq!(layout, lent.then_some(Layout::Table { chunks: 5 }), "{kind} by {algo}");
            }
        }
    }
}

/// The plan for equal counts would cut one block by another's length.
#[test]
fn lengths_of_tables_are_compared() {
    let shape = Shape { n: 4, varied: true, ..Shape::default() };
    let mut plans = plans_of(Kind::ReduceScatter, Algo::Ring, &shape);
    for plan in &mut plans {
        plan.slots.pop();
        for dst in plan.steps.iter_mut().filter_map(|s| s.dst.as_mut()) {
            *dst = At { slot: OUTPUT as Slot, chunk: 0 };
        }
    }
    let fault = check(Kind::ReduceScatter, 0, false, &plans).expect_err("lengths differ");
    assert!(matches!(fault, Fault::Length { .. }), "{fault}");
    // Either all ranks have tables, or none has.
    let mut plans = plans_of(Kind::AllGather, Algo::Direct, &shape);
    plans[2].slots = vec![Layout::Split { parts: 1 }, Layout::Blocks { blocks: 4 }];
    assert!(matches!(check(Kind::AllGather, 0, false, &plans), Err(Fault::Shape { rank: 2, .. })));
}
