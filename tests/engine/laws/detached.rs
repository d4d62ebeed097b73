//! Law 2: dropping detaches.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use allstream::{Error, ReduceOp, Work};
use futures::executor::block_on;

use super::house::*;

#[test]
fn law_2_works_dropped_at_random_polls_disturb_nobody() {
    let seed = seed();
    let dropped = Arc::new(AtomicUsize::new(0));
    for (at, link) in LINKS.into_iter().enumerate() {
        let comms = within(LIMIT, move || world(3, link));
        let seed = seed.wrapping_add(at as u64);
        let dropped = dropped.clone();
        let counters = threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            // What is called is the same on all ranks; what becomes of the works is not.
            let (mut calls, mut fate) = (Rng(seed), Rng(seed ^ (rank as u64 + 1) << 40));
            let (mut once, mut forgotten) = (Vec::new(), Vec::new());
            let mut here = 0;
            let enough = 200 / LINKS.len() / n + 1;
            while calls.0 != 0 && once.len() < 400 {
                let len = [1, 30, 1000, 70_000, 400_000][calls.below(5)];
                let kind = calls.below(4);
                let value = comm_value(rank);
                let (buf, drops) = Watched::new(len, value);
                let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
                let mut works = vec![match kind {
                    0 | 1 => comm.all_reduce(buf),
                    2 => comm.broadcast(buf, calls.below(n)),
                    _ => comm.send(buf, to),
                }];
                once.push(drops);
                if kind == 3 {
                    let (buf, drops) = Watched::new(len, 0.0);
                    works.push(comm.recv(buf, from));
                    once.push(drops);
                }
                let first = once.len() - works.len();
                for (i, mut work) in works.into_iter().enumerate() {
                    let mut ready = None;
                    for _ in 0..fate.below(6) {
                        if let Poll::Ready(result) = poll_once(&mut work) {
                            ready = Some(result);
                            break;
                        }
                        if fate.below(2) == 0 {
                            thread::yield_now();
                        }
                    }
                    let result = match (ready, fate.below(8)) {
                        (Some(result), _) => result,
                        (None, 0) => {
                            std::mem::forget(work);
                            forgotten.push(first + i);
                            continue;
                        }
                        (None, 1 | 2) => work.wait(),
                        (None, _) => {
                            drop(work);
                            here += 1;
                            continue;
                        }
                    };
                    let buf = result.unwrap();
                    let expected = match (kind, i) {
                        (0 | 1, _) => total(n),
                        (3, 0) => value,
                        (3, _) => comm_value(from),
                        _ => buf.memory[0],
                    };
                    assert!(
                        buf.memory.iter().all(|x| *x == expected),
                        "{link:?}: operations after a drop are right"
                    );
                }
                // The ranks agree on when to stop: when each has dropped enough works.
                if once.len() % 10 < 2 {
                    let all = comm.op(ReduceOp::Min).all_reduce(vec![here as u64]).wait().unwrap();
                    if all[0] as usize >= enough {
                        break;
                    }
                }
            }
            works(&mut comm);
            comm.barrier().wait().unwrap();
            dropped.fetch_add(here, Ordering::SeqCst);
            block_on(comm.close()).unwrap();
            (once, forgotten)
        });
        for (once, forgotten) in counters {
            for (i, drops) in once.iter().enumerate() {
                if forgotten.contains(&i) {
                    assert!(drops.load(Ordering::SeqCst) <= 1);
                } else {
                    wait_until("every buffer to be freed", || drops.load(Ordering::SeqCst) > 0);
                    assert_eq!(
                        drops.load(Ordering::SeqCst),
                        1,
                        "{link:?}: buffer {i} was freed exactly once"
                    );
                }
            }
        }
    }
    let dropped = dropped.load(Ordering::SeqCst);
    eprintln!("{dropped} works were dropped in flight or unpolled");
    assert!(dropped >= 200);
}

/// In each round one rank lets go of its calls, of nine kinds; the others' results are whole, and every buffer is freed.
#[test]
fn law_2_any_collective_may_be_let_go() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        let counters = threads(comms, move |mut comm| {
            let (n, rank) = (comm.size(), comm.rank());
            let (value, all, mut freed) = (comm_value(rank), total(n), Vec::new());
            for round in 0..3 * n {
                let len = [1usize, 30, 100_000][(round + round / n) % 3];
                let (gone, root) = (round % n == rank, (round + 1) % n);
                let check =
                    |name: &str, work: Work<Watched>, range: std::ops::Range<usize>, expected: f32| {
                        if gone {
                            return drop(work);
                        }
                        let buf = work.wait().unwrap();
                        let whole = buf.memory[range].iter().all(|x| *x == expected);
                        assert!(whole, "{link:?}: {name} of {len} on rank {rank} after a drop");
                    };
                let mut buf = |len: usize| {
                    let (buf, drops) = Watched::new(len, value);
                    freed.push(drops);
                    buf
                };
                let own = rank * len..(rank + 1) * len;
                let prefix = (0..=rank).map(comm_value).sum();
                check("scan", comm.scan(buf(len)), 0..len, prefix);
                let before = if rank == 0 { value } else { (0..rank).map(comm_value).sum() };
                check("exscan", comm.exscan(buf(len)), 0..len, before);
                let next = (rank + 1) % n;
                let (right, theirs) = (comm_value(next), next * len..(next + 1) * len);
                check("all_to_all", comm.all_to_all_in_place(buf(n * len)), theirs.clone(), right);
                check("all_gather", comm.all_gather_in_place(buf(n * len)), theirs, right);
                check("reduce_scatter", comm.reduce_scatter_in_place(buf(n * len)), own, all);
                let mine = if rank == root { n * len } else { len };
                // The root's buffer holds all ranks' blocks, and block 0 is rank 0's.
                let first = if rank == root { comm_value(0) } else { value };
                check("gather", comm.gather_in_place(buf(mine), root), 0..len, first);
                let of_root = comm_value(root);
                check("scatter", comm.scatter_in_place(buf(mine), root), 0..mine, of_root);
                let (list, bytes) =
                    (comm.all_reduce_list([buf(len), buf(3)]), comm.all_gather_bytes(vec![rank as u8; len]));
                if gone {
                    drop((list, bytes));
                } else {
                    let list = list.wait().unwrap();
                    assert!(list.iter().all(|b| b.memory.iter().all(|x| *x == all)), "{link:?}: a list");
                    let bytes = bytes.wait().unwrap();
                    assert!((0..n).all(|r| bytes[r] == vec![r as u8; len]), "{link:?}: bytes");
                }
            }
            works(&mut comm);
            comm.barrier().wait().unwrap();
            block_on(comm.close()).unwrap();
            freed
        });
        for (i, drops) in counters.into_iter().flatten().enumerate() {
            wait_until("every buffer to be freed", || drops.load(Ordering::SeqCst) > 0);
            assert_eq!(drops.load(Ordering::SeqCst), 1, "{link:?}: buffer {i} was freed exactly once");
        }
    }
}

