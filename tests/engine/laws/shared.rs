//! Handles to be held in several places, and keys by which their calls are told apart.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use allstream::{Comm, Error, ReduceOp, SharedComm};
use futures::executor::block_on;

use super::house::*;

/// Four tasks submit on one handle in this `order`, each with its own key or none; returns what each got, by task.
fn four_tasks(shared: &SharedComm, order: [u64; 4], with_key: bool) -> Vec<Result<f32, Error>> {
    let turns: Vec<_> = order
        .iter()
        .map(|task| {
            let comm = shared.clone();
            let call = comm.timeout(Duration::from_secs(20));
            let call = if with_key { call.key(*task) } else { call };
            (*task, call.all_reduce(vec![*task as f32]))
        })
        .collect();
    let mut got: Vec<_> = turns.into_iter().map(|(task, work)| (task, work.wait())).collect();
    got.sort_by_key(|(task, _)| *task);
    got.into_iter().map(|(_, got)| got.map(|sum| sum[0]).map_err(Error::from)).collect()
}

/// The tasks of the two ranks submit in different orders; without keys, their calls look alike.
fn in_two_orders(comm: &Comm, with_key: bool) -> Vec<Result<f32, Error>> {
    let order = if comm.rank() == 0 { [1, 2, 3, 4] } else { [2, 1, 4, 3] };
    four_tasks(&comm.share(), order, with_key)
}

#[test]
fn tasks_whose_keys_differ_get_an_error_in_place_of_each_other_s_sums() {
    for link in LINKS {
        threads(within(LIMIT, move || world(2, link)), move |comm| {
            let got = in_two_orders(&comm, true);
            assert!(got.iter().all(Result::is_err), "{got:?}");
            let error = got[0].clone().unwrap_err();
            let Error::Mismatch { ours, theirs, .. } = &error else { panic!("{error}") };
            let text = error.to_string();
            for key in ["key 1)", "key 2)"] {
                assert!(text.contains(key), "{link:?}: {text}");
            }
            assert_ne!(ours, theirs);
        });
        // Without keys, tasks get each other's sums unnoticed.
        threads(within(LIMIT, move || world(2, link)), move |comm| {
            let got: Vec<f32> = in_two_orders(&comm, false).into_iter().map(Result::unwrap).collect();
            assert_eq!(got, [3.0, 3.0, 7.0, 7.0], "{link:?}: of two tasks each");
        });
    }
}

