//! Law 6: all ranks get the same bits.

use allstream::plan::{self, algorithms};
use allstream::{Algo, Comm, Element, Kind, bf16, f16};
use futures::executor::block_on;

use super::house::*;

#[test]
fn law_6_all_ranks_get_the_same_bits_by_every_algorithm() {
    let seed = seed();
    for link in LINKS {
        for n in [2usize, 3, 4, 5, 8] {
            let comms = within(LIMIT, move || world(n, link));
            threads(comms, move |mut comm| {
                let mut rng = Rng(seed ^ (comm.rank() as u64) << 32);
                // Magnitudes that make every order of additions round differently.
                let mut value = move || {
                    let mantissa = rng.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5;
                    mantissa * 2f32.powi(rng.below(30) as i32 - 15)
                };
                for len in [1usize, 37, 5000, 100_003] {
                    let input: Vec<f32> = (0..len).map(|_| value()).collect();
                    let half: Vec<bf16> = input.iter().map(|x| bf16::from_f32(*x)).collect();
                    // All ranks share a host here, and two-level needs several.
                    for algo in algorithms(Kind::AllReduce).iter().filter(|a| **a != Algo::TwoLevel) {
                        let sum = comm.algo(*algo).all_reduce(input.clone()).wait().unwrap();
                        let bits: Vec<u32> = sum.iter().map(|x| x.to_bits()).collect();
                        let root = comm.broadcast(bits.clone(), 0).wait().unwrap();
                        assert!(bits == root, "{link:?}, {n} ranks, f32 x {len} by {algo}");
                        let sum = comm.algo(*algo).all_reduce(half.clone()).wait().unwrap();
                        let bits: Vec<u16> = sum.iter().map(|x| x.to_bits()).collect();
                        let root = comm.broadcast(bits.clone(), 0).wait().unwrap();
                        assert!(bits == root, "{link:?}, {n} ranks, bf16 x {len} by {algo}");
                    }
                }
                block_on(comm.close()).unwrap();
            });
        }
    }
}

/// Deterministic mode: one result for one set of inputs, on every link, by every algorithm that may be named, in all_reduce, reduce,
/// reduce_scatter, scan and lists; alone or in the middle of a longer buffer.
#[test]
fn law_6_deterministic_results_depend_on_inputs_alone() {
    const LEN: usize = 5003;
    let value = |rank: usize, i: usize| {
        let mut rng = Rng((rank * LEN + i) as u64);
        let mantissa = rng.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5;
        mantissa * 2f32.powi(rng.below(20) as i32 - 10)
    };
    for n in [2usize, 3, 5] {
        let mut first: Option<Vec<u64>> = None;
        for link in LINKS {
            let comms = within(LIMIT, move || world(n, link));
            let all = threads(comms, move |mut comm| {
                let rank = comm.rank();
                comm.set_deterministic(true);
                let mut bits = Vec::new();
                let wide: Vec<f32> = (0..LEN).map(|i| value(rank, i)).collect();
                one_type(&mut comm, &wide, |x| u64::from(x.to_bits()), &mut bits);
                let half: Vec<f16> = wide.iter().map(|x| f16::from_f32(*x)).collect();
                one_type(&mut comm, &half, |x| u64::from(x.to_bits()), &mut bits);
                let brain: Vec<bf16> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
                one_type(&mut comm, &brain, |x| u64::from(x.to_bits()), &mut bits);
                block_on(comm.close()).unwrap();
                bits
            });
            for bits in all {
                let first = first.get_or_insert_with(|| bits.clone());
                assert!(*first == bits, "{link:?}, {n} ranks: other bits than on the first link or rank");
            }
        }
    }
}

/// Checks that the sum of `input` over all ranks has the same bits by each of these collectives and algorithms; appends them to `to`.
fn one_type<T: Element + PartialEq>(comm: &mut Comm, input: &[T], of: fn(&T) -> u64, to: &mut Vec<u64>) {
    let (n, rank, len) = (comm.size(), comm.rank(), input.len());
    let right = comm.all_reduce(input.to_vec()).wait().unwrap();
    let bits = |values: &[T]| values.iter().map(of).collect::<Vec<u64>>();
    let same = |name: &str, got: &[T], expected: &[T]| {
        assert!(bits(got) == bits(expected), "{name} of {} on rank {rank} of {n}", T::DTYPE);
    };
    let allowed = |kind| {
        let all = plan::algorithms(kind).iter().copied().filter(move |a| plan::deterministic(kind, *a));
        all.chain([Algo::Auto])
    };
    for algo in allowed(Kind::AllReduce) {
        let got = comm.algo(algo).all_reduce(input.to_vec()).wait().unwrap();
        same("all_reduce", &got, &right);
        // In two parts, cut anywhere.
        for at in [1, 2, 700, 2501, len - 1] {
            let (a, b) = input.split_at(at);
            let a = comm.algo(algo).all_reduce(a.to_vec()).wait().unwrap();
            let b = comm.algo(algo).all_reduce_new(b.to_vec()).wait().unwrap();
            same("all_reduce in two parts", &[a, b].concat(), &right);
        }
    }
    for algo in allowed(Kind::Reduce) {
        let got = comm.algo(algo).reduce(input.to_vec(), n - 1).wait().unwrap();
        same("reduce", &got, if rank == n - 1 { &right } else { input });
    }
    for algo in allowed(Kind::ReduceScatter) {
        let cut = len / n;
        let got = comm.algo(algo).reduce_scatter(input[..cut * n].to_vec()).wait().unwrap();
        same("reduce_scatter", &got, &right[rank * cut..(rank + 1) * cut]);
    }
    for algo in allowed(Kind::Scan) {
        // The last rank's prefix is the sum over all ranks.
        let got = comm.algo(algo).scan(input.to_vec()).wait().unwrap();
        if rank == n - 1 {
            same("scan", &got, &right);
        }
    }
    let got = comm.all_reduce_list((vec![input.to_vec()], [input[..9].to_vec()])).wait().unwrap();
    same("a list", &got.0[0], &right);
    same("a list", &got.1[0], &right[..9]);
    to.extend(bits(&right));
}
