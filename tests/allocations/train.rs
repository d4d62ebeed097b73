//! Steps of gradient buckets, on three ranks, inside one process, over shared memory and over TCP.

use std::sync::{Arc, Barrier};
use std::thread;

use allstream::train::{Buckets, Options, Param};
use allstream::{Comm, LinkChoice};
use futures::executor::block_on;

use crate::comm::{RANKS, in_time, quietest, world};
use crate::counting::alone;

const STEPS: usize = 300;

/// One training step: hands in the gradients of a model, last one first, and gets them back reduced.
fn step(buckets: &mut Buckets<Vec<f32>>, grads: &mut Vec<Vec<f32>>) {
    for (i, grad) in grads.drain(..).enumerate().rev() {
        buckets.push(i, grad).map_err(|failed| failed.error).unwrap();
    }
    grads.extend(block_on(buckets.finish()).map_err(|failed| failed.error).unwrap());
}

/// Allocations of: steps with packed buckets, steps whose bucket is a list, and calls of `all_reduce_list` with an equal list.
fn rank(mut comm: Comm, start: &Barrier) -> [usize; 3] {
    let rank = comm.rank();
    // Several small gradients, which are packed into common buckets, and a large one, which has a bucket of its own.
    let lens = [100, 2_000, 7, 900, 50_000];
    let layout: Vec<Param> = lens.into_iter().map(Param::of::<f32>).collect();
    let options = Options::default().first_bucket_bytes(1).bucket_bytes(8_000);
    let mut buckets = block_on(Buckets::with(&comm.share(), &layout, options)).unwrap();
    let mut grads: Vec<Vec<f32>> = lens.into_iter().map(|len| vec![1.0; len]).collect();
    let mut steps = || (0..STEPS).for_each(|_| step(&mut buckets, &mut grads));
    steps();
    let packed = quietest(rank, start, &mut steps).0;
    // Several large gradients in one bucket, which is reduced as a list.
    let layout = [Param::of::<f32>(20_000); 4];
    let mut buckets = block_on(Buckets::with(&comm.share(), &layout, Options::default())).unwrap();
    let mut grads = vec![vec![1.0_f32; 20_000]; 4];
    let mut steps = || (0..STEPS).for_each(|_| step(&mut buckets, &mut grads));
    steps();
    let listed = quietest(rank, start, &mut steps).0;
    let mut list = vec![vec![1.0_f32; 20_000]; 4];
    let mut lists = || {
        for _ in 0..STEPS {
            list = block_on(comm.all_reduce_list(std::mem::take(&mut list)))
                .map_err(|failed| failed.error)
                .unwrap();
        }
    };
    lists();
    [packed, listed, quietest(rank, start, &mut lists).0]
}

#[test]
fn steps_of_buckets_allocate_nothing_but_what_lists_do() {
    let _alone = alone();
    in_time(thread::spawn(|| {
        for link in [None, Some(LinkChoice::SHM), Some(LinkChoice::TCP)] {
            let start = Arc::new(Barrier::new(RANKS));
            let ranks: Vec<_> = world(link)
                .into_iter()
                .map(|comm| {
                    let start = start.clone();
                    thread::spawn(move || rank(comm, &start))
                })
                .collect();
            let found: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            let [packed, listed, list] = found[0];
            eprintln!(
                "{link:?}: {packed} allocations in {STEPS} steps of packed buckets, {listed} of a list, {list} by all_reduce_list"
            );
            assert_eq!(packed, 0, "{link:?}");
            assert!(
                listed <= list,
                "{link:?}: {listed} allocations in {STEPS} steps, {list} in as many calls of all_reduce_list"
            );
        }
    }));
}
