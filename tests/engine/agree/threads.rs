//! Ranks as threads: on every link, on living and aborted communicators, again and again.

use std::time::{Duration, Instant};

use allstream::{Comm, Error, MissingState, Verdict};
use futures::executor::block_on;

use crate::support::each;

const LINKS: [&str; 3] = ["local", "shm", "tcp"];

fn parts(verdict: &Verdict) -> (bool, &[usize], &[usize]) {
    (verdict.flag, &verdict.survivors, &verdict.lost)
}

#[test]
fn the_flag_is_true_where_all_say_so() {
    for link in LINKS {
        for mask in 0..8usize {
            let verdicts = each(3, link, move |rank, comm| {
                let verdict = comm.agree(mask >> rank & 1 == 1).wait();
                block_on(comm.close()).unwrap();
                verdict.unwrap()
            });
            for verdict in &verdicts {
                assert_eq!(parts(verdict), (mask == 7, &[0, 1, 2][..], &[][..]), "{link}, flags {mask:03b}");
            }
        }
    }
}

#[test]
fn one_rank_alone_agrees_with_itself() {
    for comm in Comm::local(1).unwrap() {
        assert_eq!(parts(&comm.agree(false).wait().unwrap()), (false, &[0][..], &[][..]));
        assert_eq!(parts(&block_on(comm.share().agree(true)).unwrap()), (true, &[0][..], &[][..]));
    }
}

#[test]
fn an_aborted_communicator_agrees_again_and_again() {
    for link in LINKS {
        let all = each(4, link, |rank, mut comm| {
            if rank == 2 {
                comm.abort("planted");
            } else {
                comm.all_reduce(vec![1f32; 1000]).wait().unwrap_err();
            }
            let verdicts: Vec<_> = (0..20).map(|i| comm.agree(rank != i % 5).wait().unwrap()).collect();
            block_on(comm.close()).expect("who aborted it knows, and the others were told by their calls");
            verdicts
        });
        for verdicts in &all {
            for (i, verdict) in verdicts.iter().enumerate() {
                assert_eq!(parts(verdict), (i % 5 == 4, &[0, 1, 2, 3][..], &[][..]), "{link}, call {i}");
            }
        }
    }
}

#[test]
fn several_may_be_open_and_calls_are_matched_by_their_order() {
    for link in LINKS {
        let all = each(3, link, |rank, comm| {
            let open: Vec<_> = (0..30).map(|i| comm.agree((i + rank) % 3 != 0 || i < 15)).collect();
            // Waited for in reverse order.
            let mut got: Vec<_> =
                open.into_iter().enumerate().rev().map(|(i, a)| (i, block_on(a).unwrap())).collect();
            got.reverse();
            got
        });
        for (i, verdict) in all.iter().flatten() {
            assert_eq!(verdict.flag, *i < 15, "{link}, call {i}");
        }
    }
}

#[test]
fn more_than_64_open_ones_are_refused() {
    let all = each(2, "local", |rank, mut comm| {
        if rank == 1 {
            // Waits until rank 0's call has been refused.
            comm.recv(vec![0u8; 1], 0).wait().unwrap();
        }
        let open: Vec<_> = (0..64).map(|_| comm.agree(true)).collect();
        if rank == 0 {
            let refused = comm.agree(true).wait().unwrap_err();
            assert!(matches!(refused, Error::QueueFull { limit: 64, .. }), "{refused}");
            comm.send(vec![0u8; 1], 1).wait().unwrap();
        }
        open.into_iter().all(|agree| agree.wait().unwrap().flag) && comm.agree(true).wait().unwrap().flag
    });
    assert_eq!(all, [true, true]);
}

#[test]
fn a_child_agrees_with_ranks_of_its_own_and_does_not_count_as_a_collective() {
    for link in LINKS {
        let all = each(4, link, |rank, mut world| {
            let child = block_on(world.split(rank as u64 % 2, -(rank as i64))).unwrap();
            let verdict = child.agree(rank != 3).wait().unwrap();
            // An agreement outlives the handle: `second` gets its verdict although `child` is dropped.
            let second = child.agree(true);
            drop(child);
            assert!(second.wait().unwrap().flag);
            world.barrier().wait().unwrap();
            if rank == 0 {
                // An agreement that only one rank calls is no mismatch: `close` compares collectives only.
                drop(world.agree(true));
            }
            block_on(world.close()).unwrap();
            verdict
        });
        for (rank, verdict) in all.iter().enumerate() {
            assert_eq!(parts(verdict), (rank % 2 == 0, &[0, 1][..], &[][..]), "{link}, rank {rank}");
        }
    }
}

#[test]
fn a_rank_that_left_is_lost_and_one_that_left_after_its_vote_is_counted() {
    for link in LINKS {
        let all = each(4, link, |rank, comm| match rank {
            // Leaves without a vote; the others' agreement ends once they have its goodbye.
            0 => {
                block_on(comm.close()).unwrap();
                None
            }
            // Votes, and does not wait for the verdict.
            1 => {
                drop(comm.agree(false));
                drop(comm);
                None
            }
            _ => {
                std::thread::sleep(Duration::from_millis(if rank == 2 { 0 } else { 300 }));
                Some(comm.agree(true).wait().unwrap())
            }
        });
        for verdict in all.iter().flatten() {
            assert_eq!(parts(verdict), (false, &[1, 2, 3][..], &[0][..]), "{link}");
        }
    }
}

#[test]
fn a_rank_that_does_not_call_is_named_at_the_deadline_and_may_still_call() {
    for link in LINKS {
        let all = each(3, link, |rank, mut comm| {
            let first = if rank == 1 {
                let begun = Instant::now();
                let given_up = comm.agree_within(true, Duration::from_millis(300)).wait();
                assert!(begun.elapsed() >= Duration::from_millis(300));
                comm.send(vec![0u8; 1], 0).wait().unwrap();
                given_up
            } else {
                if rank == 0 {
                    comm.recv(vec![0u8; 1], 1).wait().unwrap();
                }
                comm.agree(true).wait()
            };
            // Rank 1 gave up waiting, but its vote counted in the first agreement; all three ranks make the next one.
            (first, comm.agree(rank != 2).wait().unwrap())
        });
        let error = all[1].0.as_ref().unwrap_err();
        let Error::NoVerdict { missing, rank: 1, .. } = error else { panic!("{error}") };
        let [one] = &missing[..] else { panic!("{error}") };
        assert_eq!((one.rank, &one.state), (0, &MissingState::NotCalled(None)), "{link}: {error}");
        for first in [&all[0].0, &all[2].0] {
            assert_eq!(parts(first.as_ref().unwrap()), (true, &[0, 1, 2][..], &[][..]), "{link}");
        }
        for (_, second) in &all {
            assert_eq!(parts(second), (false, &[0, 1, 2][..], &[][..]), "{link}");
        }
    }
}
