//! Collectives of a node's devices, with arrays of buffers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use allstream::{Error, Node};
use futures::executor::block_on;

use crate::counting::{COUNT, ON, alone};

#[test]
fn no_collective_of_devices_allocates_in_steady_state() {
    let _alone = alone();
    let mut node = Node::local(2).unwrap();
    let mut small = [vec![1.0_f32; 3], vec![1.0; 3]];
    let mut large = [vec![1.0_f32; 100_000], vec![1.0; 100_000]];
    let mut pair = [(vec![1_u8; 10], vec![0_u8; 20]), (vec![2; 10], vec![0; 20])];
    let mut round = |node: &mut Node| -> Result<(), Error> {
        small = node.timeout(Duration::from_secs(30)).all_reduce(std::mem::take(&mut small)).wait()?;
        large = block_on(node.broadcast(std::mem::take(&mut large), (0, 1)))?;
        pair = node.all_gather_into(std::mem::take(&mut pair)).wait()?;
        Ok(())
    };
    // Something else of this process may allocate once, late: one quiet window is enough.
    for _ in 0..5 {
        for on in [false, true] {
            COUNT.store(0, Ordering::Relaxed);
            ON.store(on, Ordering::Relaxed);
            (0..500).for_each(|_| round(&mut node).unwrap());
            ON.store(false, Ordering::Relaxed);
        }
        if COUNT.load(Ordering::Relaxed) == 0 {
            return;
        }
    }
    panic!("{} allocations in 500 rounds of 3 calls", COUNT.load(Ordering::Relaxed));
}
