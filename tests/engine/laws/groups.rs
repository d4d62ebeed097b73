//! Groups.

use allstream::Error;
use futures::executor::block_on;

use super::house::*;

#[test]
fn groups_split_by_color_and_order_by_key() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(5, link));
        threads(comms, move |mut comm| {
            let rank = comm.rank();
            // Even and odd, in reverse order.
            let mut half = block_on(comm.split((rank % 2) as u64, -(rank as i64))).unwrap();
            let members: Vec<usize> = (0..5).rev().filter(|r| r % 2 == rank % 2).collect();
            assert_eq!(half.size(), members.len());
            assert_eq!(members[half.rank()], rank);
            assert_eq!(
                half.all_gather(vec![rank as u64]).wait().unwrap(),
                members.iter().map(|m| *m as u64).collect::<Vec<_>>(),
                "{link:?}: by key"
            );
            // Child of a child: everyone alone, and the whole half again.
            let mut alone = block_on(half.split(half.rank() as u64, 0)).unwrap();
            assert_eq!((alone.size(), alone.rank()), (1, 0));
            assert_eq!(alone.all_reduce(vec![7u8]).wait().unwrap(), [7]);
            let mut again = block_on(half.dup()).unwrap();
            // All at once, over parent, child and grandchild; awaited in the reverse order.
            for len in [3usize, 60_000] {
                let a = comm.all_reduce(vec![1u32; len]);
                let b = half.all_reduce(vec![rank as u32; len]);
                let c = again.broadcast(vec![rank as u32; len], 1);
                let d = alone.all_reduce(vec![rank as u32; len]);
                assert_eq!(d.wait().unwrap(), vec![rank as u32; len]);
                assert_eq!(c.wait().unwrap(), vec![members[1] as u32; len]);
                assert_eq!(b.wait().unwrap(), vec![members.iter().sum::<usize>() as u32; len]);
                assert_eq!(a.wait().unwrap(), vec![5u32; len]);
            }
            // A group's abort harms neither its parent nor the groups that were made from it.
            comm.barrier().wait().unwrap();
            if rank == 1 {
                half.abort("planted");
            }
            wait_until("the abort to be heard", || half.check().is_err() || rank % 2 == 0);
            again.barrier().wait().unwrap();
            works(&mut comm);
            for c in [alone, again, half] {
                block_on(c.close()).unwrap();
            }
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn groups_outlive_the_handle_they_were_made_from() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let mut child = block_on(comm.dup()).unwrap();
            block_on(comm.close()).unwrap();
            works(&mut child);
            block_on(child.close()).unwrap();
        });
    }
}

#[test]
fn in_a_group_an_error_names_each_rank_twice() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(4, link));
        threads(comms, move |mut comm| {
            // World ranks 3, 2, 1 in this order: ranks 0, 1, 2 of the group.
            let group = block_on(comm.subset(&[3, 2, 1])).unwrap();
            let Some(mut group) = group else { return block_on(comm.close()).unwrap() };
            if group.rank() == 1 {
                // The error may come before this barrier has ended on this rank.
                drop(group.barrier().wait());
                return wait_until("the error to be heard", || group.check().is_err());
            }
            group.barrier().wait().unwrap();
            let failed = group.all_reduce(vec![0u8; 1 + group.rank()]).wait().unwrap_err();
            let Error::Mismatch { rank, peer, .. } = failed.error else { panic!("{failed}") };
            assert_eq!([rank, peer].iter().sum::<usize>(), 2, "ranks in the group: {failed}");
            let in_world = [rank, peer].map(|rank| failed.error.world_rank(rank));
            assert_eq!(in_world, [rank, peer].map(|rank| 3 - rank));
            let text = failed.to_string();
            for named in ["rank 0 (world rank 3) called", "rank 2 (world rank 1) called"] {
                assert!(text.contains(named), "{link:?}: {text}");
            }
            assert_eq!(group.check().unwrap_err().to_string(), text, "also by those who ask later");
        });
    }
}

#[test]
fn on_the_world_s_own_communicator_a_rank_has_one_number() {
    threads(within(LIMIT, || world(2, Link::Local)), |mut comm| {
        if comm.rank() == 0 {
            comm.abort("planted");
        }
        wait_until("the abort to be heard", || comm.check().is_err());
        let error = comm.barrier().wait().unwrap_err().error;
        let text = error.to_string();
        assert!(text.starts_with("the communicator was aborted by rank 0: planted"), "{text}");
        assert_eq!(error.world_rank(1), 1);
    });
}

#[test]
fn a_rank_that_dies_is_named_by_a_group_with_its_rank_in_the_world() {
    threads(within(LIMIT, || world(3, Link::Local)), |mut comm| {
        let group = block_on(comm.subset(&[2, 0])).unwrap();
        let Some(mut group) = group else { return };
        if group.rank() == 0 {
            // It leaves while the other needs it.
            drop(comm);
            return drop(group);
        }
        let failed = group.all_reduce(vec![1u8]).wait().unwrap_err();
        let text = failed.to_string();
        assert!(text.starts_with("rank 0 (world rank 2) was lost"), "{text}");
    });
}
