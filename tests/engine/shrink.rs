//! `shrink` with ranks that are threads: what survivors get, on each kind of link but RDMA, and what it does to everything else. Ranks that are
//! killed are in `tests/faults/survive.rs`.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use allstream::{Comm, Error, Lost, MissingState, Node, Verdict};
use futures::executor::block_on;

use crate::support::{each, worlds};

const LINKS: [&str; 4] = ["local", "shm", "tcp", "mixed"];

fn parts(verdict: &Verdict) -> (&[usize], &[usize]) {
    (&verdict.survivors, &verdict.lost)
}

/// A bit mask of the members of a communicator: each adds 2 to the power of its `number`.
fn members(comm: &mut Comm, number: usize) -> u64 {
    comm.all_reduce(vec![1u64 << number; 3000]).wait().unwrap()[2999]
}

#[test]
fn survivors_go_on_in_their_old_order_and_may_split_and_shrink_again() {
    for link in LINKS {
        each(5, link, move |rank, mut comm| {
            comm.set_deterministic(true);
            if rank == 0 {
                return;
            }
            let failed = comm.all_reduce(vec![1f32; 1 << 20]).wait().unwrap_err();
            assert_eq!(failed.buf.map(|buf| buf.len()), Some(1 << 20));
            let (mut comm, verdict) = block_on(comm.shrink()).unwrap();
            assert_eq!(parts(&verdict), (&[1, 2, 3, 4][..], &[0][..]), "{link}");
            assert_eq!((comm.name(), comm.rank(), comm.size()), ("world~1", rank - 1, 4));
            assert_eq!(members(&mut comm, rank), 0b11110);
            let mut half = block_on(comm.split(rank as u64 % 2, 0)).unwrap();
            assert_eq!(members(&mut half, rank), if rank % 2 == 0 { 0b10100 } else { 0b01010 });
            if rank == 3 {
                return;
            }
            comm.all_reduce(vec![1u8]).wait().unwrap_err();
            let (mut comm, verdict) = block_on(comm.shrink()).unwrap();
            assert_eq!(
                parts(&verdict),
                (&[0, 1, 3][..], &[2][..]),
                "{link}: ranks of the communicator that was shrunk"
            );
            assert_eq!(members(&mut comm, rank), 0b10110);
            assert_eq!(comm.name(), "world~2");
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn groups_shrink_and_groups_without_a_lost_rank_stay() {
    for link in LINKS {
        each(6, link, move |rank, mut world| {
            let mut group = block_on(world.split(rank as u64 % 2, 0)).unwrap();
            let mut low = block_on(world.split(u64::from(rank < 3), 0)).unwrap();
            if rank == 5 {
                return;
            }
            if rank % 2 == 1 {
                group.barrier().wait().unwrap_err();
                let (mut group, verdict) = block_on(group.shrink()).unwrap();
                assert_eq!(parts(&verdict), (&[0, 1][..], &[2][..]), "{link}");
                assert_eq!(members(&mut group, rank), 0b01010);
            } else {
                assert_eq!(members(&mut group, rank), 0b10101, "{link}: it has lost nobody");
            }
            if rank < 3 {
                assert_eq!(members(&mut low, rank), 0b111, "{link}: it has lost nobody");
            }
            // The world shrinks, too, although nobody has called it since the loss.
            let (mut world, _) = block_on(world.shrink()).unwrap();
            assert_eq!(members(&mut world, rank), 0b11111);
        });
    }
}

#[test]
fn after_an_abort_all_go_on() {
    for link in LINKS {
        each(3, link, move |rank, comm| {
            if rank == 1 {
                comm.abort("planted");
            }
            let (mut comm, verdict) = block_on(comm.shrink()).unwrap();
            assert_eq!(parts(&verdict), (&[0, 1, 2][..], &[][..]));
            assert_eq!(members(&mut comm, rank), 0b111, "{link}");
        });
    }
}

#[test]
fn what_is_in_flight_anywhere_fails_when_the_first_rank_shrinks() {
    for link in LINKS {
        each(2, link, move |rank, mut comm| {
            if rank == 0 {
                // No other rank ever makes this call.
                let work = comm.all_reduce(vec![1f32; 1 << 20]);
                let shared = comm.share();
                let (mut comm, _) = block_on(comm.shrink()).unwrap();
                assert_eq!(shared.stats().in_flight, 0, "{link}: it has failed before");
                assert!(matches!(work.wait().unwrap_err().error, Error::Aborted { .. }));
                assert!(shared.check().is_err(), "{link}: other handles stay dead");
                assert_eq!(members(&mut comm, rank), 0b11);
            } else {
                let failed = comm.recv(vec![0f32; 9], 0).wait().unwrap_err();
                assert!(matches!(failed.error, Error::Aborted { by: 0, .. }), "{link}: {failed}");
                let (mut comm, _) = block_on(comm.shrink()).unwrap();
                assert_eq!(members(&mut comm, rank), 0b11);
            }
        });
    }
}

#[test]
fn a_rank_that_lives_and_does_not_shrink_is_named_at_the_deadline() {
    for link in LINKS {
        let given_up = Arc::new(Barrier::new(3));
        each(3, link, move |rank, mut comm| {
            if rank == 1 {
                let failed = comm.recv(vec![0u8], 0).wait().unwrap_err();
                assert!(matches!(failed.error, Error::Aborted { .. }), "{failed}");
                given_up.wait();
                return;
            }
            let error = block_on(comm.shrink_within(Duration::from_millis(300))).unwrap_err();
            let Error::NoVerdict { missing, call, .. } = &error else { panic!("{error}") };
            assert_eq!(call, "shrink");
            let named: Vec<_> = missing.iter().map(|m| (m.rank, m.state.clone())).collect();
            assert!(named.contains(&(1, MissingState::NotCalled(None))), "{link}: {error}");
            given_up.wait();
        });
    }
}

#[test]
fn a_rank_that_gives_up_half_way_is_not_waited_for() {
    for link in LINKS {
        let lost = each(3, link, move |rank, comm| {
            let keep = comm.share();
            if rank == 2 {
                // This rank has voted, and drops its call before the rest of the shrink.
                let mut shrinks = Box::pin(comm.shrink());
                let polled = futures::FutureExt::now_or_never(&mut shrinks);
                assert!(polled.is_none(), "the others have not called yet, or not answered");
                drop(shrinks);
                // The rank's world goes on, as other groups may need it.
                while keep.stats().in_flight > 0 {}
                return (keep, None);
            }
            let (mut comm, verdict) = block_on(comm.shrink()).unwrap();
            let error = comm.barrier().wait().unwrap_err().error;
            (keep, Some((error, verdict)))
        });
        for (error, verdict) in lost.into_iter().filter_map(|(_, found)| found) {
            let Error::PeerLost { rank, how: Lost::Left, .. } = &error else { panic!("{link}: {error}") };
            assert_eq!((*rank, verdict.survivors.len()), (2, 3), "{link}");
        }
    }
}

/// Its own call ends by its deadline while it waits for a slow rank. The others have heard that it comes, and so have a communicator with it.
#[test]
fn a_rank_whose_shrink_ends_late_is_not_waited_for_in_the_new_communicator() {
    for link in LINKS {
        let (voted, given_up) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
        each(3, link, move |rank, comm| {
            let keep = comm.share();
            if rank == 2 {
                voted.wait();
                let error = block_on(comm.shrink_within(Duration::from_secs(1))).unwrap_err();
                let Error::NoVerdict { missing, .. } = &error else { panic!("{link}: {error}") };
                let named: Vec<_> = missing.iter().map(|m| (m.rank, m.state.clone())).collect();
                assert_eq!(named, [(1, MissingState::NoAnswer)], "{link}: {error}");
                given_up.wait();
                return keep;
            }
            let mut shrinks = Box::pin(comm.shrink());
            if rank == 1 {
                // It has voted, and does not go on before rank 2 has given up.
                assert!(futures::FutureExt::now_or_never(&mut shrinks).is_none());
                voted.wait();
                given_up.wait();
                let (mut comm, _) = block_on(shrinks).unwrap();
                let error = comm.barrier().wait().unwrap_err().error;
                assert!(matches!(error, Error::Aborted { by: 2, .. }), "{link}: {error}");
                return keep;
            }
            voted.wait();
            let waits = std::thread::spawn(move || block_on(shrinks).unwrap().0);
            given_up.wait();
            let error = waits.join().unwrap().barrier().wait().unwrap_err().error;
            assert!(matches!(error, Error::Aborted { by: 2, .. }), "{link}: {error}");
            keep
        });
    }
}

#[test]
fn a_node_shrinks_by_whole_processes() {
    let processes = worlds(6, "shm").into_iter();
    let mut nodes: Vec<Vec<Comm>> = vec![Vec::new(), Vec::new(), Vec::new()];
    processes.enumerate().for_each(|(rank, comm)| nodes[rank / 2].push(comm));
    let nodes = nodes.into_iter().map(|comms| Node::from_comms(comms).unwrap());
    let threads = nodes.enumerate().map(|(process, mut node)| {
        std::thread::spawn(move || {
            if process == 1 {
                return;
            }
            node.all_reduce([vec![1u32], vec![1]]).wait().unwrap_err();
            let (mut node, verdict) = block_on(node.shrink()).unwrap();
            assert_eq!(parts(&verdict), (&[0, 1, 4, 5][..], &[2, 3][..]));
            assert_eq!((node.processes(), node.devices(), node.process()), (2, 2, process / 2));
            let [sum, _] =
                node.all_reduce([vec![1u32 << (2 * process)], vec![2 << (2 * process)]]).wait().unwrap();
            assert_eq!(sum, [0b110011]);
            block_on(node.close()).unwrap();
        })
    });
    threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn idle_groups_of_survivors_are_taken_up_again() {
    for link in LINKS {
        each(4, link, move |rank, mut world| {
            let mut pair = block_on(world.split(u64::from(rank < 2), 0)).unwrap();
            assert_eq!(members(&mut pair, rank), if rank < 2 { 0b11 } else { 0b1100 });
            drop(pair);
            if rank == 3 {
                return;
            }
            world.all_reduce(vec![1u8]).wait().unwrap_err();
            let (mut smaller, _) = block_on(world.shrink()).unwrap();
            let before = smaller.stats().pool.hits;
            let mut again = block_on(smaller.split(u64::from(rank < 2), 0)).unwrap();
            assert_eq!(members(&mut again, rank), if rank < 2 { 0b11 } else { 0b100 });
            // Rank 2's old pair had the lost rank as a member.
            assert_eq!(smaller.stats().pool.hits - before, u64::from(rank < 2), "{link}");
        });
    }
}
