//! Groups for which there is no room.

use allstream::Error;
use futures::executor::block_on;

use super::on_ranks;

/// The memory of two of three ranks is full of rings, so that a group of all is refused on all; and when some were dropped there is room again.
#[test]
fn a_group_that_does_not_fit_is_refused_on_all_ranks_and_its_parent_works_on() {
    on_ranks(3, "local", |rank, mut world| {
        let mut held = Vec::new();
        // Rank 0 holds none of them, and has room.
        let color = (rank > 0).then_some(1);
        let first = loop {
            match block_on(world.split_some(color, 0)) {
                Ok(group) => held.push(group),
                Err(error) => break error,
            }
        };
        assert!(held.len() > 1000, "{} groups of two fit, then: {first}", held.len());
        let second = block_on(world.mesh([("a", 3), ("b", 1)])).unwrap_err();
        for error in [first, second] {
            let text = error.to_string();
            assert!(matches!(error, Error::System { .. }) && text.contains("drop those"), "{text}");
            assert!(rank > 0 || text.contains("rank 1 has no room"), "{text}");
        }
        assert_eq!(world.all_reduce(vec![1u32; 1000]).wait().unwrap(), [3; 1000]);
        let peak = world.stats().pool.ring_bytes;
        held.truncate(held.len() / 2);
        world.barrier().wait().unwrap();
        let mut dup = block_on(world.dup()).unwrap();
        assert_eq!(dup.all_reduce(vec![1u32]).wait().unwrap(), [3]);
        assert!(rank == 0 || world.stats().pool.ring_bytes < peak);
        drop(held);
        for comm in [dup, world] {
            block_on(comm.close()).unwrap();
        }
    });
}
