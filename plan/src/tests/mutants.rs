//! The checker notices every mutation of every plan.

use std::collections::BTreeMap;

use super::*;
use crate::check::check;
use crate::mutate::{apply, mutations};

#[test]
fn every_mutant_is_caught() {
    let mut caught = BTreeMap::new();
    let mut survivors = Vec::new();
    for kind in Kind::ALL {
        for n in 1..=6 {
            for (algo, root, in_place) in cases(kind, n) {
                let right = plans(kind, algo, n, root, in_place);
                for rank in 0..n {
                    for (step, mutation) in mutations(kind, &right[rank]) {
                        let mut broken = right.clone();
                        apply(&mut broken[rank], step, &mutation);
                        let name = format!("{mutation:?}").replace(|c: char| !c.is_alphabetic(), "");
                        *caught.entry(name).or_insert(0) += 1;
                        if check(kind, root, in_place, &broken).is_ok() {
                            survivors.push(format!(
                                "{kind} by {algo}, n {n}, root {root}, in place {in_place}: {mutation:?} of \
                                 rank {rank}'s step {step}"
                            ));
                        }
                    }
                }
            }
        }
    }
    println!("{} mutants: {caught:?}", caught.values().sum::<usize>());
    assert!(survivors.is_empty(), "{} survive:\n{}", survivors.len(), survivors.join("\n"));
    assert_eq!(caught.len(), 8, "every mutation is used: {caught:?}");
}
