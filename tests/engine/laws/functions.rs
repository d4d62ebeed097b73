//! Reductions by a user's function.

use std::time::{Duration, Instant};

use allstream::{Algo, Error, Function, Kind, plan};
use futures::executor::block_on;

use super::house::*;

/// The function panics on one rank only: every rank's error names that function and that rank, and buffers come back.
#[test]
fn law_8_a_function_that_panics_is_an_error_on_every_rank() {
    quiet_panics();
    for link in LINKS {
        for (kind, len) in
            [(Kind::AllReduce, 5), (Kind::AllReduce, 300_000), (Kind::Scan, 5), (Kind::Reduce, 40_000)]
        {
            let comms = within(LIMIT, move || world(3, link));
            let errors = threads(comms, move |mut comm| {
                let rank = comm.rank();
                let function = Function::ordered("fragile", move |l: &mut [i64], r: &[i64]| {
                    l.iter_mut().zip(r).for_each(|(l, r)| *l += r);
                    if rank == 2 && l.iter().any(|x| *x >= 6) {
                        panic!("planted");
                    }
                });
                let call = comm.function(&function);
                let buf = vec![rank as i64 + 1; len];
                // In each case rank 2 computes a sum of all ranks, at least of some elements.
                let work = match kind {
                    Kind::AllReduce => call.all_reduce(buf),
                    Kind::Scan => call.scan(buf),
                    _ => call.reduce(buf, 2),
                };
                // The call of a rank that needs nothing more from rank 2 may succeed: it hears of the error afterwards.
                let error = match work.wait() {
                    Err(failed) => {
                        assert_eq!(failed.buf.map(|b| b.len()), Some(len), "{link:?}: the buffer comes back");
                        failed.error
                    }
                    Ok(_) => {
                        wait_until("the error to be heard", || comm.check().is_err());
                        comm.check().unwrap_err()
                    }
                };
                let later = comm.barrier().wait().unwrap_err();
                assert_eq!(later.error, error, "later calls say the same");
                error
            });
            for error in errors {
                let Error::Function { call, name, rank: 2, .. } = &error else {
                    panic!("{link:?}, {kind}: {error}");
                };
                assert_eq!((call.as_str(), name.as_str()), (kind.name(), "fragile"), "{error}");
            }
        }
    }
}

/// The function composes affine maps: any order other than that of ranks, and any map applied twice, gives another result.
#[test]
fn functions_that_do_not_commute_are_applied_in_rank_order_by_every_algorithm_that_says_so() {
    const P: u64 = 4_294_967_291; // The largest prime below 2^32.
    let then = |f: u64, g: u64| {
        let ((a, b), (c, d)) = ((f >> 32, f & 0xffff_ffff), (g >> 32, g & 0xffff_ffff));
        ((a * c % P) << 32) | ((c * b + d) % P)
    };
    for link in LINKS {
        for n in [2usize, 3, 5, 8] {
            let comms = within(LIMIT, move || world(n, link));
            threads(comms, move |mut comm| {
                let rank = comm.rank();
                let maps = |r: usize, len: usize| -> Vec<u64> {
                    let mut rng = Rng(r as u64 * 77 + len as u64);
                    (0..len).map(|_| ((rng.next() % (P - 2) + 2) << 32) | (rng.next() % P)).collect()
                };
                let function =
                    Function::ordered("one map after the other", move |l: &mut [u64], r: &[u64]| {
                        l.iter_mut().zip(r).for_each(|(l, r)| *l = then(*l, *r));
                    });
                for len in [1usize, 100, 70_001] {
                    let through = |ranks: std::ops::Range<usize>| -> Vec<u64> {
                        let all = ranks.map(|r| maps(r, len));
                        all.reduce(|f, g| f.into_iter().zip(g).map(|(f, g)| then(f, g)).collect()).unwrap()
                    };
                    for kind in [Kind::AllReduce, Kind::Reduce, Kind::Scan, Kind::ExScan] {
                        let named = plan::algorithms(kind).iter().copied();
                        for algo in named.filter(|a| plan::keeps_rank_order(kind, *a)).chain([Algo::Auto]) {
                            let call = comm.function(&function).algo(algo);
                            let (root, own) = (n / 2, maps(rank, len));
                            let (got, expected) = match kind {
                                Kind::AllReduce => (call.all_reduce(own), through(0..n)),
                                Kind::Reduce if rank == root => (call.reduce(own, root), through(0..n)),
                                Kind::Reduce => (call.reduce(own.clone(), root), own),
                                Kind::Scan => (call.scan(own), through(0..rank + 1)),
                                _ if rank == 0 => (call.exscan(own.clone()), own),
                                _ => (call.exscan(own), through(0..rank)),
                            };
                            let got = got.wait().unwrap();
                            assert!(got == expected, "{link:?}, {kind} by {algo}, {n} ranks, {len} elements");
                        }
                    }
                }
                block_on(comm.close()).unwrap();
            });
        }
    }
}

/// A staging slot that was taken for a result is given back if the function that was to compute the result panics.
#[test]
fn a_function_that_panics_costs_no_staging_slot() {
    quiet_panics();
    let comms = within(LIMIT, move || world(2, Link::Shm));
    let left = threads(comms, move |mut comm| {
        let bad = Function::<u32>::commutative("bad", |_: &mut [u32], _: &[u32]| panic!("planted"));
        for _ in 0..40 {
            let mut child = block_on(comm.dup()).unwrap();
            let failed = child.function(&bad).algo(Algo::Ring).all_reduce(vec![1u32; 1 << 16]).wait();
            failed.expect_err("it panics");
        }
        // Slots that a peer still has come back once it has hung up.
        let end = Instant::now() + Duration::from_secs(3);
        while comm.stats().staging_bytes > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let left = comm.stats().staging_bytes;
        comm.barrier().wait().unwrap();
        block_on(comm.close()).unwrap();
        left
    });
    assert_eq!(left, [0, 0], "bytes of slots in use on each rank");
}