#[test]
fn law_2_an_error_of_a_dropped_work_is_found_by_the_next_call() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            let (buf, drops) = Watched::new(100 + comm.rank(), 1.0);
            drop(comm.all_reduce(buf));
            wait_until("the disagreement to be found", || comm.check().is_err());
            let failed = comm.all_reduce(vec![1f32; 4]).wait().unwrap_err();
            assert!(matches!(failed.error, Error::Mismatch { .. }), "{link:?}: {}", failed.error);
            assert_eq!(failed.buf, Some(vec![1f32; 4]));
            wait_until("the buffer to be freed", || drops.load(Ordering::SeqCst) == 1);
            block_on(comm.close()).expect("two calls have returned the failure");
        });
    }
}

#[test]
fn law_2_an_abort_reaches_those_who_let_go_and_those_who_wait() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| match comm.rank() {
            0 => {
                drop(comm.all_reduce(vec![1f32; 10]));
                wait_until("the abort to be heard", || comm.check().is_err());
                assert!(matches!(comm.check(), Err(Error::Aborted { by: 2, .. })));
            }
            1 => {
                let failed = comm.all_reduce(vec![1f32; 10]).wait().unwrap_err();
                assert!(matches!(failed.error, Error::Aborted { by: 2, .. }), "{link:?}: {}", failed.error);
                assert!(failed.buf.is_some());
            }
            _ => {
                thread::sleep(Duration::from_millis(20));
                comm.abort("the loss is not a number");
                let failed = comm.all_reduce(vec![1f32; 10]).wait().unwrap_err();
                assert!(failed.error.to_string().contains("not a number"));
            }
        });
    }
}

/// An abort of a child reaches a member that has sent all that the split needs of it, and has not polled the split since.
#[test]
fn law_2_an_abort_reaches_members_whose_split_is_not_done() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(3, link));
        threads(comms, move |mut comm| {
            let rank = comm.rank();
            comm.barrier().wait().unwrap();
            let mut child = if rank == 0 {
                let child = block_on(comm.dup()).unwrap();
                child.abort("planted");
                child
            } else {
                // Ranks 1 and 2 poll their split only every 120 ms, 60 ms apart: rank 0 may abort the child before either has it.
                thread::sleep(Duration::from_millis(if rank == 1 { 60 } else { 0 }));
                let mut dup = Box::pin(comm.dup());
                loop {
                    if let Poll::Ready(child) = poll_once(&mut dup) {
                        break child.unwrap();
                    }
                    thread::sleep(Duration::from_millis(120));
                }
            };
            let failed = child.timeout(SOON / 2).all_reduce(vec![1f32; 10]).wait().unwrap_err();
            assert!(matches!(failed.error, Error::Aborted { by: 0, .. }), "{link:?}: {}", failed.error);
            drop(child);
            works(&mut comm);
            block_on(comm.close()).unwrap();
        });
    }
}

/// A buffer whose owner panics when it is dropped.
struct Bomb(Vec<f32>);

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("planted: a buffer's drop");
    }
}

// SAFETY: the elements are those of the Vec inside, which stay in place when it moves, and which nothing else reaches.
unsafe impl allstream::HostMemory for Bomb {
    type Elem = f32;
    fn ptr(&self) -> *const f32 {
        self.0.as_ptr()
    }
    fn ptr_mut(&mut self) -> *mut f32 {
        self.0.as_mut_ptr()
    }
    fn count(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn a_buffer_that_panics_when_dropped_stops_nobody_else() {
    for link in LINKS {
        let comms = within(LIMIT, move || world(2, link));
        threads(comms, move |mut comm| {
            // The dropped work's buffer is dropped by the thread that finishes the operation, or by this one if it has finished already.
            let work = comm.all_reduce(Bomb(vec![1.0; 100_000]));
            let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
            works(&mut comm);
            works(&mut comm);
            block_on(comm.close()).unwrap();
        });
    }
}