#[test]
fn calls_with_one_key_go_on_as_without() {
    for link in LINKS {
        threads(within(LIMIT, move || world(2, link)), |mut comm| {
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            for key in [0, 1, u64::from(u32::MAX), 1 << 32, u64::MAX] {
                let sum = comm.key(key).op(ReduceOp::Max).all_reduce(vec![rank as u32; 9]).wait().unwrap();
                assert_eq!(sum, [1; 9]);
                let (a, [b]) = comm.key(key).all_reduce_list((vec![vec![1u8]], [vec![1f64]])).wait().unwrap();
                assert_eq!((a[0][0], b[0]), (2, 2.0));
                let got = comm.key(key).send_recv(vec![rank as u16], peer, vec![9u16], peer).wait();
                assert_eq!(got.unwrap().1, [peer as u16]);
                assert_eq!(comm.key(key).broadcast_bytes(vec![rank as u8; 3], 1).wait().unwrap(), [1; 3]);
            }
            // The key 0 is that of a call without one.
            let call = if rank == 0 { comm.key(0) } else { comm.call() };
            assert_eq!(call.all_reduce(vec![1u8]).wait().unwrap(), [2]);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn keys_are_compared_in_every_kind_of_call() {
    type Calls = fn(&mut Comm, u64) -> Result<(), Error>;
    let calls: [Calls; 5] = [
        |comm, key| comm.key(key).barrier().wait().map_err(Error::from),
        |comm, key| comm.key(key).all_reduce_list((vec![vec![1u8]],)).wait().map(drop).map_err(Error::from),
        |comm, key| comm.key(key).all_gather_v(vec![1u8], &[1, 1]).wait().map(drop).map_err(Error::from),
        |comm, key| comm.key(key).all_gather_bytes(vec![1u8]).wait().map(drop).map_err(Error::from),
        |comm, key| match comm.rank() {
            0 => comm.key(key).send(vec![1u8; 9000], 1).wait().map(drop).map_err(Error::from),
            _ => comm.key(key).recv(vec![1u8; 9000], 0).wait().map(drop).map_err(Error::from),
        },
    ];
    for (i, call) in calls.into_iter().enumerate() {
        // Pairs of keys that differ in one 32-bit half only, the lower or the upper.
        for keys in [[7, 8], [0, 7], [7, 7 + (1 << 32)], [1 << 32, 1 << 33]] {
            threads(within(LIMIT, || world(2, Link::Local)), move |mut comm| {
                let key = keys[comm.rank()];
                let error = call(&mut comm, key).unwrap_err();
                assert!(matches!(error, Error::Mismatch { .. }), "call {i}, keys {keys:?}: {error}");
            });
        }
    }
}

#[test]
fn a_shared_handle_makes_groups_as_the_other_does() {
    for link in LINKS {
        threads(within(LIMIT, move || world(4, link)), |comm| {
            let (rank, shared) = (comm.rank(), comm.share());
            let mut dup = block_on(shared.dup()).unwrap();
            works(&mut dup);
            let mut half = block_on(shared.split((rank % 2) as u64, rank as i64)).unwrap();
            assert_eq!((half.size(), half.rank()), (2, rank / 2));
            works(&mut half);
            let some = block_on(shared.split_some((rank > 0).then_some(0), 0)).unwrap();
            assert_eq!(some.map(|comm| comm.size()), (rank > 0).then_some(3));
            let pair = block_on(shared.subset(&[3, 1])).unwrap();
            assert_eq!(pair.map(|comm| comm.rank()), [None, Some(1), None, Some(0)][rank]);
            let mut mesh = block_on(shared.mesh([("dp", 2), ("tp", 2)])).unwrap();
            assert_eq!(mesh.coordinate("dp").unwrap(), rank / 2);
            works(mesh.axis("tp").unwrap());
            let wrong = block_on(shared.mesh([("dp", 3)])).unwrap_err().to_string();
            assert!(wrong.contains("this group has 4"), "{wrong}");
            // Closing one handle closes the communicator for all handles of the rank.
            let library = dup.share();
            block_on(library.clone().close()).unwrap();
            assert!(matches!(library.barrier().wait().unwrap_err().error, Error::Closed { .. }));
            assert!(matches!(dup.barrier().wait().unwrap_err().error, Error::Closed { .. }));
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn tasks_that_make_groups_at_once_take_turns() {
    threads(within(LIMIT, || world(2, Link::Local)), |mut comm| {
        let shared = comm.share();
        let begin = Arc::new(Barrier::new(4));
        let make = |_| {
            let (comm, begin) = (shared.clone(), begin.clone());
            thread::spawn(move || {
                begin.wait();
                let mut made = block_on(comm.dup()).unwrap();
                // All four calls look alike, so it does not matter which of the other rank's calls this one matches.
                works(&mut made);
            })
        };
        let tasks: Vec<_> = (0..4).map(make).collect();
        tasks.into_iter().for_each(|task| task.join().unwrap());
        works(&mut comm);
        block_on(comm.close()).unwrap();
    });
}

#[test]
fn a_call_between_the_steps_of_a_group_is_an_error_and_no_part_of_it() {
    threads(within(LIMIT, || world(2, Link::Local)), |mut comm| {
        // The first step of a split looks like this call, but for its key.
        let error = match comm.rank() {
            0 => block_on(comm.split(0, 0)).map(drop).unwrap_err(),
            _ => comm.all_gather(vec![1u64, 0, 0]).wait().unwrap_err().error,
        };
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    });
}

#[test]
fn one_number_goes_without_a_buffer() {
    for link in LINKS {
        threads(within(LIMIT, move || world(3, link)), |mut comm| {
            let rank = comm.rank();
            assert_eq!(comm.all_reduce_value(rank as f64 + 0.5).wait().unwrap(), 4.5);
            assert_eq!(comm.op(ReduceOp::Max).all_reduce_value(rank as i8).wait().unwrap(), 2);
            assert_eq!(comm.share().broadcast_value(rank as u64, 1).wait().unwrap(), 1);
            assert_eq!(comm.all_gather_value(rank == 1).wait().unwrap(), [false, true, false]);
            let refused = comm.broadcast_value(5u8, 7).wait().unwrap_err();
            assert_eq!(refused.buf, Some(5), "{refused}");
            block_on(comm.close()).unwrap();
        });
    }
}
