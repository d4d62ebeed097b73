//! Buffers that peers read in place: [`allstream::Comm::alloc`].

use std::time::{Duration, Instant};

use allstream::plan::algorithms;
use allstream::{Algo, ArenaBuf, Comm, Error, Failed, Kind, Message};
use futures::executor::block_on;

use super::house::*;

fn filled(comm: &Comm, len: usize, value: f32) -> ArenaBuf<f32> {
    let mut buf = comm.alloc(len).unwrap();
    buf.fill(value);
    buf
}

#[test]
fn arena_buffers_go_through_every_algorithm_and_messages() {
    #[cfg(feature = "testing")]
    {
        allstream::testing::fold_small(true);
        allstream::testing::stream_small(true);
    }
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            for len in [0, 1, 1000, 300_001] {
                for &algo in algorithms(Kind::AllReduce).iter().filter(|a| **a != Algo::TwoLevel) {
                    // With `fold_small`, one of two calls in a row is folded at once even if it is small.
                    for _ in 0..2 {
                        let buf = filled(&comm, len, comm_value(rank));
                        let sum = comm.algo(algo).all_reduce(buf).wait().unwrap();
                        assert!(sum.iter().all(|x| *x == total(n)), "{link:?} {algo} {len}");
                    }
                }
                let all = comm.all_gather(filled(&comm, len, comm_value(rank))).wait().unwrap();
                let right = (0..n).flat_map(|r| std::iter::repeat_n(comm_value(r), len));
                assert!(all.iter().copied().eq(right), "{link:?} {len}");
                let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
                let sent = filled(&comm, len, comm_value(rank));
                let got = comm.batch([
                    Message::Send { buf: sent, to, tag: 0 },
                    Message::Recv { buf: filled(&comm, len, -1.0), from, tag: 0 },
                ]);
                assert!(got.wait().unwrap()[1].iter().all(|x| *x == comm_value(from)));
            }
            block_on(comm.close()).unwrap();
        });
    }
}

/// Only a rank itself knows whether it can lend what its peers need: the peers learn it from its first frame, and all take the same path.
/// Where all can lend, each lends its buffers where they lie, or copies in slots if peers cannot reach the buffers.
#[cfg(feature = "testing")]
#[test]
fn ranks_that_cannot_lend_are_heard_of_by_all() {
    allstream::testing::lend_by_turns(true);
    let comms = within(LIMIT, move || world(3, Link::Shm));
    threads(comms, move |mut comm| {
        let (n, rank) = (comm.size(), comm.rank());
        for turn in 0..96 {
            let (len, arena) = ([1_300_001, 100_000, 20_000][turn % 3], ((turn / 5) >> rank) & 1 == 1);
            let algo = [Algo::Direct, Algo::OneShot][turn / 48];
            let value = comm_value(rank);
            let right = |sum: &[f32]| sum.iter().all(|x| *x == total(n));
            let mine = filled(&comm, len, value);
            let call = comm.algo(algo);
            let good = match (arena, turn % 2 == 0) {
                (true, _) => right(&call.all_reduce(mine).wait().unwrap()),
                (false, true) => right(&call.all_reduce(vec![value; len]).wait().unwrap()),
                // The input can be lent in place, the output cannot.
                (false, false) => {
                    let (mine, sum) = call.all_reduce_into(mine, vec![0f32; len]).wait().unwrap();
                    right(&sum) && mine.iter().all(|x| *x == value)
                }
            };
            assert!(good, "turn {turn}, {algo}");
        }
        block_on(comm.close()).unwrap();
    });
    allstream::testing::lend_by_turns(false);
}

/// Law 3, as for other buffers: after an abort at a random moment, a rank that has its buffer back writes to it at once,
/// and a rank whose call succeeds has the right sum all the same.
#[test]
fn law_3_an_arena_buffer_that_came_back_is_read_by_nobody() {
    let seed = seed();
    for round in 0..20u64 {
        let comms = within(LIMIT, move || world(3, Link::Shm));
        let seed = seed.wrapping_add(round);
        threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            let mut rng = Rng(seed ^ (rank as u64) << 32);
            let algo = algorithms(Kind::AllReduce)[round as usize % 4];
            let works: Vec<_> = (0..4)
                .map(|_| {
                    let buf = filled(&comm, 400_000, comm_value(rank));
                    comm.algo(algo).all_reduce(buf)
                })
                .collect();
            if rank == 0 {
                let end = Instant::now() + Duration::from_micros(rng.below(3000) as u64);
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
                comm.abort("planted");
            }
            for work in works {
                match work.wait() {
                    Ok(buf) => assert!(buf.iter().all(|x| *x == total(n)), "{algo}: a wrong sum"),
                    Err(Failed { buf, error }) => {
                        assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
                        stays(&mut buf.expect("all hang up, so it comes back"));
                    }
                }
            }
        });
    }
}
