//! Law 6: all ranks get the same bits.

use allstream::plan::algorithms;
use allstream::{Algo, Kind, bf16};
use futures::executor::block_on;

use crate::house::*;

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
                    // All ranks share a host here.
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
