//! Law 10, of the engine's own memory: what an operation needs beside its buffers is not kept for ever.

use std::time::{Duration, Instant};

use allstream::{Comm, Stats};
use futures::executor::block_on;

use super::house::*;

/// What a communicator may keep for good (`Stats::scratch_bytes`).
const KEPT: usize = 16 << 20;

/// A sum of scaled inputs out of place: the engine makes a copy of the input.
fn scaled(comm: &mut Comm, len: usize) {
    let n = comm.size() as f32;
    let (_, sum) = comm.scale(0.5).all_reduce_into(vec![2f32; len], vec![0f32; len]).wait().unwrap();
    assert!(sum.iter().all(|x| *x == n));
}

#[test]
fn law_10_memory_that_a_large_operation_needed_is_given_back_in_a_while() {
    const LEN: usize = 6 << 20;
    let comms = Comm::local(2).unwrap();
    threads(comms, |mut comm| {
        scaled(&mut comm, 1000);
        let small = comm.stats().scratch_bytes;
        assert!(small <= KEPT, "{small}");
        for _ in 0..2 {
            scaled(&mut comm, LEN);
            let large = comm.stats().scratch_bytes;
            assert!(large >= 4 * LEN, "a loop of large operations finds it again: {large}");
        }
        let begun = Instant::now();
        while comm.stats().scratch_bytes > KEPT {
            assert!(begun.elapsed() < SOON, "not given back: {:?}", comm.stats());
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("rank {}: given back after {:?}", comm.rank(), begun.elapsed());
        scaled(&mut comm, 1000);
        block_on(comm.close()).unwrap();
    });
}

#[test]
fn law_10_a_communicator_in_the_pool_keeps_no_memory_of_its_own() {
    let comms = Comm::local(2).unwrap();
    threads(comms, |mut comm| {
        comm.barrier().wait().unwrap();
        let before = comm.stats().scratch_bytes;
        for _ in 0..3 {
            let mut child = block_on(comm.dup()).unwrap();
            scaled(&mut child, 2 << 20);
            assert!(comm.stats().scratch_bytes >= before + (8 << 20), "{:?}", comm.stats());
            drop(child);
            let idle = |stats: Stats| stats.pool.idle == 1 && stats.scratch_bytes < before + (8 << 20);
            wait_until("the child is in the pool, and its memory free", || idle(comm.stats()));
        }
        assert!(comm.stats().pool.hits > 0);
        block_on(comm.close()).unwrap();
    });
}
