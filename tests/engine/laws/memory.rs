//! Law 3: memory in flight.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use allstream::plan::algorithms;
use allstream::{Error, Failed, Kind};

use super::house::*;

#[test]
fn law_3_after_a_failure_the_buffer_comes_back_whole() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            if comm.rank() == 1 {
                wait_until("the timeout to be heard", || comm.check().is_err());
                return;
            }
            let (buf, drops) = Watched::new(1 << 20, 1.0);
            let failed = comm.timeout(Duration::from_millis(300)).all_reduce(buf).wait().unwrap_err();
            assert!(matches!(failed.error, Error::Timeout { .. }), "{link:?}: {}", failed.error);
            let buf = failed.buf.expect("nothing can touch it any more");
            assert_eq!(drops.load(Ordering::SeqCst), 0);
            assert!(buf.memory.iter().all(|x| *x != SPOILT));
            drop(buf);
            assert_eq!(drops.load(Ordering::SeqCst), 1);
        });
    }
}

/// Aborted at a random moment while large data moves: whoever gets its buffer back spoils it at once, and whoever
/// succeeds has the right sum all the same.
#[test]
fn law_3_a_buffer_that_came_back_is_read_by_nobody() {
    let seed = seed();
    for (at, link) in LINKS.into_iter().enumerate() {
        for round in 0..12u64 {
            let comms = within(LIMIT, move || world(3, link));
            let seed = seed.wrapping_add(round * 3 + at as u64);
            threads(comms, move |mut comm| {
                let (n, rank) = (comm.size(), comm.rank());
                let mut rng = Rng(seed ^ (rank as u64) << 32);
                let algo = algorithms(Kind::AllReduce)[round as usize % 4];
                let works: Vec<_> = (0..4)
                    .map(|_| {
                        let (buf, drops) = Watched::new(400_000, comm_value(rank));
                        (comm.algo(algo).all_reduce(buf), drops)
                    })
                    .collect();
                if rank == 0 {
                    let pause = Duration::from_micros(rng.below(3000) as u64);
                    let end = Instant::now() + pause;
                    while Instant::now() < end {
                        std::hint::spin_loop();
                    }
                    comm.abort("planted");
                }
                for (work, drops) in works {
                    match work.wait() {
                        Ok(buf) => {
                            assert!(buf.memory.iter().all(|x| *x == total(n)), "{link:?} {algo}: a wrong sum")
                        }
                        Err(Failed { buf, error }) => {
                            assert!(matches!(error, Error::Aborted { by: 0, .. }), "{link:?}: {error}");
                            assert_eq!(drops.load(Ordering::SeqCst), 0, "in flight, it was not freed");
                            let mut buf = buf.expect("it comes back");
                            stays(&mut buf.memory);
                            drop(buf);
                            assert_eq!(drops.load(Ordering::SeqCst), 1);
                        }
                    }
                }
            });
        }
    }
}
